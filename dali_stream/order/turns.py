"""Which dataset each draw of a consumer is from, such that no prefix of the draws is a whole sample off the shares.

Dataset i has the share w_i, an exact ratio. Its j-th sample is one of the draws floor(j / w_i) to ceil((j + 1) / w_i) - 1, all
counted from 0. Then after every k draws its count is less than 1 away from k * w_i. Such an order exists (Tijdeman 1980, The
chairman assignment problem), and taking the sample with the earliest deadline finds it (Baruah et al. 1996, Proportionate
progress). But so all consumers would draw from the same dataset at the same time. Therefore each sample also has a preferred
time, which differs between the consumers. A draw takes the earliest preferred one with which all deadlines can still be met.

A set of samples can meet its deadlines if, for each K, no more of them are due by draw K than draws are left until then. These
are counted as far ahead as the rarest dataset comes, up to 2**20 draws. That no later deadline is missed is tested, not proved.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

HORIZON = 8192  # draws: how far ahead deadlines are looked at, at least
_FARTHEST = 1 << 20  # and at most: two bytes for each draw and consumer
_STRIDES, _GOLDEN = 64, 40503  # numbers that are tried, and 2**16 over the golden ratio, which spreads them


class Slack:
    """How many of the first K draws no sample is due in: K minus the sum of floor(K * w_i), less than the number of datasets.

    Args:
        weights: of the datasets; w_i = weights[i] / sum(weights).
        draws: the largest K that is asked for.

    Attributes:
        horizon: draws that a block has: those within which every dataset comes, up to a limit.
    """

    def __init__(self, weights: Sequence[int], draws: int) -> None:
        self._weights, self._total, self._draws = weights, sum(weights), draws
        self._blocks: dict[int, npt.NDArray[np.int64]] = {}
        self.horizon = max(HORIZON, min(-(-self._total // min(weights)), draws, _FARTHEST))

    def block(self, number: int) -> npt.NDArray[np.int64]:
        """Slack after each of `horizon` draws, the first of them K = number * horizon + 1. Shorter at the end of the draws."""
        found = self._blocks.get(number)
        if found is None:
            start = number * self.horizon
            ahead = np.arange(1, min(self.horizon, self._draws - start) + 1, dtype=np.int64)
            found = ahead.copy()
            for weight in self._weights:
                found -= (ahead * weight + start * weight % self._total) // self._total
            found += start - sum(start * weight // self._total for weight in self._weights)
            if len(self._blocks) > 3:
                del self._blocks[min(self._blocks)]
            self._blocks[number] = found
        return found


class Turns:
    """The datasets that one consumer draws from in an epoch.

    Args:
        weights: of the datasets.
        samples: how many of each dataset the consumer draws: their sum T times w_i, rounded up or down.
        preferred: per dataset, the times at which its samples are preferred, in draws, rising.
        slack: of these weights, for T draws or more.

    Attributes:
        counts: draws of each dataset so far.
        drawn: draws so far.
    """

    def __init__(
        self, weights: Sequence[int], samples: Sequence[int], preferred: Sequence[Iterator[float]], slack: Slack
    ) -> None:
        self.counts = [0] * len(weights)
        self.drawn = 0
        self._weights, self._total, self._samples, self._preferred, self._slack = (
            weights,
            sum(weights),
            samples,
            preferred,
            slack,
        )
        self._end = sum(samples)
        self._last = [0] * len(weights)  # per dataset, the deadline of the latest sample that was drawn
        self._due = [self._deadline(i, 0) for i in range(len(weights))]
        # Heaps: (preferred time, dataset), and (first draw it may have, preferred time, dataset).
        self._ready = [(self._time(i, 0), i) for i in range(len(weights)) if samples[i]]
        heapify(self._ready)
        self._waiting: list[tuple[int, float, int]] = []
        self._horizon = slack.horizon
        self._start = -self._horizon
        self._left = bytearray()

    def take(self, count: int) -> list[int]:
        """The datasets of the next `count` draws. Shorter at the end of the epoch."""
        taken: list[int] = []
        stop = min(self.drawn + count, self._end)
        while self.drawn < stop:
            if self.drawn - self._start >= self._horizon:
                self._look_ahead()
            taken += self._take(min(stop, self._start + self._horizon))
        return taken

    def _take(self, stop: int) -> list[int]:
        weights, total, samples, preferred = self._weights, self._total, self._samples, self._preferred
        counts, due, last, ready, waiting = self.counts, self._due, self._last, self._ready, self._waiting
        start, left = self._start, self._left
        view = np.frombuffer(left, np.uint8)
        taken = []
        for k in range(self.drawn, stop):
            while waiting and (waiting[0][0] <= k or not ready):
                _, time, i = heappop(waiting)
                heappush(ready, (time, i))
            chosen = heappop(ready)
            # Where nothing is left at K, only a sample with its deadline up to K leaves the others theirs.
            tight = left.find(0, k + 1 - start, due[chosen[1]] - start)
            if tight >= 0:
                passed = [chosen]
                while ready and due[passed[-1][1]] > tight + start:
                    passed.append(heappop(ready))
                chosen = min(passed, key=lambda item: due[item[1]])
                passed.remove(chosen)
                for item in passed:
                    heappush(ready, item)
                late = view[k + 1 - start : due[chosen[1]] - start]
                late += late == 0
            i = chosen[1]
            taken.append(i)
            last[i] = due[i]
            view[k + 1 - start : due[i] - start] -= 1
            j = counts[i] = counts[i] + 1
            if j < samples[i]:
                due[i] = self._deadline(i, j)
                time = next(preferred[i]) if j + 1 < samples[i] else self._time(i, j)
                released = j * total // weights[i]
                if released <= k + 1:
                    heappush(ready, (time, i))
                else:
                    heappush(waiting, (released, time, i))
        self.drawn = stop
        return taken

    def _deadline(self, i: int, j: int) -> int:
        return min(-(-(j + 1) * self._total // self._weights[i]), self._end)

    def _time(self, i: int, j: int) -> float:
        """The preferred time of a sample. Where its interval is longer than the epoch, time is stretched to end with it."""
        time, weight = next(self._preferred[i]), self._weights[i]
        if (j + 1) * self._total <= self._end * weight:
            return time
        begin = j * self._total / weight
        return begin + (time - begin) * (self._end * weight - j * self._total) / self._total

    def _look_ahead(self) -> None:
        """Counts, up to each of the next draws, those that neither samples due by then nor early ones take."""
        number = self.drawn // self._horizon
        self._start = number * self._horizon
        slack = np.concatenate([self._slack.block(number), self._slack.block(number + 1)])[: self._end - self._start - 1]
        ahead = np.bincount(np.clip(np.array(self._last) - self._start, 0, len(slack) + 1), minlength=len(slack) + 2)
        self._left = bytearray(2 * self._horizon + 1)  # from the end of the epoch on nothing is left over
        view = np.frombuffer(self._left, np.uint8)
        view[0] = 1
        early = len(self._last) - np.cumsum(ahead)
        view[1 : len(slack) + 1] = np.clip(slack - early[1 : len(slack) + 1], 0, 255)


class Pattern:
    """An order of draws that prefers no consumer, in which each sample has the earliest deadline. Consumers follow it from
    different draws on. So the draws that C consumers do at the same time are spread over the pattern, and have the shares, too.

    Args:
        weights: of the datasets.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights, self._total = weights, sum(weights)
        self._draws = [array("q") for _ in weights]  # per dataset, in which draws it comes
        self._drawn = 0
        self._ready = [(-(-self._total // weight), i) for i, weight in enumerate(weights)]
        heapify(self._ready)
        self._waiting: list[tuple[int, int, int]] = []

    def times(self, dataset: int, start: int) -> Iterator[float]:
        """When a dataset comes, counted from draw `start`."""
        draws = self._draws[dataset]
        while not draws or draws[-1] < start:
            self._grow()
        for at in count(bisect_left(draws, start)):
            while at >= len(draws):
                self._grow()
            yield draws[at] - start

    def _grow(self) -> None:
        weights, total, draws, ready, waiting = self._weights, self._total, self._draws, self._ready, self._waiting
        for k in range(self._drawn, self._drawn + 1024):
            while waiting and waiting[0][0] <= k:
                _, deadline, i = heappop(waiting)
                heappush(ready, (deadline, i))
            _, i = heappop(ready)
            draws[i].append(k)
            j = len(draws[i])
            heappush(waiting, (j * total // weights[i], -(-(j + 1) * total // weights[i]), i))
        self._drawn += 1024


def stride(weights: Sequence[int], consumers: int, largest: int) -> int:
    """The q for which the draws 0, q, 2q, ... of a pattern, one for each consumer, lie most evenly in the datasets' intervals.

    It is one of some numbers up to `largest`.
    """
    steps = np.array([(weight << 32) // sum(weights) for weight in weights])[:, None]
    starts = np.arange(consumers)
    even = (starts << 20) // consumers

    def unevenness(q: int) -> int:
        at = np.sort((starts * q * steps & 0xFFFFFFFF) >> 12, axis=1) - even
        return int(((at - at.sum(1, keepdims=True) // consumers) ** 2).sum())

    return min({1 + i * _GOLDEN % largest for i in range(_STRIDES)}, key=lambda q: (unevenness(q), q))

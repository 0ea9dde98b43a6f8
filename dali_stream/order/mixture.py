"""Which frame comes when, in a mixture of datasets: a pure function from a position of the epoch to (episode, frame).

As in `order`, position g is draw g // C of consumer g % C, and rank r serves the positions g with g % W == r. Three steps give
the frame: how many samples of each dataset each consumer draws (`quotas`), which of its draws they are (`turns`), and which
frames they are (here).

The samples of a dataset are counted over all epochs: within an epoch, first those that are their consumers' first of this
dataset, by consumer, then the second ones, and so on. F frames make a pass: samples p * F to (p + 1) * F - 1 are pass p, and
show every frame once. The episodes are permuted for each pass, laid end to end, and cut into one run for each consumer, as long
as its samples in this pass. From its run a consumer draws as in `order`, and continues in the next epoch where this one ended.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import known_arguments
from dali_stream.errors import counted
from dali_stream.order.order import EpisodePool, Permutation, Shuffle, check_order_arguments, check_world, checked_lengths
from dali_stream.order.quotas import Quotas
from dali_stream.order.rng import philox
from dali_stream.order.selected import Ranges
from dali_stream.order.shares import Shares
from dali_stream.order.turns import Pattern, Slack, Turns, stride

Int64 = npt.NDArray[np.int64]
_PASSES = 4  # of a dataset that are kept: consumers are in the same or in neighbouring ones
_PART = 4096  # frames of a run, for each segment of the pool, that are drawn before the next: a resumed run replays these only
_AHEAD = 64  # draws of a consumer at a time: each costs several calls of NumPy, however many it is
_NOTHING = np.empty(0, np.int64)
_BLOCK = 65536  # draws at a time, where they are passed over
_OFTEN = 4096  # draws within which a dataset comes, for the consumers to follow a pattern
_SPAN = 16384  # draws of the pattern on which consumers start
_SAMPLES = 1 << 62  # over all epochs


class MixtureOrder:
    """The order of one epoch of a mixture of M datasets.

    After every number of draws of every consumer, the count of each dataset is less than 1 away from its share of them. So
    after every number of positions it is less than `consumers` away, and on each of W ranks less than consumers / W. With
    `shuffle="global"` and False there are no consumers: after every number of positions the count is less than 1 away, and
    a rank's share is only near its target.

    Args:
        episode_lengths: per dataset, the sampled frames of each episode, in recorded order.
        shares: of the datasets, such as `Mixture.shares`; of as many frames as `episode_lengths` has.
        shuffle: True, every consumer draws uniformly out of a pool of episodes of each dataset; "global", one permutation of
            a dataset's frames for each pass; False, each dataset in recorded order, again and again.
        seed, epoch: as of `Order`.
        consumers: logical consumers C (only for `shuffle=True`).
        episode_pool_size: segments that a consumer draws from at a time. The datasets have them in the ratio of their
            shares, each one or more (only for `shuffle=True`).
        ranges: per dataset, the sampled frames, or None for all frames.

    Raises:
        ValueError: an argument is out of range, or the lengths are not those of the shares.
    """

    @known_arguments
    def __init__(
        self,
        episode_lengths: Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]],
        shares: Shares,
        shuffle: Shuffle = True,
        seed: int = 0,
        epoch: int = 0,
        consumers: int = 32,
        episode_pool_size: int = 8,
        ranges: Sequence[Ranges | None] | None = None,
    ) -> None:
        lengths = [checked_lengths(each) for each in episode_lengths]
        check_order_arguments(shuffle, seed, consumers, episode_pool_size)
        positions, weights = shares.epoch_samples, [int(weight) for weight in shares.weights]
        if not 0 <= epoch <= _SAMPLES // positions - 1:
            raise ValueError(f"epoch is {epoch}; it counts from 0 to {_SAMPLES // positions - 1} for {positions} positions")
        frames = [int(each.sum()) for each in lengths]
        if frames != shares.frames.tolist():
            raise ValueError(f"The datasets have {frames} frames, and the shares are of {shares.frames.tolist()}")
        if ranges is not None and len(ranges) != len(lengths):
            raise ValueError(f"ranges has {len(ranges)} entries for {counted(len(lengths), 'dataset')}; give one for each")
        seed, epoch = int(seed), int(epoch)
        self._positions, self._shuffle = positions, shuffle
        self._count = int(consumers) if shuffle is True else 1
        self._ranges = ranges
        self._first_episode = np.cumsum([0, *map(len, lengths)])
        start = int(philox("rounding", seed).random_raw()) if shuffle else 0
        quotas = Quotas(weights, positions, self._count, start)
        self._passes = [
            _Passes(i, each, quotas, shuffle, seed, epoch, pool)
            for i, (each, pool) in enumerate(zip(lengths, shares.pools(episode_pool_size), strict=True))
        ]
        self._weights, self._slack = weights, Slack(weights, quotas.draws(0))
        self._preferred = _Preferred(shuffle, seed, epoch, weights, self._count)
        self._turns: dict[int, Turns] = {}
        self._draws = quotas.draws
        self._blocks: dict[int, tuple[int, Int64, Int64]] = {}  # per consumer: the first draw, episodes and frames from it on
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._positions

    def read(
        self, start: int, count: int, rank: int = 0, world_size: int = 1
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The next `count` samples that `rank` serves at or after position `start`.

        Reading on from where the last call ended is cheap; going back replays the rank's draws from the epoch's start.

        Returns:
            (episode, frame), two int64 arrays: `episode` counts through the episodes of all datasets, laid end to end, and
            `frame` counts within the episode. Shorter than `count` at the end of the epoch.

        Raises:
            ValueError: a negative number, a rank outside the world, or a world size that does not divide `consumers`.
        """
        if start < 0 or count < 0:
            raise ValueError(f"start is {start} and count is {count}; both are 0 or more")
        check_world(rank, world_size, self._count if self._shuffle is True else None)
        first = start + (rank - start) % world_size
        samples = max(0, min(count, -(-(self._positions - first) // world_size)))
        episode, frame = np.empty((2, samples), np.int64)
        # One rank's positions visit its consumers in turn. Where there is one for all ranks, it passes over their draws.
        together = math.lcm(world_size, self._count)
        consumers, step = together // world_size, together // self._count
        with self._lock:
            for i in range(min(consumers, samples)):
                consumer, draw = (first + i * world_size) % self._count, (first + i * world_size) // self._count
                draws = len(episode[i::consumers])
                found = self._ahead(consumer, draw, draws) if step == 1 else self._draw(consumer, draw, draws, step)
                episode[i::consumers], frame[i::consumers] = found
        return episode, frame

    def _ahead(self, consumer: int, draw: int, count: int) -> tuple[Int64, Int64]:
        """(episode, frame) of `count` draws of a consumer, out of a block that is drawn at once."""
        first, episode, frame = self._blocks.get(consumer, (0, _NOTHING, _NOTHING))
        if not first <= draw <= first + len(episode):
            first, episode, frame = draw, _NOTHING, _NOTHING
        if draw + count > (end := first + len(episode)):
            more = self._draw(consumer, end, min(max(draw + count - end, _AHEAD), self._draws(consumer) - end), 1)
            episode, frame = (
                np.concatenate([old[draw - first :], new]) for old, new in zip((episode, frame), more, strict=True)
            )
            self._blocks[consumer] = first, episode, frame = draw, episode, frame
        return episode[draw - first : draw - first + count], frame[draw - first : draw - first + count]

    def _draw(self, consumer: int, draw: int, count: int, step: int) -> tuple[Int64, Int64]:
        """(episode, frame) of `count` draws of a consumer, every `step`-th from `draw` on."""
        turns = self._turns.get(consumer)
        if turns is None or turns.drawn > draw:
            samples = [int(passes.samples[consumer]) for passes in self._passes]
            turns = Turns(self._weights, samples, self._preferred.of(consumer), self._slack)
            self._turns[consumer] = turns
        while turns.drawn < draw:
            turns.take(min(draw - turns.drawn, _BLOCK))
        drawn = list(turns.counts)
        dataset = np.array(turns.take((count - 1) * step + 1), np.int64)
        number = np.empty(len(dataset), np.int64)
        for i in set(dataset.tolist()):
            at = np.flatnonzero(dataset == i)
            number[at] = np.arange(drawn[i], drawn[i] + len(at))
        dataset, number = dataset[::step], number[::step]
        episode, frame = np.empty((2, count), np.int64)
        for i in set(dataset.tolist()):
            at = np.flatnonzero(dataset == i)
            found, within = self._passes[i].episodes(*self._passes[i].places(consumer, number[at]))
            if self._ranges is not None and (frames := self._ranges[i]) is not None:
                within = frames.frames(found, within)
            episode[at], frame[at] = found + self._first_episode[i], within
        return episode, frame


class _Preferred:
    """When the samples of each dataset are preferred, of the orders that the shares leave open (see `turns`).

    With `shuffle=True`, the consumers follow one pattern, each from another draw on. Datasets that come too rarely in it have
    their own times, spread evenly over the consumers.
    """

    def __init__(self, shuffle: Shuffle, seed: int, epoch: int, weights: Sequence[int], consumers: int) -> None:
        self._shuffle, self._key = shuffle, (seed, epoch)
        self._periods = [sum(weights) / weight for weight in weights]
        if shuffle is True:
            raw = np.stack([philox("preferred", *self._key, i).random_raw(consumers + 1) for i in range(len(weights) + 1)])
            ranks = np.argsort(raw[:, :consumers], axis=1, kind="stable")
            self._phases = (ranks[1:] + _uniform(raw[1:, consumers:])) / consumers
            self._starts = (ranks[0] * stride(weights, consumers, max(1, _SPAN // consumers))).tolist()
            self._pattern = Pattern(weights)

    def of(self, consumer: int) -> list[Iterator[float]]:
        """Per dataset, the preferred times of a consumer's samples."""
        return [self._times(consumer, dataset, period) for dataset, period in enumerate(self._periods)]

    def _times(self, consumer: int, dataset: int, period: float) -> Iterator[float]:
        if self._shuffle is True and len(self._starts) > 1 and period <= _OFTEN:
            return self._pattern.times(dataset, self._starts[consumer])
        if self._shuffle == "global":  # with the same phase for all samples, a rank's draws could all be of one dataset
            phases = _endless(philox("preferred", *self._key, dataset))
        else:
            phases = repeat(float(self._phases[dataset, consumer]) if self._shuffle else 0.5)
        return ((j + phase) * period for j, phase in enumerate(phases))


def _uniform(raw: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return (raw >> np.uint64(11)) * 2.0**-53


def _endless(random: np.random.Philox) -> Iterator[float]:
    while True:
        yield from _uniform(random.random_raw(1024)).tolist()


@dataclass(frozen=True)
class _Pass:
    """One pass of a dataset.

    Attributes:
        episodes: the permuted episodes.
        ends: of the episodes, laid end to end.
        before: (C,) samples of each consumer in the passes before.
        runs: (C + 1,) bounds of the consumers' runs.
    """

    episodes: Int64
    ends: Int64
    before: Int64
    runs: Int64


class _Passes:
    """The passes of one dataset, and the samples of an epoch within them.

    Attributes:
        samples: (C,) samples of each consumer in this epoch.
    """

    def __init__(
        self, dataset: int, lengths: Int64, quotas: Quotas, shuffle: Shuffle, seed: int, epoch: int, pool: int
    ) -> None:
        self._dataset, self._lengths, self._quotas = dataset, lengths, quotas
        self._shuffle, self._seed, self._epoch, self._pool = shuffle, seed, epoch, pool
        self._frames = int(lengths.sum())
        self._ends = np.cumsum(lengths)
        self._before = quotas.before(dataset, epoch)
        self._begin = int(self._before.sum())
        self.samples = quotas.before(dataset, epoch + 1) - self._before
        self._passes: dict[int, _Pass] = {}
        self._runs: dict[int, _Run] = {}

    def places(self, consumer: int, number: Int64) -> tuple[Int64, Int64]:
        """Pass, and place on the line of that pass, of a consumer's samples of this epoch.

        With `shuffle=True`, `number` counts up by one, and every sample passed over is drawn, too.
        """
        if self._shuffle is True:
            return self._drawn(consumer, int(number[0]), len(number))
        pass_number, place = np.divmod(number + self._begin, self._frames)
        if self._shuffle == "global":
            for i in set(pass_number.tolist()):
                at = pass_number == i
                place[at] = Permutation(self._frames, (self._seed, self._dataset, i)).at(place[at])
        return pass_number, place

    def episodes(self, pass_number: Int64, place: Int64) -> tuple[Int64, Int64]:
        """(episode, frame within it) of places on the lines of their passes."""
        if self._shuffle is not True:
            episode = np.searchsorted(self._ends, place, side="right")
            return episode, place - (self._ends - self._lengths)[episode]
        episode, frame = np.empty((2, len(pass_number)), np.int64)
        for i in set(pass_number.tolist()):
            at, line = pass_number == i, self._pass(i)
            rank = np.searchsorted(line.ends, place[at], side="right")
            episode[at] = line.episodes[rank]
            frame[at] = place[at] - line.ends[rank] + self._lengths[episode[at]]
        return episode, frame

    def _drawn(self, consumer: int, number: int, count: int) -> tuple[Int64, Int64]:
        numbers: list[Int64] = []
        places: list[int] = []
        while count:
            run = self._runs.get(consumer)
            if run is None or not run.first + run.pool.drawn <= number < run.stop:
                run = self._runs[consumer] = self._run(consumer, number)
            run.pool.skip(number - run.first - run.pool.drawn)
            part = min(count, run.stop - number)
            numbers.append(np.full(part, run.pass_number))
            places += run.pool.draw(part)
            number, count = number + part, count - part
        return np.concatenate(numbers), np.array(places, np.int64)

    def _run(self, consumer: int, number: int) -> _Run:
        """The run that has a consumer's sample of this epoch, from its beginning."""
        earlier = np.minimum(self.samples, number).sum() + (self.samples[:consumer] > number).sum()
        pass_number = (self._begin + int(earlier)) // self._frames
        line = self._pass(pass_number)
        first = int(line.before[consumer] - self._before[consumer])
        start, stop = line.runs[consumer : consumer + 2].tolist()
        part, rest = divmod(number - first, _PART * self._pool)
        first, start = number - rest, start + number - rest - first
        stop = min(start + _PART * self._pool, stop)
        random = philox("consumer", self._seed, self._dataset, pass_number, consumer, part)
        return _Run(pass_number, first, first + stop - start, EpisodePool(line.ends, (start, stop), random, self._pool))

    def _pass(self, pass_number: int) -> _Pass:
        found = self._passes.pop(pass_number, None)
        if found is None:
            random = philox("episodes", self._seed, self._dataset, pass_number)
            episodes = np.argsort(random.random_raw(len(self._lengths)), kind="stable")
            before = self._before_sample(pass_number * self._frames)
            samples = self._before_sample((pass_number + 1) * self._frames) - before
            runs = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples)])
            found = _Pass(episodes, np.cumsum(self._lengths[episodes]), before, runs)
            if len(self._passes) >= _PASSES:
                del self._passes[next(iter(self._passes))]
        self._passes[pass_number] = found  # the latest one last
        return found

    def _before_sample(self, sample: int) -> Int64:
        """(C,) samples of each consumer before this one of the dataset, counted over all epochs."""
        before, samples = self._before, self.samples
        if not 0 <= sample - self._begin <= samples.sum():
            epoch = self._quotas.epoch_of(self._dataset, sample)
            before, samples = self._quotas.before(self._dataset, epoch), self._quotas.of(self._dataset, epoch)
        left = sample - int(before.sum())
        drawn = np.full(len(samples), min(left // len(samples), int(samples.min())))
        while (rest := left - int(drawn.sum())) > 0:
            drawn[np.flatnonzero(samples > drawn)[:rest]] += 1
        return before + drawn


@dataclass(frozen=True)
class _Run:
    """A part of a consumer's run in one pass. It has the consumer's samples `first` to `stop` - 1 of the epoch.

    `first` is below 0 where the part began in an earlier epoch.
    """

    pass_number: int
    first: int
    stop: int
    pool: EpisodePool

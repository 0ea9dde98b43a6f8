"""How many samples of each dataset each consumer draws, in an epoch and in all epochs before it.

With T positions and C consumers, consumer c has T // C draws, and one more if c < T % C. Those with as many draws, n of them
with K draws each, share a line of n * K places, on which dataset i has about n * K * w_i neighbouring places; the q-th of these
consumers draws the samples of the places q, q + n, q + 2n, ... The datasets lie on the line in the order in which k * w_i last
reached a whole number before k = K, the latest first. Then the order that `turns` promises exists for every consumer: of the
datasets that reach a whole number late, only as many get the sample that begins there as draws are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Node = tuple[str, int]
_Q = 1 << 64
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


class Quotas:
    """Samples of each dataset and consumer, by epoch.

    Where n * K * w_i is no whole number, an epoch has it rounded up or down: the ends G of the datasets on the line are
    floor(G + delta), with one delta in [0, 1) for each epoch e, (start + e * step) modulo 1. So epochs are counted without
    going through them, and after many of them the sums are near their targets.

    Args:
        weights: of the datasets, as of `Shares`.
        positions: T, of an epoch.
        consumers: C.
        start: of delta, in units of 2**-64.
    """

    def __init__(self, weights: Sequence[int], positions: int, consumers: int, start: int) -> None:
        self._weights, self._total = weights, sum(weights)
        self.positions, self.consumers, self._start = positions, consumers, start
        short, longer = divmod(positions, consumers)
        groups = [(draws, count) for draws, count in ((short + 1, longer), (short, consumers - longer)) if count]
        lines = [_Line(weights, draws, count) for draws, count in groups]
        if len(lines) == 2 and positions == self._total:  # every epoch has exactly `weights`
            first = _split(weights, *lines)
            lines[0].fix(first)
            lines[1].fix([weight - some for weight, some in zip(weights, first, strict=True)])
        self._lines = lines

    def draws(self, consumer: int) -> int:
        """Draws of a consumer in each epoch."""
        return (self.positions - consumer + self.consumers - 1) // self.consumers

    def of(self, dataset: int, epoch: int) -> Int64:
        """(C,) samples of a dataset in an epoch."""
        return self.before(dataset, epoch + 1) - self.before(dataset, epoch)

    def before(self, dataset: int, epoch: int) -> Int64:
        """(C,) samples of a dataset in all epochs before this one."""
        return np.concatenate([line.before(dataset, epoch, self._start) for line in self._lines])

    def epoch_of(self, dataset: int, sample: int) -> int:
        """The epoch that has this sample of a dataset, counted over all epochs."""
        low = high = sample * self._total // (self.positions * self._weights[dataset])
        step = 1
        while low and self._begins(dataset, low) > sample:
            low, step = max(low - step, 0), 2 * step
        step = 1
        while self._begins(dataset, high) <= sample:
            high, step = high + step, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._begins(dataset, middle) <= sample else (low, middle)
        return low

    def _begins(self, dataset: int, epoch: int) -> int:
        return int(self.before(dataset, epoch).sum())


class _Line:
    """The places of `count` consumers with `draws` draws each, and the datasets on them, epoch by epoch."""

    def __init__(self, weights: Sequence[int], draws: int, count: int) -> None:
        self._count, self._total = count, sum(weights)
        self.order = sorted(range(len(weights)), key=lambda i: Fraction(draws * weights[i] % self._total, weights[i]))
        self._rank = {dataset: rank for rank, dataset in enumerate(self.order)}
        self.sizes = [count * draws * weight for weight in weights]  # in units of 1 / total
        self._ends = [0, *accumulate(self.sizes[dataset] for dataset in self.order)]

    def fix(self, sizes: Sequence[int]) -> None:
        """Makes them these whole numbers of places, in all epochs."""
        self._ends = [0, *accumulate(sizes[dataset] * self._total for dataset in self.order)]

    def before(self, dataset: int, epoch: int, start: int) -> Int64:
        """(count,) samples of a dataset in all epochs before this one."""
        rank = self._rank[dataset]
        return self._up_to(self._ends[rank + 1], epoch, start) - self._up_to(self._ends[rank], epoch, start)

    def _up_to(self, end: int, epoch: int, start: int) -> Int64:
        whole, rest = divmod(end, self._total)
        consumer = np.arange(self._count, dtype=np.int64)
        samples = (whole - consumer + self._count - 1) // self._count * epoch
        part = rest * _Q // self._total
        if part:  # in some epochs it ends one place later
            later = _floor_sum(epoch, _Q, _STEP, start + part) - _floor_sum(epoch, _Q, _STEP, start)
            samples[whole % self._count] += later
        return samples


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of (a * i + b) // m for i from 0 to n - 1, by Euclid's algorithm (as in the AtCoder Library)."""
    found = 0
    while True:
        found += n * (n - 1) // 2 * (a // m) + n * (b // m)
        top = a % m * n + b % m
        if top < m:
            return found
        n, m, a, b = top // m, a % m, m, top % m


def _split(weights: Sequence[int], first: _Line, second: _Line) -> list[int]:
    """How many of each dataset's `weights` samples are on the first line, the others being on the second.

    The sizes of the datasets and their ends are what the shares give, rounded up or down, on either line in its own order.
    The fractions of the sizes, laid end to end in the order of a line, touch units of it; each unit needs one dataset that
    rounds up and touches it. Since the fractions themselves fill the units of both lines, whole datasets can as well: a flow
    from the units of one line through the datasets to the units of the other has whole numbers.
    """
    total = sum(weights)
    fractions = [size % total for size in first.sizes]
    edges: dict[Node, dict[Node, None]] = {("source", 0): {}}  # dicts as ordered sets: the flow is the same everywhere

    def connect(start: Node, end: Node) -> None:
        edges.setdefault(start, {})[end] = None
        edges.setdefault(end, {})

    source, sink = ("source", 0), ("sink", 0)
    for name, line in (("first", first), ("second", second)):
        end = 0
        for i in line.order:
            begin, end = end, end + fractions[i]
            for unit in range(begin // total, -(-end // total) if fractions[i] else 0):
                if name == "first":
                    connect(source, (name, unit))
                    connect((name, unit), ("in", i))
                else:
                    connect(("out", i), (name, unit))
                    connect((name, unit), sink)
    for i in range(len(weights)):
        connect(("in", i), ("out", i))
    while path := _path(edges, source, sink):
        for node, following in pairwise(path):
            del edges[node][following]
            edges[following][node] = None
    return [size // total + (("out", i) not in edges[("in", i)]) for i, size in enumerate(first.sizes)]


def _path(edges: Mapping[Node, Mapping[Node, None]], source: Node, sink: Node) -> list[Node]:
    """The nodes from source to sink, along edges. Empty where no way is left."""
    before = {source: source}
    stack = [source]
    while stack:
        node = stack.pop()
        if node == sink:
            path = [sink]
            while path[-1] != source:
                path.append(before[path[-1]])
            return path[::-1]
        for end in edges[node]:
            if end not in before:
                before[end] = node
                stack.append(end)
    return []

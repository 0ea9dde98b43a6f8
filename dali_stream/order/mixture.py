"""Order of a mixture of datasets: a pure function from a position of the epoch to (episode, frame).

Consumers and ranks share the positions in the same way as in `order`: position g is a draw of consumer g % C, and rank r serves
the positions g with g % W == r. The frame of a position is computed in three steps:

1. `interleave` returns the dataset of the position, and the number of the sample among the consumer's samples of this dataset.
2. The samples of a dataset are assigned to the consumers in turn, which gives each sample its number among all samples of the
   dataset, over all epochs. A pass consists of F consecutive samples, where F is the number of frames of the dataset: samples
   p * F to (p + 1) * F - 1 are pass p, and contain every frame once.
3. The episodes are permuted for each pass, laid end to end, and cut into one run for each consumer. The length of a run is the
   number of the consumer's samples in this pass. A consumer draws from its run as in `order`. In the next epoch, it continues
   after its last draw of this epoch.

With `shuffle="sharded"`, step 3 permutes the episodes once for all passes. The number of a consumer's samples may differ
between passes, so its run has as many frames as it has samples in every pass. The frames after the last run are divided in each
pass among the consumers that have more samples.

With shares of the kinds "union" and "repeats", every epoch has the same whole number of samples of each dataset. Positions are
then counted from the beginning of the epoch. The samples of an epoch are laid end to end, dataset after dataset, and consumer
s % C gets sample s. The weights of a consumer are the numbers of samples that it gets of each dataset. With the other kinds of
shares, positions are counted over all epochs, and all consumers have the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import known_arguments
from dali_stream.checks.arrays import Int64
from dali_stream.errors import counted
from dali_stream.order.interleave import Interleave
from dali_stream.order.order import (
    EpochOrder,
    Permutation,
    Shuffle,
    check_order_arguments,
    checked_lengths,
    dealt,
    has_consumers,
)
from dali_stream.order.pool import Run
from dali_stream.order.rng import mix, philox
from dali_stream.order.selected import Ranges, in_ranges
from dali_stream.order.shard import Pieces, Shard, pieces
from dali_stream.order.shares import Shares

_SAMPLES = 1 << 62  # maximum number of positions of all epochs together
_WINDOW = 64  # shuffle="global" permutes this many positions together; otherwise one rank could get a whole dataset
_PASSES = 16  # number of passes of a dataset to cache, which is enough because consumers are in the same or adjacent passes


class MixtureOrder(EpochOrder):
    """Order of one epoch of a mixture of M datasets.

    After any number of draws of a consumer, the number of samples of each dataset deviates from its share by about 2 or less
    (see `interleave` for the bound). The deviations of different consumers mostly cancel. With `shuffle="global"` or False, the
    order has no consumers. The deviation is then about 1, after every 64 positions for "global" and after every position for
    False.

    With `shuffle="sharded"`, a consumer has the same frames of a dataset in all passes, except for fewer than 2 C frames of
    each dataset, which are divided among the consumers in each pass.

    Args:
        episode_lengths: Number of sampled frames of each episode, in recorded order, for each dataset.
        shares: Shares of the datasets, such as `Mixture.shares`, for the same numbers of frames as `episode_lengths`.
        shuffle: True lets every consumer draw uniformly from a pool of episodes of each dataset, "sharded" does the same with
            the same frames for a consumer in all passes, "global" permutes all frames of a dataset for each pass, and False
            repeats each dataset in recorded order. Default: True.
        seed: Seed of the random numbers. Default: 0.
        epoch: Number of the epoch, from 0. Default: 0.
        consumers: Number of logical consumers C. "global" and False ignore it. Default: 32.
        episode_pool_size: Number of segments (see `Order`) that a consumer draws from at a time. They are divided among the
            datasets in the ratio of their shares, with at least one for each dataset. "global" and False ignore it. Default: 8.
        ranges: Sampled frames of each dataset, or None for all frames. Default: all frames of all datasets.

    Raises:
        ValueError: If an argument is out of range, or if `episode_lengths` and `shares` have different numbers of frames.
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
        positions = shares.epoch_samples
        if not 0 <= epoch <= _SAMPLES // positions - 1:
            raise ValueError(f"epoch must be from 0 to {_SAMPLES // positions - 1} for {positions} positions, got {epoch}")
        frames = [int(each.sum()) for each in lengths]
        if frames != shares.frames.tolist():
            raise ValueError(f"episode_lengths must have {shares.frames.tolist()} frames per dataset, as shares, got {frames}")
        if ranges is not None and len(ranges) != len(lengths):
            raise ValueError(f"ranges must have one entry for each of {counted(len(lengths), 'dataset')}, got {len(ranges)}")
        super().__init__(positions, int(consumers) if has_consumers(shuffle) else None)
        self._shuffle, self._seed = shuffle, int(seed)
        self._count = self._consumers or 1
        self._ranges = ranges
        self._first_episode = np.cumsum([0, *map(len, lengths)])
        whole = shares.kind in ("union", "repeats")  # positions are counted from the beginning of the epoch
        self._epoch, self._start = (int(epoch), 0) if whole else (0, int(epoch) * positions)
        before = np.cumsum(shares.weights) - shares.weights if whole else 0 * shares.weights
        samples = shares.weights if whole else 0 * shares.weights + _SAMPLES
        pools = shares.pools(episode_pool_size)
        numbers = [_Numbers(self._count, *each) for each in zip(before.tolist(), samples.tolist(), strict=True)]
        # Two consumers may differ by one sample of a dataset. With separate weights, each draws exactly its own samples.
        weights = np.stack([each.samples for each in numbers], 1) if whole else np.tile(shares.weights, (self._count, 1))
        self._interleave = Interleave(weights, self._seed)
        self._datasets = [_Dataset((self._seed, i), lengths[i], numbers[i], shuffle, pools[i]) for i in range(len(lengths))]

    def _samples(self, positions: Int64) -> Int64:
        if self._shuffle == "global":
            positions = self._permuted(positions)
        draw, consumer = np.divmod(positions + self._start, self._count)
        dataset, number = self._interleave.at(consumer, draw)
        samples = np.empty((2, len(positions)), np.int64)
        # The positions are grouped to call each dataset only once. They stay in order within a group, as the pools require.
        for i in np.unique(dataset).tolist():
            at = np.flatnonzero(dataset == i)
            episode, frame = self._datasets[i].frames(consumer[at], self._epoch, number[at])
            if self._ranges is not None and (frames := self._ranges[i]) is not None:
                frame = frames.frames(episode, frame)
            samples[:, at] = episode + self._first_episode[i], frame
        return samples

    def _shard(self, consumers: Int64) -> Pieces | None:
        if self._shuffle != "sharded":
            return None
        found = []
        for i, dataset in enumerate(self._datasets):
            own = dataset.shard(consumers)
            if self._ranges is not None and (frames := self._ranges[i]) is not None:
                own = in_ranges(own, frames)
            found.append(own._replace(episode=own.episode + self._first_episode[i]))
        return Pieces(*map(np.concatenate, zip(*found, strict=True)))

    def _permuted(self, position: Int64) -> Int64:
        """Permute positions within windows of `_WINDOW`. The last window of the epoch may be shorter."""
        window, within = np.divmod(position, _WINDOW)
        windows, row = np.unique(window, return_inverse=True)
        places = windows[:, None] * _WINDOW + np.arange(_WINDOW)
        # If positions are counted over all epochs, `_epoch` is always 0, and `_start` distinguishes the epochs.
        key = np.uint64(philox("windows", self._seed, self._epoch, self._start).random_raw())
        raw = mix(mix(places.astype(np.uint64)) + key)
        raw[places >= len(self)] = np.uint64(2**64 - 1)  # places after the end of the epoch are sorted last
        permuted: Int64 = window * _WINDOW + np.argsort(raw, axis=1, kind="stable")[row, within]
        return permuted


class _Numbers:
    """Numbering of the samples of a dataset over all epochs. Consecutive samples belong to the consumers in turn.

    Args:
        consumers: Number of consumers C.
        before: Number of samples of an epoch that precede those of this dataset, if the datasets are laid end to end.
        epoch: Number of samples of the dataset in each epoch.

    Attributes:
        samples: Number of samples of each consumer in an epoch, shape (C,).
    """

    def __init__(self, consumers: int, before: int, epoch: int) -> None:
        self._consumers, self._epoch = consumers, epoch
        self._first = (np.arange(consumers, dtype=np.int64) - before) % consumers
        self.samples = self._of_epoch(epoch)

    def of(self, consumer: Int64, epoch: int, sample: Int64) -> Int64:
        """Convert numbers of samples, counted by consumer within an epoch, to numbers over all epochs."""
        return epoch * self._epoch + sample * self._consumers + self._first[consumer]

    def before(self, number: int) -> Int64:
        """Return the number of samples of each consumer before the sample with this number, shape (C,)."""
        epochs, rest = divmod(number, self._epoch)
        return epochs * self.samples + self._of_epoch(rest)

    def least(self, count: int) -> Int64:
        """Return a number of samples that each consumer has at least in every pass of `count` samples, shape (C,).

        All passes begin at multiples of `count`. The number is exact unless passes contain the end of an epoch.
        """
        epochs, rest = divmod(count, self._epoch)
        # The consumers take turns within an epoch, so `rest` consecutive samples are rest // C of each consumer, and at most
        # one more. Each epoch begins with the same consumer, so a pass that contains its end may have one less.
        ends_within = rest > 0 and self._epoch % count > 0 and self._epoch < _SAMPLES
        return epochs * self.samples + max(rest // self._consumers - ends_within, 0)

    def _of_epoch(self, number: int) -> Int64:
        """Return the number of samples of each consumer among the first `number` samples of an epoch, shape (C,)."""
        return np.maximum(-((self._first - number) // self._consumers), 0)


class _Pass(NamedTuple):
    """Episodes of a pass, laid end to end.

    Attributes:
        episodes: Numbers of the episodes in the order of the pass, permuted if the order has consumers, shape (E,).
        ends: Number of frames up to the end of each of these episodes, shape (E,).
        before: Number of samples of each consumer in earlier passes, shape (C,).
        runs: Bounds of the consumers' runs, shape (C + 1,).
        more: Bounds of the further places that each consumer draws in this pass, shape (C + 1,).
    """

    episodes: Int64
    ends: Int64
    before: Int64
    runs: Int64
    more: Int64


class _Dataset:
    """Samples of one dataset, in consecutive passes."""

    def __init__(self, key: tuple[int, int], lengths: Int64, numbers: _Numbers, shuffle: Shuffle, pool: int) -> None:
        self._key, self._lengths, self._numbers, self._shuffle, self._pool = key, lengths, numbers, shuffle, pool
        self._count = int(lengths.sum())
        self._recorded = self._line(np.arange(len(lengths)), 0)
        self._passes: dict[int, _Pass] = {}
        self._runs: dict[int, tuple[int, Run | Shard]] = {}  # number of the current pass of each consumer, and its run

    def frames(self, consumer: Int64, epoch: int, sample: Int64) -> tuple[Int64, Int64]:
        """Return (episode, frame) of some samples. If the order has consumers, those of each must be consecutive."""
        passes, place = np.divmod(self._numbers.of(consumer, epoch, sample), self._count)
        if self._shuffle is False:
            return self._on_line(self._recorded, place)
        episode, frame = np.empty((2, len(sample)), np.int64)
        for number in np.unique(passes).tolist():
            at = np.flatnonzero(passes == number)
            if has_consumers(self._shuffle):
                line = self._pass(number)
                # A run counts its draws from the beginning of the pass, which may be in an earlier epoch.
                draw = epoch * self._numbers.samples[consumer[at]] + sample[at] - line.before[consumer[at]]
                drawn = self._drawn(number, consumer[at], draw)
            else:
                line, drawn = self._recorded, Permutation(self._count, (*self._key, number)).at(place[at])
            episode[at], frame[at] = self._on_line(line, drawn)
        return episode, frame

    def shard(self, consumers: Int64) -> Pieces:
        """Return the frames that some consumers sample in every pass, and those that are divided in each pass."""
        line = self._pass(0)
        start, stop = (np.append(line.runs[consumers + more], line.more[-more]) for more in (0, 1))
        return pieces(line.episodes, line.ends - self._lengths[line.episodes], line.ends, start, stop)

    def _drawn(self, number: int, consumer: Int64, draw: Int64) -> Int64:
        """Return the places of draws on the line of a pass."""
        place = np.empty(len(draw), np.int64)
        # The stable sort groups the draws by consumer and keeps them consecutive, so that no pool restarts.
        order = np.argsort(consumer, kind="stable")
        bounds = [0, *(np.flatnonzero(np.diff(consumer[order])) + 1).tolist(), len(order)]
        for begin, end in pairwise(bounds):
            at = order[begin:end]
            place[at] = self._run(int(consumer[at[0]]), number).draw(int(draw[at[0]]), len(at))
        return place

    def _on_line(self, line: _Pass, place: Int64) -> tuple[Int64, Int64]:
        """Return (episode, frame) of places in the episodes of a pass laid end to end."""
        at = np.searchsorted(line.ends, place, side="right")
        episode = line.episodes[at]
        return episode, place - line.ends[at] + self._lengths[episode]

    def _line(self, episodes: Int64, number: int) -> _Pass:
        """Return pass `number` with the episodes in the given order."""
        before = self._numbers.before(number * self._count)
        samples = self._numbers.before((number + 1) * self._count) - before
        run = self._numbers.least(self._count) if self._shuffle == "sharded" else samples
        runs, more = (np.concatenate([[0], np.cumsum(each)]) for each in (run, samples - run))
        return _Pass(episodes, np.cumsum(self._lengths[episodes]), before, runs, more + runs[-1])

    def _pass(self, number: int) -> _Pass:
        if number not in self._passes:
            if len(self._passes) == _PASSES:
                del self._passes[min(self._passes)]
            self._passes[number] = self._line(dealt(len(self._lengths), self._shuffle, self._key, number), number)
        return self._passes[number]

    def _run(self, consumer: int, number: int) -> Run | Shard:
        if consumer not in self._runs or self._runs[consumer][0] != number:
            line = self._pass(number)
            (start, stop), more = (bounds[consumer : consumer + 2].tolist() for bounds in (line.runs, line.more))
            arguments = line.ends, start, stop, (*self._key, number, consumer), self._pool, consumer, len(line.before)
            run = Shard(*arguments, more) if self._shuffle == "sharded" else Run(*arguments)
            self._runs[consumer] = number, run
        return self._runs[consumer][1]

"""Samples of the batches, the frames that they show, and the next uses of these frames.

Batches ahead are those that have been read from the order but not planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64, Mask
from dali_stream.order.batches import Batches
from dali_stream.order.order import EpochOrder
from dali_stream.order.shard import Pieces
from dali_stream.order.windows import window
from dali_stream.schedule.episodes import EpisodeTable


class Samples(NamedTuple):
    """Samples of one rank's batch.

    Attributes:
        number: Number of the batch, counted over all epochs. The first batch of the iterator has number 0.
        epoch: Epoch of the batch.
        position: Position of each sample in the epoch's order, shape (B,).
        episode: Episode of each sample, as an index into the selected episodes, shape (B,).
        frame: Frame of each sample within its episode, shape (B,).
        padded: Number of samples at the end of the batch that were added to fill it.
    """

    number: int
    epoch: int
    position: Int64
    episode: Int64
    frame: Int64
    padded: int


def batches_of_rank(
    order: Callable[[int], EpochOrder], batches: Batches, rank: int, epoch: int, position: int
) -> Iterator[Samples]:
    """Yield the batches of a rank from a position of an epoch, and then those of all later epochs. The iterator never ends.

    Args:
        order: Function from an epoch to its order.
        batches: Division of an epoch into global batches.
        rank: Rank whose share of each global batch is yielded.
        epoch: Epoch of the first batch.
        position: Position in that epoch at which the first batch begins.
    """
    world, number = batches.world_size, 0
    for now in itertools.count(epoch):
        current = order(now)
        while batches.count(position):
            start, stop = batches.span(position)
            places = np.arange(batches.first(start, rank), stop, world)
            episode, frame = current.read(start, len(places), rank, world)
            padded = batches.batch_size - len(places) if batches.last_batch == "pad" else 0
            if padded:  # pad with the rank's first samples of the epoch, repeated if they are too few
                # A rank has no sample if there are fewer samples than ranks. It then gets those of all ranks.
                own, ranks = (rank, world) if rank < batches.frames else (0, 1)
                again = current.read(0, padded, own, ranks)
                more = (own + ranks * np.arange(len(again[0])), *again)
                places, episode, frame = (
                    np.append(a, np.resize(b, padded)) for a, b in zip((places, episode, frame), more, strict=True)
                )
            yield Samples(number, now, places, episode, frame, padded)
            number, position = number + 1, stop
        position = 0


NEVER = np.iinfo(np.int64).max  # next use of a frame that is not shown by any batch read so far
_BATCH = (1 << 32) - 1  # mask of the bits of a use that hold the number of the batch


class Uses:
    """Uses of frames by the batches ahead.

    A use is one number: frame · 2^32 + batch. Uses are stored in sorted arrays, called runs, so that a binary search finds the
    next use of a frame. Each batch is added as a new run. Inserting it into one large array would copy that array for each
    batch. Instead, a new run is merged with previous runs that are not longer, so the number of runs grows logarithmically.
    """

    def __init__(self) -> None:
        self._runs: list[Int64] = []  # all batches of a run are earlier than those of the next run

    def add(self, batch: int, frames: Int64, now: int) -> None:
        """Add the next batch. Uses by batches that have been planned are dropped when runs are merged.

        Args:
            batch: Number of the batch, one more than that of the batch that was added before.
            frames: Frames that it shows, in increasing order.
            now: Number of the batch that was planned last.
        """
        run = frames << 32 | batch
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.concatenate([self._runs.pop(), run])
            # For int64, NumPy's stable sort is Timsort, which merges the two sorted runs in linear time.
            run = np.sort(run[run & _BATCH > now], kind="stable")
        self._runs.append(run)

    def next(self, frames: Int64, now: int) -> Int64:
        """Return the first batch after `now` that shows each frame, or `NEVER`."""
        next_use = np.full(len(frames), NEVER, np.int64)
        wanted = frames << 32 | now + 1
        for run in reversed(self._runs):  # from the latest batches to the earliest, so that the first use overwrites later ones
            if len(run):  # a merge may have dropped all uses of a run
                # If a frame is after all uses, the index is clipped to the last one, which is less than `wanted`: no hit.
                use = run[np.minimum(np.searchsorted(run, wanted), len(run) - 1)]
                hit = (use >> 32 == frames) & (use >= wanted)
                next_use[hit] = use[hit] & _BATCH
        return next_use


class Shown(NamedTuple):
    """Frames that a batch shows through a window.

    Attributes:
        frames: Frames numbered over all episodes, shape (B, T). Steps outside the episode show its first or last frame.
        is_pad: Whether each step is outside the episode, bool of shape (B, T).
    """

    frames: Int64
    is_pad: npt.NDArray[np.bool_]


class Window:
    """Window of frames around each sample, shared by all cameras with the same offsets.

    Args:
        table: Table of the open episodes.
        offsets: Frame offsets, shape (T,), or (M, T) for M datasets.
        dataset_of: Dataset of each episode, shape (E,). Ignored if M is 1.

    Attributes:
        offsets: Frame offsets, shape (M, T), with M = 1 for one dataset.
        uses: Uses of frames through this window by the batches ahead.
    """

    def __init__(self, table: EpisodeTable, offsets: Int64, dataset_of: Int64 | None) -> None:
        self._table, self.offsets = table, np.atleast_2d(offsets)
        self._dataset_of = None if len(self.offsets) == 1 else dataset_of
        self.uses = Uses()

    def shown(self, samples: Samples) -> Shown:
        """Return the frames that a batch shows."""
        offsets = self.offsets[0] if self._dataset_of is None else self.offsets[self._dataset_of[samples.episode]]
        frames, is_pad = window(offsets, samples.frame, self._table.lengths[samples.episode])
        return Shown(self._table.first_frame[samples.episode][:, None] + frames, is_pad)


def nearest(next_use: Int64, room: int, sizes: Int64 | None = None) -> npt.NDArray[np.bool_]:
    """Return which items to keep: those with the nearest next uses (Belady 1966, "A study of replacement algorithms").

    Args:
        next_use: Batch that uses each item next, shape (n,).
        room: Maximum total size of the items to keep.
        sizes: Size of each item, shape (n,). None if each has size 1.

    Returns:
        Mask of the items to keep, shape (n,).
    """
    keep = np.zeros(len(next_use), np.bool_)
    if sizes is not None:
        # Items are kept in the order of their next uses, up to the first one that does not fit. A later item is not kept even
        # if it is small enough, since it is used later.
        order = np.argsort(next_use, kind="stable")
        keep[order] = np.cumsum(sizes[order]) <= room
    elif room >= len(next_use):
        keep[:] = True
    elif room > 0:
        # Items of equal size need no sorting, only a partition, which takes linear time. Which of several equal values
        # `argpartition` returns depends on the processor, so the first of them are kept: a plan is the same on all machines.
        last = np.partition(next_use, room - 1)[room - 1]
        keep = next_use < last
        keep[np.flatnonzero(next_use == last)[: room - np.count_nonzero(keep)]] = True
    return keep


class FrameSet:
    """Set of frames, numbered over all episodes.

    Args:
        starts, stops: First frame of each interval of the set, and the frame after its last, shape (n,). Intervals may overlap.

    Attributes:
        starts, stops: The same without overlaps, in increasing order.
    """

    def __init__(self, starts: Int64, stops: Int64) -> None:
        order = np.argsort(starts, kind="stable")
        starts, reached = starts[order], np.maximum.accumulate(stops[order])
        begins = np.flatnonzero(np.append(True, starts[1:] > reached[:-1])[: len(starts)])  # where a gap precedes an interval
        ends = np.append(begins[1:], len(starts))[: len(begins)] - 1
        self.starts, self.stops = starts[begins], reached[ends]
        self._count = int((self.stops - self.starts).sum())

    def __len__(self) -> int:
        """Number of frames."""
        return self._count

    def has(self, frames: Int64) -> Mask:
        """Return which frames are in the set."""
        interval = np.searchsorted(self.starts, frames, side="right") - 1
        has: Mask = frames < np.append(self.stops, 0)[interval]  # a frame before all intervals has interval -1
        return has


def shown_frames(pieces: Pieces, offsets: Int64, lengths: Int64, dataset_of: Int64) -> FrameSet:
    """Return the frames that the windows of some samples show.

    Args:
        pieces: Ranges of the sampled frames within their episodes.
        offsets: Frame offsets of the window, shape (M, T), with M = 1 for one window for all datasets.
        lengths: Number of frames of each episode, shape (E,).
        dataset_of: Dataset of each episode, shape (E,). Ignored if M is 1.
    """
    first_frame, starts, stops = np.cumsum(lengths) - lengths, [], []
    for dataset, own in enumerate(offsets):
        episode, start, stop = pieces
        if len(offsets) > 1:
            episode, start, stop = (values[dataset_of[episode] == dataset] for values in pieces)
        last, steps = lengths[episode] - 1, np.unique(own)
        # Adjacent offsets, such as 0 to 15, are handled together: the frames that they show are adjacent as well.
        edges = np.flatnonzero(np.diff(steps) > 1) + 1
        for adjacent in np.split(steps, edges):
            starts.append(first_frame[episode] + np.clip(start + adjacent[0], 0, last))
            stops.append(first_frame[episode] + np.clip(stop - 1 + adjacent[-1], 0, last) + 1)
    return FrameSet(np.concatenate(starts), np.concatenate(stops))

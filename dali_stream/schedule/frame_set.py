"""Set of the frames that a rank needs, if it has the same frames in all epochs."""

from __future__ import annotations

import numpy as np

from dali_stream.checks.arrays import Int64, Mask
from dali_stream.order.shard import Pieces


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

"""Next uses of frames by the batches ahead, which have been read from the order but not planned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.order.windows import window
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.samples import Samples

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

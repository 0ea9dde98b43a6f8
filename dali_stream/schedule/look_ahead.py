"""The batches ahead, as far as the order has been read, and when each frame is shown next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dali_stream.order.windows import window
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.samples import Samples

Int64 = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max  # later than what has been read of the order
_BATCH = (1 << 32) - 1  # bits of a use that hold the number of the batch


class Uses:
    """The uses of frames by the batches ahead.

    A use is one number: the frame in the upper bits, and the batch in the lower 32. Uses lie in sorted runs, so that a binary
    search finds the next use of a frame. A batch is added as a run of its own, and runs of equal length are merged.
    """

    def __init__(self) -> None:
        self._runs: list[Int64] = []  # the batches of each run come before those of the next

    def add(self, batch: int, frames: Int64, now: int) -> None:
        """Add a batch, the one after the last that was added. Batches up to `now` have passed.

        Args:
            batch: Number of the batch.
            frames: Frames that it shows, increasing.
            now: Number of the batch that was planned last.
        """
        run = frames << 32 | batch
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.concatenate([self._runs.pop(), run])
            run = np.sort(run[run & _BATCH > now], kind="stable")
        self._runs.append(run)

    def next(self, frames: Int64, now: int) -> Int64:
        """Return the first batch after `now` that shows each frame, or `NEVER`."""
        found = np.full(len(frames), NEVER, np.int64)
        wanted = frames << 32 | now + 1
        for run in reversed(self._runs):  # so that the soonest use is written last
            if len(run):
                use = run[np.minimum(np.searchsorted(run, wanted), len(run) - 1)]
                hit = (use >> 32 == frames) & (use >= wanted)
                found[hit] = use[hit] & _BATCH
        return found


class Window:
    """A window of frames that cameras have in common.

    Args:
        table: Episodes.
        offsets: Frame offsets, shape (T,), or (M, T) for M datasets.
        dataset_of: Dataset of each episode, shape (E,). None if there is one.

    Attributes:
        offsets: See above.
        uses: Uses of frames through this window by the batches ahead.
    """

    def __init__(self, table: EpisodeTable, offsets: Int64, dataset_of: Int64 | None) -> None:
        self._table, self.offsets = table, np.atleast_2d(offsets)
        self._dataset_of = None if len(self.offsets) == 1 else dataset_of
        self.uses = Uses()

    def frames(self, samples: Samples) -> Int64:
        """Return the frames that a batch shows, shape (B, T), numbered over all episodes."""
        offsets = self.offsets[0] if self._dataset_of is None else self.offsets[self._dataset_of[samples.episode]]
        frames, _ = window(offsets, samples.frame, self._table.lengths[samples.episode])
        return self._table.first_frame[samples.episode][:, None] + frames

"""How `memory_budget` is divided, and whether it holds one batch.

Rows, indices and, of remote data, encoded video get what the episodes in use need of them, but no more than half of the budget
unless one batch needs more. Decoded frames get the rest. If all of these fit, what they leave goes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.video import BLOCK

if TYPE_CHECKING:
    from dali_stream.mp4.index import VideoIndex

Int64 = npt.NDArray[np.int64]
LOOK_AHEAD = 4096  # samples of a rank whose bytes are fetched ahead: some seconds of decoding
_INDEX_SPARE = 3, 2  # memory of indices in use, as a fraction of theirs: those of some files compress less
ROW_SPARE = 5, 4  # memory of rows in use, as a fraction of theirs: the table of open episodes has free rows


class Parts(NamedTuple):
    """How `memory_budget` is divided. Where some frames are kept and not all, the rest is for those of batches in progress.

    Attributes:
        encoded: bytes for rows, indices and, of remote data, encoded video.
        opened: bytes of that for rows and indices, unless one batch needs more.
        indices: bytes of that for indices.
        frames: decoded frames of each camera that may be kept for later batches.
        frame_bytes: of one decoded frame of each camera.
        block: bytes of a block of encoded video.
    """

    encoded: int
    opened: int
    indices: int
    frames: int
    frame_bytes: int
    block: int


@dataclass(frozen=True)
class Sizes:
    """What batches need.

    Attributes:
        lengths: (E,) frames of each episode.
        batch_size: samples of a batch.
        episodes: that the order draws from at a time.
        row_bytes: of a row in memory, about, with the tables that say where its frames are.
        least_row_bytes: without images and text, whose size is known when they are read.
        files: per camera with video files, how many there are.
        indices: per camera with video files, the index of its first file, unless that is broken.
        windows: per camera with video files, its frame offsets.
        fetched: whether encoded video is held in memory.
        frame_bytes: of one decoded frame of each camera that the CPU decodes.
        in_progress: bytes of the decoded frames of all batches in progress.
        scattered: Whether each batch draws from episodes anywhere in the dataset, so that the files of all episodes are in use.
    """

    lengths: Int64
    batch_size: int
    episodes: int
    row_bytes: int
    least_row_bytes: int
    files: Mapping[str, int]
    indices: Mapping[str, VideoIndex]
    windows: Mapping[str, Int64]
    fetched: bool
    frame_bytes: int
    in_progress: int
    scattered: bool = False

    @property
    def frames_in_use(self) -> int:
        """About how many frames the episodes have that the order draws from."""
        frames = int(self.lengths.sum())
        return min(frames, int(self.episodes * frames / len(self.lengths) * 1.5))


def divide(budget: int, sizes: Sizes) -> Parts:
    """Divides `budget` bytes.

    Raises:
        MemoryBudgetError: they do not hold a batch of the longest episodes, and of the largest GOPs in the first video files.
    """
    least = _least(sizes, budget)
    if least > budget:
        enough = next(bound for bound in _bounds(budget) if _least(sizes, bound) <= bound)
        raise MemoryBudgetError(
            f"memory_budget is {budget} bytes, and a batch of {sizes.batch_size} samples can need about {enough} for the rows, "
            "indices and encoded video of its episodes; give a larger memory_budget, or a smaller batch_size"
        )
    encoded = min(_in_use(sizes), max(budget // 2, least))
    frames = int(sizes.lengths.sum())
    room, each = budget - encoded, sizes.frame_bytes
    if not each or room >= frames * each:  # to keep all but a few frames would cost many decodes
        kept = frames if each else 0
        encoded = budget - frames * each
    else:
        kept = max((room - sizes.in_progress) // each, 0)
        encoded = budget - kept * each - (sizes.in_progress if kept else 0)
    return Parts(encoded, *_divide_encoded(encoded, sizes, budget), kept, each, _block(sizes, budget))


def frames_budget(sizes: Sizes) -> int:
    """Return the smallest `memory_budget` with which `divide` keeps all decoded frames, in bytes."""
    frames = int(sizes.lengths.sum()) * sizes.frame_bytes
    least = _least(sizes, 1 << 62)  # blocks are largest with a large budget
    return frames + min(_in_use(sizes), max(frames, least))


def reads_budget(parts: Parts, sizes: Sizes) -> int | None:
    """Return the `memory_budget` with which rows, indices and encoded video get all that the episodes in use need of it.

    Returns:
        Bytes, or None where `parts` gives them that already, so that a larger budget would not help.
    """
    needed = _in_use(sizes)
    return 2 * needed if parts.encoded < needed else None


def batches_in_progress(threads: int, batch_frames: int, task_frames: int) -> int:
    """Batches in progress, so that all threads have work while the oldest batch is waited for.

    Args:
        threads: of the decode pool.
        batch_frames: frames of a batch, of all cameras.
        task_frames: frames of a decode task.
    """
    return min(max(-(-2 * threads * task_frames // max(batch_frames, 1)), 2), 16)


def look_ahead(batch_size: int) -> int:
    """Batches of remote data that are read ahead, at most."""
    return min(max(LOOK_AHEAD // batch_size, 16), 256)


def order_horizon(parts: Parts, sizes: Sizes) -> int:
    """Samples that the order is read ahead, for decoded frames and for what is fetched."""
    return max(horizon(parts.frames, int(sizes.lengths.sum())), encoded_horizon(parts.encoded, sizes), LOOK_AHEAD)


def horizon(kept: int, frames: int) -> int:
    """Samples that the order is read ahead, to know the next uses of `kept` frames of a dataset of `frames`.

    Of frames that are used once each, and that many decodes bring, those kept are used within some twice as many samples as
    there is room for; where a decode brings few, as with GOPs of 2, they are farther away.
    """
    return 0 if kept >= frames else min(2 * frames, max(2 * kept, min(8 * kept, 1 << 18)))


def encoded_horizon(room: int, sizes: Sizes) -> int:
    """Samples that the order is read ahead, to know the next uses of the encoded video that `room` bytes hold."""
    each = sum(int(index.size.sum()) / len(index) for index in sizes.indices.values()) if sizes.fetched else 0
    return min(2 * int(sizes.lengths.sum()), int(2 * room / each), 1 << 18) if each else 0


def _divide_encoded(encoded: int, sizes: Sizes, budget: int) -> tuple[int, int]:
    """Return how many of the bytes for rows, indices and encoded video are for rows and indices, and how many for indices."""
    rows, indices = _rows(sizes.frames_in_use, sizes.row_bytes) + (1 << 20), _indices_in_use(sizes)
    opened = encoded
    if sizes.fetched:  # rows and indices get all that they need, but at most half, and their share of what is left
        opened = min(max(rows + indices, (rows + indices) * encoded // _in_use(sizes)), encoded // 2)
        opened = max(min(opened, encoded - _least_video(sizes, budget)), _least_opened(sizes))
    return opened, opened * indices // (rows + indices)


def _in_use(sizes: Sizes) -> int:
    """About how many bytes the rows, indices and, of remote data, the encoded video of the episodes in use take."""
    return _rows(sizes.frames_in_use, sizes.row_bytes) + _indices_in_use(sizes) + _video_in_use(sizes) + (1 << 20)


def _indices_in_use(sizes: Sizes) -> int:
    files = {camera: count if sizes.scattered else min(count, sizes.episodes) for camera, count in sizes.files.items()}
    # What they get is not all used, since files differ. The spare keeps those in use from being evicted.
    return sum(index.nbytes * files[camera] for camera, index in sizes.indices.items()) * _INDEX_SPARE[0] // _INDEX_SPARE[1]


def _video_in_use(sizes: Sizes) -> int:
    if not sizes.fetched:
        return 0
    return sum(sizes.frames_in_use * int(index.size.sum()) // len(index) for index in sizes.indices.values()) * 5 // 4


def _least(sizes: Sizes, budget: int) -> int:
    """Bytes that one batch may need."""
    return _least_opened(sizes) + _least_video(sizes, budget)


def _least_opened(sizes: Sizes) -> int:
    """Bytes that the rows and indices of one batch may need."""
    episodes = min(sizes.episodes, sizes.batch_size)
    rows = _rows(int(np.sort(sizes.lengths)[-episodes:].sum()), sizes.least_row_bytes)
    return rows + sum(index.nbytes * min(sizes.files[camera], episodes) for camera, index in sizes.indices.items())


def _least_video(sizes: Sizes, budget: int) -> int:
    """Bytes of encoded video that one batch may need."""
    if not sizes.fetched:
        return 0
    block = _block(sizes, budget)
    frames = {camera: sizes.batch_size * len(sizes.windows[camera]) for camera in sizes.indices}
    return sum(
        sizes.batch_size * window_bytes(index, sizes.windows[camera]) + frames[camera] * block
        for camera, index in sizes.indices.items()
    )


def _rows(frames: int, row_bytes: int) -> int:
    return frames * row_bytes * ROW_SPARE[0] // ROW_SPARE[1]


def _block(sizes: Sizes, budget: int) -> int:
    """Bytes of a block of encoded video: small, where a batch of them would fill the budget."""
    frames = sizes.batch_size * max((len(window) for window in sizes.windows.values()), default=1)
    return max(min(BLOCK, budget // 32 // frames), 1)


def _bounds(refused: float) -> Iterator[int]:
    """Larger budgets than one that was refused, in steps of a tenth."""
    bound = max(refused, 4096.0)
    while True:
        yield int(bound)
        bound *= 1.1


def window_bytes(index: VideoIndex, offsets: Int64) -> int:
    """Bytes of encoded video that one sample may need: the GOPs of its window's frames."""
    largest = int(np.add.reduceat(index.size, index.keyframes).max())
    stretch = int(offsets.max() - offsets.min()) * int(index.size.sum()) // len(index)
    return min(len(offsets) * largest, stretch + 2 * largest)

"""Division of `memory_budget` among rows, indices, encoded video and decoded frames.

Rows, indices and the encoded video of remote data get the memory that the episodes in use need, up to half of the budget. They
get more only if one batch needs more. Decoded frames get the rest. Memory that decoded frames cannot use is returned to rows,
indices and encoded video.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dali_stream.checks.arguments import budget_text
from dali_stream.checks.arrays import Int64
from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.episodes import ROW_SPARE

if TYPE_CHECKING:
    from dali_stream.mp4.index import VideoIndex

BLOCK = 64 << 10  # bytes of a block, unless a GOP is larger. At 1.3 MB/s, a block takes as long as a round trip of 50 ms
GROWTH = 2  # number of batches by which the look-ahead grows per planned batch
LOOK_AHEAD = 4096  # number of samples per rank whose encoded video is fetched ahead, a few seconds of decoding


class Parts(NamedTuple):
    """Parts of `memory_budget`.

    `encoded`, the cached frames and the frames of the batches in progress add up to the budget. If the cache holds all frames
    that the rank needs, or none, nothing is reserved for the batches in progress.

    Attributes:
        encoded: Bytes for rows, indices and the encoded video of remote data.
        opened: Bytes of `encoded` for rows and indices, unless one batch needs more.
        indices: Bytes of `opened` for indices.
        kept: Number of decoded frames of each camera that may be cached for later batches.
        block: Bytes of a block of encoded video.
    """

    encoded: int
    opened: int
    indices: int
    kept: int
    block: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dataset and of its batches, which determine how `memory_budget` is divided.

    Attributes:
        lengths: Number of frames of each episode, shape (E,).
        batch_size: Number of samples per batch.
        episodes: Number of episodes that the order draws from at a time.
        row_bytes: Approximate memory of a row and of its entries in the tables that locate frames, in bytes.
        least_row_bytes: The same without images and text, whose sizes are unknown until they are read.
        files: {camera with video files: number of its files}.
        indices: {camera with video files: index of its first file}. Cameras whose first file is broken are missing.
        windows: {camera with video files: its frame offsets}.
        fetched: Whether encoded video is cached in memory.
        frame_bytes: Bytes of a decoded frame, added up over the cameras whose frames are cached.
        in_progress_bytes: Bytes of the decoded frames of all batches in progress.
        needed: Number of frames of a camera that the batches of this rank show in any epoch, the largest of all cameras. None
            if they show all frames.
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
    in_progress_bytes: int
    scattered: bool = False
    needed: int | None = None

    @property
    def frames(self) -> int:
        """Number of decoded frames of each camera that are worth caching."""
        return int(self.lengths.sum()) if self.needed is None else self.needed

    @property
    def frames_in_use(self) -> int:
        """Approximate number of frames of the episodes that the order draws from."""
        # These episodes may be longer than the average, so 50 % more frames are assumed.
        frames = int(self.lengths.sum())
        return min(frames, int(self.episodes * frames / len(self.lengths) * 1.5))


def divide(budget: int, sizes: Sizes) -> Parts:
    """Divide a memory budget of `budget` bytes.

    Raises:
        MemoryBudgetError: If the budget is too small for the largest possible batch, whose samples are in the longest episodes
            and in GOPs as large as the largest one of each camera's first video file.
    """
    least = _least(sizes, budget)
    if least > budget:
        # A larger budget has larger blocks, so a batch needs more. The loop finds a budget that is large enough nevertheless.
        enough = max(budget, 4096)
        while _least(sizes, enough) > enough:
            enough = enough * 11 // 10
        raise MemoryBudgetError(
            f"memory_budget must be at least about {enough} bytes, got {budget}: a batch of {sizes.batch_size} samples can "
            "need that for the rows, indices and encoded video of its episodes. Use a larger memory_budget, such as "
            f'"{budget_text(enough)}", or a smaller batch_size'
        )
    encoded = min(_in_use(sizes), max(budget // 2, least))
    frames = sizes.frames
    room, each = budget - encoded, sizes.frame_bytes
    # The frames of the batches in progress are not subtracted here. If they were, the cache could lack a few frames of the
    # dataset, which would cost many decodes: each missing frame is decoded from its keyframe.
    if not each or room >= frames * each:
        kept = frames if each else 0
        encoded = budget - frames * each
    else:
        kept = max((room - sizes.in_progress_bytes) // each, 0)
        encoded = budget - kept * each - (sizes.in_progress_bytes if kept else 0)
    return Parts(encoded, *_divide_encoded(encoded, sizes, budget), kept, _block(sizes, budget))


def frames_budget(sizes: Sizes) -> int:
    """Return the smallest `memory_budget` with which `divide` caches all decoded frames that this rank needs, in bytes."""
    frames = sizes.frames * sizes.frame_bytes
    least = _least(sizes, 1 << 62)  # a large budget has the largest blocks, which is the worst case
    return frames + min(_in_use(sizes), max(frames, least))


def reads_budget(parts: Parts, sizes: Sizes) -> int | None:
    """Return the `memory_budget` that holds the rows, indices and encoded video of all episodes in use.

    Returns:
        Memory budget in bytes, or None if `parts` holds all of these already, so that a larger budget would not help.
    """
    needed = _in_use(sizes)  # doubled below, since `divide` gives them up to half of the budget
    return 2 * needed if parts.encoded < needed else None


def batches_in_progress(threads: int, batch_frames: int, task_frames: int, affordable: int) -> int:
    """Return the number of batches in progress that keeps all threads busy while the oldest batch is completed.

    The number is 2 · threads · task_frames / batch_frames, rounded up and clamped to [2, max(16, 2 · threads, affordable)]:
    small batches share tasks. With at most 16 batches, 64 threads waited for each other while the interpreter was held for
    42 % of the time (benchmarks/overhead.py, 2 cores of an AMD EPYC, 2026-11-29).

    Args:
        threads: Number of threads of the decode pool.
        batch_frames: Number of frames of a batch, over all cameras.
        task_frames: Number of frames of a decode task.
        affordable: Number of batches for whose frames there is enough memory in any case.
    """
    return min(max(-(-2 * threads * task_frames // max(batch_frames, 1)), 2), max(16, 2 * threads, affordable))


def copy_threads(threads: int) -> int:
    """Return the number of threads that copy the frames of a batch, including the caller's, for `threads` decode threads.

    It is at most 4, since copying is limited by memory bandwidth and not by the number of cores.
    """
    return min(threads, 4)


def look_ahead(batch_size: int) -> int:
    """Return the maximum number of batches of remote data that are read ahead.

    The number is LOOK_AHEAD / batch_size, clamped to [16, 256].
    """
    return min(max(LOOK_AHEAD // batch_size, 16), 256)


def order_horizon(parts: Parts, sizes: Sizes) -> int:
    """Return the number of samples that the order is read ahead, for decoded frames and for encoded video."""
    return max(horizon(parts.kept, sizes.frames), encoded_horizon(parts.encoded, sizes), LOOK_AHEAD)


def horizon(kept: int, frames: int) -> int:
    """Return the number of samples that the order is read ahead, so that the next uses of the cached frames are known.

    With K = `kept` and N = `frames`, the number is 0 if K >= N, and min(2 N, max(2 K, min(8 K, 2^18))) otherwise.

    K is the number of frames that the cache holds. N is the number of frames that this rank needs. With long GOPs, each decode
    adds many frames, and the cached ones are used within about 2 K samples. With short GOPs, such as 2 frames, each decode adds
    few, and their next uses are farther away, so the order is read up to 8 K samples ahead. It is never read more than two
    epochs ahead.
    """
    return 0 if kept >= frames else min(2 * frames, max(2 * kept, min(8 * kept, 1 << 18)))


def encoded_horizon(room: int, sizes: Sizes) -> int:
    """Return the number of samples that the order is read ahead, so that the next uses of cached encoded video are known.

    Args:
        room: Bytes for encoded video.
        sizes: Sizes of the dataset and of its batches.
    """
    # `room / each` frames fit, and the order is read twice as far, as `horizon` does for decoded frames.
    each = sum(int(index.size().sum()) / len(index) for index in sizes.indices.values()) if sizes.fetched else 0
    return min(2 * int(sizes.lengths.sum()), int(2 * room / each), 1 << 18) if each else 0


def _divide_encoded(encoded: int, sizes: Sizes, budget: int) -> tuple[int, int]:
    """Divide the memory for rows, indices and encoded video.

    Returns:
        Bytes for rows and indices together, and bytes of these for indices.
    """
    rows, indices = _rows(sizes.frames_in_use, sizes.row_bytes) + (1 << 20), _indices_in_use(sizes)
    opened = encoded
    if sizes.fetched:
        # Rows and indices get what they need, or their proportional share if that is more, but at most half of the memory.
        opened = min(max(rows + indices, (rows + indices) * encoded // _in_use(sizes)), encoded // 2)
        # Both sides get at least what a single batch needs.
        opened = max(min(opened, encoded - _least_video(sizes, budget)), _least_opened(sizes))
    return opened, opened * indices // (rows + indices)


def _in_use(sizes: Sizes) -> int:
    """Return the approximate memory of the rows, indices and fetched video of the episodes in use, in bytes."""
    return _rows(sizes.frames_in_use, sizes.row_bytes) + _indices_in_use(sizes) + _video_in_use(sizes) + (1 << 20)


def _indices_in_use(sizes: Sizes) -> int:
    files = {camera: count if sizes.scattered else min(count, sizes.episodes) for camera, count in sizes.files.items()}
    # The size of the first file's index is an estimate for all files. 50 % is added, since others may have more frames.
    return sum(index.nbytes * files[camera] for camera, index in sizes.indices.items()) * 3 // 2


def _video_in_use(sizes: Sizes) -> int:
    if not sizes.fetched:
        return 0
    # 25 % is added, since other files may have a higher bitrate than the first one.
    return sum(sizes.frames_in_use * int(index.size().sum()) // len(index) for index in sizes.indices.values()) * 5 // 4


def _least(sizes: Sizes, budget: int) -> int:
    """Return the number of bytes that one batch may need for rows, indices and encoded video."""
    return _least_opened(sizes) + _least_video(sizes, budget)


def _least_opened(sizes: Sizes) -> int:
    """Return the number of bytes that the rows and indices of one batch may need."""
    episodes = min(sizes.episodes, sizes.batch_size)
    rows = _rows(int(np.sort(sizes.lengths)[-episodes:].sum()), sizes.least_row_bytes)
    return rows + sum(index.nbytes * min(sizes.files[camera], episodes) for camera, index in sizes.indices.items())


def _least_video(sizes: Sizes, budget: int) -> int:
    """Return the number of bytes of encoded video that one batch may need."""
    if not sizes.fetched:
        return 0
    block = _block(sizes, budget)  # blocks are fetched whole, so each frame may add up to one block to its GOP
    frames = {camera: sizes.batch_size * len(sizes.windows[camera]) for camera in sizes.indices}
    return sum(
        sizes.batch_size * window_bytes(index, sizes.windows[camera]) + frames[camera] * block
        for camera, index in sizes.indices.items()
    )


def _rows(frames: int, row_bytes: int) -> int:
    return frames * row_bytes * ROW_SPARE[0] // ROW_SPARE[1]


def _block(sizes: Sizes, budget: int) -> int:
    """Return the size of a block of encoded video in bytes. One block for each frame of a batch fits in 1/32 of the budget."""
    frames = sizes.batch_size * max((len(window) for window in sizes.windows.values()), default=1)
    return max(min(BLOCK, budget // 32 // frames), 1)


def window_bytes(index: VideoIndex, offsets: Int64) -> int:
    """Return the number of bytes of encoded video that one sample may need: the GOPs of its window's frames.

    The number is min(T · G, S + 2 G).

    T is the number of frame offsets. G is the size of the largest GOP. S is the average size of the stretch of video from the
    first to the last frame of the window, to which a whole GOP may be added at either end.
    """
    largest = int(np.add.reduceat(index.size(), index.keyframes).max())
    stretch = int(offsets.max() - offsets.min()) * int(index.size().sum()) // len(index)
    return min(len(offsets) * largest, stretch + 2 * largest)

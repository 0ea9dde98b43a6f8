"""What a decoder does for the batches of a camera. Implementations: `torchcodec`, `dali` and `images`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import Buffers
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.source import ABSENT, Source
from dali_stream.schedule.frames import FramePlan
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store
from dali_stream.workers import Workers

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
# A decode task has 32 frames of 640×480 and up to 64 smaller ones, unless a single GOP has more. To open a decoder takes about
# 1.2 ms, as long as decoding 1 frame of 640×480 or 8 of 224×224.
TASK_FRAMES, _SMALL_TASK_FRAMES, _TASK_PIXELS = 32, 64, 32 * 640 * 480


class Pool(Protocol):
    """Runs tasks: `Workers`, or an executor of the standard library."""

    def submit(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Schedules a call."""
        ...


class Work(Protocol):
    """The frames of one camera for one batch, in progress.

    Attributes:
        tasks: that have to end before `collect`.
        failed: samples without frames, with their errors.
    """

    tasks: list[Future[None]]
    failed: dict[int, DecodeError]

    def ready(self) -> bool:
        """Whether `collect` would return at once, and without an error."""
        ...

    def collect(self, buffers: Buffers, dtype: type[np.generic], copiers: Workers) -> Any:
        """The frames, (B, T, H, W, C) of `dtype`, or per sample a `Packed` clip for DALI. Adds to `failed`.

        Args:
            buffers: where memory for the batch is from.
            dtype: uint8, or float32 for levels divided by 255.
            copiers: threads that help to copy.
        """
        ...


class Decoder(Protocol):
    """Decodes one camera of a dataset."""

    def start(self, pool: Pool, plan: BatchPlan, frames: Int64, episodes: OpenEpisodes, store: Store) -> Work:
        """Starts the tasks of a batch.

        Args:
            pool: the decode threads.
            plan: Plan of the batch.
            frames: (B, T) frames of their episodes that the batch shows.
            episodes: Open episodes, with their rows and indices.
            store: where encoded video is read.
        """
        ...

    def close(self) -> None:
        """Frees the memory of decoded frames."""
        ...


class Decoded:
    """Frames on their way into slots, as `Work`."""

    def __init__(self, slots: Slots, plan: FramePlan, tasks: list[Future[None]], failed: dict[int, DecodeError]) -> None:
        self._slots, self._plan, self.tasks, self.failed = slots, plan, tasks, failed

    def ready(self) -> bool:
        return not self.failed and not self._slots.broken and all(map(succeeded, self.tasks))

    def collect(self, buffers: Buffers, dtype: type[np.generic], copiers: Workers) -> Array:
        frames = buffers.take((*self._plan.show.shape, *self._slots.shape), dtype)
        self.failed |= self._slots.gather(self._plan.show, frames, copiers)
        return frames


class VideoAndImages:
    """A `Decoder` of a camera that has MP4 files in some datasets, and images in others.

    Args:
        source: the episodes.
        key: the camera.
        slots: where both put frames.
        video, images: the decoders of either.
    """

    def __init__(self, source: Source, key: str, slots: Slots, video: Decoder, images: Decoder) -> None:
        self._key, self._slots, self._of = key, slots, {True: video, False: images}
        self._has_file = source.files(key) != ABSENT

    def start(self, pool: Pool, plan: BatchPlan, frames: Int64, episodes: OpenEpisodes, store: Store) -> Decoded:
        """See `Decoder`."""
        planned, work = plan.frames[self._key], []
        for kind, decoder in self._of.items():
            mine = self._has_file[planned.episode] == kind
            part = {name: getattr(planned, name)[mine] for name in ("episode", "frame", "packet", "slot", "gop")}
            own = replace(plan, frames={self._key: replace(planned, **part)})
            work.append(decoder.start(pool, own, frames, episodes, store))
        video, images = work
        return Decoded(self._slots, planned, video.tasks + images.tasks, video.failed | images.failed)

    def close(self) -> None:
        """Frees the slots."""
        self._slots.free()


class RouteChange(DaliStreamError):
    """Cameras that DALI cannot continue to decode: a file is unsafe for it, or it failed. The loader rebuilds its pipeline."""

    def __init__(self, cameras: Sequence[str], reason: str) -> None:
        super().__init__(f"{', '.join(cameras)}: {reason}")
        self.cameras, self.reason = cameras, reason


def succeeded(task: Future[None]) -> bool:
    """Whether a task has ended without an error."""
    return task.done() and not task.cancelled() and not task.exception()


def task_frames(size: tuple[int, int]) -> int:
    """Return the maximum number of frames of a decode task, from their recorded size (height, width)."""
    return int(np.clip(_TASK_PIXELS // (size[0] * size[1]), TASK_FRAMES, _SMALL_TASK_FRAMES))


def even_tasks(ends: Int64, most: int) -> Int64:
    """Divide items into as few tasks as possible, of about equal size.

    Args:
        ends: Number of frames of each item and of those before it, shape (n,).
        most: Maximum number of frames of a task.

    Returns:
        Number of each item's task, shape (n,).
    """
    tasks = -(-int(ends[-1]) // most)
    return (ends - 1) * tasks // ends[-1]


def named(source: Source, camera: str, episode: int, frames: Array, error: DecodeError) -> DecodeError:
    """The error with camera, episode and frames in front, and of a mixture the dataset."""
    which = ", ".join(str(frame) for frame in np.unique(frames).tolist()[:8])
    names = source.dataset_names
    whose = f"dataset {names[source.dataset_of[episode]]!r}, " if names else ""
    found = DecodeError(f"{camera}: {whose}episode {source.episodes[episode]}, frame {which}: {error}")
    found.__cause__ = error
    return found

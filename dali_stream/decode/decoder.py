"""Interface of the decoders. Implementations are in `torchcodec_decoder`, `dali` and `images`."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from dali_stream.cache.buffers import Buffers, ReadFrames
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.checks.arrays import NONE, Array, Int64
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.source import Source
from dali_stream.schedule.frames import FramePlan
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store
from dali_stream.system.workers import Workers

_log = logging.getLogger("dali_stream")
# A decode task has about 32 frames of 640×480, or up to 64 smaller frames. See `task_frames`. Opening a decoder takes about
# 1.2 ms, as long as decoding 1 frame of 640×480 or 8 frames of 224×224.
TASK_FRAMES, _SMALL_TASK_FRAMES, _TASK_PIXELS = 32, 64, 32 * 640 * 480


class Work(Protocol):
    """Work in progress: the decoding of one camera's frames for one batch.

    Attributes:
        tasks: Tasks that must end before `collect` is called.
        failed: {sample of the batch that has no frames: error}.
    """

    tasks: list[Future[None]]
    failed: dict[int, DaliStreamError]

    def collect(self, buffers: Buffers, dtype: type[np.generic], copiers: Workers) -> Any:
        """Return the frames, and add samples without frames to `failed`.

        Args:
            buffers: Pool of memory for batches.
            dtype: Type of the frames, uint8 or float32. float32 values are divided by 255.
            copiers: Threads that help to copy.

        Returns:
            Frames of shape (B, T, H, W, C) and type `dtype`. Those of a depth camera have the type of its slots. Frames in
            `GpuSlots` are a tensor on the GPU. The decoder of `dali` returns a list of clips instead.
        """
        ...


class Decoder(Protocol):
    """Decoder of one camera of a dataset."""

    def start(self, workers: Workers, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> Work:
        """Start the tasks of a batch.

        Args:
            workers: Decode threads.
            plan: Plan of the batch.
            episodes: Open episodes, with their rows and indices.
            store: Store of the encoded video.
        """
        ...

    def close(self) -> None:
        """Free the memory of decoded frames."""
        ...


class SlotWork:
    """`Work` of a decoder that puts its frames into slots, from which `collect` copies them, or directly into the batch."""

    def __init__(
        self,
        slots: Slots,
        plan: FramePlan,
        tasks: list[Future[None]],
        failed: dict[int, DaliStreamError],
        read: ReadFrames | None = None,
    ) -> None:
        self._slots, self._plan, self._read, self.tasks, self.failed = slots, plan, read, tasks, failed

    def collect(self, buffers: Buffers, dtype: type[np.generic], copiers: Workers) -> Any:
        show = self._plan.show
        if self._read is not None:
            frames = self._read.frames
            self._slots.copy_batch(show, frames, copiers, self._read.is_read)
        else:
            frames = self._slots.batch(show, buffers, dtype, copiers)
        self.failed |= self._slots.failed(show)
        return frames


class VideoAndImages:
    """`Decoder` of a camera that is stored as video in some datasets and as images in others.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        slots: Slots into which both decoders put frames.
        video: Decoder of video.
        images: Decoder of images.
    """

    def __init__(self, source: Source, key: str, slots: Slots, video: Decoder, images: Decoder) -> None:
        self._key, self._slots, self._video, self._images = key, slots, video, images
        self._has_file = source.videos[key].file != NONE

    def start(self, workers: Workers, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> SlotWork:
        """See `Decoder.start`."""
        planned, work = plan.frames[self._key], []
        for is_video, decoder in ((True, self._video), (False, self._images)):
            own = planned.chosen(self._has_file[planned.episode] == is_video, self._has_file[planned.reads.episode] == is_video)
            # Each decoder would read into a batch of its own, so all frames are read into slots.
            own = replace(own, reads=own.reads._replace(place=np.full_like(own.reads.place, NONE)))
            work.append(decoder.start(workers, replace(plan, frames={self._key: own}), episodes, store))
        video, images = work
        return SlotWork(self._slots, planned, video.tasks + images.tasks, video.failed | images.failed)

    def close(self) -> None:
        """See `Decoder.close`."""
        self._video.close()
        self._images.close()


class RouteChange(DaliStreamError):
    """torchcodec must no longer decode a camera on NVDEC, because a file is unsafe or the decoder failed.

    With `decode="auto"`, the Loader continues with the CPU.

    Args:
        camera: Name of the camera.
        reason: Reason, for messages.
    """

    def __init__(self, camera: str, reason: str) -> None:
        super().__init__(f"{camera}: {reason}")
        self.camera, self.reason = camera, reason


class OtherSizes:
    """Warning that frames have another size than `meta/info.json` says, and are resized. It is logged once.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
    """

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key, self._logged = source, key, False

    def add(self, episode: int, size: tuple[int, int], where: str) -> None:
        """Log the first frame whose size (height, width) differs. `where` is the address of its file."""
        feature = self._source.part_of(episode).features.get(self._key)
        if self._logged or feature is None or size == feature.frame_size:
            return
        self._logged = True
        stated = "{}×{}".format(*feature.frame_size)
        _log.warning(
            "%s: %s: frames are %d×%d, and not %s as meta/info.json says. All frames are resized to image_size",
            *(self._key, where, *size, stated),
        )


def task_frames(size: tuple[int, int]) -> int:
    """Return the number of frames that a decode task should have, for frames of this size (height, width) in the file."""
    return int(np.clip(_TASK_PIXELS // (size[0] * size[1]), TASK_FRAMES, _SMALL_TASK_FRAMES))


def even_tasks(ends: Int64, most: int) -> Int64:
    """Divide items into as few tasks as possible, of about equal size.

    Args:
        ends: Cumulative number of frames, up to and including each item, shape (n,).
        most: Maximum average number of frames per task. A single task may have more, because items are not split.

    Returns:
        Number of each item's task, shape (n,).
    """
    tasks = -(-int(ends[-1]) // most)
    # The frames are divided evenly, and an item belongs to the task that has its last frame.
    return (ends - 1) * tasks // ends[-1]


def named(source: Source, camera: str, episode: int, frames: Array, error: DecodeError) -> DecodeError:
    """Return an error whose message starts with the camera, the episode and the frames, and for a mixture also the dataset.

    It has the text of `error`, and not the traceback, which would keep the encoded data and the pixels in memory. The traceback
    is logged at level DEBUG.
    """
    _log.debug("a frame could not be decoded", exc_info=error)
    frame_list = ", ".join(str(frame) for frame in np.unique(frames).tolist()[:8])
    names = source.dataset_names
    whose = f"dataset {names[source.dataset_of[episode]]!r}, " if names else ""
    return DecodeError(f"{camera}: {whose}episode {source.episodes[episode]}, frame {frame_list}: {error}")

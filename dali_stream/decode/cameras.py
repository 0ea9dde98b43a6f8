"""From what the schedule plans for a camera to decode tasks for the pool.

A task that fails is run again frame by frame, so that an error names the frame that is at fault and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.cache.indices import IndexCache
from dali_stream.cache.memory import Memory
from dali_stream.cache.slots import Slots
from dali_stream.counters import Counters
from dali_stream.decode import images as image
from dali_stream.decode import torchcodec as decode
from dali_stream.decode.resize import resize
from dali_stream.decode.route import refusal
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.dataset import DatasetFiles
from dali_stream.mp4.clip import HiddenFrames, config, pack
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import LACKING, VideoIndex
from dali_stream.mp4.timing import explain
from dali_stream.schedule.frames import NONE, FrameStep
from dali_stream.storage import Store

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
CLIP_FRAMES = 32  # frames of a decode task, unless a single GOP has more: opening a decoder costs less than one frame
# Of RGB at full size that a decode thread holds at a time. Threads have heaps of 64 MiB, where glibc does not use an aligned
# block again for another of its size while a small one beside it lives on (its bug 14581): with blocks of 30 MiB, two to a
# heap, the process grew by gigabytes.
PART_BYTES = 15 << 20


def frames_at_once(size: tuple[int, int]) -> int:
    """How many frames of this (height, width) are in memory at full size at a time, per decode thread."""
    return int(np.clip(PART_BYTES // (size[0] * size[1] * 3), 1, CLIP_FRAMES))


class RouteChange(DaliStreamError):
    """Cameras on the DALI route that cannot stay there: a file is unsafe for it, or it failed. The loader rebuilds."""

    def __init__(self, cameras: Sequence[str], reason: str) -> None:
        super().__init__(f"{', '.join(cameras)}: {reason}")
        self.cameras, self.reason = cameras, reason


class Pool(Protocol):
    """What does the work: `Workers`, or an executor of the standard library."""

    def submit(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Has a call done."""
        ...


class Gop(NamedTuple):
    """Frames of one GOP that a task decodes.

    Attributes:
        table: the index of their file.
        episode: that they belong to.
        frames: of the episode.
        packets: that hold them.
        slots: where they go.
    """

    table: VideoIndex
    episode: int
    frames: list[int]
    packets: list[int]
    slots: list[int]


class VideoFiles:
    """A camera's MP4s: their indices, and whether they hold what the metadata promise.

    Args:
        dataset: where they are.
        key: the camera.
        gpu: the CUDA device of the DALI route; None on a CPU.
        counters: what to add to.
    """

    def __init__(self, dataset: DatasetFiles, key: str, gpu: int | None, counters: Counters) -> None:
        self.key, self._dataset, self._gpu, self._counters = key, dataset, gpu, counters
        self._formats: dict[bytes, VideoFormat] = {}

    def describe(self, indices: IndexCache, episode: int) -> tuple[VideoIndex, VideoFormat]:
        """Index and format of the file that holds an episode. Raises DecodeError."""
        table = indices.of(self.key, episode, self._dataset.data_store)
        return table, self._format(table, 0)

    def checked(self, table: VideoIndex, packets: Int64) -> None:
        """Holds the descriptions of these packets against the metadata. Raises DecodeError."""
        for number in np.unique(table.config[packets]).tolist():
            self._check_size(table, self._format(table, int(np.argmax(table.config == number))))

    def lacking(self, memory: Memory, table: VideoIndex, episode: int, frame: int) -> DecodeError:
        """The error for a frame that the video lacks."""
        [timestamp] = memory.gather("timestamp", np.array([episode]), np.array([frame]))
        interval = self._dataset.table.interval(self.key, self._dataset.rows[episode])
        why = explain(table, interval, timestamp, self._dataset.fps)
        return DecodeError(f"{self._dataset.data_store.where(table.path)}: {why}")

    def _format(self, table: VideoIndex, sample: int) -> VideoFormat:
        config = table.configs[table.config[sample]]
        if config not in self._formats:
            try:
                self._formats[config] = describe(config)
            except DecodeError as error:
                raise DecodeError(f"{self._dataset.data_store.where(table.path)}: {error}") from error
        return self._formats[config]

    def _check_size(self, table: VideoIndex, video: VideoFormat) -> None:
        """A file's size has to be the promised one: batches are of one shape, and a broken size takes memory at will."""
        size = self._dataset.picture_size(self.key)
        if (video.height, video.width) != size:
            raise DecodeError(
                f"{self._dataset.data_store.where(table.path)}: has frames of {video.height}×{video.width}, and "
                f"meta/info.json promises {size[0]}×{size[1]}"
            )

    def _named(self, episode: int, frames: Array, table: VideoIndex, error: DecodeError) -> DecodeError:
        where = self._dataset.data_store.where(table.path)
        return named(self._dataset, self.key, episode, frames, DecodeError(f"{where}: {error}"))


class DecodedVideo(VideoFiles):
    """A camera whose video torchcodec decodes, on the CPU, into slots.

    Args:
        slots: where decoded frames go.
        size: (height, width) that they are resized to.
    """

    def __init__(self, dataset: DatasetFiles, key: str, counters: Counters, slots: Slots, size: tuple[int, int]) -> None:
        super().__init__(dataset, key, None, counters)
        self.slots, self._size = slots, size
        self._broken: dict[int, DecodeError] = {}  # episodes whose file is of no use

    def learn(self, memory: Memory, episode: int) -> tuple[Int64, Int64]:
        """Per frame of an episode, its packet, and the packet that decoding it begins with; `LACKING` where there is none."""
        packets = memory.packets(self.key, episode)
        there = packets != LACKING
        keyframes = np.full(len(packets), LACKING, np.int64)
        try:
            table = memory.index(self.key, episode)
            self.checked(table, packets[there])
            keyframes[there] = table.keyframes(packets[there])
        except DecodeError as error:
            self._broken[episode] = error
            return keyframes, keyframes
        return packets, keyframes

    def missing(self, memory: Memory, episode: int, frame: int) -> DecodeError:
        """The error for a frame that has no packet."""
        if (error := self._broken.get(episode)) is None:
            error = self.lacking(memory, memory.index(self.key, episode), episode, frame)
        return named(self._dataset, self.key, episode, np.array([frame]), error)

    def submit(self, pool: Pool, step: FrameStep, memory: Memory, store: Store) -> list[Future[None]]:
        """Starts the tasks of a step. They read encoded video from `store`."""
        return [pool.submit(self._decode, store, task) for task in self._deal(self._gops(step, memory))]

    def _gops(self, step: FrameStep, memory: Memory) -> list[Gop]:
        starts = np.flatnonzero(np.diff(step.gop, prepend=NONE)).tolist()
        stops = [*starts, len(step.gop)][1:]
        tables = {episode: memory.index(self.key, episode) for episode in np.unique(step.episode).tolist()}
        columns = [values.tolist() for values in (step.frame, step.packet, step.slot)]
        return [
            Gop(tables[episode], episode, *(values[start:stop] for values in columns))
            for episode, start, stop in zip(step.episode[starts].tolist(), starts, stops, strict=True)
        ]

    def _deal(self, gops: list[Gop]) -> list[list[Gop]]:
        """Tasks: GOPs of one sample description, since a clip has one; neighbours in a file together."""
        by_config: dict[bytes, list[Gop]] = {}
        for gop in sorted(gops, key=lambda gop: (gop.table.path, gop.packets[0])):
            by_config.setdefault(config(gop.table, gop.packets[0]), []).append(gop)
        tasks = []
        for alike in by_config.values():
            ends = np.cumsum([len(gop.packets) for gop in alike])
            task = _even_tasks(ends)
            tasks += [[alike[i] for i in np.flatnonzero(task == number)] for number in np.unique(task)]
        return tasks

    def _decode(self, store: Store, gops: list[Gop]) -> None:
        """Decode pool: fills the slots of these frames."""
        tables = [gop.table for gop in gops for _ in gop.packets]
        packets = [packet for gop in gops for packet in gop.packets]
        slots = [slot for gop in gops for slot in gop.slots]
        video, decoded = self._format(tables[0], packets[0]), 0
        part, timed = frames_at_once((video.height, video.width)), self._counters.timed
        try:
            with timed("decode_s"):
                for requests, frames, more in decode.decode_in_parts(store, tables, packets, video, part, timed):
                    with timed("resize_s"):
                        frames = resize(frames, self._size)
                    self.slots.put([slots[i] for i in requests], frames)
                    decoded += more
        except DecodeError as error:
            if len(packets) > 1:
                for gop in gops:
                    for one in zip(gop.frames, gop.packets, gop.slots, strict=True):
                        self._decode(store, [Gop(gop.table, gop.episode, *([value] for value in one))])
            else:
                self.slots.fail(slots[0], self._named(gops[0].episode, np.array(gops[0].frames), gops[0].table, error))
        self._counters.add(clips=1, decoded_frames=decoded)


class DecodedImages:
    """A camera whose frames are images in Parquet rows, decoded into slots.

    Args:
        dataset: where they are.
        key: the camera.
        counters: what to add to.
        slots: where decoded frames go.
        size: (height, width) that they are resized to.
    """

    def __init__(self, dataset: DatasetFiles, key: str, counters: Counters, slots: Slots, size: tuple[int, int]) -> None:
        self.key, self._dataset, self._counters, self.slots, self._size = key, dataset, counters, slots, size

    def learn(self, memory: Memory, episode: int) -> tuple[Int64, Int64]:
        """As of `DecodedVideo`: each frame is a GOP of its own."""
        frames = np.arange(self._dataset.lengths[episode])
        return frames, frames

    def missing(self, memory: Memory, episode: int, frame: int) -> DecodeError:
        """As of `DecodedVideo`."""
        return named(self._dataset, self.key, episode, np.array([frame]), DecodeError("its row has no image"))

    def submit(self, pool: Pool, step: FrameStep, memory: Memory, store: Store) -> list[Future[None]]:
        """Starts the tasks of a step."""
        if not len(step.slot):
            return []
        encoded = memory.gather(self.key, step.episode, step.frame)
        task = _even_tasks(np.arange(1, len(step.slot) + 1))
        return [pool.submit(self._decode, encoded[part], step.episode[part], step.frame[part], step.slot[part].tolist())
                for part in (task == number for number in np.unique(task))]  # fmt: skip

    def _decode(self, encoded: Array, episode: Int64, frame: Int64, slots: list[int]) -> None:
        timed = self._counters.timed
        with timed("decode_s"):
            for i, slot in enumerate(slots):
                try:
                    pixels = image.decode(encoded[i], self._dataset.picture_size(self.key))
                    with timed("resize_s"):
                        pixels = resize(pixels[None], self._size)
                    self.slots.put([slot], pixels)
                except DecodeError as error:
                    self.slots.fail(slot, named(self._dataset, self.key, int(episode[i]), frame[i : i + 1], error))
        self._counters.add(clips=1, decoded_frames=len(slots))


def _even_tasks(ends: Int64) -> Int64:
    """Numbers of tasks for items that have `ends` frames up to and with each: as few tasks as can be, of about equal size."""
    tasks = -(-int(ends[-1]) // CLIP_FRAMES)
    return (ends - 1) * tasks // ends[-1]


class Request(NamedTuple):
    """What a camera on the DALI route shows for one sample: a window of frames of one episode, and their packets."""

    row: int
    episode: int
    frames: Array
    samples: Array
    table: VideoIndex


class Packed(NamedTuple):
    """One sample on the DALI route: a clip, the frames in it, rising, and per step of the window which of those it shows."""

    clip: Array
    frames: Array
    order: Array


@dataclass
class Clips:
    """The clips of one batch of a camera on the DALI route, to come.

    Attributes:
        packed: per sample.
        tasks: that make them.
        failed: samples that have none, with their errors.
    """

    packed: list[Packed | None]
    tasks: list[Future[None]] = field(default_factory=list)
    failed: dict[int, DecodeError] = field(default_factory=dict)


class PackedVideo(VideoFiles):
    """A camera whose video DALI decodes: a clip per sample."""

    def learn(self, memory: Memory, episode: int) -> tuple[Int64, Int64]:
        """As of `DecodedVideo`; what is wrong with a file is told when a frame of it is asked for."""
        packets = memory.packets(self.key, episode)
        there = packets != LACKING
        keyframes = np.full(len(packets), LACKING, np.int64)
        if there.any():
            keyframes[there] = memory.index(self.key, episode).keyframes(packets[there])
        return packets, keyframes

    def submit(self, pool: Pool, packets: Int64, memory: Memory, store: Store, episode: Int64, frames: Int64) -> Clips:
        """Starts the work for a batch. `episode` is (B,), `frames` and their `packets` are (B, T)."""
        clips = Clips([None] * len(episode))
        for row, (e, shown) in enumerate(zip(episode.tolist(), packets, strict=True)):
            try:
                request = Request(row, e, frames[row], shown, self._locate(memory, e, frames[row], shown))
            except DecodeError as error:
                clips.failed[row] = error
            else:
                clips.tasks.append(pool.submit(self._pack, store, request, clips))
        return clips

    def _locate(self, memory: Memory, episode: int, frames: Int64, samples: Int64) -> VideoIndex:
        """The index of the episode's file, with all checked that can be before decoding."""
        try:
            table = memory.index(self.key, episode)
            absent = samples == LACKING
            if absent.any():
                frames = frames[absent]
                raise self.lacking(memory, table, episode, int(frames[0]))
            self.checked(table, samples)
        except DecodeError as error:
            raise named(self._dataset, self.key, episode, frames, error) from error
        if reason := refusal(self._gpu, self._format(table, int(samples[0])), table):
            raise RouteChange([self.key], f"{self._dataset.data_store.where(table.path)}: {reason}")
        return table

    def _pack(self, store: Store, request: Request, clips: Clips) -> None:
        """Decode pool. Each frame of the window is decoded once, in rising order, and then put into place."""
        unique, steps = np.unique(request.samples, return_inverse=True)
        try:
            with self._counters.timed("pack_s"):
                tables, shown_only = [request.table] * len(unique), self._gpu is not None
                clip = pack(store, tables, unique.tolist(), shown_only=shown_only, timed=self._counters.timed)
        except HiddenFrames as error:
            where = self._dataset.data_store.where(request.table.path)
            raise RouteChange([self.key], f"{where}: {error}") from error
        except DecodeError as error:
            clips.failed[request.row] = self._named(request.episode, request.frames, request.table, error)
            return
        self._counters.add(clips=1, decoded_frames=clip.coded_frames)
        places = np.array(clip.frames, np.int32)
        order = np.argsort(np.argsort(places))[steps.reshape(-1)].astype(np.int32)
        clips.packed[request.row] = Packed(np.frombuffer(clip.data, np.uint8), np.sort(places), order)


def named(dataset: DatasetFiles, camera: str, episode: int, frames: Array, error: DecodeError) -> DecodeError:
    """The error with camera, episode and frames in front."""
    which = ", ".join(str(frame) for frame in np.unique(frames).tolist()[:8])
    found = DecodeError(f"{camera}: episode {dataset.episodes[episode]}, frame {which}: {error}")
    found.__cause__ = error
    return found

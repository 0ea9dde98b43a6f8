"""`Decoder` of a camera's video with torchcodec, or with PyAV for depth cameras, which puts the frames into slots.

GOPs are distributed to tasks for the decode threads. While all threads are busy, a task that waits for one gets the GOPs of
later batches as well: a decoder that is opened for few frames takes more time per frame. If a task fails, it is divided until
the frame that fails is found.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from dali_stream.cache.frame_files import Records
from dali_stream.cache.frames_on_disk import Decoding, FramesOnDisk
from dali_stream.cache.gpu_slots import GpuSlots
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.checks.arrays import NONE
from dali_stream.decode.decoder import RouteChange, SlotWork, even_tasks, named, task_frames
from dali_stream.decode.processes import DecodeProcesses
from dali_stream.decode.refusal import refusal_of_torchcodec
from dali_stream.decode.resize import copied_to_cpu, resize_on_gpu
from dali_stream.decode.resized import Output, decode_resized
from dali_stream.decode.torchcodec import decode, decode_clip_in_parts, decode_in_parts, frames_at_once
from dali_stream.decode.torchcodec_cuda import device_name, own_stream
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, StorageError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.clip import Clip, config, packet_hashes
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.observe.waiting import working
from dali_stream.schedule.frames import FramePlan, Reads
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store
from dali_stream.system.workers import Workers

_ReadError = DecodeError | DatasetError | StorageError
_READ_ERRORS = DecodeError, DatasetError, StorageError


class _Frame(NamedTuple):
    """Frame that a task decodes.

    Attributes:
        batch: Number of the batch for which it is decoded.
        file: Index of the file.
        records: Records of the episode on disk. None if its frames are not stored.
        episode: Episode of the frame.
        in_episode: Frame index within the episode.
        packet: Packet of the frame.
        slot: Slot into which the frame is put. `NONE` for a frame that is decoded for the frame cache on disk only.
    """

    batch: int
    file: VideoIndex
    records: Records | None
    episode: int
    in_episode: int
    packet: int
    slot: int


class _Task:
    """Frames that a decode thread decodes together.

    Args:
        store: Store of their encoded video.
        frames: Frames of a batch.

    Attributes:
        future: Result of the task, set by the thread that submits it and adds frames to it.
    """

    future: Future[None]

    def __init__(self, store: Store, frames: list[_Frame]) -> None:
        self._store: Store | None = store
        self._lock, self._frames = threading.Lock(), frames

    def add(self, store: Store, frames: list[_Frame], most: int) -> bool:
        """Add frames of a later batch, unless the task has begun or would have more than `most`. Return whether it has them."""
        with self._lock:
            if self._store is None or len(self._frames) + len(frames) > most:
                return False
            if (joined := self._store.joined(store)) is None:
                return False
            self._store, self._frames = joined, self._frames + frames
            return True

    def begin(self) -> tuple[Store, list[_Frame]]:
        """Return the store, and the frames in the order of the files. None can be added any more, and none are kept."""
        with self._lock:
            store, frames = self._store, self._frames
            self._store, self._frames = None, []
        assert store is not None
        return store, sorted(frames, key=lambda frame: (frame.file.path, frame.packet))


def _decode_divided(
    frames: list[_Frame], decode_part: Callable[[list[_Frame]], None], fail: Callable[[_Frame, _ReadError], None]
) -> None:
    """Decode frames, together if possible. If this fails, divide them to find the frames that fail, with few attempts.

    The first part has all frames. If a part fails, its first half is next, until a single frame fails. The frames after it
    often fail, too, so the next part has one frame, and the size doubles after each part that succeeds. While frames remain of
    a part that failed, at least one of them must fail, so half of them are next. If a file cannot be read, its frames are not
    divided.

    Args:
        frames: Frames to decode.
        decode_part: Function that decodes some frames, and raises an error if one of them fails.
        fail: Function that is called with each frame that fails, and its error.
    """
    start, stop = 0, len(frames)
    failed = 0  # end of the smallest part that failed, if it is after `start`
    while part := frames[start:stop]:
        try:
            decode_part(part)
        except _READ_ERRORS as error:
            if len(part) > 1 and (isinstance(error, DecodeError) or len({frame.file.path for frame in part}) > 1):
                failed, stop = stop, start + len(part) // 2
                continue
            for frame in part:
                fail(frame, error)
            failed, size = 0, 1
        else:
            remaining = failed - stop
            size = (remaining + 1) // 2 if remaining > 0 else 2 * len(part)
        start, stop = stop, min(stop + size, len(frames))


class TorchcodecDecoder(VideoFiles):
    """`Decoder` of a camera's video that puts the frames into slots. It decodes on the CPU, or on NVDEC.

    Video of a depth camera is decoded with PyAV, and resized with nearest neighbour.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        counters: Counters of the Loader.
        slots: Slots into which the decoder puts frames.
        any_size: See `VideoFiles`.
        on_disk: Frames of the camera on disk. None without a frame cache on disk.
        share: Number of frames up to which a task gets those of later batches, so that enough tasks are left for all threads.
        gpu: CUDA device whose NVDEC decodes, or None to decode on the CPU.
        processes: Processes that decode on the CPU. None to decode in the decode threads.
    """

    def __init__(
        self,
        source: Source,
        key: str,
        counters: Counters,
        slots: Slots,
        any_size: bool,
        on_disk: FramesOnDisk | None,
        share: int,
        gpu: int | None,
        processes: DecodeProcesses | None,
    ) -> None:
        super().__init__(source, key, any_size)
        self._counters, self._slots, self._on_disk, self._gpu, self._processes = counters, slots, on_disk, gpu, processes
        self._present = source.videos[key].file != NONE
        self._output = Output(slots.shape, slots.dtype, source.features[key].is_depth)
        self._share, self._last = share, dict[tuple[bytes, ...], _Task]()  # {`config`: the task that was submitted last}

    def start(self, workers: Workers, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> SlotWork:
        """See `Decoder.start`."""
        planned, episode = plan.frames[self.key], plan.samples.episode
        failed: dict[int, DaliStreamError] = {}
        present = self._present[episode]
        for sample, t in np.argwhere((planned.show == NONE) & present[:, None]).tolist():
            if sample not in failed:
                shown = plan.shown_in_episode[self.key][sample, t : t + 1]
                failed[sample] = self.missing(episodes, int(episode[sample]), shown)
        tasks, added_to = self._tasks(self._gops(planned, episodes, plan.samples.number), store)
        if self._on_disk is None:
            for task in tasks:
                task.future = workers.submit(self._begin, task)
            return SlotWork(self._slots, planned, [task.future for task in tasks + added_to], failed)
        reads, indices = planned.reads, self._usable(planned.reads, episodes)
        if unusable := set(reads.episode.tolist()) - set(indices):
            reads = reads.chosen(~np.isin(reads.episode, list(unusable)))
        columns = reads.episode, reads.frame, reads.packet, reads.slot
        records, number = {episode: self._records(episode) for episode in indices}, plan.samples.number

        def unread(numbers: list[int]) -> list[_Frame]:
            frames = zip(*(column[numbers].tolist() for column in columns), strict=True)
            return [_Frame(number, indices[episode], records[episode], episode, *own) for episode, *own in frames]

        def decoding(store: Store) -> Decoding:
            return Decoding(unread, functools.partial(self._decode, store), functools.partial(self._packet_hashes, store))

        def begin(task: _Task) -> tuple[list[_Frame], Decoding]:
            own, frames = task.begin()
            return frames, decoding(own)

        # If these frames cannot be read from disk, the blocks of their encoded video were not fetched, so the file is read.
        begins = [functools.partial(begin, task) for task in tasks]
        reading, started, batch = self._on_disk.start(workers, planned, reads, begins, decoding(store))
        for task, future in zip(tasks, started, strict=True):
            task.future = future
        return SlotWork(self._slots, planned, reading + [task.future for task in tasks + added_to], failed, batch)

    def close(self) -> None:
        """Free the slots."""
        self._slots.free()

    def _records(self, episode: int) -> Records | None:
        return None if self._on_disk is None else self._on_disk.records(episode)

    def _tasks(self, gops: list[list[_Frame]], store: Store) -> tuple[list[_Task], list[_Task]]:
        """Distribute the frames of a batch, by GOP, to tasks.

        The frames of a task share their `config`, because a clip has only one. Each GOP is in one task, and GOPs that
        are next to each other in a file are in the same task if possible.

        Returns:
            New tasks, and tasks of earlier batches to which frames were added.
        """
        by_config: dict[tuple[bytes, ...], list[list[_Frame]]] = {}
        for gop in sorted(gops, key=lambda gop: (gop[0].file.path, gop[0].packet)):
            by_config.setdefault(config(gop[0].file, gop[0].packet), []).append(gop)
        tasks, added_to = list[_Task](), list[_Task]()
        for key, alike in by_config.items():
            video = self.format(alike[0][0].file, alike[0][0].packet)
            most, last = task_frames((video.height, video.width)), self._last.get(key)
            if last is not None and last.add(store, list(itertools.chain(*alike)), min(most, self._share)):
                added_to.append(last)
                continue
            task = even_tasks(np.cumsum([len(gop) for gop in alike]), most)
            for number in np.unique(task):
                tasks.append(_Task(store, [frame for i in np.flatnonzero(task == number) for frame in alike[i]]))
            self._last[key] = tasks[-1]
        return tasks, added_to

    def _gops(self, plan: FramePlan, episodes: OpenEpisodes, batch: int) -> list[list[_Frame]]:
        """Return the frames to decode for a batch, by GOP."""
        starts = np.flatnonzero(np.diff(plan.gop, prepend=NONE)).tolist()
        indices = self._usable(plan, episodes)
        columns = [values.tolist() for values in (plan.frame, plan.packet, plan.slot)]
        gops = []
        for episode, start, stop in zip(plan.episode[starts].tolist(), starts, [*starts, len(plan.gop)][1:], strict=True):
            if episode in indices:
                own = batch, indices[episode], self._records(episode), episode
                gops.append([_Frame(*own, *values) for values in zip(*(each[start:stop] for each in columns), strict=True)])
        return gops

    def _usable(self, plan: FramePlan | Reads, episodes: OpenEpisodes) -> dict[int, VideoIndex]:
        """Return the index of each episode's file. If a file contradicts the metadata, its frames' slots get the error.

        Raises:
            RouteChange: If NVDEC must not decode a file.
        """
        indices = {}
        starts = np.flatnonzero(np.diff(plan.episode, prepend=NONE)).tolist()  # GOPs of one episode are consecutive
        for start, stop in itertools.pairwise([*starts, len(plan.episode)]):
            own, episode = slice(start, stop), int(plan.episode[start])
            index = episodes.index(self.key, episode)
            try:
                self.checked(index, plan.packet[own], episode)
            except DecodeError as error:
                for frame, slot in zip(plan.frame[own], plan.slot[own].tolist(), strict=True):
                    if slot != NONE:
                        self._slots.fail(slot, named(self._source, self.key, episode, frame, error))
            else:
                if self._gpu is not None:
                    video = self.format(index, int(plan.packet[start]))
                    if reason := refusal_of_torchcodec(self._gpu, video, index):
                        raise self._change(index, reason)
                indices[episode] = index
        return indices

    def _begin(self, task: _Task) -> None:
        self._decode(*task.begin())

    def _decode(self, store: Store, frames: list[_Frame]) -> None:
        """Decode frames, and put them into slots, in a decode thread. If a frame fails, each batch is decoded by itself.

        The frames that fail therefore do not depend on the batches that share a task.

        Raises:
            RouteChange: If NVDEC cannot decode a frame, and the CPU can, or if the GPU's memory is not enough.
        """
        batches = {frame.batch for frame in frames}
        if len(batches) > 1:
            with suppress(*_READ_ERRORS):
                self._decode_together(store, frames)
                return
        for batch in sorted(batches):
            self._decode_batch(store, [frame for frame in frames if frame.batch == batch])

    def _decode_batch(self, store: Store, frames: list[_Frame]) -> None:
        """Decode frames of a batch. See `_decode_divided`."""
        decode_together = functools.partial(self._decode_together, store)
        needed = [frame for frame in frames if frame.slot != NONE]
        if len(needed) < len(frames):
            # No batch needs the frames for the disk only, and they may be why others fail. They are then left out.
            with suppress(*_READ_ERRORS):
                decode_together(frames)
                return
        _decode_divided(needed, decode_together, functools.partial(self._fail, store))

    def _fail(self, store: Store, frame: _Frame, error: _ReadError) -> None:
        """Put an error into the slot of a frame. Raises RouteChange if NVDEC failed, and the CPU can decode the frame."""
        if isinstance(error, DecodeError) and self._gpu is not None:
            error = self._on_cpu(store, frame.file, frame.packet, error)
        if isinstance(error, DecodeError):
            error = self.named(frame.episode, np.array([frame.in_episode]), frame.file, error)
        self._slots.fail(frame.slot, error.with_traceback(None))  # it would keep packets and pixels

    def _on_cpu(self, store: Store, file: VideoIndex, packet: int, error: DecodeError) -> _ReadError:
        """Return the CPU's error for a frame that NVDEC cannot decode. Raises RouteChange if the CPU can decode it."""
        try:
            decode(store, [file], [packet], self.format(file, packet))
        except _READ_ERRORS as on_cpu:
            return on_cpu
        raise self._change(file, error) from error

    def _change(self, file: VideoIndex, reason: object) -> RouteChange:
        """Return the error that moves the camera from NVDEC to the CPU because of a file."""
        return RouteChange(self.key, f"{self._source.data_store.where(file.path)}: {reason}")

    def _packet_hashes(self, store: Store, frame: _Frame, packets: list[int]) -> dict[int, int]:
        """See `mp4.clip.packet_hashes`. If packets cannot be read, decoding them raises the error."""
        with suppress(*_READ_ERRORS), self._counters.timed("read_s"):
            return packet_hashes(store, frame.file, packets)
        return {}

    def _decode_together(self, store: Store, frames: list[_Frame]) -> None:
        """Decode frames with one clip if possible, and put them into slots.

        Raises:
            DecodeError, DatasetError, StorageError: If one of them fails.
            RouteChange: If the GPU's memory is not enough.
        """
        indices, packets = [frame.file for frame in frames], [frame.packet for frame in frames]
        video, decoded, stored = self.format(indices[0], packets[0]), 0, 0
        adds_to = self._on_disk if self._on_disk is not None and self._on_disk.is_open else None
        decode_parts, hashed = functools.partial(self._decode_clip, video, indices[0]), adds_to is not None
        on_gpu, timed = self._gpu is not None, self._counters.timed
        try:
            what = "decodes {} frames of {}", len(frames), store.where(indices[0].path)
            with timed("decode_s"), own_stream(self._gpu), working(*what):
                parts = decode_in_parts(store, indices, packets, decode_parts, for_nvdec=on_gpu, hashed=hashed, timed=timed)
                for requests, resized, more, hashes in parts:
                    own = [frames[i] for i in requests]
                    with timed("resize_s"):
                        self._put([frame.slot for frame in own], resized)
                    if adds_to is not None:
                        adds_to.add(zip(own, hashes, resized, strict=True))
                    decoded, stored = decoded + more, stored + len(requests)
        except torch.OutOfMemoryError as error:
            raise self._change(indices[0], f"the GPU's memory is not enough for {len(frames)} frames") from error
        finally:
            self._counters.add(clips=1, decoded_frames=decoded, stored_frames=stored)

    def _decode_clip(self, expected: VideoFormat, file: VideoIndex, clip: Clip) -> Iterator[tuple[list[int], Any, int]]:
        """Decode a clip in parts, to frames in the size of batches. See `decode_resized`.

        Frames that NVDEC decodes for slots in the GPU's memory stay on the GPU, as tensors.

        Raises:
            RouteChange: If the GPU cannot resize frames.
        """
        if self._gpu is None:
            if self._processes is None:
                yield from decode_resized(clip, expected, self._output, self._counters.timed)
            else:
                yield from self._processes.decode(clip, expected, self._output, self._counters)
            return
        part = frames_at_once((expected.height, expected.width), self._gpu)
        for requests, tensor, decoded in decode_clip_in_parts(clip, expected, part, device_name(self._gpu)):
            try:
                with self._counters.timed("resize_s"):
                    frames: Any = resize_on_gpu(tensor, self._output.shape[:2])
                    if not isinstance(self._slots, GpuSlots):
                        frames = copied_to_cpu(frames)
            except RuntimeError as error:  # such as too little memory
                raise self._change(file, f"the GPU could not resize frames or copy them: {error}") from error
            yield requests, frames, decoded

    def _put(self, slots: list[int], frames: Any) -> None:
        """Put frames into slots, except those for the frame cache on disk only."""
        own = [i for i, slot in enumerate(slots) if slot != NONE]
        if len(own) < len(slots):
            slots, frames = [slots[i] for i in own], frames[own]
        if slots:
            self._slots.put(slots, frames)

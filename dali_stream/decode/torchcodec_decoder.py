"""`Decoder` of a camera's video with torchcodec, or with PyAV for depth cameras, which puts the frames into slots.

GOPs are distributed to tasks for the decode threads. If a task fails, it is divided until the frame that fails is found.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from dali_stream.cache.buffers import ReadFrames
from dali_stream.cache.frame_files import RecordName
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.checks.none import NONE
from dali_stream.decode import depth
from dali_stream.decode.decoder import Decoded, Pool, even_tasks, named, task_frames
from dali_stream.decode.refusal import refusal_of_torchcodec
from dali_stream.decode.resize import resize, resize_on_gpu
from dali_stream.decode.stored import StoredFrames
from dali_stream.decode.torchcodec import Frames, decode, decode_in_parts, frames_at_once
from dali_stream.decode.torchcodec_cuda import device_name, own_stream
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, StorageError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.clip import config
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.schedule.frame_plan import FramePlan, Reads
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store


class _Gop(NamedTuple):
    """Frames of one GOP that a task decodes.

    Attributes:
        file: Index of the file.
        episode: Episode of the frames.
        name: Name of the file's frames on disk. None if they are not stored.
        frames: Frame indices within the episode.
        packets: Packet of each frame.
        slots: Slot into which each frame is put. `NONE` for frames that are decoded for the frame cache on disk only.
    """

    file: VideoIndex
    episode: int
    name: RecordName | None
    frames: list[int]
    packets: list[int]
    slots: list[int]


class _Frame(NamedTuple):
    """One of the frames of a `_Gop`, by its number in the lists."""

    gop: _Gop
    number: int


class TorchcodecDecoder(VideoFiles):
    """`Decoder` of a camera's video that puts the frames into slots. It decodes on the CPU, or on NVDEC.

    Video of a depth camera is decoded with PyAV, and resized with nearest neighbour.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        counters: Counters of the Loader.
        slots: Slots into which the decoder puts frames.
        size: Size (height, width) of the frames in batches, in pixels.
        any_size: See `VideoFiles`.
        stored: Frames on disk, from which the decoder reads frames and to which it adds those that it decodes. None without a
            frame cache on disk.
        gpu: CUDA device whose NVDEC decodes, or None to decode on the CPU.
    """

    def __init__(
        self,
        source: Source,
        key: str,
        counters: Counters,
        slots: Slots,
        size: tuple[int, int],
        any_size: bool,
        stored: StoredFrames | None,
        gpu: int | None,
    ) -> None:
        super().__init__(source, key, any_size)
        self._counters, self._slots, self._size, self._stored, self._gpu = counters, slots, size, stored, gpu
        self._present = source.videos[key].file != NONE
        self._is_depth = source.features[key].is_depth

    def start(self, pool: Pool, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> Decoded:
        """See `Decoder.start`."""
        planned, episode = plan.frames[self.key], plan.samples.episode
        failed: dict[int, DaliStreamError] = {}
        present = self._present[episode]
        for row, t in np.argwhere((planned.show == NONE) & present[:, None]).tolist():
            if row not in failed:
                failed[row] = self.missing(episodes, int(episode[row]), plan.shown_in_episode[self.key][row, t : t + 1])
        gops = self._gops(planned, episodes) if len(planned.packet) else []
        batch = None if self._stored is None else self._stored.batch(planned)
        tasks = self._read(pool, planned.reads, batch, episodes)
        tasks += [pool.submit(self._decode, store, task) for task in self._deal(gops)]
        return Decoded(self._slots, planned, tasks, failed, batch)

    def close(self) -> None:
        """Free the slots, and close the files of the frame cache on disk."""
        self._slots.free()
        if self._stored is not None:
            self._stored.close()

    def _gops(self, plan: FramePlan, episodes: OpenEpisodes) -> list[_Gop]:
        starts = np.flatnonzero(np.diff(plan.gop, prepend=NONE)).tolist()
        stops = [*starts, len(plan.gop)][1:]
        indices = self._usable(plan, episodes)
        columns = [values.tolist() for values in (plan.frame, plan.packet, plan.slot)]
        return [
            _Gop(indices[episode], episode, episodes.record_name(self.key, episode), *(each[start:stop] for each in columns))
            for episode, start, stop in zip(plan.episode[starts].tolist(), starts, stops, strict=True)
            if episode in indices
        ]

    def _read(self, pool: Pool, reads: Reads, batch: ReadFrames | None, episodes: OpenEpisodes) -> list[Future[None]]:
        """Start the tasks that read frames from disk."""
        if self._stored is None or not len(reads.slot):
            return []
        indices = self._usable(reads, episodes)
        names = episodes.record_names(self.key, indices)
        if unusable := set(reads.episode.tolist()) - set(indices):
            reads = reads.chosen(~np.isin(reads.episode, list(unusable)))
        decode = functools.partial(self._decode_instead, episodes.store, reads, indices, names)
        return self._stored.start(pool, reads, batch, names, decode)

    def _decode_instead(
        self,
        store: Store,
        reads: Reads,
        indices: Mapping[int, VideoIndex],
        names: Mapping[int, RecordName],
        numbers: list[int],
    ) -> None:
        """Decode frames that could not be read from disk. `numbers` are their numbers in `reads`."""
        for episode, own in itertools.groupby(numbers, lambda number: int(reads.episode[number])):
            chosen = list(own)
            values = (column[chosen].tolist() for column in (reads.frame, reads.packet, reads.slot))
            # The blocks of encoded video for these frames were not fetched, so the file is read.
            self._decode(store, [_Gop(indices[episode], episode, names[episode], *values)])

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
                        raise self.change(index, reason)
                indices[episode] = index
        return indices

    def _deal(self, gops: list[_Gop]) -> list[list[_Gop]]:
        """Distribute GOPs to tasks.

        The GOPs of a task share their sample description, because a clip has only one. GOPs that are next to each other in a
        file are in the same task if possible.
        """
        by_config: dict[tuple[bytes, bytes], list[_Gop]] = {}
        for gop in sorted(gops, key=lambda gop: (gop.file.path, gop.packets[0])):
            by_config.setdefault(config(gop.file, gop.packets[0]), []).append(gop)
        tasks = []
        for alike in by_config.values():
            ends = np.cumsum([len(gop.packets) for gop in alike])
            video = self.format(alike[0].file, alike[0].packets[0])
            task = even_tasks(ends, task_frames((video.height, video.width)))
            tasks += [[alike[i] for i in np.flatnonzero(task == number)] for number in np.unique(task)]
        return tasks

    def _decode(self, store: Store, gops: list[_Gop]) -> None:
        """Decode GOPs in a decode thread, and put their frames into slots.

        If decoding fails, the first half of the frames is tried, until a single frame fails. Only this frame gets the error.
        The frames after it often fail, too, so they are tried in groups that begin with one frame and double. If the frames of
        a group are all in one file that cannot be read, all of them get the error.

        Raises:
            RouteChange: If NVDEC cannot decode a frame, and the CPU can, or if the GPU's memory is not enough.
        """
        frames = [_Frame(gop, i) for gop in gops for i in range(len(gop.packets))]
        if self._stored is not None:
            frames = list(self._still_missing(self._stored, frames))
        start, count = 0, len(frames)
        failed = 0  # end of the frames of which at least one must fail, because they failed together
        while start < len(frames):
            part = frames[start : start + count]
            try:
                self._decode_together(store, part)
            except torch.OutOfMemoryError as error:
                raise self.change(part[0].gop.file, f"the GPU's memory is not enough for {len(part)} frames") from error
            except (DecodeError, DatasetError, StorageError) as error:
                # No batch needs the frames for the disk only. They may be why others failed.
                if any(gop.slots[i] == NONE for gop, i in part):
                    frames = frames[:start] + [frame for frame in frames[start:] if frame.gop.slots[frame.number] != NONE]
                    continue
                if len(part) > 1 and (isinstance(error, DecodeError) or len({gop.file.path for gop, _ in part}) > 1):
                    failed, count = start + len(part), len(part) // 2
                    continue
                for gop, i in part:  # a single frame, or frames of one file that cannot be read
                    if isinstance(error, DecodeError) and self._gpu is not None:
                        error = self._on_cpu(store, gop.file, gop.packets[i], error)
                    if isinstance(error, DecodeError):
                        error = self.named(gop.episode, np.array([gop.frames[i]]), gop.file, error)
                    self._slots.fail(gop.slots[i], error.with_traceback(None))  # it would keep packets and pixels
                failed, count = 0, 1
            else:
                rest = failed - start - len(part)
                count = (rest + 1) // 2 if rest > 0 else 2 * count
            start += len(part)

    def _on_cpu(
        self, store: Store, file: VideoIndex, packet: int, error: DecodeError
    ) -> DecodeError | DatasetError | StorageError:
        """Return the CPU's error for a frame that NVDEC cannot decode. Raises RouteChange if the CPU can decode it."""
        try:
            decode(store, [file], [packet], self.format(file, packet))
        except (DecodeError, DatasetError, StorageError) as on_cpu:
            return on_cpu
        raise self.change(file, error) from error

    def _still_missing(self, stored: StoredFrames, frames: list[_Frame]) -> Iterator[_Frame]:
        """Yield the frames that must be decoded, because they were not added to the frame cache on disk meanwhile."""
        for name, group in itertools.groupby(frames, lambda frame: frame.gop.name):
            own = list(group)
            if name is None:
                yield from own
                continue
            places = [(gop.episode, gop.frames[i]) for gop, i in own]
            packets, slots = [gop.packets[i] for gop, i in own], [gop.slots[i] for gop, i in own]
            is_there = stored.read_added(name, packets, slots, places)
            yield from (frame for frame, there in zip(own, is_there, strict=True) if not there)

    def _decode_together(self, store: Store, frames: list[_Frame]) -> None:
        """Decode frames with one clip if possible, and put them into slots. Raises DecodeError if one of them fails."""
        indices = [gop.file for gop, _ in frames]
        packets, slots = [gop.packets[i] for gop, i in frames], [gop.slots[i] for gop, i in frames]
        video, decoded, stored = self.format(indices[0], packets[0]), 0, 0
        part, timed = frames_at_once((video.height, video.width), self._gpu), self._counters.timed
        device, decode_parts = device_name(self._gpu), depth.decode_clip_in_parts if self._is_depth else None
        try:
            with timed("decode_s"), own_stream(self._gpu):
                parts = decode_in_parts(store, indices, packets, video, part, timed, device, decode_parts)
                for requests, tensor, more in parts:
                    with timed("resize_s"):
                        resized = self._resized(tensor, frames[0].gop.file)
                        self._put([slots[i] for i in requests], resized)
                    if self._stored is not None:
                        self._stored.add(
                            (gop.name, gop.packets[i], (gop.episode, gop.frames[i]), pixels)
                            for (gop, i), pixels in zip((frames[i] for i in requests), resized, strict=True)
                        )
                    decoded, stored = decoded + more, stored + len(requests)
        finally:
            self._counters.add(clips=1, decoded_frames=decoded, stored_frames=stored)

    def _resized(self, tensor: torch.Tensor, file: VideoIndex) -> Frames:
        """Return decoded frames in the size of batches, in the CPU's memory. Raises RouteChange if the GPU fails."""
        if self._is_depth:
            return depth.resize_nearest(tensor.numpy(), self._size).astype(self._slots.dtype, copy=False)
        if self._gpu is None:
            return resize(tensor.numpy(), self._size)
        try:
            return resize_on_gpu(tensor, self._size)
        except RuntimeError as error:  # such as too little memory
            raise self.change(file, f"the GPU could not resize frames or copy them: {error}") from error

    def _put(self, slots: list[int], frames: Frames) -> None:
        """Put frames into slots, except those for the frame cache on disk only."""
        own = [i for i, slot in enumerate(slots) if slot != NONE]
        if len(own) < len(slots):
            slots, frames = [slots[i] for i in own], frames[own]
        if slots:
            self._slots.put(slots, frames)

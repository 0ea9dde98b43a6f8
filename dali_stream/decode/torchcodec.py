"""Decoding of packed clips with torchcodec, on the CPU or on NVDEC.

One thread decodes a clip, and keeps no state for the next one.

A decoder may skip a damaged frame without an error, and return the next frame instead. The time of each returned frame is
therefore compared with the requested time.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dali_stream.cache.frame_files import RecordName
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.checks.none import NONE
from dali_stream.decode.decoder import Decoded, Pool, even_tasks, named, task_frames
from dali_stream.decode.refusal import refusal_of_torchcodec
from dali_stream.decode.resize import resize, resize_on_gpu
from dali_stream.decode.stored import StoredFrames
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, StorageError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.clip import TICK, TIMESCALE, Clip, config, is_avc, pack, span
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes
from dali_stream.observe.counters import Counters, Timed, untimed
from dali_stream.schedule.frame_plan import FramePlan, Reads
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store

try:
    import torchcodec
    from torchcodec.decoders import VideoDecoder

    from dali_stream.decode.torchcodec_cuda import device_name, own_stream
except (ImportError, OSError, RuntimeError) as error:
    raise DaliStreamError(
        f"torchcodec cannot be loaded ({(str(error).strip() or type(error).__name__).splitlines()[0]}). It needs FFmpeg's "
        "shared libraries, version 4 to 8 (Debian, Ubuntu: apt-get install ffmpeg), and a version that fits torch "
        "(constraints.txt has a pair that does)"
    ) from error

if TYPE_CHECKING:
    from torchcodec import FrameBatch

Frames = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
# Maximum size of the RGB frames at full size that a decode thread keeps in memory, in bytes. In glibc, threads have heaps of
# 64 MiB. A freed, aligned block in a heap is not reused for a block of the same size while a small block next to it is in use
# (glibc bug 14581, fixed in 2.38). If a heap is full, glibc allocates in the heap of the main thread, which then grows. With
# blocks of 30 MiB, a heap holds only two, and the process grew by gigabytes. With 15 MiB, it once exceeded its usual memory by
# 160 MB, on 2 busy cores. Blocks of 8 MiB take no more CPU time.
PART_BYTES = 8 << 20
_GPU_PART_BYTES = 16 << 20  # the same for a GPU, where resizing takes four times as much in addition


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

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        counters: Counters of the Loader.
        slots: Slots into which the decoder puts frames.
        size: Size (height, width) of the frames in batches, in pixels.
        any_size: See `VideoFiles`.
        stored: Frames on disk, from which the decoder reads frames and to which it adds those that it decodes. None without a
            frame cache on disk.
        gpu: CUDA device whose NVDEC decodes. Default: None, to decode on the CPU.
    """

    def __init__(
        self,
        source: Source,
        key: str,
        counters: Counters,
        slots: Slots,
        size: tuple[int, int],
        any_size: bool = False,
        stored: StoredFrames | None = None,
        gpu: int | None = None,
    ) -> None:
        super().__init__(source, key, any_size)
        self._counters, self._slots, self._size, self._stored, self._gpu = counters, slots, size, stored, gpu
        self._present = source.videos[key].file != NONE

    def start(self, pool: Pool, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> Decoded:
        """See `Decoder.start`."""
        planned, episode = plan.frames[self.key], plan.samples.episode
        failed: dict[int, DaliStreamError] = {}
        present = self._present[episode]
        for row, t in np.argwhere((planned.show == NONE) & present[:, None]).tolist():
            if row not in failed:
                failed[row] = self.missing(episodes, int(episode[row]), plan.shown_in_episode[self.key][row, t : t + 1])
        gops = self._gops(planned, episodes) if len(planned.packet) else []
        tasks = self._read(pool, planned.reads, episodes)
        tasks += [pool.submit(self._decode, store, task) for task in self._deal(gops)]
        return Decoded(self._slots, planned, tasks, failed)

    def close(self) -> None:
        """Free the slots, and close the files of the frame cache."""
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

    def _read(self, pool: Pool, reads: Reads, episodes: OpenEpisodes) -> list[Future[None]]:
        """Start the tasks that read frames from disk."""
        if self._stored is None or not len(reads.slot):
            return []
        indices = self._usable(reads, episodes)
        names = episodes.record_names(self.key, indices)
        if unusable := set(reads.episode.tolist()) - set(indices):
            reads = reads.chosen(~np.isin(reads.episode, list(unusable)))
        decode = functools.partial(self._decode_instead, episodes.store, reads, indices, names)
        return self._stored.start(pool, reads, names, decode)

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
                video = self.format(index, int(plan.packet[start]))
                if self._gpu is not None and (reason := refusal_of_torchcodec(self._gpu, video, index)):
                    raise self.change(index, reason)
                indices[episode] = index
        return indices

    def _deal(self, gops: list[_Gop]) -> list[list[_Gop]]:
        """Distribute GOPs to tasks.

        The GOPs of a task share their sample description, because a clip has only one. GOPs that are next to each other in a
        file are in the same task if possible.
        """
        by_config: dict[bytes, list[_Gop]] = {}
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
        device = device_name(self._gpu)
        try:
            with timed("decode_s"), own_stream(self._gpu):
                for requests, tensor, more in decode_in_parts(store, indices, packets, video, part, timed, device):
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


def decode(
    store: Store,
    indices: Sequence[VideoIndex],
    packets: Sequence[int],
    expected: VideoFormat,
    device: str = "cpu",
) -> tuple[Frames, int]:
    """Decode packets, and return their frames in the order of the requests.

    Args:
        store: Store of the files.
        indices: Index of the file of each request.
        packets: Packet of each request in its file. All packets must have frames of the same size.
        expected: Format of the frames according to the sample description, in particular their size.
        device: Device that decodes, "cpu" or a GPU such as "cuda:0". Default: "cpu".

    Returns:
        RGB frames in the CPU's memory, uint8, shape (n, H, W, 3), and the number of frames that were decoded for them.

    Raises:
        DecodeError: If the decoder fails, or returns another frame than the requested one.
    """
    frames, decoded = np.empty((len(packets), expected.height, expected.width, 3), np.uint8), 0
    for requests, part, more in decode_in_parts(store, indices, packets, expected, len(packets), device=device):
        frames[requests] = part.cpu().numpy()
        decoded += more
    return frames, decoded


def decode_in_parts(
    store: Store,
    indices: Sequence[VideoIndex],
    packets: Sequence[int],
    expected: VideoFormat,
    part: int,
    timed: Timed = untimed,
    device: str = "cpu",
) -> Iterator[tuple[list[int], torch.Tensor, int]]:
    """Decode packets in parts, which limits the memory for frames. See `decode` for the other arguments and the errors.

    Args:
        part: Maximum number of requests in a part.
        timed: Timer that measures reading and packing. Default: no measurement.

    Raises:
        UnsafeForNvdec: If the device is a GPU, and decoding starts at a keyframe that is not an IDR frame.

    Yields:
        Numbers of the requests in this part, their RGB frames as a uint8 tensor of shape (n, H, W, 3) on `device`, and the
        number of frames that were decoded since the previous part. If a request is yielded twice, the second frame is valid.
    """
    for group in _groups(indices, packets):
        mine, wanted = [indices[i] for i in group], [packets[i] for i in group]
        with timed("pack_s"):
            clip = pack(store, mine, wanted, for_nvdec=device != "cpu", hidden_frames=True, timed=timed)
        try:
            for requests, frames, decoded in decode_clip_in_parts(clip, expected, part, device):
                yield [group[i] for i in requests], frames, decoded
            continue
        except DecodeError:
            if not _holds_back(store, mine):
                raise
        # The requests are decoded again from the start of the file, including those that were already yielded.
        with timed("pack_s"):
            clip = pack(store, mine, wanted, from_the_start=True, timed=timed)
        for requests, frames, decoded in decode_clip_in_parts(clip, expected, part, device):
            yield [group[i] for i in requests], frames, decoded


def _holds_back(store: Store, indices: Sequence[VideoIndex]) -> bool:
    """Return whether FFmpeg may drop the last frames of a clip of these files.

    This happens for H.264 if a clip starts with a keyframe that is not an IDR frame. If the clip starts at the first frame of
    the file, FFmpeg returns all frames. Such clips take longer to decode, so they are used only if the shorter clip fails.
    """
    files = {id(index): index for index in indices}.values()
    return any(is_avc(index) and (index.open_gops or has_other_keyframes(store, index, "h264")) for index in files)


def _groups(indices: Sequence[VideoIndex], packets: Sequence[int]) -> list[list[int]]:
    """Divide requests into groups that can share a clip, and return the request numbers of each group.

    The requests of a group have the same sample description. In a file with open GOPs, they also have the same first packet to
    decode, because `pack` accepts only one run of consecutive packets from such a file.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (index, packet) in enumerate(zip(indices, packets, strict=True)):
        key = (id(index), span(index, packet)[0]) if index.open_gops else config(index, packet)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def decode_clip(clip: Clip, expected: VideoFormat, device: str = "cpu") -> Frames:
    """Decode one clip.

    Args:
        clip: Clip to decode.
        expected: Format of the frames.
        device: Device that decodes, "cpu" or a GPU such as "cuda:0". Default: "cpu".

    Returns:
        RGB frames in the CPU's memory, uint8, shape (n, H, W, 3), in the order of the clip's requests.

    Raises:
        DecodeError: If the decoder fails, or returns another frame than the requested one.
    """
    frames = np.empty((len(clip.frames), expected.height, expected.width, 3), np.uint8)
    for requests, part, _ in decode_clip_in_parts(clip, expected, len(clip.frames), device):
        frames[requests] = part.cpu().numpy()
    return frames


def decode_clip_in_parts(
    clip: Clip, expected: VideoFormat, part: int, device: str = "cpu"
) -> Iterator[tuple[list[int], torch.Tensor, int]]:
    """Decode the requests of a clip in display order, in parts of `part` requests. See `decode_in_parts` for what it yields."""
    order, decoded = sorted(range(len(clip.frames)), key=clip.frames.__getitem__), clip.coded_frames
    try:
        decoder = _open(clip, device)
        if expected.rotation and not hasattr(decoder.metadata, "rotation"):
            raise DecodeError(
                f"torchcodec {torchcodec.__version__} does not turn frames by {expected.rotation}° for display, as the file "
                "asks. Install torchcodec 0.11 or later"
            )
        size = decoder.metadata.height, decoder.metadata.width
        if size != (expected.height, expected.width):  # before torchcodec allocates memory for the frames
            raise DecodeError(
                f"its encoded frames must be {expected.height}×{expected.width}, as its sample description says, got "
                f"{size[0]}×{size[1]}"
            )
        for start in range(0, len(order), part):
            requests = order[start : start + part]
            batch = decoder.get_frames_at([clip.frames[i] for i in requests])
            yield requests, _checked(batch, [clip.frames[i] for i in requests], expected), decoded
            decoded = 0
    except torch.OutOfMemoryError:  # raised for a GPU, and not caused by the file
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise DecodeError(f"the {expected.codec} decoder failed: {_first_line(error)}") from error


def _checked(batch: FrameBatch, indices: list[int], expected: VideoFormat) -> torch.Tensor:
    """Return the frames of a batch after comparing their size with `expected` and their times with `indices`.

    Raises:
        DecodeError: If a frame has another size or time.
    """
    frames: torch.Tensor = batch.data
    # No stream is known that fails this check with torchcodec 0.13. torchcodec allocates a batch at the size in its metadata,
    # which `_decode_clip` has checked, and raises an error for a decoded frame of another size. Another size in the middle
    # of a stream was tried, and each bit of the first 12 bytes of each packet of a GOP was changed, in five codecs. Other
    # versions of torchcodec may resize such a frame.
    if frames.shape[1:] != (expected.height, expected.width, 3):
        size = "×".join(map(str, frames.shape[1:3]))
        raise DecodeError(
            f"its decoded frames must be {expected.height}×{expected.width}, as its sample description says, got {size}"
        )
    displayed = zip(batch.pts_seconds.tolist(), indices, strict=True)
    # In H.264, HEVC, AV1, VP9 and MPEG-4, a single changed bit in the header of a packet can make the decoder hide the frame or
    # ignore the packet. The request for this frame and the requests after it then receive later frames.
    wrong = sum(abs(seconds * TIMESCALE / TICK - index) > 0.25 for seconds, index in displayed)
    if wrong:
        raise DecodeError(
            f"the {expected.codec} decoder delivered other frames than the {wrong} requested ones, because "
            "the encoded data is damaged before or at them"
        )
    return frames


def _open(clip: Clip, device: str = "cpu") -> VideoDecoder:
    # The data is a tensor and not bytes. For bytes, torchcodec changes the warning filters of the process, which several
    # threads must not do at the same time.
    data = torch.frombuffer(clip.data, dtype=torch.uint8)
    # "approximate" avoids a scan of the clip. It is exact here, because the frame rate of a clip is constant.
    decoder = VideoDecoder(data, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate", device=device)
    if device != "cpu" and decoder.cpu_fallback:
        raise DecodeError(f"NVDEC does not decode it. torchcodec says: {decoder.cpu_fallback}")
    return decoder


def colour_space(clip: Clip) -> str | None:
    """Return FFmpeg's name of the colour matrix that the frames or the index of a clip specify, or None."""
    named = getattr(_open(clip).metadata, "color_space", None)  # exists since torchcodec 0.10
    return None if named is None else str(named)


def _first_line(error: Exception) -> str:
    """Return the first line of torchcodec's message, without the position in its source code at the beginning."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\w+, \S+\.(cpp|h):\d+, ", "", line)


def frames_at_once(size: tuple[int, int], gpu: int | None = None) -> int:
    """Return how many frames of this size (height, width) a decode thread may keep in memory before they are resized.

    The memory is that of the GPU, or that of the CPU for None.
    """
    part = PART_BYTES if gpu is None else _GPU_PART_BYTES
    return int(np.clip(part // (size[0] * size[1] * 3), 1, task_frames(size)))

"""Decoding with torchcodec, on the CPU: frames from packed clips, one thread per clip, no state between calls.

A decoder that meets damage may skip a frame without an error, and the next frame takes its place. So the time of each
delivered frame is compared with the requested time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.counters import Counters, Timed, untimed
from dali_stream.decode.decoder import Decoded, Pool, even_tasks, named, task_frames
from dali_stream.decode.resize import resize
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.source import ABSENT, Source
from dali_stream.mp4.clip import TICK, TIMESCALE, Clip, config, is_avc, pack, span
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import LACKING, VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes
from dali_stream.schedule.frames import FramePlan
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store

try:
    from torchcodec.decoders import VideoDecoder
except (ImportError, OSError, RuntimeError) as error:
    raise DaliStreamError(
        f"torchcodec cannot be loaded ({(str(error).strip() or type(error).__name__).splitlines()[0]}); it needs FFmpeg's "
        "shared libraries, version 4 to 8 (Debian, Ubuntu: apt-get install ffmpeg), and a version that fits torch "
        "(constraints.txt has a pair that does)"
    ) from error

if TYPE_CHECKING:
    from torchcodec import FrameBatch

Frames = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
# Of RGB at full size that a decode thread holds at a time. Threads have heaps of 64 MiB, where glibc does not use an aligned
# block again for another of its size while a small one beside it lives on (its bug 14581): with blocks of 30 MiB, two to a
# heap, the process grew by gigabytes.
PART_BYTES = 15 << 20


class _Gop(NamedTuple):
    """Frames of one GOP that a task decodes.

    Attributes:
        file: the index of their file.
        episode: that they belong to.
        frames: of the episode.
        packets: that hold them.
        slots: where they go.
    """

    file: VideoIndex
    episode: int
    frames: list[int]
    packets: list[int]
    slots: list[int]


class TorchcodecDecoder(VideoFiles):
    """A `Decoder` of a camera's video, into slots, resized to `size` (height, width)."""

    def __init__(self, source: Source, key: str, counters: Counters, slots: Slots, size: tuple[int, int]) -> None:
        super().__init__(source, key)
        self._counters, self._slots, self._size = counters, slots, size
        self._present = source.files(key) != ABSENT

    def start(self, pool: Pool, plan: BatchPlan, frames: Int64, episodes: OpenEpisodes, store: Store) -> Decoded:
        """See `Decoder`."""
        planned, episode = plan.frames[self.key], plan.samples.episode
        failed: dict[int, DecodeError] = {}
        present = self._present[episode]
        for row, t in np.argwhere((planned.show == LACKING) & present[:, None]).tolist():
            if row not in failed:
                failed[row] = self._missing(episodes, int(episode[row]), int(frames[row, t]))
        gops = self._gops(planned, episodes) if len(planned.packet) else []
        tasks = [pool.submit(self._decode, store, task) for task in self._deal(gops)]
        return Decoded(self._slots, planned, tasks, failed)

    def close(self) -> None:
        """Frees the slots."""
        self._slots.free()

    def _missing(self, episodes: OpenEpisodes, episode: int, frame: int) -> DecodeError:
        """The error for a frame that has no packet."""
        try:
            error = self.lacking(episodes, episodes.index(self.key, episode), episode, frame)
        except DecodeError as broken:
            error = broken
        return named(self._source, self.key, episode, np.array([frame]), error)

    def _gops(self, plan: FramePlan, episodes: OpenEpisodes) -> list[_Gop]:
        starts = np.flatnonzero(np.diff(plan.gop, prepend=LACKING)).tolist()
        stops = [*starts, len(plan.gop)][1:]
        indices = self._usable(plan, episodes)
        columns = [values.tolist() for values in (plan.frame, plan.packet, plan.slot)]
        return [
            _Gop(indices[episode], episode, *(values[start:stop] for values in columns))
            for episode, start, stop in zip(plan.episode[starts].tolist(), starts, stops, strict=True)
            if episode in indices
        ]

    def _usable(self, plan: FramePlan, episodes: OpenEpisodes) -> dict[int, VideoIndex]:
        """The indices of the files to decode. Where a file is not what the metadata promise, its frames fail."""
        indices = {}
        starts = np.flatnonzero(np.diff(plan.episode, prepend=LACKING)).tolist()  # GOPs of one episode are neighbours
        for start, stop in itertools.pairwise([*starts, len(plan.episode)]):
            own, episode = slice(start, stop), int(plan.episode[start])
            index = episodes.index(self.key, episode)
            try:
                self.checked(index, plan.packet[own], episode)
            except DecodeError as error:
                for frame, slot in zip(plan.frame[own], plan.slot[own].tolist(), strict=True):
                    self._slots.fail(slot, named(self._source, self.key, episode, frame, error))
            else:
                indices[episode] = index
        return indices

    def _deal(self, gops: list[_Gop]) -> list[list[_Gop]]:
        """Tasks: GOPs of one sample description, since a clip has one; neighbours in a file together."""
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
        """Decode pool: fills the slots of these frames."""
        indices = [gop.file for gop in gops for _ in gop.packets]
        packets = [packet for gop in gops for packet in gop.packets]
        slots = [slot for gop in gops for slot in gop.slots]
        video, decoded = self.format(indices[0], packets[0]), 0
        part, timed = frames_at_once((video.height, video.width)), self._counters.timed
        try:
            with timed("decode_s"):
                for requests, tensor, more in decode_in_parts(store, indices, packets, video, part, timed):
                    with timed("resize_s"):
                        frames = resize(tensor.numpy(), self._size)
                    self._slots.put([slots[i] for i in requests], frames)
                    decoded += more
        except DecodeError as error:
            if len(packets) > 1:
                for gop in gops:
                    for one in zip(gop.frames, gop.packets, gop.slots, strict=True):
                        self._decode(store, [_Gop(gop.file, gop.episode, *([value] for value in one))])
            else:
                self._slots.fail(slots[0], self.named(gops[0].episode, np.array(gops[0].frames), gops[0].file, error))
        self._counters.add(clips=1, decoded_frames=decoded)


def decode(
    store: Store,
    indices: Sequence[VideoIndex],
    packets: Sequence[int],
    expected: VideoFormat,
    timed: Timed = untimed,
    device: str = "cpu",
) -> tuple[Frames, int]:
    """Decodes packets, in the order asked for.

    Args:
        store: of the files.
        indices, packets: per request, the index of its file, and the packet there; all with the same sample description.
        expected: what that says, in particular the size of the frames.
        timed: counts the time of reading and packing.
        device: Where to decode, "cpu" or a GPU such as "cuda:0".

    Returns:
        (n, H, W, 3) uint8 RGB in the CPU's memory, and how many frames were decoded for it.

    Raises:
        DecodeError: the decoder failed, or delivered another frame than the one asked for.
    """
    frames, decoded = np.empty((len(packets), expected.height, expected.width, 3), np.uint8), 0
    for requests, part, more in decode_in_parts(store, indices, packets, expected, len(packets), timed, device):
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
    """Decode packets, a few at a time, so that little memory is taken at once. Arguments and errors as of `decode`.

    Args:
        part: Maximum number of requests at a time.

    Yields:
        The numbers of some requests, their frames as a tensor of shape (n, H, W, 3) on `device`, and how many frames were
        decoded since the part before. Requests may come again, with frames that replace those of the first time.
    """
    for group in _groups(indices, packets):
        mine, wanted = [indices[i] for i in group], [packets[i] for i in group]
        with timed("pack_s"):
            clip = pack(store, mine, wanted, timed=timed)
        try:
            for requests, frames, decoded in _decode_clip(clip, expected, part, device):
                yield [group[i] for i in requests], frames, decoded
            continue
        except DecodeError:
            if not _holds_back(store, mine):
                raise
        with timed("pack_s"):
            clip = pack(store, mine, wanted, from_the_start=True, timed=timed)
        for requests, frames, decoded in _decode_clip(clip, expected, part, device):
            yield [group[i] for i in requests], frames, decoded


def _holds_back(store: Store, indices: Sequence[VideoIndex]) -> bool:
    """Return whether FFmpeg may keep the last frames of a clip of these files: of H.264 with keyframes other than IDR frames.

    It shows all frames after the file's first one. That is slower, so it is tried only if the shorter clip fails.
    """
    files = {id(index): index for index in indices}.values()
    return any(is_avc(index) and (index.open_gops or has_other_keyframes(store, index, "h264")) for index in files)


def _groups(indices: Sequence[VideoIndex], packets: Sequence[int]) -> list[list[int]]:
    """Requests, by number, that may share a clip: those of one description, and in open GOPs those of one run."""
    groups: dict[Hashable, list[int]] = {}
    for i, (index, packet) in enumerate(zip(indices, packets, strict=True)):
        key = (id(index), span(index, packet)[0]) if index.open_gops else config(index, packet)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def decode_clip(clip: Clip, expected: VideoFormat, device: str = "cpu") -> Frames:
    """Decodes one clip to (n, H, W, 3) uint8 RGB, in the CPU's memory. Errors as in `decode`."""
    frames = np.empty((len(clip.frames), expected.height, expected.width, 3), np.uint8)
    for requests, part, _ in _decode_clip(clip, expected, len(clip.frames), device):
        frames[requests] = part.cpu().numpy()
    return frames


def _decode_clip(
    clip: Clip, expected: VideoFormat, part: int, device: str = "cpu"
) -> Iterator[tuple[list[int], torch.Tensor, int]]:
    """The requests of a clip in the order in which they are shown, `part` at a time. As `decode_in_parts`."""
    order, decoded = sorted(range(len(clip.frames)), key=clip.frames.__getitem__), clip.coded_frames
    try:
        decoder = _open(clip, device)
        size = decoder.metadata.height, decoder.metadata.width
        if size != (expected.height, expected.width):  # before memory is taken for frames of that size
            raise DecodeError(
                f"its encoded frames are {size[0]}×{size[1]}, and its sample description says "
                f"{expected.height}×{expected.width}"
            )
        for start in range(0, len(order), part):
            requests = order[start : start + part]
            batch = decoder.get_frames_at([clip.frames[i] for i in requests])
            yield requests, _checked(batch, [clip.frames[i] for i in requests], expected), decoded
            decoded = 0
    except torch.OutOfMemoryError:  # of a GPU, which is no fault of the file
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise DecodeError(f"the {expected.codec} decoder failed: {_first_line(error)}") from error


def _checked(batch: FrameBatch, indices: list[int], expected: VideoFormat) -> torch.Tensor:
    """Return the frames of a batch if their size is the expected one and their times are those of `indices`.

    Raises:
        DecodeError: If a frame has another size or time.
    """
    frames: torch.Tensor = batch.data
    # No real stream fails this check with torchcodec 0.13. It allocates a batch at the size in its metadata, which was compared
    # in `_decode_clip`, and raises an error for a decoded frame of another size. Tried: another size in the middle of a stream,
    # and each bit of the first 12 bytes of each packet of a GOP, in five codecs. Other versions may resize such a frame.
    if frames.shape[1:] != (expected.height, expected.width, 3):
        size = "×".join(map(str, frames.shape[1:3]))
        raise DecodeError(
            f"its decoded frames must be {expected.height}×{expected.width}, as its sample description says, got {size}"
        )
    displayed = zip(batch.pts_seconds.tolist(), indices, strict=True)
    # One changed bit in a packet's header leads here in H.264, HEVC, AV1, VP9 and MPEG-4: the frame is hidden, or its packet is
    # ignored, and the request for it and those after it receive later frames.
    wrong = sum(abs(seconds * TIMESCALE / TICK - index) > 0.25 for seconds, index in displayed)
    if wrong:
        raise DecodeError(
            f"the {expected.codec} decoder delivered other frames than the {wrong} asked for: the encoded data "
            "is damaged before or at them"
        )
    return frames


def _open(clip: Clip, device: str = "cpu") -> VideoDecoder:
    # A tensor: given bytes, torchcodec changes the warning filters of the whole process, which no two threads may do.
    data = torch.frombuffer(clip.data, dtype=torch.uint8)
    # "approximate" spares a scan; a clip's frames are one tick apart, so an index is a time exactly.
    decoder = VideoDecoder(data, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate", device=device)
    if device != "cpu" and decoder.cpu_fallback:
        raise DecodeError(f"NVDEC does not decode it. torchcodec says: {decoder.cpu_fallback}")
    return decoder


def colour_space(clip: Clip) -> str | None:
    """FFmpeg's name of the matrix of a clip's colours, out of its frames or its index; None where neither names one."""
    named = getattr(_open(clip).metadata, "color_space", None)  # torchcodec has it since 0.10
    return None if named is None else str(named)


def _first_line(error: Exception) -> str:
    """What torchcodec says, without the place in its source that it begins with."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\w+, \S+\.(cpp|h):\d+, ", "", line)


def frames_at_once(size: tuple[int, int]) -> int:
    """How many frames of this (height, width) are in memory at full size at a time, per decode thread."""
    return int(np.clip(PART_BYTES // (size[0] * size[1] * 3), 1, task_frames(size)))

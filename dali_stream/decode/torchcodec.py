"""Decoding of packed clips with torchcodec, on the CPU or on NVDEC.

One thread decodes a clip, and keeps no state for the next one.

A decoder may skip a damaged frame without an error, and return the next frame instead. The time of each returned frame is
therefore compared with the requested time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dali_stream.decode.decoder import task_frames
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import TICK, TIMESCALE, Clip, config, is_avc, pack, span
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes
from dali_stream.observe.counters import Timed, untimed
from dali_stream.storage import Store
from dali_stream.system.torchcodec_import import explained_import

with explained_import():
    import torchcodec
    from torchcodec.decoders import VideoDecoder

if TYPE_CHECKING:
    from torchcodec import FrameBatch

Frames = npt.NDArray[np.uint8]
DecodeParts = Callable[[Clip], Iterator[tuple[list[int], Any, int]]]  # such as `decode_clip_in_parts` with its other arguments


class Part(NamedTuple):
    """Part of the requests of `decode_in_parts`.

    Attributes:
        requests: Numbers of the requests.
        frames: Their frames.
        decoded: Number of frames that were decoded since the previous part.
        hashes: `Clip.hashes` of each request. Empty unless they were requested.
    """

    requests: list[int]
    frames: Any
    decoded: int
    hashes: list[Mapping[int, int]]


# Maximum size of the RGB frames at full size that a decode thread keeps in memory, in bytes. In glibc, threads have heaps of
# 64 MiB. A freed, aligned block in a heap is not reused for a block of the same size while a small block next to it is in use
# (glibc bug 14581, fixed in 2.38). If a heap is full, glibc allocates in the heap of the main thread, which then grows. With
# blocks of 30 MiB, a heap holds only two, and the process grew by gigabytes. With 15 MiB, it once exceeded its usual memory by
# 160 MB, on 2 busy cores. Blocks of 8 MiB take no more CPU time.
PART_BYTES = 8 << 20
_GPU_PART_BYTES = 64 << 20  # the same for a GPU, which resizes few of them at a time. All 32 frames of 640×480 of a task fit


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
    decode_parts = functools.partial(decode_clip_in_parts, expected=expected, part=len(packets), device=device)
    for requests, part, more, _ in decode_in_parts(store, indices, packets, decode_parts, for_nvdec=device != "cpu"):
        frames[requests] = part.cpu().numpy()
        decoded += more
    return frames, decoded


def decode_in_parts(
    store: Store,
    indices: Sequence[VideoIndex],
    packets: Sequence[int],
    decode_parts: DecodeParts,
    *,
    for_nvdec: bool = False,
    hashed: bool = False,
    timed: Timed = untimed,
) -> Iterator[Part]:
    """Pack packets into clips, and decode these in parts, which limits the memory for frames.

    Args:
        store, indices, packets: See `decode`.
        decode_parts: Decoder of a clip.
        for_nvdec: Whether NVDEC decodes the clips. Default: False.
        hashed: Whether to return hashes of the packets. Default: False.
        timed: Timer that measures reading and packing. Default: no measurement.

    Raises:
        DecodeError: See `decode`.
        UnsafeForNvdec: If NVDEC decodes, and decoding starts at a keyframe that is not an IDR frame.

    Yields:
        Parts, with the frames that `decode_parts` yields. If a request is yielded twice, the second frame is valid.
    """
    for group in _groups(indices, packets):
        mine, wanted = [indices[i] for i in group], [packets[i] for i in group]
        # If a clip fails, its requests are decoded again from the start of the file, also those that were already yielded.
        for from_the_start in (False, True):
            with timed("pack_s"):
                clip = pack(
                    store, mine, wanted, from_the_start=from_the_start, for_nvdec=for_nvdec and not from_the_start,
                    hidden_frames=True, hashed=hashed, timed=timed,
                )  # fmt: skip
            try:
                for requests, frames, decoded in decode_parts(clip):
                    hashes = [clip.hashes[i] for i in requests] if hashed else []
                    yield Part([group[i] for i in requests], frames, decoded, hashes)
                break
            except DecodeError:
                if from_the_start or not _holds_back(store, mine):
                    raise


def _holds_back(store: Store, indices: Sequence[VideoIndex]) -> bool:
    """Return whether FFmpeg may drop the last frames of a clip of these files.

    This happens for H.264 if a clip starts with a keyframe that is not an IDR frame. If the clip starts at the first frame of
    the file, FFmpeg returns all frames. Such clips take longer to decode, so they are used only if the shorter clip fails.
    """
    files = {id(index): index for index in indices}.values()
    return any(is_avc(index) and (index.open_gops or has_other_keyframes(store, index, "h264")) for index in files)


def _groups(indices: Sequence[VideoIndex], packets: Sequence[int]) -> list[list[int]]:
    """Divide requests into groups that can share a clip, and return the request numbers of each group.

    The requests of a group have the same `config`. In a file with open GOPs, they also have the same first packet to decode,
    because `pack` accepts only one run of consecutive packets from such a file.
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
    """Decode the requests of a clip in display order, in parts of at most `part` frames.

    The keyframes in `Clip.keyframes` are decoded as well, and their times are compared before later frames are yielded.

    Yields:
        Numbers of the requests in this part, their RGB frames as a uint8 tensor of shape (n, H, W, 3) on `device`, and the
        number of frames that were decoded since the previous part.
    """
    indices = [*clip.frames, *set(clip.keyframes).difference(clip.frames)]
    order, decoded = sorted(range(len(indices)), key=indices.__getitem__), clip.coded_frames
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
            some = order[start : start + part]
            displayed = [indices[i] for i in some]
            frames = _checked(decoder.get_frames_at(displayed), displayed, expected)
            requests = [i for i in some if i < len(clip.frames)]
            if len(requests) < len(some):
                frames = frames[[place for place, i in enumerate(some) if i < len(clip.frames)]]
            if requests:
                yield requests, frames, decoded
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
    # which `decode_clip_in_parts` has checked, and raises an error for a decoded frame of another size. Another size in the
    # middle of a stream was tried, and each bit of the first 12 bytes of each packet of a GOP was changed, in five codecs.
    # Other versions of torchcodec may resize such a frame.
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

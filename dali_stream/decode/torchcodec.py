"""The torchcodec route: frames out of packed clips, on the CPU. No state between calls, one thread a clip.

FFmpeg is told nothing of where a clip came from, so a frame is known by its time alone: it is compared with the time
that was asked for, since a decoder that met damage may skip a frame and deliver its neighbour without a word.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from dali_stream.counters import Timed, untimed
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.mp4.clip import TICK, TIMESCALE, Clip, config, is_avc, pack, span
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
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


def decode(
    store: Store, tables: Sequence[VideoIndex], samples: Sequence[int], expected: VideoFormat, timed: Timed = untimed
) -> tuple[Frames, int]:
    """Decodes samples, in the order asked for.

    Args:
        store: where the files are.
        tables: per request, the table of its file; all with the same sample description.
        samples: per request, the sample in its file.
        expected: what the sample description says, in particular the size of the frames.
        timed: counts the time of reading and packing.

    Returns:
        (n, H, W, 3) uint8 RGB, and how many frames were decoded for it.

    Raises:
        DecodeError: the decoder failed, or delivered another frame than the one asked for.
    """
    frames, decoded = np.empty((len(samples), expected.height, expected.width, 3), np.uint8), 0
    for requests, part, more in decode_in_parts(store, tables, samples, expected, len(samples), timed):
        frames[requests] = part
        decoded += more
    return frames, decoded


def decode_in_parts(
    store: Store,
    tables: Sequence[VideoIndex],
    samples: Sequence[int],
    expected: VideoFormat,
    part: int,
    timed: Timed = untimed,
) -> Iterator[tuple[list[int], Frames, int]]:
    """Decodes samples, a few at a time, so that little memory is taken at once. Arguments and errors as of `decode`.

    Args:
        part: requests at a time, at most.

    Yields:
        The numbers of some requests, their frames, and how many frames were decoded since the part before. Requests may come
        again, with frames that replace those of the first time.
    """
    for group in _groups(tables, samples):
        mine, wanted = [tables[i] for i in group], [samples[i] for i in group]
        with timed("pack_s"):
            clip = pack(store, mine, wanted, timed=timed)
        try:
            for requests, frames, decoded in _decode_clip(clip, expected, part):
                yield [group[i] for i in requests], frames, decoded
            continue
        except DecodeError:
            # Of an H.264 file with open GOPs, only the first frame is sure to be one that FFmpeg shows all frames after.
            if not (mine[0].open_gops and is_avc(mine[0])):
                raise
        with timed("pack_s"):
            clip = pack(store, mine, wanted, from_the_start=True, timed=timed)
        for requests, frames, decoded in _decode_clip(clip, expected, part):
            yield [group[i] for i in requests], frames, decoded


def _groups(tables: Sequence[VideoIndex], samples: Sequence[int]) -> list[list[int]]:
    """Requests, by number, that may share a clip: those of one description, and in open GOPs those of one run."""
    groups: dict[Hashable, list[int]] = {}
    for i, (table, sample) in enumerate(zip(tables, samples, strict=True)):
        key = (id(table), span(table, sample)[0]) if table.open_gops else config(table, sample)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def decode_clip(clip: Clip, expected: VideoFormat) -> Frames:
    """Decodes one clip to (n, H, W, 3) uint8 RGB. Errors as in `decode`."""
    frames = np.empty((len(clip.frames), expected.height, expected.width, 3), np.uint8)
    for requests, part, _ in _decode_clip(clip, expected, len(clip.frames)):
        frames[requests] = part
    return frames


def _decode_clip(clip: Clip, expected: VideoFormat, part: int) -> Iterator[tuple[list[int], Frames, int]]:
    """The requests of a clip in the order in which they are shown, `part` at a time. As `decode_in_parts`."""
    order, decoded = sorted(range(len(clip.frames)), key=clip.frames.__getitem__), clip.coded_frames
    try:
        decoder = _open(clip)
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
    except (RuntimeError, ValueError, IndexError) as error:
        raise DecodeError(f"the {expected.codec} decoder failed: {_first_line(error)}") from error


def _checked(batch: FrameBatch, indices: list[int], expected: VideoFormat) -> Frames:
    """What torchcodec delivered, if it is what it was asked for."""
    frames: Frames = batch.data.numpy()
    if frames.shape[1:] != (expected.height, expected.width, 3):
        raise DecodeError(f"a decoded frame has shape {frames.shape[1:]}, and its file says {expected.height}×{expected.width}")
    shown = zip(batch.pts_seconds.tolist(), indices, strict=True)
    wrong = sum(abs(seconds * TIMESCALE / TICK - index) > 0.25 for seconds, index in shown)
    if wrong:
        raise DecodeError(
            f"the {expected.codec} decoder delivered other frames than the {wrong} asked for: the encoded data "
            "is damaged before or at them"
        )
    return frames


def _open(clip: Clip) -> VideoDecoder:
    # A tensor: given bytes, torchcodec changes the warning filters of the whole process, which no two threads may do.
    data = torch.frombuffer(clip.data, dtype=torch.uint8)
    # "approximate" spares a scan; a clip's frames are one tick apart, so an index is a time exactly.
    return VideoDecoder(data, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate", device="cpu")


def colour_space(clip: Clip) -> str | None:
    """FFmpeg's name of the matrix of a clip's colours, out of its frames or its index; None where neither names one."""
    named = getattr(_open(clip).metadata, "color_space", None)  # torchcodec has it since 0.10
    return None if named is None else str(named)


def _first_line(error: Exception) -> str:
    """What torchcodec says, without the place in its source that it begins with."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\w+, \S+\.(cpp|h):\d+, ", "", line)

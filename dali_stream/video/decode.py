"""The torchcodec route: frames out of packed clips, on the CPU. No state between calls, one thread a clip.

FFmpeg is told nothing of where a clip came from, so a picture is known by its time alone: it is compared with the time
that was asked for, since a decoder that met damage may skip a picture and deliver its neighbour without a word.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from dali_stream.counters import Timed, untimed
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.storage import Store
from dali_stream.video.clip import TICK, TIMESCALE, Clip, config, is_avc, pack, span
from dali_stream.video.format import VideoFormat
from dali_stream.video.table import SampleTable

try:
    from torchcodec.decoders import VideoDecoder
except (ImportError, OSError, RuntimeError) as error:
    raise DaliStreamError(
        f"torchcodec cannot be loaded ({(str(error).strip() or type(error).__name__).splitlines()[0]}); it needs FFmpeg's "
        "shared libraries, version 4 to 8 (Debian, Ubuntu: apt-get install ffmpeg), and a version that fits torch "
        "(constraints.txt has a pair that does)"
    ) from error

Frames = npt.NDArray[np.uint8]


def decode(
    store: Store, tables: Sequence[SampleTable], samples: Sequence[int], expected: VideoFormat, timed: Timed = untimed
) -> tuple[Frames, int]:
    """Decodes samples, in the order asked for.

    Args:
        store: where the files are.
        tables: per request, the table of its file; all with the same sample description.
        samples: per request, the sample in its file.
        expected: what the sample description says, in particular the size of the pictures.
        timed: counts the time of reading, packing and decoding.

    Returns:
        (n, H, W, 3) uint8 RGB, and how many pictures were decoded for it.

    Raises:
        DecodeError: the decoder failed, or delivered another picture than the one asked for.
    """
    groups = _groups(tables, samples)
    if len(groups) == 1:
        return _decode_group(store, tables, samples, expected, timed)
    frames, pictures = np.empty((len(samples), expected.height, expected.width, 3), np.uint8), 0
    for group in groups:
        found = _decode_group(store, [tables[i] for i in group], [samples[i] for i in group], expected, timed)
        frames[group] = found[0]
        pictures += found[1]
    return frames, pictures


def _decode_group(
    store: Store, tables: Sequence[SampleTable], samples: Sequence[int], expected: VideoFormat, timed: Timed
) -> tuple[Frames, int]:
    with timed("pack_s"):
        clip = pack(store, tables, samples, timed=timed)
    try:
        with timed("decode_s"):
            return decode_clip(clip, expected), clip.pictures
    except DecodeError:
        # Of an H.264 file with open GOPs, only the first picture is sure to be one that FFmpeg shows all pictures after.
        if not (tables[0].open_gops and is_avc(tables[0])):
            raise
    with timed("pack_s"):
        clip = pack(store, tables, samples, from_the_start=True, timed=timed)
    with timed("decode_s"):
        return decode_clip(clip, expected), clip.pictures


def _groups(tables: Sequence[SampleTable], samples: Sequence[int]) -> list[list[int]]:
    """Requests, by number, that may share a clip: those of one description, and in open GOPs those of one run."""
    groups: dict[Hashable, list[int]] = {}
    for i, (table, sample) in enumerate(zip(tables, samples, strict=True)):
        key = (id(table), span(table, sample)[0]) if table.open_gops else config(table, sample)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def decode_clip(clip: Clip, expected: VideoFormat) -> Frames:
    """Decodes one clip to (n, H, W, 3) uint8 RGB. Errors as in `decode`."""
    try:
        decoder = _open(clip)
        size = decoder.metadata.height, decoder.metadata.width
        if size != (expected.height, expected.width):  # before memory is taken for pictures of that size
            raise DecodeError(
                f"its encoded pictures are {size[0]}×{size[1]}, and its sample description says "
                f"{expected.height}×{expected.width}"
            )
        batch = decoder.get_frames_at(clip.frames)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DecodeError(f"the {expected.codec} decoder failed: {_first_line(error)}") from error
    frames: Frames = batch.data.numpy()
    if frames.shape[1:] != (expected.height, expected.width, 3):
        raise DecodeError(
            f"a decoded picture has shape {frames.shape[1:]}, and its file says {expected.height}×{expected.width}"
        )
    shown = zip(batch.pts_seconds.tolist(), clip.frames, strict=True)
    wrong = sum(abs(seconds * TIMESCALE / TICK - frame) > 0.25 for seconds, frame in shown)
    if wrong:
        raise DecodeError(
            f"the {expected.codec} decoder delivered other pictures than the {wrong} asked for: the encoded data "
            "is damaged before or at them"
        )
    return frames


def _open(clip: Clip) -> VideoDecoder:
    # A tensor: given bytes, torchcodec changes the warning filters of the whole process, which no two threads may do.
    data = torch.frombuffer(clip.data, dtype=torch.uint8)
    # "approximate" spares a scan; a clip's pictures are one tick apart, so an index is a time exactly.
    return VideoDecoder(data, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate", device="cpu")


def colour_space(clip: Clip) -> str | None:
    """FFmpeg's name of the matrix of a clip's colours, out of its pictures or its index; None where neither names one."""
    named = getattr(_open(clip).metadata, "color_space", None)  # torchcodec has it since 0.10
    return None if named is None else str(named)


def _first_line(error: Exception) -> str:
    """What torchcodec says, without the place in its source that it begins with."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\w+, \S+\.(cpp|h):\d+, ", "", line)

"""Compares a file with the request and with its source, decoded as a Loader decodes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.decode.route import smallest_coded_size
from dali_stream.decode.torchcodec import decode
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.damage import checker
from dali_stream.mp4.format import PROFILES, VideoFormat, codec_of, describe
from dali_stream.mp4.hidden import CODECS, hidden
from dali_stream.mp4.index import Int64, VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes
from dali_stream.storage import Store
from dali_stream.tools.output.copy import read_samples

FLOOR = 25.0  # dB in RGB that every compared frame must have: lossy codecs at sensible settings give 30 to 50
# Two frames count as different if they differ by this many times the encoding error. Recordings hold frames twice that differ
# by noise only, and the encoded second frame may look more like the first.
DIFFERS = 4.0
_MOST = 4  # most changed frames per episode, in addition to first, middle and last
_LOSSLESS = 100.0  # dB of equal frames, since JSON has no infinity


@dataclass(frozen=True)
class Video:
    """A file with its index."""

    store: Store
    table: VideoIndex


def refusal(file: Video, codec: str, gop: int) -> str:
    """Return why a file does not meet the request, by its index and its headers. Empty if it does."""
    table, video = file.table, describe(file.table.configs[0])
    if video.codec != codec:
        return f"it is {video.codec}"
    if len(table.configs) > 1:
        return f"it has {len(table.configs)} sample descriptions"
    if (video.chroma, video.depth) != ("420", 8) or video.profile not in PROFILES[codec]:
        return f"it is {video.pixel_format} of profile {video.profile}"
    if not video.like_bt601:
        return f"its colour matrix is {video.matrix}, and not BT.601"
    if table.track_header[:36] != UPRIGHT:
        return "its frames are rotated"
    if table.reordered or table.open_gops:
        return "it has B-frames or open GOPs"
    if table.longest_gop > gop:
        return f"its longest GOP has {table.longest_gop} frames"
    if has_other_keyframes(file.store, table, codec):
        return "it has keyframes that are not IDR frames"
    return video.header_error or _padding(video)


def _padding(video: VideoFormat) -> str:
    """Return how a file wastes space around its frames, or that it is interlaced. Empty if it does neither."""
    size = video.height, video.width
    smallest = smallest_coded_size(video.codec, *size)
    if video.interlaced:
        return "its frames are interlaced"
    if video.coded in (None, smallest):
        return ""
    what, coded = f"{size[0]}×{size[1]} is coded as", "{}×{}".format(*(video.coded or size))
    return f"{what} {coded}, and {smallest[0]}×{smallest[1]} is possible: use --encoder cpu"


def check_times(source: VideoIndex, out: VideoIndex, fps: float) -> None:
    """Raises DecodeError unless each frame of the source is in the output, at its own time."""
    if len(source) != len(out):
        raise DecodeError(f"{len(source)} frames went in, and {len(out)} came out")
    away = np.abs(source.pts[source.display_order] / source.timescale - out.pts[out.display_order] / out.timescale)
    if away.max() > 1 / 16 / fps:
        packet = int(np.argmax(away))
        raise DecodeError(f"its frame {packet} has moved by {away[packet]:.4f} s")


def scan(video: Video) -> int:
    """Reads every packet; returns how many frames are never displayed.

    Raises:
        DecodeError: one is damaged. A decoder would conceal it, and the encoded copy would hide the damage.
    """
    table, hidden_ones = video.table, 0
    head = np.zeros(len(table), np.bool_)
    head[table.keyframes] = True
    checks = [checker(config) for config in table.configs]
    codecs = [codec_of(config) for config in table.configs]
    samples = itertools.chain.from_iterable(read_samples(video.store, table, 0, len(table)))
    for number, data in enumerate(map(bytes, samples)):
        kind = table.config[number]
        check = checks[kind]
        if data and check and (wrong := check(data, 0, len(data), bool(head[number]))):
            where = f"at bytes {table.offset[number]} to {table.offset[number] + len(data)}"
            raise DecodeError(f"the encoded frame {where} is damaged: {wrong}. Copy the file again")
        if codecs[kind] in CODECS:
            hidden_ones += hidden(codecs[kind], data)
    return hidden_ones


def compare(source: Video, out: Video, shown: Int64, shown_out: Int64, what: str) -> list[float]:
    """Compares frames of an episode with the source's, and with their neighbours.

    Args:
        source, out: the files.
        shown, shown_out: (n,) packets of the episode's frames in each.
        what: camera and episode, for the message.

    Returns:
        PSNR in dB of each compared frame, over RGB.

    Raises:
        DaliStreamError: a frame is another one, or differs too much from its source.
    """
    found = []
    for frame in _frames_to_compare(out.table, shown_out):
        near = range(max(frame - 1, 0), min(frame + 2, len(shown)))
        sources = _decode(source, shown[near.start : near.stop])
        own = sources[frame - near.start]
        new = _decode(out, shown_out[frame : frame + 1])[0]
        if own.shape != new.shape:
            raise DaliStreamError(f"{what}, frame {frame}: its size has changed from {own.shape[:2]} to {new.shape[:2]}")
        errors = [_difference(new, other) for other in sources]
        error, best = errors[frame - near.start], int(np.argmin(errors))
        if errors[best] < error and _difference(own, sources[best]) > DIFFERS * errors[best]:
            raise DaliStreamError(f"{what}, frame {frame}: it looks like frame {near[best]} of the source")
        found.append(_psnr(error))
        if found[-1] < FLOOR:
            raise DaliStreamError(
                f"{what}, frame {frame}: PSNR against the source is {found[-1]:.1f} dB, and at least {FLOOR:g} is required; "
                "give a lower --crf"
            )
    return found


def _frames_to_compare(table: VideoIndex, shown: Int64) -> list[int]:
    """First, middle and last frame, and those with the largest predicted packets, where most changes."""
    predicted = np.where(np.isin(shown, table.keyframes), 0, table.size[shown])
    most = np.argsort(-predicted, kind="stable")[:_MOST]
    most = most[predicted[most] > 0] if predicted.any() else np.linspace(0, len(shown) - 1, _MOST + 2).astype(np.int64)[1:-1]
    return sorted({0, len(shown) // 2, len(shown) - 1, *most.tolist()})


def _decode(video: Video, samples: Int64) -> npt.NDArray[np.uint8]:
    table = video.table
    config = table.configs[table.config[samples[0]]]
    return decode(video.store, [table] * len(samples), samples.tolist(), describe(config))[0]


def _difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    return float(np.mean(np.square(a.astype(np.float32) - b)))


def _psnr(difference: float) -> float:
    return min(10 * math.log10(255**2 / difference), _LOSSLESS) if difference else _LOSSLESS

"""Whether a file is as asked, and shows what its source shows. Decoding is the one that a Loader uses."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.decode.torchcodec import decode
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.damage import checker
from dali_stream.mp4.format import PROFILES, codec_of, describe
from dali_stream.mp4.hidden import CODECS, hidden
from dali_stream.mp4.index import Int64, VideoIndex
from dali_stream.storage import Store
from dali_stream.tools.output.samples import read_samples

FLOOR = 25.0  # dB that every frame looked at has to have, in RGB: lossy codecs at sensible settings give 30 to 50
# Times the error of encoding from which the difference of two frames tells them apart. A recording holds frames twice,
# told apart by noise alone, and what is encoded from the second may then look more like the first.
DIFFERS = 4.0
_MOST = 4  # frames per episode that changed most, beside first, middle and last
_LOSSLESS = 100.0  # dB of equal frames, since JSON has no infinity


@dataclass(frozen=True)
class Video:
    """A file with its index."""

    store: Store
    table: VideoIndex


def refusal(table: VideoIndex, codec: str, gop: int) -> str:
    """Why a file is not as asked, as far as its index says; empty where it is."""
    video = describe(table.configs[0])
    if video.codec != codec:
        return f"it is {video.codec}"
    if len(table.configs) > 1:
        return f"it has {len(table.configs)} sample descriptions"
    if (video.chroma, video.depth) != ("420", 8) or video.profile not in PROFILES[codec]:
        return f"it is {video.pixel_format} of profile {video.profile}"
    if not video.like_bt601:
        return f"it says that its colours have matrix {video.matrix}, and not BT.601"
    if table.track_header[:36] != UPRIGHT:
        return "its frames are to be turned"
    if table.reordered or table.open_gops:
        return "it has B-frames or open GOPs"
    if table.longest_gop > gop:
        return f"its longest GOP has {table.longest_gop} frames"
    return ""


def check_times(source: VideoIndex, out: VideoIndex, fps: float) -> None:
    """Raises DecodeError where not each frame of the source has come out, at its own time."""
    if len(source) != len(out):
        raise DecodeError(f"{len(source)} frames went in, and {len(out)} came out")
    away = np.abs(source.pts[source.shown] / source.timescale - out.pts[out.shown] / out.timescale)
    if away.max() > 1 / 16 / fps:
        packet = int(np.argmax(away))
        raise DecodeError(f"its frame {packet} has moved by {away[packet]:.4f} s")


def scan(video: Video) -> int:
    """Reads every encoded frame; returns how many are never shown.

    Raises:
        DecodeError: one is damaged, so that a decoder would paint over it, and nobody see it in what is encoded from that.
    """
    table, hidden_ones = video.table, 0
    head = np.zeros(len(table), np.bool_)
    head[table.sync] = True
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
    """Holds frames of an episode against the source's, and against the neighbours of those.

    Args:
        source, out: the files.
        shown, shown_out: (n,) samples of each that show the episode's frames.
        what: camera and episode, for the message.

    Returns:
        PSNR in dB of each frame looked at, over RGB.

    Raises:
        DaliStreamError: a frame is another frame's, or hardly like its source.
    """
    found = []
    for frame in _worth_a_look(out.table, shown_out):
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
                f"{what}, frame {frame}: PSNR against the source is {found[-1]:.1f} dB, and {FLOOR:g} is the least; give a "
                "lower --crf"
            )
    return found


def _worth_a_look(table: VideoIndex, shown: Int64) -> list[int]:
    """First, middle and last frame, and those that take most bytes to be told from the frame before: there, most changes."""
    predicted = np.where(np.isin(shown, table.sync), 0, table.size[shown])
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

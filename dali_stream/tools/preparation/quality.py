"""Checks of encoded frames against those that went into the encoder, and of packets before they are decoded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import avg_pool2d

from dali_stream.decode.route import smallest_coded_size
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.damage import checker
from dali_stream.mp4.format import PROFILES, VideoFormat, describe
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes
from dali_stream.storage import Store
from dali_stream.tools.preparation.source import read_packets
from dali_stream.tools.work import spread

FLOOR = 25.0  # dB in RGB that every compared frame must have: lossy codecs at sensible settings give 30 to 50
# Two frames count as different if they differ by this many times the encoding error. Recordings hold frames twice that differ
# by noise only, and the encoded second frame may look more like the first.
DIFFERS = 4.0
COMPARED = 8  # frames of an episode
_LOSSLESS = 100.0  # dB of equal frames, since JSON has no infinity
Frames = npt.NDArray[np.uint8]


def refusal(store: Store, table: VideoIndex, codec: str, gop: int) -> str:
    """Return why an encoded file does not meet the request, by its index and its headers. Empty if it does."""
    video, configs = describe(table.configs[0]), len(table.configs)
    if video.codec != codec:
        return f"it is {video.codec}"
    faults = {
        f"it has {configs} sample descriptions": configs > 1,
        f"it is {video.pixel_format} of profile {video.profile}": (
            (video.chroma, video.depth) != ("420", 8) or video.profile not in PROFILES[codec]
        ),
        f"its colour matrix is {video.matrix}, and not BT.601": not video.like_bt601,
        "its frames are rotated": table.track_header[:36] != UPRIGHT,
        "it has B-frames or open GOPs": table.reordered or table.open_gops,
        f"its longest GOP has {table.longest_gop} frames": table.longest_gop > gop,
        "it has keyframes that are not IDR frames": has_other_keyframes(store, table, codec),
        "its frames are interlaced": video.interlaced,
    }
    fault = next((text for text, applies in faults.items() if applies), "")
    return fault or video.header_error or _padding(video)


def _padding(video: VideoFormat) -> str:
    """Return how a file wastes space around its frames. Empty if it does not."""
    size = video.height, video.width
    smallest = smallest_coded_size(video.codec, *size)
    if video.coded in (None, smallest):
        return ""
    coded = "{}×{}".format(*(video.coded or size))
    return f"{size[0]}×{size[1]} is coded as {coded}, and {smallest[0]}×{smallest[1]} is possible: use --encoder cpu"


def check_packets(store: Store, table: VideoIndex, start: int, stop: int) -> None:
    """Read packets. Raise DecodeError if one is damaged, which a decoder would conceal, and the encoded copy would hide."""
    is_keyframe = np.isin(np.arange(len(table)), table.keyframes[:])
    checks = [checker(config) for config in table.configs]
    packets = itertools.chain.from_iterable(read_packets(store, table, start, stop))
    for number, data in enumerate(map(bytes, packets), start):
        check = checks[table.config[number]]
        if data and check and (wrong := check(data, 0, len(data), bool(is_keyframe[number]))):
            where = f"at bytes {table.offset[number]} to {table.offset[number] + len(data)}"
            raise DecodeError(f"the encoded frame {where} is damaged: {wrong}. Copy the file again")


def compared(length: int) -> list[int]:
    """Return the frames of an episode that are compared: evenly spaced, with the first and the last."""
    return spread(length, COMPARED)


def compare(where: str, frame: int, own: Frames, new: Frames, neighbours: list[tuple[int, Frames]]) -> tuple[float, float]:
    """Compare an encoded frame with the one that went into the encoder, and with its neighbours.

    Args:
        where: File, camera and episode, for the message.
        frame: Number of the frame in its episode.
        own, new: Frame before and after encoding, shape (H, W, 3).
        neighbours: Numbers and frames before and after it.

    Returns:
        PSNR over RGB in dB, and SSIM.

    Raises:
        DaliStreamError: If it is another frame, or differs too much.
    """
    error = _difference(new, own)
    for number, other in neighbours:
        distance = _difference(new, other)
        if distance < error and _difference(own, other) > DIFFERS * distance:
            raise DaliStreamError(f"{where}, frame {frame}: it looks like frame {number} of the source")
    psnr = min(10 * math.log10(255**2 / error), _LOSSLESS) if error else _LOSSLESS
    if psnr < FLOOR:
        raise DaliStreamError(
            f"{where}, frame {frame}: PSNR against the source is {psnr:.1f} dB, and at least {FLOOR:g} is required. "
            "Give a lower --crf"
        )
    return psnr, ssim(own, new)


def _difference(a: Frames, b: Frames) -> float:
    return float(np.mean(np.square(a.astype(np.float32) - b)))


def ssim(a: Frames, b: Frames) -> float:
    """Return the structural similarity of two frames, as the mean over RGB and windows of 7×7 pixels (Wang et al., 2004)."""
    x, y = (torch.from_numpy(frame.copy()).permute(2, 0, 1).double()[None] for frame in (a, b))
    mean_x, mean_y = avg_pool2d(x, 7, 1), avg_pool2d(y, 7, 1)
    unbiased = 49 / 48
    var_x, var_y = ((avg_pool2d(v * v, 7, 1) - m * m) * unbiased for v, m in ((x, mean_x), (y, mean_y)))
    both = (avg_pool2d(x * y, 7, 1) - mean_x * mean_y) * unbiased
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    similarity = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return float(similarity.mean())

"""Checks of encoded files: their headers against the request, and their frames against the encoder's input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.decode.refusal import smallest_coded_size
from dali_stream.errors import DaliStreamError
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.format import PROFILES, VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes
from dali_stream.storage import Store

FLOOR = 25.0  # minimum PSNR of a compared frame over RGB, in dB; lossy codecs with sensible settings have 30 to 50
_EVERY = 4  # frames are compared with their neighbours in every fourth row and column
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # weights of red, green and blue in BT.601
_LOSSLESS = 100.0  # PSNR of equal frames in dB, since JSON has no infinity
Frames = npt.NDArray[np.uint8]


def refusal(store: Store, table: VideoIndex, codec: str, gop: int) -> str:
    """Return the reason why the index or headers of an encoded file do not meet the request. Empty if they do.

    Args:
        store: Storage of the file.
        table: Index of the file.
        codec: Requested codec.
        gop: Requested GOP length in frames.
    """
    video, configs = table.format(), len(table.configs)
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
    """Return a description of avoidable padding around the frames of a file. Empty without such padding."""
    size = video.height, video.width
    smallest = smallest_coded_size(video.codec, *size)
    if video.coded is None or video.coded == smallest:
        return ""
    coded, best = (f"{height}×{width}" for height, width in (video.coded, smallest))
    return f"{size[0]}×{size[1]} is coded as {coded}, and {best} is possible: use --encoder cpu"


class MovingFrame:
    """Frame of an episode that differs most from both of its neighbours. If another frame takes its place, its PSNR is lowest.

    Attributes:
        number: Index of the frame within its episode.
        frame: Copy of the frame, uint8, shape (H, W, 3).
    """

    def __init__(self) -> None:
        self.number = 0
        self.frame: Frames = np.empty((0, 0, 3), np.uint8)
        self._last, self._count, self._distance, self._most = self.frame, 0, 0.0, 0.0

    def add(self, frames: Frames) -> None:
        """Add the next frames of the episode, shape (n, H, W, 3)."""
        for frame in frames:
            if not self._count:
                self.frame = frame.copy()
            else:
                distance = _difference(frame[::_EVERY, ::_EVERY], self._last[::_EVERY, ::_EVERY])
                if min(distance, self._distance) > self._most:
                    self.number, self.frame, self._most = self._count - 1, self._last, min(distance, self._distance)
                self._distance = distance
            self._last, self._count = frame.copy(), self._count + 1


def check_psnr(where: str, frame: int, own: Frames, new: Frames) -> float:
    """Return the PSNR of an encoded frame against the source, over RGB in dB.

    Encoders get colours at half the resolution. The result includes this loss, but the check does not, since no `--crf`
    restores them.

    Args:
        where: File, camera and episode, for the message.
        frame: Index of the frame within its episode.
        own, new: Frame before and after encoding, uint8, shape (H, W, 3).

    Raises:
        DaliStreamError: If its PSNR against the encoder's input is less than `FLOOR`.
    """
    psnr = _psnr(new, own)
    if psnr < FLOOR and (against_input := _psnr(new, _with_half_colours(own))) < FLOOR:
        raise DaliStreamError(
            f"{where}, frame {frame}: PSNR against the encoder's input is {against_input:.1f} dB, and at least {FLOOR:g} is "
            "required. Give a lower --crf"
        )
    return psnr


def _with_half_colours(frame: Frames) -> npt.NDArray[np.float32]:
    """Return a frame whose colours have half the resolution in both directions, as an encoder of 4:2:0 gets them."""
    height, width = frame.shape[:2]
    even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), "edge").astype(np.float32)
    luma = (even @ _LUMA)[..., None]
    blocks = (even - luma).reshape(-1, 2, even.shape[1] // 2, 2, 3).mean((1, 3))
    return np.clip(luma + blocks.repeat(2, 0).repeat(2, 1), 0, 255)[:height, :width]


def _psnr(a: Frames, b: npt.NDArray[Any]) -> float:
    error = _difference(a, b)
    return min(10 * math.log10(255**2 / error), _LOSSLESS) if error else _LOSSLESS


def _difference(a: Frames, b: npt.NDArray[Any]) -> float:
    return float(np.mean(np.square(a.astype(np.float32) - b)))

"""Features of `meta/info.json`, and how each is read and delivered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}  # that images may have, with Pillow's name of such an image
ENCODING = ("info", "video_info")  # how a video is encoded, which does not identify its frames


class Feature(dict[str, Any]):
    """One entry of `features`, such as `{"dtype": "float32", "shape": [6], "names": [...]}`, with its rules."""

    @property
    def dtype(self) -> str:
        """As LeRobot names it: "video", "image", "string", "bool", "float32", "int64", ..."""
        return str(self["dtype"])

    @property
    def shape(self) -> tuple[int, ...]:
        """As stated: (1,) or () for a scalar, (H, W, C) or (C, H, W) for a camera."""
        return tuple(self["shape"])

    @property
    def is_camera(self) -> bool:
        """Whether it holds frames, as video or as images."""
        return self.dtype in ("video", "image")

    @property
    def is_video(self) -> bool:
        """Whether its frames are in MP4 files."""
        return self.dtype == "video"

    @property
    def is_image(self) -> bool:
        """Whether its frames are images in Parquet rows."""
        return self.dtype == "image"

    @property
    def is_text(self) -> bool:
        """Whether its values are strings."""
        return self.dtype == "string"

    @property
    def is_float(self) -> bool:
        """Whether its values are floating point numbers."""
        return self.dtype.startswith("float")

    @property
    def numpy(self) -> type[np.generic]:
        """The dtype of its numbers in a batch: bool, float32 for every float, int64 for every integer."""
        return np.bool_ if self.dtype == "bool" else np.float32 if self.is_float else np.int64

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of its value for one row of a batch: () where LeRobot has (1,)."""
        return () if self.shape == (1,) else self.shape

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        """The shape of a statistic of it in a batch: of a row, or (C, 1, 1) of a camera."""
        return (self.channels, 1, 1) if self.is_camera else self.row_shape

    @property
    def row_bytes(self) -> int:
        """Memory of its value for one row; of images and text, without what they point to."""
        if self.is_video:
            return 4
        if self.is_image:
            return 8
        if self.is_text:
            return 8 * math.prod(self.shape)
        return math.prod(self.shape) * (1 if self.dtype == "bool" else 4 if self.is_float else 8)

    @property
    def object_bytes(self) -> int:
        """About how much an image or texts take beside that: half of an image's pixels, 64 bytes for a text."""
        return math.prod(self.shape) // 2 if self.is_image else 64 * math.prod(self.shape) if self.is_text else 0

    @property
    def frame_size(self) -> tuple[int, int]:
        """(height, width) of a camera's frames."""
        return self._layout[:2]

    @property
    def channels(self) -> int:
        """Channels of a camera's frames in a batch: 3 of video, which is always converted to RGB, and as stated of images."""
        return 3 if self.is_video else self._layout[2]

    @property
    def _layout(self) -> tuple[int, int, int]:
        """A camera's shape as (H, W, C). It is written like that, or as (C, H, W)."""
        first, second, third = self.shape
        return (second, third, first) if first in CHANNELS and third not in CHANNELS else (first, second, third)

    @property
    def is_depth(self) -> bool:
        """Whether a camera holds distances, which have a meaning to the bit, and no frames."""
        said: dict[str, Any] = next((self[place] for place in ENCODING if isinstance(self.get(place), dict)), {})
        deep = str(said.get("video.pix_fmt", "")).startswith("gray1")  # gray10le to gray16le; 8 bit may be a camera's frame
        return bool(deep or said.get("video.is_depth_map") or said.get("is_depth_map"))

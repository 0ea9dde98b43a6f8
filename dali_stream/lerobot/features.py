"""Features of `meta/info.json`, with the shape and dtype of their values in a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dali_stream.errors import FrameSizeError

CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}  # supported numbers of image channels, with Pillow's mode for each
MOST_PIXELS = 1 << 25  # of a frame whose size differs from `meta/info.json`; a frame of 8K video has 33 million
ENCODING = ("info", "video_info")  # entries that describe the encoding of a video and not its frames
UNITS = ("m", "mm")  # of distances
_MOST_METRES = 1e9  # no camera measures this distance, and float32 has it in millimetres, too


class Quantization(NamedTuple):
    """Meaning of the 12-bit codes of depth video. The default is that of LeRobot.

    Attributes:
        depth_min, depth_max: Distances of the codes 0 and 4095, in metres.
        shift: Distance that is added before the logarithm, in metres.
        use_log: Whether codes are proportional to the logarithm of the distance, and not to the distance.
    """

    depth_min: float = 0.01
    depth_max: float = 10.0
    shift: float = 3.5
    use_log: bool = True

    @property
    def fault(self) -> str:
        """Error message for values that are invalid, since they are from a file. Empty if all are valid."""
        numbers = self[:3]
        if not all(type(number) in (int, float) and abs(number) <= _MOST_METRES for number in numbers):
            return f"depth_min, depth_max and shift must be finite numbers of at most {_MOST_METRES:g}, got {str(numbers)[:80]}"
        if not isinstance(self.use_log, bool):
            return f"use_log must be true or false, got {str(self.use_log)[:40]}"
        if self.depth_min >= self.depth_max:
            return f"depth_min must be less than depth_max, got {self.depth_min} and {self.depth_max}"
        if self.use_log and self.depth_min + self.shift <= 0:
            return f"depth_min + shift must be positive with use_log, got {self.depth_min} + {self.shift}"
        return ""


class Feature(dict[str, Any]):
    """One entry of `features`, such as `{"dtype": "float32", "shape": [6], "names": [...]}`."""

    @property
    def dtype(self) -> str:
        """Name of the dtype in LeRobot: "video", "image", "string", "language", "bool", "float32", "int64", ..."""
        return str(self["dtype"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in `meta/info.json`: (1,) or () for a scalar, (H, W, C) or (C, H, W) for a camera."""
        return tuple(self["shape"])

    @property
    def is_camera(self) -> bool:
        """Whether the feature is a camera, with video or images."""
        return self.dtype in ("video", "image")

    @property
    def is_video(self) -> bool:
        """Whether the feature is a camera whose frames are in MP4 files."""
        return self.dtype == "video"

    @property
    def is_image(self) -> bool:
        """Whether the feature is a camera whose frames are images in Parquet rows."""
        return self.dtype == "image"

    @property
    def is_language(self) -> bool:
        """Whether the values are lists of annotations (dicts), as in LeRobot's columns `language_persistent` and
        `language_events`."""
        return self.dtype == "language"

    @property
    def is_text(self) -> bool:
        """Whether the values are Python objects in a batch: strings, or lists of annotations, see `is_language`."""
        return self.dtype == "string" or self.is_language

    @property
    def is_float(self) -> bool:
        """Whether the values are floating point numbers."""
        return self.dtype.startswith("float")

    @property
    def numpy(self) -> type[np.generic]:
        """Dtype of the numbers in a batch: bool, float32 for every float, int64 for every integer."""
        return np.bool_ if self.dtype == "bool" else np.float32 if self.is_float else np.int64

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of the value of one sample in a batch: () if the shape in LeRobot is (1,)."""
        return () if self.shape == (1,) else self.shape

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        """Shape of a statistic in a batch: (C, 1, 1) for a camera, `row_shape` for other features."""
        return (self.channels, 1, 1) if self.is_camera else self.row_shape

    @property
    def row_bytes(self) -> int:
        """Memory of the value of one row in bytes. For images and text, only the references are counted."""
        if self.is_video:
            return 4
        if self.is_image:
            return 8
        if self.is_text:
            return 8 * math.prod(self.shape)
        return math.prod(self.shape) * (1 if self.dtype == "bool" else 4 if self.is_float else 8)

    @property
    def object_bytes(self) -> int:
        """Approximate memory of the images or text of one row.

        It is half a byte per value of an image, 4 bytes per value of a depth map, which is not compressed, 64 bytes per string,
        and 256 bytes per list of annotations.
        """
        if self.is_depth:
            return math.prod(self.shape) * 4 if self.is_image else 0
        if self.is_image:
            return math.prod(self.shape) // 2
        return math.prod(self.shape) * (256 if self.is_language else 64 if self.is_text else 0)

    @property
    def frame_size(self) -> tuple[int, int]:
        """Size (height, width) of a camera's frames."""
        return self._layout[:2]

    def size_fault(self, size: tuple[int, int], image_size: bool) -> str:
        """Return what to do about a camera's frame of another size. The text is empty for the size of this feature.

        It is also empty for another size if frames are resized, unless a single frame could take a lot of memory.

        Args:
            size: Size (height, width) of the frame as it is displayed, in pixels.
            image_size: Whether frames are resized to the argument `image_size` of a Loader.
        """
        if size == self.frame_size or (image_size and math.prod(size) <= MOST_PIXELS):
            return ""
        if math.prod(size) > MOST_PIXELS:
            return "Frames of this size are read only if meta/info.json has it, too"
        also = " --images-to-video" if self.is_image else ""
        return (
            "Set image_size=(height, width), which reads frames of any size, or write a copy of this size with `dali-stream "
            f"prepare URI OUT --size {size[0]}x{size[1]} --codec h264{also}`"
        )

    def check_size(self, size: tuple[int, int], image_size: bool, where: str = "", turned: str = "") -> None:
        """Check the size of a video's frames. Raises FrameSizeError if `size_fault` returns what to do about it.

        Args:
            size, image_size: See `size_fault`.
            where: Beginning of the message. Default: none.
            turned: How the frames are turned, for the message. Default: not at all.
        """
        if remedy := self.size_fault(size, image_size):
            expected, got = (f"{height}×{width}" for height, width in (self.frame_size, size))
            raise FrameSizeError(f"{where}frames must be {expected}, as meta/info.json says, got {got}{turned}. {remedy}")

    @property
    def channels(self) -> int:
        """Number of channels of a camera's frames in a batch. It is 1 for depth, and 3 for other video, which is always RGB."""
        return 1 if self.is_depth else 3 if self.is_video else self._layout[2]

    @property
    def _layout(self) -> tuple[int, int, int]:
        """Shape of a camera as (H, W, C), even if `meta/info.json` has (C, H, W)."""
        first, second, third = self.shape
        return (second, third, first) if first in CHANNELS and third not in CHANNELS else (first, second, third)

    @property
    def encoding(self) -> tuple[str, dict[str, Any]]:
        """Key and content of the entry that describes the encoding of a video. ("info", {}) without such an entry."""
        return next(((key, self[key]) for key in ENCODING if isinstance(self.get(key), dict)), (ENCODING[0], {}))

    @property
    def is_depth(self) -> bool:
        """Whether a camera records depth, according to the marks that LeRobot reads."""
        info, older = self._entry("info"), self._entry("video_info")
        marks = info.get("is_depth_map"), info.get("video.is_depth_map"), older.get("video.is_depth_map")
        return self.is_camera and any(marks)

    @property
    def is_unmarked_depth(self) -> bool:
        """Whether the values of a camera have more than 8 bits (gray10le to gray16le), although it is not marked as depth."""
        deep = str(self.encoding[1].get("video.pix_fmt", "")).startswith("gray1")
        return self.is_camera and deep and not self.is_depth

    @property
    def quantization(self) -> Quantization:
        """Meaning of the codes of depth video."""
        values = {name: self._entry("info").get(f"video.{name}") for name in Quantization._fields}
        return Quantization(**{name: value for name, value in values.items() if value is not None})

    @property
    def depth_unit(self) -> str | None:
        """Unit of the distances that images in rows and statistics contain, "m" or "mm". None if it was not recorded."""
        return self._entry("info").get("depth_unit")

    @property
    def depth_fault(self) -> str:
        """Error message for invalid entries that determine the values of a depth camera. Empty if all are valid."""
        if self.is_video:
            return self.quantization.fault
        if self.depth_unit not in (None, *UNITS):
            return f'depth_unit must be "m" or "mm", got {str(self.depth_unit)[:40]!r}'
        return ""

    def _entry(self, key: str) -> dict[str, Any]:
        entry = self.get(key)
        return entry if isinstance(entry, dict) else {}


def vectors(features: Mapping[str, Feature]) -> list[str]:
    """Return the keys of the features that are vectors of floats, such as actions and states."""
    return [key for key, feature in features.items() if feature.is_float and len(feature.row_shape) == 1]

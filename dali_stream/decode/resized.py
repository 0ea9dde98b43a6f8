"""Decoding of a clip on the CPU to frames of the size of batches. This is what decode processes do, see `processes`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.decode import depth
from dali_stream.decode.resize import resize
from dali_stream.decode.torchcodec import decode_clip_in_parts, frames_at_once
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat
from dali_stream.observe.counters import Timed
from dali_stream.system.shared_memory import array_bytes

Frames = npt.NDArray[Any]


class Output(NamedTuple):
    """Frames of a camera as slots have them.

    Attributes:
        shape: Shape (height, width, channels).
        dtype: Type of the values.
        is_depth: Whether PyAV decodes the video as depth, and frames are resized with nearest neighbour. Otherwise torchcodec
            decodes it as RGB.
    """

    shape: tuple[int, int, int]
    dtype: type[np.generic]
    is_depth: bool

    @property
    def nbytes(self) -> int:
        """Memory of a frame in bytes."""
        return array_bytes(self.shape, self.dtype)


def decode_resized(
    clip: Clip, expected: VideoFormat, output: Output, timed: Timed, most: int | None = None
) -> Iterator[tuple[list[int], Frames, int]]:
    """Decode the requests of a clip on the CPU, and resize their frames.

    Args:
        clip: Clip to decode.
        expected: Format of its frames.
        output: Frames to return.
        timed: Timer that measures resizing.
        most: Maximum number of frames in a part. Default: as many as a thread may keep in memory before they are resized.

    Yields:
        Numbers of the requests in this part, their frames of shape (n, *output.shape) and type `output.dtype`, and the number
        of frames that were decoded since the previous part.

    Raises:
        DecodeError: If the decoder fails, or returns another frame than the requested one.
    """
    decode_parts = depth.decode_clip_in_parts if output.is_depth else decode_clip_in_parts
    part = frames_at_once((expected.height, expected.width))
    for requests, decoded, count in decode_parts(clip, expected, part if most is None else min(part, most)):
        with timed("resize_s"):
            frames: Frames
            if output.is_depth:
                frames = depth.resize_nearest(decoded.numpy(), output.shape[:2]).astype(output.dtype, copy=False)
            else:
                frames = resize(decoded.numpy(), output.shape[:2])
        yield requests, frames, count

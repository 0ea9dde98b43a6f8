"""Frames that are stored as images (PNG, JPEG) in Parquet rows, decoded with Pillow as LeRobot does."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_stream.errors import DecodeError


def decode(data: bytes, shape: tuple[int, ...] | list[int]) -> npt.NDArray[np.uint8]:
    """Decodes one image to (H, W, 3) uint8 RGB.

    Args:
        data: the encoded image.
        shape: what `info.json` promises, (H, W, C) or (C, H, W).

    Raises:
        DecodeError: it is damaged, is not RGB, or has another size than promised.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            size = (image.height, image.width)
            if image.mode != "RGB" or size not in (tuple(shape[:2]), tuple(shape[1:])):
                raise DecodeError(
                    f"the image is {image.mode} of {size[0]}×{size[1]}, and RGB of the shape {tuple(shape)} is promised"
                )
            return np.array(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DecodeError(f"the image is damaged: {error}") from error

"""Frames that are stored as images (PNG, JPEG) in Parquet rows, decoded with Pillow as LeRobot does."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_stream.errors import DecodeError


def decode(data: bytes, size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Decodes one image to (H, W, 3) uint8 RGB. `size` is the promised (height, width).

    Raises:
        DecodeError: it is damaged, is not RGB, or has another size than promised.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode != "RGB" or (image.height, image.width) != tuple(size):
                raise DecodeError(
                    f"the image is {image.mode} of {image.height}×{image.width}, and RGB of {size[0]}×{size[1]} is promised"
                )
            return np.array(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DecodeError(f"the image is damaged: {error}") from error

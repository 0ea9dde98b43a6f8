"""Resizing of frames in the thread that decoded them, on the CPU or on the GPU that decoded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import positive

if TYPE_CHECKING:
    import torch

Frames = npt.NDArray[np.uint8]


@overload
def resize(images: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]: ...
@overload
def resize(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor: ...
def resize(images: npt.NDArray[np.uint8] | torch.Tensor, size: tuple[int, int]) -> npt.NDArray[np.uint8] | torch.Tensor:
    """Resize images as a Loader with `image_size=` resizes frames.

    The filter is an antialiased triangle, as in Pillow and torchvision, and the aspect ratio is not kept. The kernel is
    `torch.nn.functional.interpolate(mode="bilinear", antialias=True)` on uint8, which rounds to integers. The result for an
    image does not depend on the other images.

    Args:
        images: RGB images on the CPU, uint8: an array of shape (H, W, 3) or (N, H, W, 3), as cameras return them, or a tensor
            of shape (..., 3, H, W), as in batches.
        size: New size (height, width) in pixels.

    Returns:
        Images of the same type and layout. These are `images` themselves if they already have this size.

    Raises:
        ValueError: If the images or the size are not as described.
    """
    height, width = (positive("size", length) for length in size)
    import torch  # imported on use, because `dali-stream doctor` imports this module even if torch does not load

    if isinstance(images, np.ndarray):
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise _wrong(images.dtype, images.shape)
        if images.shape[-3:-1] == (height, width):
            return images
        last = torch.from_numpy(np.ascontiguousarray(images)).reshape(-1, *images.shape[-3:])
        result: Frames = _resized(last.permute(0, 3, 1, 2), (height, width)).permute(0, 2, 3, 1).contiguous().numpy()
        return result.reshape(*images.shape[:-3], height, width, images.shape[-1])
    if images.dtype != torch.uint8 or images.ndim < 3 or images.device.type != "cpu":
        raise _wrong(f"{images.dtype} on {images.device}", images.shape)
    if images.shape[-2:] == (height, width):
        return images
    first = images.reshape(-1, *images.shape[-3:]).contiguous(memory_format=torch.channels_last)
    return _resized(first, (height, width)).reshape(*images.shape[:-2], height, width)


def _wrong(dtype: object, shape: Sequence[int]) -> ValueError:
    return ValueError(
        "images must be uint8 on the CPU, an array of shape (H, W, 3) or (N, H, W, 3) or a tensor of shape (..., 3, H, W), got "
        f"{dtype} of shape {tuple(shape)}. Resize before you divide by 255"
    )


def _resized(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize uint8 images of shape (N, C, H, W), channels last in memory."""
    import torch

    return torch.nn.functional.interpolate(images, size=size, mode="bilinear", antialias=True)


def resize_on_gpu(frames: torch.Tensor, size: tuple[int, int]) -> Frames:
    """Resize frames where they are, as in `resize`, and copy them to the CPU's memory.

    torch has no such kernel for uint8 on a GPU. The filter is computed in float32 and rounded, so values may differ from those
    of `resize` by 1.

    Args:
        frames: Frames of shape (n, H, W, 3), uint8, on a GPU. In tests, frames are on the CPU, and so is the result.
        size: New size (height, width) in pixels.

    Returns:
        Frames of shape (n, height, width, 3), uint8, in page-locked memory if `frames` are on a GPU.
    """
    import torch

    if frames.shape[1:3] != size:
        floats = frames.permute(0, 3, 1, 2).float()
        resized = torch.nn.functional.interpolate(floats, size=size, mode="bilinear", antialias=True)
        frames = resized.round_().to(torch.uint8).permute(0, 2, 3, 1)
    copy = torch.empty(frames.shape, dtype=torch.uint8, pin_memory=frames.is_cuda)
    copy.copy_(frames, non_blocking=True)
    if frames.is_cuda:
        torch.cuda.current_stream(frames.device).synchronize()
    result: Frames = copy.numpy()
    return result

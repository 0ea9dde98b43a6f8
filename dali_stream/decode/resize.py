"""Resizing of frames in the thread that decoded them, on the CPU or on the GPU that decoded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import picture_size

if TYPE_CHECKING:
    import torch

Frames = npt.NDArray[np.uint8]
_CHANNELS = (1, 3, 4)
_AT_ONCE = 8  # frames that a GPU resizes at a time, for which it needs four times their memory


@overload
def resize(images: npt.NDArray[np.uint8], image_size: tuple[int, int] | None) -> npt.NDArray[np.uint8]: ...
@overload
def resize(images: torch.Tensor, image_size: tuple[int, int] | None) -> torch.Tensor: ...
def resize(
    images: npt.NDArray[np.uint8] | torch.Tensor, image_size: tuple[int, int] | None
) -> npt.NDArray[np.uint8] | torch.Tensor:
    """Resize images as a Loader with `image_size=` resizes frames.

    The filter is an antialiased triangle, as in Pillow and torchvision, and the aspect ratio is not kept. The kernel is
    `torch.nn.functional.interpolate(mode="bilinear", antialias=True)` on uint8, which rounds to integers. The result for an
    image does not depend on the other images. Depth is resized in another way, see "Deploy a policy" in the documentation.

    Args:
        images: Images on the CPU, uint8, with 1, 3 or 4 channels: an array of shape (H, W, C) or (N, H, W, C), as cameras
            return them, or a tensor of shape (..., C, H, W), as in batches.
        image_size: New size (height, width) in pixels, or None for the size that the images have.

    Returns:
        Images of the same type, with the same order of axes. These may be `images` themselves if they already have this size.

    Raises:
        ValueError: If the images or the size are not as described.
    """
    import torch  # imported on use, because `dali-stream doctor` imports this module even if torch does not load

    size = picture_size(image_size)
    if isinstance(images, np.ndarray):
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[-1] not in _CHANNELS:
            raise _wrong(images.dtype, images.shape)
        array = np.require(images, requirements=["C", "W"])  # copies a reversed or read-only view, which torch does not accept
        if size in (None, array.shape[-3:-1]):
            return array
        last = torch.from_numpy(array).reshape(-1, *array.shape[-3:])
        result: Frames = _resized(last.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1).contiguous().numpy()
        return result.reshape(*array.shape[:-3], *result.shape[1:])
    if not isinstance(images, torch.Tensor):
        raise _wrong(type(images).__name__, np.shape(images))
    is_image = images.dtype == torch.uint8 and images.ndim >= 3 and images.shape[-3] in _CHANNELS
    if not is_image or images.device.type != "cpu":
        raise _wrong(f"{images.dtype} on {images.device}", images.shape)
    if size in (None, tuple(images.shape[-2:])):
        return images
    first = images.reshape(-1, *images.shape[-3:]).contiguous(memory_format=torch.channels_last)
    resized = _resized(first, size)
    return resized.reshape(*images.shape[:-2], *resized.shape[-2:])


def _wrong(kind: object, shape: Sequence[int]) -> ValueError:
    return ValueError(
        "images must be uint8 on the CPU, an array of shape (H, W, C) or (N, H, W, C) or a tensor of shape (..., C, H, W), "
        f"with 1, 3 or 4 channels, got {kind} of shape {tuple(shape)}. Resize before you divide by 255. "
        'For depth, use torch.nn.functional.interpolate(mode="nearest-exact"), as the Loader does'
    )


def _resized(images: torch.Tensor, size: tuple[int, int] | None) -> torch.Tensor:
    """Resize uint8 images of shape (N, C, H, W), channels last in memory."""
    import torch

    return torch.nn.functional.interpolate(images, size=size, mode="bilinear", antialias=True)


def resize_on_gpu(frames: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize frames where they are, as in `resize`.

    torch has no such kernel for uint8 on a GPU. The filter is computed in float32 and rounded, so values may differ from those
    of `resize` by 1.

    Args:
        frames: Frames of shape (n, H, W, 3), uint8, on a GPU. In tests, frames are on the CPU, and so is the result.
        size: New size (height, width) in pixels.

    Returns:
        Frames of shape (n, height, width, 3), uint8.
    """
    import torch

    if frames.shape[1:3] != size:
        resized = frames.new_empty((len(frames), *size, 3))
        for some, of in zip(frames.split(_AT_ONCE), resized.split(_AT_ONCE), strict=True):
            floats = some.permute(0, 3, 1, 2).float()
            floats = torch.nn.functional.interpolate(floats, size=size, mode="bilinear", antialias=True)
            of.copy_(floats.round_().permute(0, 2, 3, 1))
        frames = resized
    return frames


def copied_to_cpu(frames: torch.Tensor) -> Frames:
    """Return frames of a GPU in page-locked memory of the CPU."""
    import torch

    copy = torch.empty(frames.shape, dtype=torch.uint8, pin_memory=frames.is_cuda)
    copy.copy_(frames, non_blocking=True)
    if frames.is_cuda:
        torch.cuda.current_stream(frames.device).synchronize()
    result: Frames = copy.numpy()
    return result

"""Resizing of frames in the thread that decoded them, on the CPU or on the GPU that decoded them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Frames = npt.NDArray[np.uint8]


def resize(frames: Frames, size: tuple[int, int]) -> Frames:
    """Resize frames with an antialiased triangle filter, as in Pillow and torchvision.

    The kernel is `torch.nn.functional.interpolate(mode="bilinear", antialias=True)` on uint8, which rounds to integers. It
    processes one frame at a time in this thread, so the result for a frame does not depend on the other frames.

    Args:
        frames: Frames of shape (n, H, W, C), uint8.
        size: New size (height, width) in pixels.

    Returns:
        Frames of shape (n, height, width, C), uint8. This is `frames` itself if they already have this size.
    """
    if frames.shape[1:3] == size:
        return frames
    import torch  # imported on use, because `dali-stream doctor` imports this module even if torch does not load

    channels_last = torch.from_numpy(frames).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(channels_last, size=size, mode="bilinear", antialias=True)
    result: Frames = resized.permute(0, 2, 3, 1).contiguous().numpy()
    return result


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

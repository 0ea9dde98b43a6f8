"""Resizing of frames on the CPU, in the thread that decoded them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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

"""Resizing of frames that the CPU has decoded, in the thread that decoded them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]


def resize(frames: Frames, size: tuple[int, int]) -> Frames:
    """Resizes frames with a triangle filter that is widened when shrinking (antialiasing), as Pillow and torchvision do.

    The kernel is `torch.nn.functional.interpolate(mode="bilinear", antialias=True)` on uint8, which rounds to whole levels.
    It works on one frame after the other in this thread, so a frame comes out the same whatever is resized with it.

    Args:
        frames: (n, H, W, C) uint8.
        size: (height, width) to resize to.

    Returns:
        (n, height, width, C) uint8; `frames` itself where the size is theirs.
    """
    if frames.shape[1:3] == size:
        return frames
    import torch  # on use: `dali-stream doctor` imports this module on machines where torch does not load

    channels_last = torch.from_numpy(frames).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(channels_last, size=size, mode="bilinear", antialias=True)
    result: Frames = resized.permute(0, 2, 3, 1).contiguous().numpy()
    return result

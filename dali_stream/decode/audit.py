"""Audits, which compare frames that DALI has decoded with frames that torchcodec has decoded.

An audit compares pixels and not timestamps. DALI computes timestamps from its index of the clip and not from the decoded
frames, so a frame of another clip would have the expected timestamp.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError

Frames = npt.NDArray[np.uint8]


class Audit(NamedTuple):
    """Frames of one sample as FFmpeg decodes them.

    Attributes:
        expected: Resized frames of the sample's window, shape (T, H, W, 3), or FFmpeg's error if it cannot decode them.
        frames: Frame indices of the window within the episode, shape (T,).
        where: Name of the file and the episode, for messages.
    """

    expected: Frames | DecodeError
    frames: npt.NDArray[np.int64]
    where: str

    def mismatch(self, delivered: npt.NDArray[np.float32], tolerance: float) -> str:
        """Return how delivered frames differ from the expected frames. The text is empty if they agree within the tolerance.

        Args:
            delivered: Frames that DALI has decoded, with values in [0, 255], shape (T, H, W, 3).
            tolerance: Maximum mean absolute difference of a frame, on the same scale.
        """
        if isinstance(self.expected, DecodeError):
            return f"{self.where}: FFmpeg cannot decode what NVDEC has decoded: {self.expected}"
        if delivered.shape != self.expected.shape:
            shapes = f"{delivered.shape[1:]}, and FFmpeg of {self.expected.shape[1:]}"
            return f"{self.where}: DALI delivered frames of shape {shapes}"
        errors = np.abs(delivered - self.expected).mean((1, 2, 3))
        if errors.max() <= tolerance:
            return ""
        worst = int(errors.argmax())
        return (
            f"{self.where}, frame {self.frames[worst]}: DALI's frame differs from FFmpeg's by {errors[worst]:.1f} of 255 on "
            f"average, and {tolerance:g} is tolerated"
        )

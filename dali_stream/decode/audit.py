"""Audits: samples that DALI has decoded are decoded by torchcodec, too, and compared.

DALI's timestamps come from its own index, so a decoder that delivers a frame of an earlier clip cannot be recognised by them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError

Frames = npt.NDArray[np.uint8]


class Audit(NamedTuple):
    """The frames that a sample must show, as FFmpeg decodes them.

    Attributes:
        expected: Frames of the sample's window, resized, shape (T, H, W, 3), or why FFmpeg cannot decode them.
        frames: Frames of the window within their episode, shape (T,).
        where: File and episode, for messages.
    """

    expected: Frames | DecodeError
    frames: npt.NDArray[np.int64]
    where: str

    def mismatch(self, delivered: npt.NDArray[np.float32], tolerance: float) -> str:
        """Return how delivered frames differ from the expected ones. Empty if they are the same within the tolerance.

        Args:
            delivered: Frames in [0, 255], shape (T, H, W, 3).
            tolerance: Mean absolute difference that is allowed per frame.
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

"""Comparison of a decoder's frames with FFmpeg's, and audits, which compare frames that DALI has decoded during a run.

Pixels are compared, and not timestamps. DALI computes timestamps from its index of the clip and not from the decoded frames, so
a frame of another clip would have the expected timestamp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError

Frames = npt.NDArray[np.uint8]

COLOUR_TOLERANCE = 4.0
"""Maximum mean absolute difference between 8-bit RGB values of DALI and of FFmpeg, per frame.

DALI and FFmpeg upsample chroma and convert to RGB differently, so their frames are never equal. They differed by 1.6 for VP9 on
a CPU. BT.709 and BT.601 differ by only 2.6 on a demo frame, so this tolerance does not distinguish them. `refusal` and
`trial` therefore compare the colour matrix that a file specifies."""


def difference(decoded: npt.NDArray[Any], expected: Frames, reference: str = "FFmpeg's") -> tuple[int, str]:
    """Return how decoded frames differ from those of another decoder.

    Args:
        decoded: Decoded frames with values in [0, 255], shape (n, H, W, 3).
        expected: Frames of the other decoder.
        reference: Name of these frames, for the text. Default: "FFmpeg's".

    Returns:
        Index of the frame that differs most, and the difference as the end of a sentence. The text is empty if all frames agree
        within `COLOUR_TOLERANCE`.
    """
    if decoded.shape != expected.shape:
        return 0, f"must have shape {expected.shape[1:]}, got {decoded.shape[1:]}"
    errors = np.abs(decoded.astype(np.float32) - expected).mean((1, 2, 3))
    worst = int(errors.argmax())
    if errors[worst] <= COLOUR_TOLERANCE:
        return worst, ""
    return worst, f"must differ from {reference} by at most {COLOUR_TOLERANCE:g} of 255 on average, got {errors[worst]:.1f}"


def mismatch(decoded: npt.NDArray[np.float32], expected: Frames | DecodeError) -> tuple[slice, str]:
    """Return how the frames of a window that DALI has decoded differ from FFmpeg's.

    Args:
        decoded: DALI's frames with values in [0, 255], shape (T, H, W, 3).
        expected: FFmpeg's frames, or its error if it cannot decode them.

    Returns:
        Steps of the window that are wrong, and how they differ. The text is empty if all frames agree within
        `COLOUR_TOLERANCE`.
    """
    if isinstance(expected, DecodeError):
        return slice(None), f"FFmpeg cannot decode what DALI has decoded: {expected}"
    worst, text = difference(decoded, expected)
    return slice(worst, worst + 1), f"DALI's frames {text}" if text else ""

"""LeRobot's image_transforms that bring frames to one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve import Spec


def transforms(spec: Spec) -> Callable[[Any], Any] | None:
    """torchvision's Resize to the size of the spec; None for the recorded size."""
    if not spec["image_size"]:
        return None
    from torchvision.transforms import v2

    resize: Callable[[Any], Any] = v2.Resize(spec["image_size"], antialias=True)
    return resize

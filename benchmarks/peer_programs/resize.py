"""Transforms that resize frames, for LeRobot's argument image_transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve import Spec


def transforms(spec: Spec) -> Callable[[Any], Any] | None:
    """Return torchvision's Resize to the size in the spec, or None for the recorded size."""
    if not spec["image_size"]:
        return None
    from torchvision.transforms import v2

    resize: Callable[[Any], Any] = v2.Resize(spec["image_size"], antialias=True)
    return resize

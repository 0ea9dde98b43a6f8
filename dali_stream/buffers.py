"""Batch-sized arrays that are used again and again.

A fresh allocation of this size is handed to the process page by page by the kernel, which takes several times as long as
filling it; and large blocks that come and go in a heap beside small ones make it grow.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]


class Buffers:
    """A free list of uint8 arrays by shape. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[Frames]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, *shape: int) -> Frames:
        """An array of this shape with anything in it."""
        with self._lock:
            free = self._free[shape]
            return free.pop() if free else np.empty(shape, np.uint8)

    def give(self, array: Frames) -> None:
        """Returns an array that nobody looks at any more."""
        with self._lock:
            self._free[array.shape].append(array)

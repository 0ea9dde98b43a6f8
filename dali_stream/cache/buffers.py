"""Batch-sized arrays that are used again and again.

A fresh allocation of this size is handed to the process page by page by the kernel, which takes several times as long as
filling it; and large blocks that come and go in a heap beside small ones make it grow.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_KEPT = 8  # arrays of one kind: more than a loader uses at a time; a user who keeps more batches gets fresh memory


class Buffers:
    """A pool of arrays. An array is handed out again when no view, tensor or DALI refers to it.

    Not safe to use from several threads; references may be dropped in any.

    Args:
        channels_first: Whether the last axis of an array comes before the two before it in memory.
    """

    def __init__(self, channels_first: bool = False) -> None:
        self._channels_first = channels_first
        self._arrays: dict[tuple[Any, ...], list[Array]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        """Return an array of a shape and dtype with anything in it."""
        if not self._channels_first:
            return self._take(shape, dtype)
        *outer, height, width, channels = shape
        return np.moveaxis(self._take((*outer, channels, height, width), dtype), -3, -1)

    def _take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        arrays = self._arrays[shape, dtype]
        for i in range(len(arrays)):
            if _references(arrays, i) == _UNUSED:
                return arrays[i]
        arrays.append(np.empty(shape, dtype))
        del arrays[:-_KEPT]
        return arrays[-1]


def _references(arrays: list[Array], i: int) -> int:
    return sys.getrefcount(arrays[i])


_UNUSED = _references([np.empty(0)], 0)  # of an array that only a list refers to; interpreters count differently

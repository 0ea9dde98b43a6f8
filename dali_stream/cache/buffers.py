"""Pool of batch-sized arrays.

Arrays of this size are reused for two reasons. The kernel maps a new allocation page by page, which takes several times as long
as filling it. And a heap grows if large and small blocks are allocated and freed alternately.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from dali_stream.checks.arrays import Array, Mask

KEPT = 8  # batches whose arrays are kept, more than a loader uses at a time. A user who keeps more batches gets new arrays


class Buffers:
    """Pool of arrays. An array is reused when neither a view, nor a tensor, nor DALI refers to it any more. Thread-safe.

    Args:
        channels_first: Whether the last axis of an array, the channels, precedes height and width in memory.
        cameras: Number of cameras, whose arrays may have the same shape. Default: 1.
        kept: Number of batches whose arrays are kept. Default: `KEPT`.
        gpu: CUDA device that reads the arrays, whose memory is then page-locked. Default: None.
    """

    def __init__(self, channels_first: bool, cameras: int = 1, kept: int = KEPT, gpu: int | None = None) -> None:
        self._channels_first, self._kept, self._gpu = channels_first, kept * max(cameras, 1), gpu
        self._lock = threading.Lock()
        self._arrays: dict[tuple[Any, ...], list[Array]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        """Return an array with uninitialized values. With `channels_first`, `shape` must end in (height, width, channels)."""
        with self._lock:
            if not self._channels_first:
                return self._take(shape, dtype)
            *outer, height, width, channels = shape
            return np.moveaxis(self._take((*outer, channels, height, width), dtype), -3, -1)

    def _take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        arrays = self._arrays[shape, dtype]
        for i in range(len(arrays)):
            if _references(arrays, i) == _UNUSED:
                return arrays[i]
        arrays.append(self.new(shape, dtype))
        del arrays[: -self._kept]
        return arrays[-1]

    def new(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        """Return a new array for the pool."""
        if self._gpu is None:
            return np.empty(shape, dtype)
        import torch

        same = torch.from_numpy(np.empty(0, dtype)).dtype
        with torch.cuda.device(self._gpu):
            array: Array = torch.empty(shape, dtype=same, pin_memory=True).numpy()
        return array  # and no view of it, since NumPy lets a view of a view refer to its first array only, see `_references`


class ReadFrames(NamedTuple):
    """Frames of a batch, some of which were read directly from the frame cache on disk.

    Attributes:
        frames: Memory of the batch, shape (B, T, H, W, C).
        is_read: Whether each frame was read, shape (B · T,). The threads that read frames set it.
    """

    frames: Array
    is_read: Mask


def _references(arrays: list[Array], i: int) -> int:
    return sys.getrefcount(arrays[i])


_UNUSED = _references([np.empty(0)], 0)  # reference count if only a list refers to an array. It depends on the interpreter

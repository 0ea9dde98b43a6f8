"""Memory of a virtual machine, whose host provides a page only when it is first written."""

from __future__ import annotations

import time

import numpy as np


def provide(nbytes: int) -> float:
    """Write memory and free it, so that the host has provided it when a loader allocates as much soon afterwards.

    On a physical machine, writing newly allocated memory takes about 0.1 ms per MB. On a virtual machine whose host has not
    provided the memory yet, it can take 2 ms per MB, longer than decoding a small frame. The host takes the memory back
    within a few seconds.

    Args:
        nbytes: Number of bytes.

    Returns:
        Time of writing the memory, in milliseconds per MB.
    """
    memory = np.empty(max(nbytes, 1 << 20), np.uint8)
    began = time.perf_counter()
    memory.fill(1)
    return (time.perf_counter() - began) * 1e3 / (len(memory) / 1e6)

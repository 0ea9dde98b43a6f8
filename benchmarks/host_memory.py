"""Memory of a virtual machine, whose host provides a page only when it is first written."""

from __future__ import annotations

import time

import numpy as np

import dali_stream


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


def cached_bytes(dataset: dali_stream.Dataset, size: tuple[int, int] | None = None) -> int:
    """Return the memory that a Loader with the default `memory_budget` takes for frames, in bytes, and a little more.

    Args:
        dataset: Dataset of the Loader.
        size: Size (height, width) of the frames in pixels. Default: the recorded size.
    """
    sizes = [size or dataset.features[camera].frame_size for camera in dataset.videos]
    return min(dataset.num_frames * sum(3 * height * width for height, width in sizes), 4 << 30) + (512 << 20)

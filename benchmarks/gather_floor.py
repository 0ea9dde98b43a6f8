"""The floor of an epoch whose frames are all in memory: threads that only copy frames and convert them to float32.

They use NumPy. As in the Loader, pixel values are divided by 255, and the memory of batches is reused.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

_KEPT = 3  # number of batches whose memory is reused in turns, since a caller holds one batch while the next one is made


def gather_rate(frame_count: int, size: tuple[int, int], batch_size: int, batches: int, threads: int) -> float:
    """Measure the rate at which threads copy frames to float32 batches, in frames/s.

    Args:
        frame_count: Number of frames in memory.
        size: Height and width of a frame.
        batch_size: Number of frames per batch.
        batches: Number of batches.
        threads: Number of threads, each of which copies a part of each batch.
    """
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (frame_count, *size, 3), np.uint8)
    outputs = [np.ones((batch_size, *size, 3), np.float32) for _ in range(_KEPT)]
    chosen = rng.integers(0, frame_count, (batches, batch_size))
    parts = np.array_split(np.arange(batch_size), threads)

    def copy(output: npt.NDArray[np.float32], slots: npt.NDArray[np.int64], part: npt.NDArray[np.int64]) -> None:
        for row in part.tolist():
            np.divide(frames[slots[row]], np.float32(255), out=output[row], dtype=np.float32)

    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        for number, slots in enumerate(chosen):
            for done in [pool.submit(copy, outputs[number % _KEPT], slots, part) for part in parts]:
                done.result()
        return batches * batch_size / (time.perf_counter() - began)

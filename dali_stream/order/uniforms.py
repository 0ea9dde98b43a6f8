"""Random numbers for augmentation, which are part of each sample.

They depend only on the seed, the epoch and the position in the order of the epoch. A resumed run therefore augments its samples
as an uninterrupted run does, on any number of ranks. DALI's random operators cannot do this, because DALI cannot save the
state of a pipeline with a video decoder.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dali_stream.order.rng import mix, philox

COUNT = 64  # random numbers per sample


def uniforms(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return COUNT uniform random numbers in [0, 1) for each position.

    The finalizer of splitmix64 is applied twice to the counter position * COUNT + i, each time with a different key. The upper
    24 bits of the result are the number, since float32 represents them exactly.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch.
        positions: Positions in the order of the epoch, shape (B,).

    Returns:
        Random numbers, float32, shape (B, COUNT).
    """
    first, second = philox("uniforms", seed, epoch).random_raw(2)
    counter = positions.astype(np.uint64)[:, None] * np.uint64(COUNT) + np.arange(COUNT, dtype=np.uint64)
    bits = mix(mix(counter + first) + second) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)

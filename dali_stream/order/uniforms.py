"""The random numbers that augmentation is made from: data that a sample brings, and no state of a pipeline.

They are a pure function of seed, epoch and position in the epoch's order. So a resumed run augments as the uninterrupted
one, on any number of ranks. DALI's own random operators cannot: a pipeline with a video decoder has no checkpoints.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dali_stream.order.rng import mix, philox

COUNT = 64  # a sample


def uniforms(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """(n, COUNT) float32 in [0, 1): COUNT numbers for each position.

    A counter, position · COUNT + i, goes twice through the finaliser of splitmix64, each time with another key; the upper 24
    bits are the number, which float32 holds exactly.
    """
    first, second = philox("uniforms", seed, epoch).random_raw(2)
    counter = positions.astype(np.uint64)[:, None] * np.uint64(COUNT) + np.arange(COUNT, dtype=np.uint64)
    bits = mix(mix(counter + first) + second) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)

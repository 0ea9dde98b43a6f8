"""What follows from the position of a sample: its random numbers for augmentation, and whether it is audited."""

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


def audited(position: npt.NDArray[np.int64], epoch: int, every: int) -> npt.NDArray[np.bool_]:
    """Return which samples of a batch are audited. A resumed run audits the same samples.

    Args:
        position: Position of each sample in the order of its epoch, shape (B,).
        epoch: Number of the epoch.
        every: Average number of samples per audit, at least 1.

    Returns:
        Whether each sample is audited, shape (B,).
    """
    # Positions are hashed, because without a hash, the same rank could serve all audited positions. The epoch counts from 1,
    # because mix(0) is 0.
    numbers = mix(position.astype(np.uint64) + mix(np.array([epoch + 1], np.uint64)))
    chosen: npt.NDArray[np.bool_] = numbers % np.uint64(every) == 0
    return chosen

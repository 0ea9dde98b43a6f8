"""Selection of the samples that are audited. See `decode/audit.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dali_stream.order.rng import mix


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

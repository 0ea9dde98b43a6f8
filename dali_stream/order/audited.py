"""Selection of the samples that are audited. See `decode/audit.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dali_stream.order.rng import mix


def audited(position: npt.NDArray[np.int64], epoch: int, every: int) -> npt.NDArray[np.bool_]:
    """Return which samples of a batch are audited: about one in `every`, the same ones in a resumed run.

    Args:
        position: Position of each sample in the order of its epoch, shape (B,).
        epoch: Number of the epoch.
        every: Reciprocal of the share of audited samples, at least 1.

    Returns:
        Whether each sample is audited, shape (B,).
    """
    numbers = mix(position.astype(np.uint64) + mix(np.array([epoch + 1], np.uint64)))
    chosen: npt.NDArray[np.bool_] = numbers % np.uint64(every) == 0
    return chosen

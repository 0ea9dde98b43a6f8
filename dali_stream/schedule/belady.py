"""Belady's rule of eviction, for decoded frames and for blocks of encoded video."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64


def nearest(next_use: Int64, room: int, sizes: Int64 | None = None) -> npt.NDArray[np.bool_]:
    """Return which items to keep: those with the nearest next uses (Belady 1966, "A study of replacement algorithms").

    Args:
        next_use: Batch that uses each item next, shape (n,).
        room: Maximum total size of the items to keep.
        sizes: Size of each item, shape (n,). None if each has size 1.

    Returns:
        Mask of the items to keep, shape (n,).
    """
    keep = np.zeros(len(next_use), np.bool_)
    if sizes is not None:
        # Items are kept in the order of their next uses, up to the first one that does not fit. A later item is not kept even
        # if it is small enough, since it is used later.
        order = np.argsort(next_use, kind="stable")
        keep[order] = np.cumsum(sizes[order]) <= room
    elif room >= len(next_use):
        keep[:] = True
    elif room > 0:
        # Items of equal size need no sorting, only a partition, which takes linear time. Which of several equal values
        # `argpartition` returns depends on the processor, so the first of them are kept: a plan is the same on all machines.
        last = np.partition(next_use, room - 1)[room - 1]
        keep = next_use < last
        keep[np.flatnonzero(next_use == last)[: room - np.count_nonzero(keep)]] = True
    return keep

"""The batches of a rank, one after the other and epoch after epoch, read from the order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.order.batches import Batches
from dali_stream.order.order import EpochOrder

Int64 = npt.NDArray[np.int64]


class Samples(NamedTuple):
    """The samples of one rank's batch.

    Attributes:
        number: of the batch, counted from 0 over all epochs from where the run began.
        epoch: that it belongs to.
        order: of that epoch.
        position: (B,) places in the epoch's order.
        episode, frame: (B,) indices of selected episodes, and frames within them.
        padded: how many samples at the end only fill the batch up.
    """

    number: int
    epoch: int
    order: EpochOrder
    position: Int64
    episode: Int64
    frame: Int64
    padded: int


def samples(order: Callable[[int], EpochOrder], batches: Batches, rank: int, epoch: int, position: int) -> Iterator[Samples]:
    """The batches from a position on, without end: one epoch follows another.

    Args:
        order: the order of an epoch.
        batches: how an epoch is cut.
        rank: whose share of each batch.
        epoch, position: where to begin.
    """
    world, number = batches.world_size, 0
    for now in itertools.count(epoch):
        current = order(now)
        while batches.count(position):
            start, stop = batches.span(position)
            places = np.arange(start + (rank - start) % world, stop, world)
            episode, frame = current.read(start, len(places), rank, world)
            padded = batches.batch_size - len(places) if batches.last_batch == "pad" else 0
            if padded:
                again = current.read(0, padded, rank, world)
                more = (rank + world * np.arange(len(again[0])), *again)
                places, episode, frame = (
                    np.append(a, np.resize(b, padded)) for a, b in zip((places, episode, frame), more, strict=True)
                )
            yield Samples(number, now, current, places, episode, frame, padded)
            number, position = number + 1, stop
        position = 0

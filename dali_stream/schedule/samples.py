"""Batches of a rank, read from the order epoch after epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.order.batches import Batches
from dali_stream.order.order import EpochOrder


class Samples(NamedTuple):
    """Samples of one rank's batch.

    Attributes:
        number: Number of the batch, counted over all epochs. The first batch of the iterator has number 0.
        epoch: Epoch of the batch.
        order: Order of that epoch.
        position: Position of each sample in the epoch's order, shape (B,).
        episode: Episode of each sample, as an index into the selected episodes, shape (B,).
        frame: Frame of each sample within its episode, shape (B,).
        padded: Number of samples at the end of the batch that were added to fill it.
    """

    number: int
    epoch: int
    order: EpochOrder
    position: Int64
    episode: Int64
    frame: Int64
    padded: int


def samples(order: Callable[[int], EpochOrder], batches: Batches, rank: int, epoch: int, position: int) -> Iterator[Samples]:
    """Yield the batches of a rank from a position of an epoch, and then those of all later epochs. The iterator never ends.

    Args:
        order: Function from an epoch to its order.
        batches: Division of an epoch into global batches.
        rank: Rank whose share of each global batch is yielded.
        epoch: Epoch of the first batch.
        position: Position in that epoch at which the first batch begins.
    """
    world, number = batches.world_size, 0
    for now in itertools.count(epoch):
        current = order(now)
        while batches.count(position):
            start, stop = batches.span(position)
            places = np.arange(batches.first(start, rank), stop, world)
            episode, frame = current.read(start, len(places), rank, world)
            padded = batches.batch_size - len(places) if batches.last_batch == "pad" else 0
            if padded:  # pad with the rank's first samples of the epoch, repeated if they are too few
                # A rank has no sample if there are fewer samples than ranks. It then gets those of all ranks.
                own, ranks = (rank, world) if rank < batches.frames else (0, 1)
                again = current.read(0, padded, own, ranks)
                more = (own + ranks * np.arange(len(again[0])), *again)
                places, episode, frame = (
                    np.append(a, np.resize(b, padded)) for a, b in zip((places, episode, frame), more, strict=True)
                )
            yield Samples(number, now, current, places, episode, frame, padded)
            number, position = number + 1, stop
        position = 0

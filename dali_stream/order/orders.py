"""Orders of all epochs of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.order.batches import Batches
from dali_stream.order.mixture import MixtureOrder
from dali_stream.order.order import Order, has_consumers
from dali_stream.order.selected import Ranges, SelectedOrder
from dali_stream.order.shares import Shares
from dali_stream.order.state import OrderArguments


class DatasetOrders:
    """Orders of one dataset.

    Args:
        lengths: Number of frames of each episode, shape (E,).
        ranges: Sampled frames of each episode, or None for all frames. Default: None.

    Attributes:
        positions: Number of positions of each epoch.
        state: Entries about the order in the state of a run, in addition to those of `OrderArguments`.
    """

    def __init__(self, lengths: Int64, ranges: Ranges | None = None) -> None:
        self._lengths, self._ranges = lengths, ranges
        self._sampled = lengths if ranges is None else ranges.counts
        self.positions = int(self._sampled.sum())
        self.state: dict[str, Any] = {}

    def of(self, epoch: int, arguments: OrderArguments) -> Order:
        """Return the order of an epoch."""
        shuffle, seed, *pools = arguments
        if self._ranges is None:
            return Order(self._lengths, shuffle, seed, epoch, *pools)
        return SelectedOrder(self._ranges, shuffle, seed, epoch, *pools)

    def episodes_in_use(self, arguments: OrderArguments, batches: Batches) -> int:
        """Return the approximate number of episodes that a rank draws from at a time."""
        lengths = self._sampled
        shuffle, _, consumers, episode_pool_size = arguments
        if has_consumers(shuffle):  # the segments of a pool, and one more that replaces a drained segment
            count = consumers // batches.world_size * (episode_pool_size + 1)
        elif shuffle is False:  # the largest number of consecutive episodes in a global batch, which may begin at a last frame
            ends = np.cumsum(lengths)
            stops = np.minimum(ends - 1 + batches.stride, ends[-1])
            count = int((np.searchsorted(ends, stops) - np.arange(len(ends))).max()) + 1
        else:
            count = batches.batch_size
        return min(count, len(lengths))


class MixtureOrders:
    """Orders of a mixture, see `DatasetOrders`.

    Args:
        lengths: Number of frames of each episode, shape (E,), for each dataset.
        ranges: Sampled frames of each dataset, or None for all frames.
        shares: Shares of the datasets.
    """

    def __init__(self, lengths: Sequence[Int64], ranges: Sequence[Ranges | None], shares: Shares) -> None:
        self._ranges, self._shares = ranges, shares
        self._sampled = [own if selected is None else selected.counts for own, selected in zip(lengths, ranges, strict=True)]
        self.positions = shares.epoch_samples
        self.state: dict[str, Any] = {"mixture": shares.state()}

    def of(self, epoch: int, arguments: OrderArguments) -> MixtureOrder:
        shuffle, seed, consumers, pool = arguments
        return MixtureOrder(self._sampled, self._shares, shuffle, seed, epoch, consumers, pool, self._ranges)

    def episodes_in_use(self, arguments: OrderArguments, batches: Batches) -> int:
        episodes = sum(map(len, self._sampled))
        if not has_consumers(arguments.shuffle):
            # In recorded order, each dataset may be at the transition between two episodes.
            return min(batches.batch_size if arguments.shuffle else 2 * len(self._sampled), episodes)
        pools = self._shares.pools(arguments.episode_pool_size)
        return min(arguments.consumers // batches.world_size * (sum(pools) + len(pools)), episodes)


Orders = DatasetOrders | MixtureOrders

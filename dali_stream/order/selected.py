"""Order of the frames in the sampled ranges of a dataset."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.order.order import Order, Shuffle


class Ranges(Protocol):
    """Sampled frames of each episode, such as `Dataset.frame_ranges`."""

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of sampled frames of each episode, shape (E,)."""
        ...

    def frames(self, episode: npt.NDArray[np.int64], number: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the frame index within its episode of each sampled frame.

        Args:
            episode: Number of each frame's episode, shape (N,).
            number: Number of each frame among the sampled frames of its episode, from 0, shape (N,).
        """
        ...


class SelectedOrder(Order):
    """Order of the sampled frames of a dataset, as if each episode consisted only of its sampled frames.

    Args:
        ranges: Sampled frames of each episode.
        shuffle, seed, epoch, consumers, episode_pool_size: See `Order`.
    """

    def __init__(self, ranges: Ranges, shuffle: Shuffle, seed: int, epoch: int, consumers: int, episode_pool_size: int) -> None:
        super().__init__(ranges.counts, shuffle, seed, epoch, consumers, episode_pool_size)
        self._ranges = ranges

    def _samples(self, positions: Int64) -> Int64:
        episode, number = super()._samples(positions)
        return np.stack([episode, self._ranges.frames(episode, number)])

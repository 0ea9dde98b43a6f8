"""Order of the frames in the sampled ranges of a dataset."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.order.order import Order, Shuffle
from dali_stream.order.shard import Pieces


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

    def _shard(self, consumers: Int64) -> Pieces | None:
        numbers = super()._shard(consumers)
        return None if numbers is None else in_ranges(numbers, self._ranges)


def in_ranges(numbers: Pieces, ranges: Ranges) -> Pieces:
    """Convert pieces of the sampled frames of episodes to pieces of the episodes.

    Args:
        numbers: Pieces, numbered among the sampled frames of their episodes.
        ranges: Sampled frames of each episode.
    """
    episode, start, stop = numbers
    first, last = ranges.frames(episode, start), ranges.frames(episode, stop - 1)
    apart = last - first > stop - 1 - start  # pieces in several ranges, which are divided frame by frame
    length = (stop - start)[apart]
    piece = np.repeat(np.arange(len(length)), length)
    number = np.arange(len(piece)) + np.repeat(start[apart] - np.cumsum(length) + length, length)
    frame = ranges.frames(episode[apart][piece], number)
    begins = (np.diff(piece, prepend=-1) != 0) | (np.diff(frame, prepend=-1) != 1)
    ends = np.append(begins[1:], True)[: len(begins)]
    return Pieces(
        np.concatenate([episode[~apart], episode[apart][piece[begins]]]),
        np.concatenate([first[~apart], frame[begins]]),
        np.concatenate([last[~apart], frame[ends]]) + 1,
    )

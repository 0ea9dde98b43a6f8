"""Runs that keep their frames in all epochs, for `shuffle="sharded"`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.order.pool import Run
from dali_stream.order.rng import philox


class Shard:
    """Frames that one consumer draws in an epoch: the same places on the line of all episodes in every epoch.

    The line of all episodes is the same in all epochs. The segments of a shard are permuted for each epoch and laid end to end,
    and a `Run` draws from this line.

    Args:
        ends, start, stop, key, pool, consumer, consumers: See `Run`.
        more: Places [start, stop) that the consumer draws in this epoch only. Default: none.
    """

    def __init__(
        self,
        ends: Int64,
        start: int,
        stop: int,
        key: tuple[int, ...],
        pool: int,
        consumer: int,
        consumers: int,
        more: tuple[int, int] = (0, 0),
    ) -> None:
        cut = [segments(ends, np.array([start]), np.array([stop])), segments(ends, *np.array(more)[:, None])]
        starts, stops = np.concatenate(cut, 1)
        shuffled = np.argsort(philox("segments", *key).random_raw(len(starts)), kind="stable")
        starts, stops = starts[shuffled], stops[shuffled]
        self._ends = np.cumsum(stops - starts)
        self._shift = stops - self._ends  # from a place on the line of this epoch to the place on the line of all episodes
        self._run = Run(self._ends, 0, int(self._ends[-1]), key, pool, consumer, consumers)

    def draw(self, first: int, count: int) -> Int64:
        """Return draws as places on the line of all episodes, see `Run.draw`."""
        place = np.array(self._run.draw(first, count), np.int64)
        return place + self._shift[np.searchsorted(self._ends, place, side="right")]


class Pieces(NamedTuple):
    """Ranges of frames within episodes.

    Attributes:
        episode: Episode of each range, shape (S,).
        start, stop: First frame of each range within its episode, and the frame after its last, shape (S,).
    """

    episode: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]


def pieces(episodes: Int64, starts: Int64, ends: Int64, start: Int64, stop: Int64) -> Pieces:
    """Return the pieces of episodes that are in some intervals of the line of all episodes.

    Args:
        episodes: Numbers of the episodes in the order of the line, shape (E,).
        starts, ends: First place of each of these episodes, and the place after its last, shape (E,).
        start, stop: First place of each interval, and the place after its last, shape (N,).
    """
    first, last = segments(ends, start, stop)
    at = np.searchsorted(ends, first, side="right")
    return Pieces(episodes[at], first - starts[at], last - starts[at])


def segments(ends: Int64, start: Int64, stop: Int64) -> Int64:
    """Cut intervals of places at the ends of the episodes.

    Args:
        ends: Number of frames up to the end of each episode, laid end to end, shape (E,).
        start, stop: First place of each interval, and the place after its last, shape (N,). Intervals may be empty.

    Returns:
        First place of each segment, and the place after its last, shape (2, S). No segment is empty.
    """
    # An interval has one segment more than episodes that end inside it. Episodes without frames give empty segments.
    first = np.searchsorted(ends, start, side="right")
    count = np.searchsorted(ends, stop, side="left") - first + 1
    count = np.where(start < stop, count, 0)
    interval = np.repeat(np.arange(len(start)), count)
    number = np.arange(len(interval)) - np.repeat(np.cumsum(count) - count, count)  # number of each segment in its interval
    end = first[interval] + number
    starts = np.where(number > 0, ends[end - 1], start[interval])
    stops = np.minimum(ends[end], stop[interval])
    found: Int64 = np.stack([starts, stops])[:, starts < stops]
    return found

"""The rows of episodes in memory, end to end in one array per column, so that a batch's windows are one gather per column."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.lerobot.rows import Columns

Array = npt.NDArray[Any]
SPARE = 5, 4  # memory that the arrays may take, as a fraction of their rows: room to move in


class _Span(NamedTuple):
    start: int
    length: int


def size_of(columns: Columns) -> int:
    """Bytes that an episode's rows may take in `RowCache`."""
    arrays = sum(values.nbytes for values in columns.values())
    objects = sum(len(value) for values in columns.values() if values.dtype == object for value in values.flat)
    return arrays * SPARE[0] // SPARE[1] + objects


class RowCache:
    """Rows by episode. Not safe to use from several threads."""

    def __init__(self, episodes: int) -> None:
        self._columns: Columns = {}
        self._start = np.full(episodes, -1, np.int64)
        self._spans: OrderedDict[int, _Span] = OrderedDict()  # as they lie in the arrays
        self._used = self._live = 0

    def __contains__(self, episode: int) -> bool:
        return episode in self._spans

    def rows(self, key: str, episode: int) -> Array:
        """One column of an episode, in place."""
        start, length = self._spans[episode]
        return self._columns[key][start : start + length]

    def gather(self, key: str, episode: npt.NDArray[np.int64], frame: npt.NDArray[np.int64]) -> Array:
        """Values of a column: `episode` is (B,), `frame` (B,) or (B, T); the result has the shape of `frame` in front."""
        start = self._start[episode]
        return self._columns[key][(start if frame.ndim == 1 else start[:, None]) + frame]

    def put(self, episode: int, columns: Columns) -> None:
        """Copies an episode's rows in."""
        length = len(next(iter(columns.values())))
        if not self._columns:
            self._columns = {key: np.empty((0, *values.shape[1:]), values.dtype) for key, values in columns.items()}
        if self._used + length > self._capacity:
            self._move((self._live + length) * 9 // 8)
        for key, values in columns.items():
            self._columns[key][self._used : self._used + length] = values
        self._spans[episode] = _Span(self._used, length)
        self._start[episode] = self._used
        self._used += length
        self._live += length

    def drop(self, episodes: Collection[int]) -> None:
        """Evicts the rows of episodes."""
        for episode in episodes:
            start, length = self._spans.pop(episode)
            self._start[episode] = -1
            self._live -= length
            for values in self._columns.values():
                if values.dtype == object:
                    values[start : start + length] = None
        if episodes and self._capacity > self._live * SPARE[0] // SPARE[1]:
            self._move(self._live * 9 // 8)

    @property
    def _capacity(self) -> int:
        return len(next(iter(self._columns.values())))

    def _move(self, capacity: int) -> None:
        """Copies all rows to new arrays, without the gaps of evicted ones."""
        spans = list(self._spans.items())
        starts = np.cumsum([0, *(span.length for _, span in spans)]).tolist()
        for key, values in self._columns.items():
            moved = np.empty((capacity, *values.shape[1:]), values.dtype)
            for (_, span), start in zip(spans, starts, strict=False):
                moved[start : start + span.length] = values[span.start : span.start + span.length]
            self._columns[key] = moved
        for (episode, span), start in zip(spans, starts, strict=False):
            self._spans[episode] = span._replace(start=start)
            self._start[episode] = start
        self._used = starts[-1]

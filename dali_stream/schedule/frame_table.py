"""Columns with one entry per frame of the episodes that the schedule has in view."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
_STEP = 64  # rows of an episode are rounded up to a multiple of this, so that closed episodes leave room that others fit into


class FrameTable:
    """Rows for the frames of open episodes, so that a batch's frames are looked up in one gather per column.

    A frame's row is `first_row[episode] + frame` while its episode is open. Closed episodes leave their rows to others, so the
    table is as large as what is open at a time, not as the dataset.

    Args:
        lengths: (E,) frames of each episode.

    Attributes:
        lengths: as given.
        first_row: (E,) int64, the row of each open episode's first frame; -1 where it is not open.
        columns: per name, an array with an entry per row. It is replaced when the table grows, so look it up each time.
    """

    def __init__(self, lengths: Int64) -> None:
        self.lengths = lengths
        self.first_row = np.full(len(lengths), -1, np.int64)
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self._empty: dict[str, int] = {}
        self._used = self._capacity = 0
        self._closed: dict[int, list[int]] = {}  # first rows of closed episodes, by their rounded length
        self._held = np.zeros(len(lengths), np.int32)
        self.add_column("episode", np.int32, -1)

    def add_column(self, name: str, dtype: npt.DTypeLike, empty: int) -> None:
        """Adds a column. Rows of an episode hold `empty` when it is opened."""
        self._empty[name] = empty
        self.columns[name] = np.full(self._capacity, empty, dtype)

    def open(self, episodes: Int64) -> None:
        """Gives rows to those of these episodes that have none."""
        for episode in np.unique(episodes[self.first_row[episodes] < 0]).tolist():
            size = self._rounded(episode)
            free = self._closed.get(size)
            first = free.pop() if free else self._extend(size)
            for name, values in self.columns.items():
                values[first : first + size] = self._empty[name]
            self.columns["episode"][first : first + size] = episode
            self.first_row[episode] = first

    def hold(self, rows: Int64) -> None:
        """Keeps the episodes of these rows open, once more for each row."""
        np.add.at(self._held, self.columns["episode"][rows], 1)

    def release(self, rows: Int64) -> None:
        """Takes back a `hold` for each of these rows. Episodes that nothing holds any more are closed."""
        episodes = self.columns["episode"][rows]
        np.subtract.at(self._held, episodes, 1)
        for episode in np.unique(episodes[self._held[episodes] == 0]).tolist():
            self._closed.setdefault(self._rounded(episode), []).append(int(self.first_row[episode]))
            self.first_row[episode] = -1

    def rows(self, episode: Int64, frame: Int64) -> Int64:
        """Rows of frames of open episodes: `episode` is (B,), `frame` (B,) or (B, T); the result has the shape of `frame`."""
        first = self.first_row[episode]
        return (first if frame.ndim == 1 else first[:, None]) + frame

    def _rounded(self, episode: int) -> int:
        return -(-int(self.lengths[episode]) // _STEP) * _STEP

    def _extend(self, size: int) -> int:
        first, self._used = self._used, self._used + size
        if self._used > self._capacity:
            self._capacity = max(self._used, self._capacity * 3 // 2)
            for name, values in self.columns.items():
                self.columns[name] = np.full(self._capacity, self._empty[name], values.dtype)
                self.columns[name][:first] = values[:first]
        return first

"""When each frame is shown next, as far ahead as the order has been read."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max  # later than what has been read of the order


class Table(Protocol):
    """Columns with a row for each frame, or for each episode."""

    columns: dict[str, npt.NDArray[Any]]

    def add_column(self, name: str, dtype: npt.DTypeLike, empty: int) -> None:
        """Adds a column that is `empty` at first."""
        ...

    def hold(self, rows: Int64) -> None:
        """Keeps these rows until they are released."""
        ...


class Uses:
    """The uses of frames in the batches ahead, for cameras with the same window; or those of episodes.

    Each use is an event, numbered in the order of batches. A frame's row knows its next use and its last event; an event knows
    the frame's use after it. So adding a batch and passing one are a few array operations, however far the order is read.

    Args:
        table: the frames; gets two columns.
        name: of the window, to tell its columns from others'.
    """

    def __init__(self, table: Table, name: str) -> None:
        self._table, self._next, self._last = table, f"next {name}", f"last {name}"
        table.add_column(self._next, np.int64, NEVER)
        table.add_column(self._last, np.int64, -1)
        self._batches: deque[Int64] = deque()  # rows of each batch ahead
        self._after = np.empty(1024, np.int64)  # a ring: per event, the batch of the frame's use after it
        self._first = self._end = 0  # events that are ahead

    def add(self, batch: int, rows: Int64) -> None:
        """Batch number `batch`, the one after the last that was added, shows these frames; `rows` are rising, each once."""
        columns, first = self._table.columns, self._end
        self._end += len(rows)
        if self._end - self._first > len(self._after):
            self._grow()
        mask = len(self._after) - 1
        events = np.arange(first, self._end)
        self._after[events & mask] = NEVER
        before = columns[self._last][rows]
        ahead = before >= self._first
        self._after[before[ahead] & mask] = batch
        columns[self._next][rows[~ahead]] = batch
        columns[self._last][rows] = events
        self._table.hold(rows)
        self._batches.append(rows)

    def advance(self) -> Int64:
        """Passes the batch that is next; `next` then tells what comes after it. Returns its rows, for the table's `release`."""
        rows = self._batches.popleft()
        events = np.arange(self._first, self._first + len(rows))
        self._table.columns[self._next][rows] = self._after[events & (len(self._after) - 1)]
        self._first += len(rows)
        return rows

    def next(self, rows: Int64) -> Int64:
        """Per frame, the number of the batch that shows it next, or `NEVER`."""
        return self._table.columns[self._next][rows]

    def _grow(self) -> None:
        old = self._after
        self._after = np.empty(1 << int(self._end - self._first - 1).bit_length(), np.int64)
        events = np.arange(self._first, self._first + len(old))
        self._after[events & (len(self._after) - 1)] = old[events & (len(old) - 1)]

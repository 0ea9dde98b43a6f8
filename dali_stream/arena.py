"""The rows of resident episodes, end to end in one array per column, so that a batch's windows are one gather per column."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import MemoryBudgetError

Array = npt.NDArray[Any]
Columns = dict[str, Array]


class _Block(NamedTuple):
    start: int
    length: int
    object_bytes: int


class Arena:
    """Used by one thread.

    Args:
        lengths: rows of each episode.
        budget: bytes that the rows may take; the longest unused episodes go where more are wanted.
    """

    def __init__(self, lengths: npt.NDArray[np.int64], budget: int) -> None:
        self._lengths, self._budget = lengths, budget
        self._columns: Columns = {}
        self._start = np.full(len(lengths), -1, np.int64)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # least recently used first
        self._used = self._object_bytes = self._array_bytes = 0

    def __contains__(self, episode: int) -> bool:
        return episode in self._blocks

    @property
    def nbytes(self) -> int:
        """Memory that the rows take."""
        return self._array_bytes + self._object_bytes

    def rows(self, key: str, episode: int) -> Array:
        """One column of a resident episode, in place."""
        start, length, _ = self._blocks[episode]
        return self._columns[key][start : start + length]

    def touch(self, episode: int) -> None:
        """A resident episode has been used."""
        self._blocks.move_to_end(episode)

    def gather(self, key: str, episode: npt.NDArray[np.int64], frame: npt.NDArray[np.int64]) -> Array:
        """Values of a column: `episode` is (B,), `frame` (B,) or (B, T); the result has the shape of `frame` in front."""
        start = self._start[episode]
        return self._columns[key][(start if frame.ndim == 1 else start[:, None]) + frame]

    def admit(self, episode: int, columns: Columns, needed: set[int]) -> None:
        """Copies an episode's rows in. One that is not among `needed`, the episodes of a batch, is left out for want of room.

        Raises:
            MemoryBudgetError: those needed alone exceed the budget.
        """
        length = int(self._lengths[episode])
        row_bytes = sum(values.nbytes for values in columns.values()) // length + 1
        object_bytes = sum(len(v) for values in columns.values() if values.dtype == object for v in values)
        live = sum(block.length for block in self._blocks.values()) + length

        def taken(rows: int) -> int:
            return rows * row_bytes + self._object_bytes + object_bytes

        for old in list(self._blocks):
            if taken(live + live // 2) <= self._budget:  # the half is room to move in, see `_make_room`
                break
            if old not in needed:
                live -= self._evict(old)
        if taken(live) > self._budget:
            if episode not in needed:
                return  # came along in a row group; it is read again when its time comes
            raise MemoryBudgetError(
                f"memory_budget leaves {self._budget} bytes for rows, and the rows of the {len(needed)} episodes of one batch "
                f"need {taken(live)}; give a larger memory_budget, or a smaller batch_size"
            )
        most = (self._budget - taken(0)) // row_bytes
        self._make_room(length, min(live + live // 2, most), columns)
        for key, values in columns.items():
            self._columns[key][self._used : self._used + length] = values
        self._blocks[episode] = _Block(self._used, length, object_bytes)
        self._start[episode] = self._used
        self._used += length
        self._object_bytes += object_bytes

    def _evict(self, episode: int) -> int:
        block = self._blocks.pop(episode)
        self._start[episode] = -1
        self._object_bytes -= block.object_bytes
        for values in self._columns.values():
            if values.dtype == object:
                values[block.start : block.start + block.length] = None
        return block.length

    def _make_room(self, length: int, capacity: int, columns: Columns) -> None:
        """Has `length` free rows at the end of the arrays. Evicted episodes leave holes; when the end is reached, what is
        left moves to new arrays of `capacity` rows."""
        if self._columns and self._used + length <= len(next(iter(self._columns.values()))):
            return
        old, self._columns = self._columns, {}
        for key, values in columns.items():
            self._columns[key] = np.empty((capacity, *values.shape[1:]), values.dtype)
        used = 0
        for episode, block in self._blocks.items():
            for key, values in old.items():
                self._columns[key][used : used + block.length] = values[block.start : block.start + block.length]
            self._blocks[episode] = block._replace(start=used)
            self._start[episode] = used
            used += block.length
        self._used = used
        self._array_bytes = sum(values.nbytes for values in self._columns.values())

"""The cache of what was read: rows, indices and blocks of encoded video share one limit in bytes.

Where they do not all fit, the item whose next use is farthest away is evicted, of whatever kind it is (Belady 1966).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.schedule.blocks import BlockTable
from dali_stream.schedule.uses import NEVER

Int64 = npt.NDArray[np.int64]
_SLACK = 32  # a full cache gives up one byte in so many at once, so that the farthest uses are looked for rarely


class Kind(Protocol):
    """One kind of cached items, by number."""

    def candidates(self) -> tuple[Int64, Int64, Int64, Int64]:
        """(numbers, bytes, next use, last use) of all."""
        ...

    def drop(self, numbers: Int64) -> None:
        """Evicts items."""
        ...


class Items:
    """Rows of episodes, or indices of files.

    Args:
        next_use: of numbered items, the batch that uses each next.

    Attributes:
        size: bytes by number; an estimate while it is `coming`.
        coming: asked for, and not there yet.
    """

    def __init__(self, next_use: Callable[[Int64], Int64]) -> None:
        self._next_use = next_use
        self.size: dict[int, int] = {}
        self.coming: set[int] = set()
        self._touched: dict[int, int] = {}

    def touch(self, numbers: list[int], batch: int) -> None:
        """A batch uses these."""
        self._touched |= dict.fromkeys(numbers, batch)

    def candidates(self) -> tuple[Int64, Int64, Int64, Int64]:
        """As of `Kind`."""
        numbers = np.fromiter(self.size, np.int64, len(self.size))
        size = np.fromiter(self.size.values(), np.int64, len(self.size))
        touched = np.fromiter((self._touched.get(number, -1) for number in self.size), np.int64, len(self.size))
        return numbers, size, self._next_use(numbers), touched

    def drop(self, numbers: Int64) -> None:
        """As of `Kind`."""
        for number in numbers.tolist():
            del self.size[number]
            self._touched.pop(number, None)
            self.coming.discard(number)


@dataclass
class Drop:
    """What to evict.

    Attributes:
        rows: episodes.
        indices: (camera, number of the file).
        blocks: (camera, episode, number of the block in it).
    """

    rows: list[int] = field(default_factory=list)
    indices: list[tuple[str, int]] = field(default_factory=list)
    blocks: list[tuple[str, int, int]] = field(default_factory=list)


class ByteCache:
    """Counts the bytes of what is cached, and chooses what to evict.

    Args:
        room: bytes that all of it may take.
        rows, indices, blocks: what is cached; the last two by camera.

    Attributes:
        taken: bytes of what is in memory or on its way.
        evicted_early: blocks that were evicted although a later batch was known to need them.
        nearest: of what was evicted last, the soonest next use, in batches from that eviction on.
    """

    def __init__(self, room: int, rows: Items, indices: Mapping[str, Items], blocks: Mapping[str, BlockTable]) -> None:
        self.room, self.taken, self.evicted_early, self.nearest = room, 0, 0, NEVER
        self._rows, self._indices, self._blocks = rows, indices, blocks
        self._dropped = Drop()

    def take_dropped(self) -> Drop:
        """What was evicted since the last call."""
        dropped, self._dropped = self._dropped, Drop()
        return dropped

    def make_room(self, need: int, batch: int, later_than: int) -> bool:
        """Makes `need` bytes fit, by evicting items whose next use is after batch `later_than` and that `batch` does not use.

        Returns False, and evicts nothing, where that does not make enough room.
        """
        short = self.taken + need - self.room
        if short <= 0:
            return True
        kinds: list[Kind] = [self._rows, *self._indices.values(), *self._blocks.values()]
        found = [kind.candidates() for kind in kinds]
        numbers, size, after, touched = (np.concatenate(part) for part in zip(*found, strict=True))
        kind = np.repeat(np.arange(len(kinds)), [len(mine) for mine, *_ in found])
        free = np.flatnonzero((after > later_than) & (touched != batch))
        # A small index gives up little memory and costs a request to read again, so those go last, and only if they must.
        spared = np.isin(kind[free], 1 + np.arange(len(self._indices))) & (size[free] < self.room // 1024)
        free = free[np.lexsort((touched[free], -after[free], spared))]
        ends = np.cumsum(size[free])
        if not len(ends) or ends[-1] < short:
            return False
        least, most = np.searchsorted(ends, [short, short + self.room // _SLACK]).tolist()
        evicted = free[: max(least + 1, min(most, len(free) - int(spared.sum())))]
        self.nearest = int(after[evicted].min()) - batch
        for number, (camera, which) in enumerate(zip(["", *self._indices, *self._blocks], kinds, strict=True)):
            mine = evicted[kind[evicted] == number]
            if len(mine):
                self._drop(camera, which, numbers[mine], int((after[mine] < NEVER).sum()))
        self.taken -= int(size[evicted].sum())
        return True

    def drop_blocks(self, camera: str, blocks: Int64) -> None:
        """Evicts blocks that no batch needs any more."""
        self.taken -= int(self._blocks[camera].sizes(blocks).sum())
        self._drop(camera, self._blocks[camera], blocks, 0)

    def _drop(self, camera: str, kind: Kind, numbers: Int64, early: int) -> None:
        if isinstance(kind, BlockTable):
            self._dropped.blocks += [(camera, *name) for name in kind.names(numbers)]
            self.evicted_early += early
        elif kind is self._rows:
            self._dropped.rows += numbers.tolist()
        else:
            self._dropped.indices += [(camera, number) for number in numbers.tolist()]
        kind.drop(numbers)

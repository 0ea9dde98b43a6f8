"""What is in memory of rows and indices, and which of it is evicted for others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

Key = tuple[str, int]
"""("", episode) for the rows of an episode, (camera, file) for the index of a video file."""


class Room:
    """Rows and indices within a number of bytes. What is not pinned is evicted, the least recently used first.

    Args:
        size: Bytes that rows and indices may take together.
        index_share: Bytes of that for indices. Indices are evicted first if they take more, and rows otherwise.

    Attributes:
        size: See above.
        coming: What is on its way. If it is evicted, whatever arrives of it is dropped.
        evicted: What was evicted since `take_evicted` was called.
    """

    def __init__(self, size: int, index_share: int) -> None:
        self.size, self._index_share = size, index_share
        self._sizes: dict[bool, OrderedDict[Key, int]] = {False: OrderedDict(), True: OrderedDict()}  # rows, indices
        self._bytes = {False: 0, True: 0}
        self._pins: Counter[Key] = Counter()
        self.coming: set[Key] = set()
        self.evicted: list[Key] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes[bool(key[0])]

    @property
    def bytes_by_kind(self) -> tuple[int, int]:
        """Bytes of rows, and of indices."""
        return self._bytes[False], self._bytes[True]

    @property
    def free(self) -> int:
        """Bytes that are left. Negative if something is larger than expected."""
        return self.size - sum(self._bytes.values())

    def hold(self, key: Key, size: int, used: bool = True) -> None:
        """Count something, or correct its size. If it was not `used` yet, it is evicted before all else."""
        kind = bool(key[0])
        self._bytes[kind] += size - self._sizes[kind].get(key, 0)
        self._sizes[kind][key] = size
        self._sizes[kind].move_to_end(key, last=used)

    def drop(self, key: Key) -> None:
        """Count something no longer."""
        kind = bool(key[0])
        self._bytes[kind] -= self._sizes[kind].pop(key, 0)

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep these until they are unpinned as often."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo `pin`. They are now used most recently."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
            if key in self:
                self._sizes[bool(key[0])].move_to_end(key)

    def make(self, need: int, as_far_as_possible: bool = False) -> bool:
        """Evict something so that `need` bytes are free. Return False if that is not possible.

        Nothing is evicted then, except `as_far_as_possible`.
        """
        short, evicted = need - self.free, list[Key]()
        first = self._bytes[True] > self._index_share
        for kind in (first, not first):
            for key, size in self._sizes[kind].items():
                if short <= 0:
                    break
                if key not in self._pins:
                    evicted.append(key)
                    short -= size
        if short > 0 and not as_far_as_possible:
            return False
        for key in evicted:
            self.drop(key)
        self.coming.difference_update(evicted)
        self.evicted += evicted
        return short <= 0

    def take_evicted(self) -> list[Key]:
        """Return what was evicted since the last call."""
        evicted, self.evicted = self.evicted, []
        return evicted

"""Memory accounting and eviction of rows and indices."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

Key = tuple[str, int]
"""("", episode) for the rows of an episode, (camera, file) for the index of a video file."""


class Room:
    """Rows and indices within a limit of bytes. Entries that are not pinned are evicted, least recently used first.

    Args:
        size: Bytes that rows and indices may take together.
        index_share: Bytes of `size` for indices. Indices are evicted first if they take more, and rows otherwise.

    Attributes:
        size: See above.
        coming: Keys of entries that are being read. The result of a read whose key was evicted meanwhile is dropped.
        evicted: Keys of entries that were evicted since the last call of `take_evicted`.
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
        """Number of free bytes. Negative if entries are larger than expected."""
        return self.size - sum(self._bytes.values())

    def hold(self, key: Key, size: int, used: bool = True) -> None:
        """Add an entry, or correct its size.

        Args:
            key: Key of the entry.
            size: Size of the entry in bytes.
            used: Whether the entry counts as the most recently used one. If not, it is the first to be evicted of its kind.
        """
        kind = bool(key[0])
        self._bytes[kind] += size - self._sizes[kind].get(key, 0)
        self._sizes[kind][key] = size
        self._sizes[kind].move_to_end(key, last=used)

    def drop(self, key: Key) -> None:
        """Remove an entry, if it exists."""
        kind = bool(key[0])
        self._bytes[kind] -= self._sizes[kind].pop(key, 0)

    def pin(self, keys: Iterable[Key]) -> None:
        """Protect entries from eviction until they have been unpinned as many times as pinned."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin`. The entries become the most recently used ones."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
            if key in self:
                self._sizes[bool(key[0])].move_to_end(key)

    def make(self, need: int, as_far_as_possible: bool = False) -> bool:
        """Evict entries until `need` bytes are free.

        Args:
            need: Number of bytes.
            as_far_as_possible: Whether to evict entries even if that does not free enough.

        Returns:
            Whether `need` bytes are free. If not, nothing is evicted unless `as_far_as_possible` is True.
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
        """Return the keys of the entries that were evicted since the last call."""
        evicted, self.evicted = self.evicted, []
        return evicted

"""Memory of rows and indices: which are in memory or being read, and which are evicted if memory is short."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

Key = tuple[str, int]
"""("", episode) for the rows of an episode, (camera, file) for the index of a video file."""


@dataclass
class _Entry:
    """Size of a value in bytes, and its read. The read is None before it begins, and once `take` has returned its result."""

    size: int
    coming: Future[Any] | None = None


class MemoryAccount:
    """Account of the memory of rows and indices: the size of each that is in memory or being read, and which are evicted.

    It holds no values, which are in `IndexCache`, `OpenEpisodes` and `EpisodeTable`. Only one thread may use it.

    Values that are pinned stay. The others are evicted if memory is short, least recently used first. If a value is evicted
    while it is being read, the result of the read is dropped.

    Args:
        room: Bytes that rows and indices may take together.
        index_share: Bytes of `room` for indices. Indices are evicted first if they take more, and rows otherwise.
    """

    def __init__(self, room: int, index_share: int) -> None:
        self._room, self._index_share = room, index_share
        self._evicted: list[Key] = []
        self._entries: dict[Key, _Entry] = {}
        self._pins: Counter[Key] = Counter()
        # These pairs have an item for rows and one for indices.
        self._bytes, self._idle_bytes = [0, 0], [0, 0]  # of all values, and of those that are not pinned
        self._idle: tuple[OrderedDict[Key, None], OrderedDict[Key, None]] = OrderedDict(), OrderedDict()  # in order of last use

    @property
    def bytes_by_kind(self) -> tuple[int, int]:
        """Bytes of rows, and of indices, that are in memory or being read."""
        return self._bytes[0], self._bytes[1]

    @property
    def free(self) -> int:
        """Number of free bytes. Negative if values are larger than expected."""
        return self._room - sum(self._bytes)

    def __contains__(self, key: Key) -> bool:
        """Return whether a value is in memory or being read, and was not evicted."""
        return key in self._entries

    def add(self, key: Key, size: int, is_used: bool = True) -> None:
        """Add a value, which must not be in memory.

        Args:
            key: Key of the value.
            size: Its size in bytes, or an estimate if it has not been read.
            is_used: Whether it was used. If not, it is evicted before all others, unless it is used later. Default: True.
        """
        self._entries[key] = _Entry(size)
        self._bytes[_kind(key)] += size
        if not self._pins[key]:
            self._set_idle(key)
            self._idle[_kind(key)].move_to_end(key, last=is_used)

    def resize(self, key: Key, size: int) -> None:
        """Set the size of a value in bytes."""
        more = size - self._entries[key].size
        self._entries[key].size = size
        self._bytes[_kind(key)] += more
        self._idle_bytes[_kind(key)] += more if key in self._idle[_kind(key)] else 0

    def remove(self, key: Key) -> None:
        """Remove a value."""
        self._unset_idle(key)
        self._bytes[_kind(key)] -= self._entries.pop(key).size

    def set_read(self, key: Key, coming: Future[Any]) -> None:
        """Set the read of a value, which has begun."""
        self._entries[key].coming = coming

    def is_coming(self, key: Key) -> bool:
        """Return whether the read of a value has begun, and `take` has not returned its result."""
        return key in self._entries and self._entries[key].coming is not None

    def take(self, key: Key) -> Any:
        """Return the result of a read. Wait for it if necessary. If it has failed, remove the value, and raise the error."""
        coming = self._entries[key].coming
        assert coming is not None
        try:
            result = coming.result()
        except BaseException:
            self.remove(key)
            raise
        self._entries[key].coming = None
        return result

    def pin(self, keys: Iterable[Key]) -> None:
        """Protect values from eviction until they were unpinned as many times as pinned. They may be added later."""
        for key in keys:
            self._pins[key] += 1
            self._unset_idle(key)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin`. The values become the most recently used ones."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                if key in self._entries:
                    self._set_idle(key)

    def make_room(self, need: int, as_far_as_possible: bool = False) -> bool:
        """Evict values until `need` bytes are free.

        Args:
            need: Number of bytes.
            as_far_as_possible: Whether to evict values even if that does not free enough. Default: False.

        Returns:
            Whether `need` bytes are free. If not, nothing is evicted unless `as_far_as_possible` is True.
        """
        if self.free + sum(self._idle_bytes) < need and not as_far_as_possible:
            return False
        while self.free < need and any(self._idle):
            rows, indices = self._idle
            indices_first = self._bytes[1] > self._index_share
            key = next(iter(indices if indices and (indices_first or not rows) else rows))
            is_coming = self.is_coming(key)
            self.remove(key)
            if not is_coming:
                self._evicted.append(key)
        return self.free >= need

    def take_evicted(self) -> list[Key]:
        """Return the values that were evicted since the last call, except those that were being read. The caller drops them."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _set_idle(self, key: Key) -> None:
        self._idle[_kind(key)][key] = None
        self._idle_bytes[_kind(key)] += self._entries[key].size

    def _unset_idle(self, key: Key) -> None:
        if key in self._idle[_kind(key)]:
            del self._idle[_kind(key)][key]
            self._idle_bytes[_kind(key)] -= self._entries[key].size


def _kind(key: Key) -> int:
    """Return 0 for rows, and 1 for an index."""
    return int(key[0] != "")

"""Rows and indices in memory: their states, their sizes, and which of them are evicted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dali_stream.schedule.episodes import NONE

Int64 = npt.NDArray[np.int64]
Key = tuple[str, int]
"""("", episode) for the rows of an episode, (camera, file) for the index of a video file."""
ABSENT, COMING, READ, OPEN = range(4)  # states of an item: OPEN is for the rows of an open episode only


class Items:
    """Rows and indices within a limit of bytes. Items that are not pinned are evicted, least recently used first.

    The rows of episode e are item e. The items after them are the indices of all video files, camera by camera. The state is
    stored in arrays with an entry per item, since a batch uses hundreds of items.

    Args:
        episodes: Number of episodes, E.
        files: {camera with video files: number of each episode's file, shape (E,)}. -1 if the episode has none.
        room: Bytes that rows and indices may take together.
        index_share: Bytes of `room` for indices. Indices are evicted first if they take more, and rows otherwise.

    Attributes:
        of: {camera: slice of the items of its indices}. `of[""]` is the slice of the rows.
        files: Item of the index of each episode's file, shape (cameras, E). `NONE` if the episode has none.
        state: State of each item.
    """

    def __init__(self, episodes: int, files: Mapping[str, npt.NDArray[np.integer]], room: int, index_share: int) -> None:
        self.of, count = {"": slice(0, episodes)}, episodes
        items = []
        for camera, numbers in files.items():
            items.append(np.where(numbers >= 0, count + numbers, NONE))
            self.of[camera] = slice(count, count + int(numbers.max(initial=NONE)) + 1)
            count = self.of[camera].stop
        self.files: Int64 = np.array(items, np.int64).reshape(len(items), episodes)
        self.state = np.full(count, ABSENT, np.int8)
        self._room, self._index_share = room, index_share
        self._size = np.zeros(count, np.int64)  # bytes of each item that is in memory or being read
        self._bytes = [0, 0]  # bytes of all rows, and of all indices
        self._pins = np.zeros(count, np.int32)  # number of batches that use each item
        self._used = np.zeros(count, np.int64)  # time of each item's last use, as counted by `_time`
        self._time = 0
        self._evicted: list[int] = []

    @property
    def bytes_by_kind(self) -> tuple[int, int]:
        """Bytes of rows, and of indices, that are in memory or being read."""
        return self._bytes[0], self._bytes[1]

    @property
    def free(self) -> int:
        """Number of free bytes. Negative if items are larger than expected."""
        return self._room - sum(self._bytes)

    def __len__(self) -> int:
        return len(self.state)

    def is_index(self, items: Int64) -> npt.NDArray[np.bool_]:
        """Return a mask of the items that are indices and not rows."""
        return items >= self.of[""].stop

    def key(self, item: int) -> Key:
        """Return the key of an item."""
        camera = next(camera for camera, items in self.of.items() if item < items.stop)
        return camera, item - self.of[camera].start

    def set(self, items: Int64, size: int | Int64, state: int, is_used: bool = True) -> None:
        """Set the size in bytes and the state of items. Items that are not used yet are evicted before all others."""
        change = size - self._size[items]
        indices = int(change[self.is_index(items)].sum())
        self._bytes = [self._bytes[0] + int(change.sum()) - indices, self._bytes[1] + indices]
        self._time += 1
        # A negative time makes unused items older than all used ones. The unused items that were added last are evicted first.
        self._size[items], self.state[items], self._used[items] = size, state, self._time if is_used else -self._time

    def pin(self, items: Int64) -> None:
        """Protect items from eviction until they have been unpinned as many times as pinned."""
        self._pins[items] += 1

    def unpin(self, items: Int64) -> None:
        """Undo one `pin`. The items become the most recently used ones."""
        self._pins[items] -= 1
        self._time += 1
        self._used[items] = self._time

    def make_room(self, need: int, as_far_as_possible: bool = False) -> bool:
        """Evict items until `need` bytes are free.

        Args:
            need: Number of bytes.
            as_far_as_possible: Whether to evict items even if that does not free enough. Default: False.

        Returns:
            Whether `need` bytes are free. If not, nothing is evicted unless `as_far_as_possible` is True.
        """
        if (short := need - self.free) <= 0:
            return True
        # An item that is still being read may be evicted, too. Its result is dropped.
        items = np.flatnonzero((self.state != ABSENT) & (self._pins == 0))
        # The last key of `lexsort` is the primary one: it puts indices first if they exceed their share, and rows first
        # otherwise. Items of the same kind are in the order of their last use.
        indices_first = self._bytes[1] > self._index_share
        items = items[np.lexsort((self._used[items], self.is_index(items) != indices_first))]
        freed = np.cumsum(self._size[items])
        is_enough = bool(len(items)) and int(freed[-1]) >= short
        if is_enough or as_far_as_possible:
            items = items[: np.searchsorted(freed, short) + 1]
            self.set(items, 0, ABSENT)
            self._evicted += items.tolist()
        return is_enough

    def take_evicted(self) -> list[Key]:
        """Return the keys of the items that were evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return [self.key(item) for item in evicted]

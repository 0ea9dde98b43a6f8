"""Decoded row groups in memory, and the rows of the episodes that they contain."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.lerobot.dataset_files import DatasetFiles

Columns = dict[str, npt.NDArray[Any]]
KEPT = 128 << 20  # default maximum of kept row groups, in bytes: a million rows with two vectors of 8 numbers


class DecodedGroups:
    """Decoded row groups of a file.

    Attributes:
        path: Path of the file, for messages. For an episode in several files, it is that of the first one.
        columns: {key: values of all rows}. Columns of images, of strings and with errors are not converted to NumPy yet.
        nbytes: Memory of the columns in bytes.
        bytes_read: Number of bytes that were read for the columns and that `take_bytes` has not returned yet.
        lengths: Number of rows of each selected episode that is complete in these row groups, {episode: rows}.
        start: First row of each of these episodes, {episode: row}.
    """

    def __init__(
        self,
        path: str,
        columns: dict[str, pa.ChunkedArray | npt.NDArray[Any]],
        index: npt.NDArray[np.int64],
        dataset: DatasetFiles,
        bytes_read: int,
    ) -> None:
        self.path, self.columns, self.bytes_read = path, columns, bytes_read
        self.nbytes = sum(values.nbytes for values in columns.values())
        starts = np.flatnonzero(np.append(True, index[1:] != index[:-1])) if len(index) else np.empty(0, np.int64)
        lengths, index = np.diff(np.append(starts, len(index))), index[starts]
        number = np.minimum(np.searchsorted(dataset.episodes, index), len(dataset.episodes) - 1)
        # An episode that continues in another row group, or that is not selected, is left out.
        whole = (dataset.episodes[number] == index) & (dataset.lengths[number] == lengths)
        numbers = number[whole].tolist()
        self.lengths = dict(zip(numbers, lengths[whole].tolist(), strict=True))
        self.start = dict(zip(numbers, starts[whole].tolist(), strict=True))
        self._index, self._lengths = index, lengths

    def rows_of(self, index: int) -> int:
        """Return the number of rows of an episode in these row groups, by its index."""
        return int(self._lengths[self._index == index].sum())

    def take_bytes(self) -> int:
        """Return the number of bytes that were read since the last call. Each byte is thus counted only once."""
        count, self.bytes_read = self.bytes_read, 0
        return count


class Found(Mapping[int, Columns]):
    """Rows of the episodes in some row groups, {episode: {key: array of shape (L, ...)}}.

    An episode is converted to NumPy when it is accessed, and only the last one is kept. Strings and images are arrays of
    objects.

    Args:
        lengths: {episode: number of its rows}.
        convert: Function that returns the columns of an episode, given the row groups and the episode.
        row_bytes: Approximate memory of a row in bytes.
        group: Row groups that contain the episodes.
    """

    def __init__(
        self, lengths: Mapping[int, int], convert: Callable[[DecodedGroups, int], Columns], row_bytes: int, group: DecodedGroups
    ) -> None:
        self.lengths, self._convert, self._row_bytes = lengths, convert, row_bytes
        self._group: DecodedGroups | None = group
        self._reference = weakref.ref(group)
        self._last: tuple[int | None, Columns] = None, {}

    def __getitem__(self, episode: int) -> Columns:
        if self._last[0] != episode:
            group = self._reference()
            if episode not in self.lengths or group is None:
                raise KeyError(episode)
            self._last = episode, self._convert(group, episode)
        return self._last[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def release(self, episode: int) -> DecodedGroups:
        """Keep a copy of one episode, and drop the reference to the row groups.

        The other episodes remain available as long as something else refers to the row groups.

        Returns:
            The row groups, for a caller that keeps them in memory.
        """
        assert self._group is not None
        # A view would keep the memory of all row groups alive.
        owned = {
            key: values if values.base is None and values.flags.owndata else values.copy()
            for key, values in self[episode].items()
        }
        self._last = episode, owned
        group, self._group = self._group, None
        return group

    def sizes(self) -> dict[int, int]:
        """Return {episode: approximate size in bytes} of the episodes in memory, without converting them."""
        if self._reference() is None:
            return {}
        return {episode: length * self._row_bytes for episode, length in self.lengths.items()}


class RowMemory:
    """Memory limit and cache for decoded row groups, for one reader or shared by several.

    Row groups are cached because their other episodes are needed later. A dataset that LeRobot has converted has one row group
    per file, with thousands of episodes. The least recently used row groups are evicted first.

    Args:
        at_once: Maximum bytes of row groups that are read at the same time. A larger one is read alone. Default: no limit.
        kept: Maximum bytes of decoded row groups to keep. A single row group may exceed it, up to `at_once`. Default: 128 MiB.

    Attributes:
        at_once: Maximum bytes of row groups that are read at the same time.
        largest: Size in bytes above which a row group is not kept.
        nbytes: Total bytes of the row groups that are kept.
    """

    def __init__(self, at_once: int = 1 << 62, kept: int = KEPT) -> None:
        self.at_once, self._kept = at_once, kept
        self.largest = max(at_once, kept)
        self._reading = self.nbytes = 0
        self._room = threading.Condition()
        self._groups: OrderedDict[tuple[object, ...], DecodedGroups] = OrderedDict()
        # Also finds evicted row groups, as long as a `Found` or its caller refers to them.
        self._alive: weakref.WeakValueDictionary[tuple[object, ...], DecodedGroups] = weakref.WeakValueDictionary()

    @contextmanager
    def turn(self, size: int) -> Iterator[None]:
        """Wait until row groups of `size` bytes may be read, and count them as being read within the `with` block."""
        with self._room:
            self._room.wait_for(lambda: not self._reading or self._reading + size <= self.at_once)
            self._reading += size
            # Cached row groups make room, so that both together do not exceed `largest`.
            self._evict(min(self._kept, max(self.largest - self._reading, 0)))
        try:
            yield
        finally:
            with self._room:
                self._reading -= size
                self._room.notify_all()

    def get(self, key: tuple[object, ...]) -> DecodedGroups | None:
        """Return row groups that are kept or still referenced, or None."""
        with self._room:
            if key in self._groups:
                self._groups.move_to_end(key)
            return self._alive.get(key)

    def put(self, key: tuple[object, ...], group: DecodedGroups) -> None:
        """Keep row groups, unless they are too large, or have no second episode that could be requested later."""
        with self._room:
            self._alive[key] = group
            if len(group.lengths) > 1 and group.nbytes <= self.largest:
                self._groups[key] = group
                self.nbytes += group.nbytes
                self._evict(self._kept, spared=1)

    def _evict(self, most: int, spared: int = 0) -> None:
        while len(self._groups) > spared and self.nbytes > most:
            self.nbytes -= self._groups.popitem(last=False)[1].nbytes

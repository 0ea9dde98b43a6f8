"""Rows of the Parquet files as NumPy columns, one episode at a time."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.errors import DatasetError, counted
from dali_stream.lerobot.columns import to_numpy
from dali_stream.lerobot.dataset import DatasetFiles
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.metadata import parquet_errors
from dali_stream.lerobot.row_file import RowFile
from dali_stream.storage import Store
from dali_stream.workers import Once

_log = logging.getLogger("dali_stream")
Columns = dict[str, npt.NDArray[Any]]
KEPT = 128 << 20  # bytes of decoded row groups that are kept at most: one of a million rows of two vectors of 8 numbers


class Found(Mapping[int, Columns]):
    """{episode: {key: (L, ...) array}} of some row groups, converted on access. Strings and images are arrays of objects.

    Args:
        lengths: Rows of each episode.
        convert: Function of the row groups and an episode that returns its columns.
        row_bytes: About how many bytes a row takes in memory.
        group: The row groups.
    """

    def __init__(
        self, lengths: Mapping[int, int], convert: Callable[[_Group, int], Columns], row_bytes: int, group: _Group
    ) -> None:
        self.lengths, self._convert, self._row_bytes = lengths, convert, row_bytes
        self._group: _Group | None = group
        self._reference = weakref.ref(group)
        self._last: tuple[int, Columns] = -1, {}

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

    def release(self, episode: int) -> _Group:
        """Keep a copy of one episode, and the others as long as the row groups are in memory anyway. Return those."""
        assert self._group is not None
        self._last = episode, {key: values.copy() for key, values in self[episode].items()}
        group, self._group = self._group, None
        return group

    def sizes(self) -> dict[int, int]:
        """Return about how many bytes each episode takes that is in memory, without converting any."""
        if self._reference() is None:
            return {}
        return {episode: length * self._row_bytes for episode, length in self.lengths.items()}


class Rows(Protocol):
    """Reads rows. Safe to use from several threads."""

    def read(self, episode: int) -> Found:
        """The rows of an episode, and of others that had to be read with it. Raises DatasetError, StorageError."""
        ...


class RowMemory:
    """Decoded row groups of one reader, or of several together: those that are being read, and some of those that were.

    Row groups are kept, least recently used first to go, since their other episodes are needed later: a dataset that LeRobot
    has converted has one row group a file, with thousands of episodes.

    Args:
        at_once: Bytes of row groups that are read at the same time, unless a single one has more.
        kept: Bytes of decoded row groups to keep. The one that was read last is kept even if it has more, up to `at_once`.
    """

    def __init__(self, at_once: int = 1 << 62, kept: int = KEPT) -> None:
        self.at_once, self._kept = at_once, kept
        self.largest = max(at_once, kept)
        self._reading = self.nbytes = 0
        self._room = threading.Condition()
        self._groups: OrderedDict[tuple[object, ...], _Group] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[tuple[object, ...], _Group] = weakref.WeakValueDictionary()

    @contextmanager
    def turn(self, size: int) -> Iterator[None]:
        """Wait until row groups of `size` bytes may be read beside those that are."""
        with self._room:
            self._room.wait_for(lambda: not self._reading or self._reading + size <= self.at_once)
            self._reading += size
            self._evict(min(self._kept, max(self.largest - self._reading, 0)))
        try:
            yield
        finally:
            with self._room:
                self._reading -= size
                self._room.notify_all()

    def get(self, key: tuple[object, ...]) -> _Group | None:
        """Return row groups that are kept, or that are still referenced."""
        with self._room:
            if key in self._groups:
                self._groups.move_to_end(key)
            return self._alive.get(key)

    def put(self, key: tuple[object, ...], group: _Group) -> None:
        """Keep row groups, if that is worth it."""
        with self._room:
            self._alive[key] = group
            if len(group.lengths) > 1 and group.nbytes <= self.largest:
                self._groups[key] = group
                self.nbytes += group.nbytes
                self._evict(self._kept, spared=1)

    def _evict(self, most: int, spared: int = 0) -> None:
        while len(self._groups) > spared and self.nbytes > most:
            self.nbytes -= self._groups.popitem(last=False)[1].nbytes


class _Group:
    """Decoded row groups of a file.

    Attributes:
        lengths: {episode: rows}, of the selected episodes that are whole in them.
        start: {episode: row}, where each begins.
        rows: {episode index: rows}, of all episodes.
    """

    def __init__(self, table: pa.Table, index: npt.NDArray[np.int64], dataset: DatasetFiles, bytes_read: int) -> None:
        self.columns = {name: table[name] for name in table.column_names}
        self.nbytes, self.bytes_read = table.nbytes, bytes_read
        starts = np.flatnonzero(np.append(True, index[1:] != index[:-1])) if len(index) else np.empty(0, np.int64)
        lengths, index = np.diff(np.append(starts, len(index))), index[starts]
        number = np.minimum(np.searchsorted(dataset.episodes, index), len(dataset.episodes) - 1)
        whole = (dataset.episodes[number] == index) & (dataset.lengths[number] == lengths)
        numbers = number[whole].tolist()
        self.lengths = dict(zip(numbers, lengths[whole].tolist(), strict=True))
        self.start = dict(zip(numbers, starts[whole].tolist(), strict=True))
        self._index, self._lengths = index, lengths

    def rows_of(self, index: int) -> int:
        """Return how many rows of an episode are here, by its index."""
        return int(self._lengths[self._index == index].sum())

    def take_bytes(self) -> int:
        """Return the bytes that were read, to whoever asks first."""
        taken, self.bytes_read = self.bytes_read, 0
        return taken


class RowReader:
    """Reads the rows of episodes, and only the features that `dataset` selects. Safe to use from several threads.

    Args:
        dataset: the selected part of a dataset.
        store: where its rows are read; None: where the dataset lies.
        memory: for decoded row groups; None: an own one.
        keys: of these features only; None: of all that `dataset` selects.
    """

    FILES = 256  # whose footers are kept, least recently used first to go

    def __init__(
        self,
        dataset: DatasetFiles,
        store: Store | None = None,
        memory: RowMemory | None = None,
        keys: Container[str] | None = None,
    ) -> None:
        self._dataset, self._store = dataset, store or dataset.data_store
        self._memory, self._warned = memory or RowMemory(), False
        self.features = {k: f for k, f in dataset.features.items() if not f.is_video and (keys is None or k in keys)}
        self._files: OrderedDict[str, RowFile] = OrderedDict()
        self._lock = threading.Lock()
        self._once = Once()

    def read(self, episode: int) -> Found:
        """The rows of the `episode`-th selected episode, and of the others that had to be read with it.

        Row groups that are kept or still referenced are not read again, and come without the others. Do not modify the arrays.

        Raises:
            DatasetError: a file is missing or broken, or holds other rows than the metadata promises.
        """
        dataset = self._dataset
        row = int(dataset.rows[episode])
        number = int(dataset.table.data.index[row])
        path = dataset.table.data.paths[number]
        first, index, length = int(dataset.table.first_row[row]), int(dataset.episodes[episode]), int(dataset.lengths[episode])
        with parquet_errors(self._store, path):
            file = self._file(path, number)
            group, is_new = self._group(file, path, file.groups_at(first, first + length))
            if episode not in group.lengths:  # the file does not hold its episodes in their order
                group, is_new = self._group(file, path, file.groups_of(index))
            if episode not in group.lengths:
                raise DatasetError(
                    f"{self._store.where(path)}: episode {index}: the metadata promises {counted(length, 'row')}, and the file "
                    f"holds {group.rows_of(index)}; copy the dataset again"
                )
            lengths = group.lengths if is_new else {episode: length}
            found = Found(lengths, lambda group, e: self._columns(group, path, e), self._dataset.row_bytes, group)
            _ = found[episode]
        return found

    def _group(self, file: RowFile, path: str, groups: list[int]) -> tuple[_Group, bool]:
        """Decoded row groups, and whether they were read just now."""
        key = (id(self), path, *groups)

        def read() -> tuple[_Group, bool]:
            if (group := self._memory.get(key)) is not None:
                return group, False
            with self._turn(path, int(file.groups.sizes[groups].sum())):
                table, bytes_read = file.read(groups)
                index = to_numpy(table["episode_index"], _EPISODE_INDEX, f"{self._store.where(path)}: episode_index")
                group = _Group(table, index, self._dataset, bytes_read)
            self._memory.put(key, group)
            return group, True

        return self._once(key, read)

    @contextmanager
    def _turn(self, path: str, size: int) -> Iterator[None]:
        """See `RowMemory`. Warn once if a row group is too large to be kept."""
        if size > self._memory.largest and not self._warned:
            self._warned = True
            _log.warning(
                "%s: a row group has %d bytes, and memory_budget leaves %d for rows, so it is read again for each of its "
                "episodes. `dali-stream reshard URI OUT` writes smaller ones",
                self._store.where(path), size, self._memory.largest,
            )  # fmt: skip
        with self._memory.turn(size):
            yield

    def _file(self, path: str, number: int) -> RowFile:
        """The dataset's data file of that number."""
        with self._lock:
            file = self._files.get(path)
        if file is None:
            file = self._once(path, lambda: RowFile(self._dataset, self._store, number, list(self.features)))
        with self._lock:
            self._files[path] = file
            self._files.move_to_end(path)
            while len(self._files) > self.FILES:
                self._files.popitem(last=False)
        return file

    def _columns(self, group: _Group, path: str, episode: int) -> Columns:
        """The columns of an episode."""
        start, length = group.start[episode], group.lengths[episode]
        where = f"{self._store.where(path)}: episode {self._dataset.episodes[episode]}"

        def image(name: str) -> bytes:
            data = self._store.read_all(name)
            group.bytes_read += len(data)
            return data

        with parquet_errors(self._store, path):  # text that is not UTF-8 shows only now
            columns = {
                key: to_numpy(group.columns[key].slice(start, length), feature, f"{where}: {key}", image)
                for key, feature in self.features.items()
            }
        numbers = columns.get("frame_index")
        if numbers is not None and (numbers[1:] - numbers[:-1] != 1).any():
            raise DatasetError(f"{where}: its frame_index does not count its rows; record or convert it again")
        if "timestamp" in columns and self._dataset.clock == "timestamp":
            check_rising(where, columns["timestamp"])
        return columns


def check_rising(where: str, timestamp: npt.NDArray[Any]) -> None:
    """Raises DatasetError where a row's timestamp is not above that of the row before: it would get another row's frame."""
    row = _not_rising(timestamp)
    if row is not None:
        before = f", and that of row {row - 1} is {timestamp[row - 1]:.4f} s" if row else ""
        raise DatasetError(
            f"{where}: row {row}: its timestamp is {timestamp[row]:.4f} s{before}. Timestamps rise within an episode; the "
            "file is damaged: copy or record it again"
        )


_EPISODE_INDEX = Feature(dtype="int64", shape=[1])


def _not_rising(timestamp: npt.NDArray[Any]) -> int | None:
    """The first row whose timestamp is not above that of the row before; None where all rise."""
    wrong = ~(timestamp[1:] > timestamp[:-1])
    if not timestamp[:1] > -np.inf:
        return 0
    return int(np.argmax(wrong)) + 1 if wrong.any() else None

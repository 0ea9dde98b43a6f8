"""Reader of one Parquet file of rows, which locates the row groups of an episode and reads some of their columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.errors import DatasetError
from dali_stream.lerobot.dataset import DatasetFiles
from dali_stream.lerobot.metadata import FRAME_INDEX
from dali_stream.lerobot.row_groups import MAGIC, RowGroups, as_file
from dali_stream.storage import Store
from dali_stream.storage.store import SMALL, Ranges

_TAIL = 64 << 10  # number of bytes at the end of a file that are read first; they usually contain the whole footer
_GAP = 8 << 10  # maximum gap between two columns that are read in one request, in bytes
_LARGE = 32 << 20  # above this size of the columns in bytes, pyarrow plans the reads and sends several requests at a time
_FEW_ROWS = 1 << 20  # number of rows that is plausible for a row group of any dataset


class RowFile:
    """Data file of a dataset. The constructor reads its footer.

    The statistics in the footer would tell which episodes a row group contains. They are not used, because pyarrow terminates
    the process if their type differs from the type of the column, as in a broken footer.

    Args:
        dataset: Dataset that contains the file.
        store: Store to read from.
        number: Number of the file among the data files.
        keys: Columns to read. `frame_index` is not read if the file lacks it.

    Attributes:
        groups: Row groups of the file.

    Raises:
        DatasetError: If the file lacks a column, or if a row group has a negative or implausible number of rows.
    """

    def __init__(self, dataset: DatasetFiles, store: Store, number: int, keys: Sequence[str]) -> None:
        table = dataset.table
        self._store, self._path = store, table.data.paths[number]
        opened = dataset.opened.pop(number) if number in dataset.opened else _open(dataset, store, number)
        metadata, footer, self._whole = opened
        self.groups = RowGroups(footer, metadata)
        parquet = pq.ParquetFile(pa.BufferReader(b""), metadata=self.groups.sample)
        self._size = store.size(self._path)
        self._gap = 0 if dataset.skips_images else _GAP
        self._names = parquet.schema_arrow.names
        # Without the column `frame_index`, it is the number of the row within its episode.
        absent = {FRAME_INDEX}.difference(self._names)
        self._columns = [key for key in dict.fromkeys([*keys, "episode_index"]) if key not in absent]
        missing = [key for key in self._columns if key not in self._names]
        if missing:
            raise DatasetError(
                f"Missing column {missing[0]} in {store.where(self._path)}. The dataset's meta/info.json has it as a feature"
            )
        self._leaves = _leaves(parquet, self._columns)
        promised = int(table.length.sum())
        most = max(promised, _FEW_ROWS)  # a file may contain rows of episodes that were removed from the metadata
        rows = self.groups.rows
        if (wrong := (rows < 0) | (rows > most)).any():
            raise DatasetError(
                f"Invalid row group in {store.where(self._path)}: must have at most {most} rows, since the dataset has "
                f"{promised} frames, got {rows[wrong][0]}"
            )
        self._stop = int(table.first_row[table.data.rows(number)].min()) + np.cumsum(rows)
        self._episodes: npt.NDArray[np.int64] | None = None

    def groups_at(self, start: int, stop: int) -> list[int]:
        """Return the row groups of rows [start, stop) of the dataset, if the file's episodes are in the metadata's order."""
        first, last = np.searchsorted(self._stop, [start, stop], side="right").tolist()
        # `last` is the first group that ends after `stop`. It is included if it begins before `stop`.
        last += last < len(self._stop) and int(self._stop[last] - self.groups.rows[last]) < stop
        return [group for group in range(first, last) if self.groups.rows[group]]

    def groups_alone(self, start: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row groups that contain one episode each, if the file's episodes are in the metadata's order.

        Args:
            start: First row of each episode in the dataset, shape (n,).
            length: Number of rows of each episode, shape (n,).

        Returns:
            Row group of each episode, shape (n,). -1 if an episode has no row group of its own.
        """
        if not len(self._stop):
            return np.full(len(start), -1)
        groups = np.minimum(self._stop.searchsorted(start, "right"), len(self._stop) - 1)
        is_alone = (self._stop[groups] == start + length) & (self.groups.rows[groups] == length)
        return np.where(is_alone, groups, -1)

    def groups_of(self, episode: int) -> list[int]:
        """Return the row groups that may contain rows of an episode, by its index, for files with any order of episodes.

        The first call reads the episode indices of all row groups.
        """
        if self._episodes is None:
            self._episodes = np.array([self._range(i) for i in range(len(self._stop))], np.int64).reshape(-1, 2)
        return np.flatnonzero((self._episodes[:, 0] <= episode) & (episode <= self._episodes[:, 1])).tolist()

    def read(self, groups: Sequence[int]) -> tuple[pa.Table, int]:
        """Return the columns of some row groups, and the number of bytes that were read for them."""
        metadata, numbers = self.groups.metadata(groups)
        # The bytes that `_open` has read serve one call only, since footers are cached and whole files must not be.
        whole, self._whole = self._whole, b""
        if whole:
            parquet = self._parquet(pa.BufferReader(whole), metadata, pre_buffer=False)
            return parquet.read_row_groups(numbers, columns=self._columns, use_threads=False), len(whole)
        file = self._store.open(self._path, self._size)
        ranges = self._ranges(metadata, numbers)
        for start, stop in ranges:
            file.hold(start, stop)
        parquet = self._parquet(file, metadata, pre_buffer=not ranges)
        # Pyarrow also reads small gaps between columns, which may contain images. Reading each run by itself avoids that.
        runs = [self._columns] if ranges or self._gap else self._runs()
        parts = [parquet.read_row_groups(numbers, columns=run, use_threads=False) for run in runs]
        table = pa.table({name: part[name] for part in parts for name in part.column_names}) if len(parts) > 1 else parts[0]
        return table, file.bytes_read

    def _range(self, group: int) -> tuple[int, int]:
        """Return the lowest and the highest episode index in a row group."""
        metadata, numbers = self.groups.metadata([group])
        parquet = self._parquet(self._store.open(self._path, self._size), metadata)
        index = parquet.read_row_groups(numbers, columns=["episode_index"], use_threads=False)["episode_index"]
        values = index.to_numpy()
        return (int(values.min()), int(values.max())) if len(values) else (0, -1)

    def _parquet(self, file: Ranges | pa.BufferReader, metadata: pq.FileMetaData, pre_buffer: bool = True) -> pq.ParquetFile:
        return pq.ParquetFile(file, metadata=metadata, pre_buffer=pre_buffer, page_checksum_verification=True)

    def _ranges(self, metadata: pq.FileMetaData, groups: Sequence[int]) -> list[tuple[int, int]]:
        """Return the byte ranges (start, stop) of the columns.

        The list is empty if the ranges are large or invalid. Pyarrow then plans the reads.
        """
        ranges: list[tuple[int, int]] = []
        for group in map(metadata.row_group, groups):
            for chunk in map(group.column, self._leaves):
                dictionary = chunk.dictionary_page_offset or chunk.data_page_offset
                start = min(dictionary, chunk.data_page_offset)
                stop = start + chunk.total_compressed_size
                if not 0 < start <= stop <= self._size:
                    return []
                if ranges and 0 <= start - ranges[-1][1] <= self._gap:
                    start = ranges.pop()[0]
                ranges.append((start, stop))
        return ranges if sum(stop - start for start, stop in ranges) <= _LARGE else []

    def _runs(self) -> list[list[str]]:
        """Return the columns, grouped into runs that are adjacent in the file."""
        runs: list[list[str]] = []
        before = -2
        for place in sorted(map(self._names.index, self._columns)):
            if place != before + 1:
                runs.append([])
            runs[-1].append(self._names[place])
            before = place
        return runs


def read_schema(dataset: DatasetFiles, store: Store, number: int) -> pa.Schema:
    """Return the schema of a data file, by its number among the data files. It sends the same requests as `RowFile` does."""
    metadata, footer, _ = _open(dataset, store, number)
    return (metadata or pq.read_metadata(as_file(footer))).schema.to_arrow_schema()


def read_column_names(dataset: DatasetFiles, store: Store, number: int) -> list[str]:
    """Return the names of the columns of a data file. The first `RowFile` of this file does not read its footer again."""
    metadata, footer, _ = dataset.opened[number] = _open(dataset, store, number)
    names: list[str] = RowGroups(footer, metadata).sample.schema.to_arrow_schema().names
    return names


def _open(dataset: DatasetFiles, store: Store, number: int) -> tuple[pq.FileMetaData | None, bytes, bytes]:
    """Read the footer of a data file.

    A remote file of one short episode, as in datasets of version 2.x, is read whole, with one request instead of three.

    Returns:
        Parsed metadata, the footer, and the bytes of the whole file. Each may be missing (None or b""), but either the metadata
        or the footer is present.
    """
    path = dataset.table.data.paths[number]
    rows = dataset.table.length[dataset.table.data.rows(number)]
    small = len(rows) == 1 and rows[0] * dataset.row_bytes <= SMALL and not dataset.skips_images
    whole = store.read(path, 0, SMALL) if small and store.remote else b""
    size = store.size(path)  # after the read above, whose response contains the size of a remote file
    if whole and len(whole) == size:
        return pq.read_metadata(pa.BufferReader(whole)), b"", whole
    footer = _footer(store, path, size, 8 if dataset.skips_images else _TAIL)
    if footer is None:
        return pq.read_metadata(store.open(path, size)), b"", b""  # pyarrow raises the error with the reason
    return None, footer, b""


def _footer(store: Store, path: str, size: int, tail: int) -> bytes | None:
    """Return the footer of a file, or None if it has no valid one.

    Args:
        store: Store of the file.
        path: Path to the file.
        size: Size of the file in bytes.
        tail: Number of bytes at the end of the file to read first.
    """
    begin = max(size - tail, 0)
    data = store.read(path, begin, size)
    length, magic = int.from_bytes(data[-8:-4], "little"), data[-4:]
    if len(data) < 8 or magic != MAGIC or length > size - 12:
        return None
    missing = length + 8 - len(data)
    if missing > 0:
        data = store.read(path, begin - missing, begin) + data
    return data[-8 - length : -8]


def _leaves(parquet: pq.ParquetFile, columns: Sequence[str]) -> list[int]:
    """Return the numbers of the Parquet columns that store some Arrow columns. Empty if the two schemas do not match."""
    leaves: list[int] = []
    first = 0  # not the number of the field, since a struct is stored as several Parquet columns
    for field in parquet.schema_arrow:
        count = _count_leaves(field.type)
        leaves += range(first, first + count) if field.name in columns else ()
        first += count
    return leaves if first == parquet.metadata.num_columns else []


def _count_leaves(kind: pa.DataType) -> int:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if pa.types.is_struct(kind):
        return sum(_count_leaves(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _count_leaves(kind.key_type) + _count_leaves(kind.item_type)
    return _count_leaves(kind.value_type) if pa.types.is_nested(kind) else 1

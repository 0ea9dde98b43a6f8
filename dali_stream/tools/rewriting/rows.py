"""Parquet files: assigning episodes to files and row groups, and writing them.

Row groups hold whole episodes, about `ROW_GROUP` bytes of them as encoded in the source. A larger episode has row groups of
its own. Schema, metadata, columns and compression stay those of the source; a new file starts where the schema changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dali_stream.errors import DatasetError
from dali_stream.lerobot.metadata import Episodes, parquet_errors
from dali_stream.storage import Store
from dali_stream.tools.rewriting.stores import Window

ROW_GROUP = 32 << 20
WINDOW = 16 << 20  # bytes of row groups fetched together; a single one may be larger
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Parquet:
    """A file's footer.

    Attributes:
        first_row: (groups + 1,) first row of each row group, then the number of rows.
        start, stop: (groups,) bytes of each row group in the file.
    """

    path: str
    schema: pa.Schema
    codec: str
    first_row: Int64
    start: Int64
    stop: Int64

    def nbytes(self, start: int, stop: int) -> int:
        """Approximate encoded bytes of the rows [start, stop)."""
        rows = np.diff(self.first_row)
        taken = np.clip(np.minimum(self.first_row[1:], stop) - np.maximum(self.first_row[:-1], start), 0, None)
        return int((taken * (self.stop - self.start) / np.maximum(rows, 1)).sum())

    def groups(self, start: int, stop: int) -> list[int]:
        """The row groups of the rows [start, stop)."""
        return np.flatnonzero((self.first_row[:-1] < stop) & (start < self.first_row[1:])).tolist()


@dataclass
class Group:
    """Episodes of a row group, as positions in the episode table, and their approximate bytes."""

    episodes: list[int] = field(default_factory=list)
    nbytes: int = 0


@dataclass
class DataFile:
    """A new file."""

    path: str
    schema: pa.Schema
    codec: str
    groups: list[Group] = field(default_factory=list)

    @property
    def episodes(self) -> list[int]:
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def nbytes(self) -> int:
        """Approximate bytes; 1 for an empty file."""
        return 1 + sum(group.nbytes for group in self.groups)


def read_footer(store: Store, path: str) -> Parquet:
    """Reads a file's footer. Raises DatasetError if it is missing or broken."""
    with parquet_errors(store, path), store.open(path) as file:
        parquet = pq.ParquetFile(file)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        end = store.size(path)
        columns = [[group.column(i) for i in range(group.num_columns)] for group in groups]
        start = [min(min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in of) for of in columns]
        size = [sum(c.total_compressed_size for c in of) for of in columns]
        rows = np.array([0, *(group.num_rows for group in groups)], np.int64)
        codec = columns[0][0].compression.lower() if columns and columns[0] else "snappy"
        begin = np.clip(np.array(start, np.int64), 0, end)
        stop = np.clip(begin + np.array(size, np.int64), begin, end)
        return Parquet(path, parquet.schema_arrow, "none" if codec == "uncompressed" else codec, np.cumsum(rows), begin, stop)


def without_pandas(schema: pa.Schema) -> pa.Schema:
    """A schema without the metadata of pandas."""
    return schema.with_metadata({key: value for key, value in (schema.metadata or {}).items() if key != b"pandas"})


def check_columns(store: Store, features: dict[str, Any], videos: list[str], sources: list[Parquet]) -> None:
    """Checks that every feature is a video or a column of every data file, with images and not their paths."""
    for source in sources:
        for key in (key for key, feature in features.items() if feature.get("dtype") == "image" and key in source.schema.names):
            kind = source.schema.field(key).type
            if pa.types.is_string(kind) or (pa.types.is_struct(kind) and kind.get_field_index("bytes") < 0):
                raise _elsewhere(store.where(source.path), key)
        missing = [key for key in features if key not in videos and key not in source.schema.names]
        if missing:
            dtype = str(features[missing[0]].get("dtype"))[:40]
            raise DatasetError(
                f"{store.where(source.path)}: has no column {missing[0]}, a feature of dtype {dtype!r} in meta/info.json. Only "
                "columns and videos can be copied; remove the feature or copy the dataset again"
            )


def _elsewhere(where: str, key: str) -> DatasetError:
    return DatasetError(
        f"{where}: {key}: has images in files of their own, and only those in the rows are copied. Embed them first, for "
        "example with lerobot.datasets.io_utils.embed_images"
    )


def places(table: Episodes) -> Int64:
    """Per episode, its first row in its file, assuming that the file holds its episodes in order and no other rows."""
    lowest = np.full(len(table.data.paths), np.iinfo(np.int64).max)
    np.minimum.at(lowest, table.data.index, table.first_row)
    return table.first_row - lowest[table.data.index]


def plan(table: Episodes, sources: list[Parquet], order: Int64, file_size: int, name: Callable[[int], str]) -> list[DataFile]:
    """Assigns the episodes of the source's table, in this order, to files and row groups.

    `sources` are the footers of `table.data.paths`. A file has at most `file_size` bytes, unless it holds one episode; `name`
    returns the path of the n-th.
    """
    files: list[DataFile] = []
    first = places(table)
    for episode in order.tolist():
        source = sources[table.data.index[episode]]
        size = source.nbytes(int(first[episode]), int(first[episode] + table.length[episode]))
        if not files or files[-1].nbytes + size > file_size or not files[-1].schema.equals(source.schema, check_metadata=True):
            files.append(DataFile(name(len(files)), source.schema, source.codec))
        groups = files[-1].groups
        if not groups or groups[-1].nbytes + size > ROW_GROUP:
            groups.append(Group())
        groups[-1].episodes.append(episode)
        groups[-1].nbytes += size
    return files


class EpisodeRows:
    """Rows of episodes, with all columns. Keeps the row group that was read last. Not thread-safe.

    Args:
        window: where the files are read.
        table: their episode table.
        footers: of the files that are read, by their number in the table.
        episodes: those that will be read, as positions in the table.
    """

    def __init__(self, window: Window, table: Episodes, footers: Mapping[int, Parquet], episodes: Sequence[int]) -> None:
        self._window, self._table, self._footers = window, table, footers
        self._first = places(table)
        self._until: dict[int, int] = {}  # per file, the end of the rows that will be read, assuming that the file is in order
        for episode in episodes:
            number, stop = int(table.data.index[episode]), int(self._first[episode] + table.length[episode])
            self._until[number] = max(self._until.get(number, 0), stop)
        self._number = -1

    def read(self, episode: int) -> pa.Table:
        """The rows of an episode."""
        number = int(self._table.data.index[episode])
        if number != self._number:
            self._number, self._file = number, self._footers[number]
            self._group: tuple[int, pa.Table] | None = None
            self._index: Int64 | None = None
        index, first, length = (int(of[episode]) for of in (self._table.index, self._first, self._table.length))
        path = self._file.path
        with parquet_errors(self._window, path), self._window.open(path) as file:
            parquet = pq.ParquetFile(file, pre_buffer=True)
            table = self._rows(parquet, first, first + length) if first + length <= self._file.first_row[-1] else None
            if table is None or (table["episode_index"].to_numpy() != index).any():
                first = self._search(parquet, index, length)
                table = self._rows(parquet, first, first + length)
        return table

    def _rows(self, parquet: pq.ParquetFile, start: int, stop: int) -> pa.Table:
        parts = []
        for group in self._file.groups(start, stop):
            begin = int(self._file.first_row[group])
            rows = self._read_group(parquet, group)
            parts.append(rows.slice(max(start - begin, 0), stop - max(start, begin)))
        return pa.concat_tables(parts)

    def _read_group(self, parquet: pq.ParquetFile, group: int) -> pa.Table:
        if self._group is None or self._group[0] != group:
            self._group = None
            last = group
            while last + 1 < len(self._file.start) and self._joins(group, last + 1):
                last += 1
            self._window.load(self._file.path, int(self._file.start[group]), int(self._file.stop[last]))
            self._group = group, self._checked(parquet.read_row_group(group, use_threads=False))
        return self._group[1]

    def _checked(self, rows: pa.Table) -> pa.Table:
        """Rows whose images are in them. Raises DatasetError where an image is in a file of its own."""
        for key in rows.column_names:
            kind = rows[key].type
            names = {field.name for field in kind} if pa.types.is_struct(kind) else set()
            if {"bytes", "path"} <= names and pc.struct_field(rows[key], "bytes").null_count:
                raise _elsewhere(self._window.where(self._file.path), key)
        return rows

    def _joins(self, first: int, group: int) -> bool:
        """Whether to fetch a row group together with those from `first` on."""
        file = self._file
        return bool(
            file.first_row[group] < self._until[self._number]
            and file.start[group] == file.stop[group - 1]
            and file.stop[group] - file.start[first] <= WINDOW
        )

    def _search(self, parquet: pq.ParquetFile, index: int, length: int) -> int:
        """The first row of an episode, in a file of any order."""
        if self._index is None:
            self._index = parquet.read(columns=["episode_index"], use_threads=False)["episode_index"].to_numpy()
        rows = np.flatnonzero(self._index == index)
        if len(rows) != length or rows[-1] - rows[0] != length - 1:
            raise DatasetError(
                f"{self._window.where(self._file.path)}: episode {index}: the metadata has {length} contiguous rows, and "
                f"the file holds {len(rows)}; copy the dataset again"
            )
        return int(rows[0])


def write(out: BinaryIO, file: DataFile, read: Callable[[int], pa.Table]) -> dict[int, str]:
    """Writes a file; `read` returns the rows of the episode at a position of the table. Returns a digest per episode."""
    digests: dict[int, str] = {}
    layout = {"write_page_index": True, "write_page_checksum": True}
    with pq.ParquetWriter(out, file.schema, compression=file.codec, **layout) as writer:
        for group in file.groups:
            tables = [read(episode) for episode in group.episodes]
            digests |= {e: RowDigest().add(table).hexdigest() for e, table in zip(group.episodes, tables, strict=True)}
            rows = sum(map(len, tables))
            writer.write_table(pa.concat_tables(tables), row_group_size=-(-rows // max(1, group.nbytes // ROW_GROUP)))
    return digests


def times(table: pa.Table, clock: str, fps: float) -> npt.NDArray[np.float32]:
    """Return the times that locate the frames of rows by a `clock` of `Dataset`, in seconds since their episode began."""
    if clock == "frame_index":
        return (table["frame_index"].to_numpy() / fps).astype(np.float32)
    return table["timestamp"].to_numpy().astype(np.float32)


def with_regular_timestamps(table: pa.Table, fps: float) -> pa.Table:
    """Return rows whose timestamps are frame_index / fps, in the column's own type."""
    place = table.column_names.index("timestamp")
    seconds = pa.array(table["frame_index"].to_numpy() / fps).cast(table.schema.field(place).type)
    return table.set_column(place, table.schema.field(place), seconds)


class RowDigest:
    """A digest of all columns of tables, as if they were one table, independent of chunks, slices, encodings and padding.

    It compares bits, so NaN equals NaN.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    def add(self, table: pa.Table) -> RowDigest:
        """Appends the rows of a table. Returns itself."""
        for name, column in zip(table.column_names, table.columns, strict=True):
            for chunk in column.chunks:
                self._feed(f"{name}:{column.type}", chunk)
        return self

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        whole = hashlib.blake2b(digest_size=16)
        for name, part in sorted(self._parts.items()):
            whole.update(name.encode(errors="surrogatepass") + b"\0" + part.digest())
        return whole.hexdigest()

    def _put(self, name: str, data: Any) -> None:
        if name not in self._parts:
            self._parts[name] = hashlib.blake2b(digest_size=16)
        self._parts[name].update(data)

    def _feed(self, name: str, array: pa.Array) -> None:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        kind = array.type
        self._put(f"{name} valid", array.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8))
        if pa.types.is_struct(kind):
            for i, part in enumerate(array.flatten()):
                self._feed(f"{name}.{i}", part)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            self._put(f"{name} length", _whole(pc.list_value_length(array)))
            self._feed(f"{name}[]", array.flatten())
        elif (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not array.null_count:
            self._put(name, np.ascontiguousarray(array.to_numpy(zero_copy_only=False)))
        elif kind in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string()):
            self._put(f"{name} length", _whole(pc.binary_length(array)))
            for value in array.cast(pa.large_binary()).to_pylist():
                self._put(name, value or b"")
        else:
            for value in array.to_pylist():
                self._put(name, f"{value!r}\0".encode(errors="surrogatepass"))


def _whole(lengths: pa.Array) -> Any:
    return pc.fill_null(lengths, 0).cast(pa.int64()).to_numpy(zero_copy_only=False)

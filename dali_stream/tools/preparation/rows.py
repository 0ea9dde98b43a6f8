"""Parquet files: reading episodes with all columns, and writing them in row groups of whole episodes.

Metadata, columns and compression stay those of the source.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dali_stream.errors import DatasetError
from dali_stream.lerobot.metadata import parquet_errors
from dali_stream.storage import Store
from dali_stream.tools.preparation.place import content_hash
from dali_stream.tools.preparation.source import Window

ROW_GROUP = 32 << 20  # bytes of rows in a row group
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

    @property
    def row_bytes(self) -> float:
        """Average encoded bytes of a row."""
        return float((self.stop - self.start).sum()) / max(int(self.first_row[-1]), 1)

    def groups(self, start: int, stop: int) -> list[int]:
        """The row groups of the rows [start, stop)."""
        return np.flatnonzero((self.first_row[:-1] < stop) & (start < self.first_row[1:])).tolist()


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


def check_columns(store: Store, features: Mapping[str, Any], source: Parquet) -> None:
    """Check that every feature but videos is a column of a data file, with images and not their paths. Raises DatasetError."""
    for key, feature in features.items():
        if feature.get("dtype") == "video":
            continue
        if key not in source.schema.names:
            raise DatasetError(
                f"{store.where(source.path)}: has no column {key}, a feature of dtype {str(feature.get('dtype'))[:40]!r} in "
                "meta/info.json. Only columns and videos can be copied; remove the feature or copy the dataset again"
            )
        kind = source.schema.field(key).type
        if feature.get("dtype") == "image" and (
            pa.types.is_string(kind) or (pa.types.is_struct(kind) and kind.get_field_index("bytes") < 0)
        ):
            raise _elsewhere(store.where(source.path), key)


def _elsewhere(where: str, key: str) -> DatasetError:
    return DatasetError(
        f"{where}: {key}: has images in files of their own, and only those in the rows are copied. Embed them first, for "
        "example with lerobot.datasets.io_utils.embed_images"
    )


class EpisodeRows:
    """Reader of the rows of episodes. Keeps the row group that was read last. Not thread-safe.

    Args:
        window: Store of the files.
        footers: Returns the footer of a file.
        until: Per file, the end of the rows that will be read, if the file is in order.
        columns: Columns to read. Default: all.
    """

    def __init__(
        self, window: Window, footers: Callable[[str], Parquet], until: Mapping[str, int], columns: list[str] | None = None
    ) -> None:
        self._window, self._footers, self._until, self._columns = window, footers, until, columns
        self._path = ""

    def read(self, path: str, index: int, first: int, length: int) -> pa.Table:
        """Return the rows of an episode.

        Args:
            path: Its file.
            index: Its `episode_index`.
            first: Its first row in the file, if the file is in order.
            length: Number of its rows.
        """
        if path != self._path:
            self._path, self._file = path, self._footers(path)
            self._group: tuple[int, pa.Table] | None = None
            self._index: Int64 | None = None
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
            if self._columns is None:
                self._window.load(self._path, int(self._file.start[group]), int(self._file.stop[last]))
            self._group = group, self._checked(parquet.read_row_group(group, self._columns, use_threads=False))
        return self._group[1]

    def _checked(self, rows: pa.Table) -> pa.Table:
        """Rows whose images are in them. Raises DatasetError where an image is in a file of its own."""
        for key in rows.column_names:
            kind = rows[key].type
            names = {field.name for field in kind} if pa.types.is_struct(kind) else set()
            if {"bytes", "path"} <= names and pc.struct_field(rows[key], "bytes").null_count:
                raise _elsewhere(self._window.where(self._path), key)
        return rows

    def _joins(self, first: int, group: int) -> bool:
        """Whether to fetch a row group together with those from `first` on."""
        file = self._file
        return bool(
            file.first_row[group] < self._until[self._path]
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
                f"{self._window.where(self._path)}: episode {index}: the metadata has {length} contiguous rows, and "
                f"the file holds {len(rows)}; copy the dataset again"
            )
        return int(rows[0])


def write(path: Path, schema: pa.Schema, codec: str, tables: Iterable[pa.Table], rows_per_group: int) -> list[str]:
    """Write episodes to a file. A row group has at most `rows_per_group` rows of whole episodes, or a part of a longer one.

    Returns:
        Digest of each row group, see `digest`.
    """
    digests: list[str] = []
    with pq.ParquetWriter(path, schema, compression=codec, write_page_index=True, write_page_checksum=True) as writer:
        group: list[pa.Table] = []

        def flush() -> None:
            whole = pa.concat_tables(group)
            size = -(-len(whole) // -(-len(whole) // rows_per_group))
            for start in range(0, len(whole), size):
                writer.write_table(whole.slice(start, size), row_group_size=size)
                digests.append(digest(whole.slice(start, size)))
            group.clear()

        for table in tables:
            if group and sum(map(len, group)) + len(table) > rows_per_group:
                flush()
            group.append(table)
        flush()
    return digests


def digest(table: pa.Table) -> str:
    """Return a digest of all values of a table, bit for bit, whatever its chunks: that of its simplest Parquet file."""
    out = io.BytesIO()
    plain = table.combine_chunks().replace_schema_metadata()
    pq.write_table(plain, out, row_group_size=max(len(table), 1), compression="none", use_dictionary=False, store_schema=False)
    return content_hash(out.getbuffer())


def without(schema: pa.Schema, columns: Collection[str], is_v2: bool) -> pa.Schema:
    """Return a schema without columns, and for v2.x without the metadata of pandas, whose index differs from file to file."""
    described = dict(schema.metadata or {})
    if is_v2:
        described.pop(b"pandas", None)
    for name in columns:
        schema = schema.remove(schema.get_field_index(name))
    if columns and b"huggingface" in described:
        text = json.loads(described[b"huggingface"])
        for name in columns:
            text.get("info", {}).get("features", {}).pop(name, None)
        described[b"huggingface"] = json.dumps(text).encode()
    return schema.with_metadata(described or None)


def replaced(table: pa.Table, columns: Mapping[str, npt.NDArray[Any]]) -> pa.Table:
    """Return rows with other values in some columns, of the columns' own types."""
    for name, values in columns.items():
        place = table.column_names.index(name)
        field = table.schema.field(place)
        table = table.set_column(place, field, pa.array(values).cast(field.type))
    return table

"""Parquet files: reading episodes with all columns, and writing them in row groups of whole episodes.

The metadata, columns and compression of the source are kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dali_stream.checks.arrays import Int64
from dali_stream.errors import DatasetError
from dali_stream.lerobot.arrow import is_list
from dali_stream.lerobot.info import TABULAR
from dali_stream.lerobot.parquet import parquet_errors
from dali_stream.lerobot.row_file import RowSearch, data_files
from dali_stream.lerobot.rows import row_order
from dali_stream.storage import Store
from dali_stream.tools.preparation.place import Json
from dali_stream.tools.work import grouped

ROW_GROUP = 32 << 20  # default size of a row group, in bytes
AT_ONCE = 16 << 20  # maximum encoded size of row groups that are read together, in bytes; a single one may be larger


class Footer(NamedTuple):
    """Footer of a Parquet file.

    Attributes:
        path: Path of the file.
        schema: Arrow schema of the file.
        codec: Compression of the columns.
        first_row: First row of each row group, followed by the number of rows, shape (groups + 1,).
        size: Encoded size of each row group in bytes, shape (groups,).
    """

    path: str
    schema: pa.Schema
    codec: str
    first_row: Int64
    size: Int64

    @property
    def row_bytes(self) -> float:
        """Mean encoded size of a row, in bytes."""
        return float(self.size.sum()) / max(int(self.first_row[-1]), 1)


def read_footer(store: Store, path: str) -> Footer:
    """Read the footer of a file. Raises DatasetError if it is missing or broken."""
    with parquet_errors(store, path), store.open(path) as file:
        parquet = pq.ParquetFile(file)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        columns = [[group.column(i) for i in range(group.num_columns)] for group in groups]
        size = np.array([sum(max(column.total_compressed_size, 0) for column in group) for group in columns], np.int64)
        codec = columns[0][0].compression.lower() if columns and columns[0] else "snappy"
        first_row = np.cumsum([0, *(group.num_rows for group in groups)])
        return Footer(path, parquet.schema_arrow, "none" if codec == "uncompressed" else codec, first_row, size)


def check_columns(store: Store, features: Mapping[str, Any], footer: Footer) -> None:
    """Check that a data file has a column for every feature except videos and `frame_index`, and the bytes of its images.

    Raises:
        DatasetError: If a column is missing, or has paths of images.
    """
    for key, feature in features.items():
        if feature.get("dtype") == "video" or key == "frame_index":
            continue
        if key not in footer.schema.names:
            raise DatasetError(
                f"{store.where(footer.path)}: has no column {key}, a feature of dtype {str(feature.get('dtype'))[:40]!r} in "
                "meta/info.json. Remove the feature or copy the dataset again, since only columns and videos can be copied"
            )
        kind = footer.schema.field(key).type
        if feature.get("dtype") == "image" and (
            pa.types.is_string(kind) or (pa.types.is_struct(kind) and kind.get_field_index("bytes") < 0)
        ):
            raise _elsewhere(store.where(footer.path), key)


def _elsewhere(where: str, key: str) -> DatasetError:
    return DatasetError(
        f"{where}: {key}: has images in files of their own, and only those in the rows are copied. Embed them first, for "
        "example with lerobot.datasets.io_utils.embed_images"
    )


class EpisodeRows:
    """Reader of the rows of episodes, in the order and with the types of a Loader. It keeps the row groups that were read last,
    and is not thread-safe.

    Args:
        store: Storage of the files.
        footers: Function that returns the footer of a file.
        episodes: Episodes that will be read. See `plan`. No row group after the last one of a file is read ahead.
        columns: Columns to read. See `new_schema`.
        locates: Column that locates frames. See `row_order`.
        is_v2: Whether the version is v2.0 or v2.1, in which an episode is in its own file. Otherwise, rows that are not in the
            file of the plan are searched in the others.
    """

    def __init__(
        self,
        store: Store,
        footers: Callable[[str], Footer],
        episodes: Sequence[Json],
        columns: Mapping[str, tuple[str, int]],
        locates: str,
        is_v2: bool,
    ) -> None:
        self._store, self._footers, self._columns, self._is_v2, self._path = store, footers, columns, is_v2, ""
        self._locates = locates
        # The episodes of a file are in the order of their rows, so the end of the last one remains.
        self._until: dict[str, int] = {episode["data"]: episode["place"] + episode["length"] for episode in episodes}
        self._named = list(self._until)
        self._search: RowSearch | None = None

    def read(self, episode: Json) -> pa.Table:
        """Return the rows of an episode. If they are not where the plan expects them, all files are searched.

        Raises:
            DatasetError: If a file is broken, or if no file has these rows.
        """
        table = self._find(episode)
        clocks = {name: table[name].to_numpy() for name in ("timestamp", "frame_index") if name in table.column_names}
        if len(clocks) == 2 and all(values.dtype.kind in "iuf" for values in clocks.values()):
            order = row_order(**clocks, locates=self._locates)
            table = table if order is None else table.take(order)
        return table

    def _find(self, episode: Json) -> pa.Table:
        path, index, first, length = (episode[name] for name in ("data", "old", "place", "length"))
        problem, count = None, 0
        for paths in self._candidates(path, index):
            try:
                table = self._expected(path, index, first, length) if paths == [path] else None
                if table is not None:
                    return table
                parts = [rows for each in paths if len(rows := self._found(each, index))]
            except DatasetError as error:
                if paths != [path] or self._is_v2:
                    raise
                problem = error
                continue
            count = sum(map(len, parts))
            if count == length:
                return pa.concat_tables(parts)
        if problem is not None and not count:
            raise problem
        raise DatasetError(
            f"{self._store.where(path)}: episode {index} must have the {length} rows of the metadata, got {count}. Copy the "
            "dataset again"
        )

    def footer(self, episode: Json) -> Footer:
        """Return the footer of the first file that contains an episode. Raises DatasetError if it is missing or broken."""
        try:
            return self._footers(episode["data"])
        except DatasetError:
            others = [] if self._is_v2 else self._file_search().in_order(episode["old"], episode["data"])
            if not others:
                raise
        return self._footers(others[0])

    def _candidates(self, path: str, index: int) -> Iterator[list[str]]:
        """Yield lists of files that may contain the rows of an episode: the file of the plan, and those of a search."""
        if self._search is None:
            yield [path]
        if self._is_v2:
            return
        search = self._file_search()
        yield search.in_order(index, path)
        yield [path] if self._store.remote else search.anywhere(index)

    def _file_search(self) -> RowSearch:
        if self._search is None:
            self._search = RowSearch(data_files(self._store, self._named), self._episodes)
        return self._search

    def _expected(self, path: str, episode: int, first: int, length: int) -> pa.Table | None:
        """Return `length` rows of a file if they, and none next to them, are rows of an episode. Otherwise, return None."""
        with self._opened(path) as parquet:
            stop, count = first + length, int(self._footer.first_row[-1])
            if stop > count:
                return None
            table = self._rows(parquet, first, stop)
            beside = [self._episode_of(parquet, row) for row in (first - 1, stop) if 0 <= row < count]
            return table if (table["episode_index"].to_numpy() == episode).all() and episode not in beside else None

    def _episode_of(self, parquet: pq.ParquetFile, row: int) -> int | None:
        """Return the episode index of a row, or None if it is broken. Only this column is read if its row group is not kept."""
        group = int(np.searchsorted(self._footer.first_row, row, side="right")) - 1
        rows = self._groups.get(group)
        if rows is None:
            try:
                rows = parquet.read_row_group(group, ["episode_index"], use_threads=False)
            except (OSError, pa.ArrowException):
                return None
        index: int | None = rows["episode_index"][row - int(self._footer.first_row[group])].as_py()
        return index

    def _episodes(self, path: str) -> tuple[int, int]:
        """Return the lowest and the highest episode index in a file. They are (0, -1) for a file without rows."""
        with self._opened(path) as parquet:
            index = self._index(parquet)
            return (int(index.min()), int(index.max())) if len(index) else (0, -1)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[pq.ParquetFile]:
        """Open a file. If it is not the last one again, the row groups of the last one are dropped."""
        with parquet_errors(self._store, path):
            if path != self._path:
                self._path, self._groups, self._indices = "", dict[int, pa.Table](), None
                self._footer = self._footers(path)
                self._path = path
            with self._store.open(path) as file:
                # `pre_buffer` fetches adjacent row groups with one request.
                yield pq.ParquetFile(file, pre_buffer=True, page_checksum_verification=True)

    def _found(self, path: str, index: int) -> pa.Table:
        """Return the rows of an episode in a file whose episodes may be in any order."""
        with self._opened(path) as parquet:
            rows = np.flatnonzero(self._index(parquet) == index)
            return self._rows(parquet, int(rows[0]), int(rows[-1]) + 1).take(rows - rows[0]) if len(rows) else pa.table({})

    def _index(self, parquet: pq.ParquetFile) -> Int64:
        """Return the episode index of each row of the file that is open."""
        index = self._indices
        if index is None:
            index = self._indices = parquet.read(columns=["episode_index"], use_threads=False)["episode_index"].to_numpy()
        return index

    def _rows(self, parquet: pq.ParquetFile, start: int, stop: int) -> pa.Table:
        first_row = self._footer.first_row
        groups: list[int] = np.flatnonzero((first_row[:-1] < stop) & (start < first_row[1:])).tolist()
        missing = next((group for group in groups if group not in self._groups), None)
        if missing is not None:
            # Read the missing row groups. Also read later row groups, up to AT_ONCE bytes in total, for the next episodes.
            last = groups[-1] + 1
            size, until = self._footer.size, self._until.get(self._path, self._footer.first_row[-1])
            while last < len(size) and first_row[last] < until and size[missing : last + 1].sum() <= AT_ONCE:
                last += 1
            try:
                table = self._read(parquet, range(missing, last))
            except (DatasetError, OSError, pa.ArrowException):  # a later row group may be broken
                last = groups[-1] + 1
                table = self._read(parquet, range(missing, last))
            # Groups that are no longer needed are dropped, except for the one before the episode. See `_episode_of`.
            self._groups = {group: kept for group, kept in self._groups.items() if groups[0] - 1 <= group < missing}
            for group in range(missing, last):
                first, end = first_row[group : group + 2] - first_row[missing]
                self._groups[group] = table.slice(first, end - first)
        rows = pa.concat_tables([self._groups[group] for group in groups])
        return rows.slice(start - first_row[groups[0]], stop - start)

    def _read(self, parquet: pq.ParquetFile, groups: range) -> pa.Table:
        """Return the rows of some row groups. Raises DatasetError if an image is stored in a separate file."""
        wanted = [name for name in self._footer.schema.names if name in self._columns]
        rows = parquet.read_row_groups(groups, wanted, use_threads=False)
        for place, field in enumerate(new_schema(rows.schema, self._columns)):
            column = rows[field.name]
            if column.type != field.type:
                with contextlib.suppress(pa.ArrowException):  # the check of the values has a better message
                    if not is_list(field.type):
                        column = _single(column)
                    rows = rows.set_column(place, field, column.cast(field.type))
        for key in rows.column_names:
            kind = rows[key].type
            names = {field.name for field in kind} if pa.types.is_struct(kind) else set()
            if {"bytes", "path"} <= names and pc.struct_field(rows[key], "bytes").null_count:
                raise _elsewhere(self._store.where(self._path), key)
        return rows


def write(path: Path, schema: pa.Schema, codec: str, tables: Iterable[pa.Table], rows_per_group: int) -> None:
    """Write episodes to a file.

    Args:
        path: Path of the new file.
        schema: Arrow schema of the file.
        codec: Compression of the columns.
        tables: Rows of each episode.
        rows_per_group: Maximum number of rows of a row group. An episode that is longer is split evenly over row groups.
    """
    with pq.ParquetWriter(path, schema, compression=codec, write_page_index=True, write_page_checksum=True) as writer:
        for group in grouped(tables, rows_per_group, len):
            whole = pa.concat_tables(group)
            size = -(-len(whole) // -(-len(whole) // rows_per_group))
            for start in range(0, len(whole), size):
                writer.write_table(whole.slice(start, size), row_group_size=size)


def is_as_written(path: Path, schema: pa.Schema, count: int) -> bool:
    """Return whether a file has the schema and number of rows that were written, and every page has its checksum."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group, use_threads=False)
            return bool(file.metadata.num_rows == count and file.schema_arrow.equals(schema, check_metadata=True))
    except (OSError, pa.ArrowException):
        return False


def new_schema(schema: pa.Schema, columns: Mapping[str, tuple[str, int]], is_v2: bool = False) -> pa.Schema:
    """Return the schema of new files, which have only the columns of features.

    Integers, fractions and texts that are stored as another type, such as decimals or times, get the type of their feature.
    Lists of one number become numbers if the feature has the shape (1,). Other columns keep their type, since LeRobot converts
    them.

    Args:
        schema: Schema of a file of the source.
        columns: {column: (dtype of its feature, number of nested lists)}.
        is_v2: Whether the version is v2.0 or v2.1. The metadata of pandas is then removed, since it describes an index that
            differs from file to file. Default: False.
    """
    others = [name for name in schema.names if name not in columns]
    if is_v2 or others:
        described = {key: value for key, value in (schema.metadata or {}).items() if key != b"pandas"}
        schema = schema.with_metadata(described or None)
    for name in others:
        schema = _with_feature(schema.remove(schema.get_field_index(name)), name, None)
    fields = [field.with_type(_regular_type(field.type, *columns[field.name])) for field in schema]
    described = dict(schema.metadata or {})
    if fields != list(schema):  # the library `datasets` infers its features from the types if the metadata lacks them
        described.pop(b"huggingface", None)
    return pa.schema(fields, described or None)


def _single(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the numbers in lists of one number each. Other columns are returned unchanged."""
    while is_list(column.type) and pc.all(pc.equal(pc.list_value_length(column), 1), skip_nulls=False).as_py():
        column = pc.list_flatten(column)
    return column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _regular_type(kind: pa.DataType, dtype: str, depth: int) -> pa.DataType:
    if dtype not in (*TABULAR, "string") or isinstance(kind, pa.BaseExtensionType):
        return kind
    if is_list(kind):
        item = _regular_type(kind.value_type, dtype, max(depth - 1, 0))
        if depth == 0:
            return item
        value = kind.value_field.with_type(item)
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(value, kind.list_size)
        return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)
    is_regular = _is_text if dtype == "string" else _is_number if dtype.startswith("float") else pa.types.is_integer
    return kind if dtype == "bool" or is_regular(kind) else pa.type_for_alias(dtype)


def with_frame_index(schema: pa.Schema) -> pa.Schema:
    """Return a schema that has the column `frame_index`."""
    if "frame_index" in schema.names:
        return schema
    schema = schema.append(pa.field("frame_index", pa.int64()))
    return _with_feature(schema, "frame_index", {"dtype": "int64", "_type": "Value"})


def _with_feature(schema: pa.Schema, name: str, feature: Json | None) -> pa.Schema:
    """Return a schema whose metadata of the library `datasets` describe a column, or lack it if `feature` is None."""
    described = dict(schema.metadata or {})
    if b"huggingface" in described:
        try:
            text = json.loads(described[b"huggingface"])
            features = text.get("info", {}).get("features", {})
            features.pop(name, None)
            if feature is not None:
                features[name] = feature
            described[b"huggingface"] = json.dumps(text).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):  # only this library needs them
            del described[b"huggingface"]
    return schema.with_metadata(described or None)


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the types and the metadata of a schema.

    Columns that have the type already are not cast, since pyarrow 26 cannot cast a slice of lists whose structs have fields of
    type null, as in language columns of LeRobot.
    """
    columns = (table[field.name] for field in schema)
    values = [each if each.type == field.type else each.cast(field.type) for each, field in zip(columns, schema, strict=True)]
    return pa.table(values, schema)


def replaced(table: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Return a table with new values in some columns. Columns that it lacks are appended.

    Existing columns keep their type, except for integers that would become fractions.
    """
    for name, values in columns.items():
        if name in table.column_names:
            place = table.column_names.index(name)
            field = table.schema.field(place)
            if pa.types.is_integer(field.type) and pa.types.is_floating(values.type):
                field = field.with_type(values.type)
            table = table.set_column(place, field, values.cast(field.type))
        else:
            table = table.append_column(name, values)
    return table

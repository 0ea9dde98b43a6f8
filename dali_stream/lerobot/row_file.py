"""Parquet files of rows: the row groups of an episode in a file, and the search for the file that has the episode.

LeRobot finds rows by their `episode_index` in all data files. Its converter and its merge tool have written metadata that names
the next file, a file that does not exist, or only the last file of an episode that continues from one file into the next.
`RowSearch` finds such rows.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.errors import DatasetError
from dali_stream.lerobot.arrow import to_numpy
from dali_stream.lerobot.dataset_files import DatasetFiles
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.file_names import parquet_files
from dali_stream.lerobot.info import FRAME_INDEX
from dali_stream.lerobot.parquet_footer import TAIL, RowGroups, as_file, read_footer
from dali_stream.storage import Store
from dali_stream.storage.store import SMALL, RangeFile, checked
from dali_stream.system.cached import cached_property

_GAP = 8 << 10  # maximum gap between two columns that are read in one request, in bytes
_LARGE = 32 << 20  # above this size of the columns in bytes, pyarrow plans the reads and sends several requests at a time
_FEW_ROWS = 1 << 20  # number of rows that is plausible for a row group of any dataset
_FAR = 1 << 20  # maximum gap if only episode indices are read, so that a file with many row groups takes few requests
_ANNOTATIONS = 1024  # number of annotations that a row of a language column may have, on average
_ANNOTATION_BYTES = 40  # memory of a value of an annotation, such as its text, in bytes: 35 were measured
_FEW_VALUES = 1 << 20  # number of values that a column may have in any row group
_VALUE_BYTES = 16  # maximum size of a number in a file, in bytes, with its levels
_PLAUSIBLE_RATIO = 8  # size of rows in memory, relative to the size of their file, that needs no explanation
_PLAUSIBLE_BYTES = 64 << 20  # size of rows in memory that needs no explanation
_NOWHERE = 1 << 61  # first row of a file that the metadata does not name
_EPISODE, EPISODE_INDEX = "episode_index", Feature(dtype="int64", shape=[1])
_AT_ONCE = 64  # number of row groups whose episode indices are read together


class RowFile:
    """Data file of a dataset. The constructor reads its footer.

    Args:
        dataset: Dataset that contains the file.
        store: Store to read from.
        path: Path of the file.
        number: Number of the file among the data files that the metadata names, or -1 if it is none of them.
        features: Features to read, by key. `frame_index` is not read if the file lacks it.

    Attributes:
        path: See above.
        groups: Row groups of the file.
        size: Size of the file in bytes.
        sizes: Approximate memory of each row group in bytes, shape (G,). It is larger than `groups.sizes` if many values are
            equal, since the file then stores them once.

    Raises:
        DatasetError: If the file lacks a column, or if a row group has a negative or implausible number of rows.
    """

    def __init__(self, dataset: DatasetFiles, store: Store, path: str, number: int, features: Mapping[str, Feature]) -> None:
        table = dataset.table
        self._store, self.path = store, path
        opened = dataset.opened.pop(number, None)
        metadata, footer, self._whole = opened or _open(dataset, store, path, number)
        self.groups = RowGroups(footer, metadata)
        parquet = pq.ParquetFile(pa.BufferReader(b""), metadata=self.groups.sample)
        self.size = store.size(self.path)
        self._gap = 0 if dataset.skips_images else _GAP
        names = parquet.schema_arrow.names
        # Without the column `frame_index`, it is the number of the row within its episode.
        absent = {FRAME_INDEX}.difference(names)
        self._columns = [key for key in dict.fromkeys([*features, _EPISODE]) if key not in absent]
        missing = [key for key in self._columns if key not in names]
        if missing:
            raise DatasetError(
                f"Missing column {missing[0]} in {store.where(self.path)}. The dataset's meta/info.json has it as a feature"
            )
        self._has_bounds = pa.types.is_integer(parquet.schema_arrow.field(_EPISODE).type)  # and not decimals, for instance
        self._leaves = {key: leaves for key, leaves in _leaves(parquet).items() if key in self._columns}
        self._values = {key: _values(feature) for key, feature in features.items()} | {_EPISODE: 1}
        self._objects = {key for key, feature in features.items() if feature.is_image or feature.is_text}
        promised, row_bytes = int(table.length.sum()), sum(feature.row_bytes for feature in features.values())
        # A file may contain rows of episodes that were removed from the metadata, but not a thousand times its own size.
        others = max(_PLAUSIBLE_RATIO * self.size, _PLAUSIBLE_BYTES) // max(row_bytes, 1)
        most = max(promised, min(others, _FEW_ROWS))
        rows = self.groups.rows
        if (wrong := (rows < 0) | (rows > most)).any():
            raise DatasetError(
                f"Invalid row group in {store.where(self.path)}: must have at most {most} rows, since the dataset has "
                f"{promised} frames, got {rows[wrong][0]}"
            )
        self.sizes = np.maximum(self.groups.sizes, rows * row_bytes)
        if languages := [key for key, feature in features.items() if feature.is_language]:
            # Their values are repeated in each row, which the encoding hides.
            whole, numbers = self.groups.metadata(range(len(rows)))
            leaves = [leaf for key in languages for leaf in self._leaves.get(key, ())]
            groups = [whole.row_group(number) for number in numbers]
            values = np.array([sum(group.column(leaf).num_values for leaf in leaves) for group in groups], np.int64)
            self.sizes = self.sizes + _ANNOTATION_BYTES * values
        first_rows = table.first_row[table.data.rows(number)]
        self._stop = int(first_rows.min(initial=_NOWHERE)) + np.cumsum(rows)

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
        """Return the row groups that may contain rows of an episode, by its index, for files with any order of episodes."""
        lowest, highest = self._episodes.T
        return np.flatnonzero((lowest <= episode) & (episode <= highest)).tolist()

    def episodes(self) -> tuple[int, int]:
        """Return the lowest and the highest episode index in the file. They are (0, -1) for a file without rows."""
        lowest, highest = self._episodes[self.groups.rows > 0].T
        return (int(lowest.min()), int(highest.max())) if len(lowest) else (0, -1)

    def read_episode(self, episode: int, groups: Sequence[int], size: int) -> tuple[pa.Table, int]:
        """Return the rows of an episode only, and the number of bytes that were read for them.

        Args:
            episode: Index of the episode.
            groups: Row groups that may contain its rows.
            size: Approximate number of bytes that are decoded at a time.
        """
        parquet, numbers, file = self._fetched(groups, self._columns, self._gap)
        rows = max(size * int(self.groups.rows[groups].sum()) // max(int(self.sizes[groups].sum()), 1), 1)
        is_wanted = self._index(groups) == episode
        parts, at = [], 0
        for batch in parquet.iter_batches(rows, numbers, self._columns, use_threads=False):
            parts.append(batch.filter(pa.array(is_wanted[at : at + len(batch)])))
            at += len(batch)
        return pa.Table.from_batches(parts), file.bytes_read

    def read(self, groups: Sequence[int]) -> tuple[pa.Table, int]:
        """Return the columns of some row groups, and the number of bytes that were read for them."""
        # The bytes that `_open` has read serve one call only, since footers are cached and whole files must not be.
        whole, self._whole = self._whole, b""
        parquet, numbers, file = self._fetched(groups, self._columns, self._gap, whole)
        return parquet.read_row_groups(numbers, columns=self._columns, use_threads=False), len(whole) or file.bytes_read

    @cached_property
    def _episodes(self) -> npt.NDArray[np.int64]:
        """Lowest and highest episode index of each row group, shape (G, 2). They are (0, -1) for an empty one.

        The footer contains them. If it has no statistics, the episode indices are read.
        """
        bounds = self.groups.bounds(_EPISODE) if self._has_bounds else None
        if bounds is not None:
            return bounds
        count = self.groups.rows
        bounds = np.tile(np.array([0, -1]), (len(count), 1))
        for first in range(0, len(count), _AT_ONCE):
            groups = [group for group in range(first, min(first + _AT_ONCE, len(count))) if count[group]]
            if groups:
                index, starts = self._index(groups), np.cumsum(count[groups]) - count[groups]
                bounds[groups] = np.stack([np.minimum.reduceat(index, starts), np.maximum.reduceat(index, starts)], 1)
        return bounds

    def _index(self, groups: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the episode index of each row of some row groups."""
        parquet, numbers, _ = self._fetched(groups, [_EPISODE], _FAR if self._gap and self._store.remote else self._gap)
        column = parquet.read_row_groups(numbers, columns=[_EPISODE], use_threads=False)[_EPISODE]
        return to_numpy(column, EPISODE_INDEX, f"{self._store.where(self.path)}: {_EPISODE}")

    def _fetched(
        self, groups: Sequence[int], columns: Sequence[str], gap: int, whole: bytes = b""
    ) -> tuple[pq.ParquetFile, Sequence[int], RangeFile]:
        """Fetch some columns of some row groups.

        Args:
            groups: Row groups to read.
            columns: Columns to read.
            gap: Maximum gap between two columns that are read in one request, in bytes.
            whole: Bytes of the whole file, if they were read before. Default: none.

        Returns:
            Open file, the numbers of the row groups in its metadata, and the file object from which bytes were read. If the
            columns are large, they are read only when pyarrow needs them.

        Raises:
            DatasetError: See `_ranges`.
        """
        metadata, numbers = self.groups.metadata(groups)
        ranges = self._ranges(metadata, numbers, columns, gap)
        file = self._store.open(self.path, self.size)
        for start, stop in ranges if not whole else ():
            file.hold(start, stop)
        # With `pre_buffer`, pyarrow sends several requests at a time. It then also reads small gaps between columns.
        pre_buffer = not ranges and self._gap > 0
        source = pa.BufferReader(whole) if whole else file
        parquet = pq.ParquetFile(source, metadata=metadata, pre_buffer=pre_buffer, page_checksum_verification=True)
        return parquet, numbers, file

    def _ranges(
        self, metadata: pq.FileMetaData, groups: Sequence[int], columns: Sequence[str], gap: int
    ) -> list[tuple[int, int]]:
        """Check the number of values of some columns, and return their byte ranges (start, stop).

        Ranges with at most `gap` bytes between them are merged. The list is empty if the ranges are large or invalid. Pyarrow
        then plans the reads.

        Raises:
            DatasetError: If a column has far more values than its rows, since a few bytes may encode millions of values. A few
                more are allowed, since a single value of another shape is an error of its own episode only.
        """
        ranges: list[tuple[int, int]] = []
        is_valid = True
        leaves = sorted((leaf, column) for column in columns for leaf in self._leaves.get(column, ()))
        for group in map(metadata.row_group, groups):
            rows = group.num_rows
            for leaf, column in leaves:
                chunk, promised = group.column(leaf), rows * self._values[column]
                most, size = max(2 * promised, _FEW_VALUES), chunk.total_uncompressed_size
                if chunk.num_values > most or (size > _VALUE_BYTES * most and column not in self._objects):
                    raise DatasetError(
                        f"Invalid column {column} in {self._store.where(self.path)}: must have {promised} values in {rows} "
                        f"rows, as meta/info.json says, got {chunk.num_values} in {size} bytes. Copy or record the dataset "
                        "again"
                    )
                dictionary = chunk.dictionary_page_offset or chunk.data_page_offset
                start = min(dictionary, chunk.data_page_offset)
                stop = start + chunk.total_compressed_size
                is_valid &= 0 < start <= stop <= self.size
                if ranges and 0 <= start - ranges[-1][1] <= gap:
                    start = ranges.pop()[0]
                ranges.append((start, stop))
        return ranges if is_valid and sum(stop - start for start, stop in ranges) <= _LARGE else []


def _values(feature: Feature) -> int:
    """Return how many values of a feature a Parquet column may have for each row."""
    return 1 if feature.is_image else _ANNOTATIONS if feature.is_language else math.prod(feature.shape)


def read_schema(dataset: DatasetFiles, store: Store, number: int) -> pa.Schema:
    """Return the schema of a data file, by its number among the data files. It sends the same requests as `RowFile` does."""
    metadata, footer, _ = _open(dataset, store, dataset.table.data.paths[number], number)
    return (metadata or pq.read_metadata(as_file(footer))).schema.to_arrow_schema()


def read_column_names(dataset: DatasetFiles, store: Store, number: int) -> list[str]:
    """Return the names of the columns of a data file. The first `RowFile` of this file does not read its footer again."""
    path = dataset.table.data.paths[number]
    metadata, footer, _ = dataset.opened[number] = _open(dataset, store, path, number)
    names: list[str] = RowGroups(footer, metadata).sample.schema.to_arrow_schema().names
    return names


def _open(dataset: DatasetFiles, store: Store, path: str, number: int) -> tuple[pq.FileMetaData | None, bytes, bytes]:
    """Read the footer of a data file.

    A remote file of one short episode, as in datasets of version 2.x, is read whole, with one request instead of three.

    Returns:
        Parsed metadata, the footer, and the bytes of the whole file. Each may be missing (None or b""), but either the metadata
        or the footer is present.
    """
    rows = dataset.table.length[dataset.table.data.rows(number)]
    small = store.remote and len(rows) == 1 and rows[0] * dataset.row_bytes <= SMALL and not dataset.skips_images
    whole = store.read(path, 0, SMALL) if small else b""
    size = store.size(path)  # after the read above, whose response contains the size of a remote file
    if whole and len(whole) == size:
        return pq.read_metadata(pa.BufferReader(whole)), b"", whole
    file = store.open(path, size)
    footer = read_footer(file, 8 if dataset.skips_images else TAIL)
    if footer is None:
        return pq.read_metadata(file), b"", b""  # pyarrow raises the error with the reason
    return None, footer, b""


def _leaves(parquet: pq.ParquetFile) -> dict[str, range]:
    """Return the numbers of the Parquet columns that store each Arrow column. Empty if the two schemas do not match."""
    leaves: dict[str, range] = {}
    first = 0  # not the number of the field, since a struct is stored as several Parquet columns
    for field in parquet.schema_arrow:
        leaves[field.name] = range(first, first + _count_leaves(field.type))
        first = leaves[field.name].stop
    return leaves if first == parquet.metadata.num_columns else {}


def _count_leaves(kind: pa.DataType) -> int:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if pa.types.is_struct(kind):
        return sum(_count_leaves(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _count_leaves(kind.key_type) + _count_leaves(kind.item_type)
    return _count_leaves(kind.value_type) if pa.types.is_nested(kind) else 1


class RowSearch:
    """Search for data files by the episodes that they contain. Safe to use from several threads.

    Even if the metadata names wrong files, the episodes usually increase from file to file. A bisection then needs the footers
    of a few files. The range of episodes of each file is kept.

    Args:
        paths: Paths of all data files.
        episodes: Function that returns the lowest and the highest episode index in a file, or (0, -1) if it has no rows. It
            raises `DatasetError` if the file is missing or broken. Such a file is ignored.
    """

    def __init__(self, paths: Iterable[str], episodes: Callable[[str], tuple[int, int]]) -> None:
        self._paths, self._episodes = sorted(paths), episodes
        self._known: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def in_order(self, episode: int, named: str) -> list[str]:
        """Return the files that contain an episode, in the order of its rows, if episodes increase from file to file.

        Args:
            episode: Index of the episode.
            named: File that the metadata names. This file and its neighbours are examined first.
        """
        with self._lock:
            start = bisect.bisect_left(self._paths, named)
            low, high = 0, len(self._paths)
            while low < high:  # files before `low` have earlier episodes only, and files from `high` on have none of them
                middle = next((i for i in (start, start - 1, start + 1) if low <= i < high), (low + high) // 2)
                if (episodes := self._range(middle)) is None:
                    high -= 1
                elif episodes[1] < episode:
                    low = middle + 1
                else:
                    high = middle
            found: list[str] = []
            while low < len(self._paths):
                if (episodes := self._range(low)) is None:
                    continue
                if episodes[0] <= episode:
                    found.append(self._paths[low])
                if episodes[1] > episode:
                    break
                low += 1
            return found

    def anywhere(self, episode: int) -> list[str]:
        """Return the files that may contain an episode, in order of their names. This reads the footers of all files."""
        with self._lock:
            for number in reversed(range(len(self._paths))):
                self._range(number)
            return [path for path in self._paths if self._known[path][0] <= episode <= self._known[path][1]]

    def _range(self, number: int) -> tuple[int, int] | None:
        """Return the lowest and the highest episode index in a file. Remove a file without rows, and return None."""
        path = self._paths[number]
        if path not in self._known:
            try:
                self._known[path] = self._episodes(path)
            except DatasetError:
                self._known[path] = 0, -1
        if self._known[path] == (0, -1):
            del self._paths[number]
            return None
        return self._known[path]


def data_files(store: Store, named: Sequence[str]) -> set[str]:
    """Return the paths of all data files. Without listings (HTTP), these are the named files and those numbered next to them.

    Args:
        store: Store of the data files.
        named: Data files that the metadata names.
    """
    folder, *rest = checked(named[0]).rsplit("/", 2)  # LeRobot's paths are data/chunk-000/file-000.parquet
    if store.listings and len(rest) == 2:
        return {*parquet_files(store, folder)}
    beside = {_beside(path, step) for path in named for step in (-1, 1)}
    return {*named, *beside} - {""}


def _beside(path: str, step: int) -> str:
    """Return a path whose last number is changed by `step`, or "" if that is impossible."""
    match = re.search(r"\d+(?=\D*$)", path)
    number = int(match[0]) + step if match else -1
    return f"{path[: match.start()]}{number:0{len(match[0])}d}{path[match.end() :]}" if match and number >= 0 else ""

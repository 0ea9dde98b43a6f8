"""Rows of episodes as NumPy columns, read from Parquet files one episode at a time.

    SourceRows.read    finds the dataset of an episode, and names the columns with the keys of the source
    RowReader.read     finds the file and the row groups of an episode, and converts its columns to NumPy
    RowFile            reads row groups of one file
    RowMemory          keeps open files with their footers, and decoded row groups

A row group is decoded as a whole. LeRobot's recorder writes one per episode, so nothing else is read with an episode. LeRobot's
converter writes one per file, with thousands of episodes. Decoded row groups are therefore kept for their other episodes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.checks.arrays import Int64
from dali_stream.errors import DatasetError, StorageError, counted
from dali_stream.lerobot.arrow import to_numpy
from dali_stream.lerobot.dataset_files import CLOCKS, NEEDED, DatasetFiles
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.parquet import parquet_errors
from dali_stream.lerobot.row_file import EPISODE_INDEX, RowFile, RowSearch, data_files
from dali_stream.lerobot.source import Part, Source
from dali_stream.storage import Store
from dali_stream.storage.numbered import NumberedStores
from dali_stream.system.heap import trim_memory
from dali_stream.system.log_records import DATASET_LOG
from dali_stream.system.workers import Once

_log = logging.getLogger(DATASET_LOG)
Columns = dict[str, npt.NDArray[Any]]
_KEPT = 128 << 20  # default maximum of kept row groups, in bytes: a million rows with two vectors of 8 numbers
_FILES = 256  # default maximum number of files of a dataset that stay open
_TOGETHER = 1 << 20  # maximum size of row groups that are read together for several episodes, in bytes
_PIECE = 4 << 20  # maximum number of bytes that are decoded at a time if the rows of a single episode are read
_LARGEST = 1 << 30  # maximum memory of row groups that take far more memory than their file, in bytes
_RATIO = 8  # ratio above which row groups take far more memory than their file
_MANY = 1000  # number of row groups above which memory is returned to the operating system after parsing


class DecodedRows:
    """Decoded row groups of a file.

    Attributes:
        path: Path of the file, for messages. For an episode in several files, it is that of the first one.
        columns: {key: values of all rows}. Columns of images, of strings and with errors are not converted to NumPy yet.
        nbytes: Memory of the columns in bytes.
        spans: {selected episode that is complete in these row groups: its rows, as a slice}.
        bytes_read: Number of bytes that were read for the columns and that `take_bytes` has not returned yet.
    """

    def __init__(
        self,
        path: str,
        columns: dict[str, pa.ChunkedArray | npt.NDArray[Any]],
        index: Int64,
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
        spans, numbers = map(slice, starts[whole].tolist(), (starts + lengths)[whole].tolist()), number[whole].tolist()
        self.spans: dict[int, slice] = dict(zip(numbers, spans, strict=True))
        if len(self.spans) < len(numbers):  # it is unknown which copy of an episode is meant, so it has no span
            counts = Counter(numbers)
            self.spans = {episode: span for episode, span in self.spans.items() if counts[episode] == 1}
        self._index, self._lengths = index, lengths

    def count_rows(self, index: int) -> int:
        """Return the number of rows of an episode in these row groups, by its index."""
        return int(self._lengths[self._index == index].sum())

    def take_bytes(self) -> int:
        """Return the number of bytes that were read since the last call. Each byte is thus counted only once."""
        count, self.bytes_read = self.bytes_read, 0
        return count


class RowMemory:
    """Memory of one reader of rows, or shared by several: open files with their footers, and decoded row groups.

    The least recently used files and row groups are dropped first. Safe to use from several threads.

    Args:
        at_once: Maximum bytes of row groups that are read at the same time. A larger one is read alone. Default: no limit.
        kept: Maximum bytes of decoded row groups to keep. A single row group may exceed it, up to `at_once`. Default: 128 MiB.
        files: Maximum number of files that stay open for each reader. Default: 256.

    Attributes:
        at_once: See above.
        largest: Size in bytes above which a row group is not kept.
        nbytes: Total bytes of the row groups that are kept.
    """

    def __init__(self, at_once: int = 1 << 62, kept: int = _KEPT, files: int = _FILES) -> None:
        self.at_once, self._kept, self._most_files = at_once, kept, files
        self.largest = max(at_once, kept)
        self._reading = self.nbytes = 0
        self._lock = threading.Condition()
        self._files: defaultdict[int, OrderedDict[str, RowFile]] = defaultdict(OrderedDict)  # by reader
        self._groups: OrderedDict[tuple[object, ...], DecodedRows] = OrderedDict()
        self._once = Once()

    def file(self, reader: int, path: str, open_file: Callable[[], RowFile]) -> RowFile:
        """Return an open file of a reader. Call `open_file` if it is not in memory.

        Args:
            reader: Number of the reader.
            path: Path of the file.
            open_file: Function that opens the file. If calls overlap in time, it is called once.
        """
        with self._lock:
            file = self._files[reader].get(path)
        if file is None:
            file = self._once((reader, path), open_file)
        with self._lock:
            files = self._files[reader]
            files[path] = file
            files.move_to_end(path)
            while len(files) > self._most_files:
                files.popitem(last=False)
        return file

    def rows(self, key: tuple[object, ...], read: Callable[[], DecodedRows]) -> DecodedRows:
        """Return decoded row groups by their key. Call `read` if they are not in memory.

        They are kept afterwards, unless they are too large, or have no second episode that could be requested later.

        Args:
            key: Number of the reader, path of the file, and what identifies row groups in it.
            read: Function that reads them. If calls overlap in time, it is called once.
        """

        def kept_or_read() -> DecodedRows:
            with self._lock:
                if key in self._groups:
                    self._groups.move_to_end(key)
                    return self._groups[key]
            rows = read()
            with self._lock:
                if len(rows.spans) > 1 and rows.nbytes <= self.largest:
                    self._groups[key] = rows
                    self.nbytes += rows.nbytes
                    self._evict(self._kept, spared=1)
            return rows

        return self._once(key, kept_or_read)

    def find(self, reader: int, episode: int) -> DecodedRows | None:
        """Return the kept row groups that were used last and contain an episode. None if no kept row groups contain it."""
        with self._lock:
            own = (rows for (owner, *_), rows in reversed(self._groups.items()) if owner == reader)
            return next((rows for rows in own if episode in rows.spans), None)

    @contextmanager
    def turn(self, size: int) -> Iterator[None]:
        """Wait until row groups of `size` bytes may be read, and count them as being read within the `with` block."""
        with self._lock:
            self._lock.wait_for(lambda: not self._reading or self._reading + size <= self.at_once)
            self._reading += size
            # Kept row groups make room, so that both together do not exceed `largest`.
            self._evict(min(self._kept, max(self.largest - self._reading, 0)))
        try:
            yield
        finally:
            with self._lock:
                self._reading -= size
                self._lock.notify_all()

    def _evict(self, most: int, spared: int = 0) -> None:
        while len(self._groups) > spared and self.nbytes > most:
            self.nbytes -= self._groups.popitem(last=False)[1].nbytes


class RowReader:
    """Reader of the rows of episodes, with the selected features only. Safe to use from several threads.

    Args:
        dataset: Dataset with its selected episodes and features.
        store: Store to read from. Default: the store of the dataset.
        memory: Memory for open files and decoded row groups. Default: a new one that is not shared.
        keys: Features to read. Default: all selected features.

    Attributes:
        misnamed: Data files that the metadata names for episodes whose rows are, at least in part, in other files.
    """

    def __init__(
        self,
        dataset: DatasetFiles,
        store: Store | None = None,
        memory: RowMemory | None = None,
        keys: Container[str] | None = None,
    ) -> None:
        self._dataset, self._store = dataset, store or dataset.data_store
        self._memory, self._warned = memory or RowMemory(), False
        # The columns of `CLOCKS` are always read, since they determine the order of the rows.
        wanted = dataset.features.keys() if keys is None else {key for key in dataset.features if key in keys or key in CLOCKS}
        self._features = {key: f for key, f in dataset.features.items() if not f.is_video and key in wanted}
        self._locates = dataset.clock if dataset.videos else ""  # column that locates frames
        self._checks = bool(self._locates) and (keys is None or self._locates in keys)
        self._piece = min(_PIECE, self._memory.largest)  # bytes that are decoded at a time if one episode's rows are read
        self._expected: dict[int, list[int]] = {}  # {number of the file: episodes that will be read next}
        self._early: dict[int, DecodedRows] = {}  # {expected episode: row groups that were read already}
        self.misnamed = set[str]()
        self._without_rows = set[str]()  # those of `misnamed` that contain no row of such an episode
        self._search: RowSearch | None = None
        self._lock = threading.Lock()  # for the three above

    def expect(self, episodes: Sequence[int]) -> None:
        """Announce the next episodes to read, so that small row groups of one local file can be read with one call.

        The episodes replace those of the last call. Do not call this method while another thread reads.
        """
        self._expected, self._early = {}, {}
        if not self._store.remote:  # requests for remote data are sent in parallel
            files = self._dataset.table.data.index[self._dataset.rows[list(episodes)]]
            for number, episode in zip(files.tolist(), episodes, strict=True):
                self._expected.setdefault(number, []).append(episode)

    def read(self, episode: int, count: Callable[[int], None] | None = None) -> Columns:
        """Return the rows of a selected episode, {key: array of shape (L, ...)}.

        Strings and images are arrays of objects. The arrays do not refer to rows of other episodes.

        Args:
            episode: Number of the episode among the selected ones.
            count: Function that is called with the number of bytes that were read for these rows. Bytes that were read for
                several episodes are counted once. Default: None.

        Raises:
            DatasetError: If a file is missing or broken, or its rows contradict the metadata.
            StorageError: If a file cannot be read.
        """
        rows = self._early.pop(episode, None) or self._find(episode)
        columns = self._columns(rows, episode)
        if count is not None:
            count(rows.take_bytes())
        return columns

    def beside(self, episode: int) -> list[int]:
        """Return the episodes in the same row groups as an episode that was read, as long as these are kept."""
        rows = self._memory.find(id(self), episode)
        return [] if rows is None else [other for other in rows.spans if other != episode and self._is_named(rows, other)]

    def read_kept(self, episode: int) -> Columns | None:
        """Return the rows of an episode without reading a data file. None if its row groups are not kept. See `read`."""
        rows = self._memory.find(id(self), episode)
        return None if rows is None or not self._is_named(rows, episode) else self._columns(rows, episode)

    def _is_named(self, rows: DecodedRows, episode: int) -> bool:
        """Return whether the metadata names the file of these rows for an episode. Others may be stale copies of its rows."""
        data = self._dataset.table.data
        return data.paths[int(data.index[self._dataset.rows[episode]])] == rows.path

    def _find(self, episode: int) -> DecodedRows:
        """Return row groups with all rows of an episode.

        The rows are looked for where the metadata says, then in all row groups of this file, and then in other files. Usually,
        the first attempt finds them.
        """
        table, row = self._dataset.table, int(self._dataset.rows[episode])
        number, first, length = int(table.data.index[row]), int(table.first_row[row]), int(table.length[row])
        named, problem = table.data.paths[number], None
        if named not in self._without_rows:
            try:
                with parquet_errors(self._store, named):
                    file = self._open(named, number)
                    if (together := self._read_together(file, number, episode)) is not None:
                        return together
                    rows = self._read(file, file.groups_at(first, first + length), episode)
                    if episode not in rows.spans:  # the episodes of the file are not in the metadata's order
                        rows = self._read(file, file.groups_of(int(table.index[row])), episode)
                if episode in rows.spans:
                    return rows
            except DatasetError as error:
                problem = error.with_traceback(None)  # the traceback would keep row groups in memory
        return self._find_elsewhere(episode, named, problem)

    def _find_elsewhere(self, episode: int, named: str, problem: DatasetError | None) -> DecodedRows:
        """Find the rows of an episode that are not, or not all, contiguous in the file that the metadata names.

        Args:
            episode: Number of the episode.
            named: Path of the file that the metadata names.
            problem: Error of this file, or None.

        Raises:
            DatasetError: If the episode has fewer or more rows than the metadata says.
        """
        index, length = int(self._dataset.episodes[episode]), int(self._dataset.lengths[episode])
        count = 0
        for paths in self._candidates(index, named):
            count, parts = 0, list[tuple[RowFile, list[int]]]()
            for path in paths:
                with parquet_errors(self._store, path):
                    file = self._open(path)
                    groups = file.groups_of(index)
                    rows = self._read(file, groups, episode)
                if episode in rows.spans:
                    self._note(index, named, [path])
                    return rows
                count += rows.count_rows(index)
                parts.append((file, groups))
            if count == length:
                self._note(index, named, paths)
                return self._read_episode(parts, index)
        if problem is not None and not count:
            raise problem
        more = ", where all files are searched" if self._store.remote and not self._dataset.info.is_v2 else ""
        raise DatasetError(
            f"Invalid episode {index} in {self._store.where(named)}: must have {counted(length, 'row')}, as the metadata says, "
            f"got {count}. Copy the dataset again{more and ' to a local folder'}{more}"
        )

    def _candidates(self, index: int, named: str) -> Iterator[list[str]]:
        """Yield lists of files that may contain the rows of an episode together.

        Args:
            index: Index of the episode.
            named: File that the metadata names.
        """
        if self._dataset.info.is_v2:  # the name of a file contains the index of its episode
            yield [named]
            return
        with self._lock:
            if self._search is None:
                own = weakref.proxy(self)  # a reference cycle would keep rows in memory until a garbage collection
                paths = data_files(self._store, self._dataset.table.data.paths)
                self._search = RowSearch(paths, lambda path: own._episodes_of(path))
        yield self._search.in_order(index, named)
        if not self._store.remote:  # thousands of footers take too long over a network
            yield self._search.anywhere(index)

    def _episodes_of(self, path: str) -> tuple[int, int]:
        with parquet_errors(self._store, path):
            return self._open(path).episodes()

    def _note(self, index: int, named: str, paths: list[str]) -> None:
        """Record that the rows of an episode are in `paths`. Warn the first time that the metadata names another file."""
        if paths == [named]:
            return
        with self._lock:
            is_first = not self.misnamed
            self.misnamed.add(named)
            self._without_rows |= {named} - {*paths}
        if is_first:
            _log.warning(
                "%s: the metadata names this file for episode %d, whose rows are in %s. Such rows are found by their "
                "episode_index, which takes more reads. `dali-stream prepare URI OUT` writes a dataset without this defect",
                self._store.where(named), index, " and ".join(paths),
            )  # fmt: skip

    def _open(self, path: str, number: int | None = None) -> RowFile:
        """Return a data file by its path, and its number if it is known."""

        def open_file() -> RowFile:
            known = self._dataset.table.data.number(path) if number is None else number
            file = RowFile(self._dataset, self._store, path, known, self._features)
            if len(file.groups.rows) > _MANY:  # parsing such a footer takes several MB
                trim_memory()
            return file

        return self._memory.file(id(self), path, open_file)

    def _read(self, file: RowFile, groups: list[int], episode: int) -> DecodedRows:
        """Return decoded row groups. They are only read if they are not kept.

        If they take more than the memory for row groups, and far more than the file, only the rows of the episode are returned.
        """
        size, most = int(file.sizes[groups].sum()), max(_RATIO * file.size, min(self._memory.largest, _LARGEST))
        index = int(self._dataset.episodes[episode]) if size > most else None

        def read() -> DecodedRows:
            return self._read_groups(file, groups, size) if index is None else self._read_episode([(file, groups)], index)

        return self._memory.rows((id(self), file.path, index, *groups), read)

    def _read_together(self, file: RowFile, number: int, episode: int) -> DecodedRows | None:
        """Read the row group of an episode together with those of other expected episodes, if each has its own.

        Return None if this is impossible or fails. Each episode is then read by itself, so that only broken ones are errors.
        """
        expected = self._expected.pop(number, [])
        if episode not in expected:
            return None
        episodes = np.array(expected[expected.index(episode) :])
        groups = file.groups_alone(self._dataset.table.first_row[self._dataset.rows[episodes]], self._dataset.lengths[episodes])
        sizes = np.where(groups < 0, 0, file.sizes[groups])
        is_together = (groups >= 0) & (np.cumsum(sizes) <= min(_TOGETHER, self._memory.at_once))
        self._expected[number] = episodes[1:][~is_together[1:]].tolist()
        if not is_together[0] or is_together.sum() < 2:
            return None
        with suppress(DatasetError, StorageError), parquet_errors(self._store, file.path):
            rows = self._read_groups(file, groups[is_together].tolist(), int(sizes[is_together].sum()))
            if list(rows.spans) == episodes[is_together].tolist():
                self._early |= dict.fromkeys(rows.spans, rows)
                return self._early.pop(episode)
        return None

    def _read_groups(self, file: RowFile, groups: list[int], size: int) -> DecodedRows:
        """Read row groups of `size` bytes from a file, and convert their numbers to NumPy.

        Warn once if they are too large to be kept.
        """
        if size > self._memory.largest and not self._warned:
            self._warned = True
            _log.warning(
                "%s: a row group has %d bytes, and memory_budget leaves %d for rows, so it is read again for each of its "
                "episodes. `dali-stream prepare URI OUT` writes smaller ones",
                self._store.where(file.path), size, self._memory.largest,
            )  # fmt: skip
        with self._memory.turn(size):
            table, bytes_read = file.read(groups)
            columns = dict(zip(table.column_names, table.columns, strict=True))
            del table  # so that each column is freed when it has been converted
            return self._decoded(columns, bytes_read, file.path)

    def _read_episode(self, parts: Sequence[tuple[RowFile, list[int]]], index: int) -> DecodedRows:
        """Return only the rows of an episode in row groups of one or more files, in the order of the files.

        Args:
            parts: Files, and row groups of each.
            index: Index of the episode.
        """
        tables, bytes_read = [], 0
        for file, groups in parts:
            with parquet_errors(self._store, file.path), self._memory.turn(self._piece):
                table, read = file.read_episode(index, groups, self._piece)
            tables.append(table)
            bytes_read += read
        path = parts[0][0].path
        with parquet_errors(self._store, path):
            table = pa.concat_tables(tables, promote_options="permissive")
            return self._decoded(dict(zip(table.column_names, table.columns, strict=True)), bytes_read, path)

    def _decoded(self, columns: dict[str, Any], bytes_read: int, path: str) -> DecodedRows:
        """Convert the numbers of rows from Arrow to NumPy, in place."""
        if not self._locates and "timestamp" in columns:
            columns["timestamp"] = _without_gaps(columns["timestamp"])
        where = f"{self._store.where(path)}: episode_index"
        index = to_numpy(columns["episode_index"], EPISODE_INDEX, where, leave_out=False)
        for key, feature in self._features.items():
            # Annotations repeat in each row of an episode, and take far less memory after the conversion.
            if key in columns and (feature.is_language or not (feature.is_image or feature.is_text)):
                with suppress(DatasetError), parquet_errors(self._store, path):  # raised again for the broken episodes
                    columns[key] = to_numpy(columns[key], feature, "", dtype=_exact(key, feature))
        return DecodedRows(path, columns, index, self._dataset, bytes_read)

    def _columns(self, rows: DecodedRows, episode: int) -> Columns:
        """Return the columns of an episode. Raises DatasetError if their values are broken."""
        span = rows.spans[episode]
        length = span.stop - span.start
        where = f"{self._store.where(rows.path)}: episode {self._dataset.episodes[episode]}"

        def image(name: str) -> bytes:
            data = self._store.read_all(name)
            rows.bytes_read += len(data)
            return data

        columns: Columns = {}
        with parquet_errors(self._store, rows.path):  # only the conversion detects text that is not UTF-8
            for key, feature in self._features.items():
                values = rows.columns.get(key)
                if values is None:  # only `frame_index` may be absent, see `RowFile`
                    columns[key] = np.arange(length)
                elif isinstance(values, np.ndarray):
                    columns[key] = values[span]
                else:
                    columns[key] = to_numpy(
                        values.slice(span.start, length), feature, f"{where}: {key}", image,
                        dtype=_exact(key, feature), leave_out=key not in NEEDED,
                    )  # fmt: skip
            if (order := row_order(columns["timestamp"], columns["frame_index"], self._locates)) is not None:
                columns = {key: values[order] for key, values in columns.items()}
            if self._checks and self._locates == "frame_index":
                check_counting(where, columns["frame_index"])
            elif self._checks:
                check_rising(where, columns["timestamp"], columns["frame_index"] if "frame_index" in rows.columns else None)
            # They were compared before they are rounded.
            columns["timestamp"] = columns["timestamp"].astype(self._features["timestamp"].numpy)
            return {key: _own(values) for key, values in columns.items()}


class SourceRows:
    """Reader of the rows of a source, which may have several datasets, with its keys. Safe to use from several threads.

    If a dataset lacks a feature of the source, its rows contain zeros, or empty strings or images. If its vectors are shorter,
    they are padded with zeros.

    Args:
        source: Episodes.
        store: Session of the source's `data_store`.
        memory: Memory for open files and decoded row groups of all datasets. Default: a new one that is not shared.
    """

    def __init__(self, source: Source, store: Store, memory: RowMemory | None = None) -> None:
        self._source, memory = source, memory or RowMemory()
        stores = store.stores if isinstance(store, NumberedStores) else [store]
        self._readers = [RowReader(part.dataset, own, memory) for part, own in zip(source.parts, stores, strict=True)]

    def expect(self, episodes: Sequence[int]) -> None:
        """Announce the next episodes to read. See `RowReader.expect`."""
        numbers = np.array(episodes, np.int64)
        datasets = self._source.dataset_of[numbers]
        for number in np.unique(datasets).tolist():
            first = self._source.parts[number].first
            self._readers[number].expect((numbers[datasets == number] - first).tolist())

    def read(self, episode: int, count: Callable[[int], None] | None = None) -> Columns:
        """Return the rows of an episode. See `RowReader.read`."""
        reader, part = self._of(episode)
        return self._renamed(part, reader.read(episode - part.first, count))

    def beside(self, episode: int) -> list[int]:
        """Return the episodes in the same row groups as an episode that was read. See `RowReader.beside`."""
        reader, part = self._of(episode)
        return [part.first + other for other in reader.beside(episode - part.first)]

    def read_kept(self, episode: int) -> Columns | None:
        """Return the rows of an episode without reading a data file, or None. See `RowReader.read_kept`."""
        reader, part = self._of(episode)
        columns = reader.read_kept(episode - part.first)
        return None if columns is None else self._renamed(part, columns)

    def _of(self, episode: int) -> tuple[RowReader, Part]:
        number = int(self._source.dataset_of[episode])
        return self._readers[number], self._source.parts[number]

    def _renamed(self, part: Part, columns: Columns) -> Columns:
        """Return the columns of an episode of a dataset under the keys of the source."""
        if not self._source.dataset_names:  # a single dataset has the same keys
            return columns
        source, length = self._source, len(columns["frame_index"])
        renamed: Columns = {}
        for key, feature in source.features.items():
            if feature.is_camera and key not in source.images:
                continue
            if part.keys.get(key) not in columns:
                renamed[key] = _nothing(feature, length)
                continue
            renamed[key] = columns[part.keys[key]]
            if part.features[key].row_shape != feature.row_shape and not feature.is_camera:
                values = renamed[key].reshape(length, -1)
                renamed[key] = np.zeros((length, *feature.row_shape), values.dtype)
                renamed[key][:, : values.shape[1]] = values
        return renamed


def row_order(timestamp: npt.NDArray[Any], frame_index: npt.NDArray[Any], locates: str) -> Int64 | None:
    """Return the order in which the rows of an episode are read. None if they are read as they are stored.

    Rows whose timestamps do not increase are read in increasing order of `frame_index`, if its values are distinct and, where
    timestamps locate frames, if the timestamps increase in that order.

    Args:
        timestamp: Timestamps in seconds, shape (L,).
        frame_index: Values of the rows, shape (L,).
        locates: Column that locates frames: "timestamp", "frame_index", or "" for a dataset without video.
    """
    if _rises(frame_index) or _rises(timestamp):
        return None
    order = np.argsort(frame_index, kind="stable")
    if not _rises(frame_index[order]) or (locates == "timestamp" and not _rises(timestamp[order])):
        return None
    return order


def _rises(values: npt.NDArray[Any]) -> bool:
    """Return whether each value is greater than the previous one, and the first is a number."""
    return bool((values[:1] > -np.inf).all() and (values[1:] > values[:-1]).all())  # NaN is not greater than any number


def check_rising(where: str, timestamp: npt.NDArray[Any], frame_index: npt.NDArray[Any] | None = None) -> None:
    """Check that the timestamps of an episode increase. Otherwise, a row could get the frame of another row.

    Args:
        where: Address of the file and the episode, for the message.
        timestamp: Timestamps in seconds, shape (L,).
        frame_index: Values of the rows, shape (L,). They tell whether only the order of the rows is wrong. Default: None, for
            rows without this column.

    Raises:
        DatasetError: If a timestamp is not greater than that of the previous row, or if the first is not a number.
    """
    if _rises(timestamp):
        return
    row = int(np.argmax(np.append(~(timestamp[:1] > -np.inf), ~(timestamp[1:] > timestamp[:-1]))))
    allowed = f"greater than {timestamp[row - 1]:.4f} s, that of row {row - 1}" if row else "a finite number"
    advice = "The file is damaged, so copy or record it again"
    if _rises(np.sort(timestamp)) and (frame_index is None or not _rises(frame_index)):
        advice = (
            "The rows are out of order, and frame_index does not tell their order. Sort the rows of each episode by timestamp"
        )
    raise DatasetError(f"Invalid timestamp of row {row} in {where}: must be {allowed}, got {timestamp[row]:.4f} s. {advice}")


def check_counting(where: str, frame_index: npt.NDArray[Any]) -> None:
    """Check that `frame_index` counts the rows of an episode. Otherwise, a row could get the frame of another row.

    Args:
        where: Address of the file and the episode, for the message.
        frame_index: Values of the rows, shape (L,).

    Raises:
        DatasetError: If a value is not the number of its row, counted from 0.
    """
    wrong = frame_index != np.arange(len(frame_index))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DatasetError(
            f'Invalid frame_index of row {row} in {where}: must be {row} for clock="frame_index", which needs numbers that '
            f"count the rows of each episode from 0, got {frame_index[row]}. Use the default, which locates frames by timestamp"
        )


def _without_gaps(timestamp: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return timestamps with NaN for those that are missing, which is allowed if no frame depends on them."""
    kinds = (pa.types.is_floating, pa.types.is_null, pa.types.is_decimal)
    if not timestamp.null_count or not any(is_kind(timestamp.type) for is_kind in kinds):
        return timestamp
    return timestamp.cast(pa.float64()).fill_null(np.nan)


def _own(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values that are not a view, which would keep row groups in memory."""
    return values if values.base is None and values.flags.owndata else values.copy()


def _exact(key: str, feature: Feature) -> type[np.generic]:
    """Return the dtype in which a column is read. Timestamps are rounded to that of a batch only after they are compared."""
    return np.float64 if key == "timestamp" and feature.is_float else feature.numpy


def _nothing(feature: Feature, length: int) -> npt.NDArray[Any]:
    """Return the rows of a feature that a dataset lacks: zeros, empty strings, no annotations, or empty bytes for images."""
    if feature.is_camera:
        return np.full(length, b"", object)
    if feature.is_language:
        return np.full(length, b"[]", object)
    if feature.is_text:
        return np.full((length, *feature.row_shape), "", object)
    return np.zeros((length, *feature.row_shape), feature.numpy)

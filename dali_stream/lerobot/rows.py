"""Reader of the rows of Parquet files as NumPy columns, one episode at a time."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from contextlib import suppress
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
from dali_stream.lerobot.row_file import EPISODE_INDEX, RowFile
from dali_stream.lerobot.row_files import RowFiles
from dali_stream.lerobot.row_memory import Columns, DecodedGroups, Found, RowMemory
from dali_stream.storage import Store
from dali_stream.system.log_records import DATASET_LOG
from dali_stream.system.workers import Once

_log = logging.getLogger(DATASET_LOG)


class RowReader:
    """Reader of the rows of episodes, with the selected features only. Safe to use from several threads.

    Args:
        dataset: Dataset with its selected episodes and features.
        store: Store to read from. Default: the store of the dataset.
        memory: Memory for decoded row groups. Default: a new one that is not shared.
        keys: Features to read. Default: all selected features.
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
        self._files = RowFiles(dataset, self._store, self._features)
        self._row_bytes = dataset.row_bytes
        self._locates = dataset.clock if dataset.videos else ""  # column that locates frames
        self._checks = bool(self._locates) and (keys is None or self._locates in keys)
        self._piece = min(_PIECE, self._memory.largest)  # bytes that are decoded at a time if one episode's rows are read
        self._once = Once()
        self._expected: dict[int, list[int]] = {}  # {number of the file: episodes that will be read next}
        self._early: dict[int, DecodedGroups] = {}  # {expected episode: row groups that were read already}

    @property
    def misnamed(self) -> set[str]:
        """Data files that the metadata names for episodes whose rows are, at least in part, in other files."""
        return self._files.misnamed

    def expect(self, episodes: Sequence[int]) -> None:
        """Announce the next episodes to read, so that small row groups of one local file can be read with one call.

        The episodes replace those of the last call. Do not call this method while another thread reads.
        """
        self._expected, self._early = {}, {}
        if not self._store.remote:  # requests for remote data are sent in parallel
            files = self._dataset.table.data.index[self._dataset.rows[list(episodes)]]
            for number, episode in zip(files.tolist(), episodes, strict=True):
                self._expected.setdefault(number, []).append(episode)

    def read(self, episode: int) -> Found:
        """Return the rows of a selected episode, and those of other episodes that had to be read with it.

        Row groups that are kept or still referenced are not read again. In this case, only the requested episode is returned.
        Do not modify the arrays.

        Args:
            episode: Number of the episode among the selected ones.

        Raises:
            DatasetError: If a file is missing or broken, or its rows contradict the metadata.
            StorageError: If a file cannot be read.
        """
        group, is_new = self._find(episode)
        lengths = group.lengths if is_new else {episode: group.lengths[episode]}
        episode_rows = Found(lengths, self._columns, self._row_bytes, group)
        with parquet_errors(self._store, group.path):
            _ = episode_rows[episode]  # convert the episode now, so that `read` raises its errors
        return episode_rows

    def _find(self, episode: int) -> tuple[DecodedGroups, bool]:
        """Return row groups with all rows of an episode, and whether they were read for this call. See `_group`.

        The rows are looked for where the metadata says, then in all row groups of this file, and then in other files. Usually,
        the first attempt finds them.
        """
        if (early := self._early.pop(episode, None)) is not None:
            return early, False
        table, row = self._dataset.table, int(self._dataset.rows[episode])
        number, first, length = int(table.data.index[row]), int(table.first_row[row]), int(table.length[row])
        named, problem = table.data.paths[number], None
        if named not in self._files.without_rows:
            try:
                with parquet_errors(self._store, named):
                    file = self._files.open(named, number)
                    if (together := self._together(file, number, episode)) is not None:
                        return together, False
                    group, is_new = self._group(file, file.groups_at(first, first + length), episode)
                    if episode not in group.lengths:  # the episodes of the file are not in the metadata's order
                        group, is_new = self._group(file, file.groups_of(int(table.index[row])), episode)
                if episode in group.lengths:
                    return group, is_new
            except DatasetError as error:
                problem = error.with_traceback(None)  # the traceback would keep row groups in memory
        return self._search(episode, named, problem)

    def _search(self, episode: int, named: str, problem: DatasetError | None) -> tuple[DecodedGroups, bool]:
        """Find the rows of an episode that are not, or not all, contiguous in the file that the metadata names.

        Args:
            episode: Number of the episode.
            named: Path of the file that the metadata names.
            problem: Error of this file, or None.

        Returns:
            See `_find`.

        Raises:
            DatasetError: If the episode has fewer or more rows than the metadata says.
        """
        index, length = int(self._dataset.episodes[episode]), int(self._dataset.lengths[episode])
        count = 0
        for paths in self._files.candidates(index, named):
            count, parts = 0, list[tuple[RowFile, list[int]]]()
            for path in paths:
                with parquet_errors(self._store, path):
                    file = self._files.open(path)
                    groups = file.groups_of(index)
                    group, is_new = self._group(file, groups, episode)
                if episode in group.lengths:
                    self._files.note(index, named, [path])
                    return group, is_new
                count += group.rows_of(index)
                parts.append((file, groups))
            if count == length:
                self._files.note(index, named, paths)
                return self._joined(parts, index), True
        if problem is not None and not count:
            raise problem
        more = ", where all files are searched" if self._store.remote and not self._dataset.info.is_v2 else ""
        raise DatasetError(
            f"Invalid episode {index} in {self._store.where(named)}: must have {counted(length, 'row')}, as the metadata says, "
            f"got {count}. Copy the dataset again{more and ' to a local folder'}{more}"
        )

    def _joined(self, parts: Sequence[tuple[RowFile, list[int]]], index: int) -> DecodedGroups:
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
            return self._converted(dict(zip(table.column_names, table.columns, strict=True)), bytes_read, path)

    def _group(self, file: RowFile, groups: list[int], episode: int) -> tuple[DecodedGroups, bool]:
        """Return decoded row groups, and whether this call, or one that overlaps with it, read them from the file.

        If they take more than the memory for row groups, and far more than the file, only the rows of the episode are returned.
        """
        size, most = int(file.sizes[groups].sum()), max(_RATIO * file.size, min(self._memory.largest, _LARGEST))
        index = int(self._dataset.episodes[episode]) if size > most else None
        key = (id(self), file.path, index, *groups)

        def read() -> tuple[DecodedGroups, bool]:
            if (group := self._memory.get(key)) is not None:
                return group, False
            group = self._decoded(file, groups, size) if index is None else self._joined([(file, groups)], index)
            self._memory.put(key, group)
            return group, True

        return self._once(key, read)

    def _together(self, file: RowFile, number: int, episode: int) -> DecodedGroups | None:
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
            group = self._decoded(file, groups[is_together].tolist(), int(sizes[is_together].sum()))
            if list(group.lengths) == episodes[is_together].tolist():
                self._early |= dict.fromkeys(group.lengths, group)
                return self._early.pop(episode)
        return None

    def _decoded(self, file: RowFile, groups: list[int], size: int) -> DecodedGroups:
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
            return self._converted(columns, bytes_read, file.path)

    def _converted(self, columns: dict[str, Any], bytes_read: int, path: str) -> DecodedGroups:
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
        return DecodedGroups(path, columns, index, self._dataset, bytes_read)

    def _columns(self, group: DecodedGroups, episode: int) -> Columns:
        """Return the columns of an episode. Raises DatasetError if their values are broken."""
        start, length = group.start[episode], group.lengths[episode]
        where = f"{self._store.where(group.path)}: episode {self._dataset.episodes[episode]}"

        def image(name: str) -> bytes:
            data = self._store.read_all(name)
            group.bytes_read += len(data)
            return data

        columns: Columns = {}
        for key, feature in self._features.items():
            values = group.columns.get(key)
            if values is None:  # only `frame_index` may be absent, see `RowFile`
                columns[key] = np.arange(length)
            elif isinstance(values, np.ndarray):
                columns[key] = values[start : start + length]
            else:
                with parquet_errors(self._store, group.path):  # only the conversion detects text that is not UTF-8
                    columns[key] = to_numpy(
                        values.slice(start, length), feature, f"{where}: {key}", image,
                        dtype=_exact(key, feature), leave_out=key not in NEEDED,
                    )  # fmt: skip
        if (order := row_order(columns["timestamp"], columns["frame_index"], self._locates)) is not None:
            columns = {key: values[order] for key, values in columns.items()}
        if self._checks and self._locates == "frame_index":
            check_counting(where, columns["frame_index"])
        elif self._checks:
            check_rising(where, columns["timestamp"], columns["frame_index"] if "frame_index" in group.columns else None)
        # They were compared before they are rounded.
        columns["timestamp"] = columns["timestamp"].astype(self._features["timestamp"].numpy)
        return columns


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


_TOGETHER = 1 << 20  # maximum size of row groups that are read together for several episodes, in bytes
_PIECE = 4 << 20  # maximum number of bytes that are decoded at a time if the rows of a single episode are read
_LARGEST = 1 << 30  # maximum memory of row groups that take far more memory than their file, in bytes
_RATIO = 8  # ratio above which row groups take far more memory than their file


def _without_gaps(timestamp: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return timestamps with NaN for those that are missing, which is allowed if no frame depends on them."""
    kinds = (pa.types.is_floating, pa.types.is_null, pa.types.is_decimal)
    if not timestamp.null_count or not any(is_kind(timestamp.type) for is_kind in kinds):
        return timestamp
    return timestamp.cast(pa.float64()).fill_null(np.nan)


def _exact(key: str, feature: Feature) -> type[np.generic]:
    """Return the dtype in which a column is read. Timestamps are rounded to that of a batch only after they are compared."""
    return np.float64 if key == "timestamp" and feature.is_float else feature.numpy

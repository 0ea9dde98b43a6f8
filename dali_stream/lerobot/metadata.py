"""Reader of the files in `meta/` of a LeRobot dataset: `info.json` of all versions, and the other files of v3.0.

The format is described at https://huggingface.co/docs/lerobot/lerobot-dataset-v3 and in LeRobot's `datasets/utils.py`. The
module `v2` reads the other files of v2.x.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.checks.file_content import from_json
from dali_stream.errors import DatasetError, StorageError
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.file_names import numbered_files
from dali_stream.lerobot.row_groups import chunk_sizes
from dali_stream.storage import Store, lfs
from dali_stream.storage.store import SMALL, Ranges
from dali_stream.system.log_records import DATASET_LOG

INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
SUBTASKS = "meta/subtasks.parquet"
TABULAR = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
DTYPES = (*TABULAR, "video", "image", "string")
FRAME_INDEX = "frame_index"  # the only feature that a dataset may lack: it then counts the rows of each episode
_LARGEST_JSON = 64 << 20
_ROW_BYTES = 64 << 10  # memory that an episode may take in the episode table, with its statistics
_VALUE_BYTES = 64  # approximate memory of a value as a Python object
_MOST_ROWS = 1024  # maximum number of rows that are read at a time
_FEW_ROWS = 1 << 20  # maximum number of episodes of a dataset whose info.json has no total
Stats = dict[str, dict[str, npt.NDArray[Any]]]
"""Statistics {key: {"mean": array, ...}}. Arrays have the shape of a row, or (C, 1, 1) with values in [0, 1] for a camera."""
_log = logging.getLogger(DATASET_LOG)


@dataclass(frozen=True)
class Info:
    """Validated contents of `meta/info.json`.

    Attributes:
        version: Version of the format, such as "v3.0".
        fps: Frames per second.
        features: Features that can be read, and `frame_index`, even if the file lacks it.
        data_path: Template of the paths to Parquet files.
        video_path: Template of the paths to MP4 files. None if the dataset has none.
        episodes: Number of episodes. None if the file has no total.
        frames: Number of frames. None if the file has no total.
        chunk: Number of episodes in a chunk of v2.x. 0 if the paths do not depend on it.
        splits: Splits of the dataset. Empty if the file has none.
        left_out: Features that cannot be read, {key: reason}.
    """

    version: str
    fps: float
    features: dict[str, Feature]
    data_path: str
    video_path: str | None
    episodes: int | None
    frames: int | None
    chunk: int = 0
    splits: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def is_v2(self) -> bool:
        """Whether the version of the dataset is v2.0 or v2.1."""
        return self.version.startswith("v2.")


@dataclass(frozen=True)
class Files:
    """Files that contain the episodes.

    Attributes:
        paths: Path to each file.
        index: Number of each episode's file in `paths`, shape (E,).
    """

    paths: list[str]
    index: npt.NDArray[np.int64]

    def rows(self, file: int) -> npt.NDArray[np.int64]:
        """Return the rows of the episode table whose episodes are in one file."""
        order, sorted_index = self._by_file
        first, last = np.searchsorted(sorted_index, [file, file + 1])
        return order[first:last]

    def number(self, path: str) -> int:
        """Return the number of a file, or -1 if it is none of these files."""
        return self._number_of.get(path, -1)

    @functools.cached_property
    def _number_of(self) -> dict[str, int]:
        return {path: number for number, path in enumerate(self.paths)}

    @functools.cached_property
    def _by_file(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order = np.argsort(self.index, kind="stable")
        return order, self.index[order]


@dataclass(frozen=True)
class Episodes:
    """Columns of the episode table, for E episodes in increasing order of their index.

    Attributes:
        index: Index of each episode, shape (E,).
        length: Number of frames of each episode, shape (E,).
        first_row: Value of the feature `index` at the first frame of each episode, shape (E,).
        data: Parquet file of each episode.
        video: MP4 file of each episode, for each camera.
        start: Seconds at which each episode begins in its MP4 file (`from_timestamp`), shape (E,), for each camera.
        stop: Seconds at which the next episode begins in the same MP4 file, shape (E,), for each camera. Infinite for the
            last episode of a file.
        to_timestamp: Seconds at which each episode ends according to the metadata, shape (E,), for each camera. Infinite if
            the metadata lacks it, as in v2.x. It does not affect which frames are read, since some exporters write the time of
            the last frame.
        tables: Paths of the Parquet files that contain the episode table. Empty in v2.x.
    """

    index: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    data: Files
    video: dict[str, Files] = field(default_factory=dict)
    start: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    stop: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    to_timestamp: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)

    def interval(self, camera: str, row: int) -> tuple[float, float]:
        """Return the interval [start, stop) of an episode in its MP4 file, in seconds, by its row in the table."""
        return float(self.start[camera][row]), float(self.stop[camera][row])

    def ends_early(self, camera: str, fps: float) -> npt.NDArray[np.bool_]:
        """Return whether `to_timestamp` is before the end of each episode, shape (E,). All frames are read in any case."""
        frames = (self.to_timestamp[camera] - self.start[camera]) * fps
        early: npt.NDArray[np.bool_] = frames < self.length - 0.5
        return early


def read_info(store: Store) -> Info:
    """Read `meta/info.json`. Features that cannot be read are left out, with a warning.

    Raises:
        DatasetError: If the file is missing or broken, or if its version or storage format is not supported.
    """
    try:
        info = _object(read_json(store, INFO), store, "content")
    except DatasetError:
        if store.exists(INFO):
            raise
        raise DatasetError(
            f"{store.address} is not a LeRobot dataset, because {INFO} does not exist. {_looks(store)}"
        ) from None
    if "codebase_version" not in info:
        problem = "codebase_version is missing" if info else "the JSON object is empty"
        raise DatasetError(f"Invalid {store.where(INFO)}: {problem}. {_looks(store)}")
    version = f"v{str(info['codebase_version']).removeprefix('v')}"  # some exporters leave the "v" out
    if version not in ("v2.0", "v2.1", "v3.0"):
        newer = re.fullmatch(r"v(3\.[1-9]\d*|[4-9]\.\d+|\d{2,}\.\d+)", version)
        raise DatasetError(
            f"Invalid codebase_version in {store.where(INFO)}: must be v2.0, v2.1 or v3.0, got "
            f"{str(info['codebase_version'])[:40]!r}"
            f"{'. A newer format needs a newer dali_stream, since its files may have another meaning' if newer else ''}"
        )
    fields = _V2_FIELDS if version.startswith("v2.") else _V3_FIELDS
    if info.get("storage_format") == "lance":
        raise DatasetError(
            f'Invalid storage_format in {store.where(INFO)}: must be Parquet with MP4, got "lance". LeRobot with its Lance '
            "reader loads this dataset. Neither LeRobot nor dali_stream converts it, so use the Parquet dataset that it was "
            "made from, if it exists"
        )
    fps = _fps(info.get("fps"), store)
    features = _object(info.get("features"), store, "features")
    data_path = _template(info.get("data_path"), "data_path", fields, store)
    video_path = _template(info["video_path"], "video_path", fields, store) if info.get("video_path") else None
    left_out = {key: why for key, feature in features.items() if (why := _left_out(key, feature, store))}
    for key, why in left_out.items():
        _log.warning("%s: feature %.80r %s. Batches will lack it", store.where(INFO), key, why)
    readable = {key: Feature(feature) for key, feature in features.items() if key not in left_out}
    readable.setdefault(FRAME_INDEX, Feature(dtype="int64", shape=[1], names=None))
    return Info(
        version=version,
        fps=fps,
        features=readable,
        data_path=data_path,
        video_path=video_path,
        episodes=_count(info.get("total_episodes"), "total_episodes", store),
        frames=_count(info.get("total_frames"), "total_frames", store),
        splits=splits if isinstance(splits := info.get("splits"), dict) else {},
        chunk=_chunk(info.get("chunks_size"), store)
        if version.startswith("v2.") and _names_chunk(f"{data_path}{video_path}")
        else 0,
        left_out=left_out,
    )


def read_episodes(store: Store, info: Info, cameras: Iterable[str]) -> Episodes:
    """Read the episode table, without the columns of statistics and of other cameras.

    The columns that locate rows may be missing, since rows can be found by their `episode_index`. See `RowReader`.

    Raises:
        DatasetError: If a column is missing, or if the numbers contradict each other or `info.json`.
    """
    cameras = list(cameras)
    video_path = video_template(store, info) if cameras else ""
    needed = ["episode_index", "length"]
    needed += [f"videos/{camera}/{name}" for camera in cameras for name in ("chunk_index", "file_index", "from_timestamp")]
    optional = ["dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
    optional += [f"videos/{camera}/to_timestamp" for camera in cameras]
    names, parts = list[str](), list[dict[str, npt.NDArray[Any]]]()
    for name in _table_files(store):
        names.append(name)
        parts.append(_numbers(store, name, needed, optional, info))
        # Without listings, each file is found by a request, and some web servers answer for any name.
        if not has_listings(store) and sum(len(part["length"]) for part in parts) == info.episodes:
            break
    if not names:
        raise DatasetError(f"No Parquet files in {store.where('meta/episodes')}, so the dataset has no episodes")
    columns = [key for key in (*needed, *optional) if all(key in part for part in parts)]
    table = {key: np.concatenate([part[key] for part in parts]) for key in columns}
    by_index = np.argsort(table["episode_index"], kind="stable")
    table = {key: values[by_index] for key, values in table.items()}
    _check_apart(
        table["episode_index"], np.repeat(np.arange(len(parts)), [len(p["length"]) for p in parts])[by_index], names, store
    )
    check_episodes(table, store.where("meta/episodes"), store, info)
    index, length = table["episode_index"], table["length"]
    zeros, never = np.zeros(len(index), np.int64), np.full(len(index), np.inf)
    video, start = {}, {}
    for camera in cameras:
        places = table[f"videos/{camera}/chunk_index"], table[f"videos/{camera}/file_index"]
        video[camera] = _files(video_path, *places, video_key=camera)
        start[camera] = table[f"videos/{camera}/from_timestamp"].astype(np.float64)
    return Episodes(
        index=index,
        length=length,
        first_row=table.get("dataset_from_index", np.cumsum(length) - length),
        data=_files(info.data_path, table.get("data/chunk_index", zeros), table.get("data/file_index", zeros)),
        video=video,
        start=start,
        stop={camera: _next_start(video[camera].index, start[camera]) for camera in cameras},
        to_timestamp={camera: table.get(f"videos/{camera}/to_timestamp", never).astype(np.float64) for camera in cameras},
        tables=names,
    )


def _table_files(store: Store) -> Iterable[str]:
    """Return the files of the episode table. Without listings (HTTP), each is requested when the iterator comes to it."""
    return parquet_files(store, "meta/episodes") if has_listings(store) else numbered_files("meta/episodes", store.exists)


def has_listings(store: Store) -> bool:
    """Return whether a store can list folders, which web servers cannot."""
    return store.listings or not store.remote


def _check_apart(index: npt.NDArray[np.int64], file: npt.NDArray[np.int64], names: list[str], store: Store) -> None:
    """Check that no two files of the episode table contain the same episode.

    Args:
        index: Episode index of each row of the table, sorted, shape (E,).
        file: Number of each row's file, shape (E,).
        names: Path of each file.
        store: Store of the files.

    Raises:
        DatasetError: If two files contain the same episode.
    """
    is_in_two = (np.diff(index) == 0) & (np.diff(file) != 0)
    if is_in_two.any():
        row = int(np.argmax(is_in_two))
        first, second = (store.where(names[number]) for number in file[row : row + 2])
        raise DatasetError(
            f"Invalid episode {index[row]} in {first}: it must be in one file, but {second} has it, too. Move the file that is "
            "a copy out of meta/episodes"
        )


def _next_start(file: npt.NDArray[np.int64], start: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the time in seconds at which the next episode of the same file begins, or infinity for the last one, shape (E,).

    Episodes that begin at the same time share their frames, so all of them end where the next later one begins.

    Args:
        file: Number of each episode's file, shape (E,).
        start: Seconds at which each episode begins in its file, shape (E,).
    """
    order = np.lexsort((start, file))
    files, starts = file[order], start[order]
    # `last_at_time` has the last of all episodes that begin at the same time in the same file. `following` has the first
    # episode after that one, which begins later in the same file, or is in the next file.
    last_at_time = np.flatnonzero(np.append((np.diff(files) != 0) | (np.diff(starts) != 0), True))
    following = last_at_time[np.searchsorted(last_at_time, np.arange(len(order)))] + 1
    in_file = np.append(files, -1)[following] == files
    stop = np.empty(len(order))
    stop[order] = np.where(in_file, np.append(starts, np.inf)[following], np.inf)
    return stop


def video_template(store: Store, info: Info) -> str:
    """Return `video_path`. Raises DatasetError if `info.json` has none."""
    if not info.video_path:
        raise DatasetError(f"Invalid video_path in {store.where(INFO)}: must be a path template for video features, got null")
    return info.video_path


def parquet_files(store: Store, folder: str) -> list[str]:
    """Return the paths of the Parquet files in the folders of a folder, `<folder>/*/*.parquet`, which is LeRobot's rule.

    Other files, such as backups, are no part of a dataset. Hidden files are left out with a note in the log.
    """
    depth = folder.count("/") + 2
    paths = [path for path in store.files(folder) if path.endswith(".parquet") and path.count("/") == depth]
    if hidden := [path for path in paths if "/." in path]:
        _log.info("%s and %d other hidden files are ignored", store.where(hidden[0]), len(hidden) - 1)
    return [path for path in paths if "/." not in path]


def read_episode_columns(store: Store, paths: Sequence[str], *, stats: bool) -> pa.Table:
    """Return all columns of the episode table, in increasing order of the episode index.

    Args:
        store: Store of the dataset.
        paths: Files of the table. See `Episodes.tables`.
        stats: Whether to include columns of statistics.

    Raises:
        DatasetError: If a file is broken.
    """
    parts = [read_parquet(store, path, lambda name: stats or not name.startswith("stats/")) for path in paths]
    return pa.concat_tables(parts, promote_options="default").sort_by("episode_index")


def read_names(store: Store, path: str, index: str) -> dict[int, str]:
    """Read a table of names such as `meta/tasks.parquet`.

    The names are the pandas index of the table. The index column may have any name. The pandas metadata contains this name.

    Args:
        store: Store of the dataset.
        path: Path to the file.
        index: Name of the column that contains the numbers, such as "task_index".

    Returns:
        {number: name}. Empty if the file does not exist.

    Raises:
        DatasetError: If the file cannot be read, or if a column is missing or has the wrong type.
    """
    if not store.exists(path):
        return {}
    table = read_parquet(store, path, row_bytes=0)
    try:
        stored = from_json((table.schema.metadata or {}).get(b"pandas", b"{}"))
        columns = [c for c in stored.get("index_columns", []) if isinstance(c, str)] if isinstance(stored, dict) else []
    except ValueError:
        columns = []
    names = [c for c in (*columns, "task", "subtask", "__index_level_0__") if c in table.column_names]
    if not names or index not in table.column_names:
        raise DatasetError(
            f"Invalid columns in {store.where(path)}: must be {index} and a column of names, got {table.column_names}"
        )
    with parquet_errors(store, path):  # only the conversion detects text that is not UTF-8
        pairs = dict(zip(table[index].to_pylist(), table[names[0]].to_pylist(), strict=True))
    if not all(isinstance(k, int) and isinstance(v, str) for k, v in pairs.items()):
        raise DatasetError(f"Invalid columns in {store.where(path)}: {index} must hold integers and {names[0]} strings")
    return pairs


def tasks_table(tasks: Mapping[int, str], name: str | None = "task") -> pa.Table:
    """Return the table of `meta/tasks.parquet` in the form that pandas writes.

    Args:
        tasks: Tasks {task_index: task}.
        name: Name of the pandas index, which contains the tasks, or None. Default: "task".
    """
    index = name or "__index_level_0__"
    column = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    level = {"name": name, "field_name": index, "pandas_type": "unicode", "numpy_type": "object"}
    label = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    described = {
        "index_columns": [index],
        "column_indexes": [{**label, "metadata": {"encoding": "UTF-8"}}],
        "columns": [{**column, "metadata": None}, {**level, "metadata": None}],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.0",
    }
    table = pa.table({"task_index": pa.array(tasks.keys(), pa.int64()), index: pa.array(tasks.values(), pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(described)})


def read_stats(store: Store) -> Stats:
    """Read `meta/stats.json`. Returns {} if the file does not exist. Raises DatasetError if it is broken."""
    if not store.exists(STATS):
        return {}
    try:
        return stats_of(read_json(store, STATS))
    except ValueError as error:
        raise DatasetError(f"Invalid statistics in {store.where(STATS)}: {error}") from error


def stats_of(values: Any) -> Stats:
    """Convert statistics from nested lists or arrays to arrays. Raises ValueError if they have another form."""
    try:
        return {key: {name: np.asarray(v) for name, v in statistics.items()} for key, statistics in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"must be {{key: {{statistic: numbers}}}} ({error})") from error


def read_json(store: Store, path: str) -> Any:
    """Read a JSON file of at most 64 MiB. Raises DatasetError if it is larger, empty or not valid JSON."""
    data = store.read(path, 0, _LARGEST_JSON + 1)
    if len(data) > _LARGEST_JSON:
        raise DatasetError(
            f"Invalid JSON in {store.where(path)}: must have at most {_LARGEST_JSON} bytes, got {store.size(path)}"
        )
    if pointer := lfs.pointer(data):
        raise DatasetError(f"{store.where(path)}: {pointer}")
    if not data.strip():
        raise DatasetError(f"{store.where(path)} is empty. Copy or fetch it again")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"Invalid JSON in {store.where(path)}: {error}. Fetch the file again") from None


def read_parquet(
    store: Store, path: str, keep: Callable[[str], bool] = lambda name: True, row_bytes: int = _ROW_BYTES
) -> pa.Table:
    """Read a Parquet file of `meta/` in pieces.

    A few bytes of a file may encode billions of values, so their memory is limited: 64 MiB, and `row_bytes` for each row.

    Args:
        store: Store of the dataset.
        path: Path of the file.
        keep: Function that returns whether to read a column, given its name. Default: all columns are read.
        row_bytes: Memory that each row may take in addition, in bytes. Default: 64 KiB.

    Raises:
        DatasetError: If the file is broken, or exceeds the limit.
    """
    with parquet_errors(store, path), _opened(store, path) as file:
        parquet = pq.ParquetFile(file, pre_buffer=True)
        fields = [field for field in parquet.schema_arrow if keep(field.name)]
        columns = list(zip(*_chunk_sizes(file), strict=True))
        values = [sum(count for count, _ in groups) for groups in columns]
        limit = _LARGEST_JSON + row_bytes * count_rows(parquet.metadata)
        # A piece has so few rows that it is small even if each of them has the largest value that the file can contain.
        largest = max((size for groups in columns for _, size in groups), default=0)
        rows = max(min(limit // 16 // max(largest, 1), _MOST_ROWS), 1)
        size, parts = 0, list[pa.RecordBatch]()
        if max(values, default=0) * _VALUE_BYTES <= limit:
            for batch in parquet.iter_batches(rows, columns=[field.name for field in fields], use_threads=False):
                size += batch.nbytes
                if size > limit:
                    break
                parts.append(batch)
            else:
                return pa.Table.from_batches(parts, pa.schema(fields, parquet.schema_arrow.metadata))
        raise ValueError(f"its {parquet.metadata.num_rows} rows must take at most {limit} bytes in memory")


def _chunk_sizes(file: Ranges | pa.BufferReader) -> list[list[tuple[int, int]]]:
    """Return the sizes of the columns of a Parquet file. See `chunk_sizes`. Raises ValueError if the footer is broken."""
    file.seek(-8, io.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    file.seek(-8 - length, io.SEEK_END)
    try:
        return chunk_sizes(bytes(file.read(length)))
    except (IndexError, KeyError) as error:
        raise ValueError("its footer is broken") from error


def count_rows(metadata: pq.FileMetaData) -> int:
    """Return the number of rows of all row groups. Raises ValueError if a row group has a negative number of rows."""
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(counts, default=0) < 0:
        raise ValueError(f"num_rows must not be negative, got {min(counts)}")
    return sum(counts)


def _opened(store: Store, path: str) -> Ranges | pa.BufferReader:
    """Open a file. A small one is read whole, which needs fewer requests."""
    return pa.BufferReader(store.read_all(path)) if store.size(path) <= SMALL else store.open(path)


class parquet_errors:
    """Context manager that converts pyarrow's errors for a broken file to a DatasetError with the name of the file."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        known = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError, TypeError)
        if isinstance(error, known) and not isinstance(error, (DatasetError, StorageError)):
            where = self._store.where(self._path)
            if pointer := lfs.pointer(self._store.read(self._path, 0, lfs.ENOUGH)):
                raise DatasetError(f"{where}: {pointer}") from None
            said = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise DatasetError(f"Invalid Parquet file {where}: {said}. Fetch or record it again") from None


_V3_FIELDS = {"video_key": "", "chunk_index": ":03d", "file_index": ":03d"}
_V2_FIELDS = {
    "video_key": "",
    "episode_chunk": ":03d",
    "chunk_index": ":03d",
    "episode_index": ":06d",
}  # LeRobot writes episode_chunk, and some other exporters write chunk_index


def _looks(store: Store) -> str:
    """Return text for messages about an `info.json` that is missing or has no version: the probable version, and advice."""
    if store.exists("meta/episodes.jsonl"):
        return f"It has meta/episodes.jsonl, so it looks like v2.x. Copy or fetch {INFO} again"
    if store.files("meta/episodes"):
        return f"It has meta/episodes/, so it looks like v3.0. Copy or fetch {INFO} again"
    return "It has neither meta/episodes/ (v3.0) nor meta/episodes.jsonl (v2.x). Give the folder that holds meta/"


def _object(value: Any, store: Store, name: str, path: str = INFO) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DatasetError(f"Invalid {name} in {store.where(path)}: must be a JSON object, got {type(value).__name__}")
    return value


def _fps(value: Any, store: Store) -> float:
    """Return the frame rate. It may be stored as text."""
    number: Any = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            number = int(number) if number.is_integer() else number
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= 100_000:
        raise DatasetError(f"Invalid fps in {store.where(INFO)}: must be above 0 and at most 100000, got {str(value)[:40]}")
    return number


def _count(value: Any, name: str, store: Store) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise DatasetError(f"Invalid {name} in {store.where(INFO)}: must be a nonnegative integer, got {str(value)[:40]}")
    return value


def _names_chunk(templates: str) -> bool:
    return "{episode_chunk" in templates or "{chunk_index" in templates


def _chunk(value: Any, store: Store) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise DatasetError(
            f"Invalid chunks_size in {store.where(INFO)}: must be the number of episodes in a chunk, got {str(value)[:40]}"
        )
    return value


def _left_out(key: str, feature: Any, store: Store) -> str:
    """Return the reason why a feature cannot be read, or "" if it can. Raises DatasetError if its entry is broken."""
    feature = _object(feature, store, f"feature {key[:80]!r}")
    dtype, shape = feature.get("dtype"), feature.get("shape")
    if dtype not in DTYPES:
        return f"has dtype {str(dtype)[:40]!r}, which is not read"
    if not isinstance(shape, list) or any(type(n) is int and n >= 1 << 31 for n in shape):
        raise DatasetError(
            f"Invalid shape of feature {key[:80]!r} in {store.where(INFO)}: must be a list of up to five positive integers, "
            f"got {str(shape)[:80]}"
        )
    if len(shape) > 5 or not all(type(n) is int and n > 0 for n in shape):
        return f"has shape {str(shape)[:80]}, and only up to five positive integers are read"
    if Feature(feature).is_camera and Feature(feature).is_depth:
        return "is a depth map of more than 8 bits, and cameras are decoded to 8 bits a channel, so it is not read"
    return ""


def _template(value: Any, name: str, fields: dict[str, str], store: Store) -> str:
    """Check a template of paths, and return it.

    Only plain integer formats are allowed, since others can produce gigabytes of padding. In v2.x, the template must contain
    the episode, and the template of videos must also contain the camera. Otherwise, episodes or cameras would share a file.

    Args:
        value: Template from `info.json`.
        name: Either "data_path" or "video_path".
        fields: Allowed fields, {name: format that the error message shows}.
        store: Store of the dataset.

    Raises:
        DatasetError: If the template is not allowed.
    """
    needed = {"episode_index", "video_key"} if name == "video_path" else {"episode_index"}
    try:
        if not isinstance(value, str):
            raise ValueError(f"must be text, got {type(value).__name__}")
        template_fields = [
            (key, form or "", conversion) for _, key, form, conversion in string.Formatter().parse(value) if key is not None
        ]
        for key, form, conversion in template_fields:
            plain = re.fullmatch("" if key == "video_key" else r"(0?\d{1,2}d?)?", form)
            if key not in fields or conversion or not plain:
                raise ValueError(f"unknown field {{{key}:{form}}}"[:80])
        lacking = sorted(needed & fields.keys() - {key for key, _, _ in template_fields}) if "episode_index" in fields else []
        if lacking:
            raise ValueError(f"missing field {{{lacking[0]}}}")
    except ValueError as error:
        allowed = ", ".join(f"{{{key}{form}}}" for key, form in fields.items())
        raise DatasetError(
            f"Invalid path template {name} in {store.where(INFO)}: {error}. Allowed fields: {allowed}"
        ) from error
    return value


def _numbers(store: Store, path: str, needed: list[str], optional: list[str], info: Info) -> dict[str, npt.NDArray[Any]]:
    """Read columns of numbers from a file of the episode table. Optional columns may be missing."""
    with parquet_errors(store, path), _opened(store, path) as file:
        parquet = pq.ParquetFile(file, pre_buffer=True)
        names = parquet.schema_arrow.names
        missing = [name for name in needed if name not in names]
        if missing:
            raise DatasetError(f"Missing column {missing[0]} in {store.where(path)}. A v3.0 dataset has it for each episode")
        rows = count_rows(parquet.metadata)
        if rows > (_FEW_ROWS if info.episodes is None else info.episodes):  # a few bytes may encode millions of rows
            raise _wrong_total("episodes", rows, store.where(path), info.episodes, store)
        wanted = [name for name in (*needed, *optional) if name in names]
        kinds = {name: parquet.schema_arrow.types[names.index(name)] for name in wanted}
        wrong = [name for name, kind in kinds.items() if not (pa.types.is_integer(kind) or pa.types.is_floating(kind))]
        if not wrong:  # only columns of numbers are sure to have one value per row
            table = parquet.read(columns=wanted, use_threads=False)
            wrong = [name for name in wanted if table[name].null_count]
        if wrong:
            raise DatasetError(f"Invalid column {wrong[0]} in {store.where(path)}: must hold a number for each episode")
        columns = {name: table[name].to_numpy() for name in wanted}
        where = store.where(path)
        return {n: v if n.endswith("timestamp") else _integers(v, n, kinds[n], where) for n, v in columns.items()}


def _wrong_total(unit: str, count: int, where: str, total: int | None, store: Store) -> DatasetError:
    return DatasetError(
        f"Invalid total_{unit} in {store.where(INFO)}: must be {count}, the number of {unit} in {where}, got {total}. "
        "A file is missing, or the dataset was edited by hand: copy or edit it again with LeRobot's tools"
    )


def _integers(values: npt.NDArray[Any], name: str, kind: pa.DataType, where: str) -> npt.NDArray[np.int64]:
    """Return numbers as int64. Raises DatasetError if a number is not whole, or if episodes are numbered by floats."""
    if name == "episode_index" and values.dtype.kind == "f":
        raise DatasetError(f"Invalid column {name} in {where}: must hold integers, got {kind}. Export the dataset again")
    with np.errstate(invalid="ignore"):
        cut = values.astype(np.int64)
    if (wrong := cut != values).any():
        raise DatasetError(f"Invalid column {name} in {where}: must hold integers, got {values[wrong][0]}")
    return cut


def check_episodes(table: Mapping[str, npt.NDArray[Any]], where: str, store: Store, info: Info) -> None:
    """Check the columns of an episode table, sorted by episode index, against each other and the totals of `info.json`.

    Args:
        table: Columns, with the names that they have in v3.0.
        where: Address of the file or folder of the table, for messages.
        store: Store of the dataset.
        info: Contents of `info.json`.

    Raises:
        DatasetError: If the table is empty, or if its numbers are invalid or contradict each other or the totals.
    """
    index, length = table["episode_index"], table["length"]

    def refuse(wrong: npt.NDArray[np.bool_], problem: str) -> None:
        if wrong.any():
            raise DatasetError(f"Invalid episode {index[np.argmax(wrong)]} in {where}: {problem}")

    if len(index) == 0:
        raise DatasetError(f"No episodes in {where}")
    refuse(np.append(False, np.diff(index) == 0) | (index < 0), "episode_index must be nonnegative and not duplicated")
    refuse((length < 1) | (length > 1 << 40), "length must be a positive number of frames")
    if "dataset_to_index" in table and "dataset_from_index" in table:
        promised = table["dataset_to_index"] - table["dataset_from_index"]
        refuse(promised != length, "length must be dataset_to_index - dataset_from_index")
    for name, values in table.items():
        if name.endswith(("chunk_index", "file_index")):
            refuse((values < 0) | (values > 1 << 40), f"{name} must be the number of a file")
        if name.endswith("timestamp"):
            refuse(~np.isfinite(values) | (np.abs(values) > 1e9), f"{name} must be a time in seconds")
        if name.endswith("/to_timestamp"):
            start = table[f"{name.removesuffix('to_timestamp')}from_timestamp"]
            refuse(values < start, f"{name} must not be less than from_timestamp")
    for unit, total, count in (("episodes", info.episodes, len(index)), ("frames", info.frames, int(length.sum()))):
        if total is not None and total != count:
            raise _wrong_total(unit, count, where, total, store)


def _files(template: str, chunk: npt.NDArray[np.int64], file: npt.NDArray[np.int64], video_key: str = "") -> Files:
    pairs, index = np.unique(np.stack([chunk, file], 1), axis=0, return_inverse=True)
    paths = [template.format(chunk_index=c, file_index=f, video_key=video_key) for c, f in pairs.tolist()]
    return Files(paths, index.reshape(-1))

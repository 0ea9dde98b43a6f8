"""Reader of the files in `meta/` of LeRobot v3.0, except `info.json`.

The format is described at https://huggingface.co/docs/lerobot/lerobot-dataset-v3 and in LeRobot's `datasets/utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dali_stream.checks.arrays import NONE
from dali_stream.checks.file_content import from_json
from dali_stream.errors import DatasetError
from dali_stream.lerobot.episode_table import Episodes, Files, check_episodes, wrong_total
from dali_stream.lerobot.file_names import numbered_files, parquet_files
from dali_stream.lerobot.info import Info, video_template
from dali_stream.lerobot.parquet import count_rows, opened, parquet_errors, read_parquet
from dali_stream.storage import Store

# Templates with which LeRobot writes data and videos. Those of a dataset are in its `info.json`.
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASKS = "meta/tasks.parquet"
SUBTASKS = "meta/subtasks.parquet"
_INTEGERS = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
_FEW_ROWS = 1 << 20  # maximum number of episodes of a dataset whose info.json has no total


def read_episodes(store: Store, info: Info, cameras: Iterable[str]) -> Episodes:
    """Read the episode table, without the columns of statistics and of other cameras.

    The columns that locate rows may be missing, since rows can be found by their `episode_index`. See `RowReader`. An episode
    may lack the numbers of a camera's file, and then has no video of it. See `Episodes.check_videos`.

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
        if not store.listings and sum(len(part["length"]) for part in parts) == info.episodes:
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
    has_video = {}
    for camera in cameras:
        has_video[camera] = np.all([table[f"videos/{camera}/{name}_index"] != NONE for name in ("chunk", "file")], 0)
        for name in {f"videos/{camera}/{end}_timestamp" for end in ("from", "to")} & table.keys():
            table[name] = np.where(has_video[camera], table[name].astype(np.float64), 0.0)
    check_episodes(table, store.where("meta/episodes"), store, info)
    index, length = table["episode_index"], table["length"]
    zeros, never = np.zeros(len(index), np.int64), np.full(len(index), np.inf)
    video, start = {}, {}
    for camera, exists in has_video.items():
        chunk, file = (table[f"videos/{camera}/{name}_index"][exists] for name in ("chunk", "file"))
        files, number = _files(video_path, chunk, file, video_key=camera), np.full(len(index), NONE)
        number[exists] = files.index
        video[camera], start[camera] = Files(files.paths, number), table[f"videos/{camera}/from_timestamp"]
    return Episodes(
        index=index,
        length=length,
        first_row=table.get("dataset_from_index", np.cumsum(length) - length),
        data=_files(info.data_path, table.get("data/chunk_index", zeros), table.get("data/file_index", zeros)),
        video=video,
        start=start,
        stop={camera: _next_start(video[camera].index, start[camera]) for camera in cameras},
        to_timestamp={camera: table.get(f"videos/{camera}/to_timestamp", never) for camera in cameras},
        tables=names,
    )


def _table_files(store: Store) -> Iterable[str]:
    """Return the files of the episode table. Without listings (HTTP), each is requested when the iterator comes to it."""
    return parquet_files(store, "meta/episodes") if store.listings else numbered_files("meta/episodes", store.exists)


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


def read_episode_columns(store: Store, paths: Sequence[str], *, stats: bool) -> pa.Table:
    """Return all columns of the episode table, in increasing order of the episode index.

    Args:
        store: Store of the dataset.
        paths: Files of the table. See `Episodes.tables`.
        stats: Whether to include columns of statistics.

    Raises:
        DatasetError: If a file is broken.
    """
    parts = [regular(read_parquet(store, path, lambda name: stats or not name.startswith("stats/"))) for path in paths]
    return pa.concat_tables(parts, promote_options="default").sort_by("episode_index")


def regular(part: pa.Table) -> pa.Table:
    """Return a part of the episode table with the types that LeRobot writes: int64 for integers, and double for times.

    pandas stores integers as double if one is missing. Columns that cannot be converted are left as they are.
    """
    for place, name in enumerate(part.column_names):
        kind = pa.int64() if name in _INTEGERS or name.endswith(("/chunk_index", "/file_index")) else pa.float64()
        if (kind == pa.int64() or name.endswith("_timestamp")) and part[name].type != kind:
            with suppress(pa.ArrowException):  # a camera that nobody reads may have other values
                column = part[name]
                if pa.types.is_floating(column.type):
                    column = pc.if_else(pc.is_nan(column), None, column)
                part = part.set_column(place, name, column.cast(kind))
    return part


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
    names = [c for c in (*_pandas_index(table), "task", "subtask", "__index_level_0__") if c in table.column_names]
    if not names or index not in table.column_names:
        raise DatasetError(
            f"Invalid columns in {store.where(path)}: must be {index} and a column of names, got {table.column_names}"
        )
    with parquet_errors(store, path):  # only the conversion detects text that is not UTF-8
        pairs = dict(zip(table[index].to_pylist(), table[names[0]].to_pylist(), strict=True))
    if not all(isinstance(k, int) and isinstance(v, str) for k, v in pairs.items()):
        raise DatasetError(f"Invalid columns in {store.where(path)}: {index} must hold integers and {names[0]} strings")
    return pairs


def has_regular_tasks(store: Store) -> bool:
    """Return whether LeRobot can read `meta/tasks.parquet`: the pandas index contains the names, and row n has task n."""
    if not store.exists(TASKS):
        return False
    table = read_parquet(store, TASKS, row_bytes=0)
    is_index = any(name in table.column_names for name in _pandas_index(table))
    return is_index and list(read_names(store, TASKS, "task_index")) == list(range(len(table)))


def _pandas_index(table: pa.Table) -> list[str]:
    """Return the columns that are the pandas index of a table, according to its metadata."""
    try:
        stored = from_json((table.schema.metadata or {}).get(b"pandas", b"{}"))
        return [c for c in stored.get("index_columns", []) if isinstance(c, str)] if isinstance(stored, dict) else []
    except ValueError:
        return []


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


def _numbers(store: Store, path: str, needed: list[str], optional: list[str], info: Info) -> dict[str, npt.NDArray[Any]]:
    """Read columns of numbers from a file of the episode table. Optional columns may be missing."""
    with parquet_errors(store, path), opened(store, path) as file:
        parquet = pq.ParquetFile(file, pre_buffer=True)
        names = parquet.schema_arrow.names
        missing = [name for name in needed if name not in names]
        if missing:
            raise DatasetError(f"Missing column {missing[0]} in {store.where(path)}. A v3.0 dataset has it for each episode")
        rows = count_rows(parquet.metadata)
        if rows > (_FEW_ROWS if info.episodes is None else info.episodes):  # a few bytes may encode millions of rows
            raise wrong_total("episodes", rows, store.where(path), info.episodes, store)
        wanted = [name for name in (*needed, *optional) if name in names]
        may_be_null = {name for name in wanted if name.startswith("videos/")}  # see `read_episodes`
        kinds = {name: parquet.schema_arrow.types[names.index(name)] for name in wanted}
        wrong = [
            name
            for name, kind in kinds.items()
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or (pa.types.is_null(kind) and name in may_be_null))
        ]
        if not wrong:  # only columns of numbers are sure to have one value per row
            table = parquet.read(columns=wanted, use_threads=False)
            wrong = [name for name in wanted if table[name].null_count and name not in may_be_null]
        if wrong:
            raise DatasetError(f"Invalid column {wrong[0]} in {store.where(path)}: must hold a number for each episode")
        columns = {name: table[name].to_numpy() for name in wanted}
        where = store.where(path)
        return {n: v.astype(float) if n.endswith("timestamp") else _integers(v, n, where) for n, v in columns.items()}


def _integers(values: npt.NDArray[Any], name: str, where: str) -> npt.NDArray[np.int64]:
    """Return numbers as int64, with `NONE` for missing ones of a video. Raise DatasetError if one is not an integer."""
    if name.startswith("videos/") and values.dtype.kind != "i":
        values = np.where(np.isnan(values.astype(float)), NONE, values)
    with np.errstate(invalid="ignore"):
        cut = values.astype(np.int64)
    if (wrong := cut != values).any():
        raise DatasetError(f"Invalid column {name} in {where}: must hold integers, got {values[wrong][0]}")
    return cut


def _files(template: str, chunk: npt.NDArray[np.int64], file: npt.NDArray[np.int64], video_key: str = "") -> Files:
    pairs, index = np.unique(np.stack([chunk, file], 1), axis=0, return_inverse=True)
    paths = [template.format(chunk_index=c, file_index=f, video_key=video_key) for c, f in pairs.tolist()]
    return Files(paths, index.reshape(-1))

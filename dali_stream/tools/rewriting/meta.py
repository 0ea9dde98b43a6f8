"""The files below `meta/`: those of the source as v3.0 has them, whichever version it is of, and those of the new dataset."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError
from dali_stream.lerobot import metadata, v2
from dali_stream.lerobot.metadata import Episodes
from dali_stream.lerobot.stats import table_stats
from dali_stream.tools.output.copy import episode_files, small_files
from dali_stream.tools.output.folder import Folder

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


@dataclass
class Layout:
    """Paths and changed metadata of the new dataset.

    Attributes:
        chunks_size: files per chunk folder.
        fps: Frames per second of the dataset.
        regular: Whether timestamps become frame_index / fps.
        columns: columns of the episode table with their new values, (E,) in the order of the table.
        moved: columns of times, with ticks per second and the ticks to add, (E,) each.
        info: new entries of info.json.
    """

    chunks_size: int
    fps: float
    regular: bool
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    moved: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def path(self, template: str, number: int, key: str = "") -> str:
        """The path of the n-th file."""
        chunk, file = divmod(number, self.chunks_size)
        return template.format(chunk_index=chunk, file_index=file, video_key=key)

    def put(self, prefix: str, number: npt.NDArray[np.int64]) -> None:
        """Sets the file of each episode."""
        chunk, file = np.divmod(number, self.chunks_size)  # new arrays: `number` may change
        self.columns |= {f"{prefix}chunk_index": chunk, f"{prefix}file_index": file}


def renewed(found: pa.Table, table: Episodes, layout: Layout) -> pa.Table:
    """Return a part of the episode table with the layout's values in its columns."""
    place = np.searchsorted(table.index, found["episode_index"].to_numpy())
    values = {name: column[place] for name, column in layout.columns.items() if name in found.column_names}
    for name, (clock, shift) in layout.moved.items():
        values[name] = _moved(_whole_episodes(found, name, layout.fps), clock[place], shift[place])
    columns = {name: pa.array(column) for name, column in values.items()}
    if layout.regular:
        columns |= _regular_columns(found, layout.fps)
    for name, array in columns.items():
        at = found.column_names.index(name)
        kind = found.schema.field(at)
        found = found.set_column(at, kind, array.cast(kind.type))
    return found


def _whole_episodes(found: pa.Table, name: str, fps: float) -> npt.NDArray[np.float64]:
    """Return a column of times, with each `to_timestamp` raised to the end of the episode's last frame."""
    seconds = found[name].to_numpy().astype(np.float64)
    if not name.endswith("/to_timestamp"):
        return seconds
    start = found[f"{name.removesuffix('to_timestamp')}from_timestamp"].to_numpy().astype(np.float64)
    end = start + found["length"].to_numpy() / fps
    return np.where(seconds < end - 0.5 / fps, end, seconds)


def _regular_columns(found: pa.Table, fps: float) -> dict[str, pa.Array]:
    """Return the columns of statistics of `timestamp`, where that is frame_index / fps."""
    stats = [regular_stats(length, fps) for length in found["length"].to_pylist()]
    prefix = "stats/timestamp/"
    names = [name.removeprefix(prefix) for name in found.column_names if name.startswith(prefix)]
    return {f"{prefix}{name}": pa.array([each[name].tolist() for each in stats]) for name in names if name in stats[0]}


def regular_stats(length: int, fps: float) -> dict[str, npt.NDArray[Any]]:
    """Return the statistics of the timestamps of an episode, where these are frame_index / fps."""
    seconds = (np.arange(length) / fps).astype(np.float32)
    return {name: np.asarray(value) for name, value in table_stats(seconds).items()}


def _moved(seconds: npt.NDArray[Any], clock: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Times moved by whole ticks. Times within rounding of a whole tick become one."""
    ticks = seconds.astype(np.float64) * clock
    whole = np.round(ticks)
    return (np.where(np.abs(ticks - whole) < 1e-3, whole, ticks) + shift) / clock


def write_episodes(folder: Folder, dataset: Dataset, table: Episodes, layout: Layout, file_size: int) -> None:
    """Writes the episode table: the source's parts, joined up to a size while their schema stays the same."""
    numbers, number, in_file = np.zeros(len(table.index), np.int64), -1, 0
    before, open_file = None, ExitStack()
    writer: Any = None
    with open_file:
        for found, size in episode_tables(dataset, table):
            if before is None or in_file + size > file_size or not found.schema.equals(before, check_metadata=True):
                open_file.close()
                number, in_file, before = number + 1, 0, found.schema
                path = f"{folder.stage.name}/{layout.path(EPISODES_PATH, number)}"
                out = open_file.enter_context(folder.writing(path))
                writer = open_file.enter_context(pq.ParquetWriter(out, before, write_page_index=True))
            in_file += size
            numbers[np.searchsorted(table.index, found["episode_index"].to_numpy())] = number
            layout.put("meta/episodes/", numbers)
            writer.write_table(renewed(found, table, layout), row_group_size=max(len(found), 1))


_log = logging.getLogger("dali_stream")
_EPISODES = 1000  # of v2.x, in one part of the episode table
_GONE = ("total_chunks", "total_videos")  # of info.json


def info(dataset: Dataset) -> dict[str, Any]:
    """info.json."""
    found: dict[str, Any] = metadata.read_json(dataset.store, metadata.INFO)
    if not dataset.is_v2:
        return found
    fps = int(dataset.fps) if dataset.fps == int(dataset.fps) else dataset.fps
    features = {key: each if each.get("dtype") == "video" else each | {"fps": fps} for key, each in found["features"].items()}
    rest = {key: value for key, value in found.items() if key not in _GONE}
    rest = {"total_tasks": len(dataset.tasks)} | rest  # without it, LeRobot reads no tasks
    return rest | {"codebase_version": "v3.0", "fps": fps, "features": features, "video_path": None}


def copied_files(dataset: Dataset, written: Collection[str]) -> list[str]:
    """Return the files that are copied unchanged, which excludes those in `written`."""
    replaced = {v2.EPISODES, v2.TASKS, v2.EPISODES_STATS, *written} if dataset.is_v2 else set(written)
    return [name for name in small_files(dataset.store) if name not in replaced]


def written_files(dataset: Dataset, regular: bool) -> dict[str, bytes]:
    """Return files that differ from the source's, with their content.

    These are tasks and statistics of v2.x, and statistics of timestamps that become `regular`.
    """
    files = {}
    if dataset.is_v2:
        tasks = io.BytesIO()
        pq.write_table(metadata.tasks_table(dict(sorted(dataset.tasks.items()))), tasks)
        files["meta/tasks.parquet"] = tasks.getvalue()
    if not regular and not (dataset.is_v2 and dataset.stored_stats_place == v2.EPISODES_STATS):
        return files
    stats = dict(dataset.stored_stats)
    if regular and "timestamp" in stats:
        parts = [{"timestamp": regular_stats(length, dataset.fps)} for length in dataset.table.length.tolist()]
        new = v2.aggregate(parts)["timestamp"]
        stats["timestamp"] = {name: new[name] for name in stats["timestamp"] if name in new}
    if stats:
        values = {key: {name: value.tolist() for name, value in of.items()} for key, of in stats.items()}
        files[metadata.STATS] = json.dumps(values, indent=4).encode()
    return files


def episode_tables(dataset: Dataset, table: Episodes) -> Iterator[tuple[pa.Table, int]]:
    """The episode table in parts, each with its bytes as encoded; `table` has all cameras.

    For v2.x, columns that depend on the new files are 0, and `Layout` has their values.
    """
    if not dataset.is_v2:
        for name in episode_files(dataset.store):
            yield metadata.read_parquet(dataset.store, name), dataset.store.size(name)
        return
    lines = {entry["episode_index"]: entry for _, entry in v2.read_lines(dataset.store, v2.EPISODES)}
    stats = v2.read_episode_stats(dataset.store) if dataset.stored_stats_place == v2.EPISODES_STATS else {}
    kinds, own = _kinds(stats), _own_columns(dataset, [lines[episode] for episode in table.index.tolist()])
    cameras = [f"videos/{camera}/{end}" for camera in table.video for end in ("chunk_index", "file_index")]
    times = [f"videos/{camera}/{end}" for camera in table.video for end in ("from_timestamp", "to_timestamp")]
    indices = ["data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index", *cameras]
    for at in range(0, len(table.index), _EPISODES):
        index = table.index[at : at + _EPISODES]
        columns: dict[str, Any] = {
            "episode_index": index,
            "tasks": pa.array([_tasks(dataset, lines[e]) for e in index.tolist()], pa.list_(pa.string())),
            "length": table.length[at : at + _EPISODES],
            **{name: np.zeros(len(index), np.int64) for name in indices},
            **{name: np.zeros(len(index), np.float64) for name in times},
        }
        columns |= {name: values.slice(at, len(index)) for name, values in own.items() if name not in columns}
        for (key, name), kind in kinds.items():
            values = [stats.get(episode, {}).get(key, {}).get(name) for episode in index.tolist()]
            columns[f"stats/{key}/{name}"] = _nested(dataset, values, kind, key, name)
        columns |= {f"meta/episodes/{end}": np.zeros(len(index), np.int64) for end in ("chunk_index", "file_index")}
        encoded = io.BytesIO()
        pq.write_table(pa.table(columns), encoded)
        yield pq.read_table(encoded), encoded.getbuffer().nbytes  # with the types that the new file will have


def _own_columns(dataset: Dataset, entries: list[dict[str, Any]]) -> dict[str, pa.Array]:
    """What the episodes have beside what the format asks for, such as annotations of their parts."""
    columns = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        try:
            values = pa.array([entry.get(name) for entry in entries])
            pq.write_table(pa.table({name: values}), io.BytesIO())  # not every type can be written
            columns[name] = values
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            where = dataset.store.where(v2.EPISODES)
            _log.warning("%s: %.80r cannot be a column (%s), so the new episode table lacks it", where, name, error)
    return columns


def _tasks(dataset: Dataset, entry: dict[str, Any]) -> list[str]:
    tasks = entry.get("tasks", [])
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise DatasetError(
            f"{dataset.store.where(v2.EPISODES)}: episode {entry['episode_index']}: tasks is {str(tasks)[:40]}; it is a list "
            "of texts"
        )
    return tasks


def _kinds(stats: dict[int, metadata.Stats]) -> dict[tuple[str, str], pa.DataType]:
    """The Arrow type of each statistic: lists of numbers, nested as in the first episode that has it."""
    kinds: dict[tuple[str, str], pa.DataType] = {}
    for found in stats.values():
        for key, of in found.items():
            for name, values in of.items():
                if (key, name) not in kinds:
                    kind = pa.int64() if name == "count" else pa.float64()
                    for _ in range(values.ndim):
                        kind = pa.list_(kind)
                    kinds[key, name] = kind
    return kinds


def _nested(dataset: Dataset, values: list[Any], kind: pa.DataType, key: str, name: str) -> pa.Array:
    number = np.int64 if name == "count" else np.float64
    try:
        return pa.array([None if each is None else each.astype(number).tolist() for each in values], kind)
    except (pa.ArrowException, ValueError, TypeError) as error:
        where = dataset.store.where(v2.EPISODES_STATS)
        raise DatasetError(f"{where}: {name} of {key} has another kind or shape in some episodes: {error}") from error

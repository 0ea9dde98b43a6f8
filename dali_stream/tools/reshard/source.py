"""The source's files below `meta/` as v3.0 has them, whichever version it is of."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError
from dali_stream.lerobot import metadata, v2
from dali_stream.lerobot.metadata import Episodes
from dali_stream.tools.output.copy import episode_files, small_files

_EPISODES = 1000  # of v2.x, in one part of the episode table
_GONE = ("total_chunks", "total_videos")  # of info.json


def is_v2(dataset: Dataset) -> bool:
    """Whether it is of v2.0 or v2.1, and so is converted."""
    return dataset.version.startswith("v2.")


def info(dataset: Dataset) -> dict[str, Any]:
    """info.json."""
    found: dict[str, Any] = metadata.read_json(dataset.store, metadata.INFO)
    if not is_v2(dataset):
        return found
    fps = int(dataset.fps) if dataset.fps == int(dataset.fps) else dataset.fps
    features = {key: each if each.get("dtype") == "video" else each | {"fps": fps} for key, each in found["features"].items()}
    rest = {key: value for key, value in found.items() if key not in _GONE}
    rest = {"total_tasks": len(dataset.tasks)} | rest  # without it, LeRobot reads no tasks
    return rest | {"codebase_version": "v3.0", "fps": fps, "features": features, "video_path": None}


def copied_files(dataset: Dataset) -> list[str]:
    """Files that are copied as they are."""
    replaced = {v2.EPISODES, v2.TASKS, v2.EPISODES_STATS, *written_files(dataset)} if is_v2(dataset) else set()
    return [name for name in small_files(dataset.store) if name not in replaced]


def written_files(dataset: Dataset) -> dict[str, bytes]:
    """Files that v3.0 has instead of those of v2.x, and what is in them: tasks, and statistics that are kept by episode."""
    if not is_v2(dataset):
        return {}
    tasks = io.BytesIO()
    pq.write_table(metadata.tasks_table(dict(sorted(dataset.tasks.items()))), tasks)
    files = {"meta/tasks.parquet": tasks.getvalue()}
    if dataset.stored_stats_place == v2.EPISODES_STATS:
        stats = {key: {name: values.tolist() for name, values in of.items()} for key, of in dataset.stored_stats.items()}
        files[metadata.STATS] = json.dumps(stats, indent=4).encode()
    return files


def episode_tables(dataset: Dataset, table: Episodes) -> Iterator[tuple[pa.Table, int]]:
    """The episode table in parts, each with its bytes as encoded; `table` has all cameras.

    That of v2.x lacks what only the new files determine: the values are 0 where `Layout` has others.
    """
    if not is_v2(dataset):
        for name in episode_files(dataset.store):
            yield metadata.read_parquet(dataset.store, name), dataset.store.size(name)
        return
    lines = {entry["episode_index"]: entry for _, entry in v2.read_lines(dataset.store, v2.EPISODES)}
    stats = v2.read_episode_stats(dataset.store) if dataset.stored_stats_place == v2.EPISODES_STATS else {}
    kinds = _kinds(stats)
    cameras = [f"videos/{camera}/{end}" for camera in table.video for end in ("chunk_index", "file_index")]
    times = [f"videos/{camera}/{end}" for camera in table.video for end in ("from_timestamp", "to_timestamp")]
    indices = ["data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index", *cameras]
    for at in range(0, len(table.index), _EPISODES):
        index = table.index[at : at + _EPISODES]
        columns: dict[str, Any] = {
            "episode_index": index,
            "tasks": pa.array([_tasks(dataset, lines[e]) for e in index.tolist()], pa.list_(pa.field("element", pa.string()))),
            "length": table.length[at : at + _EPISODES],
            **{name: np.zeros(len(index), np.int64) for name in indices},
            **{name: np.zeros(len(index), np.float64) for name in times},
        }
        for (key, name), kind in kinds.items():
            values = [stats.get(episode, {}).get(key, {}).get(name) for episode in index.tolist()]
            columns[f"stats/{key}/{name}"] = _nested(dataset, values, kind, f"{name} of {key}")
        columns |= {f"meta/episodes/{end}": np.zeros(len(index), np.int64) for end in ("chunk_index", "file_index")}
        part = pa.table(columns)
        yield part, part.nbytes


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
                        kind = pa.list_(pa.field("element", kind))
                    kinds[key, name] = kind
    return kinds


def _number(kind: pa.DataType) -> pa.DataType:
    return _number(kind.value_type) if pa.types.is_list(kind) else kind


def _nested(dataset: Dataset, values: list[Any], kind: pa.DataType, what: str) -> pa.Array:
    try:
        number = np.int64 if pa.types.is_integer(_number(kind)) else np.float64
        return pa.array([None if each is None else each.astype(number).tolist() for each in values], kind)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DatasetError(
            f"{dataset.store.where(v2.EPISODES_STATS)}: {what} differs in kind between episodes: {error}"
        ) from error

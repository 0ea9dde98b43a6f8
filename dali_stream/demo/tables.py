"""Parquet and JSON files of the demo, in the layout of LeRobot v3.0.

The data files and the video files of each camera start at different episodes, so a reader that confuses their numbers fails:

    episode   0   1   2   3   4   5   6   7   8   9  ...
    data     |           |                   |           from 3, every 5
    top      |       |           |       |               from 2 and 5, every 5
    side     |   |           |       |           |       from 1 and 4, every 5
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.demo import render, scene
from dali_stream.lerobot import stats, v3

CHUNKS_SIZE = 1000

# An episode starts a new file if its index modulo 5 is one of these. Except at episode 0, no two kinds of files start at the
# same episode.
_PERIOD = 5
_DATA_CUTS = (3,)
VIDEO_CUTS = dict(zip(render.CAMERAS, ((0, 2), (1, 4)), strict=True))
_VECTOR_NAMES: dict[str, list[str]] = {
    "observation.state": list(scene.STATE_NAMES),
    "action": list(scene.ACTION_NAMES),
    "observation.object_positions": ["block", "axis"],
    "observation.object_yaws": list(scene.COLOURS),
}

Histograms = dict[tuple[str, int], tuple[np.ndarray, int]]


def file_numbers(episodes: int, cuts: tuple[int, ...]) -> list[int]:
    """Return the file number of each episode. A file starts at an episode whose index modulo 5 is one of `cuts`."""
    begins = [episode > 0 and episode % _PERIOD in cuts for episode in range(episodes)]
    return np.cumsum(begins, dtype=int).tolist()


def write_tables(
    root: Path, recorded: list[scene.Episode], size: tuple[int, int], codec: str, fps: int, histograms: Histograms
) -> None:
    """Write all Parquet and JSON files.

    Args:
        root: Folder of the dataset.
        recorded: Episodes, in the order of their indices.
        size: Size (height, width) of the frames in pixels.
        codec: Codec of the videos, for `info.json`.
        fps: Frames per second.
        histograms: Histograms of the frames, {(camera, episode): histogram}.
    """
    tasks = list(dict.fromkeys(episode.task for episode in recorded))  # numbered by first use, as LeRobot does
    starts = np.cumsum([0, *map(len, recorded)]).tolist()
    rows = [_rows(episode, i, starts[i], tasks.index(episode.task), fps) for i, episode in enumerate(recorded)]
    _write_data(root, rows)
    path = root / v3.EPISODES_PATH.format(**place(0))
    path.parent.mkdir(parents=True)
    pq.write_table(v3.tasks_table(dict(enumerate(tasks)), name=None), root / "meta/tasks.parquet")
    entries = _episode_entries(recorded, starts, fps)
    for i, entry in enumerate(entries):
        episode_stats = {key: stats.table_stats(values) for key, values in rows[i].items()}
        episode_stats |= {camera: stats.image_stats([histograms[camera, i]]) for camera in render.CAMERAS}
        entry |= {f"stats/{key}/{name}": value for key, one in episode_stats.items() for name, value in one.items()}
        entry |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
    pq.write_table(pa.Table.from_pylist(entries), path)
    overall = {key: stats.table_stats(np.concatenate([row[key] for row in rows])) for key in rows[0]}
    for camera in render.CAMERAS:
        overall[camera] = stats.image_stats([histograms[camera, i] for i in range(len(recorded))])
    _write_json(root / "meta/stats.json", overall)
    _write_json(root / "meta/info.json", _info(rows, len(tasks), size, codec, fps))


def _rows(episode: scene.Episode, index: int, start: int, task_index: int, fps: int) -> dict[str, np.ndarray]:
    """Return the columns of an episode, each of shape (T, ...), in the order in which they are written."""
    frames = np.arange(len(episode), dtype=np.int64)
    return {
        "observation.state": episode.state,
        "action": episode.action,
        "observation.object_positions": episode.block_positions,
        "observation.object_yaws": episode.block_yaws,
        "next.reward": episode.reward,
        "next.done": episode.done,
        "timestamp": (frames / fps).astype(np.float32),
        "frame_index": frames,
        "episode_index": np.full_like(frames, index),
        "index": start + frames,
        "task_index": np.full_like(frames, task_index),
    }


def _write_data(root: Path, rows: list[dict[str, np.ndarray]]) -> None:
    """Write the data files, with one row group per episode."""
    schema = pa.schema([(key, _arrow_type(values)) for key, values in rows[0].items()])
    numbers = file_numbers(len(rows), _DATA_CUTS)
    for number, held in groupby(range(len(rows)), key=numbers.__getitem__):
        path = root / v3.DATA_PATH.format(**place(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, schema) as writer:
            for columns in (rows[episode] for episode in held):
                arrays = [pa.array(columns[name].tolist(), schema.field(name).type) for name in schema.names]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _arrow_type(values: np.ndarray) -> pa.DataType:
    """Return the type of a column as in LeRobot: a number, a fixed-size list for a vector, or nested lists for a matrix."""
    kind = pa.from_numpy_dtype(values.dtype)
    if values.ndim == 2:
        return pa.list_(kind, values.shape[1])
    for _ in values.shape[1:]:
        kind = pa.list_(kind)
    return kind


def _episode_entries(recorded: list[scene.Episode], starts: list[int], fps: int) -> list[dict[str, Any]]:
    """Return the rows of meta/episodes without statistics."""
    data_files = file_numbers(len(recorded), _DATA_CUTS)
    entries: list[dict[str, Any]] = []
    for i, episode in enumerate(recorded):
        entry: dict[str, Any] = {"episode_index": i, "tasks": [episode.task], "length": len(episode)}
        entry |= place(data_files[i], "data/")
        entry |= {"dataset_from_index": starts[i], "dataset_to_index": starts[i + 1]}
        entries.append(entry)
    for camera, cuts in VIDEO_CUTS.items():
        files = file_numbers(len(recorded), cuts)
        begin = 0
        for i, (entry, number) in enumerate(zip(entries, files, strict=True)):
            if i and number != files[i - 1]:
                begin = starts[i]  # times are counted from the first episode of a file
            entry |= place(number, f"videos/{camera}/")
            entry[f"videos/{camera}/from_timestamp"] = (starts[i] - begin) / fps
            entry[f"videos/{camera}/to_timestamp"] = (starts[i + 1] - begin) / fps
    return entries


def _info(rows: list[dict[str, np.ndarray]], tasks: int, size: tuple[int, int], codec: str, fps: int) -> dict[str, Any]:
    """Return the contents of meta/info.json."""
    image = {
        "video.height": size[0],
        "video.width": size[1],
        "video.codec": codec,
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }
    video = {"dtype": "video", "shape": [*size, 3], "names": ["height", "width", "channels"], "info": image}
    features: dict[str, Any] = dict.fromkeys(render.CAMERAS, video)
    for key, values in rows[0].items():
        shape = list(values.shape[1:]) or [1]
        features[key] = {"dtype": str(values.dtype), "shape": shape, "names": _VECTOR_NAMES.get(key)}
    return {
        "codebase_version": "v3.0",
        "robot_type": "simulated_pusher",
        "total_episodes": len(rows),
        "total_frames": sum(len(row["index"]) for row in rows),
        "total_tasks": tasks,
        "chunks_size": CHUNKS_SIZE,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{len(rows)}"},
        "data_path": v3.DATA_PATH,
        "video_path": v3.VIDEO_PATH,
        "features": features,
    }


def place(number: int, prefix: str = "") -> dict[str, int]:
    """Return the chunk index and the file index of a file number. `prefix` is prepended to their keys."""
    chunk, file = divmod(number, CHUNKS_SIZE)
    return {f"{prefix}chunk_index": chunk, f"{prefix}file_index": file}


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=4), encoding="utf-8")

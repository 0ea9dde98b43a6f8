"""Write a dataset of the size of DROID in the layout of LeRobot 0.6.1, with 3 cameras, 15 frames/s and all statistics.

Data files have up to 100 MB, and a row group per episode. All videos are hard links to one MP4 of 70,000 frames, so that 76,000
episodes (20 million frames) take 7 GB. Frames therefore cannot be identified. The dataset is suitable for measuring cost, but
not for checking correctness.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS, FRAMES, SIZE = 15, 70_000, 64
CAMERAS = [f"observation.images.{name}" for name in ("exterior_1_left", "exterior_2_left", "wrist_left")]
NUMBERS = ("frame_index", "episode_index", "index", "task_index")
VECTORS = ("observation.state", "action")
STATISTICS = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")
DATA_FILE, ROW, META_FILE = 100e6, 82, 66e6  # sizes in bytes
PATH = "data/chunk-{:03d}/file-{:03d}.parquet"
VIDEO = "videos/{}/chunk-{:03d}/file-{:03d}.mp4"


def write(root: Path, episodes: int) -> Path:
    """Write a dataset unless it exists. Return its root."""
    if (root / "meta/stats.json").exists():
        return root
    rng = np.random.default_rng(episodes)
    length = np.clip(rng.lognormal(np.log(235), 0.5, episodes), 40, 1200).astype(np.int64)
    first, task = np.cumsum(length) - length, rng.integers(0, min(episodes, 31_000), episodes)
    video, start = _packed(length, FRAMES)
    data, _ = _packed(length * ROW, int(DATA_FILE))
    for camera in CAMERAS:
        for file in range(int(video[-1]) + 1):
            path = root / VIDEO.format(camera, file // 1000, file % 1000)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(_video(root.parent), path)
    for file in range(int(data[-1]) + 1):
        _write_rows(root / PATH.format(file // 1000, file % 1000), np.flatnonzero(data == file), length, first, task)
    places = {"length": length, "dataset_from_index": first, "dataset_to_index": first + length}
    places |= {"data/chunk_index": data // 1000, "data/file_index": data % 1000}
    for camera in CAMERAS:
        places |= {f"videos/{camera}/chunk_index": video // 1000, f"videos/{camera}/file_index": video % 1000}
        places |= {f"videos/{camera}/from_timestamp": start / FPS, f"videos/{camera}/to_timestamp": (start + length) / FPS}
    _write_episodes(root / "meta/episodes/chunk-000", places, task)
    tasks = pa.array([_task(i) for i in range(int(task.max()) + 1)])
    pq.write_table(pa.table({"task_index": np.arange(len(tasks)), "task": tasks}), root / "meta/tasks.parquet")
    (root / "meta/info.json").write_text(json.dumps(_info(episodes, int(length.sum()), len(tasks))))
    (root / "meta/stats.json").write_text("{}")
    return root


def _packed(sizes: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign episodes to files of a size of up to `most`. Return the file of each episode, and its offset in the file."""
    file, begin = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    number = used = 0
    for episode, size in enumerate(sizes.tolist()):
        if used + size > most:
            number, used = number + 1, 0
        file[episode], begin[episode] = number, used
        used += size
    return file, begin


def _video(folder: Path) -> Path:
    """Write the MP4 of all cameras unless it exists: AV1 with GOPs of 2, joined from ten parts as in LeRobot."""
    video = folder / "video.mp4"
    if not video.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part, parts, log = folder / "part.mp4", folder / "parts.txt", ["ffmpeg", "-nostdin", "-loglevel", "error", "-y"]
        noise = f"testsrc2=size={SIZE}x{SIZE}:rate={FPS},noise=alls=20:allf=t"
        encode = ["-frames:v", str(FRAMES // 10), "-c:v", "libsvtav1", "-preset", "12", "-crf", "35", "-g", "2"]
        scale = ["-pix_fmt", "yuv420p", "-video_track_timescale", "15360"]
        subprocess.run([*log, "-f", "lavfi", "-i", noise, *encode, *scale, str(part)], check=True)
        parts.write_text("file part.mp4\n" * 10)
        joined = ["-f", "concat", "-i", str(parts), "-c", "copy", "-movflags", "+faststart"]
        subprocess.run([*log, *joined, str(video)], check=True)
    return video


def _write_rows(path: Path, episodes: np.ndarray, length: np.ndarray, first: np.ndarray, task: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
    tables = [_rows(int(e), int(length[e]), int(first[e]), int(task[e]), noise) for e in episodes]
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def _rows(episode: int, length: int, first: int, task: int, noise: np.ndarray) -> pa.Table:
    frame, begin = np.arange(length), first % (len(noise) - 16 * length)
    vectors = np.split(noise[begin : begin + 16 * length], 2)
    columns = {key: pa.FixedSizeListArray.from_arrays(pa.array(v), 8) for key, v in zip(VECTORS, vectors, strict=True)}
    numbers = dict(zip(NUMBERS, (frame, frame * 0 + episode, first + frame, frame * 0 + task), strict=True))
    return pa.table(columns | {"timestamp": (frame / FPS).astype(np.float32)} | numbers)


def _write_episodes(folder: Path, places: dict[str, np.ndarray], task: np.ndarray) -> None:
    folder.mkdir(parents=True)
    writer, file = None, 0
    for begin in range(0, len(task), 10):  # a row group has 10 episodes
        index = np.arange(begin, min(begin + 10, len(task)))
        columns: dict[str, Any] = {"episode_index": index, "tasks": [[_task(i)] for i in task[index].tolist()]}
        columns |= {key: values[index] for key, values in places.items()}
        for key in (*VECTORS, "timestamp", *NUMBERS, *CAMERAS):
            values = np.random.default_rng(begin).normal(size=(len(index), 8 if key in VECTORS else 3 if key in CAMERAS else 1))
            nested = values[..., None, None] if key in CAMERAS else values
            columns |= {f"stats/{key}/{name}": nested.tolist() for name in STATISTICS}
            columns[f"stats/{key}/count"] = places["length"][index][:, None].tolist()
        columns |= {"meta/episodes/chunk_index": index * 0, "meta/episodes/file_index": index * 0 + file}
        table, path = pa.table(columns), folder / f"file-{file:03d}.parquet"
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
        if path.stat().st_size > META_FILE:  # the footer, which is written at the end, has half of this size
            writer.close()
            writer, file = None, file + 1
    if writer:
        writer.close()


def _task(number: int) -> str:
    return f"do task number {number} with the object on the table"


def _info(episodes: int, frames: int, tasks: int) -> dict[str, Any]:
    video = {"dtype": "video", "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channels"]}
    features: dict[str, Any] = {key: {"dtype": "float32", "shape": [8]} for key in VECTORS}
    features |= dict.fromkeys(CAMERAS, video) | {"timestamp": {"dtype": "float32", "shape": [1]}}
    features |= {key: {"dtype": "int64", "shape": [1]} for key in NUMBERS}
    return {
        "codebase_version": "v3.0",
        "fps": FPS,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features,
    }

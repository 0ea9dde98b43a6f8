"""Write the metadata of a dataset with any number of episodes. The dataset can be opened, but has no rows and no videos."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH, FPS = 100, 20  # frames per episode, and per second
CAMERA = "observation.images.top"
IN_FILE, IN_CHUNK = 100, 1000  # episodes per file, and files per chunk


def write_metadata(root: Path, episodes: int) -> Path:
    """Write `meta/` in the format LeRobot v3.0. Return the root of the dataset."""
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(_episodes(episodes), root / "meta/episodes/chunk-000/file-000.parquet", row_group_size=100_000)
    (root / "meta/info.json").write_text(json.dumps(_info(episodes)))
    return root


def _episodes(episodes: int) -> pa.Table:
    index = np.arange(episodes)
    columns = {"episode_index": index, "length": np.full(episodes, LENGTH)}
    columns |= {"dataset_from_index": index * LENGTH, "dataset_to_index": (index + 1) * LENGTH}
    for prefix in ("data", f"videos/{CAMERA}"):
        columns[f"{prefix}/chunk_index"], columns[f"{prefix}/file_index"] = np.divmod(index // IN_FILE, IN_CHUNK)
    begin = index % IN_FILE * (LENGTH / FPS)
    columns[f"videos/{CAMERA}/from_timestamp"], columns[f"videos/{CAMERA}/to_timestamp"] = begin, begin + LENGTH / FPS
    return pa.table(columns)


def _info(episodes: int) -> dict[str, object]:
    numbers = {key: {"dtype": "int64", "shape": [1]} for key in ("frame_index", "episode_index", "index", "task_index")}
    vectors = {key: {"dtype": "float32", "shape": [14]} for key in ("observation.state", "action")}
    picture = {"dtype": "video", "shape": [480, 640, 3], "info": {"video.codec": "av1", "video.pix_fmt": "yuv420p"}}
    return {
        "codebase_version": "v3.0",
        "fps": FPS,
        "total_episodes": episodes,
        "total_frames": episodes * LENGTH,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {CAMERA: picture, "timestamp": {"dtype": "float32", "shape": [1]}, **numbers, **vectors},
    }

"""Reads a dataset of v3.0 as LeRobot 0.6.1 does, step by step, and refuses what LeRobot refuses. LeRobot is not needed.

The steps are those of `DatasetInfo`, `load_episodes`, `load_tasks`, `DatasetReader` and `decode_video_frames_torchcodec`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchcodec.decoders import VideoDecoder

from support.videos import identities

TOLERANCE_S = 1e-4  # default of LeRobotDataset


def read(root: Path) -> dict[int, dict[str, Any]]:
    """Return {index: row}, with the frame of each camera as uint8, (3, H, W), and the text of the task."""
    info = json.loads((root / "meta/info.json").read_text())
    episodes = pa.concat_tables(map(pq.read_table, sorted(root.glob("meta/episodes/*/*.parquet")))).to_pylist()
    assert [episode["episode_index"] for episode in episodes] == list(range(info["total_episodes"])), "found by their place"
    table = pq.read_table(root / "meta/tasks.parquet")
    [name] = table.schema.pandas_metadata["index_columns"]
    tasks = table[name].to_pylist()
    assert len(tasks) == info["total_tasks"]
    rows = pa.concat_tables(_cast(pq.read_table(path), info) for path in sorted(root.glob("data/*/*.parquet"))).to_pylist()
    assert len(rows) == info["total_frames"]
    cameras = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    decoders = {path: VideoDecoder(path, seek_mode="approximate") for path in root.glob("videos/**/*.mp4")}
    for place, row in enumerate(rows):
        episode = episodes[row["episode_index"]]
        assert row["index"] == place, "windows are found by their place"
        assert episode["dataset_from_index"] <= place < episode["dataset_to_index"]
        assert row["frame_index"] == place - episode["dataset_from_index"]
        assert (root / info["data_path"].format(**_place(episode, "data"))).exists()
        row["task"] = tasks[row["task_index"]]
        for camera in cameras:
            path = root / info["video_path"].format(video_key=camera, **_place(episode, f"videos/{camera}"))
            row[camera] = _frame(decoders[path], episode[f"videos/{camera}/from_timestamp"] + row["timestamp"])
    return {row["index"]: row for row in rows}


def delivered(root: Path, camera: str) -> dict[int, tuple[int, int]]:
    """{index of each row: episode and frame that its pixels show}, as LeRobot reads them."""
    return {index: identities(row[camera][None])[0] for index, row in read(root).items()}


def _cast(table: pa.Table, info: dict[str, Any]) -> pa.Table:
    """Cast rows to the features of info.json, as the library `datasets` does, which refuses columns without a feature."""
    features = {key: feature for key, feature in info["features"].items() if feature["dtype"] != "video"}
    assert set(table.column_names) == features.keys()
    for place, (key, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if features[key]["shape"] == [1] and features[key]["dtype"] not in ("image", "language"):
            table = table.set_column(place, key, column.cast(pa.type_for_alias(features[key]["dtype"])))
    return table


def _place(episode: dict[str, Any], prefix: str) -> dict[str, int]:
    return {name: episode[f"{prefix}/{name}"] for name in ("chunk_index", "file_index")}


def _frame(decoder: VideoDecoder, seconds: float) -> torch.Tensor:
    fps = decoder.metadata.average_fps
    assert fps is not None
    frames = decoder.get_frames_at(indices=[round(seconds * fps)])
    distance = abs(torch.tensor([seconds]) - torch.tensor([frames.pts_seconds[0].item()]))
    assert distance < TOLERANCE_S, f"the frame for {seconds} s is {distance.item()} s away"
    frame: torch.Tensor = frames.data[0]
    np.testing.assert_equal(frame.dtype, torch.uint8)
    return frame

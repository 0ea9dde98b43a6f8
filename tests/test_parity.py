"""Batches against a slow reader that follows LeRobotDataset 0.4.4 line by line: same keys, dtypes, shapes, every value.

The reference knows nothing of this package: pyarrow for rows, torchcodec on whole files, `default_collate` for batches.
`parity_with_lerobot.py` does the same with LeRobot itself, where that is installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from support.datasets import ODD_CAMERA, SIDE, TOP, Column, build, read_rows
from support.videos import one_file_each
from torch.utils.data import default_collate
from torchcodec.decoders import VideoDecoder

from dali_stream import Dataset, Loader

Item = dict[str, Any]


class Reference:
    """`LeRobotDataset.__getitem__` in plain Python."""

    def __init__(self, root: Path, deltas: dict[str, list[float]] | None) -> None:
        self.root, self.info = root, json.loads((root / "meta/info.json").read_text())
        self.fps, self.features = self.info["fps"], self.info["features"]
        self.deltas = {key: [round(delta * self.fps) for delta in values] for key, values in (deltas or {}).items()}
        self.rows = read_rows(root)
        self.episodes = pq.read_table(root / "meta/episodes").to_pylist()
        self.tasks, self.subtasks = self.names("task"), self.names("subtask")
        self.decoder = functools.cache(lambda path: VideoDecoder(path, seek_mode="approximate"))

    def names(self, kind: str) -> list[str]:
        path = self.root / f"meta/{kind}s.parquet"
        if not path.exists():
            return []
        columns = pq.read_table(path).to_pydict()
        [names] = (values for key, values in columns.items() if key != f"{kind}_index")
        return [name for _, name in sorted(zip(columns[f"{kind}_index"], names, strict=True))]

    def row(self, index: int) -> Item:
        """`hf_transform_to_torch` of one row."""
        item: Item = {}
        for key, values in self.rows.items():
            value = values[index]
            if isinstance(value, dict):  # torchvision's ToTensor
                frame = np.array(Image.open(io.BytesIO(value["bytes"])))
                item[key] = torch.from_numpy(frame).permute(2, 0, 1).contiguous().float().div(255)
            else:
                item[key] = value if isinstance(value, str) else torch.tensor(value.tolist())
        return item

    def item(self, index: int) -> Item:
        """`__getitem__`."""
        item = self.row(index)
        episode = self.episodes[item["episode_index"].item()]
        start, end = episode["dataset_from_index"], episode["dataset_to_index"]
        current = item["timestamp"].item()
        times = {key: [current] for key, feature in self.features.items() if feature["dtype"] == "video"}
        for key, deltas in self.deltas.items():
            wanted = [max(start, min(end - 1, index + delta)) for delta in deltas]
            item[f"{key}_is_pad"] = torch.BoolTensor([index + delta < start or index + delta >= end for delta in deltas])
            if key in times:
                times[key] = [self.row(at)["timestamp"].item() for at in wanted]
            else:
                item[key] = torch.stack([self.row(at)[key] for at in wanted])
        for key, seconds in times.items():
            item[key] = self.frames(episode, key, seconds).squeeze(0)
        item["task"] = self.tasks[item["task_index"].item()]
        if "subtask_index" in self.features:
            item["subtask"] = self.subtasks[item["subtask_index"].item()]
        return item

    def frames(self, episode: Item, key: str, seconds: list[float]) -> torch.Tensor:
        """`decode_video_frames_torchcodec`."""
        place = {name: episode[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        decoder = self.decoder(str(self.root / self.info["video_path"].format(video_key=key, **place)))
        shifted = [episode[f"videos/{key}/from_timestamp"] + second for second in seconds]
        found = decoder.get_frames_at([round(second * decoder.metadata.average_fps) for second in shifted])
        assert np.abs(found.pts_seconds.numpy() - shifted).max() < 1e-3
        return (found.data / 255.0).type(torch.float32)


def check(batch: Item, expected: Item) -> None:
    assert set(batch) == set(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (batch[key].dtype, batch[key].shape) == (value.dtype, value.shape), key
            assert torch.equal(batch[key], value), key
        else:
            assert type(batch[key]) is type(value)
            assert batch[key] == value, key


def compare(dataset: Path | Dataset, root: Path, deltas: dict[str, list[float]] | None, batches: int) -> None:
    """Compare the first batches of an epoch, and its last batch, with the reference."""
    reference = Reference(root, deltas)
    with Loader(dataset, batch_size=5, delta_timestamps=deltas, last_batch="partial", decode="torchcodec") as loader:
        last = len(loader) - 1
        for number, batch in enumerate(loader):
            if number < batches or number == last:
                check(batch, default_collate([reference.item(index) for index in batch["index"].tolist()]))
            elif number == batches:  # a state leads to the last batch, without decoding those in between
                break
        state = loader.state_dict()
    if number < last:
        frames = loader.dataset.num_frames
        with Loader(dataset, batch_size=5, delta_timestamps=deltas, last_batch="partial", decode="torchcodec") as loader:
            loader.load_state_dict(state | {"position": frames - 3})
            [batch] = loader
            check(batch, default_collate([reference.item(index) for index in batch["index"].tolist()]))


@pytest.mark.parametrize(
    "deltas",
    [
        None,
        {TOP: [0.0], "action": [0.0]},
        {TOP: [-0.1, -0.05, 0.0], SIDE: [0.0, 4.0], "action": [n / 20 for n in range(16)], "next.done": [-0.05, 0.0]},
        {"observation.object_positions": [-3.0, 0.0, 3.0], "next.reward": [0.05], "frame_index": [-0.05]},
    ],
)
def test_the_demo(demo: Path, deltas: dict[str, list[float]] | None) -> None:
    compare(demo, demo, deltas, batches=4)


@pytest.mark.parametrize(
    "deltas",
    [
        None,
        {ODD_CAMERA: [0.0], "one": [0.0]},
        {ODD_CAMERA: [-0.1, 0.0]},
        {"scalar": [0.0, 0.1], "cube": [-0.2, 0.1], "tesseract": [0.0], "flag": [0.1], "flags": [-0.1], "small": [0.0, 0.1]},
        {"half": [0.0], "matrix": [0.0, 0.4], "bytes": [0.1], "frame_index": [-0.1, 0.0], "observation.state": [0.0]},
    ],
)
def test_columns_of_every_kind(odd: Path, deltas: dict[str, list[float]] | None) -> None:
    compare(odd, odd, deltas, batches=9)


@pytest.mark.slow
def test_a_recording(g1: Path) -> None:
    info = json.loads((g1 / "meta/info.json").read_text())
    cameras = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    deltas = {cameras[0]: [-1 / 30, 0.0], "action": [n / 30 for n in range(20)], "observation.state": [-20.0, 0.0]}
    compare(g1, g1, None, batches=2)
    compare(g1, g1, deltas, batches=1)


def test_a_selection_of_episodes(demo: Path) -> None:
    compare(Dataset(demo, episodes=[1, 4]), demo, {"action": [-0.1, 0.0]}, batches=3)


def test_lerobot_itself(demo: Path, odd: Path, tmp_path: Path) -> None:
    pytest.importorskip("lerobot", reason="LeRobot is not installed")
    roots = [demo, odd]
    if importlib.metadata.version("lerobot").startswith("0.3."):  # it reads v2.1, and later ones v3.0
        lengths, actions = (9, 6, 11), Column("float32", [2], np.random.default_rng(0).random((26, 2)))
        cameras = one_file_each(tmp_path / "videos", (TOP, SIDE), lengths, fps=10)
        roots = [build(tmp_path / "v2", lengths, {"action": actions}, cameras=cameras, version="v2.1", stats=True)]
    script = Path(__file__).with_name("support") / "parity_with_lerobot.py"
    done = subprocess.run([sys.executable, script, *roots], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(min(count) > 0 for count in counts.values())

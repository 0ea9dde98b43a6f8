"""Charts of the training program: which actions they show, with which names and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.datasets import SIDE, TOP
from support.train import SMALL

from dali_stream import Dataset, Loader

CHUNK = {"action": [step / 20 for step in range(8)]}


def test_charts_show_recorded_and_predicted_actions_in_the_recordings_unit(
    opened: Any, parts: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that knows the future: both lines are the rows' own numbers."""
    charts, drawn = parts("training.charts"), []
    monkeypatch.setattr(charts.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    loader, _, example = opened(demo, "--out", tmp_path)

    class Oracle(torch.nn.Module):
        def predict(self, batch: Any) -> torch.Tensor:
            return batch["action"]

    charts.action_chunks(tmp_path / "x.png", loader, example, Oracle())
    loader.close()
    options: dict[str, Any] = {"batch_size": Dataset(demo).num_frames, "shuffle": False, "delta_timestamps": CHUNK}
    with Loader(Dataset(demo, cameras=[]), device="cpu", **options) as loader:
        rows = next(iter(loader))
    [figure] = drawn
    checked = 0
    for row in range(4):
        first, *rest = figure.axes[5 * row : 5 * row + 5]
        episode, frame = (int(word.split()[1]) for word in first.get_title().split(", "))
        [place] = np.flatnonzero((rows["episode_index"] == episode) & (rows["frame_index"] == frame))[:1]
        for action, axes in enumerate(rest):
            recorded, predicted = (line.get_ydata() for line in axes.lines)
            real = ~rows["action_is_pad"][place].numpy()
            assert recorded[real] == pytest.approx(rows["action"][place, real, action].numpy(), abs=1e-6)
            assert predicted[real] == pytest.approx(recorded[real], abs=1e-6)
            checked += 1
    assert checked == 16


def many_joints(root: Path) -> Path:
    """The demo with an action of 9 joints, of which 2 to 8 move, each less than the one before. Names are a list in a list."""
    info_file, stats_file = root / "meta/info.json", root / "meta/stats.json"
    info, stats = json.loads(info_file.read_text()), json.loads(stats_file.read_text())
    info["features"]["action"] |= {"shape": [9], "names": [[f"joint {number}" for number in range(9)]]}
    size = np.array([0, 0, *[0.9**number for number in range(7)]], np.float32)
    stats["action"] = {"min": [0] * 9, "max": [1] * 9, "mean": [0] * 9, "std": [1] * 9, "count": stats["action"]["count"]}
    for file in root.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        values = pa.array([*np.sin(np.array(table["frame_index"]))[:, None] * size], pa.list_(pa.float32()))
        table = table.set_column(table.column_names.index("action"), "action", values)
        pq.write_table(table.replace_schema_metadata(None), file)
    info_file.write_text(json.dumps(info))
    stats_file.write_text(json.dumps(stats))
    return root


def test_charts_show_the_actions_that_move_by_name(
    program: Any, parts: Any, demo_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charts, drawn = parts("training.charts"), []
    monkeypatch.setattr(charts.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    program.main([*map(str, [many_joints(demo_copy), "--out", tmp_path / "run", *SMALL, "--max-steps", 1])])
    figure = drawn[-1]
    assert [axes.get_title() for axes in figure.axes[1:7]] == [f"joint {number}" for number in range(2, 8)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["recorded", "predicted"]
    for axes in (axes for axes in figure.axes if axes.lines):
        drawn_values = np.concatenate([line.get_ydata() for line in axes.lines])
        low, high = axes.get_ylim()
        assert low <= np.nanmin(drawn_values) <= np.nanmax(drawn_values) <= high


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["x", "y"], ["x", "y"]),
        ([["x", "y"]], ["x", "y"]),
        ({"motors": ["x", "y"]}, ["x", "y"]),
        ({"left": ["x"], "right": ["y"]}, ["x", "y"]),
        ({"x": 0, "y": 1}, ["x", "y"]),
        (["x"], ["action 0", "action 1"]),
        (None, ["action 0", "action 1"]),
    ],
)
def test_names_of_actions_are_found_in_every_form(parts: Any, names: Any, shown: list[str]) -> None:
    assert parts("training.charts").feature_names({"shape": [2], "names": names}) == shown


def another_robot(root: Path) -> Path:
    """The demo with one camera, and an action of two joints in hundredths."""
    info_file, stats_file = root / "meta/info.json", root / "meta/stats.json"
    info, stats = json.loads(info_file.read_text()), json.loads(stats_file.read_text())
    info["features"]["action"] |= {"shape": [2], "names": ["shoulder", "elbow"]}
    stats["action"] = {name: np.multiply(values[:2], 100).tolist() for name, values in stats["action"].items()}
    del info["features"][TOP]
    for file in root.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        values = pa.array([[100 * value for value in row[:2]] for row in table["action"].to_pylist()], pa.list_(pa.float32()))
        table = table.set_column(table.column_names.index("action"), "action", values)
        pq.write_table(table.replace_schema_metadata(None), file)
    info_file.write_text(json.dumps(info))
    stats_file.write_text(json.dumps(stats))
    return root


@pytest.mark.slow
def test_chunks_of_a_mixture_are_drawn_as_each_robot_has_them(
    program: Any, parts: Any, demo: Path, demo_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A camera that it has, and the names of its own joints."""
    charts, drawn = parts("training.charts"), []
    monkeypatch.setattr(charts.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    mixture = {"datasets": {"pusher": str(demo), "arm": str(another_robot(demo_copy))}, "missing": "pad"}
    (path := tmp_path / "mixture.json").write_text(json.dumps(mixture))
    program.main([*map(str, [path, "--out", tmp_path / "run", *SMALL, "--max-steps", 1])])
    figure = drawn[-1]
    rows = [figure.axes[5 * row : 5 * row + 5] for row in range(4)]
    whose = [row[0].get_title().split(", ")[0] for row in rows]
    assert set(whose) == {"pusher", "arm"}
    for name, (first, *rest) in zip(whose, rows, strict=True):
        assert first.get_title().endswith({"pusher": TOP, "arm": SIDE}[name])
        assert np.asarray(first.images[0].get_array()).std() > 0.01
        joints = ["shoulder", "elbow"] if name == "arm" else Dataset(demo).features["action"]["names"]
        assert [axes.get_title() for axes in rest if axes.axison] == joints
        assert all(np.isfinite(axes.lines[1].get_ydata()[0]) for axes in rest if axes.axison)


def test_the_legend_is_that_of_a_row_with_actions(
    opened: Any, parts: Any, demo: Path, demo_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the dataset of the last row has none. Its charts are empty."""
    info_file = demo_copy / "meta/info.json"
    info = json.loads(info_file.read_text())
    del info["features"]["action"]
    info_file.write_text(json.dumps(info))
    charts, drawn = parts("training.charts"), []
    monkeypatch.setattr(charts.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    mixture = {"datasets": {"pusher": str(demo), "watcher": str(demo_copy)}, "missing": "pad"}
    (path := tmp_path / "mixture.json").write_text(json.dumps(mixture))
    loader, _, example = opened(path, "--out", tmp_path)
    policy = parts("plain_loop").Policy(loader.dataset, 8)
    last = set[str]()
    for seed in range(20):
        charts.action_chunks(tmp_path / "x.png", loader, example | {"seed": seed}, policy)
        rows = [drawn[-1].axes[5 * row : 5 * row + 5] for row in range(4)]
        whose = [row[0].get_title().split(", ")[0] for row in rows]
        if set(whose) == {"pusher", "watcher"}:
            last.add(whose[-1])
            assert [text.get_text() for text in drawn[-1].legends[0].get_texts()] == ["recorded", "predicted"]
            for name, row in zip(whose, rows, strict=True):
                assert [bool(axes.lines) for axes in row[1:]] == 4 * [name == "pusher"]
        if len(last) == 2:
            break
    assert last == {"pusher", "watcher"}
    loader.close()

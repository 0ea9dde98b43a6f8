"""Results of the training program: errors, learning rates, gradients, checkpoints, frames."""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from filelock import FileLock
from support.datasets import CAMERAS, SIDE, TOP
from support.train import ROOT, SMALL, journal

from dali_stream import Dataset, Loader

CHUNK = {"action": [step / 20 for step in range(8)]}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of pipelines/training."""
    monkeypatch.syspath_prepend(str(ROOT / "pipelines"))
    return lambda name: importlib.import_module(f"training.{name}")


def run(program: Any, dataset: Path, out: Path, *arguments: object) -> None:
    """A run in this process."""
    program.main([*map(str, [dataset, "--out", out, *SMALL, *arguments])])


def saved(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def numbers(root: Path) -> Path:
    """The demo with an action and a state of one number, as LeRobot writes them: a column of numbers."""
    keys, info_file, stats_file = ("action", "observation.state"), root / "meta/info.json", root / "meta/stats.json"
    info, stats = json.loads(info_file.read_text()), json.loads(stats_file.read_text())
    for key in keys:
        info["features"][key] |= {"shape": [1], "names": None}
        stats[key] = {name: values[:1] for name, values in stats[key].items()}
    for file in root.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        for key in keys:
            values = pa.array([row[0] for row in table[key].to_pylist()], pa.float32())
            table = table.set_column(table.column_names.index(key), key, values)
        pq.write_table(table.replace_schema_metadata(None), file)
    info_file.write_text(json.dumps(info))
    stats_file.write_text(json.dumps(stats))
    return root


@pytest.mark.slow
def test_the_validation_error_is_that_of_the_saved_weights(program: Any, parts: Any, demo: Path, tmp_path: Path) -> None:
    run(program, demo, tmp_path, "--max-steps", 2, "--val-episodes", 2)
    tasks = max(Dataset(demo).tasks) + 1
    policy = parts("policy").ChunkPolicy(CAMERAS, 8, 4, 8, tasks)
    policy.load_state_dict(saved(tmp_path)["model"])
    modes = {"action": "mean_std", "observation.state": "mean_std"}
    held_out = Dataset(demo, episodes=[1, 4], stats=Dataset(demo, episodes=[0, 2, 3, 5]).compute_stats(modes))
    options: dict[str, Any] = {"normalize": modes, "image_size": (32, 32), "shuffle": False, "last_batch": "partial"}
    with Loader(held_out, batch_size=16, delta_timestamps=CHUNK, device="cpu", **options) as loader, torch.no_grad():
        wrong = [(policy.predict(b) - b["action"]).abs()[~b["action_is_pad"]] for b in loader]
    [found] = [entry["val_error"] for entry in journal(tmp_path) if "val_error" in entry]
    assert found == pytest.approx(float(torch.cat(wrong).mean()), rel=1e-4)


@pytest.mark.slow
def test_the_learning_rate_warms_up_and_falls(program: Any, demo: Path, tmp_path: Path) -> None:
    run(program, demo, tmp_path, "--max-steps", 4, "--learning-rate", 0.5)
    found = [entry["learning_rate"] for entry in journal(tmp_path)]
    assert found == pytest.approx([0.5 * min(s / 100, (1 + math.cos(math.pi * (s - 1) / 4)) / 2) for s in (1, 2, 3, 4)])
    assert all(0 < entry["wait_share"] < 1 for entry in journal(tmp_path))


@pytest.mark.slow
def test_gradients_are_clipped(program: Any, parts: Any, demo: Path, tmp_path: Path) -> None:
    """Gradients clipped to far below Adam's epsilon move no weight. Gradients clipped to 1 do."""
    for clip, moved in ((1e-20, False), (1.0, True)):
        run(program, demo, tmp_path / str(clip), "--max-steps", 2, "--clip", clip, "--weight-decay", 0, "--seed", 3)
        torch.manual_seed(3)
        fresh = parts("policy").ChunkPolicy(CAMERAS, 8, 4, 8, max(Dataset(demo).tasks) + 1)
        after = saved(tmp_path / str(clip))["model"]["head.weight"]
        assert torch.allclose(after, fresh.head.weight, atol=1e-7) is not moved


def test_weights_that_are_not_finite_are_never_saved(program: Any, demo: Path, tmp_path: Path) -> None:
    options = ["--max-steps", 9, "--save-every", 1, "--learning-rate", 1e25, "--log-every", 100]
    with pytest.raises(FloatingPointError, match="a gradient was not finite"):
        run(program, demo, tmp_path, *options)
    assert not (tmp_path / "checkpoint.pt").exists() or all(
        bool(torch.isfinite(value).all()) for value in saved(tmp_path)["model"].values()
    )


def test_one_number_is_an_action_and_a_state_too(program: Any, demo_copy: Path, tmp_path: Path) -> None:
    run(program, numbers(demo_copy), tmp_path / "run", "--max-steps", 2, "--val-episodes", 1)
    assert saved(tmp_path / "run")["model"]["head.weight"].shape[0] == 1


def test_an_action_of_one_number_is_held_against_its_own_step(parts: Any) -> None:
    """If a batch has as many actions as samples, a wrong shape would pass and compare each action with all others."""
    policy = parts("policy").ChunkPolicy([], 0, 1, 4, 1)
    policy.predict = lambda batch: batch["action"][..., None]
    batch = {"action": torch.arange(16.0).reshape(4, 4), "action_is_pad": torch.zeros(4, 4, dtype=torch.bool)}
    assert policy(batch) == 0


def test_what_a_dataset_of_a_mixture_lacks_is_neither_seen_nor_learned(parts: Any) -> None:
    """Frames of a camera that is missing may hold anything, and so may dimensions of actions that are padding."""
    torch.manual_seed(0)
    policy = parts("policy").ChunkPolicy(["top", "side"], 0, 3, 4, 2, datasets=2).eval()
    batch = {
        "top": torch.rand(2, 3, 32, 32), "side": torch.rand(2, 3, 32, 32), "side_is_missing": torch.tensor([False, True]),
        "action": torch.rand(2, 4, 3), "action_is_pad": torch.tensor([[False] * 4, [False, False, False, True]]),
        "action_dim_is_pad": torch.tensor([[False] * 3, [False, False, True]]), "task_index": torch.tensor([1, 1]),
        "dataset_index": torch.tensor([0, 1]),
    }  # fmt: skip
    other = batch | {"side": batch["side"].clone(), "action": batch["action"].clone()}
    other["side"][1], other["action"][1, :, 2], other["action"][1, 3] = 0, 9, 9
    with torch.no_grad():
        assert policy(batch) == policy(other)
        assert not torch.equal(policy.predict(batch), policy.predict(batch | {"side": batch["side"].flip(0)}))
        assert not torch.equal(policy.predict(batch), policy.predict(batch | {"dataset_index": torch.tensor([1, 1])}))
    there = parts("policy").recorded(batch)
    assert there.shape == (2, 4, 3)
    assert [int(each.sum()) for each in there] == [12, 6]
    lacking = batch | {"action_is_missing": torch.tensor([True, False])}
    assert [int(each.sum()) for each in parts("policy").recorded(lacking)] == [0, 6]


def test_a_save_that_fails_leaves_the_checkpoint_before(parts: Any, tmp_path: Path) -> None:
    class Full:
        def __reduce__(self) -> Any:
            raise OSError(28, "No space left on device")

    path = tmp_path / "checkpoint.pt"
    parts("checkpoint").save(path, {"arguments": {}, "model": torch.zeros(9)})
    with pytest.raises(OSError, match="No space"):
        parts("checkpoint").save(path, {"arguments": {}, "model": torch.ones(9), "last": Full()})
    assert parts("checkpoint").load(path, {})["model"].sum() == 0
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "cannot be read"), (b"PK\x03\x04" + bytes(99), "cannot be read"), (None, "must be a checkpoint of train.py")],
)
def test_a_file_that_is_no_checkpoint_is_named(
    program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"policy": 1}, path) if content is None else path.write_bytes(content)
    with pytest.raises(SystemExit):
        run(program, demo, tmp_path, "--resume")
    assert f"{path} {said}" in capsys.readouterr().err


def test_a_folder_that_another_run_writes_to_is_refused(
    program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(SystemExit):
        run(program, demo, tmp_path)
    assert f"another run is writing to {tmp_path}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_validation_gives_up_when_it_is_asked_to(
    program: Any, parts: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM, a run must neither wait for the end of a validation nor lose its training progress.

    A launcher kills the run after half a minute.
    """
    predict, seen = parts("policy").ChunkPolicy.predict, []

    def asked(self: Any, batch: Any) -> Any:
        if not self.training:
            seen.append(len(batch["index"]))
            os.kill(os.getpid(), 15)
        return predict(self, batch)

    monkeypatch.setattr(parts("policy").ChunkPolicy, "predict", asked)
    with pytest.raises(SystemExit) as ended:
        run(program, demo, tmp_path, "--max-steps", 5, "--val-episodes", 2, "--val-every", 3)
    assert (ended.value.code, len(seen), saved(tmp_path)["step"]) == (143, 1, 3)
    assert not any("val_error" in entry for entry in journal(tmp_path))


@pytest.mark.slow
def test_what_changes_the_run_is_said(program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(program, demo, tmp_path, "--max-steps", 1)
    capsys.readouterr()
    run(program, demo, tmp_path, "--max-steps", 2, "--resume", "--weight-decay", 0.5)
    said = " ".join(capsys.readouterr().err.split())
    assert "--max-steps was 1 and is 2" in said
    assert "--weight-decay was 0.0001 and is 0.5" in said
    assert saved(tmp_path)["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    run(program, demo, tmp_path, "--max-steps", 2, "--resume")
    assert "step 2 is done already" in capsys.readouterr().err
    run(program, demo, tmp_path, "--max-steps", 3, "--resume", "--batch-size", 4)
    assert saved(tmp_path)["loader"]["position"] == 20


@pytest.mark.slow
def test_a_run_with_descriptions_of_its_batches_is_resumed(program: Any, demo: Path, tmp_path: Path) -> None:
    """As earlier versions wrote them, beside the checkpoint. They are neither read nor changed."""
    files = {}
    for out in (tmp_path / "whole", tmp_path / "former"):
        run(program, demo, out, "--max-steps", 2)
    for name in ("run.json", "run_until_step_1.json"):
        content = {"version": 2, "software": {}, "dataset": {"uri": "/nowhere"}, "loader": {"batch_size": 4}, "begin": None}
        files[name] = json.dumps(content)
        (tmp_path / "former" / name).write_text(files[name])
    for out in (tmp_path / "whole", tmp_path / "former"):
        run(program, demo, out, "--max-steps", 3, "--resume")
    assert journal(tmp_path / "former")[-1]["loss"] == journal(tmp_path / "whole")[-1]["loss"]
    assert saved(tmp_path / "former")["loader"] == saved(tmp_path / "whole")["loader"]
    assert {name: (tmp_path / "former" / name).read_text() for name in files} == files
    assert not list((tmp_path / "whole").glob("run*.json"))


@pytest.mark.parametrize(("words", "shuffle"), [([], True), (["sharded"], "sharded"), (["global"], "global"), (["true"], True)])
def test_the_order_of_the_program_is_chosen(parts: Any, demo: Path, tmp_path: Path, words: list[str], shuffle: Any) -> None:
    options = ["--out", str(tmp_path), "--chunk", "8", "--image-size", "32", "32", *(["--shuffle", *words] if words else [])]
    arguments = parts("arguments").parse([str(demo), *options])
    data = parts("data").open_data(arguments, importlib.import_module("accelerate").Accelerator(cpu=True))
    with data.train as loader:
        assert loader.state_dict()["order"]["shuffle"] == shuffle


def test_charts_show_recorded_and_predicted_actions_in_the_recordings_unit(
    program: Any, parts: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that knows the future: both lines are the rows' own numbers."""
    charts, drawn = parts("charts"), []
    monkeypatch.setattr(charts.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    data = parts("data").open_data(
        parts("arguments").parse([str(demo), "--out", str(tmp_path), "--chunk", "8", "--image-size", "32", "32"]),
        importlib.import_module("accelerate").Accelerator(cpu=True),
    )

    class Oracle(torch.nn.Module):
        def predict(self, batch: Any) -> torch.Tensor:
            return batch["action"]

    charts.action_chunks(tmp_path / "x.png", data, Oracle())
    data.close()
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
    """A camera that it has, the names of its own joints, and scales that only its own rows share."""
    charts, drawn = parts("charts"), []
    monkeypatch.setattr(charts.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    mixture = {"datasets": {"pusher": str(demo), "arm": str(another_robot(demo_copy))}, "missing": "pad"}
    (path := tmp_path / "mixture.json").write_text(json.dumps(mixture))
    run(program, path, tmp_path / "run", "--max-steps", 1)
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
    for one, first in zip(whose, rows, strict=True):
        for other, second in zip(whose, rows, strict=True):
            assert (first[1].get_ylim() == second[1].get_ylim()) == (one == other)


def test_the_error_of_predicting_the_mean_is_a_line_with_a_single_validation(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charts, drawn = parts("charts"), []
    save = charts.Figure.savefig
    monkeypatch.setattr(
        charts.Figure, "savefig", lambda self, path, **options: drawn.append(self) or save(self, path, **options)
    )
    charts.loss_curves(tmp_path / "loss.png", [{"step": 1, "loss": 1.0}, {"step": 4, "val_error": 0.5, "mean_error": 0.75}])
    validation = drawn[0].axes[1]
    [line] = [line for line in validation.lines if line.get_label() == "predicting the mean"]
    assert set(line.get_ydata()) == {0.75}
    assert line.get_window_extent().width > 0.5 * validation.get_window_extent().width > 100


def test_lerobots_act_trains_and_validates(program: Any, demo: Path, tmp_path: Path) -> None:
    pytest.importorskip("lerobot.policies.act.modeling_act", reason="LeRobot is not installed")
    options = ["--policy", "lerobot-act", "--from-scratch", "--image-size", 64, 64, "--max-steps", 2, "--val-episodes", 1]
    run(program, demo, tmp_path, *options)
    assert [set(entry) >= {"loss"} or set(entry) >= {"val_error"} for entry in journal(tmp_path)] == [True] * 3
    assert (tmp_path / "chunks.png").exists()

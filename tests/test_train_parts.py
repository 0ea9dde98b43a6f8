"""Results of the training program: errors, learning rates, gradients, checkpoints, data."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import math
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from filelock import FileLock
from support.datasets import SIDE
from support.train import ENVIRONMENT, ROOT, SMALL, command, journal, losses, saved, train_here

from dali_stream import Dataset, Loader, Mixture

CHUNK = {"action": [step / 20 for step in range(8)]}


def run(program: Any, dataset: Path, out: Path, *arguments: object) -> None:
    """A run in this process."""
    program.main([*map(str, [dataset, "--out", out, *SMALL, *arguments])])


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
    policy = parts("plain_loop").Policy(Dataset(demo), 8)
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
    assert all(0 <= entry["wait_share"] <= 1 for entry in journal(tmp_path))


@pytest.mark.slow
def test_gradients_are_clipped(program: Any, parts: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients clipped to far below Adam's epsilon move no weight. Gradients clipped to 1 do."""
    monkeypatch.setattr(program, "WEIGHT_DECAY", 0.0)
    for clip, moved in ((1e-20, False), (1.0, True)):
        monkeypatch.setattr(program, "CLIP", clip)
        run(program, demo, tmp_path / str(clip), "--max-steps", 2, "--seed", 3)
        torch.manual_seed(3)
        fresh = parts("plain_loop").Policy(Dataset(demo), 8)
        after = saved(tmp_path / str(clip))["model"]["head.2.bias"]
        assert torch.allclose(after, fresh.head[2].bias, atol=1e-7) is not moved


def test_weights_that_are_not_finite_are_never_saved(program: Any, demo: Path, tmp_path: Path) -> None:
    options = ["--max-steps", 9, "--save-every", 1, "--learning-rate", 1e25, "--log-every", 100]
    with pytest.raises(SystemExit, match="a gradient was not finite"):
        run(program, demo, tmp_path, *options)
    assert not (tmp_path / "checkpoints").exists() or all(
        bool(torch.isfinite(value).all()) for value in saved(tmp_path)["model"].values()
    )


def test_one_number_is_an_action_and_a_state_too(program: Any, demo_copy: Path, tmp_path: Path) -> None:
    run(program, numbers(demo_copy), tmp_path / "run", "--max-steps", 2, "--val-episodes", 1)
    assert saved(tmp_path / "run")["model"]["head.2.weight"].shape[0] == 8


def test_an_action_of_one_number_is_held_against_its_own_step(parts: Any) -> None:
    """If a batch has as many actions as samples, a wrong shape would pass and compare each action with all others."""
    dataset = mock.Mock(features={"action": {"shape": [1]}}, cameras=[], tasks={})
    policy = parts("plain_loop").Policy(dataset, 4)
    policy.predict = lambda batch: batch["action"][..., None]
    batch = {"action": torch.arange(16.0).reshape(4, 4), "action_is_pad": torch.zeros(4, 4, dtype=torch.bool)}
    assert policy(batch) == 0


def test_what_a_dataset_of_a_mixture_lacks_is_neither_seen_nor_learned(parts: Any) -> None:
    """Frames of a camera that is missing may hold anything, and so may dimensions of actions that are padding."""
    torch.manual_seed(0)
    camera, action = mock.Mock(is_depth=False), {"shape": [3]}
    dataset = mock.create_autospec(Mixture, instance=True)
    dataset.datasets = {name: mock.Mock(tasks={0: "a", 1: "b"}) for name in "xy"}
    dataset.features, dataset.cameras = {"top": camera, "side": camera, "action": action}, ["top", "side"]
    policy = parts("plain_loop").Policy(dataset, 4).eval()
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
    there = parts("plain_loop").recorded(batch)
    assert there.shape == (2, 4, 3)
    assert [int(each.sum()) for each in there] == [12, 6]
    lacking = batch | {"action_is_missing": torch.tensor([True, False])}
    assert [int(each.sum()) for each in parts("plain_loop").recorded(lacking)] == [0, 6]


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_said_in_a_line(
    program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model, or else the optimizer, is larger than a file may be. The checkpoint before remains, and the run continues."""
    options, out = ["--max-steps", 5, "--save-every", 2], tmp_path / "run"
    run(program, demo, tmp_path / "whole", *options)
    with cut_after(2):
        run(program, demo, out, *options)
    folder = out / "checkpoints"
    for limit in (2**20, 4 * 2**20):
        capsys.readouterr()
        with largest_file(limit), pytest.raises(SystemExit) as ended:
            run(program, demo, out, *options, "--resume")
        said = f"train.py: {folder}/step_00000004 could not be written, and step_00000002 is unchanged. Is the disk full?"
        assert str(ended.value.code).startswith(said)  # Python prints it and exits with 1
        assert capsys.readouterr().err.splitlines()[-1].split(",")[0] == "step 4 of 5"
        assert os.listdir(folder) == ["step_00000002"]
    run(program, demo, out, *options, "--resume")
    assert losses(out) == losses(tmp_path / "whole")


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the bytes of a file that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def cut_after(step: int) -> Iterator[None]:
    """Let SIGTERM end a run in this process after a step."""
    with pytest.MonkeyPatch.context() as patch:
        run_class = importlib.import_module("train").Run
        descend = run_class._descend

        def descend_and_end(run: Any, batch: Any) -> Any:
            loss = descend(run, batch)
            if run.step == step:
                signal.raise_signal(signal.SIGTERM)
            return loss

        patch.setattr(run_class, "_descend", descend_and_end)
        with pytest.raises(SystemExit) as ended:
            yield
    assert ended.value.code == 143


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("run.json", 0), ("custom_checkpoint_0.pkl", 0), ("optimizer.bin", 999), ("model.safetensors", 9999)]
)
def test_a_damaged_checkpoint_is_named(
    program: Any, one_step: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, size: int
) -> None:
    out = shutil.copytree(one_step, tmp_path / "run")
    [folder] = (out / "checkpoints").iterdir()
    os.truncate(folder / name, size)
    with pytest.raises(SystemExit) as ended:
        run(program, demo, out, "--max-steps", 1, "--resume")
    assert ended.value.code == 2
    assert (
        f"train.py: {folder} cannot be loaded. Use the arguments of the run. If the checkpoint is damaged, remove it"
        in capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def one_step(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step."""
    out = tmp_path_factory.mktemp("one_step") / "run"
    train_here(demo, out, "--max-steps", 1)
    return out


def test_the_first_line_comes_before_torch_is_imported(demo: Path, tmp_path: Path) -> None:
    """Importing torch takes seconds. Before, OpenMP's threads are set to sleep, unless the user decides."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    (tmp_path / "torch.py").write_text(f"import os\nraise SystemExit(' '.join(os.environ[name] for name in {names}))\n")
    own = {name: value for name, value in ENVIRONMENT.items() if name not in names} | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for more, expected in (
        ({}, "passive 0"),
        ({"GOMP_SPINCOUNT": "9"}, "passive 9"),
        ({"OMP_WAIT_POLICY": "active"}, "active 0"),
    ):
        line = command(demo, tmp_path / "run")
        done = subprocess.run(line, env=own | more, capture_output=True, text=True, timeout=400)
        assert done.stderr.splitlines() == ["train.py: importing torch", expected]


@pytest.mark.slow
def test_a_terminal_shows_the_progress(program: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all steps, the time left and the rate."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_to_the_end, reader)
        with os.fdopen(writer, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            run(program, demo, tmp_path / "run", "--max-steps", 3)
        shown = reading.result()
    os.close(reader)
    assert re.search(r"3/3 \[\d\d:\d\d<\d\d:\d\d, .*(step/s|s/step)\]", shown.decode()), shown
    assert b"step 3 of 3" in shown


def read_to_the_end(terminal: int) -> bytes:
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(terminal, 1000):
            shown += more
    return shown


STUB = """
import json

def init(**options):
    return Run(options)

class Run:
    def __init__(self, options):
        self.lines = [options]

    def log(self, values, step):
        self.lines.append({"step": step, **values})

    def finish(self):
        with open(self.lines[0]["dir"] + "/wandb.json", "w") as file:
            json.dump(self.lines, file, default=str)
"""


@pytest.mark.slow
def test_other_trackers_get_the_metrics_too(demo: Path, tmp_path: Path) -> None:
    """W&B is a stub with the functions that Accelerate calls."""
    files = {"wandb/__init__.py": STUB, "wandb-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: wandb\nVersion: 1\n"}
    for name, text in files.items():
        (path := tmp_path / "stub" / name).parent.mkdir(parents=True)
        path.write_text(text)
    line = command(demo, tmp_path / "first", "--max-steps", 2, "--log-with", "wandb")
    subprocess.run(line, env=ENVIRONMENT | {"PYTHONPATH": f"{tmp_path / 'stub'}:{ROOT}"}, timeout=400, check=True)
    options, *lines = json.loads((tmp_path / "first/wandb.json").read_text())
    assert (options["project"], options["name"], options["config"]["chunk"]) == ("dali_stream", "first", 8)
    assert {each["step"]: each["loss"] for each in lines} == losses(tmp_path / "first")
    assert all(each["loader/decodes_per_frame"] >= 0 for each in lines)
    assert not (tmp_path / "first/tensorboard").exists()


def test_a_tracker_that_is_not_installed_is_named(
    program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(program, demo, tmp_path, "--max-steps", 1, "--log-with", "tensorboard", "guestbook")
    assert "--log-with must be of the trackers that are installed" in (said := capsys.readouterr().err)
    assert said.endswith("got guestbook\n")


def test_a_folder_that_another_run_writes_to_is_refused(
    program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(SystemExit):
        run(program, demo, tmp_path)
    assert f"another run is writing to {tmp_path}" in capsys.readouterr().err


def test_a_signal_that_arrives_while_ranks_agree_is_not_lost(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the run at the next step."""
    module = parts("training.preemption")
    fake = mock.Mock(is_initialized=lambda: True, new_group=mock.Mock())
    fake.all_reduce = lambda *_: signal.raise_signal(signal.SIGTERM)  # no rank had received a signal before
    monkeypatch.setattr(module, "distributed", fake)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        preemption = module.Preemption()
        assert not preemption.agreed()
        fake.all_reduce = lambda *_: None
        assert preemption.agreed()
        assert preemption.signal == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_episodes_and_validation_go_together(opened: Any, demo: Path, tmp_path: Path) -> None:
    loader, val, _ = opened(demo, "--out", tmp_path, "--val-episodes", 1, "--dataset", "episodes=[0, 2, 5]")
    assert (loader.dataset.episodes.tolist(), val.dataset.episodes.tolist()) == ([0, 5], [2])
    loader.close()
    val.close()


@pytest.mark.slow
def test_processes_without_the_checkpoint_of_the_first_one_are_refused(demo: Path, one_step: Path, tmp_path: Path) -> None:
    """As on two nodes whose --out is not shared."""
    (program := tmp_path / "program.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'pipelines')!r})\n"
        "import train\n"
        f"train.main([*sys.argv[1:], '--out', [{str(one_step)!r}, {str(tmp_path / 'empty')!r}][int(os.environ['RANK'])]])\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, program, demo, *SMALL]
    line = [*map(str, [*command, "--resume", "--max-steps", 3])]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert f"--out must be the same folder for all processes, got {tmp_path / 'empty'}" in done.stderr


@pytest.mark.slow
def test_a_validation_gives_up_when_it_is_asked_to(
    program: Any, parts: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM, a run must neither wait for the end of a validation nor lose its training progress.

    A launcher kills the run after half a minute.
    """
    predict, seen = parts("plain_loop").Policy.predict, []

    def asked(self: Any, batch: Any) -> Any:
        if not self.training:
            seen.append(len(batch["index"]))
            os.kill(os.getpid(), 15)
        return predict(self, batch)

    monkeypatch.setattr(parts("plain_loop").Policy, "predict", asked)
    with pytest.raises(SystemExit) as ended:
        run(program, demo, tmp_path, "--max-steps", 5, "--val-episodes", 2, "--save-every", 3)
    assert (ended.value.code, len(seen), saved(tmp_path)["step"]) == (143, 1, 3)
    assert not any("val_error" in entry for entry in journal(tmp_path))


@pytest.mark.slow
def test_what_changes_the_run_is_said(program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(program, demo, tmp_path, "--max-steps", 1)
    capsys.readouterr()
    run(program, demo, tmp_path, "--max-steps", 2, "--resume", "--learning-rate", 0.5)
    said = " ".join(capsys.readouterr().err.split())
    assert "--max-steps was 1 and is 2" in said
    assert "--learning-rate was 0.0003 and is 0.5" in said
    assert journal(tmp_path)[1]["learning_rate"] == pytest.approx(0.5 * 2 / 100)
    run(program, demo, tmp_path, "--max-steps", 2, "--resume", "--learning-rate", 0.5)
    said = capsys.readouterr().err
    assert "steps: 2 of 2 are done" in said
    assert " was " not in said
    run(program, demo, tmp_path, "--max-steps", 3, "--resume", "--batch-size", 4)
    assert saved(tmp_path)["loader"]["position"] == 20


@pytest.mark.parametrize(
    ("words", "shuffle"),
    [([], True), (["shuffle=sharded"], "sharded"), (["shuffle=global", "num_threads=1"], "global"), (["shuffle=true"], True)],
)
def test_the_order_of_the_program_is_chosen(opened: Any, demo: Path, tmp_path: Path, words: list[str], shuffle: Any) -> None:
    loader, val, _ = opened(demo, "--out", tmp_path, "--val-episodes", 1, *(["--loader", *words] if words else []))
    assert loader.state_dict()["order"]["shuffle"] == shuffle
    assert val.state_dict()["order"]["shuffle"] is False
    loader.close()
    val.close()


@pytest.mark.parametrize(
    ("words", "attributes"),
    [
        (["clock=frame_index"], {"clock": "frame_index"}),
        (["tolerance_s=0.02", "cameras=[observation.images.side]"], {"tolerance_s": 0.02, "cameras": (SIDE,)}),
    ],
)
def test_arguments_of_the_dataset_are_passed_on(
    opened: Any, demo: Path, tmp_path: Path, words: list[str], attributes: dict[str, Any]
) -> None:
    loader, val, _ = opened(demo, "--out", tmp_path, "--val-episodes", 1, "--dataset", *words)
    for each in (loader, val):
        assert {name: getattr(each.dataset, name) for name in attributes} == attributes
        each.close()

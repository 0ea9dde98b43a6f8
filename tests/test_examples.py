"""The examples of a plain PyTorch loop and of Lightning's Trainer: they train, and continue at the very next sample."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.slow import slow

import dali_stream

ROOT = Path(__file__).parents[1]
PIPELINES = str(ROOT / "pipelines")
SMALL = ["--image-size", 32, 32, "--chunk", 8, "--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
CHECKPOINTS = {"plain_loop": "checkpoint.pt", "lightning_module": "last.ckpt"}
Step = tuple[list[int], float]  # `index` of the samples, and the loss

# Either program, noting what each rank's policy is trained on: `run.py PROGRAM NOTES URI --out DIR ...`
RECORDED = f"""
import importlib, json, sys
sys.path.insert(0, {PIPELINES!r})
from pathlib import Path
from torch import distributed
import dali_stream

dataset = dali_stream.Dataset
dali_stream.Dataset = lambda uri: dataset(uri, episodes=[1, 4])

program = importlib.import_module(sys.argv[1])
policy = importlib.import_module("plain_loop").Policy
whole = policy.forward
def forward(self, batch):
    loss = whole(self, batch)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    with Path(sys.argv[2], f"{{rank}}.jsonl").open("a") as file:
        print(json.dumps([batch["index"].tolist(), loss.item()]), file=file)
    return loss
policy.forward = forward
program.main(sys.argv[3:])
"""


@pytest.fixture(params=CHECKPOINTS)
def name(request: pytest.FixtureRequest) -> str:
    """Each of the examples."""
    if request.param == "lightning_module":
        pytest.importorskip("lightning")
    return request.param


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs can be imported."""
    monkeypatch.syspath_prepend(PIPELINES)


@pytest.fixture
def steps(name: str, monkeypatch: pytest.MonkeyPatch, importable: None) -> Iterator[list[Step]]:
    """Training steps of a program in this process, on two episodes and with sums in one order."""
    found, dataset = list[Step](), dali_stream.Dataset
    policy = importlib.import_module("plain_loop").Policy
    whole = policy.forward

    def forward(self: Any, batch: dict[str, Any]) -> torch.Tensor:
        loss = whole(self, batch)
        found.append((batch["index"].tolist(), loss.item()))
        return loss

    monkeypatch.setattr(policy, "forward", forward)
    monkeypatch.setattr(dali_stream, "Dataset", lambda uri: dataset(uri, episodes=[1, 4]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield found
    torch.set_num_threads(threads)


def line(dataset: Path, out: Path, *arguments: object) -> list[str]:
    """Arguments of either program on the command line, without its name."""
    return list(map(str, [dataset, "--out", out, *SMALL, *arguments]))


def run(*command: object) -> None:
    """Run a Python program, and check that it succeeds."""
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_was_never_cut(name: str, steps: list[Step], demo: Path, tmp_path: Path) -> None:
    main, batch_size = importlib.import_module(name).main, 32
    epoch = dali_stream.Dataset(demo).num_frames // batch_size

    def train(out: str, max_steps: int, *more: str) -> list[Step]:
        steps.clear()
        main(line(demo, tmp_path / out, "--batch-size", batch_size, "--max-steps", max_steps, *more))
        return [*steps]

    whole = train("whole", epoch + 2)
    # Cut in the middle of an epoch, and at its end.
    cut = train("cut", 2) + train("cut", epoch, "--resume") + train("cut", epoch + 2, "--resume")
    assert cut == whole
    seen = [index for samples, _ in cut[:epoch] for index in samples]
    assert len(set(seen)) == len(seen) == epoch * batch_size
    assert whole[0][0] != whole[epoch][0]  # the second epoch has an order of its own


@pytest.mark.slow
def test_a_run_that_is_there_is_not_written_over(
    name: str, importable: None, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / CHECKPOINTS[name]).touch()
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(line(demo, tmp_path))
    assert "Continue from it with --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_the_plain_loop_runs_from_the_command_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a copy in a folder without the other programs."""
    alone = shutil.copy(ROOT / "pipelines/plain_loop.py", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(folder for folder in sys.path if folder != PIPELINES)])
    for name in ("plain_loop", "training"):  # what an earlier test has imported would hide that it is missing
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", [alone, *line(small, tmp_path / "run", "--batch-size", 4, "--max-steps", 10)])
    runpy.run_path(alone, run_name="__main__")
    assert capsys.readouterr().out.startswith("step 10: loss 0.")
    loader = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["loader"]
    assert (loader["epoch"], loader["position"]) == (0, 40)


@pytest.mark.slow
def test_two_processes_train_as_one_does(name: str, steps: list[Step], demo: Path, tmp_path: Path) -> None:
    """Each step has the same samples, and the mean of the ranks' losses is the loss of a single process.

    The same holds for a run that continues from a checkpoint of another number of processes. Runs of one process are runs in
    this process.
    """
    (program := tmp_path / "run.py").write_text(RECORDED)
    # Lightning's Trainer starts its processes by itself.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2] if name == "plain_loop" else []
    devices = [] if torchrun else ["--devices", 2]

    def options(out: str, max_steps: int) -> list[str]:
        return line(demo, tmp_path / out, "--batch-size", 4, "--max-steps", max_steps, "--resume")

    def train_one(out: str, max_steps: int) -> list[Step]:
        steps.clear()
        importlib.import_module(name).main(options(out, max_steps))
        return [(sorted(samples), loss) for samples, loss in steps]

    alone = train_one("run of one", 6)
    (notes := tmp_path / "notes").mkdir()
    run(*torchrun, program, name, notes, *options("run", 3), *devices)
    ranks = [[json.loads(each) for each in file.read_text().splitlines()] for file in notes.iterdir()]
    assert len(ranks) == 2
    found = [
        (sorted(index for samples, _ in step for index in samples), sum(loss for _, loss in step) / 2)
        for step in zip(*ranks, strict=True)
    ]
    found += train_one("run", 6)
    assert [samples for samples, _ in found] == [samples for samples, _ in alone]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in alone], rel=1e-4)


# --------------------------------------------------------------------- every checkpoint that Lightning's Trainer resumes from

EPOCHS, STEPS = {"max_epochs": 3}, {"max_steps": 12}  # of 4 batches each


@pytest.mark.parametrize(
    ("hook", "saved", "first", "then"),
    [
        ("on_train_batch_end", 6, EPOCHS, EPOCHS),
        slow("on_train_batch_end", 6, STEPS, STEPS),
        slow("on_train_batch_end", 8, EPOCHS, EPOCHS),
        slow("on_train_batch_end", 8, STEPS, STEPS),
        slow("on_train_epoch_end", 8, EPOCHS, EPOCHS),
        slow("on_train_epoch_end", 8, STEPS, STEPS),
        slow("on_train_epoch_end", 6, {"max_steps": 6}, STEPS),  # to the Trainer, that step ends the epoch
    ],
)
def test_lightning_goes_on_from_every_kind_of_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
    importable: None,
    demo: Path,
    tmp_path: Path,
    hook: str,
    saved: int,
    first: dict[str, int],
    then: dict[str, int],
) -> None:
    """Samples alone: no frames, and a policy that learns nothing."""
    lightning = pytest.importorskip("lightning.pytorch")
    module, dataset = importlib.import_module("lightning_module"), dali_stream.Dataset
    file, trained = tmp_path / "file.ckpt", []

    def forward(self: Any, batch: dict[str, Any]) -> torch.Tensor:
        trained.append(batch["index"].tolist())
        return self.task.weight.mean()

    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == saved:
            trainer.save_checkpoint(file)

    def fit(limits: dict[str, int], path: Path | None) -> list[list[int]]:
        trained.clear()
        cloning = module.Cloning(Namespace(uri=demo, chunk=8, batch_size=128, image_size=(32, 32)))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        callbacks = [lightning.callbacks.LambdaCallback(**{hook: save})]
        lightning.Trainer(accelerator="cpu", callbacks=callbacks, **limits, **quiet).fit(cloning, ckpt_path=path)
        cloning.loader.close()
        return [*trained]

    monkeypatch.setattr(importlib.import_module("plain_loop").Policy, "forward", forward)
    monkeypatch.setattr(dali_stream, "Dataset", lambda uri: dataset(uri, cameras=[]))
    whole = fit(STEPS, None)
    assert len(whole) == 12
    assert fit(first, None) == whole[: first.get("max_steps", 12)]
    assert fit(then, file) == whole[saved:]

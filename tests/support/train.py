"""Runs of pipelines/train.py, small enough for a test."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Frames of one token, and every step in the journal.
SMALL = [
    "--image-size", 32, 32, "--chunk", 8, "--batch-size", 8, "--loader", "consumers=8", "--log-every", 1, "--device", "cpu",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def in_this_process() -> Iterator[Any]:
    """The program as a module of this process, which then forgets Accelerate's state and the handlers of signals."""
    import torch
    from accelerate.state import AcceleratorState

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "pipelines"))
        yield importlib.import_module("train")
    for number, handler in before.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`in_this_process`, without its charts: to draw them takes longer than the training. `test_train.py` looks at some."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())
    with in_this_process() as module:
        yield module


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of pipelines/."""
    monkeypatch.syspath_prepend(str(ROOT / "pipelines"))
    return importlib.import_module


@pytest.fixture
def opened(program: Any, parts: Any) -> Any:
    """Opens the data of the program by its arguments."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return lambda *words: parts("training.data").open_data(program.parse([*map(str, [*words, *SMALL])]), accelerator)


def command(dataset: Path, out: Path, *arguments: object, processes: int = 1) -> list[str]:
    """The command line of a run; of several processes, under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    program = ROOT / "pipelines/train.py"
    return list(map(str, [sys.executable, *launcher, program, dataset, "--out", out, *SMALL, *arguments]))


def train(dataset: Path, out: Path, *arguments: object, processes: int = 1) -> str:
    """Run the training program, check that it succeeds, and return its standard error."""
    line = command(dataset, out, *arguments, processes=processes)
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def train_here(dataset: Path, out: Path, *arguments: object) -> None:
    """Run the training program in this process."""
    with in_this_process() as program:
        program.main([*map(str, [dataset, "--out", out, *SMALL, *arguments])])


def losses(out: Path) -> dict[int, float]:
    """{step: loss} of a run's journal, which has each step once."""
    found = [(entry["step"], entry["loss"]) for entry in journal(out) if "loss" in entry]
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    return dict(found)


def saved(out: Path) -> dict[str, Any]:
    """The checkpoint of a run: its step, and the states of model, optimizer and loader."""
    import torch
    from safetensors.torch import load_file

    [folder] = (out / "checkpoints").iterdir()
    files = {"optimizer": "optimizer.bin", "loader": "custom_checkpoint_0.pkl"}
    states = {name: torch.load(folder / file, map_location="cpu", weights_only=True) for name, file in files.items()}
    step = json.loads((folder / "run.json").read_text())["step"]
    assert folder.name == f"step_{step:08}"
    return {"step": step, "model": load_file(folder / "model.safetensors"), **states}


def journal(out: Path) -> list[dict[str, Any]]:
    """The entries of a run's journal."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

"""Runs of pipelines/train.py, small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Pictures of one token, and every step in the journal.
SMALL = ["--image-size", 32, 32, "--chunk", 8, "--batch-size", 8, "--consumers", 8, "--log-every", 1, "--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(dataset: Path, out: Path, *arguments: object, processes: int = 1) -> list[str]:
    """The command line of a run; of several processes, under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    program = ROOT / "pipelines/train.py"
    return list(map(str, [sys.executable, *launcher, program, dataset, "--out", out, *SMALL, *arguments]))


def train(dataset: Path, out: Path, *arguments: object, processes: int = 1) -> str:
    """What a run prints; it has to end well."""
    line = command(dataset, out, *arguments, processes=processes)
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def losses(out: Path) -> dict[int, float]:
    """{step: loss} of a run's journal, which has each step once."""
    found = [(entry["step"], entry["loss"]) for entry in journal(out) if "loss" in entry]
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    return dict(found)


def journal(out: Path) -> list[dict[str, Any]]:
    """The entries of a run's journal."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

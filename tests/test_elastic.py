"""Training that is killed and continues with another number of processes equals an uninterrupted run."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.train import ROOT, SMALL, losses, saved

from dali_stream import Dataset, Loader

pytestmark = pytest.mark.slow
STEPS, SAVE_EVERY = 12, 3
OPTIONS = ["--max-steps", STEPS, "--save-every", SAVE_EVERY]


def test_a_killed_run_goes_on_at_the_next_step(program: Any, small: Path, tmp_path: Path) -> None:
    """Each step's loss is that of the very samples that come next: one sample more, less or another would change it.

    Two processes add the same gradients up in another order than one, so their losses differ by rounding.
    """
    train(program, small, tmp_path / "whole", *OPTIONS)
    out = tmp_path / "run"
    with start(small, out, *OPTIONS) as launcher:
        os.kill(process_of_rank_1(wait_for(launcher, "step 5 of")), signal.SIGKILL)
        said = launcher.stderr.read()
    assert "rank 1 ended with -9" in said
    assert launcher.returncode != 0
    state = saved(out)
    assert state["step"] in range(SAVE_EVERY, STEPS, SAVE_EVERY)
    assert state["loader"]["position"] == 8 * state["step"]
    train(program, small, out, *OPTIONS, "--resume")
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_a_sharded_run_goes_on_with_more_processes_and_with_fewer(program: Any, small: Path, tmp_path: Path) -> None:
    """Over three epochs. SIGTERM ends one process in the first epoch, and two processes in the second one."""
    with Loader(Dataset(small, cameras=[]), batch_size=8, rank=0, world_size=1) as loader:
        epoch = len(loader)
    options = ["--loader", "shuffle=sharded", "--max-steps", 3 * epoch]
    train(program, small, tmp_path / "whole", *options)
    with pytest.MonkeyPatch.context() as patch:
        run_class = importlib.import_module("train").Run
        seen, descend = [], run_class._descend

        def interrupted(run: Any, batch: Any) -> Any:
            seen.append(batch)
            if len(seen) == epoch // 2:
                signal.raise_signal(signal.SIGTERM)
            return descend(run, batch)

        patch.setattr(run_class, "_descend", interrupted)
        with pytest.raises(SystemExit):
            train(program, small, tmp_path / "run", *options)
    assert len(losses(tmp_path / "run")) == epoch // 2
    with start(small, tmp_path / "run", *options, "--resume") as launcher:
        os.kill(process_of_rank_1(wait_for(launcher, f"step {epoch + 2} of")), signal.SIGTERM)
        said = launcher.stderr.read()
    step = saved(tmp_path / "run")["step"]
    assert epoch + 2 <= step < 3 * epoch
    assert f"SIGTERM: ended at step {step}" in said
    assert said.count("ended with 143") == 2, said
    train(program, small, tmp_path / "run", *options, "--resume")
    # Sums of gradients in another order differ by more in each step. Another sample changes a loss by much more.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=0.01)


def train(program: Any, dataset: Path, out: Path, *options: object) -> None:
    """A run in this process."""
    program.main([*map(str, [dataset, "--out", out, *SMALL, "--log-with", *options])])


def start(dataset: Path, out: Path, *options: object) -> subprocess.Popen[str]:
    """A run of two processes, whose progress can be read."""
    line = forked.command(2, "train", dataset, "--out", out, *SMALL, "--log-with", *options)
    return subprocess.Popen(line, env=forked.environment(ROOT / "pipelines"), stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], beginning: str) -> str:
    """Reads what a run says up to a line. Returns it."""
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(beginning):
            return "".join(said)
    pytest.fail(f"the run ended before {beginning!r}:\n{''.join(said)[-3000:]}")


def process_of_rank_1(said: str) -> int:
    [found] = re.findall("rank 1 is process ([0-9]+)", said)
    return int(found)

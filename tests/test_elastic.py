"""Training that is killed and continues with another number of processes equals an uninterrupted run."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.train import ENVIRONMENT, SMALL, command, in_this_process, losses, saved, train_here

from dali_stream import Dataset, Loader

pytestmark = pytest.mark.slow
STEPS, SAVE_EVERY = 12, 3
OPTIONS = ["--max-steps", STEPS, "--save-every", SAVE_EVERY]


def test_a_killed_run_goes_on_at_the_next_step(demo: Path, tmp_path: Path) -> None:
    """Each step's loss is that of the very samples that come next: one sample more, less or another would change it.

    Two processes add the same gradients up in another order than one, so their losses differ by rounding.
    """
    train_here(demo, tmp_path / "whole", *OPTIONS)
    out = tmp_path / "run"
    with start(demo, out, *OPTIONS) as launcher:
        wait_for(launcher, "step 5 of")
        os.kill(ranks(launcher)[1], signal.SIGKILL)
        launcher.stderr.read()
    assert launcher.returncode != 0
    state = saved(out)
    assert state["step"] in range(SAVE_EVERY, STEPS, SAVE_EVERY)
    assert state["loader"]["position"] == 8 * state["step"]
    train_here(demo, out, *OPTIONS, "--resume")
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_a_sharded_run_goes_on_with_more_processes_and_with_fewer(small: Path, tmp_path: Path) -> None:
    """Over three epochs. SIGTERM ends one process in the first epoch, and two processes in the second one."""
    with Loader(Dataset(small, cameras=[]), batch_size=8, rank=0, world_size=1) as loader:
        epoch = len(loader)
    options = ["--loader", "shuffle=sharded", "--max-steps", 3 * epoch]
    train_here(small, tmp_path / "whole", *options)
    with in_this_process() as program, pytest.MonkeyPatch.context() as patch:
        run_class = importlib.import_module("train").Run
        seen, descend = [], run_class._descend

        def interrupted(run: Any, batch: Any) -> Any:
            seen.append(batch)
            if len(seen) == epoch // 2:
                signal.raise_signal(signal.SIGTERM)
            return descend(run, batch)

        patch.setattr(run_class, "_descend", interrupted)
        with pytest.raises(SystemExit):
            program.main([*map(str, [small, "--out", tmp_path / "run", *SMALL, *options])])
    assert len(losses(tmp_path / "run")) == epoch // 2
    with start(small, tmp_path / "run", *options, "--resume") as launcher:
        wait_for(launcher, f"step {epoch + 2} of")
        os.kill(ranks(launcher)[1], signal.SIGTERM)
        said = launcher.stderr.read()
    step = saved(tmp_path / "run")["step"]
    assert epoch + 2 <= step < 3 * epoch
    assert f"SIGTERM: ended at step {step}" in said
    assert said.count("exitcode  : 143") == 2, said  # as torchrun reports its processes
    train_here(small, tmp_path / "run", *options, "--resume")
    # Sums of gradients in another order differ by more in each step. Another sample changes a loss by much more.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=0.01)


def start(dataset: Path, out: Path, *options: object) -> subprocess.Popen[str]:
    """A run of two processes, whose progress can be read."""
    line = command(dataset, out, *options, processes=2)
    return subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], beginning: str) -> None:
    """Reads what a run says up to a line."""
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(beginning):
            return
    pytest.fail(f"the run ended before {beginning!r}:\n{''.join(said)[-3000:]}")


def ranks(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """{rank: process id} of what torchrun started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # what has ended meanwhile
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == launcher.pid:
                variables = (folder / "environ").read_bytes().split(b"\0")
                found |= {int(each[5:]): int(folder.name) for each in variables if each.startswith(b"RANK=")}
    assert sorted(found) == list(range(len(found))) != []
    return found

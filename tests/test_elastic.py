"""Training that is killed and continues with another number of processes equals an uninterrupted run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train import ENVIRONMENT, command, in_this_process, losses, train, train_here

from dali_stream import Dataset, Loader

pytestmark = pytest.mark.slow
STEPS, SAVE_EVERY = 12, 3
OPTIONS = ["--max-steps", STEPS, "--save-every", SAVE_EVERY]


@pytest.fixture(scope="module")
def uninterrupted(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of 12 steps by one process.

    Two processes add the same gradients up in another order, so their losses differ by rounding. Another sample changes a loss
    by much more.
    """
    out = tmp_path_factory.mktemp("elastic") / "run"
    train_here(demo, out, *OPTIONS)
    return losses(out)


def test_a_killed_run_goes_on_at_the_next_step(uninterrupted: dict[int, float], demo: Path, tmp_path: Path) -> None:
    """Each step's loss is that of the very samples that come next: one sample more, less or another would change it."""
    out = tmp_path / "run"
    with start(demo, out) as launcher:
        wait_for(launcher, "step 5:")
        os.kill(ranks(launcher)[1], signal.SIGKILL)
        launcher.stderr.read()
    assert launcher.returncode != 0
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert state["step"] in range(SAVE_EVERY, STEPS, SAVE_EVERY)
    assert state["loader"]["position"] == 8 * state["step"]
    train_here(demo, out, *OPTIONS, "--resume")
    assert losses(out) == pytest.approx(uninterrupted, rel=1e-4)


def test_sigterm_to_one_process_ends_all_of_them_at_one_step_and_one_process_goes_on(
    uninterrupted: dict[int, float], demo: Path, tmp_path: Path
) -> None:
    with start(demo, tmp_path) as launcher:
        wait_for(launcher, "step 4:")
        os.kill(ranks(launcher)[1], signal.SIGTERM)
        said = launcher.stderr.read()
    step = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    assert f"SIGTERM: ended at step {step}" in said
    assert said.count("exitcode  : 143") == 2, said  # as torchrun reports its processes
    train_here(demo, tmp_path, *OPTIONS, "--resume")
    assert losses(tmp_path) == pytest.approx(uninterrupted, rel=1e-4)


def test_a_sharded_run_goes_on_with_more_processes(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle of an epoch to the end of the next one."""
    with Loader(Dataset(small, cameras=[]), batch_size=8, rank=0, world_size=1) as loader:
        epoch = len(loader)
    options = ["--shuffle", "sharded", "--max-steps", 2 * epoch]
    train_here(small, tmp_path / "whole", *options)
    with in_this_process() as program:
        seen, descend = [], program.Run._descend

        def interrupted(run: Any, batch: Any) -> Any:
            seen.append(batch)
            if len(seen) == epoch // 2:
                signal.raise_signal(signal.SIGTERM)
            return descend(run, batch)

        monkeypatch.setattr(program.Run, "_descend", interrupted)
    with pytest.raises(SystemExit):
        train_here(small, tmp_path / "run", *options)
    assert len(losses(tmp_path / "run")) == epoch // 2
    train(small, tmp_path / "run", *options, "--resume", processes=2)
    # Sums of gradients in another order differ by more in each step. Another sample changes a loss by much more.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=0.01)


def start(dataset: Path, out: Path) -> subprocess.Popen[str]:
    """A run of two processes, whose progress can be read."""
    line = command(dataset, out, *OPTIONS, processes=2)
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

"""Runs of LeRobot's training script, and the report of what was compared."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lerobot_programs import run as program

from dali_stream.tools import environment

CONTEXT = multiprocessing.get_context("forkserver")  # LeRobot is imported once, and each run is a fork
CONTEXT.set_forkserver_preload(["lerobot_programs.run"])
SEED = 7
COMMON = ["--policy.device=cpu", "--policy.push_to_hub=false", "--wandb.enable=false", f"--seed={SEED}", "--log_freq=1000"]
NEWER = hasattr(program.script, "resume_before_prepare")  # LeRobot after 0.6.1


class Failed(Exception):
    """A run of the script ended with an unexpected exit code."""


class Run:
    """Results of a run of the script.

    Args:
        folder: Folder with the output files of all ranks.

    Attributes:
        index: Indices of the frames in each batch of rank 0.
        losses: Loss of each step of rank 0.
        ranks: Indices of the frames in each batch, by rank.
        evals: Lines that LeRobot logged about its evaluation.
        frames: Dtype and memory format of the frames.
        depth: Hashes of the depth maps in each batch of rank 0, by camera.
    """

    def __init__(self, folder: Path) -> None:
        self.ranks, self.losses, self.evals = [], [], []
        self.frames: list[str] = []
        self.depth: list[dict[str, str]] = []
        for path in sorted(folder.glob("out.*")):
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            self.ranks.append([entry["index"] for entry in entries if "index" in entry])
            if path.suffix == ".0":
                self.losses = [entry["loss"] for entry in entries if "loss" in entry]
                self.depth = [entry["depth"] for entry in entries if entry.get("depth")]
                self.evals = [entry["eval"] for entry in entries if "eval" in entry]
                self.frames = next((entry["frames"] for entry in entries if "frames" in entry), [])
        self.index = self.ranks[0] if self.ranks else []


class Comparison:
    """The runs and their report.

    Args:
        folder: Folder for the output of all runs.
        data: Names of the datasets.
        out: File to which the report is written after each result. None for no file.
    """

    def __init__(self, folder: Path, data: Sequence[str], out: Path | None) -> None:
        self._folder, self._data, self._out, self._number = folder, data, out, 0
        self.checks: list[dict[str, Any]] = []

    def run(
        self,
        side: str,
        arguments: Sequence[str],
        *,
        ranks: int = 1,
        accelerate: bool = not NEWER,
        kill_at: int | None = None,
        trains: bool = True,
        drop_n_last_frames: int = 0,
        output: str | None = None,
    ) -> tuple[Run, Path]:
        """Run the script. Return its results and its output folder.

        Args:
            side: "loader" for a Loader, "stock" for LeRobot's DataLoader, or "ordered" for the latter in the Loader's order.
            arguments: Arguments of the script.
            ranks: Number of ranks. Default: 1.
            accelerate: Whether several ranks are started by `accelerate launch`, and not by torchrun. Default: as LeRobot's
                version documents it.
            kill_at: Number of the step, counted from the start of the process, at which each rank kills itself. Default: None.
            trains: Whether the policy is trained. Otherwise, batches are only preprocessed. Default: True.
            drop_n_last_frames: Argument of the sampler of "ordered". Default: 0.
            output: Output folder of an earlier run. Default: a new folder.

        Raises:
            Failed: If the exit code is 0 although the run is killed, or not 0 although it is not killed.
        """
        self._number += 1
        folder = self._folder / f"{self._number:03d}"
        folder.mkdir()
        target = Path(output) if output else folder / "run"
        spec = {"side": side, "trains": trains, "kill_at": kill_at, "out": str(folder / "out")}
        spec |= {"seed": SEED, "drop_n_last_frames": drop_n_last_frames}
        (folder / "spec.json").write_text(json.dumps(spec))
        words = [*COMMON, *arguments, f"--output_dir={target}"]
        log = folder / "log"
        if ranks == 1:
            process = CONTEXT.Process(target=alone, args=(spec, words, log))
            process.start()
            process.join()
            code = process.exitcode
        else:
            with log.open("w") as file:
                command = [*launcher(ranks, accelerate), program.__file__, str(folder / "spec.json"), "--", *words]
                code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        wanted = 0 if kill_at is None else -signal.SIGKILL if ranks == 1 else 1  # the launcher of several ranks exits with 1
        if code != wanted:
            raise Failed(f"exit code {code}: {log.read_text()[-3000:]}")
        return Run(folder), target

    def check(self, name: str, passed: bool, detail: Any) -> None:
        self.checks.append({"check": name, "passed": passed, "detail": detail})
        print(f"{'ok    ' if passed else 'FAILED'} {name}: {detail}", flush=True)
        self.write()

    def write(self) -> None:
        if self._out:
            environment.write_report(self._out, self.report())

    def report(self) -> dict[str, Any]:
        versions = {name: importlib.metadata.version(name) for name in ("lerobot", "accelerate", "torchvision")}
        report = {"lerobot": versions, "data": self._data, "checks": self.checks}
        return report | environment.ran_on("cpu")

    def attempt(self, name: str, check: Callable[[], tuple[bool, Any]]) -> None:
        """Do a check. If a run fails, the check fails."""
        try:
            self.check(name, *check())
        except Failed as error:
            self.check(name, False, str(error))


def alone(spec: dict[str, Any], words: list[str], log: Path) -> None:
    """Run the script in this process. Write its output to a file."""
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        sys.exit(program.main(spec, words))


def launcher(ranks: int, accelerate: bool) -> list[str]:
    """Return the command that starts a program on several ranks.

    `--multi_gpu` also starts several ranks on CPUs.
    """
    if not accelerate:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch = ["--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no"]
    return [sys.executable, "-m", "accelerate.commands.launch", *launch, "--dynamo_backend", "no", "--main_process_port", "0"]

"""A SLURM of stubs that record how they are called, for tests of the scripts that users submit with sbatch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Every stub begins with this: `name` is the name it was called by, `arguments` are its arguments.
HEAD = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([name, arguments, dict(os.environ)]), file=file)
"""


class Cluster:
    """A job on two nodes with four GPUs each."""

    def __init__(self, folder: Path, stub: str, names: Iterable[str]) -> None:
        """Puts programs of those names on the job's PATH. All run the Python code `stub`."""
        self.calls_file = folder / "calls"
        self.submitted_from = folder / "my project"
        self.submitted_from.mkdir()
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in names:
            (self.programs / name).write_text(HEAD + stub)
            (self.programs / name).chmod(0o755)
        self.script = folder / "slurm_script"  # where sbatch puts its copy
        self.env = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "CALLS": str(self.calls_file),
            "SLURM_SUBMIT_DIR": str(self.submitted_from),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_PER_NODE": "h100:4",
            "SLURM_CPUS_PER_TASK": "12",
        }

    def start(self, script: Path, *arguments: str, **env: str | None) -> subprocess.Popen[str]:
        """Start the batch shell with its output in pipes. A variable that is None is not set."""
        shutil.copy(script, self.script)
        given = {name: value for name, value in (self.env | env).items() if value is not None}
        return subprocess.Popen(
            ["bash", str(self.script), *arguments], env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, script: Path, *arguments: str, **env: str | None) -> subprocess.CompletedProcess[str]:
        """The job, when it has ended."""
        with self.start(script, *arguments, **env) as job:
            out, errors = job.communicate(timeout=300)
        return subprocess.CompletedProcess(job.args, job.returncode, out, errors)

    def calls(self, name: str) -> list[tuple[list[str], dict[str, str]]]:
        """Arguments and environment of each call of a program."""
        return [(arguments, env) for called, arguments, env in self._lines() if called == name]

    def called(self) -> list[str]:
        """The programs in the order of their calls."""
        return [name for name, _, _ in self._lines()]

    def _lines(self) -> list[tuple[str, list[str], dict[str, str]]]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [tuple(json.loads(line)) for line in lines]

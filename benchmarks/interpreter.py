"""Measure how long the process of a Loader holds its interpreter per frame of a first epoch.

    pip install py-spy
    python benchmarks/interpreter.py [URI] [--image-size 224x224] [--threads 4] [--processes 0 1] [--rounds 3] [--json]

py-spy (https://github.com/benfred/py-spy) looks 500 times per second whether a thread of the process holds the interpreter's
lock, without stopping it. It needs the right to read the memory of the process, as root or with
`sysctl kernel.yama.ptrace_scope=0`. In each round, the numbers of decode processes take turns, each with a new Loader of uint8
frames. An epoch is measured from the time at which all processes decode.

The times are those of a machine with nothing else to do, since a thread that waits for a core may hold the interpreter.

held_us       time in which any thread holds the interpreter per delivered frame, in µs
held_share    share of the time
frames_per_s  delivered frames per second
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import program
import psutil
from argument_types import count, count_or_none

import dali_stream
from dali_stream.checks.frame_size import frame_size

RATE = 500  # samples per second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", nargs="?", default="../shared/data/g1")
    parser.add_argument("--image-size", type=frame_size, default=(224, 224))
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--threads", type=count, default=4)
    parser.add_argument("--processes", type=count_or_none, nargs="+", default=[0, 1], help="numbers of decode processes")
    parser.add_argument("--rounds", type=count, default=3)
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    return "\n".join(
        f"{row['processes']} processes: {row['held_us']:.0f} µs per frame, {row['held_share']:.2f} of the time, "
        f"{row['frames_per_s']:.0f} frames/s"
        for row in result["results"]
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all numbers of processes in turns."""
    if shutil.which("py-spy") is None:
        raise ValueError("py-spy must be on the PATH. Install it: pip install py-spy")
    dataset = dali_stream.Dataset(arguments.uri)
    found: dict[int, list[dict[str, float]]] = {processes: [] for processes in arguments.processes}
    for number, (processes, rounds) in itertools.product(range(1, arguments.rounds + 1), found.items()):
        rounds.append(measured(dataset, processes, arguments))
        print(f"round {number} of {arguments.rounds}: {processes} processes, {rounds[-1]}", file=sys.stderr)
    return {"results": [{"processes": processes, **program.medians(rounds)} for processes, rounds in found.items()]}


def measured(dataset: dali_stream.Dataset, processes: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure one Loader."""
    with dali_stream.Loader(
        dataset,
        batch_size=arguments.batch_size,
        image_size=arguments.image_size,
        image_dtype="uint8",
        num_threads=arguments.threads,
        decode_processes=processes,
        in_process=False,
        device="cpu",
    ) as loader:
        batches = iter(loader)
        next(batches)
        while not program.have_started(1 + processes):
            next(batches)
        [own] = psutil.Process().children()
        before, began = loader.stats()["frames"], time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "samples"
            command = ["py-spy", "record", "--gil", "--nonblocking", "--format", "raw", "--output", out]
            options = ["--rate", RATE, "--duration", 100_000, "--pid", own.pid]
            spy = subprocess.Popen(list(map(str, [*command, *options])), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for _ in batches:
                pass
            took, frames = time.perf_counter() - began, loader.stats()["frames"] - before
            spy.send_signal(signal.SIGINT)  # it then writes its samples
            _, error = spy.communicate()
            if not out.exists():
                raise ValueError(f"py-spy cannot sample a process: {error.decode(errors='replace').strip()}")
            held = sum(int(line.rpartition(" ")[2]) for line in out.read_text().splitlines()) / RATE
    return {"held_us": 1e6 * held / frames, "held_share": held / took, "frames_per_s": frames / took}


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    sys.exit(main())

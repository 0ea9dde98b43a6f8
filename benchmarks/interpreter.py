"""Measure how long the interpreter is held per delivered frame, which limits how many decode threads can work at once.

    python benchmarks/interpreter.py URI [--over http|s3 [--latency-ms 50] [--megabytes-per-s 40]] [--mode single|sarm]
                                         [--batch-size 64] [--seconds 6] [--rounds 3]
                                         [--frame-cache DIR --memory-budget 256MiB] [--image-dtype float32|uint8] [--json]

py-spy (https://github.com/benfred/py-spy) samples a Loader with one decode thread 500 times per second, in its first epoch and
with frames resized to 224×224. It counts the samples in which any thread of the process holds the interpreter. The time that
these samples represent, divided by the number of delivered frames, is the cost of a frame. The report lists the cost by
function. The cost of a function includes the functions that it calls. A thread that is preempted by the system still holds the
interpreter. The samples of a thread are therefore reduced in proportion to the time that it waited for a core, according to
/proc/*/schedstat. With --over, URI is a local folder, which another process serves as in benchmarks/remote.py. With
--frame-cache, the folder is first filled with all frames, so that the Loader reads frames and decodes none.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from argument_types import count, not_negative, positive
from remote import served

import dali_stream
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import endless, take, windows

RATE = 500  # samples per second
LISTED = 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", help="a LeRobot v3 dataset")
    parser.add_argument("--over", choices=("http", "s3"), help="read the folder URI from a server on loopback")
    parser.add_argument("--latency-ms", type=not_negative, default=50, help="latency of each answer of the server")
    parser.add_argument("--megabytes-per-s", type=positive, default=40, help="bandwidth that all answers of the server share")
    parser.add_argument("--mode", choices=("single", "sarm"), default="single", help="single frames, or windows of 8")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--seconds", type=count, default=6, help="duration of a round")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--frame-cache", help="folder of a frame cache, which is filled first")
    parser.add_argument("--memory-budget", help="default: that of a Loader")
    parser.add_argument("--image-dtype", choices=("float32", "uint8"), default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    loader = {name: getattr(arguments, name) for name in ("frame_cache", "memory_budget", "image_dtype")}
    spy = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if spy is None:
        print("interpreter: needs the program py-spy; install it (pip install py-spy)", file=sys.stderr)
        return 1
    try:
        network = arguments.latency_ms / 1e3, arguments.megabytes_per_s * 1e6
        here = nullcontext(({"uri": arguments.uri}, None))
        with served(Path(arguments.uri), arguments.over, *network) if arguments.over else here as (opened, _):
            result = measure(opened, arguments.mode, arguments.batch_size, arguments.seconds, arguments.rounds, spy, loader)
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"interpreter: {error}", file=sys.stderr)
        return 1
    for name, cost in result["functions_us"].items():
        print(f"{cost:8.1f} us  {name}")
    print(
        f"the interpreter was held for {result['held_us_per_frame']:.0f} us a frame "
        f"(rounds: {', '.join(f'{cost:.0f}' for cost in result['rounds'])}), at {result['frames_per_s']:.0f} frames/s"
    )
    if arguments.json:
        print(environment.report_json(result))
    return 0


def measure(
    place: dict[str, Any], mode: str, batch_size: int, seconds: int, rounds: int, spy: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the medians over the rounds, and the cost of functions over all rounds together.

    Args:
        place: Arguments of the `Dataset`.
        mode: See `dali-stream bench`.
        batch_size: Number of samples per batch.
        seconds: Duration of a round in seconds.
        rounds: Number of rounds.
        spy: Path of py-spy.
        options: Other arguments of the Loader.

    Raises:
        DaliStreamError: If the dataset cannot be read, or py-spy cannot trace this process.
    """
    dataset = dali_stream.Dataset(**place)
    costs, rates, functions, waiting = [], [], dict[str, float](), []
    loader_arguments: dict[str, Any] = options | {
        "batch_size": batch_size, "delta_timestamps": windows(mode, dataset), "image_size": (224, 224), "num_threads": 1,
        "decode": "torchcodec", "device": "cpu",
    }  # fmt: skip
    if options["frame_cache"]:
        with dali_stream.Loader(dataset, **loader_arguments | {"last_batch": "partial"}) as loader:
            take(iter(loader), len(loader))
    for _ in range(rounds):
        with dali_stream.Loader(dataset, **loader_arguments) as loader:
            stream = endless(loader)
            take(stream, 5)  # after these batches, the queue of prepared batches is full
            stacks, sample_count, rate = watched(stream, lambda loader=loader: loader.stats()["frames"], seconds, spy)
            frame_us = 1e6 / RATE / seconds / rate  # microseconds per frame that one sample of py-spy represents
            costs.append(sum(stacks.values()) * frame_us)
            waiting.append(sample_count * frame_us - costs[-1])
            rates.append(rate)
            for stack, weight in stacks.items():
                for name in set(stack.split(";")[1:]):
                    functions[name] = functions.get(name, 0.0) + weight * frame_us / rounds
    return {
        "held_us_per_frame": statistics.median(costs),
        "rounds": costs,
        "held_off_core_us_per_frame": statistics.median(waiting),
        "frames_per_s": statistics.median(rates),
        "functions_us": dict(sorted(functions.items(), key=lambda item: -item[1])[:LISTED]),
        "mode": mode,
        "batch_size": batch_size,
        "seconds": seconds,
        "memory_budget": options["memory_budget"],
        "image_dtype": options["image_dtype"],
        "frame_cache": bool(options["frame_cache"]),
        **environment.ran_on("cpu"),
    }


def watched(stream: Any, frames: Callable[[], float], seconds: int, spy: str) -> tuple[dict[str, float], int, float]:
    """Take batches while py-spy samples this process.

    Args:
        stream: Iterator of batches.
        frames: Function that returns the number of frames delivered so far.
        seconds: Duration in seconds.
        spy: Path of py-spy.

    Returns:
        The number of samples of each stack that holds the interpreter, reduced by the time that its thread waited for a core;
        the total number of such samples; and the frames/s, excluding the time in which py-spy starts.
    """
    before, places = _scheduled(), []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "stacks")
        # Without --nonblocking, py-spy stops the process for each sample.
        command = [spy, "record", "--gil", "--threads", "--nonblocking", "--rate", str(RATE), "--duration", str(seconds)]
        with subprocess.Popen(
            [*command, "--format", "raw", "--output", str(out), "--pid", str(os.getpid())],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as program:
            lines: list[str] = []
            listener = threading.Thread(target=lambda: lines.extend(program.stdout or ()))
            listener.start()
            while program.poll() is None:
                next(stream)
                if any("Sampling" in line for line in lines):
                    places.append((time.perf_counter(), frames()))
            listener.join()
            output = "".join(lines)
        if program.returncode or not out.exists():
            raise dali_stream.DaliStreamError(
                f"py-spy failed to sample this process: {output.strip()[-300:]}. It needs permission to trace the process: run "
                "it as root, or set /proc/sys/kernel/yama/ptrace_scope to 0"
            )
        after = _scheduled()
        stacks: dict[str, float] = {}
        total = 0
        for line in out.read_text().splitlines():
            stack, sample_count = line.rsplit(" ", 1)
            if not sample_count.isdecimal():  # py-spy sometimes writes a thread without frames and without a number
                continue
            thread = int(re.findall(r"thread \((\d+)\)", stack)[0])
            ran, waited = (now - then for now, then in zip(after.get(thread, (1, 0)), before.get(thread, (0, 0)), strict=True))
            stacks[stack] = int(sample_count) * ran / (ran + waited)
            total += int(sample_count)
        inside = [place for place in places if place[0] - places[0][0] <= seconds]
        (first, at_first), (last, at_last) = inside[0], inside[-1]
        return stacks, total, (at_last - at_first) / (last - first)


def _scheduled() -> dict[int, tuple[int, int]]:
    """Return {thread: (time on a core, time that it was ready and waited for a core)} of this process, in nanoseconds."""
    times = {}
    for path in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            ran, waited, _ = (path / "schedstat").read_text().split()
            times[int(path.name)] = int(ran), int(waited)
    return times


if __name__ == "__main__":
    sys.exit(main())

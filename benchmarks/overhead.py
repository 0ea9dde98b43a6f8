"""Measure the CPU time per frame that a Loader needs beside decoding and resizing.

    python benchmarks/overhead.py [--threads 1 2 4 8 16 32 64] [--processes 0] [--decode-ms 2.3] [--memory-budget 256MiB]
                                  [--batch-size 64] [--episodes 24] [--seconds 4] [--rounds 3] [--json]

The program writes a demo dataset with two cameras of 224×224 pixels. torchcodec's decoder is replaced by one that sleeps for
`--decode-ms` per requested frame, and then returns gray frames. A thread that sleeps needs no core, so two cores show how a
Loader works with many decode threads. All else is what a Loader does: it plans, packs clips, keeps frames in slots, and copies
batches of uint8, in this process. With `--processes`, the decoder sleeps in decode processes. In each round, all numbers of
threads and processes take turns, each with a new Loader, whose cache is filled first. A round takes about a minute on 2 cores.

ideal_frames_per_s  frames per second if each thread did nothing but sleep
stored_per_frame    number of frames that are decoded per delivered frame. It grows with the threads, since the batches in
                    progress take more of the budget
cpu_us              CPU time of Python's threads per delivered frame, in µs. Its parts are `planner_us`, `decode_us`, and
                    `copy_us` of the thread that iterates and of its helpers
processes_us        CPU time of decode processes per delivered frame, in µs
planner_share       share of the time in which the planner's thread used a core
switches            voluntary switches of a thread per delivered frame, that is, how often a thread waited
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import program
import psutil
import torch
from argument_types import count, count_or_none, positive

import dali_stream
from dali_stream.decode import process_main, torchcodec
from dali_stream.decode import processes as decode_processes
from dali_stream.decode.decoder import task_frames
from dali_stream.demo import write_demo
from dali_stream.mp4.clip import TICK, TIMESCALE, Clip
from dali_stream.system.child_process import Connection
from dali_stream.tools.bench.measure import endless, take

SIZE = (224, 224)
_DECODE_S = "DALI_STREAM_OVERHEAD_DECODE_S"  # environment variable of decode processes
KINDS = {"dali_stream planner": "planner", "dali_stream decode": "decode"}  # {prefix of a thread's name: kind}


class Frames(NamedTuple):
    """Result of `get_frames_at`, with the attributes of torchcodec's `FrameBatch` that are used."""

    data: torch.Tensor
    pts_seconds: torch.Tensor


class Sleeper:
    """Decoder that sleeps instead of decoding. It has the attributes of torchcodec's `VideoDecoder` that are used."""

    def __init__(self, decode_s: float) -> None:
        self.decode_s = decode_s
        self._gray = torch.full((task_frames(SIZE) * 2, *SIZE, 3), 128, dtype=torch.uint8)
        self.metadata = argparse.Namespace(height=SIZE[0], width=SIZE[1], rotation=0)

    def get_frames_at(self, indices: list[int]) -> Frames:
        time.sleep(self.decode_s * len(indices))
        return Frames(self._gray[: len(indices)], torch.tensor(indices) * (TICK / TIMESCALE))


def sleeping_process(connection: Connection) -> None:
    """Main program of a decode process whose decoder sleeps."""
    _replace_decoder(float(os.environ[_DECODE_S]))
    process_main.main(connection)


def _replace_decoder(decode_s: float) -> Sleeper:
    sleeper = Sleeper(decode_s)

    def opened(clip: Clip, device: str = "cpu") -> Sleeper:
        return sleeper

    torchcodec._open = opened  # type: ignore[assignment]
    return sleeper


class SleepingDataset(dali_stream.Dataset):
    """Dataset whose frames are not decoded: it replaces torchcodec's decoder here, and in a process that unpickles it."""

    def __init__(self, root: Path, decode_s: float, cameras: Sequence[str] | None = None) -> None:
        super().__init__(root, cameras=cameras)
        self.decode_s = decode_s
        self.sleeper = _replace_decoder(decode_s)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.sleeper = _replace_decoder(self.decode_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--processes", type=count_or_none, nargs="+", default=[0], help="numbers of decode processes")
    parser.add_argument("--decode-ms", type=positive, default=2.3, help="time that decoding a frame takes")
    parser.add_argument("--memory-budget", default="256MiB")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--episodes", type=count, default=24, help="episodes of about 100 frames in the dataset")
    parser.add_argument("--seconds", type=positive, default=4, help="duration of each measurement")
    parser.add_argument("--rounds", type=count, default=3)
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    return "\n".join(
        f"{row['threads']:3d} threads, {row['processes']} processes: {row['frames_per_s']:6.0f} frames/s, {row['share']:.2f} "
        f"of the ideal; CPU {row['cpu_us']:.0f} µs per frame (planner {row['planner_us']:.0f}, decode {row['decode_us']:.0f}, "
        f"copy {row['copy_us']:.0f}), of decode processes {row['processes_us']:.0f}; planner {row['planner_share']:.2f} of its "
        f"time; {row['switches']:.2f} switches"
        for row in result["results"]
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all numbers of threads and processes in turns."""
    found: dict[tuple[int, int], list[dict[str, float]]] = {
        (threads, processes): [] for threads in arguments.threads for processes in arguments.processes if processes <= threads
    }
    os.environ[_DECODE_S] = str(arguments.decode_ms / 1e3)
    decode_processes.MAIN = f"{Path(__file__).stem}:{sleeping_process.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        print("writing the dataset", file=sys.stderr)
        root = write_demo(Path(folder) / "demo", episodes=arguments.episodes, size=SIZE)
        dataset = SleepingDataset(root, arguments.decode_ms / 1e3)
        for number in range(1, arguments.rounds + 1):
            for (threads, processes), rounds in found.items():
                rounds.append(measured(dataset, threads, processes, arguments))
                what = f"round {number} of {arguments.rounds}: {threads} threads, {processes} processes"
                print(f"{what}, {rounds[-1]['frames_per_s']:.0f} frames/s", file=sys.stderr)
    results = []
    for (threads, processes), rounds in found.items():
        medians = program.medians(rounds)
        if not medians["stored_per_frame"]:
            raise ValueError("memory_budget holds all frames, so that none is decoded. Use a smaller one, or more episodes")
        ideal = threads / (arguments.decode_ms / 1e3) / medians["stored_per_frame"]
        counts = {"threads": threads, "processes": processes}
        results.append({**counts, "ideal_frames_per_s": ideal, "share": medians["frames_per_s"] / ideal, **medians})
    return {"image_size": SIZE, "results": results}


def measured(dataset: SleepingDataset, threads: int, processes: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure one Loader with this number of decode threads and processes."""
    with dali_stream.Loader(
        dataset,
        batch_size=arguments.batch_size,
        image_size=SIZE,
        image_dtype="uint8",
        num_threads=threads,
        memory_budget=arguments.memory_budget,
        device="cpu",
        in_process=True,
        decode_processes=processes,
    ) as loader:
        batches = endless(loader)
        dataset.sleeper.decode_s = 0.0
        take(batches, len(loader))  # one epoch, which fills the cache
        while not program.have_started(processes):
            next(batches)
        dataset.sleeper.decode_s = arguments.decode_ms / 1e3
        take(batches, loader._config.in_progress)  # those that are decoded already, without sleeping
        before, switches, started = cpu_times(), _switches(), time.perf_counter()
        first, frames = loader.stats(), 0
        while time.perf_counter() < started + arguments.seconds:
            frames += len(next(batches)["index"]) * len(loader.dataset.cameras)
        took, after, stats = time.perf_counter() - started, cpu_times(), loader.stats()
        used = {kind: after[kind] - before[kind] for kind in after}
        per_frame = {f"{kind}_us": 1e6 * seconds / frames for kind, seconds in used.items()}
        return {
            "frames_per_s": frames / took,
            "stored_per_frame": (stats["stored_frames"] - first["stored_frames"]) / frames,
            "cpu_us": sum(per_frame.values()) - per_frame["processes_us"],
            **per_frame,
            "planner_share": used["planner"] / took,
            "switches": (_switches() - switches) / frames,
        }


def cpu_times() -> dict[str, float]:
    """Return the CPU seconds of this process by kind of thread, and those of decode processes."""
    seconds = Counter[str](planner=0, decode=0, copy=0, processes=0)
    for thread in threading.enumerate():
        kind = next((kind for prefix, kind in KINDS.items() if thread.name.startswith(prefix)), "copy")
        assert thread.native_id is not None
        # The first number is the time on a core in ns. Those in stat count ticks of 10 ms.
        seconds[kind] += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    for process in psutil.Process().children(recursive=True):
        seconds["processes"] += sum(process.cpu_times()[:2])
    return dict(seconds)


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


if __name__ == "__main__":
    sys.exit(main())

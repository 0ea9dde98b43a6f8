"""Measure the cost of a dataset of the size of DROID: 76,000 episodes, 20 million frames, 3 cameras, batches of 64.

    python benchmarks/scale.py FOLDER [--only NAME ...] [--json]

The program writes the datasets to FOLDER unless they exist. They take 3 GB, with hard links counted once, and the frame cache
on disk takes 15 GB. Each measurement
runs in a separate process, and the Loader works in that process. Times are CPU seconds. Memory is that of the process, minus
its memory after all imports and one batch of a small dataset.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argument_types import count
from scale_dataset import CAMERAS, write

import dali_stream
from dali_stream.mp4.index import read_index
from dali_stream.system.heap import trim_memory
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import endless
from dali_stream.tools.environment import cpu_s

BATCH = 64


def rss() -> int:
    """Return the memory of this process in bytes."""
    return environment.memory_bytes("VmRSS") or 0


class Bench:
    """The datasets, and the measurements, each of which runs in a separate process."""

    def __init__(self, folder: Path, episodes: int, batches: int) -> None:
        self.folder, self.batches = folder, batches
        self.large = folder / str(episodes)
        self.small = folder / "1000"
        self.episodes = episodes

    def write(self) -> None:
        """Write the datasets that do not exist."""
        write(self.small, 1000)
        write(self.large, self.episodes)

    def import_all(self) -> int:
        """Import everything that a Loader needs. Return the memory of the process afterwards, in bytes."""
        loader = self.loader(dali_stream.Dataset(self.small))
        next(iter(loader))
        loader.close()
        del loader
        gc.collect()
        trim_memory()
        return rss()

    def loader(self, dataset: Any, **settings: Any) -> dali_stream.Loader:
        """Return a Loader of uint8 frames of the recorded size."""
        return dali_stream.Loader(
            dataset, batch_size=BATCH, image_dtype="uint8", device="cpu", seed=1, in_process=True, **settings
        )

    def open(self) -> dict[str, Any]:
        """Measure the time and memory of opening the large dataset."""
        before, began = self.import_all(), cpu_s()
        dataset = dali_stream.Dataset(self.large)
        took = cpu_s() - began
        return {"open_cpu_s": took, "open_rss_bytes": rss() - before, "frames": dataset.num_frames}

    def index(self) -> dict[str, Any]:
        """Measure the time and memory of the index of a video file."""
        dataset = dali_stream.Dataset(self.large)
        path = dataset.table.video[CAMERAS[0]].paths[0]
        began, index = cpu_s(), read_index(dataset.data_store, path)
        return {"index_bytes_per_frame": index.nbytes / len(index), "index_cpu_s": cpu_s() - began}

    def memory(self, budget: str, **settings: Any) -> dict[str, Any]:
        """Measure the memory after each fifth of the batches, and the CPU time per sample after the first fifth.

        The first batch is timed from the construction of the Loader.
        """
        before, peaks, last, first = self.import_all(), [], 0, 0.0
        dataset, opened, began = dali_stream.Dataset(self.large), _count_opened(), cpu_s()
        with self.loader(dataset, memory_budget=budget, **settings) as loader:
            for number, _ in enumerate(endless(loader), start=1):
                if number == 1:
                    first = cpu_s() - began
                if number % (self.batches // 5) == 0:
                    peaks.append(rss() - before)
                    last, began = (number, cpu_s()) if len(peaks) == 1 else (last, began)
                if number == self.batches:
                    break
            each = (cpu_s() - began) / (self.batches - last) / BATCH
        frames = self.batches * BATCH * len(CAMERAS)
        return {
            "first_batch_cpu_s": first,
            "rss_bytes": peaks,
            "cpu_s_per_sample": each,
            "opened_files_per_1000_frames": 1000 * len(opened) / frames,
        }

    def frame_cache(self, is_filled: bool) -> dict[str, Any]:
        """Do the same with a frame cache on disk, which is empty, or has the frames of the same batches."""
        folder = self.folder / "frames"
        if not is_filled:
            shutil.rmtree(folder, ignore_errors=True)
        return self.memory("4GiB", frame_cache=folder)

    def resume(self) -> dict[str, Any]:
        """Measure the time of the first batch at the start of an epoch, and after resuming at 95 % of it."""
        self.import_all()
        dataset, seconds = dali_stream.Dataset(self.large), []
        for share in (0.0, 0.95):
            with self.loader(dataset) as loader:
                state = loader.state_dict() | {"epoch": 2, "position": int(share * len(loader)) * BATCH}
                began = cpu_s()
                loader.load_state_dict(state)
                next(iter(loader))
                seconds.append(cpu_s() - began)
        return {"first_batch_cpu_s": seconds[0], "resume_cpu_s": seconds[1]}


MEASUREMENTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "open": Bench.open,
    "index": Bench.index,
    "pool": lambda bench: bench.memory("4GiB"),
    "global": lambda bench: bench.memory("4GiB", shuffle="global"),
    "frame cache, empty": lambda bench: bench.frame_cache(is_filled=False),
    "frame cache, filled": lambda bench: bench.frame_cache(is_filled=True),
    "resume": Bench.resume,
}


def _count_opened() -> list[str]:
    """Return a list to which the files of datasets that are opened from now on are added."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith((".mp4", ".parquet")):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure time and memory for a dataset of DROID's size")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=count, default=76_000)
    parser.add_argument("--batches", type=count, default=2000)
    parser.add_argument("--only", nargs="+", choices=[*MEASUREMENTS], default=[*MEASUREMENTS])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # runs one measurement in this process
    arguments = parser.parse_args()
    bench = Bench(arguments.folder, arguments.episodes, max(arguments.batches, 10))
    if arguments.here:
        print(json.dumps(MEASUREMENTS[arguments.only[0]](bench)))
        return
    bench.write()
    result: dict[str, Any] = {"episodes": arguments.episodes, "batches": arguments.batches, "batch_size": BATCH}
    for name in arguments.only:
        sizes = ["--episodes", str(arguments.episodes), "--batches", str(arguments.batches)]
        command = [sys.executable, __file__, str(arguments.folder), "--here", "--only", name, *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
        result[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {result[name]}", flush=True)
    if arguments.json:
        print(environment.report_json(result | environment.ran_on("cpu")))


if __name__ == "__main__":
    main()

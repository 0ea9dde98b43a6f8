"""Measure the frame cache on disk (`Loader(frame_cache=...)`): filling it, reading it, and sharing it between ranks.

    python benchmarks/disk_frames.py URI [URI ...] [--image-size 224x224] [--memory-budget 256MiB] [--rounds 3]
                                     [--folder DIR ...] [--json]

Each round measures these epochs with new Loaders, for each dataset and each folder (a disk, and memory such as /dev/shm):

- `without`: first epoch without the cache.
- `filling`: first epoch with an empty cache, writing included.
- `warm`: second epoch of the same Loader, whose records are in the system's page cache.
- `cold`: epoch of a new Loader after the pages of all records were dropped from the page cache (not in memory).
- `plain`: threads that read the records in random order from these files, as cold, with one `pread` each.
- `in memory`: second epoch of a Loader whose memory_budget holds all frames.

Then two processes run two epochs as two ranks, with a new cache, with shuffle=True and "global", and a new process runs one
epoch with the full cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import program
from argument_types import count

import dali_stream
from dali_stream.checks.frame_size import frame_size

RANK = """
import json, sys
from dali_stream import Loader
uri, arguments = sys.argv[1], json.loads(sys.argv[2])
decoded, epochs = [], arguments.pop("epochs", 2)
with Loader(uri, **arguments) as loader:
    for _ in range(epochs):
        before, batches = loader.stats(), iter(loader)
        print("ready", flush=True)
        input()
        for _ in batches:
            pass
        now = loader.stats()
        decoded.append({key: now[key] - before[key] for key in ("decoded_frames", "frames", "disk_hits")})
print(json.dumps({"epochs": decoded, "first_batch_s": loader.stats()["first_batch_s"]}), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", nargs="+", help="LeRobot datasets")
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--memory-budget", default="256MiB", help="of all Loaders but the one whose frames are in memory")
    parser.add_argument("--folder", nargs="+", type=Path, default=[Path("/dev/shm"), Path(tempfile.gettempdir())])
    parser.add_argument("--rounds", type=count, default=3, help="rounds; the medians are compared")
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = []
    for each in result["datasets"]:
        lines.append(f"{each['dataset']}: {each['frames']} frames")
        for place in each["folders"]:
            rates = ", ".join(f"{name} {rate:.0f}" for name, rate in place["frames_per_s"].items())
            ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in place["ratios"].items())
            lines += [f"  {place['folder']}: frames/s: {rates}", f"  {place['folder']}: ratios: {ratios}"]
        lines += [f"  ranks: decoded per frame {each['ranks']}", f"  new process: {each['new_process']}"]
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all datasets."""
    return {"datasets": [measure_dataset(uri, arguments) for uri in arguments.uri]}


def measure_dataset(uri: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of one dataset."""
    dataset = dali_stream.Dataset(uri)
    frames = dataset.num_frames * len(dataset.cameras)
    loader = {"image_size": arguments.image_size, "image_dtype": "uint8", "device": "cpu", "batch_size": 64}
    small = loader | {"memory_budget": arguments.memory_budget}
    folders = [rates(dataset, place, loader, small, arguments.rounds) for place in arguments.folder]
    with tempfile.TemporaryDirectory(dir=arguments.folder[0]) as folder:
        ranks = {}
        for shuffle in (True, "global"):
            cache = f"{folder}/{shuffle}"
            found = together(
                uri, [small | {"shuffle": shuffle, "frame_cache": cache, "rank": r, "world_size": 2} for r in (0, 1)]
            )
            ranks[str(shuffle)] = [sum(each["epochs"][e]["decoded_frames"] for each in found) / frames for e in (0, 1)]
        [with_cache] = together(uri, [small | {"frame_cache": f"{folder}/True", "epochs": 1}])
        [without] = together(uri, [small | {"epochs": 1}])
    new = {
        "decoded_frames": with_cache["epochs"][0]["decoded_frames"],
        "first_batch_s": with_cache["first_batch_s"],
        "first_batch_without_s": without["first_batch_s"],
    }
    return {"dataset": dataset.uri, "frames": frames, "folders": folders, "ranks": ranks, "new_process": new}


def rates(
    dataset: dali_stream.Dataset, place: Path, loader: dict[str, Any], small: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Return the frames per second of each kind of epoch, with the cache in a new folder below `place`."""
    found: dict[str, list[float]] = {}
    on_disk = not str(place).startswith("/dev/shm")
    for number in range(rounds):
        steps = [lambda: without(dataset, small), lambda: with_cache(dataset, small, place, on_disk)]
        for step in steps if number % 2 == 0 else steps[::-1]:
            for name, rate in step().items():
                found.setdefault(name, []).append(rate)
        with dali_stream.Loader(dataset, **loader, memory_budget="4GiB") as whole:
            program.epoch_rate(whole)
            found.setdefault("in memory", []).append(program.epoch_rate(whole))
    middle = {name: statistics.median(values) for name, values in found.items()}

    def ratio(first: str, second: str) -> float:
        return statistics.median(a / b for a, b in zip(found[first], found[second], strict=True))

    ratios = {
        "filling / without": ratio("filling", "without"),
        "warm / without": ratio("warm", "without"),
        "warm / in memory": ratio("warm", "in memory"),
    }
    if on_disk:
        ratios["cold / plain"] = ratio("cold", "plain")
    return {"folder": "disk" if on_disk else "memory", "frames_per_s": middle, "rounds": found, "ratios": ratios}


def without(dataset: dali_stream.Dataset, small: dict[str, Any]) -> dict[str, float]:
    with dali_stream.Loader(dataset, **small) as loader:
        return {"without": program.epoch_rate(loader)}


def with_cache(dataset: dali_stream.Dataset, small: dict[str, Any], place: Path, on_disk: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        with dali_stream.Loader(dataset, **small, frame_cache=folder) as loader:
            found = {"filling": program.epoch_rate(loader), "warm": program.epoch_rate(loader)}
        if on_disk:
            record = 3 * small["image_size"][0] * small["image_size"][1]
            forget(folder)
            found["plain"] = plain(folder, record)
            forget(folder)
            with dali_stream.Loader(dataset, **small, frame_cache=folder) as loader:
                found["cold"] = program.epoch_rate(loader)
        return found


def records(folder: str) -> Iterator[Path]:
    return Path(folder).glob("*/*/*")


def forget(folder: str) -> None:
    """Write all records to the disk, and drop their pages from the page cache."""
    for path in records(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain(folder: str, record: int) -> float:
    """Return the records per second that threads read from all files in random order, with a thread per core."""
    places = []
    for path in records(folder):
        number = os.open(path, os.O_RDONLY)
        # After the records, the file has at most 16 + 16 * 256 bytes for each of them. Up to 2.7 % of the records are not read.
        count = os.fstat(number).st_size // (record + 16 + 16 * 256)
        places += [(number, record * at) for at in range(count)]
    random.Random(0).shuffle(places)
    count = len(os.sched_getaffinity(0))

    def read(own: list[tuple[int, int]]) -> None:
        frame = np.empty(record, np.uint8)
        for number, at in own:
            assert os.preadv(number, [frame.data], at) == record

    threads = [threading.Thread(target=read, args=(places[first::count],)) for first in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    for number in {number for number, _ in places}:
        os.close(number)
    return len(places) / seconds


def together(uri: str, arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run processes with these arguments of a Loader. They begin each epoch together."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, uri, json.dumps(each)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for each in arguments
        ]
        while True:
            lines = [process.stdout.readline() for process in processes if process.stdout]
            if lines[0] != "ready\n":
                return [json.loads(line) for line in lines]
            for process in processes:
                assert process.stdin
                process.stdin.write("\n")
                process.stdin.flush()


if __name__ == "__main__":
    sys.exit(main())

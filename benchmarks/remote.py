"""Compare the speed of a dataset on a slow network with that of the same dataset on the local disk.

    python benchmarks/remote.py ROOT [--over http|s3] [--latency-ms 50] [--megabytes-per-s 40] [--batch-size 64] [--rounds 5]
                                     [--json]

A separate process serves the folder ROOT over HTTP or S3 on loopback, with a latency for each request and a bandwidth that all
requests share. In each round, four sides take turns with the same order: the local disk; remote with empty caches ("cold");
remote in the second epoch, from memory; and remote with a filled `cache_dir` only. A rate is that of an epoch without its first
batch, whose time is reported separately. It is compared with the rate of the local disk in the same round. The server uses the
same cores. Before each Loader starts, memory for all decoded frames, up to 5 GiB, is written, because the host of a virtual
machine may provide memory slowly when it is first written.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import program
from argument_types import count, not_negative, positive
from host_memory import provide

import dali_stream

BUCKET = "robots"
TOUCHED = 5 << 30  # maximum number of bytes to write, which is more than the default memory_budget
TESTS = Path(__file__).parents[1] / "tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", type=Path, help="a local LeRobot v3 dataset")
    parser.add_argument("--over", choices=("http", "s3"), default="http")
    parser.add_argument("--latency-ms", type=not_negative, default=50, help="latency of each request")
    parser.add_argument("--megabytes-per-s", type=positive, default=40, help="bandwidth that all requests share")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=5, help="rounds; the medians are compared")
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    return "\n".join(
        f"{name:7} {figures['frames_per_s']:6.0f} frames/s, {figures['ratio']:.3f} of local; "
        f"first batch after {figures['first_batch_s']:.2f} s; "
        f"{figures['requests']:.0f} requests, {figures['fetched_bytes'] / 1e6:.1f} MB"
        for name, figures in result["medians"].items()
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the four sides in turns."""
    loader = {"batch_size": arguments.batch_size, "memory_budget": "4GiB"}
    rounds: dict[str, list[dict[str, float]]] = {"local": [], "cold": [], "memory": [], "cache": []}
    network = served(arguments.root, arguments.over, arguments.latency_ms / 1e3, arguments.megabytes_per_s * 1e6)
    with tempfile.TemporaryDirectory() as cache, network as remote:
        epochs(dali_stream.Dataset(**remote, cache_dir=cache), 1, loader)  # fills the cache and warms up the process
        for _ in range(arguments.rounds):
            rounds["local"] += epochs(dali_stream.Dataset(arguments.root), 1, loader)
            cold, memory = epochs(dali_stream.Dataset(**remote), 2, loader)
            rounds["cold"].append(cold)
            rounds["memory"].append(memory)
            rounds["cache"] += epochs(dali_stream.Dataset(**remote, cache_dir=cache), 1, loader)
    for sides in zip(*rounds.values(), strict=True):
        for side in sides:
            side["ratio"] = side["frames_per_s"] / sides[0]["frames_per_s"]
    medians = {name: program.medians(turns) for name, turns in rounds.items()}
    return {"medians": medians, "rounds": rounds}


def epochs(dataset: dali_stream.Dataset, count: int, arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Stream some epochs with one Loader. Return the rate, the time of the first batch and counters of each epoch.

    Args:
        dataset: Dataset to stream.
        count: Number of epochs.
        arguments: Arguments of the Loader.
    """
    results = []
    frame_bytes = sum(math.prod(dataset.features[camera].shape) for camera in dataset.cameras)
    provide(min(TOUCHED, dataset.num_frames * frame_bytes))
    with dali_stream.Loader(dataset, image_dtype="uint8", **arguments) as loader:
        for _ in range(count):
            before, began = loader.stats(), time.perf_counter()
            batches, frames = iter(loader), 0
            next(batches)
            started = time.perf_counter()
            for batch in batches:
                frames += len(batch["index"]) * len(dataset.cameras)
            rate, after = frames / (time.perf_counter() - started), loader.stats()
            spent = {key: after[key] - before[key] for key in ("requests", "fetched_bytes", "needed_bytes", "cached_bytes")}
            results.append({"frames_per_s": rate, "first_batch_s": started - began, **spent})
    return results


@contextmanager
def served(root: Path, over: str, latency_s: float, bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """Serve a folder from another process. Yields the arguments of `Dataset` for the folder."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (theirs, root, over, latency_s, bytes_per_s)
    serving = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
    serving.start()
    url = ours.recv()
    try:
        if over == "http":
            yield {"uri": url}
        else:
            yield {"uri": f"s3://{BUCKET}", "storage_options": {"anon": True, "endpoint_url": url}}
    finally:
        ours.send("end")
        serving.join()


def _serve(connection: Connection, root: Path, over: str, latency_s: float, bytes_per_s: float) -> None:
    """Serve a folder until the connection receives a message."""
    sys.path.insert(0, str(TESTS))
    from support.clouds import Objects
    from support.servers import Server

    network = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
    if over == "http":
        server = Server(root, **network)
    else:
        files = {f"{BUCKET}/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*") if path.is_file()}
        server = Objects(files, **network)
    with server:
        connection.send(server.url)
        connection.recv()


if __name__ == "__main__":
    sys.exit(main())

"""Measure runs with the same order that share a frame cache on disk, such as those of a hyperparameter sweep.

    python benchmarks/sweep.py URI [--runs 1 2 4] [--rounds 3] [--folder DIR] [--json]

`runs` processes begin their first epoch together, each with all threads, and with an empty cache or without one. The table has
the time until all of them have finished, and the number of decoded frames per frame of the dataset, over all runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import program
from argument_types import count
from disk_frames import together

import dali_stream
from dali_stream.checks.frame_size import frame_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", help="a LeRobot dataset")
    parser.add_argument("--runs", type=count, nargs="+", default=[1, 2, 4])
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--memory-budget", default="256MiB", help="of each run")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="folder for the caches")
    parser.add_argument("--rounds", type=count, default=3, help="rounds; the medians are printed")
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    return "\n".join(
        f"{row['runs']:3} runs {'with a frame cache' if row['frame_cache'] else 'without':18}: {row['seconds']:6.1f} s, "
        f"{row['decoded_per_frame']:.2f} decoded per frame"
        for row in result["results"]
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the median of the rounds for each number of runs, with and without a frame cache."""
    dataset = dali_stream.Dataset(arguments.uri)
    frames = dataset.num_frames * len(dataset.cameras)
    loader = {"image_size": arguments.image_size, "image_dtype": "uint8", "device": "cpu", "batch_size": 64, "epochs": 1}
    loader |= {"memory_budget": arguments.memory_budget}
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        for runs in arguments.runs:
            for cached in (False, True):
                with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                    began = time.perf_counter()
                    ended = together(arguments.uri, [loader | ({"frame_cache": folder} if cached else {})] * runs)
                    seconds = time.perf_counter() - began
                decoded = sum(run["epochs"][0]["decoded_frames"] for run in ended)
                found.setdefault((runs, cached), []).append((seconds, decoded / frames))
    results = [
        {"runs": runs, "frame_cache": cached, "seconds": seconds, "decoded_per_frame": decoded}
        for (runs, cached), each in found.items()
        for seconds, decoded in [map(statistics.median, zip(*each, strict=True))]
    ]
    return {"dataset": dataset.uri, "results": results}


if __name__ == "__main__":
    sys.exit(main())

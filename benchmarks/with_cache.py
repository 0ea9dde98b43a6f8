"""Measure the effect of the frame cache on this machine: the speed of first epochs with and without the cache, in turns.

    python benchmarks/with_cache.py URI [URI ...] [--image-size 224 224] [--without 8MiB] [--rounds 3] [--json]

Without the cache, memory_budget holds so few decoded frames that nearly every frame is decoded again for each use.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from argument_types import count
from decode_floor import mean_wait

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.tools import environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", nargs="+", help="LeRobot v3 datasets")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--without", default="8MiB", help="memory_budget of the epochs without the cache")
    parser.add_argument("--rounds", type=count, default=3, help="rounds; the medians are compared")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(join_sizes())
    try:
        datasets = [measure(uri, arguments) for uri in arguments.uri]
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"with_cache: {error}", file=sys.stderr)
        return 1
    for figures in datasets:
        cached, uncached = figures["with"], figures["without"]
        print(
            f"{figures['dataset']}: {cached['frames_per_s']:.0f} frames/s with the cache, {uncached['frames_per_s']:.0f} "
            f"without; {cached['decoded_per_frame']:.2f} "
            f"and {uncached['decoded_per_frame']:.2f} decoded frames per delivered frame"
        )
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "uri")}
        print(environment.report_json({"datasets": datasets, "arguments": settings, **environment.ran_on("cpu")}))
    return 0


def measure(uri: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians over first epochs. Each round uses new Loaders."""
    dataset = dali_stream.Dataset(uri)
    if not dataset.videos:
        raise ValueError(f"dataset must have a camera with video, got {dataset.uri} without one")
    rates: dict[str, list[float]] = {"with": [], "without": []}
    decoded = {}
    for _ in range(arguments.rounds):
        for name, budget in (("with", "4GiB"), ("without", arguments.without)):
            with dali_stream.Loader(
                dataset, batch_size=arguments.batch_size, image_size=arguments.image_size, memory_budget=budget,
                decode="torchcodec", device="cpu",
            ) as loader:  # fmt: skip
                seconds = mean_wait(iter(loader), max(len(loader) - 1, 1), [])
                rates[name].append(arguments.batch_size * len(dataset.videos) / seconds)
                stats = loader.stats()
                decoded[name] = stats["decoded_frames"] / stats["frames"]
    return {
        "dataset": dataset.uri,
        **{
            name: {"frames_per_s": statistics.median(rates[name]), "rounds": rates[name], "decoded_per_frame": decoded[name]}
            for name in rates
        },
    }


if __name__ == "__main__":
    sys.exit(main())

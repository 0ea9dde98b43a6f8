"""How near a mixture comes to the rate that its datasets have alone.

    python benchmarks/mixture.py ROOT ROOT ... [--image-size 224 224] [--batch-size 64] [--rounds 5] [--json]

In each round a loader of each dataset and one of their union take turns, one epoch each, with the same arguments. A union shows
what its datasets show in an epoch, so it should take as long as they do together: its expected rate is the harmonic mean of
theirs, weighted by samples. Rates are of whole epochs, from the first request for a batch on, in samples/s, since datasets have
different cameras; the mixture also has the cost of cameras that are missing, as zeros. Frames are uint8, decoded on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from argument_types import count

import dali_stream
from dali_stream.tools import environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("roots", nargs="+", type=Path, help="local LeRobot datasets")
    parser.add_argument("--image-size", nargs=2, type=count, default=(224, 224))
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=5, help="rounds; the medians are compared")
    parser.add_argument("--memory-budget", default="4GiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    try:
        result = measure(arguments)
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"mixture: {error}", file=sys.stderr)
        return 1
    for name, rate in result["samples_per_s"].items():
        print(f"{name:12} {rate:7.0f} samples/s")
    print(f"expected     {result['expected']:7.0f} samples/s; the mixture has {result['ratio']:.3f} of that")
    if arguments.json:
        print(environment.report_json(result))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternates the datasets and their union."""
    datasets = {root.name: dali_stream.Dataset(root) for root in arguments.roots}
    if len(datasets) < len(arguments.roots):
        raise ValueError("two of the folders have the same name; give each dataset another one")
    sides: dict[str, Any] = {**datasets, "mixture": dali_stream.Mixture(datasets, missing="pad")}
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.rounds + 1):  # the first only warms up
        for name, side in sides.items():
            rate = epoch(side, arguments)
            rounds[name] += [rate] if turn else []
    frames = {name: dataset.num_frames for name, dataset in datasets.items()}
    expected = [
        sum(frames.values()) / sum(frames[name] / rounds[name][turn] for name in datasets) for turn in range(arguments.rounds)
    ]
    return {
        "arguments": {key: str(value) for key, value in vars(arguments).items() if key != "roots"},
        "frames": frames,
        "samples_per_s": {name: statistics.median(rates) for name, rates in rounds.items()},
        "expected": statistics.median(expected),
        "ratio": statistics.median(rate / wanted for rate, wanted in zip(rounds["mixture"], expected, strict=True)),
        "rounds": rounds,
        **environment.ran_on("cpu"),
    }


def epoch(dataset: dali_stream.Dataset | dali_stream.Mixture, arguments: argparse.Namespace) -> float:
    """Samples/s of one epoch with a new loader."""
    options = {"image_dtype": "uint8", "image_size": tuple(arguments.image_size), "memory_budget": arguments.memory_budget}
    with dali_stream.Loader(
        dataset, batch_size=arguments.batch_size, last_batch="partial", device="cpu", decode="torchcodec", **options
    ) as loader:
        started = time.perf_counter()
        samples = sum(len(batch["index"]) for batch in loader)
        return samples / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())

"""Compare the rate of a mixture with the rates of its datasets.

    python benchmarks/mixture.py ROOT ROOT ... [--image-size 224 224] [--batch-size 64] [--rounds 5] [--json]

In each round, a Loader of each dataset and a Loader of their union take turns, with one epoch each and the same arguments. An
epoch of a union delivers the samples of its datasets, so it should take as long as they do together. The expected rate is the
harmonic mean of their rates, weighted by samples. Rates are measured over whole epochs, from the first request for a batch.
They are in samples/s, since datasets have different cameras. The first cameras of all datasets form one camera of the mixture.
The other cameras are zeros if a dataset lacks them. Frames are uint8, and decoded on the CPU.

Before each epoch, memory is written and freed. The host of a virtual machine provides memory when it is first written, which
would slow down the mixture, since it needs more memory than each dataset. The program also compares CPU times, since they
depend less on other programs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from argument_types import count
from host_memory import provide

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.tools import environment

MAIN = "observation.images.main"
TOUCHED = 2 << 30  # bytes to write, which is more than the decoded frames of the datasets in the docs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("roots", nargs="+", type=Path, help="local LeRobot datasets")
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=5, help="rounds; the medians are compared")
    parser.add_argument("--memory-budget", default="4GiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(join_sizes())
    try:
        result = measure(arguments)
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"mixture: {error}", file=sys.stderr)
        return 1
    for name, rate in result["samples_per_s"].items():
        print(f"{name:12} {rate:7.0f} samples/s")
    print(f"expected     {result['expected']:7.0f} samples/s; the mixture has {result['ratio']:.3f} of that")
    print(f"CPU time     {result['cpu_ratio']:7.3f} of what the datasets take together")
    if arguments.json:
        print(environment.report_json(result))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the datasets and their union in turns."""
    datasets = {root.name: dali_stream.Dataset(root) for root in arguments.roots}
    if len(datasets) < len(arguments.roots):
        raise ValueError("folders of the datasets must have different names. Rename one of them")
    keys = {name: {dataset.cameras[0]: MAIN} for name, dataset in datasets.items()}
    sides: dict[str, Any] = {**datasets, "mixture": dali_stream.Mixture(datasets, keys=keys, missing="pad")}
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.rounds + 1):  # the first round is a warm-up
        for name, side in sides.items():
            rate, cpu_s = epoch(side, arguments)
            rounds[name] += [rate] if turn else []
            cpu[name] += [cpu_s] if turn else []
    frames = {name: dataset.num_frames for name, dataset in datasets.items()}
    turns = range(arguments.rounds)
    expected = [sum(frames.values()) / sum(frames[name] / rounds[name][turn] for name in datasets) for turn in turns]
    return {
        "arguments": {key: str(value) for key, value in vars(arguments).items() if key != "roots"},
        "frames": frames,
        "samples_per_s": {name: statistics.median(rates) for name, rates in rounds.items()},
        "expected": statistics.median(expected),
        "ratio": statistics.median(rate / wanted for rate, wanted in zip(rounds["mixture"], expected, strict=True)),
        "cpu_ratio": statistics.median(cpu["mixture"][turn] / sum(cpu[name][turn] for name in datasets) for turn in turns),
        "rounds": rounds,
        "cpu_s": cpu,
        **environment.ran_on("cpu"),
    }


def epoch(dataset: dali_stream.Dataset | dali_stream.Mixture, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the samples/s and the CPU time in seconds of one epoch with a new Loader."""
    provide(TOUCHED)
    options = {"image_dtype": "uint8", "image_size": arguments.image_size, "memory_budget": arguments.memory_budget}
    with dali_stream.Loader(
        dataset, batch_size=arguments.batch_size, last_batch="partial", device="cpu", decode="torchcodec", **options
    ) as loader:
        started, cpu = time.perf_counter(), time.process_time()
        samples = sum(len(batch["index"]) for batch in loader)
        return samples / (time.perf_counter() - started), time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())

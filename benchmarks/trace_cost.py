"""Measure what a trace costs: while one is being recorded, and while none is.

    python benchmarks/trace_cost.py URI [--rounds 10] [--batch-size 16] [--image-size 224x224] [--json]

Each round measures whole epochs of three kinds, one after the other, in an order that changes from round to round:

- without: the functions that record spans are replaced by functions that do nothing.
- off: the Loader as it is. No trace is being recorded.
- on: a trace is being recorded. The time to write its file is not included.

The times are CPU seconds of all threads per batch. They are measured for first epochs, which decode each frame, and for later
epochs, which decode nothing if the dataset fits in memory. The cost is the median over the rounds of the relative difference
from "without" in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from argument_types import count

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.tools import environment

KINDS = ("without", "off", "on")
USERS = (
    "observe.counters",
    "loader",
    "system.workers",
    "pipeline.planner",
    "pipeline.dali_batches",
    "cache.slots",
    "cache.video",
    "cache.open_episodes",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri")
    parser.add_argument("--rounds", type=count, default=10)
    parser.add_argument("--batch-size", type=count, default=16)
    parser.add_argument("--image-size", type=frame_size, default=(224, 224))
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(join_sizes())
    options = {"batch_size": arguments.batch_size, "image_size": arguments.image_size, "device": "cpu"}
    seconds: dict[str, dict[str, list[float]]] = {epoch: {kind: [] for kind in KINDS} for epoch in ("first", "later")}
    for number in range(arguments.rounds):
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            with recording(kind), dali_stream.Loader(arguments.uri, **options) as loader:
                for epoch in seconds:
                    seconds[epoch][kind].append(cpu_per_batch(loader))
    report: dict[str, Any] = {"rounds": arguments.rounds, **options}
    for epoch, kinds in seconds.items():
        report[epoch] = {f"{kind}_cpu_s": statistics.median(values) for kind, values in kinds.items()}
        for kind in ("off", "on"):
            costs = [value / base - 1 for value, base in zip(kinds[kind], kinds["without"], strict=True)]
            report[epoch] |= {f"{kind}_cost": statistics.median(costs), f"{kind}_costs": sorted(costs)}
        costs_now = (f"{report[epoch][f'{kind}_cost']:+.1%} while {kind}" for kind in ("off", "on"))
        print(f"{epoch} epoch: {', '.join(costs_now)}", flush=True)
    if arguments.json:
        print(environment.report_json(report | environment.ran_on("cpu")))
    return 0


def cpu_per_batch(loader: dali_stream.Loader) -> float:
    """Return the CPU seconds per batch of the next epoch, over all threads of this process."""
    began, batches = time.process_time(), 0
    for _ in loader:
        batches += 1
    return (time.process_time() - began) / batches


@contextlib.contextmanager
def recording(kind: str) -> Iterator[None]:
    """Record a trace inside the block ("on"), none ("off"), or remove the functions that would record it ("without")."""
    with contextlib.ExitStack() as stack:
        if kind == "on":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(dali_stream.trace(Path(folder) / "trace.json"))
        elif kind == "without":
            replaced = {
                "record": lambda *_: None,
                "span": lambda *_: contextlib.nullcontext(),
                "bound": lambda call: call,
                "begin_batch": lambda _: None,
                "profiled": lambda _: contextlib.nullcontext(),
            }
            for module in (importlib.import_module(f"dali_stream.{name}") for name in USERS):
                for name in replaced.keys() & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, name, replaced[name]))
        yield


if __name__ == "__main__":
    sys.exit(main())

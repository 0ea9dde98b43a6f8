"""Measure the time and memory of the order for a dataset of any size. No files are needed.

    python benchmarks/order_scale.py [--episodes 1000000] [--consumers 64] [--datasets 1] [--sharded] [--json]

The program times planning, that is, making the order and reading its first batch. It also times skipping a million positions of
one rank, for world sizes of 1, 8 and the number of consumers, and reports the peak memory of the process. With --datasets N,
the episodes are divided among the N datasets of a mixture with weights of 1 to 5. An epoch has as many samples as the datasets
have frames.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import program
from argument_types import count

from dali_stream import MixtureOrder, Order
from dali_stream.order import Shuffle
from dali_stream.order.shares import shares
from dali_stream.tools import environment

LENGTH = 100  # frames of an episode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=count, default=1_000_000)
    parser.add_argument("--consumers", type=count, default=64)
    parser.add_argument("--datasets", type=count, default=1, help="1: one dataset; more: a mixture")
    parser.add_argument("--sharded", action="store_true", help='shuffle="sharded" instead of True')
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    forward = ", ".join(f"{seconds:.2f} s of {world}" for world, seconds in result["forward_s"].items())
    return (
        f"{result['frames']} frames: planned in {result['plan_s']:.2f} s; a million positions of one rank in {forward}; "
        f"peak memory {result['peak_rss_bytes'] / 1e6:.0f} MB"
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the order of a dataset or a mixture."""
    shuffle: Shuffle = "sharded" if arguments.sharded else True
    consumers = arguments.consumers
    made = functools.partial(order, arguments.episodes, consumers, arguments.datasets, shuffle)
    frames, forward = len(made()), {}
    planned = timed(lambda: made().read(0, 64))
    for world in sorted({1, 8, consumers}):
        now, start = made(), min(1_000_000 * world, frames - 1)
        count = consumers // world  # one sample of each consumer of the rank, so that all consumers skip
        forward[world] = timed(functools.partial(now.read, start, count, 0, world))
    return {"frames": frames, "plan_s": planned, "forward_s": forward, "peak_rss_bytes": environment.peak_rss()}


def order(episodes: int, consumers: int, datasets: int, shuffle: Shuffle) -> Order | MixtureOrder:
    """Return the order of an epoch of a dataset or a mixture."""
    if datasets == 1:
        return Order(np.full(episodes, LENGTH), shuffle, consumers=consumers)
    lengths = np.array_split(np.full(episodes, LENGTH), datasets)
    weights = [1 + number % 5 for number in range(datasets)]
    return MixtureOrder(lengths, shares([each.sum() for each in lengths], weights=weights), shuffle, consumers=consumers)


def timed(work: Callable[[], object]) -> float:
    """Return the duration of a call, in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())

"""Compute the decoded frames per delivered frame for several GOP lengths, windows and sizes of memory.

    python benchmarks/frame_cache.py [--episodes 600] [--batches N] [--json]

The program uses the order and the schedule of the Loader, and decodes nothing. It plans an epoch for each case. The invented
dataset has one camera, episodes of 250 to 500 frames, and closed GOPs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import numpy as np
import program
from argument_types import count
from decodes import decodes

from dali_stream import Order
from dali_stream.order.batches import Batches
from dali_stream.schedule.budget import horizon
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import Limits, Schedule
from dali_stream.schedule.samples import batches_of_rank

GIB = 1 << 30
BATCH_SIZE = 64
IN_PROGRESS = 2


class Memory(NamedTuple):
    """A configuration: memory for decoded frames, their size, number of ranks, and pools of the order."""

    name: str
    bytes: int
    size: tuple[int, int]
    world_size: int = 1
    consumers: int = 32
    pool: int = 8


MEMORY = (
    Memory("no cache", 0, (480, 640)),
    Memory("480×640, 4 GiB", 4 * GIB, (480, 640)),
    Memory("224×224, 4 GiB", 4 * GIB, (224, 224)),
    Memory("224×224, 1 GiB, 8 consumers with pools of 4", GIB, (224, 224), 1, 8, 4),
    Memory("224×224, 1 GiB, one of 8 ranks", GIB, (224, 224), 8),
)
REQUESTS = ((2, 1), (2, 8), (12, 1), (30, 1), (30, 8))  # GOP length, and frames per window


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=count, default=600)
    parser.add_argument("--batches", type=count, help="batches of each case; default: one epoch")
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the table of docs/memory.md."""
    names = list(dict.fromkeys(case["name"] for case in result["cases"]))
    lines = [f"| GOP, request | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for gop, steps in REQUESTS:
        ratios = [case["decoded_per_frame"] for case in result["cases"] if (case["gop"], case["steps"]) == (gop, steps)]
        request = "single frames" if steps == 1 else f"windows of {steps}, 1 s apart"
        lines.append(f"| {gop}, {request} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan an epoch, or its first batches, for each request and configuration of memory."""
    lengths = np.random.default_rng(0).integers(250, 501, arguments.episodes)
    cases = []
    for gop, steps in REQUESTS:
        for memory in MEMORY:
            ratio = decoded_per_frame(lengths, gop, steps, memory, arguments.batches)
            cases.append({"gop": gop, "steps": steps, **memory._asdict(), "decoded_per_frame": ratio})
        print(f"GOP {gop}, {steps} frames per sample: done", file=sys.stderr)
    return {"cases": cases, "batch_size": BATCH_SIZE, "in_flight": IN_PROGRESS}


def decoded_per_frame(lengths: np.ndarray, gop: int, steps: int, memory: Memory, most: int | None) -> float:
    """Return the number of decoded frames per delivered frame in the first epoch, or its first `most` batches."""
    frames = int(lengths.sum())
    batches = Batches(frames, BATCH_SIZE, memory.world_size, "drop")

    def order(epoch: int) -> Order:
        return Order(lengths, True, 0, epoch, memory.consumers, memory.pool)

    kept = min(memory.bytes // (memory.size[0] * memory.size[1] * 3), frames)
    windows, limits = {"camera": -30 * np.arange(steps)[::-1]}, Limits(kept, IN_PROGRESS, horizon(kept, frames))
    planner = Schedule(EpisodeTable(lengths, windows), batches_of_rank(order, batches, 0, 0, 0), BATCH_SIZE, windows, limits)
    return decodes(planner, lengths, gop, min(batches.count(0), most or batches.count(0))).decoded


if __name__ == "__main__":
    sys.exit(main())

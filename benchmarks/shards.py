"""Compare shuffle="sharded" with shuffle=True on several nodes: bytes fetched, frames decoded, and disk.

    python benchmarks/shards.py [--episodes 76000] [--nodes 1 8 64] [--ranks 8] [--epochs 4] [--kept 57000] [--json]

No files are needed. The program plans epochs of a dataset of one camera with the order and the schedule of a Loader, for single
frames and GOPs of `--gop` frames. With memory alone, the first rank is planned, and `--kept` is the number of decoded frames of
a camera that its memory holds. With a cache on disk, a node fetches or decodes a GOP when one of its ranks shows a frame of it
for the first time, so the GOPs that its ranks show in each epoch are counted, for all nodes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import numpy as np
import program
from argument_types import count
from decodes import plan_next

from dali_stream.order import Order, Shuffle
from dali_stream.order.batches import Batches
from dali_stream.order.order import default_pools
from dali_stream.schedule.budget import horizon
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import Limits, Schedule
from dali_stream.schedule.samples import batches_of_rank, shown_frames

CAMERA = "camera"
SHUFFLES: tuple[Shuffle, ...] = (True, "sharded")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=count, default=76_000)
    parser.add_argument("--nodes", type=count, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ranks", type=count, default=8, help="ranks of a node")
    parser.add_argument("--gop", type=count, default=2, help="number of frames of a GOP")
    parser.add_argument("--kept", type=count, default=57_000, help="decoded frames of a camera that a rank's memory holds")
    parser.add_argument("--batch-size", type=count, default=32, help="of a rank")
    parser.add_argument("--epochs", type=count, default=4)
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text, with a line for each row."""
    return "\n".join(", ".join(f"{key} {_text(value)}" for key, value in row.items()) for row in result["results"])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the work of each number of nodes with memory alone, and with caches on disk, in shares of the dataset."""
    rng = np.random.default_rng(arguments.episodes)
    lengths = np.clip(rng.lognormal(np.log(235), 0.5, arguments.episodes), 40, 1200).astype(np.int64)  # as scale_dataset.py
    results = []
    for nodes, shuffle in itertools.product(arguments.nodes, SHUFFLES):
        world = nodes * arguments.ranks
        consumers, pool = default_pools(arguments.batch_size, world)
        orders = [Order(lengths, shuffle, 0, epoch, consumers, pool) for epoch in range(arguments.epochs)]
        decoded, fetched = planned(orders, lengths, world, arguments)
        row = {"nodes": nodes, "shuffle": shuffle, "frames": int(lengths.sum())}
        results.append(row | {"cache": "memory", "decoded_per_frame": decoded, "fetched_of_dataset": fetched * arguments.ranks})
        first_shown = gops_first_shown(orders, lengths, nodes, arguments)
        # A GOP at a cut is decoded on both nodes. Each decodes all of its frames.
        results.append(
            row
            | {
                "cache": "disk",
                "decoded_per_frame": first_shown.sum(0).tolist(),
                "fetched_of_dataset": float(first_shown.sum(1).mean()),
                "disk_of_dataset": float(first_shown.sum(1).max()),
            }
        )
        print(f"{nodes} nodes, {shuffle}: done", file=sys.stderr)
    return {"results": results}


def planned(orders: list[Order], lengths: np.ndarray, world: int, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """Plan all epochs of the first rank with memory alone.

    Returns:
        Decoded frames per delivered frame of each epoch, and the bytes that the rank fetches in all epochs, as a share of the
        dataset: each GOP that it decodes is fetched once in an epoch.
    """
    batches = Batches(int(lengths.sum()), arguments.batch_size, world, "drop")
    table, offsets, shard = EpisodeTable(lengths, [CAMERA]), np.zeros((1, 1), np.int64), orders[0].shard(0, world)
    needed = {} if shard is None else {CAMERA: shown_frames(shard, offsets, lengths, np.zeros(len(lengths), np.int64))}
    frames = len(needed[CAMERA]) if needed else int(lengths.sum())
    kept = min(arguments.kept, frames)
    limits = Limits(kept, 2, max(horizon(kept, frames), 2048))
    schedule = Schedule(
        table,
        # The horizon reaches beyond the last epoch.
        batches_of_rank(lambda epoch: orders[epoch % len(orders)], batches, 0, 0, 0),
        arguments.batch_size,
        {CAMERA: offsets[0]},
        limits,
        needed=needed,
    )
    first_gop, decoded, fetched = gops_before(lengths, arguments.gop), [], 0
    for _ in orders:
        count, touched = 0, np.zeros(first_gop[-1], np.bool_)
        for _ in range(batches.count(0)):
            plan = plan_next(schedule, lengths, arguments.gop).frames[CAMERA]
            count += plan.decodes
            touched[first_gop[plan.episode] + plan.frame // arguments.gop] = True
        decoded.append(count / (batches.count(0) * arguments.batch_size))
        fetched += int(touched.sum())
    return decoded, fetched / int(first_gop[-1])


def gops_first_shown(orders: list[Order], lengths: np.ndarray, nodes: int, arguments: argparse.Namespace) -> np.ndarray:
    """Return the share of the GOPs of the dataset that each node shows for the first time in each epoch, shape (N, E)."""
    first_gop, world = gops_before(lengths, arguments.gop), nodes * arguments.ranks
    shares = np.empty((nodes, len(orders)))
    for node in range(nodes):
        shown, before = np.zeros(first_gop[-1], np.bool_), 0
        for epoch, order in enumerate(orders):
            for rank in range(node * arguments.ranks, (node + 1) * arguments.ranks):
                episode, frame = order.read(0, len(order), rank, world)
                shown[first_gop[episode] + frame // arguments.gop] = True
            shares[node, epoch], before = int(shown.sum()) - before, int(shown.sum())
    return shares / int(first_gop[-1])


def gops_before(lengths: np.ndarray, gop: int) -> np.ndarray:
    """Return the number of GOPs before each episode, and of all, shape (E + 1,)."""
    return np.append(0, np.cumsum(-(-lengths // gop)))


def _text(value: object) -> str:
    if isinstance(value, list):
        return "[" + " ".join(map(_text, value)) + "]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

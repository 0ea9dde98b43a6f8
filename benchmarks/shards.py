"""Compare shuffle="sharded" with shuffle=True on several nodes: bytes fetched, frames decoded, and disk.

    python benchmarks/shards.py simulate [--episodes 76000] [--nodes 1 8 64] [--ranks 8] [--epochs 4] [--kept 57000] [--json]
    python benchmarks/shards.py measure ROOT [--ranks 2 4] [--epochs 4] [--json]

`simulate` needs no files. It plans epochs of a dataset of one camera with the order and the schedule of a Loader, for single
frames and GOPs of `--gop` frames. With memory alone, the first rank is planned, and `--kept` is the number of decoded frames of
a camera that its memory holds. With a cache on disk, a node fetches or decodes a GOP when one of its ranks shows a frame of it
for the first time, so the GOPs that its ranks show in each epoch are counted, for all nodes.

`measure` streams a local dataset with Loaders of several ranks, one after the other: with memory for all frames that a rank
needs with "sharded" and for 0.9 of them, with a frame cache for each of two nodes, and from a bucket on loopback with a
`cache_dir` for each of two nodes.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from argument_types import count
from decodes import plan_next
from remote import served

import dali_stream
from dali_stream.order import Order, Shuffle
from dali_stream.order.batches import Batches
from dali_stream.order.order import default_pools
from dali_stream.pipeline.layout import Layout
from dali_stream.schedule.budget import Sizes, divide, frames_budget, horizon
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import Limits, Schedule
from dali_stream.schedule.samples import batches_of_rank, shown_frames
from dali_stream.tools import environment

CAMERA = "camera"
SHUFFLES: tuple[Shuffle, ...] = (True, "sharded")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    simulated = commands.add_parser("simulate", help="plan the epochs of a large dataset")
    simulated.add_argument("--episodes", type=count, default=76_000)
    simulated.add_argument("--nodes", type=count, nargs="+", default=[1, 8, 64])
    simulated.add_argument("--ranks", type=count, default=8, help="ranks of a node")
    simulated.add_argument("--gop", type=count, default=2, help="number of frames of a GOP")
    simulated.add_argument("--kept", type=count, default=57_000, help="decoded frames of a camera that a rank's memory holds")
    measured = commands.add_parser("measure", help="stream a local dataset")
    measured.add_argument("root", type=Path, help="a local LeRobot v3 dataset")
    measured.add_argument("--ranks", type=count, nargs="+", default=[2, 4])
    for command in (simulated, measured):
        command.add_argument("--batch-size", type=count, default=32, help="of a rank")
        command.add_argument("--epochs", type=count, default=4)
        command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    results = simulate(arguments) if arguments.command == "simulate" else measure(arguments)
    for row in results:
        print(", ".join(f"{key} {_text(value)}" for key, value in row.items()))
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "root")}
        report = {"arguments": settings, "results": results, **environment.ran_on("cpu")}
        print(environment.report_json(report))
    return 0


def simulate(arguments: argparse.Namespace) -> list[dict[str, Any]]:
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
    return results


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


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the decoded frames of some ranks, and what two nodes decode, store and fetch."""
    local = dali_stream.Dataset(arguments.root)
    return [*in_memory(local, arguments), *on_disk(local, arguments), *from_bucket(arguments)]


def in_memory(dataset: dali_stream.Dataset, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the decoded frames per delivered frame of each epoch, over all ranks, with memory for a share of a shard."""
    results = []
    for world, share in itertools.product(arguments.ranks, (1, 0.9)):
        with loader_of(dataset, arguments, rank=0, world_size=world, shuffle="sharded") as loader:
            sizes = Layout(loader._config, loader.routes).sizes
        budget, kept = frames_budget(sizes), int(share * sizes.frames)
        if share < 1:  # the smallest budget that keeps this many frames, or the largest one that does not keep all
            budget = bisect.bisect_left(range(budget - 1), kept, key=lambda each: kept_with(each, sizes))
        for shuffle in SHUFFLES:
            options = {"world_size": world, "shuffle": shuffle, "memory_budget": budget}
            ranks = [epochs(loader_of(dataset, arguments, rank=rank, **options), arguments.epochs) for rank in range(world)]
            decoded, shown = (sum(counts[key] for counts in ranks) for key in ("decoded_frames", "frames"))
            row = {"ranks": world, "shuffle": shuffle, "kept": kept_with(budget, sizes) / sizes.frames, "budget": budget}
            results.append(row | {"decoded_per_frame": (decoded / shown).tolist()})
    return results


def kept_with(budget: int, sizes: Sizes) -> int:
    """Return the number of decoded frames of each camera that a memory budget keeps. 0 if it is too small for a batch."""
    try:
        return divide(budget, sizes).kept
    except dali_stream.MemoryBudgetError:
        return 0


def on_disk(dataset: dali_stream.Dataset, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the decoded frames of two nodes in each epoch, and the stored frames of each node, in shares of the dataset."""
    results, frames = [], dataset.num_frames * len(dataset.cameras)
    for shuffle in SHUFFLES:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            nodes = [
                epochs(
                    loader_of(dataset, arguments, frame_cache=Path(folder, str(rank)), **node(rank, shuffle)), arguments.epochs
                )
                for rank in (0, 1)
            ]
        decoded = sum(counts["decoded_frames"] for counts in nodes) / frames
        stored = [float(counts["stored_frames"].sum() / frames) for counts in nodes]
        row = {"nodes": 2, "shuffle": shuffle, "cache": "frame_cache"}
        results.append(row | {"decoded_of_dataset": decoded.tolist(), "disk_of_dataset": stored})
    return results


def from_bucket(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the bytes that each of two nodes fetches in each epoch: video and indices, as a share of the videos, and rows."""
    results, videos = [], sum(path.stat().st_size for path in arguments.root.rglob("*.mp4"))
    with served(arguments.root, "s3", 0.0, 1e9) as (remote, _), tempfile.TemporaryDirectory() as folder:
        for shuffle in SHUFFLES:
            fetched = []
            for rank, cameras in itertools.product((0, 1), (None, [])):
                dataset = dali_stream.Dataset(**remote, cameras=cameras, cache_dir=Path(folder, f"{shuffle} {rank} {cameras}"))
                fetched.append(epochs(loader_of(dataset, arguments, **node(rank, shuffle)), arguments.epochs)["fetched_bytes"])
            row = {"nodes": 2, "shuffle": shuffle, "cache": "cache_dir", "video_bytes": videos}
            video = [((both - rows) / videos).tolist() for both, rows in zip(fetched[::2], fetched[1::2], strict=True)]
            results.append(row | {"fetched_of_videos": video, "rows_bytes": [int(rows.sum()) for rows in fetched[1::2]]})
    return results


def node(rank: int, shuffle: Shuffle) -> dict[str, Any]:
    """Return the options of a Loader on one of two nodes, each with one rank and little memory."""
    return {"rank": rank, "world_size": 2, "shuffle": shuffle, "memory_budget": "256MiB"}


def loader_of(dataset: dali_stream.Dataset, arguments: argparse.Namespace, **options: Any) -> dali_stream.Loader:
    """Return a Loader that delivers every frame in every epoch."""
    size = (224, 224) if dataset.cameras else None
    common = {"batch_size": arguments.batch_size, "image_size": size, "image_dtype": "uint8", "last_batch": "partial"}
    return dali_stream.Loader(dataset, device="cpu", **common, **options)


def epochs(loader: dali_stream.Loader, count: int) -> dict[str, np.ndarray]:
    """Stream some epochs. Return what each adds to the counters of a Loader, shape (E,), and close the Loader."""
    keys = ("frames", "decoded_frames", "stored_frames", "fetched_bytes")
    with loader:
        before = dict.fromkeys(keys, 0) | {"fetched_bytes": loader.stats()["fetched_bytes"]}
        counts = []
        for _ in range(count):
            for _ in loader:
                pass
            counts.append([loader.stats()[key] for key in keys])
    start = [before[key] for key in keys]
    return dict(zip(keys, np.diff([start, *counts], axis=0).T, strict=True))


def _text(value: object) -> str:
    if isinstance(value, list):
        return "[" + " ".join(map(_text, value)) + "]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

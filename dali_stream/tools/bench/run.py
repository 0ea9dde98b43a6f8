"""Measurement on all ranks, and the report that combines their results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.mixture import Mixture
from dali_stream.run.bottleneck import STAGES
from dali_stream.system.gpu import gpu_index
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import Mode, Progress, measure
from dali_stream.tools.bench.node import Node, needs

PERCENTILES = (50, 95, 99)
_CHOSEN = (
    "consumers",
    "episode_pool_size",
    "num_threads",
    "decode_processes",
    "memory_budget",
)  # arguments whose default the Loader chooses


def run(
    dataset: Dataset | Mixture,
    mode: Mode,
    num_batches: int,
    warmup: int,
    loader: dict[str, Any],
    device: str,
    head: dict[str, Any],
    progress: Progress,
    action: str | None = None,
    node: Node | None = None,
) -> dict[str, Any] | None:
    """Measure on every rank of this run.

    Args:
        dataset: Dataset to stream, epoch after epoch.
        mode, num_batches, warmup, loader: See `measure.measure`.
        device: Device of the Loader.
        head: Further entries of the report. If the entry `source` is None, it is replaced by the scheme of the dataset's URI,
            "local" or "mixture".
        progress: Function that is called after each batch of the main rank.
        action: See `measure.measure`.
        node: Node of a training run, whose needs the report then has. Default: None.

    Returns:
        The report on the main rank, and None on the others. See `node_report`.

    Raises:
        DaliStreamError: If the dataset has no cameras and the mode needs them, or a frame cannot be read.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState(cpu=gpu_index(device) is None)
    show = progress if state.is_main_process else lambda done, total, description: None
    own = measure(dataset, mode, num_batches, warmup, loader | {"device": device}, state.wait_for_everyone, show, action)
    ranks = gather_object([own])
    # A process may abort if it ends while Gloo's threads run: https://github.com/pytorch/pytorch/pull/179291.
    state.destroy_process_group()
    if not state.is_main_process:
        return None
    source = "mixture" if isinstance(dataset, Mixture) else dataset.uri.rpartition("://")[0] or "local"
    return node_report(
        ranks,
        {
            "dataset": dataset.uri, **head, "source": head["source"] or source,
            "mode": mode, "num_batches": num_batches, "warmup": warmup,
            "episodes": dataset.num_episodes, "dataset_frames": dataset.num_frames, "fps": dataset.fps,
            "cameras": {key: dataset.features[key].frame_size for key in dataset.cameras},
            **loader,
            **({"datasets": _delivered(dataset, ranks)} if isinstance(dataset, Mixture) else {}),
        },
        node,
    )  # fmt: skip


def _delivered(mixture: Mixture, ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the number of measured samples of each dataset, its share of them, and its share according to the mixture."""
    samples = sum((row["datasets"] for rank in ranks for row in rank["rows"]), Counter[str]())
    return {
        name: {"samples": samples[name], "delivered": samples[name] / samples.total(), "share": float(share)}
        for name, share in zip(mixture.datasets, mixture.shares.targets, strict=True)
    }


def node_report(ranks: list[dict[str, Any]], head: dict[str, Any], node: Node | None = None) -> dict[str, Any]:
    """Combine the measurements of all ranks. Rates are per node.

    Args:
        ranks: Results of `measure.measure`.
        head: Entries to begin the report with.
        node: See `run`.

    Returns:
        `head`, and the entries below. Paths are reduced to file names.

        - `nodes`, `ranks`, `device`: Number of nodes and of ranks, and the device of rank 0.
        - `frames`, `samples`, `wallclock_s`: Number of timed frames and samples, and the time of the slowest rank in seconds.
        - `frames_per_s_node`, `samples_per_s`: Rates from the end of the warm-up to the last batch.
        - `p50_sample_latency_ms`, `p95_...`, `p99_...`: Percentiles of the time from requesting a batch until it is on the
          device.
        - `first_batch_latency_s`: Time of the slowest rank from creating the Loader to its first batch.
        - `later_epochs`: The entries of `_timed` for later epochs, if all decoded frames fit in memory. All other entries,
          except `peak_rss_bytes`, then describe the first epoch. None if every epoch decodes, or has only one batch.
        - `decode_s_total`, `fetch_s_total`, `wait_s_total`, `stage_s_total`: Seconds that all ranks spend in decode threads, in
          fetches, in `next()`, and in each stage. See `Loader.stats`.
        - `fetched_bytes`, `needed_bytes`, `cached_bytes`, `requests`, `retries`, `substituted`: Sums over all ranks. See
          `Loader.stats`.
        - `bottleneck`: Result of `Loader.bottleneck` on the rank that waits most.
        - `cpu_ms`: CPU milliseconds of the decode threads per decoded frame, of copying per delivered frame, and of the planner
          per sample, of all batches. None if nothing was decoded or delivered. None per decoded frame with `frame_cache`, since
          decode threads then read and write this cache as well.
        - `decoded_per_delivered_frame`, `unique_episodes_per_batch`, `cpu_s_per_sample`: Means over all ranks.
        - `peak_rss_bytes`, `peak_gpu_bytes`: Maximum over all ranks.
        - `node`: Result of `node.needs` for the work of the first epoch, or of the timed batches if all epochs have the same
          cost. None without `node`.
        - `routes`, `timeline`, `consumers`, `episode_pool_size`, `num_threads`, `decode_processes`, `memory_budget`: Those
            of rank 0.
        - `versions`, `machine`, `date`: See `environment.ran_on`.
    """
    nodes, main, later = len({rank["host"] for rank in ranks}), ranks[0], [rank["later"] for rank in ranks]
    report = head | {
        "nodes": nodes,
        "ranks": len(ranks),
        **_timed(ranks, nodes),
        "later_epochs": _timed(later, nodes) if all(later) else None,
        **{key: max(rank[key] for rank in ranks) for key in ("first_batch_latency_s", "peak_rss_bytes")},
        "cpu_ms": _cpu_ms([rank["totals"] for rank in ranks], head),
        "node": needs(node, _sum([rank["work"] for rank in ranks]), **main["setting"]) if node else None,
        **{key: main[key] for key in ("device", "routes", "timeline", *_CHOSEN)},
        **environment.ran_on(main["device"]),
    }
    return environment.without_folders(report)


def _cpu_ms(ranks: list[dict[str, float]], head: dict[str, Any]) -> dict[str, float | None]:
    """Return the CPU milliseconds of each kind of work. See `node_report`."""
    kinds = {
        "decoded_frame": ("decode_cpu_s", "decoded_frames"),
        "delivered_frame": ("copy_cpu_s", "frames"),
        "sample": ("plan_cpu_s", "samples"),
    }
    totals = _sum(ranks)
    found = {name: totals[cpu] * 1e3 / totals[number] if totals[number] else None for name, (cpu, number) in kinds.items()}
    return found | ({"decoded_frame": None} if head.get("frame_cache") else {})


def _sum(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the sum over all ranks of each entry."""
    return {key: sum(rank[key] for rank in ranks) for key in ranks[0]}


def _timed(ranks: list[dict[str, Any]], nodes: int) -> dict[str, Any]:
    """Return the entries that are reported both for the first epoch and for later ones."""
    wall, rows = max(rank["wallclock_s"] for rank in ranks), [row for rank in ranks for row in rank["rows"]]
    samples, frames = (sum(row[key] for row in rows) for key in ("samples", "frames"))
    sums = _sum([rank["sums"] for rank in ranks])
    latencies = [row["latency_s"] * 1e3 for row in rows]
    return {
        "frames": frames,
        "samples": samples,
        "frames_per_s_node": frames / wall / nodes,
        "samples_per_s": samples / wall / nodes,
        **{f"p{p}_sample_latency_ms": float(np.percentile(latencies, p)) for p in PERCENTILES},
        "wallclock_s": wall,
        "bottleneck": max(ranks, key=lambda rank: float(rank["sums"]["wait_s"]))["bottleneck"],
        "decoded_per_delivered_frame": sums["decoded_frames"] / sums["frames"] if sums["frames"] else None,
        "cpu_s_per_sample": sum(rank["cpu_s"] for rank in ranks) / samples,
        **{f"{key}_total": sums[key] for key in ("decode_s", "fetch_s", "wait_s")},
        "stage_s_total": {key: sums[key] for keys in STAGES.values() for key in keys},
        **{key: sums[key] for key in ("fetched_bytes", "needed_bytes", "cached_bytes", "requests", "retries", "substituted")},
        "unique_episodes_per_batch": float(np.mean([row["unique_episodes"] for row in rows])),
        "peak_gpu_bytes": max(row["gpu_bytes"] for row in rows) or None,
    }


def stage_seconds(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return {thread: {stage: seconds}} of a report, with readable names of the stages."""
    return {thread: {name: report["stage_s_total"][key] for key, name in stages.items()} for thread, stages in STAGES.items()}


def write(report: dict[str, Any], folder: Path) -> Path:
    """Write the report as JSON. Return the path of the file."""
    path = folder / f"{'-'.join(str(report[key]) for key in ('source', 'mode', 'decode'))}.json"
    environment.write_report(path, report)
    return path

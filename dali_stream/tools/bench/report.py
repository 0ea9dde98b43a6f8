"""The ranks' results combined, and written."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from dali_stream.pipeline.bottleneck import STAGES
from dali_stream.tools import environment

PERCENTILES = (50, 95, 99)


def node_report(ranks: list[dict[str, Any]], head: dict[str, Any]) -> dict[str, Any]:
    """The report of all ranks (`measure.measure`), whose rates are per node.

    Returns:
        `head`, and
        `frames_per_s_node`, `samples_per_s`: per node, over the time of the slowest rank, from the end of the warm-up to the
        last batch without a break.
        `first_batch_latency_s`: from creating the Loader to its first batch, of the slowest rank.
        `p50_sample_latency_ms` and so on: of the wait for a batch, from the request until it is on the device.
        `wallclock_s`; `decode_s_total`, `fetch_s_total`, `wait_s_total`: seconds of all decode threads, all fetches, and in
        `next()`, over all ranks; `stage_s_total`: those of each stage (see `Loader.stats`); `fetched_bytes`, `needed_bytes`,
        `cached_bytes` (hits of cache_dir), `requests`, `retries`.
        `bottleneck`: the stage that limits the rank that waits most, its share and remedies (see `Loader.bottleneck`).
        `decoded_per_delivered_frame`, `unique_episodes_per_batch`, `peak_rss_bytes` and `peak_gpu_bytes` (the largest of a
        rank), `cpu_s_per_sample`, `consumers`, `episode_pool_size`, `routes`, `timeline` (of rank 0), `versions`, `machine`,
        `date`. Of a mixture, `datasets`: per name its `samples`, the share of them that was `delivered`, and its `share`. Paths
        are reduced to file names.
    """
    nodes = len({rank["host"] for rank in ranks})
    wall = max(rank["wallclock_s"] for rank in ranks)
    samples, frames = (sum(rank[key] for rank in ranks) for key in ("samples", "frames"))
    sums = {key: sum(rank["sums"][key] for rank in ranks) for key in ranks[0]["sums"]}
    latencies = np.concatenate([rank["latencies_s"] for rank in ranks]) * 1e3
    gpu = [rank["peak_gpu_bytes"] for rank in ranks if rank["peak_gpu_bytes"]]
    waits_most = max(ranks, key=lambda rank: rank["sums"]["wait_s"])
    report = head | {
        "nodes": nodes,
        "ranks": len(ranks),
        "frames": frames,
        "samples": samples,
        "frames_per_s_node": frames / wall / nodes,
        "samples_per_s": samples / wall / nodes,
        "first_batch_latency_s": max(rank["first_batch_latency_s"] for rank in ranks),
        **{f"p{p}_sample_latency_ms": float(np.percentile(latencies, p)) for p in PERCENTILES},
        "wallclock_s": wall,
        "decode_s_total": sums["decode_s"],
        "fetch_s_total": sums["fetch_s"],
        "wait_s_total": sums["wait_s"],
        "stage_s_total": {key: sums[key] for keys in STAGES.values() for key in keys},
        "bottleneck": waits_most["bottleneck"],
        **{key: sums[key] for key in ("fetched_bytes", "needed_bytes", "cached_bytes", "requests", "retries", "substituted")},
        "decoded_per_delivered_frame": sums["decoded_frames"] / sums["frames"] if sums["frames"] else None,
        "unique_episodes_per_batch": float(np.mean([rank["unique_episodes_per_batch"] for rank in ranks])),
        "peak_rss_bytes": max(rank["peak_rss_bytes"] for rank in ranks),
        "peak_gpu_bytes": max(gpu) if gpu else None,
        "cpu_s_per_sample": sum(rank["cpu_s"] for rank in ranks) / samples,
        "device": ranks[0]["device"],
        "routes": ranks[0]["routes"],
        **{key: ranks[0]["order"][key] for key in ("consumers", "episode_pool_size")},
        "timeline": ranks[0]["timeline"],
        **environment.ran_on(ranks[0]["device"]),
    }
    return environment.without_folders(report)


def stage_seconds(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{who: {stage: seconds}} of a report, in words."""
    return {who: {name: report["stage_s_total"][key] for key, name in stages.items()} for who, stages in STAGES.items()}


def write(report: dict[str, Any], folder: Path) -> Path:
    """Writes the report as JSON, and its plain figures as a CSV of one row beside it; returns the JSON's path."""
    path = folder / f"{'-'.join(str(report[key]) for key in ('source', 'mode', 'decode'))}.json"
    plain = {key: value for key, value in report.items() if not isinstance(value, (dict, list))}
    row = io.StringIO()
    writer = csv.DictWriter(row, list(plain))
    writer.writeheader()
    writer.writerow(plain)
    for place, text in ((path.with_suffix(".csv"), row.getvalue()), (path, json.dumps(report, indent=1) + "\n")):
        unfinished = place.with_name(f"{place.name}.part")  # a job may be killed at any time
        unfinished.write_text(text, newline="")
        unfinished.replace(place)
    return path

"""Metrics of a loader, computed from the difference of two results of `Loader.stats`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRAFFIC = {"network_bytes": "fetched_bytes", "disk_cache_bytes": "cached_bytes"}
_EVENTS = (
    *("requests", "retries", "failed_checksums", "substituted", "route_changes"),
    *("evicted_early", "indices_read_again", "frames_evicted_before_use"),
)
_MEMORY = ("row_bytes", "index_bytes", "encoded_bytes", "decoded_bytes", "resident_bytes")


def metrics(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of `Loader.metrics`.

    Args:
        before: Earlier result of `Loader.stats`. Empty for the first call.
        now: Later result.
    """

    def grown(name: str) -> float:
        return float(now[name] - before.get(name, 0))

    seconds, frames = grown("wait_s") + grown("training_s"), grown("frames")
    rates = {
        "samples_per_s": _ratio(grown("samples"), seconds),
        "wait_share": _ratio(grown("wait_s"), seconds),
        "decodes_per_frame": _ratio(grown("decoded_frames"), frames),
        "memory_hit_share": min(_ratio(grown("memory_hits"), frames), 1.0),
        "disk_hit_share": min(_ratio(grown("disk_hits"), frames), 1.0),
        "disk_written_bytes": grown("disk_written_bytes"),
    }
    counts = {name: grown(counter) for name, counter in _TRAFFIC.items()} | {name: grown(name) for name in _EVENTS}
    return rates | counts | {name: float(now[name]) for name in _MEMORY}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

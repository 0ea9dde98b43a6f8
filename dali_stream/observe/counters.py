"""Counters of a loader, times of its stages, and the metrics that are computed from them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

from dali_stream.observe.tracing import record

_CPU = {  # {stage: attribute to which its CPU seconds are added}
    **dict.fromkeys(("read_s", "pack_s", "decode_s", "resize_s", "write_s"), "decode_cpu_s"),
    **dict.fromkeys(("rows_s", "gather_s", "plan_s"), "plan_cpu_s"),
    "graph_s": "copy_cpu_s",
}
# Parts of `metrics`: {metric: key of `Loader.stats`}, and keys of which it has the difference or the value.
_TRAFFIC = {"network_bytes": "fetched_bytes", "disk_cache_bytes": "cached_bytes"}
_EVENTS = (
    *("requests", "retries", "failed_checksums", "substituted", "route_changes"),
    *("evicted_early", "indices_read_again", "frames_evicted_before_use"),
)
MEMORY = ("row_bytes", "index_bytes", "encoded_bytes", "decoded_bytes", "resident_bytes")  # the last is the sum
Timed = Callable[[str], AbstractContextManager[None]]


@dataclass
class Counters:
    """Counters and times. Several threads may increase them with `add` and `timed`.

    The times of `timed` do not overlap: the time of a stage excludes other stages that run inside it on the same thread.

    Attributes:
        batches, first_batch_s: Number of batches that the loader delivered, and seconds from its construction to the first
            batch, or None before it.
        read_s, pack_s, decode_s, resize_s, write_s: Seconds of the stages of the decode threads, added up over the threads.
            `read_s` includes reading the frame cache on disk, `decode_s` waiting for frames that other processes decode for it,
            and `write_s` is writing to it.
        rows_s, gather_s, plan_s: Seconds of the stages of the planner thread.
        starved_s, graph_s, training_s, wait_s: Seconds of the thread that iterates. `wait_s` includes the first two.
        decode_cpu_s, plan_cpu_s, copy_cpu_s: CPU seconds of the decode threads, of the planner thread, and of `graph_s` and the
            threads that help to copy.

    See `Loader.stats` for the others.
    """

    batches: int = 0
    samples: int = 0
    frames: int = 0
    clips: int = 0
    decoded_frames: int = 0
    stored_frames: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    disk_written_bytes: int = 0
    frames_evicted_before_use: int = 0
    read_s: float = 0.0
    pack_s: float = 0.0
    decode_s: float = 0.0
    resize_s: float = 0.0
    write_s: float = 0.0
    rows_s: float = 0.0
    gather_s: float = 0.0
    plan_s: float = 0.0
    starved_s: float = 0.0
    graph_s: float = 0.0
    training_s: float = 0.0
    padded: int = 0
    substituted: int = 0
    needed_bytes: int = 0
    evicted_early: int = 0
    indices_read_again: int = 0
    wait_s: float = 0.0
    decode_cpu_s: float = 0.0
    plan_cpu_s: float = 0.0
    copy_cpu_s: float = 0.0
    first_batch_s: float | None = None
    route_changes: int = 0
    audited: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: list[float] = [0] * len(_ADDED)  # values at the last `take_growth`
        self._thread = threading.local()  # attribute `inner`: seconds (wall, CPU) of the stages inside the current one so far

    def add(self, **amounts: float) -> None:
        """Add amounts to attributes by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def take_growth(self) -> dict[str, float]:
        """Return what was added since the last call, {attribute: amount}."""
        with self._lock:
            now = [getattr(self, name) for name in _ADDED]
            before, self._taken = self._taken, now
        return {name: value - old for name, value, old in zip(_ADDED, now, before, strict=True) if value != old}

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall and CPU seconds of the block to the attributes of a stage, without those of the stages inside it."""
        outer_wall, outer_cpu = getattr(self._thread, "inner", (0.0, 0.0))
        self._thread.inner = 0.0, 0.0
        started, began = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            stopped, ended = time.perf_counter(), time.thread_time()
            inner_wall, inner_cpu = self._thread.inner
            amounts = {stage: stopped - started - inner_wall}
            if stage in _CPU:
                amounts[_CPU[stage]] = ended - began - inner_cpu
            self.add(**amounts)
            record(stage.removesuffix("_s"), started, stopped)
            self._thread.inner = outer_wall + stopped - started, outer_cpu + ended - began

    def add_inner(self, stage: str, wall_s: float, cpu_s: float) -> None:
        """Add what another process did while this thread waited for it in a stage: seconds of a stage, and all CPU seconds."""
        self.add(**{stage: wall_s, _CPU[stage]: cpu_s})
        wall, cpu = self._thread.inner
        self._thread.inner = wall + wall_s, cpu

    def starved(self, began: float, ready_at: float) -> None:
        """Move the part of `graph_s` in which the frames of a batch were not ready to `starved_s`.

        Args:
            began: Time of `time.perf_counter` at which the batch was requested.
            ready_at: Time at which its frames were decoded.
        """
        if ready_at > began:
            self.add(starved_s=ready_at - began, graph_s=began - ready_at)
            record("starved", began, ready_at)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Add the CPU seconds of the block to `copy_cpu_s`. Threads that help to copy use this."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.add(copy_cpu_s=time.thread_time() - began)


_ADDED = [each.name for each in fields(Counters) if each.name != "first_batch_s"]  # attributes that `add` changes


def untimed(stage: str) -> AbstractContextManager[None]:
    """Replacement for `Counters.timed` that measures nothing."""
    return contextlib.nullcontext()


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
    return rates | counts | {name: float(now[name]) for name in MEMORY}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

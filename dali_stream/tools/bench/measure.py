"""Measurement of one rank: batches of a Loader are moved to the device and dropped."""

from __future__ import annotations

import itertools
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Literal, get_args

import torch

from dali_stream.checks.arguments import budget_text
from dali_stream.checks.text import listed
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError
from dali_stream.lerobot.features import vectors
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture
from dali_stream.tools import environment

Mode = Literal["single", "sarm", "action_chunk"]
MODES: tuple[Mode, ...] = get_args(Mode)
Progress = Callable[[int, int, str], None]
"""Function that shows the number of finished batches, the total, and what they are for."""
CHUNK = 50  # number of actions
SARM_STEPS, SARM_SPACING_S = 8, 1.0
_WORK = ("decode_cpu_s", "copy_cpu_s", "plan_cpu_s", "decoded_frames", "frames", "samples", "needed_bytes")
POINTS = 200  # maximum number of points of the timeline


def windows(mode: Mode, dataset: Dataset | Mixture, action: str | None = None) -> dict[str, list[float]]:
    """Return the `delta_timestamps` of a mode, in seconds. The steps of a mixture are whole frames at its lowest fps.

    Args:
        mode: See `measure`.
        dataset: Dataset or mixture.
        action: Key of the actions. Default: None, and the key is found by its name.

    Raises:
        ValueError: If the mode is unknown, or if the dataset lacks a feature that the mode needs.
    """
    if mode not in MODES:
        raise ValueError(f"Unknown mode {mode!r}. Allowed: {', '.join(MODES)}")
    fps = min(dataset.fps.values()) if isinstance(dataset, Mixture) else dataset.fps
    if mode == "sarm":
        frames = max(round(SARM_SPACING_S * fps), 1)
        return {key: [-frames * step / fps for step in reversed(range(SARM_STEPS))] for key in dataset.cameras}
    if mode == "single":
        return {}
    return {action or _action(dataset): [step / fps for step in range(CHUNK)]}


def _action(dataset: Dataset | Mixture) -> str:
    """Return the key of the actions: "action", or else the only vector of floats whose key contains this word."""
    if "action" in dataset.features:
        return "action"
    floats = vectors(dataset.features)
    found = [key for key in floats if "action" in key.lower()]
    if len(found) != 1:
        raise ValueError(
            f"mode action_chunk needs the key of the actions, since {dataset.uri} has no feature 'action'. Give it with "
            f"--action. Vectors of floats: {listed(floats)}"
        )
    return found[0]


def measure(
    dataset: Dataset | Mixture,
    mode: Mode,
    num_batches: int,
    warmup: int,
    loader: dict[str, Any],
    together: Callable[[], None],
    progress: Progress,
    action: str | None = None,
) -> dict[str, Any]:
    """Time the batches of this rank.

    If all decoded frames fit in memory, each is decoded once. The first epoch is then timed separately from later
    epochs. Otherwise all epochs have the same cost, and the timed batches may belong to several epochs.

    Args:
        dataset: Dataset to stream, epoch after epoch.
        mode: "single" for the current frame of all cameras, "sarm" for 8 steps of all cameras, 1 s apart, or "action_chunk" for
            the current frame of all cameras and a chunk of 50 actions that begins at this frame.
        num_batches: Number of timed batches. A first epoch that is timed separately may have fewer.
        warmup: Number of batches before the timed ones.
        loader: Further arguments of the Loader.
        together: Barrier of all ranks, so that all ranks are timed over the same period. It is called four times.
        progress: Function that is called after each batch.
        action: Key of the actions of mode "action_chunk". Default: None, and the key is found by its name.

    Returns:
        The measurements of this rank. `later` contains those of later epochs, or None, `totals` the CPU seconds and the
        amounts of work of all batches, and `work` those of the first epoch, or of the timed batches if all epochs have the
        same cost. `setting` has the keyword arguments of `node.needs`. See `_Clock.time` and `run.node_report` for the fields.

    Raises:
        DaliStreamError: If the dataset has no cameras and the mode needs them, or a frame cannot be read.
    """
    deltas = windows(mode, dataset, action)
    if not dataset.cameras and mode != "action_chunk":
        raise DaliStreamError(
            f"no frame was measured: {dataset.uri} has no cameras. Give a dataset with cameras, or measure rows with "
            "--mode action_chunk"
        )
    environment.forget_peak()
    steps = {key: len(deltas.get(key, [0])) for key in dataset.cameras}
    with Loader(dataset, delta_timestamps=deltas, **loader) as running:
        clock, epoch = _Clock(running, steps, together, progress), len(running)
        [first_row] = clock.take(1)
        fits = running._batch_source.keeps_all and epoch > 1
        clock.take(min(warmup - 1, epoch - 2) if fits else warmup - 1)
        first = clock.time(min(num_batches, epoch - running.batch_index) if fits else num_batches)
        work = first["sums"]
        if fits:
            clock.take(epoch - running.batch_index, "the rest of the first epoch")
            work = running.stats()  # the first batches also decode frames of later ones, so all of the epoch counts
            clock.take(warmup)
        later = clock.time(num_batches if fits else 0)
        config = running._config
        frame_bytes = sum(config.frame_bytes(key) for key, route in running.routes.items() if route.decoder != "dali")
        return first | {
            "later": later if fits else None,
            "host": platform.node(),
            "device": first_row["device"],
            "first_batch_latency_s": running.stats()["first_batch_s"],
            "totals": {key: running.stats()[key] for key in _WORK},
            "work": {key: work[key] for key in _WORK},
            "setting": {
                "batch_size": config.batches.batch_size,
                "memory_budget": config.memory_budget,
                "frame_cache_bytes": int(config.source.lengths.sum()) * frame_bytes,
                "remote": config.source.data_store.remote,
            },
            "routes": {key: asdict(route) for key, route in running.routes.items()},
            **{key: running.state_dict()["order"][key] for key in ("consumers", "episode_pool_size")},
            "num_threads": config.num_threads,
            "decode_processes": config.decode_processes,
            "memory_budget": budget_text(config.memory_budget),
            "peak_rss_bytes": environment.peak_rss(),
        }


class _Clock:
    """The batches of a loader, with or without timing.

    Args:
        loader: Loader to measure.
        steps: Number of steps in the window of each camera.
        together, progress: See `measure`.
    """

    def __init__(self, loader: Loader, steps: dict[str, int], together: Callable[[], None], progress: Progress) -> None:
        self._loader, self._batches, self._steps = loader, endless(loader), steps
        self._together, self._progress = together, progress

    def take(self, batches: int, description: str = "warm-up") -> list[dict[str, Any]]:
        """Take batches. Return the row of each. See `_next`."""
        rows = []
        for number in range(batches):
            rows.append(self._next())
            self._progress(number + 1, batches, description)
        return rows

    def time(self, batches: int) -> dict[str, Any]:
        """Time batches over the same period as the other ranks.

        Returns:
            A dict with `rows` (see `_next`), `wallclock_s`, `cpu_s`, `timeline`, `bottleneck`, and `sums`, the growth of
            each entry of `Loader.stats`.
        """
        self._together()
        before, cpu, started = self._loader.stats(), environment.cpu_s(), time.perf_counter()
        rows = self.take(batches, "timed batches")
        self._together()
        if not batches:
            return {}
        measured = {
            "rows": rows,
            "wallclock_s": time.perf_counter() - started,
            "cpu_s": environment.cpu_s() - cpu,
            "sums": {key: value - before[key] for key, value in self._loader.stats().items()},
            "timeline": [
                {"s": row["ended"] - started, **{key: value - before[key] for key, value in row["counters"].items()}}
                for row in rows[:: -(-batches // POINTS)]
            ],
        }
        bottleneck = self._loader.bottleneck(before)
        return measured | {"bottleneck": asdict(bottleneck) if bottleneck else None}

    def _next(self) -> dict[str, Any]:
        """Wait until the next batch is on its device. Return what it contains, the time that it took, and counters after it."""
        requested = time.perf_counter()
        batch = next(self._batches)
        device, episodes = batch["index"].device, batch["episode_index"]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended, stats = time.perf_counter(), self._loader.stats()
        datasets = batch.get("dataset", [""] * len(episodes))  # only a mixture has names, and cameras that some datasets lack
        missing = {key: int(torch.as_tensor(batch.get(f"{key}_is_missing", 0)).sum()) for key in self._steps}
        return {
            "device": str(device),
            "samples": len(episodes),
            "frames": sum(steps * (len(episodes) - missing[key]) for key, steps in self._steps.items()),
            "datasets": Counter(datasets),
            "unique_episodes": len(set(zip(datasets, episodes.tolist(), strict=True))),
            "latency_s": ended - requested,
            "ended": ended,
            "counters": {key: stats[key] for key in ("wait_s", "decode_s", "fetch_s")},
            "gpu_bytes": environment.gpu_bytes_used(device.index) or 0,
        }


def endless(loader: Loader) -> Iterator[dict[str, Any]]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader


def take(stream: Iterator[Any], batches: int) -> None:
    """Take batches. Each is dropped before the next one is requested."""
    deque(itertools.islice(stream, batches), maxlen=0)

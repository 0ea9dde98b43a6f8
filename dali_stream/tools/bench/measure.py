"""Measurement of one rank: batches of a Loader are moved to the device and dropped."""

from __future__ import annotations

import itertools
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Literal, Protocol, get_args

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture
from dali_stream.speed.bottleneck import STAGES
from dali_stream.tools import environment

Mode = Literal["single", "sarm", "action_chunk"]
MODES: tuple[Mode, ...] = get_args(Mode)
CHUNK = 50  # number of actions
SARM_STEPS, SARM_SPACING_S = 8, 1.0
POINTS = 200  # maximum number of points of the timeline
# Counters of `Loader.stats()` whose growth is measured.
SUMS = ("frames", "decoded_frames", "wait_s", "substituted", "fetch_s", "fetched_bytes", "cached_bytes",
        "needed_bytes", "requests", "retries", *(key for keys in STAGES.values() for key in keys))  # fmt: skip


def windows(mode: Mode, dataset: Dataset | Mixture) -> dict[str, list[float]]:
    """Return the `delta_timestamps` of a mode, in seconds. The steps of a mixture are whole frames at its lowest fps.

    Args:
        mode: See `measure`.
        dataset: Dataset or mixture.

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
    if "action" not in dataset.features:
        raise ValueError(
            f"mode action_chunk needs a feature 'action'. Features of {dataset.uri}: {', '.join(dataset.features)}"
        )
    return {"action": [step / fps for step in range(CHUNK)]}


class Progress(Protocol):
    """Function that shows the number of finished batches, and the total."""

    def __call__(self, done: int, total: int, description: str = ...) -> None: ...


def silent(done: int, total: int, description: str = "") -> None:
    """Show no progress."""


def measure(
    dataset: Dataset | Mixture,
    mode: Mode,
    num_batches: int,
    warmup: int,
    loader: dict[str, Any],
    together: Callable[[], None],
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time the batches of this rank.

    If all decoded frames fit in memory, only the first epoch decodes. The first epoch is then timed separately from later
    epochs. Otherwise all epochs have the same cost, and the timed batches may belong to several epochs.

    Args:
        dataset: Dataset to stream, epoch after epoch.
        mode: "single" for the current frame of all cameras, "sarm" for 8 steps of all cameras, 1 s apart, or "action_chunk" for
            the current frame of all cameras and a chunk of 50 actions that begins at this frame.
        num_batches: Number of timed batches. A first epoch that is timed separately may have fewer.
        warmup: Number of batches before the timed ones.
        loader: Further arguments of the Loader.
        together: Barrier of all ranks, so that all ranks are timed over the same period. It is called four times.
        progress: Function that is called after each batch. Default: no progress.

    Returns:
        The measurements of this rank. `later` contains those of later epochs, or None. See `run.node_report` for the fields.

    Raises:
        DaliStreamError: If the dataset has no cameras, or a frame cannot be read.
    """
    if not dataset.cameras:
        raise DaliStreamError(f"no frame was measured: {dataset.uri} has no cameras. Give a dataset with cameras")
    environment.forget_peak()
    deltas = windows(mode, dataset)
    steps = {key: len(deltas.get(key, [0])) for key in dataset.cameras}
    with Loader(dataset, delta_timestamps=deltas, **loader) as running:
        clock = _Clock(running, steps, len(dataset.dataset_names), together, progress)
        where = clock.skip(1, "warm-up")
        first_batch_s, epoch = running.stats()["first_batch_s"], len(running)
        fits = running._source.keeps_all and epoch > 1
        clock.skip(min(warmup - 1, epoch - 2) if fits else warmup - 1, "warm-up")
        first = clock.time(min(num_batches, epoch - running.batch_index) if fits else num_batches)
        if fits:
            clock.skip(epoch - running.batch_index, "the rest of the first epoch")
            clock.skip(warmup, "warm-up")
        later = clock.time(num_batches if fits else 0)
        return first | {
            "later": later if fits else None,
            "host": platform.node(),
            "device": where,
            "first_batch_latency_s": first_batch_s,
            "routes": {key: asdict(route) for key, route in running.routes.items()},
            "order": running.state_dict()["order"],
            "peak_rss_bytes": environment.peak_rss(),
        }


class _Clock:
    """The batches of a loader, skipped or timed.

    Args:
        loader: Loader to measure.
        steps: Number of steps in the window of each camera.
        datasets: Number of datasets of a mixture, or 0 for a single dataset.
        together, progress: See `measure`.
    """

    def __init__(
        self, loader: Loader, steps: dict[str, int], datasets: int, together: Callable[[], None], progress: Progress
    ) -> None:
        self._loader, self._steps, self._datasets = loader, steps, datasets
        self._batches, self._together, self._progress = endless(loader), together, progress

    def skip(self, batches: int, description: str) -> str:
        """Consume batches without timing them. Return the device of the last one."""
        device = ""
        for number in range(batches):
            device = _consume(next(self._batches))
            self._progress(number + 1, batches, description)
        return device

    def time(self, batches: int) -> dict[str, Any]:
        """Time batches over the same period as the other ranks."""
        self._together()
        before, cpu, started = self._loader.stats(), time.process_time(), time.perf_counter()
        samples = frames = gpu_bytes = 0
        latencies, timeline, unique_episodes = [], [], []
        of_datasets = np.zeros(self._datasets, np.int64)
        for number in range(batches):
            requested = time.perf_counter()
            batch = next(self._batches)
            _consume(batch)
            now, stats = time.perf_counter(), self._loader.stats()
            latencies.append(now - requested)
            samples += len(batch["index"])
            frames += self._count_frames(batch)
            episodes = batch["episode_index"]
            if self._datasets:
                of_datasets += np.bincount(batch["dataset_index"].cpu().numpy(), minlength=self._datasets)
                episodes = episodes + (batch["dataset_index"] << 40)  # indices of episodes are unique only within a dataset
            unique_episodes.append(len(episodes.unique()))
            timeline.append(
                {"s": now - started, **{key: stats[key] - before[key] for key in ("wait_s", "decode_s", "fetch_s")}}
            )
            gpu_bytes = max(gpu_bytes, environment.gpu_bytes_used(batch["index"].device.index) or 0)
            self._progress(number + 1, batches, "timed batches")
        self._together()
        if not batches:
            return {}
        wall, cpu, stats = time.perf_counter() - started, time.process_time() - cpu, self._loader.stats()
        bottleneck = self._loader.bottleneck(before)
        return {
            "wallclock_s": wall,
            "cpu_s": cpu,
            "samples": samples,
            "frames": frames,
            "samples_of_datasets": of_datasets.tolist(),
            "latencies_s": latencies,
            "unique_episodes_per_batch": float(np.mean(unique_episodes)),
            "timeline": timeline[:: -(-batches // POINTS)],
            "peak_gpu_bytes": gpu_bytes or None,
            "sums": {key: stats[key] - before[key] for key in SUMS},
            "bottleneck": asdict(bottleneck) if bottleneck else None,
        }

    def _count_frames(self, batch: dict[str, Any]) -> int:
        """Return the number of frames in a batch. Frames of a camera that a sample's dataset lacks are not counted."""
        missing = {key: int(batch[f"{key}_is_missing"].sum()) for key in self._steps if f"{key}_is_missing" in batch}
        return sum(steps * (len(batch["index"]) - missing.get(key, 0)) for key, steps in self._steps.items())


def endless(loader: Loader) -> Iterator[dict[str, Any]]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader


def take(stream: Iterator[Any], batches: int) -> None:
    """Take batches. Each is dropped before the next one is requested."""
    deque(itertools.islice(stream, batches), maxlen=0)


def _consume(batch: dict[str, Any]) -> str:
    """Wait until the batch is on its device. Return the device."""
    device = batch["index"].device
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return str(device)

"""Measurements of a loader on parts of a dataset, from which `why` predicts the speed of other loaders.

Each measurement streams a first epoch and a later one, several times in turns with the other measurements.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dali_stream.dataset import Dataset
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture
from dali_stream.system.process import cores
from dali_stream.tools.decodes import Decodes
from dali_stream.tools.sizing import MODEL_ERROR, Node, prediction_range
from dali_stream.tools.speed_model import Work, work_of

if TYPE_CHECKING:
    from dali_stream.pipeline.config import Config

BATCHES = 32  # minimum size of the measured part of the dataset, in batches
ROUNDS = 3  # number of times that each rate is measured, in turns with the others
FEW = 0.05  # an epoch that decodes at most this share of the first one is predicted from a later one

Change = Callable[[Work], Work]
"""Function from the work of a batch to that after a remedy."""


@dataclass(frozen=True)
class Speed:
    """Predicted speed of a loader in an epoch.

    Attributes:
        batches_per_s: Batches per second if the training step takes no time, the median of several rounds of measurements. For
            a node, the training programs use the CPU meanwhile.
        limit: Resource that limits the speed: "decode threads", "planner", "copying", "CPU cores" or "network".
        decodes: Number of frames decoded per delivered frame.
        range: Batches per second in the slowest and in the fastest round.
    """

    batches_per_s: float
    limit: str
    decodes: float
    range: tuple[float, float]


@dataclass(frozen=True)
class Epoch:
    """Mean of the measured batches of first epochs, or of later ones.

    Attributes:
        seconds: Seconds per batch.
        delay: Seconds per batch, divided by those of the model.
        work: Work per batch.
        decodes: Numbers of frames decoded and stored per delivered frame.
        fetched: Bytes per sample that are read over the network.
    """

    seconds: float
    delay: float
    work: Work
    decodes: Decodes
    fetched: float

    def work_after(self, decodes: Decodes, change: Change) -> Work:
        """Return the work of a batch with the delay, after a remedy.

        Args:
            decodes: Numbers of frames decoded and stored per delivered frame, before the remedy.
            change: Remedy.
        """
        return change(self.work.decoding(self.decodes, decodes)).times(self.delay)


Rounds = list[tuple[Speed, Speed]]
"""Predicted speeds of the first epoch and of later ones, from each round of measurements."""


@dataclass
class Measurement:
    """Loader to measure in each round.

    Attributes:
        name: Description for the progress.
        part: Dataset to stream. It is closed at the end.
        node: Machine for which speeds are predicted.
        changed: Arguments of the Loader that change.
        rounds: First epoch of the part, and the epoch after it, in each round.
    """

    name: str
    part: Dataset | Mixture
    node: Node
    changed: dict[str, Any] = field(default_factory=dict)
    rounds: list[tuple[Epoch, Epoch]] = field(default_factory=list)

    def works(self, decodes: Sequence[Decodes], change: Change = lambda work: work) -> list[list[Work]]:
        """Return the work of a batch of the first epoch and of later ones, after a remedy, from each round.

        The measured part may fit in memory although the whole dataset does not. Its later epochs then decode nothing, and an
        epoch that decodes can only be predicted from the first one, by scaling the decode work.

        Args:
            decodes: Decodes of the whole dataset in the first epoch and in later ones.
            change: Remedy. Default: no change.
        """
        return [
            [(later if each.decoded <= FEW * first.decodes.decoded else first).work_after(each, change) for each in decodes]
            for first, later in self.rounds
        ]

    def speeds(self, decodes: Sequence[Decodes], change: Change = lambda work: work, node: Node | None = None) -> Rounds:
        """Return the predicted speeds of the first epoch and of later ones, from each round. See `works`.

        Args:
            decodes, change: See `works`.
            node: Machine. Default: `self.node`.
        """
        share, (now, then) = (node or self.node).share, decodes
        return [(_speed(share(first), now), _speed(share(later), then)) for first, later in self.works(decodes, change)]


def _speed(work: Work, decodes: Decodes) -> Speed:
    rate = 1 / work.seconds
    return Speed(rate, work.limit, decodes.decoded, (rate, rate))


def medians(rounds: Rounds, sized: bool) -> tuple[Speed, Speed]:
    """Return the median speeds of the first epoch and of later ones, with their ranges.

    Args:
        rounds: Speeds from each round.
        sized: Whether the speeds are predicted for another machine. Their ranges then include the error of the model.
    """
    first, later = (_median(speeds, sized) for speeds in zip(*rounds, strict=True))
    return first, later


def _median(speeds: Sequence[Speed], sized: bool) -> Speed:
    by_rate = sorted(speeds, key=lambda each: each.batches_per_s)
    rates = [each.batches_per_s for each in by_rate]
    return replace(by_rate[len(rates) // 2], range=prediction_range(rates, MODEL_ERROR) if sized else (rates[0], rates[-1]))


class Clock:
    """Clock of the measurements, which also counts how much other processes use the cores.

    Args:
        options: Arguments of the Loader.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._others = self._everything = 0.0  # seconds of other processes, and of all cores

    @property
    def busy(self) -> float | None:
        """Share of the cores that other processes used during all measurements. None if it is unknown."""
        return self._others / self._everything if self._everything else None

    def measure(self, measurement: Measurement) -> None:
        """Measure a first epoch and a later one. If an epoch has few batches, repeat this with new Loaders."""
        first: list[dict[str, float]] = []
        later: list[dict[str, float]] = []
        began, started = cpu_seconds(), time.perf_counter()
        while sum(growth["batches"] for growth in first) < BATCHES // ROUNDS:
            with Loader(measurement.part, **self._options | {"last_batch": "drop"} | measurement.changed) as loader:
                config, graph = loader._config, loader._config.uses_dali(loader._config.cached(loader.routes))
                if len(loader) < 2:
                    size = config.batches.batch_size
                    raise ValueError(f"dataset must have 2 batches of {size} samples or more. Give a smaller batch_size")
                first.append(_growth(loader))
                later.append(_growth(loader))
        ended, seconds, share = cpu_seconds(), time.perf_counter() - started, 0.0
        if began and ended:
            others = max((ended[0] - began[0]) - (ended[1] - began[1]), 0.0)
            everything = seconds * len(os.sched_getaffinity(0))
            self._others, self._everything, share = self._others + others, self._everything + everything, others / everything
        measurement.rounds.append((_epoch(config, graph, first, share), _epoch(config, graph, later, share)))


def cpu_seconds() -> tuple[float, float] | None:
    """Return the CPU seconds that the cores of this process were busy, and those that this process and its children used.

    None on systems without `/proc/stat`.
    """
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if re.match(r"cpu\d", line)]
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are contained in user and nice
        ticks = sum(sum(map(int, line[1:4] + line[6:9])) for line in lines if line[0] in cores)
        return ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])
    except (OSError, AttributeError, ValueError):
        return None


def first_episodes(dataset: Dataset, frames: int) -> Dataset:
    """Return a copy of a dataset with the first episodes that together have at least `frames` frames, or all episodes."""
    count = int((dataset.lengths.cumsum() < frames).sum()) + 1
    return copy.copy(dataset.part(dataset.rows[:count]))


def _growth(loader: Loader) -> dict[str, float]:
    """Return the growth of a loader's counters over an epoch.

    The first batch is excluded, since it includes the startup. However, if most frames were decoded before it was delivered, as
    with few long GOPs, it is included.
    """
    began, seen = loader.stats(), dict[str, float]()
    for _ in loader:
        seen = seen or loader.stats()
    now = loader.stats()
    if seen["decoded_frames"] - began["decoded_frames"] > (now["decoded_frames"] - began["decoded_frames"]) / 2:
        seen = began
    return {key: now[key] - seen[key] for key in now if key != "first_batch_s"}


def _epoch(config: Config, graph: bool, growths: list[dict[str, float]], others: float) -> Epoch:
    """Return the mean batch of some measurements.

    Args:
        config: Configuration of the loaders.
        graph: Whether the batches pass through a DALI graph.
        growths: Growth of the counters in each measurement.
        others: Share of the cores that other processes used meanwhile.
    """
    growth = {key: sum(each[key] for each in growths) for key in growths[0]}
    work = work_of(growth, config.num_threads, cores(), config.source.data_store.remote, graph, others)
    work = replace(work, step=0.0)
    seconds = (growth["wait_s"] + growth["training_s"]) / growth["batches"]
    # Other processes leave a part of the cores. Delays that they cause beyond that are not counted, since they cannot be
    # distinguished from delays of the loader itself.
    beside = replace(work, cores=work.cores * max(1 - others, 0.01)).seconds
    decodes = Decodes(*(growth[key] / max(growth["frames"], 1) for key in ("decoded_frames", "stored_frames")))
    return Epoch(seconds, seconds / beside, work, decodes, growth["fetched_bytes"] / growth["samples"])

"""Training on a simulated clock: the real stage, order and residency, over a network and a decoder that only take time."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from dali_stream.tables import Tables
from simulated_dataset import MadeUp, Rows
from simulated_network import Link, SlowStore
from simulated_time import Clock, Condition, Task

from dali_stream import Dataset, Order, budget, cameras, encoded, once, residency, rows, stage, tables, windows, workers
from dali_stream.batches import Batches
from dali_stream.bench import measure
from dali_stream.counters import Counters
from dali_stream.stage import Plan, Stage
from dali_stream.video.format import VideoFormat
from dali_stream.video.route import Route


@dataclass(frozen=True)
class Training:
    """What a rank does.

    Attributes:
        step_s: seconds of a training step, between getting a batch and asking for the next.
        decode_frames_per_s: of the rank's decode threads together; None: decoding takes no time.
        warmup: the share of the steps in which waiting is told apart, since the pools fill then.
    """

    batch_size: int
    step_s: float
    steps: int
    mode: str = "single"
    memory_budget: int = 4 << 30
    consumers: int = 32
    pool: int = 8
    seed: int = 0
    threads: int = 16
    decode_frames_per_s: float | None = None
    warmup: float = 0.5


@dataclass(frozen=True)
class Network:
    """What a rank has of it: bandwidth, and the latency of a request."""

    bytes_per_s: float
    latency_s: float


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        waits: per step, seconds that the slowest rank waited for its batch; the first from the start on.
        step_s: see `Training`.
        seconds: simulated, from the start to the end of the last step.
        fetched: per step, bytes that all ranks have fetched when it ended.
        evicted, requests: of all ranks, see `Loader.stats`.
        peak_resident: the largest of a rank, at the end of a step.
        warmup: steps of it.
    """

    waits: list[float]
    step_s: float
    seconds: float
    fetched: list[int]
    evicted: int
    requests: int
    peak_resident: int
    warmup: int

    @property
    def wait_share(self) -> float:
        """Of the time after the warm-up, the share that training waits."""
        waits = self.waits[self.warmup :]
        return sum(waits) / max(sum(waits) + len(waits) * self.step_s, 1e-9)

    @property
    def waiting_steps(self) -> float:
        """The share of the steps after the warm-up that wait, longer than a hundredth of their length."""
        return float(np.mean([wait > self.step_s / 100 for wait in self.waits[self.warmup :]]))


def simulate(
    dataset: Dataset, training: Training, network: Network, world: int = 1, ranks: int = 1, patience_s: float = np.inf
) -> Outcome:
    """Trains for some steps.

    Args:
        dataset: made up, or a local one, whose files are read and whose bytes then take simulated time.
        training: what a rank does.
        network: what each rank has of it. Those simulated share what all of them have.
        world: ranks that share the order.
        ranks: of them, the first so many are simulated, and wait for each other in every step.
        patience_s: ends the run early when so many seconds were waited after the warm-up.

    Raises:
        ValueError: the ranks cannot share the order, or there is no batch.
        MemoryBudgetError: memory_budget does not hold a batch.
    """
    with contextlib.ExitStack() as stack:
        clock = stack.enter_context(Clock())
        link = Link(clock, network.bytes_per_s * ranks, network.latency_s)
        modules = (workers, once, encoded, residency, rows, tables, stage)
        stack.enter_context(clock.instead_of_threads(*modules))
        stack.enter_context(_in_place(stage, "VideoCamera", functools.partial(_Camera, clock, training)))
        if isinstance(dataset, MadeUp):
            stack.enter_context(_in_place(residency, "RowReader", Rows))
            stack.enter_context(_in_place(tables, "read_table", dataset.read_table))
        return _Run(clock, dataset, training, link, world, ranks).outcome(patience_s)


def _in_place(module: Any, name: str, value: object) -> Any:
    return mock.patch.object(module, name, value)


class _Run:
    def __init__(self, clock: Clock, dataset: Dataset, training: Training, link: Link, world: int, ranks: int) -> None:
        self._clock, self._training = clock, training
        self._counters = Counters()
        self._datasets = [_behind(dataset, link) for _ in range(ranks)]
        self._plans = [_plan(each, training, rank, world) for rank, each in enumerate(self._datasets)]
        self._waits = np.zeros((ranks, training.steps))
        self._fetched: list[int] = []
        self._peak = self._at_barrier = self._steps = 0
        self._barrier = Condition(clock)
        self._warmup = int(training.steps * training.warmup)
        self._left = np.inf

    def outcome(self, patience_s: float) -> Outcome:
        self._left = patience_s
        tasks = [Task(self._clock, self._train, f"rank {rank}", (rank,)) for rank in range(len(self._plans))]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join()
        return Outcome(
            waits=self._waits.max(0)[: self._steps].tolist(),
            step_s=self._training.step_s,
            seconds=self._seconds,
            fetched=self._fetched,
            evicted=self._counters.evicted_early,
            requests=sum(each.data_store.traffic.requests for each in self._datasets),
            peak_resident=self._peak,
            warmup=min(self._warmup, self._steps - 1),
        )

    def _train(self, rank: int) -> None:
        """One rank, as `Loader` does it: what that asks for before the first batch, and the batch that DALI takes ahead."""
        plan, clock, asked = self._plans[rank], self._clock, self._clock.now
        for camera in plan.dataset.videos:
            plan.tables.of(camera, 0, plan.dataset.data_store)
        budget.check(plan)
        made = Stage(plan, dict.fromkeys(plan.dataset.cameras, Route("torchcodec", "")), 0, 0, self._counters)
        try:
            ahead = False
            for step in range(self._training.steps):
                if not ahead:
                    made.source()
                made.delivered.clear()
                if ahead := made.ready():
                    made.source()
                self._waits[rank, step] = clock.now - asked
                self._peak = max(self._peak, made.resident_bytes())
                self._together(step)
                clock.sleep(self._training.step_s)
                if self._left < 0:
                    break
                asked = clock.now
        finally:
            self._seconds = clock.now
            made.close()

    def _together(self, step: int) -> None:
        """Returns when all ranks have got here, as a step's exchange of gradients does."""
        self._at_barrier += 1
        with self._barrier:
            if self._at_barrier == len(self._plans) * (step + 1):
                self._steps = step + 1
                self._fetched.append(sum(each.data_store.traffic.fetched_bytes for each in self._datasets))
                self._left -= self._waits[:, step].max() if step >= self._warmup else 0
                self._barrier.notify_all()
            else:
                self._barrier.wait_for(lambda: self._steps > step)


def _behind(dataset: Dataset, link: Link) -> Dataset:
    """The dataset as one rank sees it over the network."""
    seen = object.__new__(type(dataset))
    vars(seen).update(vars(dataset) | {"data_store": SlowStore(dataset.data_store, link)})
    return seen


class _Plan(Plan):
    def order(self, epoch: int) -> Order:
        """Orders of a made-up dataset are kept for the next run: one of millions of episodes takes as long as many steps. Ranks
        may share one, since they draw from different consumers."""
        if not isinstance(self.dataset, MadeUp):
            return super().order(epoch)
        key = (self.seed, epoch, self.consumers, self.episode_pool_size)
        if key not in (kept := self.dataset.orders):
            while len(kept) > 1:
                del kept[next(iter(kept))]
            kept[key] = super().order(epoch)
        return kept[key]


def _plan(dataset: Dataset, training: Training, rank: int, world: int) -> Plan:
    batches = Batches(dataset.num_frames, training.batch_size, world, "drop")
    if not batches.count(0):
        raise ValueError(f"{world} ranks take {batches.stride} frames a step, and the dataset has {dataset.num_frames}")
    keys = [key for key, feature in dataset.features.items() if feature["dtype"] != "string"]
    return _Plan(
        dataset=dataset,
        batches=batches,
        windows=windows.offsets(measure.windows(training.mode, dataset), dataset.fps, keys),
        shuffle=True,
        seed=training.seed,
        consumers=training.consumers,
        episode_pool_size=training.pool,
        rank=rank,
        threads=training.threads,
        prefetch=None,
        memory_budget=training.memory_budget,
        tables=Tables(dataset, training.memory_budget // 4),
        substitute=False,
        gpu=None,
        augments=False,
    )


class _Camera(cameras.VideoCamera):
    """Reads what decoding would read, and takes the time that it would take."""

    def __init__(self, clock: Clock, training: Training, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock = clock
        self._frame_s = training.threads / training.decode_frames_per_s if training.decode_frames_per_s else 0.0

    def _format(self, table: Any, sample: int) -> VideoFormat:
        return VideoFormat("av1", 0, "420", 8, *self._dataset.picture_size(self.key))

    def _decode(self, requests: list[cameras.Request], out: Any) -> dict[int, Any]:
        for request in requests:
            for sample in np.unique(request.samples).tolist():
                start = int(request.table.offset[sample])
                self._store.read(request.table.path, start, start + int(request.table.size[sample]))
        if self._frame_s:
            self._clock.sleep(self._frame_s * sum(len(request.frames) for request in requests))
        return {}

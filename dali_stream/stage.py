"""The external source of the DALI pipeline: batches of rows, masks, clips and frames, made ahead by a planner and a pool.

planner thread:  order -> rows -> decode tasks     one thread, a few batches ahead
decode pool:     clips -> frames                   `threads` of them, the interpreter released while FFmpeg works
DALI's caller:   `Stage.source()` and `pictures()` take the next batch in order and wait for its frames
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream import windows
from dali_stream.batches import Batches
from dali_stream.buffers import Buffers
from dali_stream.cameras import ImageCamera, Packed, Pending, VideoCamera, requests_per_clip
from dali_stream.counters import Counters
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError, StorageError
from dali_stream.order import Order, Shuffle
from dali_stream.residency import Residency
from dali_stream.tables import Tables
from dali_stream.uniforms import uniforms
from dali_stream.video.route import Route
from dali_stream.workers import Workers

Array = npt.NDArray[Any]
_log = logging.getLogger("dali_stream")
SAMPLE = "sample"  # the key of what a sample brings for augmentation
_LOOK_AHEAD = 4096  # samples of a rank whose bytes are fetched ahead: some seconds of decoding


@dataclass(frozen=True)
class Plan:
    """What a stage is to make: all that does not change from epoch to epoch."""

    dataset: Dataset
    batches: Batches
    windows: dict[str, npt.NDArray[np.int64]]
    shuffle: Shuffle
    seed: int
    consumers: int
    episode_pool_size: int
    rank: int
    threads: int
    prefetch: int | None
    memory_budget: int
    tables: Tables
    substitute: bool
    gpu: int | None
    augments: bool

    def order(self, epoch: int) -> Order:
        """The order of one epoch."""
        return Order(self.dataset.lengths, self.shuffle, self.seed, epoch, self.consumers, self.episode_pool_size)

    def steps(self, camera: str) -> int:
        """Frames of a camera's window."""
        return len(self.windows.get(camera, (0,)))

    def squeezed(self, camera: str) -> bool:
        """Whether a sample has one picture without a time axis. LeRobot drops the axis of one step for videos only."""
        return self.steps(camera) == 1 and (camera not in self.windows or camera in self.dataset.videos)

    def columns(self) -> list[str]:
        """Keys that go through DALI as plain arrays."""
        features = self.dataset.features.items()
        keys = [key for key, f in features if f["dtype"] not in ("video", "image", "string")]
        return keys + [f"{key}_is_pad" for key in self.windows] + [SAMPLE] * self.augments


class Draw(NamedTuple):
    """What one batch of this rank shows: rows of the epoch's order, of which the last `padded` are there to fill it up."""

    epoch: int
    order: Order
    position: Array
    episode: Array
    frame: Array
    padded: int


@dataclass
class Batch:
    """One rank's share of a global batch, under way."""

    columns: dict[str, Array]
    strings: dict[str, list[str]]
    cameras: dict[str, Pending]
    padded: int


class Stage:
    """Makes batches from a position on, without end: one epoch follows another.

    Args:
        plan: what to make.
        routes: the decoder of each camera.
        epoch, position: where to begin.
        counters: what to add to.
    """

    def __init__(self, plan: Plan, routes: dict[str, Route], epoch: int, position: int, counters: Counters) -> None:
        self._plan, self._counters = plan, counters
        self._residency = Residency(
            plan.dataset, plan.memory_budget, plan.tables, plan.windows, plan.batches.batch_size, counters
        )
        self._cameras: dict[str, VideoCamera | ImageCamera] = {
            key: VideoCamera(plan.dataset, key, self._residency.store, routes[key], plan.gpu, counters)
            if key in plan.dataset.videos
            else ImageCamera(plan.dataset, key, counters)
            for key in plan.dataset.cameras
        }
        self._on_dali = [key for key in plan.dataset.cameras if routes[key].decoder == "dali"]
        self._buffers = Buffers()
        self._lent: list[Array] = []
        self._taken, self._given = 0, [0, 0]  # batches; of them by `source` and by `pictures`
        self._current: tuple[Batch, dict[str, Any]]
        self._clips: deque[dict[str, list[Packed]]] = deque(maxlen=2)  # of the batches that DALI may be at
        self._made: deque[Batch | BaseException] = deque()
        self._more = threading.Condition()
        self._room = threading.Semaphore(self._depth())
        self._stopping = False
        self._pid = os.getpid()
        self.delivered: deque[dict[str, list[str]]] = deque()  # strings of the batches that DALI has taken
        self._pool = Workers("dali_stream decode", plan.threads)
        self._planner = threading.Thread(target=self._run, args=(epoch, position), name="dali_stream planner", daemon=True)
        self._planner.start()

    def source(self) -> tuple[Any, ...]:
        """The next batch for DALI: the arrays of `Plan.columns`, then per camera on the DALI route lists: clips, frames in
        them and, for a window, order of its steps.

        Raises:
            DaliStreamError: whatever kept the batch from being made. The stage is of no use then.
        """
        batch, frames = self._turn(0)
        arrays: list[Any] = [batch.columns[key] for key in self._plan.columns()]
        for key in self._on_dali:
            clips, places, orders = (list(part) for part in zip(*frames[key], strict=True))
            arrays += [clips, places] if self._plan.squeezed(key) else [clips, places, orders]
        return tuple(arrays)

    def pictures(self) -> tuple[Array, ...]:
        """The rest of the same batch: per camera that is not on the DALI route, (B, H, W, 3) or (B, T, H, W, 3) uint8.

        They are overwritten some time after the next batch has been taken. Errors as in `source`.
        """
        _, frames = self._turn(1)
        decoded = [key for key in self._plan.dataset.cameras if key not in self._on_dali]
        return tuple(frames[key][:, 0] if self._plan.squeezed(key) else frames[key] for key in decoded)

    def _turn(self, which: int) -> tuple[Batch, dict[str, Any]]:
        """The batch whose turn it is for one of the two sources; DALI asks for one, the other or both, as the graph is."""
        self._given[which] += 1
        if self._given[which] > self._taken:
            self._current = self._take()
            self._taken += 1
        return self._current

    def _take(self) -> tuple[Batch, dict[str, Any]]:
        """The next batch, with the frames of its cameras."""
        with self._counters.timed("starved_s"), self._more:
            self._more.wait_for(lambda: self._made)
            batch = self._made.popleft()
        if isinstance(batch, BaseException):
            raise batch
        try:
            with self._counters.timed("starved_s"):
                frames = self._finish(batch)
        except (CancelledError, StorageError) as error:
            if isinstance(error, StorageError) and not self._stopping:
                raise
            raise closed() from error
        self._room.release()
        for array in self._lent:  # DALI reads no more of the batch before this one: its outputs have been taken
            self._buffers.give(array)
        self._lent = [out for out in frames.values() if isinstance(out, np.ndarray)]
        self._clips.append({key: frames[key] for key in self._on_dali})
        self._counters.padded += batch.padded
        self.delivered.append(batch.strings)
        return batch, frames

    def ready(self) -> bool:
        """Whether `source` would return at once, and without an error."""
        with self._more:
            batch = self._made[0] if self._made else None
        return isinstance(batch, Batch) and all(pending.succeeded() for pending in batch.cameras.values())

    def clips(self) -> dict[str, list[Packed]]:
        """Per camera on the DALI route, the clips of the batches that DALI may be at."""
        return {key: [clip for batch in self._clips for clip in batch[key]] for key in self._on_dali}

    def resident_bytes(self) -> int:
        """Memory of rows, indices and encoded video."""
        return self._residency.resident_bytes()

    def close(self) -> None:
        """Stops the planner and the pool, and waits for them. In a forked process there is nothing to stop."""
        if os.getpid() != self._pid:
            return
        self._stopping = True
        self._residency.stop()
        self._pool.stop()
        self._room.release()
        # A loader that nobody holds is closed by the garbage collector, which may run in a thread of its own.
        own = threading.current_thread().name.startswith("dali_stream ")
        if own:
            threading.Thread(target=self._join, name="dali_stream close", daemon=True).start()
        else:
            self._join()

    def _join(self) -> None:
        self._planner.join()
        self._pool.join()
        self._residency.join()
        self._put(closed())  # for a thread that waits in `source`

    def _depth(self) -> int:
        """Batches under way: as asked for, else enough for all threads to have work while the oldest batch is waited for."""
        if self._plan.prefetch is not None:
            return self._plan.prefetch
        plan, tasks = self._plan, 0
        for camera in self._cameras:
            tasks += -(-plan.batches.batch_size // requests_per_clip(plan.dataset.picture_size(camera), plan.steps(camera)))
        return int(np.clip(-(-2 * plan.threads // max(tasks, 1)), 2, 16))

    # ---- planner thread

    def _run(self, epoch: int, position: int) -> None:
        try:
            for batch in self._batches(epoch, position):
                self._put(batch)
        except BaseException as error:
            self._put(closed() if self._stopping else error)

    def _put(self, made: Batch | BaseException) -> None:
        with self._more:
            self._made.append(made)
            self._more.notify()

    def _batches(self, epoch: int, position: int) -> Iterator[Batch]:
        draws, ahead = self._draws(epoch, position), deque[Draw]()
        for number in itertools.count():
            while not ahead or (len(ahead) < self._horizon(ahead) and self._residency.room_ahead()):
                draw = next(draws)
                served = partial(draw.order.served, rank=self._plan.rank, world_size=self._plan.batches.world_size)
                self._residency.expect(number + len(ahead), draw.epoch, draw.episode, served)
                ahead.append(draw)
            self._room.acquire()
            if self._stopping:
                return
            with self._counters.timed("plan_s"):
                batch = self._prepare(number, ahead.popleft())
            yield batch

    def _horizon(self, ahead: deque[Draw]) -> int:
        """Batches that are looked ahead, no further than the next epoch: what they need is fetched while others are decoded."""
        if ahead[-1].epoch > ahead[0].epoch + 1:
            return 0
        return int(np.clip(_LOOK_AHEAD // self._plan.batches.batch_size, 16, 256))

    def _draws(self, epoch: int, position: int) -> Iterator[Draw]:
        plan, batches = self._plan, self._plan.batches
        world = batches.world_size
        for number in itertools.count(epoch):
            order = plan.order(number)
            while batches.count(position):
                start, stop = batches.span(position)
                places = np.arange(start + (plan.rank - start) % world, stop, world)
                episode, frame = order.read(start, len(places), plan.rank, world)
                padded = batches.batch_size - len(places) if batches.last_batch == "pad" else 0
                if padded:
                    again = order.read(0, padded, plan.rank, world)
                    more = (plan.rank + world * np.arange(len(again[0])), *again)
                    places, episode, frame = (
                        np.append(a, np.resize(b, padded)) for a, b in zip((places, episode, frame), more, strict=True)
                    )
                yield Draw(number, order, places, episode, frame, padded)
                position = stop
            position = 0

    def _prepare(self, number: int, draw: Draw) -> Batch:
        plan, dataset = self._plan, self._plan.dataset
        _, _, position, episode, frame, padded = draw
        self._residency.turn(draw.epoch, number)
        with self._counters.timed("rows_s"):
            self._residency.load(np.unique(episode))
        columns: dict[str, Array] = {}
        cameras: dict[str, Pending] = {}
        shown, pads = {}, {}
        for key, offset in plan.windows.items():
            shown[key], pads[f"{key}_is_pad"] = windows.window(offset, frame, dataset.lengths[episode])
        for key in dataset.features:
            if key in self._cameras:
                frames = shown.get(key, frame[:, None])
                cameras[key] = self._cameras[key].submit(self._pool, self._buffers, self._residency, episode, frames)
            else:
                with self._counters.timed("gather_s"):
                    columns[key] = self._residency.gather(key, episode, shown.get(key, frame))
        if plan.augments:
            columns[SAMPLE] = uniforms(plan.seed, draw.epoch, position)
        return Batch(columns | pads, self._strings(columns, episode, frame), cameras, padded)

    def _strings(self, columns: dict[str, Array], episode: Array, frame: Array) -> dict[str, list[Any]]:
        """Text goes past DALI: string features, and the name of the current frame's task."""
        dataset = self._plan.dataset
        texts = {key: columns[key].tolist() for key, f in dataset.features.items() if f["dtype"] == "string"}
        for key, index, names in (("task", "task_index", dataset.tasks), ("subtask", "subtask_index", dataset.subtasks)):
            if index in columns and (names or key == "task"):
                numbers = self._residency.gather(index, episode, frame).tolist()
                try:
                    texts[key] = [names[n] for n in numbers]
                except KeyError as error:
                    raise DatasetError(
                        f"{dataset.store.where(f'meta/{key}s.parquet')}: has no {index} {error}, which rows of the dataset "
                        f"name; it has {len(names)}. Copy the dataset again"
                    ) from error
        return texts

    # ---- the thread that runs DALI

    def _finish(self, batch: Batch) -> dict[str, Any]:
        """Waits for the frames of a batch, per camera as in `Pending.out`. Replaces samples that failed, if allowed."""
        frames = {key: pending.collect() for key, pending in batch.cameras.items()}
        failed = {row: error for pending in batch.cameras.values() for row, error in sorted(pending.failed.items())}
        rows = len(next(iter(batch.columns.values())))
        self._counters.samples += rows
        self._counters.frames += rows * sum(map(self._plan.steps, frames))
        if failed:
            good = [row for row in range(rows) if row not in failed]
            if not self._plan.substitute or not good:
                raise next(iter(failed.values()))
            for row, error in failed.items():
                _log.warning("a sample was substituted by another of its batch: %s", error)
                for values in (*batch.columns.values(), *batch.strings.values(), *frames.values()):
                    values[row] = values[good[row % len(good)]]
            self._counters.substituted += len(failed)
        return frames


def closed() -> DaliStreamError:
    """The error for a thread that waits for a batch while another one closes the loader."""
    return DaliStreamError("the loader was closed while a batch was waited for")

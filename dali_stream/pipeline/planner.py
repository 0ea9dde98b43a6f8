"""Planner: a thread that plans batches ahead, reads the data that they need, and starts their decoding."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading

from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import begin_batch
from dali_stream.observe.waiting import take
from dali_stream.pipeline import gather
from dali_stream.pipeline.decode_pool import DecodePool
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.planned_batch import PlannedBatch, closed
from dali_stream.pipeline.reading import Reading
from dali_stream.schedule.budget import divide, order_horizon
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import Limits, Schedule
from dali_stream.schedule.samples import samples
from dali_stream.system.workers import join_started

_log = logging.getLogger("dali_stream")
MEMORY = ("resident_bytes", "row_bytes", "index_bytes", "encoded_bytes", "decoded_bytes")  # keys of `Loader.stats`


class Planner:
    """Planner of the batches from a position of an epoch. After `start`, it plans one epoch after the other until `close`.

    The constructor starts no threads, so nothing is left if it raises an exception.

    `_run` and `_plan` run in the planner's thread, and nothing else changes the schedule or the table of open episodes, so they
    need no locks. `take` and `done` run in the thread that makes batches: the caller's or, with DALI, the thread that
    starts its runs. Two queues connect these threads: `_planned` passes batches on, and `_room`, which has an item for each
    batch that may be planned, limits the batches in progress. `queue.Queue` and `threading.Semaphore` are written in Python, so
    Ctrl-C may leave their locks locked. `SimpleQueue` is written in C. Slots can be reused without locks because of `_room`:
    when batch n is planned, the frames of batch n - config.in_progress were copied.

    Args:
        layout: Configuration of the loader, with the decoders.
        epoch: Epoch of the first batch.
        position: Position in that epoch at which the first batch begins.
        counters: Counters to add to.

    Attributes:
        keeps_all: Whether all decoded frames that this rank needs fit in memory.
        layout: See above.
        pool: Decode threads.
        stopping: Whether the planner was closed.
    """

    def __init__(self, layout: Layout, epoch: int, position: int, counters: Counters) -> None:
        self.layout, self._config, self._counters = layout, layout.config, counters
        config, source, sizes = layout.config, layout.config.source, layout.sizes
        parts = divide(config.memory_budget, sizes)
        self._schedule = Schedule(
            EpisodeTable(source.lengths, source.cameras, source.videos if source.data_store.remote else ()),
            samples(config.order, config.batches, config.rank, epoch, position),
            config.batches.largest,
            {key: config.windows.of(key) for key in layout.cached},
            Limits(parts.kept, config.in_progress, order_horizon(parts, sizes)),
            {key: config.windows.of(key) for key in layout.on_dali},
            source.dataset_of,
            layout.needed,
        )
        slots = {key: self._schedule.frames[key].slot_count for key in layout.cached}
        self.pool = DecodePool(layout, slots, counters)
        self._reading = Reading(config, sizes, parts, self._schedule, self.pool.on_disk, counters)
        self.keeps_all = not layout.on_dali and parts.kept >= sizes.frames
        self._planned: queue.SimpleQueue[PlannedBatch | BaseException] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(config.in_progress):
            self._room.put(None)
        self.stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="dali_stream planner", daemon=True)

    def start(self) -> None:
        """Start the thread. If this raises an exception, such as KeyboardInterrupt, the caller must call `close`."""
        self._thread.start()

    def take(self) -> PlannedBatch:
        """Return the next batch. Wait for it if necessary.

        Raises:
            DaliStreamError: If the batch could not be planned. No further batch is planned.
        """
        batch = take(self._planned, "the plan of a batch, with its rows and indices")
        if isinstance(batch, BaseException):
            raise batch
        begin_batch(batch.samples.number)
        return batch

    def done(self) -> None:
        """Report that the frames of the batch that `take` returned last were copied, so that another batch may be planned."""
        self._room.put(None)

    def memory(self) -> dict[str, int]:
        """Return the memory in use in bytes, with the keys `MEMORY`.

        The keys are the total, and the memory of rows, indices, encoded video and cached decoded frames.
        """
        # These are plain numbers that the planner's thread updates. They are read without a lock, which is exact enough.
        frames = sum(cache.cached * self._config.frame_bytes(key) for key, cache in self._schedule.frames.items())
        kinds = *self._reading.episodes.bytes_by_kind, self._reading.video.bytes, frames
        return dict(zip(MEMORY, (sum(kinds), *kinds), strict=True))

    def close(self) -> None:
        """Stop the planner and its threads, and wait for them. In a forked process, which has no such threads, do nothing."""
        self.stop()
        self.join()

    def stop(self) -> None:
        """Tell all threads to stop, without waiting for them. If Ctrl-C interrupts this method, it must be called again."""
        if os.getpid() != self._pid:
            return
        self.stopping = True
        self.pool.stop()
        self._reading.stop()
        self._room.put(None)  # wakes the planner's thread if it waits for room

    def join(self) -> None:
        """Wait for the threads to end, after `stop`."""
        if os.getpid() != self._pid:
            return
        # The garbage collector may close an iterator in one of these threads, and a thread cannot join itself.
        if threading.current_thread().name.startswith("dali_stream "):
            threading.Thread(target=self._join, name="dali_stream: close", daemon=True).start()
        else:
            self._join()

    def _join(self) -> None:
        # The planner's thread ends first, since it submits jobs to the other threads.
        join_started(self._thread)
        self._planned.put(closed())  # for a thread that waits in `take`
        self.pool.join()
        self._reading.join()

    def _run(self) -> None:
        try:
            self._reading.start()
            for number in itertools.count():
                begin_batch(number)
                # Reads begin before the batch has room, so that they continue while the training loop is slow. No batch in
                # progress needs the episodes that `read_ahead` closes, see `Reading.read_ahead`.
                with self._counters.timed("rows_s"):  # rows of local data are read here
                    self._reading.read_ahead(number)
                self._room.get()
                if self.stopping:
                    return
                with self._counters.timed("plan_s"):
                    batch = self._plan()
                self._planned.put(batch)
        except BaseException as error:
            self._planned.put(closed() if self.stopping else error)

    def _plan(self) -> PlannedBatch:
        config, reading, timed = self._config, self._reading, self._counters.timed
        # Only `read_ahead` and `open` close episodes. After `open`, those of the batch stay open until this method has gathered
        # their rows and started the decode tasks, which hold the packets, indices and blocks that they need.
        with timed("rows_s"):
            reading.open()
        [samples] = self._schedule.ahead(1)
        for key, slots in self.pool.slots.items():
            self._schedule.frames[key].drop(samples.number, slots.take_unread())
        for frames in self.pool.on_disk.values():
            frames.update(self._schedule, samples.epoch)
        plan = self._schedule.plan()
        stores = reading.fetch(plan)
        errors = reading.episodes.failed
        failed = {row: errors[e] for row, e in enumerate(plan.samples.episode.tolist()) if e in errors} if errors else {}
        with timed("gather_s"):
            readable = gather.readable(plan, failed)
            values = gather.columns(config, self._schedule.table, readable)
            texts = gather.take_texts(config, self._schedule.table, readable.samples, values, reading.names.result())
        work = self.pool.start(plan, reading.episodes, stores)
        return PlannedBatch(plan.samples, values, texts, work, failed)

"""Planner: a thread that plans batches ahead, reads the data that they need, and starts their decoding.

Decode threads read the video of local files, see `dali_stream.mp4.clip`.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait

from dali_stream.cache.buffers import Buffers
from dali_stream.cache.frames_on_disk import FramesOnDisk
from dali_stream.cache.look_ahead import ReadLimits
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.video import BlockCache
from dali_stream.checks.arguments import budget_text
from dali_stream.lerobot.rows import RowMemory
from dali_stream.observe.counters import MEMORY, Counters
from dali_stream.observe.tracing import begin_batch
from dali_stream.observe.waiting import take
from dali_stream.order import Shuffle, has_consumers
from dali_stream.pipeline import tabular
from dali_stream.pipeline.batch import PlannedBatch, closed
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.decode_pool import DecodePool
from dali_stream.pipeline.layout import Layout
from dali_stream.schedule.budget import Parts, Sizes, look_ahead, order_horizon, reads_budget
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import BatchPlan, Limits, Schedule
from dali_stream.schedule.samples import batches_of_rank
from dali_stream.storage import Store
from dali_stream.storage.retry import PER_HOST
from dali_stream.system.workers import Workers, join_started

_log = logging.getLogger("dali_stream")
# Number of threads for remote data. While the caches fill, a batch needs many small blocks, so the number of parallel requests
# limits the rate: with round trips of 50 ms, 32 threads read 64 KiB blocks at 42 MB/s at most, however fast the network is.
FETCHERS = PER_HOST
_RESERVED = 8  # number of further threads. They read what a batch waits for while all others repeat failed reads ahead
_SOON = 256  # number of batches ahead whose episodes are kept if a read for another episode also returns their rows


class Reading:
    """Reader of the rows and indices that the plans need, and of the encoded video of remote files.

    Only the planner's thread may call its methods, except for `stop` and `join`. It calls `start`, and then for each batch
    `read_ahead`, `open` and `fetch` in this order.

    Args:
        config: Configuration of the loader.
        sizes: Sizes of the dataset and of its batches.
        parts: Division of `memory_budget`.
        schedule: Schedule of the batches. Nothing else opens and closes episodes in its table.
        on_disk: {camera: its frames on disk}.
        counters: Counters to add to.

    Attributes:
        parts: See above.
        episodes: Open episodes.
        video: Encoded video of remote files.
        names: Result of `Source.names`, which `start` requests.
    """

    def __init__(
        self,
        config: Config,
        sizes: Sizes,
        parts: Parts,
        schedule: Schedule,
        on_disk: Mapping[str, FramesOnDisk],
        counters: Counters,
    ) -> None:
        source, remote = config.source, config.source.data_store.remote
        self.parts, self._schedule, self._counters = parts, schedule, counters
        self._store = source.data_store.session()
        # Without threads, `Workers` reads in the planner's thread, which is faster for local files.
        self._fetchers = Workers("dali_stream fetch", FETCHERS if remote else 0, reserved=_RESERVED if remote else 0)
        self._look_ahead = look_ahead(config.batches.batch_size) if remote else 0
        self.video = BlockCache(
            schedule,
            parts.block,
            self._look_ahead,
            self._store,
            self._fetchers,
            lambda key, episode: source.path(key, config.indices.file(key, episode)),
            counters,
        )
        self.episodes = OpenEpisodes(
            source,
            ReadLimits(
                room=parts.opened,
                more=parts.encoded - parts.opened,
                index_share=parts.indices,
                index_bytes={camera: index.nbytes for camera, index in sizes.indices.items()},
                table_bytes=config.table_bytes,
                look_ahead=self._look_ahead,
                block=parts.block if remote else None,
            ),
            config.indices,
            self._store,
            self._fetchers,
            RowMemory(at_once=parts.opened),
            schedule.table,
            self.video.close,
            config.max_substitutes is not None,
            on_disk,
            counters,
        )
        self._source = source
        self.names: Future[dict[str, list[dict[int, str]]]] = Future()
        self._first: list[Future[None]] = []  # fetches for the first batch
        self._remedies = reread_remedies(
            reads_budget(parts, sizes), config.arguments.shuffle, remote, source.cache_dir is not None
        )

    def start(self) -> None:
        """Begin to read the names of the tasks."""
        self.names = self._fetchers.submit(self._source.names)

    def read_ahead(self, number: int) -> None:
        """Begin to read rows and indices for batch `number` and batches after it, and close episodes to make room for them.

        Local rows are read at once. Before the second batch, this waits for the encoded video of the first one. Batches in
        progress do not need open episodes: their rows have been copied, and the packets of their frames are known.
        """
        self._fetchers.set_due((number, 1))  # the priorities of rows and indices, and of video, that the batch waits for
        again = self.episodes.read_ahead(self._schedule.ahead(1 + self.episodes.horizon(number)))
        self._count_again("indices_read_again", again, "indices are read")
        wait(self._first)  # the encoded video of the first batch is fetched alone, so that training starts soon
        self._first = []

    def open(self) -> None:
        """Open the episodes of the next batch, and those of later batches that are due. Wait for their reads."""
        self.episodes.open(self._schedule.already_read(_SOON))  # `read_ahead` has read at least the next one
        # Encoded video may take the memory that rows and indices do not use. Their sizes are known now.
        self.video.others = sum(self.episodes.bytes_by_kind)
        self.video.room = self.parts.encoded - self.video.others

    def fetch(self, plan: BatchPlan) -> Mapping[str, Store]:
        """Begin to fetch the encoded video of a batch, and of batches after it.

        Returns:
            {camera: store from which the batch reads its encoded video}, without cameras whose files are read in place.

        Raises:
            MemoryBudgetError: If memory_budget does not hold the encoded video of the batch.
        """
        stores = self.video.request(plan.samples, plan.decoded, self._schedule.already_read(self._look_ahead))
        if not plan.samples.number:
            self._first = self.video.requests
        self._count_again("evicted_early", self.video.evicted_early, "bytes are fetched")
        self.video.evicted_early = 0
        return stores

    def stop(self) -> None:
        """Cancel all reads, without waiting. Threads that wait for a read get an error."""
        self._fetchers.stop()
        if self._store.remote:
            self._store.close()
        self._end_names()

    def join(self) -> None:
        """Wait for the threads to end, after `stop`."""
        while not self.names.done():
            wait([self.names], timeout=0.1)
            self._end_names()  # again, since the thread may have begun another read
        self._fetchers.join()

    def _end_names(self) -> None:
        """End the reads of names, which are made through the stores of the datasets, since these keep the names."""
        if not self.names.cancel() and not self.names.done():
            for part in self._source.parts:
                part.dataset.close()

    def _count_again(self, counter: str, count: int, what: str) -> None:
        """Count data that must be read again, since memory_budget did not hold it until its next use. Warn the first time.

        Args:
            counter: Name of the counter.
            count: Number to add.
            what: Subject and verb of the warning, such as "indices are read".
        """
        if count and not getattr(self._counters, counter):
            _log.warning(
                "memory_budget leaves %d bytes for rows, indices of video files and encoded video, which is less than the "
                "episodes in use need: %s more than once. The batches stay the same%s",
                *(self.parts.encoded, what, self._remedies),
            )
        self._counters.add(**{counter: count})


def reread_remedies(larger: int | None, shuffle: Shuffle, remote: bool, cached: bool) -> str:
    """Return the end of a message that says how to avoid reading rows, indices or encoded video repeatedly.

    Args:
        larger: Memory budget that holds the rows, indices and encoded video in use, in bytes. None if a larger budget would
            not help.
        shuffle: Argument of the Loader.
        remote: Whether the dataset is read over a network.
        cached: Whether the dataset has a `cache_dir`.

    Returns:
        Text to append to a sentence. Empty if nothing would help.
    """
    remedies = [f'a larger memory_budget, such as "{budget_text(larger)}"'] if larger else []
    if has_consumers(shuffle):
        remedies.append("a smaller episode_pool_size for a new run")
    if shuffle == "global":
        remedies.append("shuffle=True for a new run, which draws from few episodes at a time")
    if remote and not cached:
        remedies.append("a cache_dir on a local disk")
    return f". Give {' or '.join(remedies)}" if remedies else ""


class Planner:
    """Planner of the batches from a position of an epoch. After `start`, it plans one epoch after the other until `close`.

    The constructor starts no threads, so nothing is left if it raises an exception.

    `_run` and `_plan` run in the planner's thread, and nothing else changes the schedule or the table of open episodes, so they
    need no locks. `take` and `done` run in the thread that makes batches: the caller's or, with DALI, the thread that
    starts its runs. Two queues connect these threads: `_planned` passes batches on, and `_permits`, which has an item for each
    batch that may be planned, limits the batches in progress. `queue.Queue` and `threading.Semaphore` are written in Python, so
    Ctrl-C may leave their locks locked. `SimpleQueue` is written in C. Slots can be reused without locks because of `_permits`:
    when batch n is planned, the frames of batch n - config.in_progress were copied.

    Args:
        layout: Configuration of the loader, with the decoders.
        epoch: Epoch of the first batch.
        position: Position in that epoch at which the first batch begins.
        counters: Counters to add to.
        buffers: Memory for the frames of batches.

    Attributes:
        pool: Decode threads.
        stopping: Whether the planner was closed.
    """

    def __init__(self, layout: Layout, epoch: int, position: int, counters: Counters, buffers: Buffers) -> None:
        self._config, self._counters, self._in_memory = layout.config, counters, layout.in_memory
        config, source, sizes, parts = layout.config, layout.config.source, layout.sizes, layout.parts
        self._schedule = Schedule(
            EpisodeTable(source.lengths, source.cameras, source.videos if source.data_store.remote else ()),
            batches_of_rank(config.order, config.batches, config.rank, epoch, position),
            config.batches.largest,
            {key: config.windows.of(key) for key in layout.cached},
            Limits(parts.kept, config.in_progress, order_horizon(parts, sizes)),
            {key: config.windows.of(key) for key in layout.on_dali},
            source.dataset_of,
            layout.needed,
        )
        slots = {key: self._schedule.frames[key].slot_count for key in layout.cached}
        self.pool = DecodePool(layout, slots, counters, buffers)
        self._reading = Reading(config, sizes, parts, self._schedule, self.pool.on_disk, counters)
        self._planned: queue.SimpleQueue[PlannedBatch | BaseException] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(config.in_progress):
            self._permits.put(None)
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
        self._permits.put(None)

    def memory(self) -> dict[str, int]:
        """Return the memory in use in bytes, with the keys `MEMORY`.

        The keys are the total, and the memory of rows, indices, encoded video and decoded frames that are cached in the CPU's
        memory.
        """
        # These are plain numbers that the planner's thread updates. They are read without a lock, which is exact enough.
        frames = sum(self._schedule.frames[key].cached * self._config.frame_bytes(key) for key in self._in_memory)
        kinds = *self._reading.episodes.bytes_by_kind, self._reading.video.bytes, frames
        return dict(zip(MEMORY, (*kinds, sum(kinds)), strict=True))

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
        self._permits.put(None)  # wakes the planner's thread if it waits for a permit

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
                # Reads begin before the batch has a permit, so that they continue while the training loop is slow. No batch in
                # progress needs the episodes that `read_ahead` closes, see `Reading.read_ahead`.
                with self._counters.timed("rows_s"):  # rows of local data are read here
                    self._reading.read_ahead(number)
                self._permits.get()
                if self.stopping:
                    return
                with self._counters.timed("plan_s"):
                    batch = self._plan()
                self._planned.put(batch)
        except BaseException as error:
            self._planned.put(closed() if self.stopping else error)

    def _plan(self) -> PlannedBatch:
        config, reading, timed = self._config, self._reading, self._counters.timed
        # Only `read_ahead` and `open` close episodes. After `open`, those of the batch stay open until this method has copied
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
        failed = {sample: errors[e] for sample, e in enumerate(plan.samples.episode.tolist()) if e in errors} if errors else {}
        with timed("gather_s"):
            readable = tabular.readable(plan, failed)
            values = tabular.columns(config, self._schedule.table, readable)
            texts = tabular.take_texts(config, self._schedule.table, readable.samples, values, reading.names.result())
        work = self.pool.start(plan, reading.episodes, stores)
        return PlannedBatch(plan.samples, values, texts, work, failed)

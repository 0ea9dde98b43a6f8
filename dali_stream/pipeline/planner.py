"""The planner: a thread that plans batches ahead, reads what they need, and starts their decoding."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import gibibytes
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.readers import readers
from dali_stream.cache.rows import SPARE
from dali_stream.cache.video import BlockCache, InPlace, Video
from dali_stream.counters import Counters
from dali_stream.decode.route import Route
from dali_stream.errors import DatasetError
from dali_stream.memory_limit import fits
from dali_stream.order import windows
from dali_stream.order.uniforms import uniforms
from dali_stream.pipeline.batches import PlannedBatch, Texts, closed
from dali_stream.pipeline.config import DATASET, SAMPLE, SUBSTITUTE, Config
from dali_stream.pipeline.decode_pool import DecodePool
from dali_stream.schedule.advice import Advice, reread_remedies
from dali_stream.schedule.budget import Sizes, divide, look_ahead, order_horizon, reads_budget
from dali_stream.schedule.opening import Opening, Storage
from dali_stream.schedule.plan import BatchPlan, BatchPlanner, Limits
from dali_stream.schedule.samples import samples
from dali_stream.storage import Store
from dali_stream.workers import Workers

Array = npt.NDArray[Any]
_log = logging.getLogger("dali_stream")
MEMORY = ("resident_bytes", "row_bytes", "index_bytes", "encoded_bytes", "frame_cache_bytes")  # of `Loader.stats`
_LEAST_ADVISED = 1024  # frames that a larger cache is tried with, at least
_SOON = 256  # batches whose episodes are kept if their rows come along with others
_COPY_THREADS = 4  # at most: copying is bound by the memory, not by the cores
_COSTLY = 4.0  # frames decoded per delivered one, from which on the advice is a warning


class Planner:
    """Plans batches from a position on, without end, once it is started: one epoch follows another.

    The methods that begin with an underscore run in the planner's thread, except in the constructor. The thread of the caller
    calls all others.

    Args:
        config: Configuration of the loader.
        routes: {camera: decoder}.
        epoch, position: Where to begin.
        counters: Counters to add to.

    Attributes:
        keeps_all: Whether all decoded frames fit in memory.
        pool: Decode threads.
        copiers: Threads that help the caller to copy frames.
        stopping: Whether the planner was closed.
    """

    def __init__(self, config: Config, routes: Mapping[str, Route], epoch: int, position: int, counters: Counters) -> None:
        self._config, self._counters = config, counters
        dataset, self._dataset_of = config.dataset, config.dataset.dataset_of
        on_cpu = config.on_cpu(routes)
        on_nvdec = [key for key in dataset.cameras if key not in on_cpu]
        sizes = config.sizes(on_cpu)
        self._parts, depth = divide(config.memory_budget, sizes), config.depth
        self._remedies = reread_remedies(
            reads_budget(self._parts, sizes), config.arguments.shuffle, dataset.data_store.remote, dataset.cache_dir is not None
        )
        self._store = dataset.data_store.session()
        self._remote = self._store.remote
        self._readers = readers(self._remote)
        self._opening = Opening(self._storage(sizes))
        for (key, file), index_bytes in config.indices.held().items():
            self._opening.observe((key, file), index_bytes)
        block = self._parts.block if self._remote else None
        self._episodes = OpenEpisodes(dataset, config.indices, self._store, self._readers, self._parts.opened, block, counters)
        self._video: Video = InPlace(self._store, dataset.videos)
        if self._remote:
            self._video = BlockCache(self._store, self._readers, lambda key, e: dataset.path(key, config.indices.file(key, e)))
        self._names = self._readers.submit(dataset.names)
        self._planner = BatchPlanner(
            dataset.lengths,
            samples(config.order, config.batches, config.rank, epoch, position),
            config.batches.largest,
            {key: config.windows.of(key) for key in on_cpu},
            self._limits(depth, sizes),
            {key: config.windows.of(key) for key in on_nvdec},
            dataset.dataset_of,
        )
        self.pool = DecodePool(config, routes, {key: self._planner.frames[key].slots for key in on_cpu}, counters)
        self.copiers = Workers("dali_stream copy", min(config.num_threads, _COPY_THREADS) - 1)
        self._advised, self._evicted_early = False, 0
        self._first: list[Future[None]] = []  # what is fetched for the first batch
        self._before = {name: getattr(counters, name) for name in ("indices_read_again", "evicted_early")}  # in earlier runs
        self.keeps_all = not on_nvdec and self._parts.frames >= int(dataset.lengths.sum())
        self._planned: deque[PlannedBatch | BaseException] = deque()
        self._more = threading.Condition()
        self._room = threading.Semaphore(depth)
        self.stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="dali_stream planner", daemon=True)

    def start(self) -> None:
        """Start to plan. An exception in here, such as KeyboardInterrupt, must be followed by `close`."""
        self._thread.start()

    def take(self) -> PlannedBatch:
        """Return the next batch. Wait for it if necessary.

        Raises:
            DaliStreamError: If the batch could not be planned. No batch follows.
        """
        with self._counters.timed("starved_s"), self._more:
            self._more.wait_for(lambda: self._planned)
            batch = self._planned.popleft()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def done(self) -> None:
        """Tell that the batch taken last is finished, so that another one may be planned."""
        self._room.release()

    def ready(self) -> bool:
        """Whether the next batch is decoded, without an error."""
        with self._more:
            batch = self._planned[0] if self._planned else None
        return isinstance(batch, PlannedBatch) and all(work.ready() for work in batch.work.values())

    def memory(self) -> dict[str, int]:
        """Bytes of what is kept in memory, by the keys `MEMORY`: all, then rows, indices, encoded video, decoded frames."""
        frames = sum(cache.cached * self._config.frame_bytes(key) for key, cache in self._planner.frames.items())
        kinds = *self._opening.room.bytes_by_kind, self._planner.video.bytes, frames
        return dict(zip(MEMORY, (sum(kinds), *kinds), strict=True))

    def advice(self) -> tuple[int, float, float] | None:
        """The memory_budget of the simulated larger cache, and the frames decoded per delivered one, now and with it."""
        if (advice := self._planner.advice) is None:
            return None
        return self._budget_of(advice), advice.now, advice.then

    def close(self) -> None:
        """Stop the planner and its threads, and wait for them. In a forked process there is nothing to stop."""
        if os.getpid() != self._pid:
            return
        self.stopping = True
        self._readers.stop()
        if self._remote:
            self._store.close()
        self.pool.stop()
        self.copiers.stop()
        self._room.release()
        # The garbage collector may close an iterator in one of these threads.
        if threading.current_thread().name.startswith("dali_stream "):
            threading.Thread(target=self._join, name="dali_stream: close", daemon=True).start()
        else:
            self._join()

    def _join(self) -> None:
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        self.pool.join()
        self.copiers.join()
        self._readers.join()
        self._put(closed())  # for a thread that waits in `take`

    def _limits(self, depth: int, sizes: Sizes) -> Limits:
        parts, frames = self._parts, int(self._config.dataset.lengths.sum())
        larger = min(max(2 * parts.frames, _LEAST_ADVISED), frames) if parts.frames < frames and parts.frame_bytes else 0
        fetched = self._config.dataset.videos if self._remote else ()
        ahead = look_ahead(self._config.batches.batch_size)
        return Limits(parts.frames, depth, order_horizon(parts, sizes), larger, fetched, parts.block, ahead)

    def _storage(self, sizes: Sizes) -> Storage:
        dataset = self._config.dataset
        return Storage(
            files={camera: dataset.files(camera) for camera in dataset.videos},
            lengths=dataset.lengths,
            row_bytes=(dataset.row_bytes_of * SPARE[0] // SPARE[1])[self._dataset_of],
            table_bytes=self._config.table_bytes,
            index_bytes={camera: index.nbytes for camera, index in sizes.indices.items()},
            room=self._parts.opened,
            more=self._parts.encoded - self._parts.opened,
            index_share=self._parts.indices,
            look_ahead=look_ahead(self._config.batches.batch_size) if self._remote else 0,
        )

    def _run(self) -> None:
        try:
            for number in itertools.count():
                ahead = self._planner.ahead(1 + self._opening.horizon(number))
                self._planner.observe(closed=self._episodes.begin(self._opening, ahead))
                wait(self._first)  # of the first batch, whose reads run alone
                self._first = []
                self._room.acquire()
                if self.stopping:
                    return
                with self._counters.timed("plan_s"):
                    batch = self._plan()
                self._put(batch)
        except BaseException as error:
            self._put(closed() if self.stopping else error)

    def _put(self, planned: PlannedBatch | BaseException) -> None:
        with self._more:
            self._planned.append(planned)
            self._more.notify()

    def _plan(self) -> PlannedBatch:
        config, dataset = self._config, self._config.dataset
        with self._counters.timed("rows_s"):
            self._open()
        plan = self._planner.plan()
        self._opening.advance()
        batch, stores = plan.samples, self._fetch(plan)
        columns: dict[str, Array] = {}
        shown, pads = {}, {}
        which = self._dataset_of[batch.episode]
        for key, offsets in config.windows.offsets.items():
            shown[key], pads[f"{key}_is_pad"] = windows.window(offsets[which], batch.frame, dataset.lengths[batch.episode])
        for key in dataset.features:
            if key not in dataset.cameras:
                with self._counters.timed("gather_s"):
                    columns[key] = self._episodes.gather(key, batch.episode, shown.get(key, batch.frame))
        columns |= {key: values[which] for key, values in dataset.constants.items()}
        if config.augments:
            columns[SAMPLE] = uniforms(config.arguments.seed, batch.epoch, batch.position)
        if config.max_substitutes is not None:
            columns[SUBSTITUTE] = np.zeros(len(batch.frame), np.bool_)
        texts = self._texts(columns, batch.episode, batch.frame)
        self._tell_advice()
        frames = {key: shown.get(key, batch.frame[:, None]) for key in dataset.cameras}
        return PlannedBatch(batch, columns | pads, texts, self.pool.start(plan, frames, self._episodes, stores))

    def _open(self) -> None:
        """Wait for the episodes that the next batch needs, and those of some batches ahead of it."""
        opened, closed = self._episodes.finish(self._opening, self._planner.ahead(1, most=_SOON))
        self._planner.observe(opened, closed, self._parts.encoded - sum(self._opening.room.bytes_by_kind))
        self._count_again("indices_read_again", self._opening.indices_read_again, "indices are read")

    def _fetch(self, plan: BatchPlan) -> Mapping[str, Store]:
        """Fetch and evict the encoded video that the plan says. Return where each camera's is read."""
        self._video.drop(plan.video.evict)
        fetched = self._video.fetch(plan.video.fetch)
        if not plan.samples.number:
            self._first = fetched
        self._evicted_early += plan.video.evicted_early
        self._counters.add(needed_bytes=plan.video.needed_bytes)
        self._count_again("evicted_early", self._evicted_early, "bytes are fetched")
        return self._video.view(plan.samples.number, plan.video.needed)

    def _texts(self, columns: dict[str, Array], episode: Array, frame: Array) -> Texts:
        """Return what is text: string features, and the name of the current frame's task."""
        dataset = self._config.dataset
        texts = {key: columns.pop(key).tolist() for key, f in dataset.features.items() if f.is_text}
        for key, tables in self._names.result().items():
            index = f"{key}_index"
            if index in columns and (any(tables) or key == "task"):
                numbers = self._episodes.gather(index, episode, frame).tolist()
                which = self._dataset_of[episode].tolist()
                try:
                    texts[key] = [tables[d][n] for d, n in zip(which, numbers, strict=True)]
                except KeyError as error:
                    place = next(d for d, n in zip(which, numbers, strict=True) if n not in tables[d])
                    raise DatasetError(
                        f"{dataset.names_place(key, place)}: has no {index} {error}, which rows of the dataset "
                        f"name; it has {len(tables[place])}. Copy the dataset again"
                    ) from error
        if names := dataset.dataset_names:
            texts[DATASET] = [names[d] for d in self._dataset_of[episode].tolist()]
        return texts

    def _count_again(self, counter: str, count: int, what: str) -> None:
        """Count what is read again, since there was no room to keep it until its next use. Warn the first time."""
        if count and not getattr(self._counters, counter):
            _log.warning(
                "memory_budget leaves %d bytes for rows, indices of video files and encoded video, which is less than those of "
                "the episodes in use take: %s more than once. The batches stay the same%s",
                *(self._parts.encoded, what, self._remedies),
            )
        setattr(self._counters, counter, self._before[counter] + count)

    def _budget_of(self, advice: Advice) -> int:
        return self._config.memory_budget + (advice.kept - self._parts.frames) * self._parts.frame_bytes

    def _tell_advice(self) -> None:
        """Log once whether more memory would help."""
        if (advice := self._planner.advice) is None or self._advised:
            return
        self._advised = True
        if not fits(budget := self._budget_of(advice)):
            return
        gop = max(index.longest_gop for index in self._config.sizes(list(self._planner.frames)).indices.values())
        shorter = ", and `dali-stream transcode URI OUT --codec h264 --gop 2` to 1.5 or less" if advice.now >= _COSTLY else ""
        _log.log(
            logging.WARNING if advice.now >= _COSTLY and self._config.rank == 0 else logging.INFO,
            "GOP %d decodes %.2f frames per delivered frame; memory_budget=%s would bring it to %.2f%s",
            *(gop, advice.now, gibibytes(budget), advice.then, shorter),
        )

"""The external source of the DALI pipeline: batches of rows, masks, clips and frames, made ahead by a planner and a pool.

planner thread:  order -> rows -> decode tasks     one thread, a few batches ahead
decode pool:     clips -> frames                   `num_threads` of them, the interpreter released while FFmpeg works
DALI's caller:   `BatchProducer.source()` and `frames()` take the next batch in order, wait for its frames and copy them
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dali_stream.arguments import gibibytes
from dali_stream.cache.buffers import Buffers
from dali_stream.cache.memory import Memory
from dali_stream.cache.rows import SPARE
from dali_stream.cache.slots import Slots
from dali_stream.counters import Counters
from dali_stream.decode.dali import DaliDecoder, Packed
from dali_stream.decode.decoder import Decoder, VideoAndImages, Work
from dali_stream.decode.images import ImageDecoder
from dali_stream.decode.route import Route
from dali_stream.decode.torchcodec import TorchcodecDecoder
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, StorageError
from dali_stream.lerobot.source import ABSENT
from dali_stream.memory_limit import fits
from dali_stream.order import windows
from dali_stream.order.uniforms import uniforms
from dali_stream.pipeline.config import DATASET, SAMPLE, SUBSTITUTE, Config
from dali_stream.process import trim_memory
from dali_stream.schedule.advice import Advice, reread_remedies
from dali_stream.schedule.budget import Sizes, divide, look_ahead, order_horizon, reads_budget
from dali_stream.schedule.frames import NONE
from dali_stream.schedule.reads import Storage
from dali_stream.schedule.samples import Samples, samples
from dali_stream.schedule.schedule import Limits, Schedule, Step
from dali_stream.storage import Store
from dali_stream.workers import Workers

Array = npt.NDArray[Any]
Texts = dict[str, list[str]]  # per key, one of each sample
_log = logging.getLogger("dali_stream")
MEMORY = ("resident_bytes", "row_bytes", "index_bytes", "encoded_bytes", "frame_cache_bytes")  # of `Loader.stats`
_TRIM_AFTER = 128 << 20  # bytes of RGB at full size per decode thread, after which free memory is given back: it takes some ms
_COPY_THREADS = 4  # at most: copying is bound by the memory, not by the cores
_LEAST_ADVISED = 1024  # frames that a larger cache is tried with, at least
_COSTLY = 4.0  # frames decoded per delivered one, from which on the advice is a warning


@dataclass
class Batch:
    """One rank's share of a global batch, in progress."""

    columns: dict[str, Array]
    strings: Texts
    work: dict[str, Work]
    samples: Samples


class BatchProducer:
    """Makes batches from a position on, without end, once it is started: one epoch follows another.

    Args:
        config: what to make.
        routes: the decoder of each camera.
        epoch, position: where to begin.
        counters: what to add to.

    Attributes:
        failure: Error that `source` or `frames` raised, after which no more batches are made.
    """

    failure: BaseException | None = None

    def __init__(self, config: Config, routes: dict[str, Route], epoch: int, position: int, counters: Counters) -> None:
        self._config, self._counters = config, counters
        dataset, self._dataset_of = config.dataset, config.dataset.dataset_of
        self._on_dali = [key for key in dataset.cameras if routes[key].decoder == "dali"]
        self._on_cpu = [key for key in dataset.cameras if key not in self._on_dali]
        self._past_dali = self._on_cpu if config.past_dali else []
        sizes = config.sizes(self._on_cpu)
        self._parts, depth = divide(config.memory_budget, sizes), config.depth
        self._remedies = reread_remedies(
            reads_budget(self._parts, sizes), config.arguments.shuffle, dataset.data_store.remote, dataset.cache_dir is not None
        )
        self._memory = Memory(dataset, config.indices, self._parts.encoded, counters)
        self._names = self._memory.names()
        self._schedule = Schedule(
            dataset.lengths,
            samples(config.order, config.batches, config.rank, epoch, position),
            config.batches.largest,
            {key: config.windows.of(key) for key in self._on_cpu},
            self._limits(depth, sizes),
            self._storage(sizes),
            {key: config.windows.of(key) for key in self._on_dali},
            dataset.dataset_of,
        )
        for (key, file), index_bytes in config.indices.held().items():
            self._schedule.reads.there(key, file, index_bytes)
        self._decoders: dict[str, Decoder] = {key: self._decoder(key) for key in dataset.cameras}
        self._advised, self._decoded_bytes = False, 0
        self._first: list[Future[None]] = []  # what is fetched for the first batch
        self._before = {name: getattr(counters, name) for name in ("indices_read_again", "evicted_early")}  # in earlier runs
        self.keeps_all = not self._on_dali and self._parts.frames >= int(dataset.lengths.sum())  # all decoded frames
        self._buffers = Buffers()
        self._taken, self._given = 0, [0, 0]  # batches; of them by `source` and by `frames`
        self._current: tuple[Batch, dict[str, Any]]
        self._clips: deque[dict[str, list[Packed]]] = deque(maxlen=2)  # of the batches that DALI may be at
        self._made: deque[Batch | BaseException] = deque()
        self._more = threading.Condition()
        self._room = threading.Semaphore(depth)
        self._stopping = False
        self._pid = os.getpid()
        self.delivered: deque[tuple[Texts, dict[str, torch.Tensor]]] = deque()  # past DALI, of batches that DALI has taken
        self._pool = Workers("dali_stream decode", config.num_threads)
        self._copiers = Workers("dali_stream copy", min(config.num_threads, _COPY_THREADS) - 1)
        self._planner = threading.Thread(target=self._run, name="dali_stream planner", daemon=True)

    def start(self) -> None:
        """Starts to make batches. An exception in here, such as KeyboardInterrupt, is to be followed by `close`."""
        self._planner.start()

    def _decoder(self, key: str) -> Decoder:
        config, dataset = self._config, self._config.dataset
        if key in self._on_dali:
            return DaliDecoder(dataset, key, self._counters, config.gpu)
        size = config.frame_size(key)
        slots = Slots(self._schedule.frames[key].slots, config.frame_shape(key))
        kinds = [TorchcodecDecoder] * (key in dataset.videos) + [ImageDecoder] * (key in dataset.images)
        video, *images = (kind(dataset, key, self._counters, slots, size) for kind in kinds)
        return VideoAndImages(dataset, key, slots, video, *images) if images else video

    def source(self) -> tuple[Any, ...]:
        """The next batch for DALI: the arrays of `Config.columns`, then per camera on the DALI route lists: clips, frames in
        them and, for a window, order of its steps.

        Raises:
            DaliStreamError: the batch could not be made. The producer cannot be used afterwards.
        """
        batch, frames = self._turn(0)
        arrays: list[Any] = [batch.columns[key] for key in self._config.columns()]
        for key in self._on_dali:
            clips, places, orders = (list(part) for part in zip(*frames[key], strict=True))
            arrays += [clips, places] if self._config.squeezed(key) else [clips, places, orders]
        return tuple(arrays)

    def frames(self) -> tuple[Array, ...]:
        """The rest of the same batch: per camera that is not on the DALI route, (B, H, W, C) or (B, T, H, W, C) uint8.

        Their memory is used again when nothing refers to it. Errors as in `source`.
        """
        _, frames = self._turn(1)
        return tuple(self._shown(key, frames[key]) for key in self._on_cpu)

    def _shown(self, key: str, frames: Array) -> Array:
        """Frames (B, T, ...) as a batch has them: without T where a sample has one frame."""
        return frames[:, 0] if self._config.squeezed(key) else frames

    def _turn(self, which: int) -> tuple[Batch, dict[str, Any]]:
        """The current batch of one of the two sources. Depending on the graph, DALI asks one of them or both."""
        self._given[which] += 1
        if self._given[which] > self._taken:
            try:
                self._current = self._take()
            except BaseException as error:
                self.failure = error
                raise
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
            frames = self._finish(batch)
        except (CancelledError, StorageError) as error:
            if isinstance(error, StorageError) and not self._stopping:
                raise
            raise closed() from error
        self._room.release()
        self._clips.append({key: frames[key] for key in self._on_dali})
        self._counters.padded += batch.samples.padded
        past = {key: torch.from_numpy(self._shown(key, frames[key])).movedim(-1, -3) for key in self._past_dali}
        self.delivered.append((batch.strings, past))
        return batch, frames

    def ready(self) -> bool:
        """Whether `source` would return at once and without an error, so that DALI may run before it is asked for a batch.

        Not where frames are copied past DALI: that would delay the batch before, and take memory for one more.
        """
        if self._past_dali:
            return False
        with self._more:
            batch = self._made[0] if self._made else None
        return isinstance(batch, Batch) and all(work.ready() for work in batch.work.values())

    def clips(self) -> dict[str, list[Packed]]:
        """Per camera on the DALI route, the clips of the batches that DALI may be at."""
        return {key: [clip for batch in self._clips for clip in batch[key]] for key in self._on_dali}

    def memory(self) -> dict[str, int]:
        """Bytes of what is kept in memory, by the keys `MEMORY`: all, then rows, indices, encoded video, decoded frames."""
        frames = sum(cache.cached * self._config.frame_bytes(key) for key, cache in self._schedule.frames.items())
        kinds = *self._schedule.reads.bytes_by_kind(), frames
        return dict(zip(MEMORY, (sum(kinds), *kinds), strict=True))

    def close(self) -> None:
        """Stops the planner and the pool, and waits for them. In a forked process there is nothing to stop."""
        if os.getpid() != self._pid:
            return
        self._stopping = True
        self._memory.stop()
        self._pool.stop()
        self._copiers.stop()
        self._room.release()
        # The garbage collector may close an iterator in one of these threads.
        if threading.current_thread().name.startswith("dali_stream "):
            threading.Thread(target=self._join, name="dali_stream: close", daemon=True).start()
        else:
            self._join()

    def _join(self) -> None:
        if self._planner.ident is not None:  # it was started
            self._planner.join()
        self._pool.join()
        self._copiers.join()
        self._memory.join()
        for decoder in self._decoders.values():  # DALI may hold this producer for a while
            decoder.close()
        self._put(closed())  # for a thread that waits in `source`

    def _limits(self, depth: int, sizes: Sizes) -> Limits:
        kept, frames = self._parts.frames, int(self._config.dataset.lengths.sum())
        larger = min(max(2 * kept, _LEAST_ADVISED), frames) if kept < frames and self._parts.frame_bytes else 0
        return Limits(kept, depth, order_horizon(self._parts, sizes), larger)

    def _storage(self, sizes: Sizes) -> Storage:
        dataset, remote = self._config.dataset, self._config.dataset.data_store.remote
        return Storage(
            files={camera: dataset.files(camera) for camera in dataset.videos},
            row_bytes=(dataset.row_bytes_of * SPARE[0] // SPARE[1])[self._dataset_of],
            index_bytes={camera: index.nbytes for camera, index in sizes.indices.items()},
            fetched=dataset.videos if remote else (),
            room=self._parts.encoded,
            block=self._parts.block,
            look_ahead=look_ahead(self._config.batches.batch_size) if remote else 0,
        )

    # ---- planner thread

    def _run(self) -> None:
        try:
            while True:
                reads, drop = self._schedule.request()
                self._memory.drop(drop)
                self._memory.begin(reads)
                wait(self._first)  # of the first batch, whose reads run alone
                self._first = []
                self._room.acquire()
                if self._stopping:
                    return
                with self._counters.timed("plan_s"):
                    batch = self._prepare()
                self._put(batch)
        except BaseException as error:
            self._put(closed() if self._stopping else error)

    def _put(self, made: Batch | BaseException) -> None:
        with self._more:
            self._made.append(made)
            self._more.notify()

    def _learn(self) -> None:
        """Waits for the rows and indices that the next batch needs, and those of some batches ahead of it."""
        reads, now = self._schedule.reads, self._schedule.next().number
        for read in reads.due():
            try:
                size, found = self._memory.finish(read)
            except (DaliStreamError, CancelledError):
                if read.batch == now:
                    raise
                reads.failed(read)  # it gets another chance
            else:
                others = {e: size * SPARE[0] // SPARE[1] for e, size in found.sizes().items() if e != read.number}
                self._memory.keep(found, reads.arrived(read, size, others))
        self._count_again("indices_read_again", self._schedule.reads.indices_read_again, "indices are read")
        episodes, remote = reads.ready(), self._config.dataset.data_store.remote
        for key, decoder in self._decoders.items():
            for episode in self._schedule.unknown(key, episodes):
                packets, keyframes = decoder.learn(self._memory, episode)
                fetched = remote and key in self._config.dataset.videos and (packets != NONE).any()
                index = self._memory.index(key, episode) if fetched else None
                self._schedule.learn(key, episode, packets, keyframes, index)

    def _prepare(self) -> Batch:
        config, dataset, memory = self._config, self._config.dataset, self._memory
        with self._counters.timed("rows_s"):
            self._learn()
        step = self._schedule.plan()
        batch, stores = step.samples, self._read(step)
        columns: dict[str, Array] = {}
        shown, pads = {}, {}
        which = self._dataset_of[batch.episode]
        for key, offsets in config.windows.offsets.items():
            shown[key], pads[f"{key}_is_pad"] = windows.window(offsets[which], batch.frame, dataset.lengths[batch.episode])
        for key in dataset.features:
            if key not in dataset.cameras:
                with self._counters.timed("gather_s"):
                    columns[key] = memory.gather(key, batch.episode, shown.get(key, batch.frame))
        columns |= {key: values[which] for key, values in dataset.constants.items()}
        if config.augments:
            columns[SAMPLE] = uniforms(config.arguments.seed, batch.epoch, batch.position)
        if config.max_substitutes is not None:
            columns[SUBSTITUTE] = np.zeros(len(batch.frame), np.bool_)
        strings = self._strings(columns, batch.episode, batch.frame)
        frames = {key: shown.get(key, batch.frame[:, None]) for key in dataset.cameras}
        self._count(step)
        work = {
            key: decoder.start(self._pool, step, frames[key], memory, stores.get(key, dataset.data_store))
            for key, decoder in self._decoders.items()
        }
        return Batch(columns | pads, strings, work, batch)

    def _read(self, step: Step) -> Mapping[str, Store]:
        """Fetches and drops what the step says. Returns where each camera's video is read."""
        reads, video = step.reads, self._memory.video
        self._memory.drop(reads.drop)
        fetched = video.fetch(reads.fetch)
        if not step.samples.number:
            self._first = fetched
        self._counters.add(needed_bytes=reads.needed_bytes)
        self._count_again("evicted_early", self._schedule.reads.cache.evicted_early, "bytes are fetched")
        return video.view(step.samples.number, reads.needed)

    def _count(self, step: Step) -> None:
        """Counts what the schedule plans, says once whether more memory would help, and gives back free memory."""
        if self._schedule.advice and not self._advised:
            self._advised = True
            self._advise(self._schedule.advice)
        for key, planned in step.frames.items():
            self._counters.add(frame_cache_hits=planned.hits, frames_evicted_before_use=planned.evicted)
            self._decoded_bytes += planned.decodes * math.prod(self._config.dataset.features[key].shape)
        if self._decoded_bytes >= _TRIM_AFTER * len(self._pool):
            self._decoded_bytes = 0
            trim_memory()

    def _count_again(self, counter: str, count: int, what: str) -> None:
        """Counts what is read again, since there was no room to keep it until its next use. Warns the first time."""
        if count and not getattr(self._counters, counter):
            _log.warning(
                "memory_budget leaves %d bytes for rows, indices of video files and encoded video, which is less than those of "
                "the episodes in use take: %s more than once. The batches stay the same%s",
                *(self._parts.encoded, what, self._remedies),
            )
        setattr(self._counters, counter, self._before[counter] + count)

    def advice(self) -> tuple[int, float, float] | None:
        """The memory_budget of the simulated larger cache, and the frames decoded per delivered one, now and with it."""
        if (advice := self._schedule.advice) is None:
            return None
        return self._budget_of(advice), advice.now, advice.then

    def _budget_of(self, advice: Advice) -> int:
        return self._config.memory_budget + (advice.kept - self._parts.frames) * self._parts.frame_bytes

    def _advise(self, advice: Advice) -> None:
        budget = self._budget_of(advice)
        if not fits(budget):
            return
        gop = max(index.longest_gop for index in self._config.sizes(self._on_cpu).indices.values())
        shorter = ", and `dali-stream transcode URI OUT --codec h264 --gop 2` to 1.5 or less" if advice.now >= _COSTLY else ""
        _log.log(
            logging.WARNING if advice.now >= _COSTLY and self._config.rank == 0 else logging.INFO,
            "GOP %d decodes %.2f frames per delivered frame; memory_budget=%s would bring it to %.2f%s",
            *(gop, advice.now, gibibytes(budget), advice.then, shorter),
        )

    def _strings(self, columns: dict[str, Array], episode: Array, frame: Array) -> dict[str, list[Any]]:
        """Text goes past DALI: string features, and the name of the current frame's task."""
        dataset = self._config.dataset
        texts = {key: columns[key].tolist() for key, f in dataset.features.items() if f.is_text}
        for key, tables in self._names.result().items():
            index = f"{key}_index"
            if index in columns and (any(tables) or key == "task"):
                numbers = self._memory.gather(index, episode, frame).tolist()
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

    # ---- the thread that runs DALI

    def _finish(self, batch: Batch) -> dict[str, Any]:
        """Waits for the frames of a batch: per camera clips, or (B, T, H, W, C). Replaces samples that failed, if allowed."""
        frames: dict[str, Any] = {}
        failed: dict[int, DecodeError] = {}
        files: dict[int, str] = {}  # of the samples that failed
        with self._counters.timed("starved_s"):
            for task in itertools.chain.from_iterable(work.tasks for work in batch.work.values()):
                task.result()
        as_float = self._past_dali and self._config.image_dtype == "float32"
        for key, work in batch.work.items():
            frames[key] = work.collect(self._buffers, np.float32 if as_float else np.uint8, self._copiers)
            failed |= work.failed
            files |= {row: self._file(key, int(batch.samples.episode[row])) for row in work.failed}
        rows = len(next(iter(batch.columns.values())))
        self._counters.samples += rows
        self._counters.frames += sum(self._config.windows.steps(key) * (rows - self._lacking(batch, key)) for key in frames)
        if failed:
            good = [row for row in range(rows) if row not in failed]
            share, first = self._config.max_substitutes, failed[min(failed)]
            if share is None or not good:
                raise first
            if len(failed) > (most := int(share * rows + 1e-9)):  # 0.29 * 100 is 28.999999999999996
                raise DecodeError(
                    f"{len(failed)} of the {rows} samples of a batch cannot be decoded, and max_substitutes={share:g} allows "
                    f"{most} to be substituted. The first: {first}"
                ) from first
            for row, error in sorted(failed.items()):
                self._config.substitutes.add(batch.samples.epoch, files[row], error)
                for values in (*batch.columns.values(), *batch.strings.values(), *frames.values()):
                    values[row] = values[good[row % len(good)]]
                batch.columns[SUBSTITUTE][row] = True
            self._counters.substituted += len(failed)
        return frames

    def _file(self, camera: str, episode: int) -> str:
        """The video file of an episode, for messages; the camera itself if its frames are images in Parquet."""
        dataset = self._config.dataset
        file = dataset.files(camera)[episode] if camera in dataset.videos else ABSENT
        return camera if file == ABSENT else dataset.data_store.where(dataset.path(camera, int(file)))

    def _lacking(self, batch: Batch, camera: str) -> int:
        """Samples of a batch whose dataset lacks a camera."""
        mask = f"{camera}_is_missing"
        return int(batch.columns[mask].sum()) if mask in self._config.dataset.constants else 0


def closed() -> DaliStreamError:
    """The error for a thread that waits for a batch while another one closes the loader."""
    return DaliStreamError("the loader was closed while a batch was waited for")

"""Producer of finished batches: it plans and decodes ahead, and then copies the frames of each batch."""

from __future__ import annotations

import copy
import time
from concurrent.futures import CancelledError

import numpy as np

from dali_stream.cache.buffers import Buffers
from dali_stream.checks.arrays import NONE
from dali_stream.decode.depth import Distances
from dali_stream.errors import DaliStreamError, DecodeError, MemoryBudgetError
from dali_stream.observe.counters import Counters
from dali_stream.observe.waiting import result
from dali_stream.pipeline.batch import FinishedBatch, PlannedBatch, closed
from dali_stream.pipeline.config import SUBSTITUTE
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.planner import Planner
from dali_stream.system.workers import Workers


class Producer:
    """Producer of finished batches from one position of the order, in this process. See `ProducerProcess` for another process.

    The last step of a batch is done in the thread that calls `next`: its frames are waited for and copied, and samples that
    failed are substituted.

    Args:
        layout, epoch, position, counters, buffers: See `Planner`.

    Attributes:
        starter: Thread that starts the runs of a DALI graph.

    Raises:
        MemoryBudgetError: If the system has too little memory for the batches in progress.
    """

    def __init__(self, layout: Layout, epoch: int, position: int, counters: Counters, buffers: Buffers) -> None:
        self._config, source = layout.config, layout.config.source
        try:
            self._planner = Planner(layout, epoch, position, counters, buffers)
        except MemoryError as error:  # of the slots of the batches in progress
            words = f" ({error})" if str(error) else ""
            raise MemoryBudgetError(
                f"{self._config.in_progress} batches in progress with batch_size={self._config.batches.batch_size} need more "
                f"memory than the system provides{words}. Use a smaller prefetch or batch_size, or shorter windows"
            ) from error
        self._distances = {
            key: Distances(source, key, self._config.depth_unit) for key in source.cameras if source.features[key].is_depth
        }

    @property
    def starter(self) -> Workers:
        return self._planner.pool.starter

    def start(self) -> None:
        """Start to plan and to decode. If this raises an exception, such as KeyboardInterrupt, the caller must call `close`."""
        self._planner.start()

    def next(self) -> FinishedBatch:
        """Return the next batch, with its frames.

        Raises:
            DaliStreamError: If the batch could not be made, or the loader was closed.
        """
        planned = self._planner.take()
        try:
            batch = self._finished(planned)
        except Exception as error:  # any error may be the consequence of another thread closing the loader
            if self._planner.stopping or isinstance(error, CancelledError):
                raise closed() from error
            raise
        self._planner.done()
        return batch

    def memory(self) -> dict[str, int]:
        """Return the memory in use in bytes. See `Planner.memory`."""
        return self._planner.memory()

    def stop(self) -> None:
        """Tell all threads to stop, without waiting for them. If Ctrl-C interrupts this method, it must be called again."""
        self._planner.stop()

    def join(self) -> None:
        """Wait for the threads to end, after `stop`."""
        self._planner.join()

    def _finished(self, planned: PlannedBatch) -> FinishedBatch:
        """Wait for the frames of a batch and copy them. Substitute samples that failed, if this is allowed."""
        config, pool, samples = self._config, self._planner.pool, planned.samples
        batch, episode = FinishedBatch(samples.number, samples.epoch, planned.columns, planned.texts), samples.episode
        failed: dict[int, DaliStreamError] = {}
        files: dict[int, str] = {}  # {sample that failed: its file}
        # The tasks of all cameras are waited for before anything is copied, so that no waiting counts as copying.
        for key, work in planned.work.items():
            for task in work.tasks:
                result(task, f"frames of {key} for a batch of epoch {samples.epoch}")
        batch.ready_at = time.perf_counter()
        for key, work in planned.work.items():
            batch.frames[key] = work.collect(pool.buffers, pool.dtype, pool.copiers)
            if key in self._distances:
                dataset = config.source.dataset_of[episode]
                batch.frames[key] = self._distances[key].of(batch.frames[key], dataset, pool.buffers, pool.copiers)
            failed |= work.failed
            files |= {sample: self._file(key, int(episode[sample])) for sample in work.failed}
        failed |= planned.failed
        files |= {sample: f"episode {config.source.episodes[episode[sample]]}" for sample in planned.failed}
        count = len(episode)
        shown = sum(config.windows.steps(key) * (count - self._missing(batch, key)) for key in batch.frames)
        batch.counts = {"samples": count, "frames": shown, "padded": samples.padded, "substituted": len(failed)}
        if failed:
            if self._planner.stopping:  # reads fail because another thread closes the loader
                raise closed()
            good = self._substitutes(count, failed)
            # The choice of a substitute depends on the batch only, so a resumed run has the same ones.
            for sample, error in sorted(failed.items()):
                batch.substituted.append((files[sample], error))
                of = good[sample % len(good)]
                for values in (*batch.columns.values(), *batch.frames.values()):
                    if isinstance(values, np.ndarray | list):
                        values[sample] = values[of]
                    else:
                        from dali_stream.cache.gpu_slots import copy_sample

                        copy_sample(values, sample, of)
                for texts in batch.texts.values():
                    texts[sample] = copy.deepcopy(texts[of])  # annotations, which the user may change
                batch.columns[SUBSTITUTE][sample] = True
        return batch

    def _substitutes(self, count: int, failed: dict[int, DaliStreamError]) -> list[int]:
        """Return the samples that may substitute others. Raises the first error if all failed, or DecodeError if too many."""
        good = [sample for sample in range(count) if sample not in failed]
        share, first = self._config.max_substitutes, failed[min(failed)]
        if share is None or not good:
            raise first
        if len(failed) > (most := int(share * count + 1e-9)):  # 0.29 * 100 is 28.999999999999996
            raise DecodeError(
                f"{len(failed)} of the {count} samples of a batch cannot be read or decoded, but max_substitutes={share:g} "
                f"allows only {most} substitutes. The first error: {first}"
            ) from first
        return good

    def _file(self, camera: str, episode: int) -> str:
        """Return the address of an episode's video file for messages, or the name of the camera if its frames are images."""
        source = self._config.source
        file = int(source.videos[camera].file[episode]) if camera in source.videos else NONE
        return camera if file == NONE else source.data_store.where(source.path(camera, file))

    def _missing(self, batch: FinishedBatch, camera: str) -> int:
        """Return the number of samples of a batch whose dataset lacks a camera."""
        mask = f"{camera}_is_missing"
        return int(batch.columns[mask].sum()) if mask in self._config.source.constants else 0

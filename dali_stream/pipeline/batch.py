"""A batch in progress, and its last step: wait for its frames, copy them, and substitute samples that failed."""

from __future__ import annotations

import copy
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dali_stream.checks.arrays import NONE, Array
from dali_stream.decode.decoder import Work
from dali_stream.decode.depth import Distances
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.observe.counters import Counters
from dali_stream.observe.waiting import result
from dali_stream.pipeline.config import SUBSTITUTE, Config
from dali_stream.schedule.samples import Samples

if TYPE_CHECKING:
    from dali_stream.pipeline.planner import Planner

Texts = dict[str, list[Any]]
"""{key: one string per sample, or a list of annotations per sample for a language column}."""


@dataclass
class BatchInProgress:
    """One rank's share of a global batch, from its plan until it is returned. `Finisher` adds the frames once they are decoded.

    Attributes:
        samples: Samples of the batch.
        columns: {key: values of shape (B, ...)}, for tabular features, masks and random numbers.
        texts: {key: one string per sample}.
        work: {camera: decode tasks in progress}.
        failed: {sample whose episode cannot be read: error}. Its columns and texts are those of another sample.
        frames: {camera: frames of shape (B, T, H, W, C), or a list with one item per sample, see `Work.collect`}.
        ready_at: Time of `time.perf_counter` at which all frames were decoded.
        counts: {attribute of `Counters`: amount to add when the batch is delivered}.
        substituted: File and error of each sample that was substituted.
    """

    samples: Samples
    columns: dict[str, Array]
    texts: Texts
    work: dict[str, Work]
    failed: dict[int, DaliStreamError]
    frames: dict[str, Any] = field(default_factory=dict)
    ready_at: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    substituted: list[tuple[str, DaliStreamError]] = field(default_factory=list)


def with_time_axis(config: Config, camera: str, frames: Array) -> Array:
    """Return the frames of a camera in the shape in which a batch contains them.

    Args:
        config: Configuration of the loader.
        camera: Name of the camera.
        frames: Frames of shape (B, T, H, W, C).

    Returns:
        View of shape (B, H, W, C) if samples have no time axis, see `Config.squeezed`. Otherwise `frames`.
    """
    return frames[:, 0] if config.squeezed(camera) else frames


def closed() -> DaliStreamError:
    """Return the error for a thread that waits for a batch while another thread closes the loader."""
    return DaliStreamError("The Loader was closed while another thread waited for a batch")


class Finisher:
    """Finisher of a planner's batches. It works in the thread that calls it.

    Args:
        config: Configuration of the loader.
        planner: Planner of the batches.
        counters: Counters to add to.
    """

    def __init__(self, config: Config, planner: Planner, counters: Counters) -> None:
        self._config, self._planner, self._counters = config, planner, counters
        source = config.source
        self._distances = {
            key: Distances(source, key, config.depth_unit) for key in source.cameras if source.features[key].is_depth
        }

    def next(self) -> BatchInProgress:
        """Return the next batch, with its frames.

        Raises:
            DaliStreamError: If the batch could not be made, or the loader was closed.
        """
        batch = self._planner.take()
        try:
            self._finish(batch)
        except Exception as error:  # any error may be the consequence of another thread closing the loader
            if self._planner.stopping or isinstance(error, CancelledError):
                raise closed() from error
            raise
        self._planner.done()
        return batch

    def delivered(self, batch: BatchInProgress, began: float) -> None:
        """Count a batch that is returned to the user, and log its substitutes. It may have been finished long before.

        Args:
            batch: Batch.
            began: Time of `time.perf_counter` at which it was requested.
        """
        self._counters.starved(began, batch.ready_at)
        self._counters.add(**batch.counts)
        for file, error in batch.substituted:
            self._config.substitutes.add(batch.samples.epoch, file, error)

    def _finish(self, batch: BatchInProgress) -> None:
        """Wait for the frames of a batch and copy them. Substitute samples that failed, if this is allowed."""
        config, pool, episode = self._config, self._planner.pool, batch.samples.episode
        failed: dict[int, DaliStreamError] = {}
        files: dict[int, str] = {}  # {sample that failed: its file}
        # The tasks of all cameras are waited for before anything is copied, so that no waiting counts as copying.
        for key, work in batch.work.items():
            for task in work.tasks:
                result(task, f"frames of {key} for a batch of epoch {batch.samples.epoch}")
        batch.ready_at = time.perf_counter()
        for key, work in batch.work.items():
            batch.frames[key] = work.collect(pool.buffers, pool.dtype, pool.copiers)
            if key in self._distances:
                dataset = config.source.dataset_of[episode]
                batch.frames[key] = self._distances[key].of(batch.frames[key], dataset, pool.buffers, pool.copiers)
            failed |= work.failed
            files |= {sample: self._file(key, int(episode[sample])) for sample in work.failed}
        failed |= batch.failed
        files |= {sample: f"episode {config.source.episodes[episode[sample]]}" for sample in batch.failed}
        count = len(episode)
        shown = sum(config.windows.steps(key) * (count - self._missing(batch, key)) for key in batch.frames)
        batch.counts = {"samples": count, "frames": shown, "padded": batch.samples.padded, "substituted": len(failed)}
        if failed:
            if self._planner.stopping:  # reads fail because another thread closes the loader
                raise closed()
            good = self._substitutes(count, failed)
            # The choice of a substitute depends on the batch only, so a resumed run has the same ones.
            for sample, error in sorted(failed.items()):
                batch.substituted.append((files[sample], error))
                of = good[sample % len(good)]
                for values in (*batch.columns.values(), *batch.frames.values()):
                    values[sample] = values[of]
                for texts in batch.texts.values():
                    texts[sample] = copy.deepcopy(texts[of])  # annotations, which the user may change
                batch.columns[SUBSTITUTE][sample] = True

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

    def _missing(self, batch: BatchInProgress, camera: str) -> int:
        """Return the number of samples of a batch whose dataset lacks a camera."""
        mask = f"{camera}_is_missing"
        return int(batch.columns[mask].sum()) if mask in self._config.source.constants else 0

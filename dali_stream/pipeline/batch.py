"""A batch from its plan until it is returned to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dali_stream.checks.arrays import Array
from dali_stream.decode.decoder import Work
from dali_stream.errors import DaliStreamError
from dali_stream.observe.counters import Counters
from dali_stream.pipeline.config import Config
from dali_stream.schedule.samples import Samples

Texts = dict[str, list[Any]]
"""{key: one string per sample, or a list of annotations per sample for a language column}."""


@dataclass
class PlannedBatch:
    """One rank's share of a global batch, whose frames are being decoded.

    Attributes:
        samples: Samples of the batch.
        columns: {key: values of shape (B, ...)}, for tabular features, masks and random numbers.
        texts: {key: one string per sample}.
        work: {camera: decode tasks in progress}.
        failed: {sample whose episode cannot be read: error}. Its columns and texts are those of another sample.
    """

    samples: Samples
    columns: dict[str, Array]
    texts: Texts
    work: dict[str, Work]
    failed: dict[int, DaliStreamError]


@dataclass
class FinishedBatch:
    """Batch with its frames, as a `Producer` returns it.

    Attributes:
        number, epoch: See `Samples`.
        columns: {key: values of shape (B, ...)}, for tabular features, masks and random numbers.
        texts: {key: one string per sample}.
        frames: {camera: frames of shape (B, T, H, W, C), or a list with one item per sample, see `Work.collect`}.
        ready_at: Time of `time.perf_counter` at which all frames were decoded.
        counts: {attribute of `Counters`: amount to add when the batch is delivered}.
        substituted: File and error of each sample that was substituted.
    """

    number: int
    epoch: int
    columns: dict[str, Array]
    texts: Texts
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


def count_delivered(batch: FinishedBatch, began: float, config: Config, counters: Counters) -> None:
    """Count a batch that is returned to the user, and log its substitutes. It may have been finished long before.

    Args:
        batch: Batch.
        began: Time of `time.perf_counter` at which it was requested.
        config: Configuration of the loader.
        counters: Counters to add to.
    """
    counters.starved(began, batch.ready_at)
    counters.add(**batch.counts)
    for file, error in batch.substituted:
        config.substitutes.add(batch.epoch, file, error)

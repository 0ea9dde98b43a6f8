"""Plan of each batch: which frames it shows and decodes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.frames import FramePlan, FramesInMemory
from dali_stream.schedule.samples import FrameSet, Samples, Window

_AT_ONCE = 8  # batches of the order that each `plan` reads ahead, until the horizon is full


@dataclass(frozen=True)
class Limits:
    """Limits of the look-ahead and of the caches.

    Attributes:
        kept: Maximum number of decoded frames of each camera that are cached for later batches.
        in_progress: Maximum number of batches that are planned and not copied yet.
        horizon: Number of samples that the order is read ahead.
    """

    kept: int
    in_progress: int
    horizon: int


@dataclass(frozen=True)
class BatchPlan:
    """Plan of one batch.

    Attributes:
        samples: Samples of the batch.
        shown_in_episode: {camera: frames that the batch shows, numbered within their episodes, shape (B, T)}.
        is_pad: {camera: whether each step of its window is outside the episode, bool of shape (B, T)}.
        frames: {camera whose frames are cached: plan of its frames}.
        packets: {other camera: packets of the frames that the batch shows, shape (B, T)}. `NONE` if a frame has no packet.
        decoded: {camera: rows of the frames that the batch decodes}.
    """

    samples: Samples
    shown_in_episode: dict[str, Int64] = field(default_factory=dict)
    is_pad: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    frames: dict[str, FramePlan] = field(default_factory=dict)
    packets: dict[str, Int64] = field(default_factory=dict)
    decoded: dict[str, Int64] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = zip(self.samples.episode.tolist(), self.samples.frame.tolist(), strict=True)
        lines = [f"batch {self.samples.number} shows {', '.join(f'episode {e} frame {f}' for e, f in shown)}"]
        lines += [f"  {camera}: {line}" for camera, plan in self.frames.items() for line in str(plan).splitlines()]
        return "\n".join(lines)


class Schedule:
    """Schedule of the batches, planned one after the other. The same arguments and observations always give the same plans.

    `dali_stream.schedule.example` shows the plans of a small dataset.

    Args:
        table: Table of the open episodes, with the cameras of `windows` and `uncached`.
        batches: Iterator over the samples of each batch, beginning with the first batch to plan.
        batch_size: Maximum number of samples of a batch.
        windows: {camera whose frames are cached: its frame offsets}, of shape (T,), or (M, T) for M datasets.
        limits: Limits of the look-ahead and of the caches.
        uncached: {camera whose frames are not cached: its frame offsets}.
        dataset_of: Dataset of each episode, shape (E,). It may be None if all offsets have shape (T,).
        needed: {camera: frames that batches show in any epoch}, see `FramesInMemory`. Cameras whose batches show all frames are
            missing. Default: none.

    Attributes:
        table: See above.
        frames: {camera: cache of its decoded frames}.
        windows: {camera: its window}.
    """

    def __init__(
        self,
        table: EpisodeTable,
        batches: Iterator[Samples],
        batch_size: int,
        windows: Mapping[str, Int64],
        limits: Limits,
        uncached: Mapping[str, Int64] | None = None,
        dataset_of: Int64 | None = None,
        needed: Mapping[str, FrameSet] | None = None,
    ) -> None:
        self.table = table
        self._batches, self._horizon = batches, max(limits.horizon // batch_size, 1)
        self._ahead: deque[Samples] = deque()  # batches that have been read from the order and not planned
        equal: dict[bytes, Window] = {}  # cameras with equal offsets share a window, which saves work and memory
        self.windows = {
            camera: equal.setdefault(values.tobytes(), Window(self.table, values, dataset_of))
            for camera, values in {**windows, **(uncached or {})}.items()
        }
        self.frames = {
            camera: FramesInMemory(
                table,
                camera,
                self.windows[camera],
                limits.kept,
                batch_size * each.shape[-1],
                limits.in_progress,
                (needed or {}).get(camera),
            )
            for camera, each in windows.items()
        }
        # If nothing is ever evicted, next uses need not be recorded.
        self._evicts = bool(table.blocks.cameras) or not all(cache.keeps_all for cache in self.frames.values())

    def ahead(self, count: int) -> list[Samples]:
        """Return the batches that `plan` will plan next. Read them from the order if necessary."""
        while len(self._ahead) < count:
            self._read()
        return self.already_read(count)

    def already_read(self, most: int) -> list[Samples]:
        """Return up to `most` of the batches that `plan` will plan next. Read no further ones from the order."""
        return list(itertools.islice(self._ahead, most))

    def plan(self) -> BatchPlan:
        """Plan the next batch. Its episodes must be open."""
        # Reading the whole horizon at once would delay the first batch, so each call reads a few batches.
        for _ in range(_AT_ONCE):
            if len(self._ahead) <= self._horizon:
                self._read()
        samples = self._ahead.popleft()
        # The look-ahead has computed these frames as well. Keeping them until now would take memory for each batch ahead.
        shown = {window: window.shown(samples) for window in set(self.windows.values())}
        first, ahead = self.table.first_frame[samples.episode][:, None], len(self._ahead)
        plan = BatchPlan(samples)
        for camera, window in self.windows.items():
            frames, plan.is_pad[camera] = shown[window]
            plan.shown_in_episode[camera] = frames - first
            if camera in self.frames:
                own = plan.frames[camera] = self.frames[camera].plan(samples.number, frames, ahead)
                plan.decoded[camera] = self.table.first_row[own.episode] + own.frame
            else:
                rows = self.table.rows(frames)
                plan.packets[camera] = self.table.cameras[camera].packet[rows].astype(np.int64)
                plan.decoded[camera] = np.unique(rows)
        return plan

    def _read(self) -> None:
        """Read one more batch from the order, and register the uses of its frames."""
        samples = next(self._batches)
        self._ahead.append(samples)
        if not self._evicts:
            return
        # The first batch ahead is the next one to plan, so the batch before it was planned last.
        now = self._ahead[0].number - 1
        frames = {window: np.unique(window.shown(samples).frames) for window in set(self.windows.values())}
        for window, each in frames.items():
            window.uses.add(samples.number, each, now)
        for camera, cache in self.frames.items():
            cache.foresee(samples.number, frames[self.windows[camera]])

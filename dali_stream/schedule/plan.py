"""The plan of each batch: what it decodes, shows, keeps, fetches and evicts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dali_stream.schedule.advice import Advice, Advisor
from dali_stream.schedule.episodes import EpisodeTable, OpenEpisode
from dali_stream.schedule.frames import FrameCache, FramePlan
from dali_stream.schedule.look_ahead import Window
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.video import BLOCK, VideoPlan, VideoPlanner

Int64 = npt.NDArray[np.int64]
_AT_ONCE = 8  # batches read of the order for each one planned, until all of the horizon is read


@dataclass(frozen=True)
class Limits:
    """How far the planner looks, and how much it keeps.

    Attributes:
        kept: Number of decoded frames of each camera that may be kept for later batches.
        in_flight: Number of batches that may be planned and not delivered yet.
        horizon: Number of samples that the order is read ahead.
        advise: Number of frames that a larger cache would keep, which is tried on the first camera to see whether it would
            help. 0 for none.
        block: Bytes of a block of encoded video.
        look_ahead: Maximum number of batches whose encoded video is fetched ahead.
    """

    kept: int
    in_flight: int
    horizon: int
    advise: int = 0
    block: int = BLOCK
    look_ahead: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """What to do for a batch.

    Attributes:
        samples: What the batch shows.
        frames: {camera whose frames are cached: what is decoded, and where it goes}.
        packets: {other camera: packets of the frames that it shows, shape (B, T)}. `NONE` where there is none.
        video: What to fetch and evict.
    """

    samples: Samples
    frames: dict[str, FramePlan]
    packets: dict[str, Int64]
    video: VideoPlan = field(default_factory=VideoPlan)

    def __str__(self) -> str:
        shown = zip(self.samples.episode.tolist(), self.samples.frame.tolist(), strict=True)
        lines = [f"batch {self.samples.number} shows {', '.join(f'episode {e} frame {f}' for e, f in shown)}"]
        lines += [f"  {camera}: {line}" for camera, plan in self.frames.items() for line in str(plan).splitlines()]
        return "\n".join(lines)


class BatchPlanner:
    """Plans batch after batch. Pure: the same arguments and the same observations give the same plans.

    Args:
        table: Table of the open episodes, with the cameras of `windows` and `uncached`.
        batches: What the batches show, from where the run begins.
        batch_size: Maximum number of samples of a batch.
        windows: {camera whose frames are cached: its frame offsets}, of shape (T,), or (M, T) for M datasets.
        limits: How far to look, and how much to keep.
        uncached: {camera whose frames are not cached: its frame offsets}.
        dataset_of: Dataset of each episode, shape (E,). None if there is one.

    Attributes:
        table: See above.
        frames: {camera: its decoded frames}.
        video: The encoded video.
        advice: The effect of more memory, once that is known and worth it.
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
    ) -> None:
        self.table = table
        self._batches, self._horizon = batches, max(limits.horizon // batch_size, 1)
        self._ahead: deque[Samples] = deque()  # batches that have been read and not planned
        equal: dict[bytes, Window] = {}  # cameras with equal windows share one, so that uses are searched in few places
        self._windows = {
            camera: equal.setdefault(values.tobytes(), Window(self.table, values, dataset_of))
            for camera, values in {**windows, **(uncached or {})}.items()
        }

        def cache(camera: str, kept: int) -> FrameCache:
            most, in_flight = batch_size * windows[camera].shape[-1], limits.in_flight
            return FrameCache(self.table, camera, self._windows[camera], kept=kept, batch_frames=most, in_flight=in_flight)

        self.frames = {camera: cache(camera, limits.kept) for camera in windows}
        self._advised, self.advice = next(iter(windows), ""), None
        self._advisor = Advisor(cache(self._advised, limits.advise), limits.advise) if self._advised and limits.advise else None
        fetched = {camera: window for camera, window in self._windows.items() if table.cameras[camera].blocks is not None}
        self.video = VideoPlanner(self.table, fetched, self.frames, limits.block, limits.look_ahead)

    advice: Advice | None

    def ahead(self, count: int, most: int | None = None) -> list[Samples]:
        """Return the next batches, beginning with the one that `plan` will plan. Read the order if necessary.

        Args:
            count: Number of batches.
            most: Number of batches to return if as many have been read anyway. Default: `count`.
        """
        while len(self._ahead) < count:
            self._read()
        return list(itertools.islice(self._ahead, most or count))

    def closed(self, samples: Samples) -> list[int]:
        """Return the episodes of a batch that are not open."""
        episodes = np.unique(samples.episode)
        return episodes[~self.table.is_open(episodes)].tolist()

    def observe(self, opened: Iterable[OpenEpisode] = (), closed: Iterable[int] = (), video_room: int | None = None) -> None:
        """Take note of what has happened outside.

        Args:
            opened: Episodes that were opened.
            closed: Episodes that were closed before that.
            video_room: Bytes that encoded video may take from now on. None if that has not changed.
        """
        if video_room is not None:
            self.video.room = video_room
        for episode in closed:
            self.video.close(episode)
            self.table.close(episode)
        for each in opened:
            self.table.open(each)

    def plan(self) -> BatchPlan:
        """Plan the next batch. Its episodes must be open.

        Raises:
            MemoryBudgetError: If memory_budget is too small for what the batch reads.
        """
        for _ in range(_AT_ONCE):
            if len(self._ahead) <= self._horizon:
                self._read()
        samples = self._ahead.popleft()
        shown = {window: window.frames(samples) for window in set(self._windows.values())}
        frames = {camera: cache.plan(samples.number, shown[self._windows[camera]]) for camera, cache in self.frames.items()}
        self._compare(frames, samples.number, shown)
        packets, decoded = {}, {}
        for camera, window in self._windows.items():
            if camera in frames:
                plan = frames[camera]
                decoded[camera] = self.table.first_row[plan.episode] + plan.frame
            else:
                rows = self.table.rows(shown[window])
                packets[camera], decoded[camera] = self.table.cameras[camera].packet[rows].astype(np.int64), np.unique(rows)
        return BatchPlan(samples, frames, packets, self.video.plan(samples, decoded, self._ahead))

    def _read(self) -> None:
        """Read one batch further ahead."""
        samples = next(self._batches)
        now = self._ahead[0].number - 1 if self._ahead else samples.number - 1
        frames = {window: np.unique(window.frames(samples)) for window in set(self._windows.values())}
        for window, each in frames.items():
            window.uses.add(samples.number, each, now)
        caches = [*self.frames.items(), *([(self._advised, self._advisor.larger)] if self._advisor else [])]
        for camera, cache in caches:
            cache.foresee(samples.number, frames[self._windows[camera]])
        self._ahead.append(samples)

    def _compare(self, frames: dict[str, FramePlan], batch: int, shown: Mapping[Window, Int64]) -> None:
        """Plan the batch for a larger cache as well, until it is known whether that would help."""
        if self._advisor:
            larger = self._advisor.larger.plan(batch, shown[self._windows[self._advised]])
            if self._advisor.compare(frames[self._advised], larger):
                self.advice, self._advisor = self._advisor.advice(), None

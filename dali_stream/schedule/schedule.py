"""The schedule: what each batch shows, what is read from storage for it, and which frames are decoded, kept and dropped.

read      the order is read ahead, so that the next use of each frame is known
learn     says where an episode's frames are in its video file, before the first batch that shows it is planned
plan      plans the next batch
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.index import VideoIndex
from dali_stream.order.windows import window
from dali_stream.schedule.advice import Advice, Advisor
from dali_stream.schedule.blocks import cut
from dali_stream.schedule.byte_cache import Drop
from dali_stream.schedule.frame_table import FrameTable
from dali_stream.schedule.frames import NONE, FrameCache, FrameStep
from dali_stream.schedule.reads import Read, ReadSchedule, ReadStep, Storage
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.uses import Uses

Int64 = npt.NDArray[np.int64]
_AT_ONCE = 8  # batches read of the order for each one planned, until all of the horizon is read


@dataclass(frozen=True)
class Limits:
    """How far the schedule looks and how much it keeps.

    Attributes:
        kept: decoded frames of each camera that may be kept for later batches.
        in_flight: batches that may be planned and not delivered yet.
        horizon: samples that the order is read ahead.
        advise: frames that a larger cache would keep, which is tried on the first camera to see whether it would help; or 0.
    """

    kept: int
    in_flight: int
    horizon: int
    advise: int = 0


@dataclass(frozen=True)
class Step:
    """A batch.

    Attributes:
        samples: what it shows.
        frames: per camera whose frames are cached, what is decoded and where it goes.
        packets: per other camera, (B, T) int64, the packets of its frames; `NONE` where there is none.
        reads: what to fetch and evict for it.
    """

    samples: Samples
    frames: dict[str, FrameStep]
    packets: dict[str, Int64]
    reads: ReadStep


class Schedule:
    """Plans batch after batch. Pure: the same arguments and the same `learn` give the same steps.

    Args:
        lengths: (E,) frames of each selected episode.
        batches: what the batches show, from where the run begins.
        batch_size: samples of a batch at most.
        windows: per camera whose frames are cached, its frame offsets: (T,), or (M, T) for M datasets.
        limits: how far to look, how much to keep.
        storage: what there is to read; None: nothing, all of it is in memory.
        uncached: per camera whose frames are not cached, its frame offsets.
        dataset_of: (E,) the number of each episode's dataset; None: there is one.

    Attributes:
        ahead: the batches that have been read and not planned.
        frames: per camera, its cache.
        reads: what is read.
        advice: the effect of more memory, once that is known and worth it.
    """

    def __init__(
        self,
        lengths: Int64,
        batches: Iterator[Samples],
        batch_size: int,
        windows: Mapping[str, Int64],
        limits: Limits,
        storage: Storage | None = None,
        uncached: Mapping[str, Int64] | None = None,
        dataset_of: Int64 | None = None,
    ) -> None:
        self._lengths, self._batches = lengths, batches
        self._dataset_of = dataset_of
        self._read_ahead = max(limits.horizon // batch_size, 1)
        self.ahead: deque[Samples] = deque()
        self._table = FrameTable(lengths)
        self._offsets: dict[str, Int64] = {}
        self._uses: dict[str, Uses] = {}
        self._window: dict[str, str] = {}  # per camera, the name of its window: those that are alike share their uses
        self._uncached = tuple(uncached or ())
        for camera, offsets in {**windows, **(uncached or {})}.items():
            name = self._window[camera] = " ".join(map(str, offsets.tolist()))
            if name not in self._uses:
                self._offsets[name], self._uses[name] = offsets, Uses(self._table, name)

        def cache(name: str, camera: str, kept: int) -> FrameCache:
            uses, frames = self._uses[self._window[camera]], batch_size * windows[camera].shape[-1]
            keep_all = kept >= int(lengths.sum())
            return FrameCache(
                self._table, name, uses, kept=kept, batch_frames=frames, in_flight=limits.in_flight, keep_all=keep_all
            )

        self.frames = {camera: cache(camera, camera, limits.kept) for camera in windows}
        for camera in self._window:
            self._table.add_column(f"known {camera}", np.bool_, 0)
        for camera in self._uncached:
            self._table.add_column(f"packet {camera}", np.int64, NONE)
        self._storage = storage or Storage({}, 0, {}, (), 1 << 62)
        self.reads = ReadSchedule(
            self._storage, self._table, {camera: self._uses[name] for camera, name in self._window.items()},
            {camera: f"slot {camera}" for camera in windows}, keeps_frames=limits.kept >= int(lengths.sum()),
        )  # fmt: skip
        self.advice: Advice | None = None
        self._advised = next(iter(windows), "") if limits.advise else ""
        self._advisor: Advisor | None = None
        if self._advised:
            larger = cache(f"advice on {self._advised}", self._advised, limits.advise)
            self._advisor = Advisor(larger, limits.advise)

    def next(self) -> Samples:
        """The batch that `plan` will plan."""
        if not self.ahead:
            self.read()
        return self.ahead[0]

    def read(self) -> Samples:
        """Reads one batch further ahead."""
        found = next(self._batches)
        if self._uses:
            self._table.open(found.episode)
        for name, uses in self._uses.items():
            uses.add(found.number, np.unique(self._rows(name, found)))
        self.reads.add(found)
        self.ahead.append(found)
        return found

    def request(self) -> tuple[list[Read], Drop]:
        """Rows and indices to begin to read before the next batch is planned, and what to evict for them."""
        while len(self.ahead) <= self.reads.horizon:
            self.read()
        return self.reads.request()

    def unknown(self, camera: str, episodes: Collection[int] | None = None) -> list[int]:
        """Episodes, by default those of the next batch, that `learn` has to be called for."""
        shown = np.unique(self.next().episode) if episodes is None else np.fromiter(episodes, np.int64, len(episodes))
        known = self._table.columns[f"known {camera}"][self._table.first_row[shown]]
        return shown[~known].tolist()

    def learn(
        self,
        camera: str,
        episode: int,
        packet: npt.NDArray[np.integer],
        keyframe: npt.NDArray[np.integer],
        index: VideoIndex | None = None,
    ) -> None:
        """Says where the frames of an episode are, see `FrameCache.learn`. Only for those that `unknown` names.

        `index` is that of its file; only for a camera whose video is fetched, and if the file has one.
        """
        row, columns = int(self._table.first_row[episode]), self._table.columns
        columns[f"known {camera}"][row] = True
        if camera in self._uncached:
            columns[f"packet {camera}"][row : row + len(packet)] = packet
        else:
            self.frames[camera].learn(episode, packet, keyframe)
        if camera in self._storage.fetched and index is not None:
            self.reads.learn(
                camera, episode, cut(index, packet.astype(np.int64), keyframe.astype(np.int64), self._storage.block)
            )
        if self._advisor and camera == self._advised:
            self._advisor.larger.learn(episode, packet, keyframe)

    def step(self) -> dict[str, FrameStep]:
        """Plans the next batch: per camera, what to decode, show and keep."""
        return self.plan().frames

    def plan(self) -> Step:
        """Plans the next batch.

        Raises:
            MemoryBudgetError: memory_budget is too small for what it reads.
        """
        for _ in range(_AT_ONCE):
            if len(self.ahead) <= self._read_ahead:
                self.read()
        samples = self.next()
        rows = {name: self._rows(name, samples) for name in self._uses}
        passed = [uses.advance() for uses in self._uses.values()]
        self.ahead.popleft()
        steps = {camera: cache.step(samples.number, rows[self._window[camera]]) for camera, cache in self.frames.items()}
        self._compare(steps, samples, rows)
        packets = {camera: self._table.columns[f"packet {camera}"][rows[self._window[camera]]] for camera in self._uncached}
        decoded = {
            camera: self._table.first_row[steps[camera].episode] + steps[camera].frame
            if camera in steps
            else np.unique(rows[self._window[camera]])
            for camera in self._storage.fetched
        }
        reads = self.reads.step(decoded, lambda camera, after: self._rows(self._window[camera], self.ahead[after - 1]))
        for shown in passed:
            self._table.release(shown)
        return Step(samples, steps, packets, reads)

    def _compare(self, steps: dict[str, FrameStep], samples: Samples, rows: dict[str, Int64]) -> None:
        """Plans the batch for a larger cache as well, until it is known whether that would help."""
        if self._advisor:
            larger = self._advisor.larger
            if self._advisor.compare(steps[self._advised], larger.step(samples.number, rows[self._window[self._advised]])):
                self.advice, self._advisor = self._advisor.advice(), None
                larger.clear()

    def _rows(self, name: str, samples: Samples) -> Int64:
        """(B, T) rows of the frames that a batch shows through a window."""
        offsets = self._offsets[name]
        if offsets.ndim == 2:
            offsets = offsets[0 if self._dataset_of is None or len(offsets) == 1 else self._dataset_of[samples.episode]]
        frames, _ = window(offsets, samples.frame, self._lengths[samples.episode])
        return self._table.rows(samples.episode, frames)

"""The schedule: what each batch shows, and for each camera which frames are decoded, kept and dropped for it.

read      the order is read ahead, so that the next use of each frame is known
learn     says where an episode's frames are in its video file, before the first batch that shows it is planned
step      plans the next batch
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.schedule.advice import Advice, Advisor
from dali_stream.schedule.frame_table import FrameTable
from dali_stream.schedule.frames import FrameCache, FrameStep
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.uses import Uses
from dali_stream.windows import window

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


class Schedule:
    """Plans batch after batch. Pure: the same arguments and the same `learn` give the same steps.

    Args:
        lengths: (E,) frames of each selected episode.
        batches: what the batches show, from where the run begins.
        batch_size: samples of a batch at most.
        windows: per camera whose frames are cached, its frame offsets (T,).
        limits: how far to look, how much to keep.

    Attributes:
        ahead: the batches that have been read and not planned.
        frames: per camera, its cache.
        advice: what more memory would bring, when that is known and worth it.
    """

    def __init__(
        self, lengths: Int64, batches: Iterator[Samples], batch_size: int, windows: Mapping[str, Int64], limits: Limits
    ) -> None:
        self._lengths, self._batches = lengths, batches
        self._read_ahead = max(limits.horizon // batch_size, 1)
        self.ahead: deque[Samples] = deque()
        self._table = FrameTable(lengths)
        self._offsets: dict[str, Int64] = {}
        self._uses: dict[str, Uses] = {}
        self._window: dict[str, str] = {}  # per camera, the name of its window: those that are alike share their uses
        for camera, offsets in windows.items():
            name = self._window[camera] = " ".join(map(str, offsets.tolist()))
            if name not in self._uses:
                self._offsets[name], self._uses[name] = offsets, Uses(self._table, name)

        def cache(name: str, camera: str, kept: int) -> FrameCache:
            uses, frames = self._uses[self._window[camera]], batch_size * len(windows[camera])
            keep_all = kept >= int(lengths.sum())
            return FrameCache(
                self._table, name, uses, kept=kept, batch_frames=frames, in_flight=limits.in_flight, keep_all=keep_all
            )

        self.frames = {camera: cache(camera, camera, limits.kept) for camera in windows}
        self.advice: Advice | None = None
        self._advised = next(iter(windows), "") if limits.advise else ""
        self._advisor: Advisor | None = None
        if self._advised:
            larger = cache(f"advice on {self._advised}", self._advised, limits.advise)
            self._advisor = Advisor(self.frames[self._advised], larger, limits.advise)

    def next(self) -> Samples:
        """The batch that `step` will plan."""
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
        self.ahead.append(found)
        return found

    def unknown(self, camera: str) -> list[int]:
        """Episodes that `learn` has to be called for before `step`."""
        return self.frames[camera].unknown(np.unique(self.next().episode)).tolist()

    def learn(self, camera: str, episode: int, packet: npt.NDArray[np.integer], keyframe: npt.NDArray[np.integer]) -> None:
        """Says where the frames of an episode are, see `FrameCache.learn`. Only for those that `unknown` names."""
        self.frames[camera].learn(episode, packet, keyframe)
        if self._advisor and camera == self._advised:
            self._advisor.larger.learn(episode, packet, keyframe)

    def step(self) -> dict[str, FrameStep]:
        """Plans the next batch: per camera, what to decode, show and keep."""
        for _ in range(_AT_ONCE):
            if len(self.ahead) <= self._read_ahead:
                self.read()
        samples = self.next()
        rows = {name: self._rows(name, samples) for name in self._uses}
        passed = [uses.advance() for uses in self._uses.values()]
        self.ahead.popleft()
        steps = {camera: cache.step(samples.number, rows[self._window[camera]]) for camera, cache in self.frames.items()}
        if self._advisor:
            larger = self._advisor.larger
            if self._advisor.compare(steps[self._advised], larger.step(samples.number, rows[self._window[self._advised]])):
                self.advice, self._advisor = self._advisor.advice(), None
                larger.clear()
        for shown in passed:
            self._table.release(shown)
        return steps

    def _rows(self, name: str, samples: Samples) -> Int64:
        """(B, T) rows of the frames that a batch shows through a window."""
        frames, _ = window(self._offsets[name], samples.frame, self._lengths[samples.episode])
        return self._table.rows(samples.episode, frames)

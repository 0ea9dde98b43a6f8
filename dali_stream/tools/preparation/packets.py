"""Packets that are copied from MP4 files into a new one, with their new times.

Nothing is re-encoded. Source files are cut at keyframes, so each new file begins with one and has no gaps. A source file with
open GOPs is copied whole, since which packets can be dropped without changing the decoded frames depends on the decoder.
The parts of a new file share timescale, track matrix, display size and codec; their sample descriptions may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.clip import span
from dali_stream.mp4.index import Int64, VideoIndex
from dali_stream.mp4.muxer import Track


@dataclass(frozen=True, eq=False)
class Source:
    """A source file.

    Attributes:
        index: Its index.
        frame: Ticks from one frame to the next.
        spans: Per episode, its packets [start, stop), from one keyframe to another.
    """

    index: VideoIndex
    frame: int
    spans: dict[int, tuple[int, int]]


@dataclass
class Run:
    """Packets [start, stop) of a source file. `shift` is added to their times."""

    source: Source
    start: int
    stop: int
    shift: int = 0


@dataclass
class VideoFile:
    """A new file. `episodes` maps episodes to their run."""

    runs: list[Run] = field(default_factory=list)
    episodes: dict[int, int] = field(default_factory=dict)

    @property
    def configs(self) -> tuple[bytes, ...]:
        return tuple(dict.fromkeys(config for run in self.runs for config in run.source.index.configs))

    def add(self, episode: int, source: Source, start: int, stop: int) -> None:
        """Adds an episode that needs these packets."""
        for number, run in enumerate(self.runs):
            if run.source is source and run.start <= start and stop <= run.stop:
                self.episodes[episode] = number
                return
        if self.runs and self._continues(self.runs[-1], source, start):
            self.runs[-1].stop = stop
        else:
            self.runs.append(Run(source, start, stop))
        self.episodes[episode] = len(self.runs) - 1

    def _continues(self, run: Run, source: Source, start: int) -> bool:
        return run.source is source and run.start <= start <= run.stop

    def place(self) -> None:
        """Places the runs one after the other in time."""
        at = 0
        for run in self.runs:
            pts = run.source.index.pts[run.start : run.stop]
            run.shift = at - int(pts.min())
            at += int(np.ptp(pts)) + run.source.frame


def kind(table: VideoIndex) -> str:
    """Return what must be the same for all sources of a new file."""
    codecs = sorted({config[4:8] for config in table.configs})
    parts: list[Any] = [table.timescale, table.track_header.hex(), codecs]
    if table.open_gops:
        leads = (table.pts[: table.keyframes[1] if len(table.keyframes) > 1 else None] < table.pts[0]).any()
        parts += [table.configs, table.path if leads else ""]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def make_source(table: VideoIndex, fps: float, shown: Mapping[int, Int64]) -> Source:
    """Return a source, of whose episodes `shown` has the packets of the rows."""
    times = np.diff(table.pts[table.display_order])
    frame = int(np.median(times)) if len(times) else max(1, round(table.timescale / fps))
    return Source(table, frame, {episode: span_of(table, samples) for episode, samples in shown.items()})


def _first_needed(table: VideoIndex, shown: Int64) -> int:
    """The packet that decoding of these starts at."""
    earliest = shown[table.gop_start[shown] == table.gop_start[shown].min()]
    return min(span(table, sample)[0] for sample in earliest.tolist())


def span_of(table: VideoIndex, shown: Int64) -> tuple[int, int]:
    if table.open_gops:
        return 0, len(table)
    after = np.searchsorted(table.keyframes, shown.max(), side="right")
    return _first_needed(table, shown), int(table.keyframes[after]) if after < len(table.keyframes) else len(table)


def needed(table: VideoIndex, shown: Int64) -> tuple[int, int]:
    """Return [start, stop) of the packets that decoding these takes."""
    after = np.searchsorted(table.keyframes, shown.max(), side="right")
    stop = int(table.keyframes[after]) if after < len(table.keyframes) else len(table)
    return int(table.decode_starts(shown).min()), stop


def track(file: VideoFile) -> Track:
    """The track of a new file."""
    parts, configs = [(run, run.source.index) for run in file.runs], list(file.configs)
    numbers = [np.array([configs.index(config) for config in table.configs]) for _, table in parts]
    return Track(
        timescale=parts[0][1].timescale,
        header=parts[0][1].track_header,
        configs=tuple(configs),
        size=np.concatenate([table.size[run.start : run.stop] for run, table in parts]),
        pts=np.concatenate([table.pts[run.start : run.stop] + run.shift for run, table in parts]),
        sync=np.concatenate([keyframes(table, run.start, run.stop) for run, table in parts]),
        config=np.concatenate(
            [number[table.config[run.start : run.stop]] for number, (run, table) in zip(numbers, parts, strict=True)]
        ),
        last=file.runs[-1].source.frame,
    )


def keyframes(table: VideoIndex, start: int, stop: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(stop - start, np.bool_)
    first, last = np.searchsorted(table.keyframes, [start, stop])
    found[table.keyframes[first:last] - start] = True
    return found


def mark(sample: memoryview) -> bytes:
    """A digest of an encoded frame."""
    return hashlib.blake2b(sample, digest_size=16).digest()


def digest(table: VideoIndex, shown: Int64, marks: npt.NDArray[np.uint8], start: int = 0) -> str:
    """A digest of everything that determines an episode's frames: packets, times, keyframes, descriptions.

    `shown` are the packets of its rows, and `marks` (n, 16) those of packets from `start` on, see `mark`.
    """
    first, last = _first_needed(table, shown), int(shown.max()) + 1
    configs = [hashlib.blake2b(config, digest_size=16).digest() for config in table.configs]
    found = hashlib.blake2b(table.track_header + table.timescale.to_bytes(4, "big"), digest_size=16)
    for values in (shown - first, table.pts[first:last] - table.pts[shown[0]], table.size[first:last]):
        found.update(values.astype("<i8").tobytes())
    found.update(keyframes(table, first, last).tobytes())
    for config in table.config[first:last].tolist():
        found.update(configs[config])
    found.update(marks[first - start : last - start].tobytes())
    return found.hexdigest()

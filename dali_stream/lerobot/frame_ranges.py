"""Ranges of frames of the episodes: those that are sampled, where not all are."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Frames = Mapping[int, Sequence[Sequence[int]]] | Mapping[str, Sequence[Sequence[int]]]
"""{episode index: [(start, stop), ...]}, ranges of frames within each episode, without `stop`."""


@dataclass(frozen=True)
class FrameRanges:
    """R ranges of frames in E episodes, none empty and no two of them overlapping.

    Attributes:
        episodes: E.
        episode: (R,) that each is of, counted from 0, rising.
        start, stop: (R,) [start, stop) in frames of the episode, rising within it.
    """

    episodes: int
    episode: Int64
    start: Int64
    stop: Int64

    @functools.cached_property
    def counts(self) -> Int64:
        """(E,) frames that the ranges of each episode hold."""
        counts = np.zeros(self.episodes, np.int64)
        np.add.at(counts, self.episode, self.stop - self.start)
        return counts

    def frames(self, episode: Int64, number: Int64) -> Int64:
        """The `number`-th frame, from 0, in the ranges of each `episode`; all three have one shape."""
        place = self._before[episode] + number
        found = np.searchsorted(self._ends, place, side="right")
        return self.stop[found] - (self._ends[found] - place)

    def within(self, start: Int64, stop: Int64) -> FrameRanges:
        """What lies in [start, stop) of its episode; both are (E,)."""
        first, last = np.maximum(self.start, start[self.episode]), np.minimum(self.stop, stop[self.episode])
        some = first < last
        return FrameRanges(self.episodes, self.episode[some], first[some], last[some])

    def dropping(self, lengths: Int64, first: int, last: int) -> FrameRanges:
        """Without the first and the last frames of the episodes, which have (E,) lengths. Short episodes have none left."""
        return self.within(np.full(self.episodes, first), lengths - last)

    def of(self, episodes: Int64) -> FrameRanges:
        """The ranges of some episodes, (E',) rising, which are counted from 0 then."""
        place = np.searchsorted(episodes, self.episode)
        there = (place < len(episodes)) & (episodes[np.minimum(place, len(episodes) - 1)] == self.episode)
        return FrameRanges(len(episodes), place[there], self.start[there], self.stop[there])

    def to_bytes(self) -> bytes:
        """Equal for equal ranges, for a fingerprint."""
        return np.stack([self.episode, self.start, self.stop]).astype("<i8").tobytes()

    @functools.cached_property
    def _ends(self) -> Int64:
        return np.cumsum(self.stop - self.start)

    @functools.cached_property
    def _before(self) -> Int64:
        return np.cumsum(self.counts) - self.counts


def whole(lengths: Int64) -> FrameRanges:
    """All frames of episodes of (E,) lengths."""
    episode = np.flatnonzero(lengths)
    return FrameRanges(len(lengths), episode, np.zeros(len(episode), np.int64), lengths[episode])


def given(frames: Frames | str | os.PathLike[str], index: Int64, length: Int64) -> FrameRanges:
    """Ranges as a user gives them, checked against all episodes of the dataset.

    Args:
        frames: {episode index: [(start, stop), ...]}, whose keys may also be texts, as in JSON; or the path of such a JSON
            file. Episodes that are not in it have no range.
        index, length: (E,) indices and frames of the episodes.

    Raises:
        ValueError: an unknown episode, ranges that overlap or do not rise, or a range that leaves its episode.
    """
    if isinstance(frames, (str, os.PathLike)):
        frames = _read(os.fspath(frames))
    if not isinstance(frames, Mapping):
        raise ValueError(f"frames is {str(frames)[:80]}; it is {{episode index: [(start, stop), ...]}}, or a JSON file of that")
    places = {int(episode): place for place, episode in enumerate(index.tolist())}
    found: list[tuple[int, int, int]] = []
    for key, ranges in frames.items():
        place = places.get(_episode(key))
        if place is None:
            raise ValueError(f"frames has episode {key}; available are {len(index)} episodes, from {index[0]} to {index[-1]}")
        found += [(place, *checked) for checked in _checked(ranges, key, int(length[place]))]
    table = np.array(sorted(found), np.int64).reshape(-1, 3)
    return FrameRanges(len(index), *(table[:, column].copy() for column in range(3)))


def _read(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"frames is {path!r}, which is no readable JSON file: {error}") from error


def _episode(key: Any) -> int:
    try:
        if isinstance(key, (bool, float)):
            raise ValueError
        return int(key)
    except (TypeError, ValueError):
        raise ValueError(f"frames has the key {str(key)[:80]!r}; keys are episode indices") from None


def _checked(ranges: Any, key: Any, length: int) -> list[tuple[int, int]]:
    what = f"frames of episode {key}"
    checked, before = [], 0
    if isinstance(ranges, (str, Mapping)) or not isinstance(ranges, Sequence):
        raise ValueError(f"{what} is {str(ranges)[:80]}; it is a list of (start, stop)")
    for pair in ranges:
        whole_numbers = isinstance(pair, Sequence) and all(isinstance(n, (int, np.integer)) for n in pair)
        if not whole_numbers or len(pair) != 2:
            raise ValueError(f"{what} has the range {str(pair)[:80]}; a range is (start, stop), in frames")
        start, stop = int(pair[0]), int(pair[1])
        if not before <= start < stop <= length:
            raise ValueError(
                f"{what} has the range [{start}, {stop}) after frame {before}; ranges rise, do not overlap, are not empty, and "
                f"the episode has {length} frames"
            )
        checked.append((start, stop))
        before = stop
    return checked

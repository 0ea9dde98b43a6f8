"""Ranges of the frames that an epoch samples, if it does not sample whole episodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.checks.file_content import from_json, read
from dali_stream.system.cached import cached_property

Frames = Mapping[int, Sequence[Sequence[int]]] | Mapping[str, Sequence[Sequence[int]]]
"""Ranges of frames within each episode, {episode index: [(start, stop), ...]}. `stop` is excluded."""


@dataclass(frozen=True)
class FrameRanges:
    """R ranges of frames in E episodes. No range is empty, and no two ranges overlap.

    Attributes:
        episodes: Number of episodes E.
        episode: Number of each range's episode, counted from 0, in increasing order, shape (R,).
        start, stop: First frame of each range within its episode, and the frame after its last, in increasing order within
            an episode, shape (R,).
    """

    episodes: int
    episode: Int64
    start: Int64
    stop: Int64

    @cached_property
    def counts(self) -> Int64:
        """Number of frames in the ranges of each episode, shape (E,)."""
        counts = np.zeros(self.episodes, np.int64)
        np.add.at(counts, self.episode, self.stop - self.start)
        return counts

    def frames(self, episode: Int64, number: Int64) -> Int64:
        """Convert positions within the ranges of an episode to frame indices within the episode.

        Args:
            episode: Number of the episode of each position, any shape.
            number: Position among all frames in the ranges of that episode, counted from 0, the same shape.

        Returns:
            Frame indices within the episodes, the same shape.
        """
        # `place` is the position among the frames of all ranges of all episodes, laid end to end. The range that contains it is
        # the first that ends after it.
        place = self._before[episode] + number
        range_index = np.searchsorted(self._ends, place, side="right")
        return self.stop[range_index] - (self._ends[range_index] - place)

    def within(self, start: Int64, stop: Int64) -> FrameRanges:
        """Return the intersection of the ranges with one range [start, stop) per episode.

        Args:
            start, stop: First frame to keep in each episode, and the frame after the last one to keep, shape (E,).
        """
        first, last = np.maximum(self.start, start[self.episode]), np.minimum(self.stop, stop[self.episode])
        some = first < last
        return FrameRanges(self.episodes, self.episode[some], first[some], last[some])

    def dropping(self, lengths: Int64, first: int, last: int) -> FrameRanges:
        """Return the ranges without the first and the last frames of each episode. A short episode may lose all of its frames.

        Args:
            lengths: Number of frames of each episode, shape (E,).
            first, last: Number of frames to drop at the beginning and at the end of each episode.
        """
        return self.within(np.full(self.episodes, first), lengths - last)

    def of(self, episodes: Int64) -> FrameRanges:
        """Return the ranges of some episodes. The result numbers these episodes from 0.

        Args:
            episodes: Numbers of the episodes, in increasing order, shape (E',).
        """
        place = np.searchsorted(episodes, self.episode)
        # For an episode that is not selected, `place` is the place of the next selected episode, or E' if none follows.
        is_selected = (place < len(episodes)) & (episodes[np.minimum(place, len(episodes) - 1)] == self.episode)
        return FrameRanges(len(episodes), place[is_selected], self.start[is_selected], self.stop[is_selected])

    def to_bytes(self) -> bytes:
        """Return bytes that identify the ranges, for a fingerprint."""
        return np.stack([self.episode, self.start, self.stop]).astype("<i8").tobytes()

    @cached_property
    def _ends(self) -> Int64:
        return np.cumsum(self.stop - self.start)

    @cached_property
    def _before(self) -> Int64:
        return np.cumsum(self.counts) - self.counts


def whole(lengths: Int64) -> FrameRanges:
    """Return one range per episode that contains all of its frames. `lengths` has shape (E,)."""
    episode = np.flatnonzero(lengths)
    return FrameRanges(len(lengths), episode, np.zeros(len(episode), np.int64), lengths[episode])


def parse_ranges(frames: Frames | str | os.PathLike[str], index: Int64, length: Int64) -> FrameRanges:
    """Convert ranges from a user, and check them against all episodes of the dataset.

    Args:
        frames: Ranges {episode index: [(start, stop), ...]}, or the path of a JSON file that contains them. Keys may be
            strings, as in JSON. No frame of an episode without an entry is sampled.
        index: Index of each episode, shape (E,).
        length: Number of frames of each episode, shape (E,).

    Raises:
        ValueError: If the file cannot be read, if an episode is unknown, or if ranges overlap, are empty or not in increasing
            order, or exceed their episode.
    """
    if isinstance(frames, (str, os.PathLike)):
        frames = _read(os.fspath(frames))
    if not isinstance(frames, Mapping):
        raise ValueError(
            f"frames must be {{episode index: [(start, stop), ...]}} or a JSON file of that, got {str(frames)[:80]}"
        )
    places = {int(episode): place for place, episode in enumerate(index.tolist())}
    rows: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    for key, ranges in frames.items():
        place = places.get(_episode(key))
        if place is None:
            raise ValueError(
                f"Unknown episode {key} in frames. Available: {len(index)} episodes, from {index[0]} to {index[-1]}"
            )
        if place in seen:
            raise ValueError(f"Each episode must be in frames once, got {key} twice, as a number and as a string")
        seen.add(place)
        rows += [(place, *checked) for checked in _checked(ranges, key, int(length[place]))]
    table = np.array(sorted(rows), np.int64).reshape(-1, 3)
    return FrameRanges(len(index), *(table[:, column].copy() for column in range(3)))


def _read(path: str) -> Any:
    try:
        return from_json(read(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"frames must be a readable JSON file, got {path!r}: {error}") from error


def _episode(key: Any) -> int:
    try:
        if isinstance(key, (bool, float)):
            raise ValueError
        return int(key)
    except (TypeError, ValueError):
        raise ValueError(f"Keys of frames must be episode indices, got {str(key)[:80]!r}") from None


def _checked(ranges: Any, key: Any, length: int) -> list[tuple[int, int]]:
    name = f"frames[{key}]"
    checked, before = [], 0
    if isinstance(ranges, (str, Mapping)) or not isinstance(ranges, Sequence):
        raise ValueError(f"{name} must be a list of (start, stop), got {str(ranges)[:80]}")
    for pair in ranges:
        whole_numbers = isinstance(pair, Sequence) and all(isinstance(n, (int, np.integer)) for n in pair)
        if not whole_numbers or len(pair) != 2:
            raise ValueError(f"{name} must have ranges (start, stop) in frames, got {str(pair)[:80]}")
        start, stop = int(pair[0]), int(pair[1])
        if not before <= start < stop <= length:
            raise ValueError(
                f"{name} must have nonempty ranges in increasing order, without overlap and within the {length} frames of the "
                f"episode, got [{start}, {stop}) after frame {before}"
            )
        checked.append((start, stop))
        before = stop
    return checked

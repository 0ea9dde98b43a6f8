"""Selection of cameras and episodes by the arguments `cameras`, `episodes` and `episode_filter`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dali_stream.checks.arrays import Int64
from dali_stream.checks.text import listed
from dali_stream.lerobot.info import Info

EpisodeFilter: TypeAlias = Callable[[dict[str, Any]], bool] | pc.Expression
"""Function that returns whether to select an episode, given its columns, or a `pyarrow.compute` expression."""


def cameras(info: Info, keys: Sequence[str] | None) -> tuple[str, ...]:
    """Return the selected cameras, in the dataset's order.

    Args:
        info: Contents of `info.json`.
        keys: Keys of the cameras, or None for all cameras.

    Raises:
        ValueError: If `keys` is a string, or contains an unknown or unreadable camera.
    """
    available = tuple(key for key, feature in info.features.items() if feature.is_camera)
    if keys is None:
        return available
    if isinstance(keys, str):
        raise ValueError(f"cameras must be a list of keys, got the string {keys!r}")
    for camera in keys:
        if camera in info.left_out:
            raise ValueError(f"Camera {camera!r} {info.left_out[camera]}. Available: {listed(available)}")
        if camera not in available:
            raise ValueError(f"Unknown camera {camera!r}. Available: {listed(available)}")
    return tuple(key for key in available if key in keys)


def rows(
    index: Int64, episodes: Sequence[int] | None, episode_filter: EpisodeFilter | None, read: Callable[..., pa.Table]
) -> Int64:
    """Return the rows of the selected episodes in the episode table, in increasing order.

    Args:
        index: Indices of all episodes of the dataset, in increasing order, shape (E,).
        episodes: Indices of the episodes to select, or None for all episodes.
        episode_filter: Filter that is applied to these episodes, or None to select all of them.
        read: Function that reads the episode table for `episode_filter`, with its columns of statistics if `stats=True`.

    Raises:
        ValueError: If `episodes` or `episode_filter` is invalid, if an episode is unknown or duplicated, or if the filter
            accepts no episode.
    """
    selected = np.arange(len(index)) if episodes is None else _named(index, episodes)
    if episode_filter is None:
        return selected
    matching = np.intersect1d(selected, np.searchsorted(index, _matching(episode_filter, read)))
    if not len(matching):
        raise ValueError(f"episode_filter accepts none of {len(selected)} episodes. `dali-stream info URI` describes them")
    return matching


def split_range(span: Any) -> tuple[int, int] | None:
    """Return the range [start, stop) of episode indices of a split, such as "0:40", or None for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", span) if isinstance(span, str) else None
    return None if match is None else (int(match[1]), int(match[2]))


def _named(index: Int64, episodes: Sequence[int]) -> Int64:
    wanted = np.asarray(episodes)
    if wanted.ndim != 1 or not len(wanted) or not np.issubdtype(wanted.dtype, np.integer):
        raise ValueError(f"episodes must be a list of one or more episode indices, got {episodes!r}")
    wanted, count = np.unique(wanted, return_counts=True)
    if (count > 1).any():
        raise ValueError(f"episodes must have each index once, got {wanted[count > 1][0]} more than once")
    rows = np.minimum(np.searchsorted(index, wanted), len(index) - 1)
    unknown = wanted[index[rows] != wanted]
    if len(unknown):
        available = f"{len(index)} episodes, from {index[0]} to {index[-1]}" if len(index) > 1 else f"episode {index[0]}"
        raise ValueError(f"Unknown episode {unknown[0]}. Available: {available}")
    return rows


def _matching(episode_filter: EpisodeFilter, read: Callable[..., pa.Table]) -> Int64:
    """Return the indices of the episodes that a filter accepts."""
    table = read()
    if isinstance(episode_filter, pc.Expression):
        try:
            kept = table.filter(episode_filter)
        except pa.ArrowInvalid:  # the expression may need a column of statistics, which takes longer to read
            table = read(stats=True)
            try:
                kept = table.filter(episode_filter)
            except (pa.ArrowException, TypeError) as error:
                raise ValueError(
                    f"episode_filter must fit the episode table, got {episode_filter}: {error}. Available columns: "
                    f"{listed(name for name in table.column_names if not name.startswith('stats/'))}"
                ) from error
        return kept["episode_index"].to_numpy()
    if not callable(episode_filter):
        raise ValueError(
            f"episode_filter must be a function of an episode's columns or a pyarrow.compute expression, got {episode_filter!r}"
        )
    return np.array([row["episode_index"] for row in table.to_pylist() if episode_filter(row)], np.int64)

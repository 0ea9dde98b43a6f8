"""Reader of the files in `meta/` of LeRobot v2.0 and v2.1. It returns the same classes as `v3` does for v3.0.

Each episode has its own Parquet file, and an MP4 file for each camera, in which it begins at 0 seconds. The format is defined
by `datasets/utils.py` of LeRobot 0.3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.errors import DatasetError
from dali_stream.lerobot.episode_table import Episodes, Files, check_episodes
from dali_stream.lerobot.info import INFO, Info, video_template
from dali_stream.lerobot.json_files import read_lines
from dali_stream.lerobot.stats import STATS, Stats, read_stats, stats_of
from dali_stream.storage import Store
from dali_stream.system.log_records import DATASET_LOG

EPISODES, TASKS, EPISODES_STATS = "meta/episodes.jsonl", "meta/tasks.jsonl", "meta/episodes_stats.jsonl"
_log = logging.getLogger(DATASET_LOG)


def read_episodes(store: Store, info: Info, cameras: Iterable[str]) -> Episodes:
    """Read `meta/episodes.jsonl`. Each episode extends to the end of its MP4 file, so `stop` is infinite.

    Raises:
        DatasetError: If a line is broken, or if the numbers contradict each other or `info.json`.
    """
    if info.episodes == 0 and not store.exists(EPISODES):
        raise DatasetError(f"No episodes in {store.address}: total_episodes is 0 in {INFO}. Record an episode first")
    cameras = list(cameras)
    video_path = video_template(store, info) if cameras else ""
    entries = [
        (_whole(entry, "episode_index", where), _whole(entry, "length", where)) for where, entry in read_lines(store, EPISODES)
    ]
    table = np.array(sorted(entries), np.int64).reshape(-1, 2)
    index, length = table[:, 0].copy(), table[:, 1].copy()
    check_episodes({"episode_index": index, "length": length}, store.where(EPISODES), store, info)
    return Episodes(
        index=index,
        length=length,
        first_row=np.cumsum(length) - length,
        data=_files(info.data_path, index, info.chunk),
        video={camera: _files(video_path, index, info.chunk, camera) for camera in cameras},
        start={camera: np.zeros(len(index)) for camera in cameras},
        stop={camera: np.full(len(index), np.inf) for camera in cameras},
        to_timestamp={camera: np.full(len(index), np.inf) for camera in cameras},
    )


def read_episode_columns(store: Store) -> pa.Table:
    """Read `meta/episodes.jsonl` as a table, in increasing order of the episode index.

    Raises:
        DatasetError: If a line is broken, or if a column has values of several types.
    """
    entries = [entry for _, entry in read_lines(store, EPISODES)]
    names = dict.fromkeys(name for entry in entries for name in entry)
    try:
        return pa.table({name: pa.array([entry.get(name) for entry in entries]) for name in names}).sort_by("episode_index")
    except pa.ArrowException as error:
        raise DatasetError(
            f"Invalid columns in {store.where(EPISODES)}: must have values of one type for episode_filter= ({error})"
        ) from error


def read_tasks(store: Store) -> dict[int, str]:
    """Read `meta/tasks.jsonl`.

    Returns:
        {task_index: task}. Empty if the file does not exist.

    Raises:
        DatasetError: If a line is broken, or if a task index is duplicated.
    """
    tasks: dict[int, str] = {}
    for where, entry in read_lines(store, TASKS) if store.exists(TASKS) else ():
        index, task = _whole(entry, "task_index", where), entry.get("task")
        if not isinstance(task, str) or index in tasks:
            problem = f"task must be text, got {str(task)[:40]}" if index not in tasks else f"task_index {index} is duplicated"
            raise DatasetError(f"Invalid entry in {where}: {problem}")
        tasks[index] = task
    return tasks


def stats_place(store: Store, info: Info) -> str:
    """Return the path to the file of statistics.

    In v2.1, this is the file with the statistics of each episode. In v2.0, or if that file is missing, it is `meta/stats.json`.
    """
    return EPISODES_STATS if info.version != "v2.0" and store.exists(EPISODES_STATS) else STATS


def read_aggregated_stats(store: Store, info: Info) -> Stats:
    """Read the statistics of all episodes from the file `stats_place`.

    Statistics of single episodes are aggregated in the same way as in LeRobot's converter to v3.0.

    Raises:
        DatasetError: If a file is broken, or if the statistics cannot be aggregated.
    """
    if stats_place(store, info) == STATS:
        return read_stats(store)
    episode_stats = read_episode_stats(store)
    if info.episodes is not None and len(episode_stats) != info.episodes:
        _log.warning(
            "%s has statistics of %d episodes, although the dataset has %d. The statistics of these episodes are used",
            store.where(EPISODES_STATS), len(episode_stats), info.episodes,
        )  # fmt: skip
    try:
        return aggregate(list(episode_stats.values()))
    except ValueError as error:
        raise DatasetError(f"Invalid statistics in {store.where(EPISODES_STATS)}: {error}") from error


def read_episode_stats(store: Store) -> dict[int, Stats]:
    """Read `meta/episodes_stats.jsonl`.

    Returns:
        {episode_index: statistics}, in increasing order of the index.

    Raises:
        DatasetError: If a line is broken, or if an episode is duplicated.
    """
    episode_stats: dict[int, Stats] = {}
    for where, entry in read_lines(store, EPISODES_STATS):
        index = _whole(entry, "episode_index", where)
        if index in episode_stats:
            raise DatasetError(f"Invalid entry in {where}: episode_index {index} is duplicated")
        try:
            episode_stats[index] = stats_of(entry.get("stats"))
        except ValueError as error:
            raise DatasetError(f"Invalid statistics of episode {index} in {where}: {error}") from error
    return dict(sorted(episode_stats.items()))


def aggregate(parts: Sequence[Stats]) -> Stats:
    """Aggregate the statistics of several episodes: `min`, `max`, `count`, and `mean` and `std`, weighted by `count`.

    Quantiles are averaged with the same weights, which is only an approximation. The operations are those of LeRobot's
    `aggregate_stats`, so that the results are equal to LeRobot's.

    Raises:
        ValueError: If statistics are missing, have different shapes, or are not numbers.
    """
    keys = dict.fromkeys(key for part in parts for key in part)
    whole: Stats = {}
    for key in keys:
        try:
            whole[key] = _aggregate([part[key] for part in parts if key in part])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"each episode must have numbers min, max, mean, std and count of one shape for {key!r} ({error})"
            ) from error
    return whole


def _whole(entry: dict[str, Any], name: str, where: str) -> int:
    value = entry.get(name)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise DatasetError(f"Invalid {name} in {where}: must be a nonnegative integer, got {str(value)[:40]}")
    return value


def _files(template: str, index: npt.NDArray[np.int64], chunk: int, video_key: str = "") -> Files:
    """Return the file of each episode. LeRobot calls the chunk `episode_chunk`, and some exporters call it `chunk_index`."""
    paths = []
    for episode in index.tolist():
        number = episode // chunk if chunk else 0
        fields = {"episode_chunk": number, "chunk_index": number, "episode_index": episode, "video_key": video_key}
        paths.append(template.format(**fields))
    return Files(paths, np.arange(len(paths)))


def _aggregate(parts: Sequence[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    stacked = {name: np.stack([part[name] for part in parts]) for name in ("min", "max", "mean", "std", "count")}
    if not all(np.issubdtype(values.dtype, np.number) or values.dtype == bool for values in stacked.values()):
        raise ValueError("not all values are numbers")
    counts = stacked["count"]
    total = counts.sum(axis=0)
    if total.shape != (1,) or total[0] <= 0 or stacked["mean"].ndim < 2:
        raise ValueError("count must be a list of one positive number, and the others must be lists")
    weights = counts.reshape(counts.shape + (1,) * (stacked["mean"].ndim - counts.ndim))

    def weighted(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        result: npt.NDArray[Any] = (values * weights).sum(axis=0) / total
        return result

    mean = weighted(stacked["mean"])
    # The variance of all frames is the mean of the episodes' variances, plus the variance of their means.
    variance = weighted(stacked["std"] ** 2 + (stacked["mean"] - mean) ** 2)
    quantiles = [name for name in parts[0] if name[:1] == "q" and name[1:].isdigit() and all(name in part for part in parts)]
    return {
        "min": stacked["min"].min(axis=0),
        "max": stacked["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": total,
        **{name: weighted(np.stack([part[name] for part in parts])) for name in quantiles},
    }

"""Statistics of features as LeRobot defines them, and those of the selected episodes of a dataset.

Of rows they are exact. Of cameras they are those of a sample of frames.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from dali_stream import process
from dali_stream.dataset import Dataset
from dali_stream.errors import DecodeError
from dali_stream.metadata import TABULAR, Stats, stats_of
from dali_stream.rows import Columns, RowReader
from dali_stream.storage import Store
from dali_stream.video import image
from dali_stream.video.format import describe
from dali_stream.video.table import LACKING, SampleTable, read_table
from dali_stream.video.timing import explain, find_samples

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_MAX_PICTURES = 100  # LeRobot samples about this many of an episode
_MAX_FRAMES = 10_000  # of all episodes together
_FRAMES_AT_ONCE = 16  # decoded by one thread
_INDICES = 32  # of video files, kept in memory
_REMOTE_THREADS = 16  # each mostly waits for answers
_T = TypeVar("_T")
Histogram = tuple[np.ndarray, int]  # of some pictures, as `picture_histogram` gives it


def table_stats(values: np.ndarray) -> dict[str, list[Any]]:
    """Statistics over the rows of values (T, ...): min, max, mean, std, count and quantiles, as nested lists.

    Each has the shape of a row, and shape (1,) where a row is a scalar; `count` is [T]. Quantiles are exact, where
    LeRobot estimates them from histograms.
    """
    if values.ndim == 1:
        values = values[:, None]
    extremes = values.astype(np.float64) if values.dtype == bool else values
    numbers = values.astype(np.float64)
    return {
        "min": extremes.min(axis=0).tolist(),
        "max": extremes.max(axis=0).tolist(),
        "mean": numbers.mean(axis=0).tolist(),
        "std": numbers.std(axis=0).tolist(),
        "count": [len(values)],
        **{name: np.quantile(numbers, share, axis=0).tolist() for name, share in QUANTILES.items()},
    }


def picture_histogram(pictures: np.ndarray) -> Histogram:
    """How often each value occurs per channel, int64 (3, 256), in a sample of pictures (N, H, W, 3); and its size.

    At most 100 pictures, evenly spaced. Of sides of 300 pixels and more, LeRobot takes every n-th row and column, so that about
    150 of the longer are left; so does this.
    """
    chosen = np.unique(np.linspace(0, len(pictures) - 1, min(len(pictures), _MAX_PICTURES)).round().astype(int))
    longest = max(pictures.shape[1:3])
    step = 1 if longest < 300 else longest // 150
    sample = pictures[chosen, ::step, ::step]
    return np.stack([np.bincount(sample[..., channel].ravel(), minlength=256) for channel in range(3)]), len(chosen)


def picture_stats(histograms: Sequence[Histogram]) -> dict[str, list[Any]]:
    """Statistics of the pictures behind some histograms: as `table_stats`, shape (3, 1, 1), values in [0, 1]."""
    counts = sum(histogram for histogram, _ in histograms)
    assert isinstance(counts, np.ndarray)
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    cumulative = np.cumsum(weights, axis=1)
    result = {
        "min": values[(counts > 0).argmax(axis=1)],
        "max": values[255 - (counts > 0)[:, ::-1].argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(weights @ values**2 - mean**2, 0)),
        **{name: values[(cumulative >= share).argmax(axis=1)] for name, share in QUANTILES.items()},
    }
    stats: dict[str, list[Any]] = {name: value.reshape(3, 1, 1).tolist() for name, value in result.items()}
    stats["count"] = [sum(size for _, size in histograms)]
    return stats


def compute_stats(dataset: Dataset, keys: Iterable[str] | None = None) -> Stats:
    """What `Dataset.compute_stats` gives."""
    wanted = _keys(dataset, keys)
    tabular = [key for key in wanted if key not in dataset.cameras]
    store = dataset.data_store.session()
    try:
        rows = _rows(dataset, store, tabular)
        found = {key: table_stats(np.concatenate([each[key] for each in rows])) for key in tabular}
        for camera in (key for key in wanted if key in dataset.cameras):
            of_episode = (
                _of_video(dataset, store, camera, rows) if camera in dataset.videos else _of_images(dataset, store, camera)
            )
            jobs = [functools.partial(of_episode, *chosen) for chosen in _sample(dataset).items()]
            found[camera] = picture_stats([part for parts in _each(dataset, jobs) for part in parts])
    finally:
        store.close()
    return stats_of({key: found[key] for key in wanted})


def _keys(dataset: Dataset, keys: Iterable[str] | None) -> list[str]:
    """The keys that have statistics, or those of them that are asked for."""
    there = [key for key, feature in dataset.features.items() if feature["dtype"] in TABULAR or key in dataset.cameras]
    if keys is None:
        return there
    if isinstance(keys, str):
        raise ValueError(f"keys is the string {keys!r}; it is a list of keys")
    asked = list(keys)
    for key in asked:
        if key not in there:
            raise ValueError(f"Unknown key {key!r}, or one without numbers. Available: {', '.join(there)}")
    return [key for key in there if key in asked]


def _sample(dataset: Dataset) -> dict[int, list[int]]:
    """{episode: frames} to look at, evenly spread: about 100 an episode, and at most 10 000 in all."""
    count = min(dataset.num_frames, _MAX_PICTURES * dataset.num_episodes, _MAX_FRAMES)
    places = np.linspace(0, dataset.num_frames - 1, count).round().astype(np.int64)
    stops = np.cumsum(dataset.lengths)
    episodes = np.searchsorted(stops, places, side="right")
    frames = places - (stops - dataset.lengths)[episodes]
    chosen: dict[int, list[int]] = {}
    for episode, frame in zip(episodes.tolist(), frames.tolist(), strict=True):
        chosen.setdefault(episode, []).append(frame)
    return chosen


def _each(dataset: Dataset, jobs: Sequence[Callable[[], _T]]) -> list[_T]:
    """Does all jobs in threads, and returns what they return. The first error ends those that have not begun."""
    threads = max(process.cores(), _REMOTE_THREADS if dataset.data_store.remote else 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="dali_stream stats") as pool:
        try:
            return [future.result() for future in [pool.submit(job) for job in jobs]]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _rows(dataset: Dataset, store: Store, keys: Sequence[str]) -> list[Columns]:
    """Per selected episode, these features of its rows, and their timestamps."""
    reader = RowReader(dataset, store, keys={*keys, "timestamp", "frame_index"})
    found: dict[int, Columns] = {}

    def read(episode: int) -> None:
        if episode not in found:  # else it came along in a row group
            found.update(reader.read(episode))

    _each(dataset, [functools.partial(read, episode) for episode in range(dataset.num_episodes)])
    return [found[episode] for episode in range(dataset.num_episodes)]


def _of_video(
    dataset: Dataset, store: Store, camera: str, rows: Sequence[Columns]
) -> Callable[[int, list[int]], list[Histogram]]:
    """A function that decodes frames of an episode."""
    from dali_stream.video import decode  # rows and images do without torchcodec

    files = dataset.table.video[camera]

    @functools.lru_cache(_INDICES)
    def index(path: str) -> SampleTable:
        return read_table(store, path)

    def of_episode(episode: int, frames: list[int]) -> list[Histogram]:
        try:
            table = index(files.paths[files.index[dataset.rows[episode]]])
            interval, timestamp = dataset.table.interval(camera, dataset.rows[episode]), rows[episode]["timestamp"][frames]
            samples = find_samples(table, interval, timestamp, dataset.fps)
            for lacking in timestamp[samples == LACKING]:
                raise DecodeError(f"{store.where(table.path)}: {explain(table, interval, lacking, dataset.fps)}")
            found = []
            for description, alike in itertools.groupby(samples.tolist(), key=lambda sample: table.config[sample]):
                video, same = describe(table.configs[description]), list(alike)
                for at in range(0, len(same), _FRAMES_AT_ONCE):
                    part = same[at : at + _FRAMES_AT_ONCE]
                    found.append(picture_histogram(decode.decode(store, [table] * len(part), part, video)[0]))
            return found
        except DecodeError as error:
            raise DecodeError(f"{camera}: episode {dataset.episodes[episode]}: {error}") from error

    return of_episode


def _of_images(dataset: Dataset, store: Store, camera: str) -> Callable[[int, list[int]], list[Histogram]]:
    """A function that decodes images of an episode's rows."""
    reader = RowReader(dataset, store, keys={camera})

    def of_episode(episode: int, frames: list[int]) -> list[Histogram]:
        encoded = reader.read(episode)[episode][camera]
        try:
            return [picture_histogram(image.decode(encoded[f], dataset.picture_size(camera))[None]) for f in frames]
        except DecodeError as error:
            raise DecodeError(f"{camera}: episode {dataset.episodes[episode]}: {error}") from error

    return of_episode

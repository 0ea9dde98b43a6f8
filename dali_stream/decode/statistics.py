"""Statistics of the selected episodes of a dataset, computed from all rows and, for cameras, from a sample of the frames."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream import process
from dali_stream.decode import images as image
from dali_stream.errors import DecodeError
from dali_stream.lerobot.dataset import CLOCKS, DatasetFiles
from dali_stream.lerobot.metadata import Stats, stats_of
from dali_stream.lerobot.row_memory import Columns
from dali_stream.lerobot.rows import RowReader
from dali_stream.lerobot.stats import MAX_IMAGES, Histogram, TableStats, add_histograms, image_histogram, image_stats
from dali_stream.mp4.index import LACKING, VideoIndex, read_index
from dali_stream.mp4.timing import explain, find_packets
from dali_stream.storage import Store
from dali_stream.text import listed

_MAX_FRAMES = 10_000  # maximum number of frames of a camera, in all episodes together
_FRAMES_AT_ONCE = 16  # number of frames that a thread decodes at a time
_INDICES = 32  # number of indices of video files that are kept in memory
_T = TypeVar("_T")
# Arguments: numbers of finished steps and of all steps. A step reads an episode's rows, or decodes its frames of one camera.
Progress = Callable[[int, int], None]


def compute_stats(
    dataset: DatasetFiles, keys: Iterable[str] | None = None, progress: Progress = lambda done, total: None
) -> Stats:
    """Return statistics of features. See `Dataset.compute_stats`.

    Args:
        dataset: Selected episodes of a dataset.
        keys: Features with numbers, or None for all of them.
        progress: Function that is called after each step, with the numbers of finished steps and of all steps. Default: none.

    Returns:
        Statistics of each feature, in the order of the features.

    Raises:
        ValueError: If `keys` is a string, or contains a feature that is unknown or has no numbers.
        DecodeError: If a frame is missing or cannot be decoded.
    """
    wanted = _keys(dataset, keys)
    tabular = [key for key in wanted if key not in dataset.cameras]
    cameras = [key for key in wanted if key in dataset.cameras]
    chosen = _sample(dataset)
    from_rows = range(dataset.num_episodes) if tabular else list(chosen) if set(cameras) & set(dataset.videos) else []
    done, total = itertools.count(1), len(from_rows) + len(cameras) * len(chosen)
    store = dataset.data_store.session()
    try:
        sums = {key: TableStats(int(dataset.lengths.sum())) for key in tabular}
        seconds: dict[int, npt.NDArray[np.float64]] = {}
        for episode, rows in _rows(dataset, store, from_rows, tabular):
            for key, each in sums.items():
                each.add(rows[key])
            seconds[episode] = dataset.seconds(episode, rows)[chosen.get(episode, [])]
            progress(next(done), total)
        statistics: dict[str, dict[str, Any]] = {key: each.result() for key, each in sums.items()}
        for camera in cameras:
            of_episode = (
                _of_video(dataset, store, camera, seconds) if camera in dataset.videos else _of_images(dataset, store, camera)
            )
            histograms: list[Histogram] = []
            for parts in _in_order(dataset, (functools.partial(of_episode, *each) for each in chosen.items())):
                histograms.append(add_histograms(parts))
                progress(next(done), total)
            statistics[camera] = image_stats([add_histograms(histograms)])
    finally:
        store.close()
    return stats_of({key: statistics[key] for key in wanted})


def _keys(dataset: DatasetFiles, keys: Iterable[str] | None) -> list[str]:
    """Return the requested keys in the order of the features, or all keys of features with numbers if `keys` is None.

    Raises:
        ValueError: If `keys` is a string, or contains a feature that is unknown or has no numbers.
    """
    numeric = [key for key, feature in dataset.features.items() if not feature.is_text]
    if keys is None:
        return numeric
    if isinstance(keys, str):
        raise ValueError(f"keys must be a list of keys, got the string {keys!r}")
    asked = list(keys)
    for key in asked:
        if key not in numeric:
            raise ValueError(f"Unknown key {key!r}, or one without numbers. Available: {listed(numeric)}")
    return [key for key in numeric if key in asked]


def _sample(dataset: DatasetFiles) -> dict[int, list[int]]:
    """Return the frames of each episode from which cameras' statistics are computed.

    They are evenly spaced: about 100 per episode, and at most 10,000 in total. Episodes without such frames are omitted.
    """
    total = int(dataset.lengths.sum())
    count = min(total, MAX_IMAGES * dataset.num_episodes, _MAX_FRAMES)
    places = np.linspace(0, total - 1, count).round().astype(np.int64)
    stops = np.cumsum(dataset.lengths)
    episodes = np.searchsorted(stops, places, side="right")
    frames = places - (stops - dataset.lengths)[episodes]
    chosen: dict[int, list[int]] = {}
    for episode, frame in zip(episodes.tolist(), frames.tolist(), strict=True):
        chosen.setdefault(episode, []).append(frame)
    return chosen


def _in_order(dataset: DatasetFiles, jobs: Iterable[Callable[[], _T]]) -> Iterator[_T]:
    """Yield the results of jobs in order, while threads run the next ones. After an error, no further jobs are started."""
    threads = process.reading_threads(dataset.data_store.remote)
    with ThreadPoolExecutor(threads, thread_name_prefix="dali_stream stats") as pool:
        ahead: deque[Future[_T]] = deque()
        try:
            for job in jobs:
                ahead.append(pool.submit(job))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _rows(dataset: DatasetFiles, store: Store, episodes: Iterable[int], keys: Sequence[str]) -> Iterator[tuple[int, Columns]]:
    """Yield each episode with its rows, which have the features `keys`, the timestamps and the frame indices."""
    reader = RowReader(dataset, store, keys={*keys, "timestamp", "frame_index"})
    # `RowReader` does not read a row group again while an earlier result refers to it, as the last `episode_rows` does here.
    for episode, episode_rows in _in_order(dataset, (functools.partial(lambda e: (e, reader.read(e)), e) for e in episodes)):
        yield episode, episode_rows[episode]


def _of_video(
    dataset: DatasetFiles, store: Store, camera: str, seconds: Mapping[int, npt.NDArray[np.float64]]
) -> Callable[[int, list[int]], list[Histogram]]:
    """Return a function that decodes frames of an episode from a camera's videos, and returns their histograms.

    Args:
        dataset: Selected episodes of a dataset.
        store: Store of the files.
        camera: Name of the camera.
        seconds: Times of the frames in each episode, in seconds.
    """
    from dali_stream.decode import torchcodec as decode  # imported on use: rows and images do not need it

    files = dataset.table.video[camera]

    @functools.lru_cache(_INDICES)
    def index_of(path: str) -> VideoIndex:
        return read_index(store, path)

    def of_episode(episode: int, frames: list[int]) -> list[Histogram]:
        try:
            index = index_of(files.paths[files.index[dataset.rows[episode]]])
            interval, times = dataset.table.interval(camera, dataset.rows[episode]), seconds[episode]
            packets = find_packets(index, interval, times, dataset.fps, dataset.tolerance_s)
            if (packets == LACKING).any():
                rows = RowReader(dataset, store, keys=CLOCKS).read(episode)[episode]
                every, frame = dataset.seconds(episode, rows), frames[int(np.argmax(packets == LACKING))]
                why = explain(index, interval, every, rows["frame_index"], frame, dataset.fps, dataset.tolerance_s)
                raise DecodeError(f"{store.where(index.path)}: {why}")
            histograms = []
            for description, alike in itertools.groupby(packets.tolist(), key=lambda packet: index.config[packet]):
                video, same = index.format(description), list(alike)
                for at in range(0, len(same), _FRAMES_AT_ONCE):
                    part = same[at : at + _FRAMES_AT_ONCE]
                    histograms.append(image_histogram(decode.decode(store, [index] * len(part), part, video)[0]))
            return histograms
        except DecodeError as error:
            raise DecodeError(f"{camera}: episode {dataset.episodes[episode]}: {error}") from None

    return of_episode


def _of_images(dataset: DatasetFiles, store: Store, camera: str) -> Callable[[int, list[int]], list[Histogram]]:
    """Return a function that decodes images of an episode's rows, and returns their histograms."""
    reader = RowReader(dataset, store, keys={camera})

    def of_episode(episode: int, frames: list[int]) -> list[Histogram]:
        encoded = reader.read(episode)[episode][camera]
        try:
            return [image_histogram(image.decode(encoded[f], dataset.features[camera], any_size=True)[None]) for f in frames]
        except DecodeError as error:
            raise DecodeError(f"{camera}: episode {dataset.episodes[episode]}: {error}") from None

    return of_episode

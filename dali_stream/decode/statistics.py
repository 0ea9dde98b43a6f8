"""Statistics of the selected episodes of a dataset, computed from all rows and, for cameras, from a sample of the frames."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dali_stream.checks.arrays import NONE
from dali_stream.checks.text import listed
from dali_stream.decode import images as image
from dali_stream.errors import DecodeError
from dali_stream.lerobot.dataset_files import DatasetFiles
from dali_stream.lerobot.rows import Columns, RowReader
from dali_stream.lerobot.stats import (
    MAX_IMAGES,
    Histogram,
    Stats,
    TableStats,
    add_histograms,
    image_histogram,
    image_stats,
    stats_of,
)
from dali_stream.mp4.index import read_index
from dali_stream.mp4.timing import explain
from dali_stream.storage import Store
from dali_stream.system import cpu

_MAX_FRAMES = 10_000  # maximum number of frames of a camera, in all episodes together
_FRAMES_AT_ONCE = 16  # number of frames that a thread decodes at a time
_INDICES = 32  # number of indices of video files per camera that are kept in memory
_T = TypeVar("_T")
# Arguments: numbers of finished episodes and of all episodes.
Progress = Callable[[int, int], None]


def compute_stats(
    dataset: DatasetFiles, keys: Iterable[str] | None = None, progress: Progress = lambda done, total: None
) -> Stats:
    """Return statistics of features. See `Dataset.compute_stats`.

    Args:
        dataset: Selected episodes of a dataset.
        keys: Features with numbers, or None for all of them.
        progress: Function that is called after each episode, with the numbers of finished episodes and of all. Default: none.

    Returns:
        Statistics of each feature, in the order of the features.

    Raises:
        ValueError: If `keys` is a string, or contains a feature that is unknown, has no numbers or is a depth camera.
        DecodeError: If a frame is missing or cannot be decoded.
    """
    wanted = _keys(dataset, keys)
    cameras = [key for key in wanted if key in dataset.cameras]
    tabular = {key: TableStats(int(dataset.lengths.sum())) for key in wanted if key not in cameras}
    chosen = _sample(dataset) if cameras else {}
    episodes = range(dataset.num_episodes) if tabular else list(chosen)
    histograms: dict[str, list[Histogram]] = {camera: [] for camera in cameras}
    store = dataset.data_store.session()
    try:
        read = _Episodes(dataset, store, list(tabular), cameras)
        jobs = (functools.partial(read, episode, chosen.get(episode, [])) for episode in episodes)
        for done, part in enumerate(_in_order(store, jobs), 1):
            for key, each in tabular.items():
                each.add(part.rows[key])
            for camera, own in part.histograms.items():
                # The sum so far and the next part, so that memory does not grow with the number of episodes.
                histograms[camera] = [add_histograms([*histograms[camera], own])]
            progress(done, len(episodes))
        statistics: dict[str, dict[str, Any]] = {key: each.result() for key, each in tabular.items()}
        statistics |= {camera: image_stats(each) for camera, each in histograms.items()}
    finally:
        store.close()
    return stats_of({key: statistics[key] for key in wanted})


def _keys(dataset: DatasetFiles, keys: Iterable[str] | None) -> list[str]:
    """Return the requested keys in the order of the features, or all keys of features with numbers if `keys` is None.

    Depth cameras have no statistics, since histograms are those of 8-bit values.

    Raises:
        ValueError: If `keys` is a string, or contains a feature that is unknown, has no numbers or is a depth camera.
    """
    numeric = [key for key, feature in dataset.features.items() if not (feature.is_text or feature.is_depth)]
    if keys is None:
        return numeric
    if isinstance(keys, str):
        raise ValueError(f"keys must be a list of keys, got the string {keys!r}")
    asked = list(keys)
    for key in asked:
        if key not in numeric:
            kind = "Depth camera" if key in dataset.features and dataset.features[key].is_depth else "Unknown key"
            raise ValueError(f"{kind} {key!r}, or one without numbers. Available: {listed(numeric)}")
    return [key for key in numeric if key in asked]


def _sample(dataset: DatasetFiles) -> dict[int, list[int]]:
    """Return the frames of each episode from which cameras' statistics are computed.

    They are evenly spaced among the sampled frames, since other rows may have no frame: about 100 per episode, and at most
    10,000 in total. Episodes without such frames are omitted.
    """
    lengths = dataset.sampled_lengths
    total = int(lengths.sum())
    count = min(total, MAX_IMAGES * dataset.num_episodes, _MAX_FRAMES)
    places = np.linspace(0, total - 1, count).round().astype(np.int64)
    stops = np.cumsum(lengths)
    episodes = np.searchsorted(stops, places, side="right")
    frames = dataset.sampled(episodes, places - (stops - lengths)[episodes])
    chosen: dict[int, list[int]] = {}
    for episode, frame in zip(episodes.tolist(), frames.tolist(), strict=True):
        chosen.setdefault(episode, []).append(frame)
    return chosen


def _in_order(store: Store, jobs: Iterable[Callable[[], _T]]) -> Iterator[_T]:
    """Yield the results of jobs in order, while threads run the next ones.

    After an error or Ctrl-C, no further jobs are started, and the reads of the others are ended.

    Args:
        store: Session of a store, from which the jobs read.
        jobs: Functions to call.
    """
    threads = cpu.reading_threads(store.remote)
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
            store.close()
            raise


class _Part(NamedTuple):
    """Values of one episode.

    Attributes:
        rows: Columns of the rows.
        histograms: {camera: histograms of the sampled frames}.
    """

    rows: Columns
    histograms: dict[str, Histogram]


class _Episodes:
    """Reader of episodes: a call reads the rows of an episode, and decodes sampled frames of all cameras. Thread-safe.

    Args:
        dataset: Selected episodes of a dataset.
        store: Store of the files.
        tabular: Features of the rows.
        cameras: Cameras to decode.
    """

    def __init__(self, dataset: DatasetFiles, store: Store, tabular: Sequence[str], cameras: Sequence[str]) -> None:
        self._dataset, self._store, self._cameras = dataset, store, cameras
        images = [camera for camera in cameras if camera not in dataset.videos]
        self._rows = RowReader(dataset, store, keys={*tabular, *images, "timestamp", "frame_index"})
        self._index = functools.lru_cache(_INDICES * max(len(cameras), 1))(functools.partial(read_index, store))

    def __call__(self, episode: int, frames: list[int]) -> _Part:
        """Return the values of an episode.

        Args:
            episode: Number of the episode among the selected ones.
            frames: Sampled frames of the episode. Cameras without sampled frames have no histogram.

        Raises:
            DatasetError, StorageError: If the rows cannot be read.
            DecodeError: If a frame is missing or cannot be decoded.
        """
        rows = self._rows.read(episode)
        histograms = {}
        for camera in self._cameras if frames else ():
            try:
                is_video = camera in self._dataset.videos
                parts = self._of_video(camera, episode, rows, frames) if is_video else self._of_images(camera, rows, frames)
                histograms[camera] = add_histograms(parts)
            except DecodeError as error:
                raise DecodeError(f"{camera}: episode {self._dataset.episodes[episode]}: {error}") from None
        return _Part({key: rows[key] for key in rows if key not in self._cameras}, histograms)

    def _of_video(self, camera: str, episode: int, rows: Columns, frames: list[int]) -> list[Histogram]:
        """Return the histogram of each frame of a video. Each GOP is decoded once for all of its frames."""
        from dali_stream.decode import torchcodec as decode  # imported on use: rows and images do not need it

        files = self._dataset.table.video[camera]
        index = self._index(files.paths[files.index[self._dataset.rows[episode]]])
        times = self._dataset.episode_times(camera, episode, index, rows)
        packets = times.packets(frames)
        if (packets == NONE).any():
            frame = frames[int(np.argmax(packets == NONE))]
            raise DecodeError(f"{self._store.where(index.path)}: {explain(times, frame)}")
        histograms: list[Histogram] = []
        for description, alike in itertools.groupby(packets.tolist(), key=lambda packet: index.config[packet]):
            same, video = list(alike), index.format(description)
            counted: dict[int, Histogram] = {}  # by request, since a request may be yielded twice
            decode_parts = functools.partial(decode.decode_clip_in_parts, expected=video, part=_FRAMES_AT_ONCE)
            for requests, decoded, *_ in decode.decode_in_parts(self._store, [index] * len(same), same, decode_parts):
                counted |= {each: image_histogram(frame[None]) for each, frame in zip(requests, decoded.numpy(), strict=True)}
            histograms += counted.values()
        return histograms

    def _of_images(self, camera: str, rows: Columns, frames: list[int]) -> list[Histogram]:
        feature = self._dataset.features[camera]
        return [image_histogram(image.decode(rows[camera][frame], feature, any_size=True)[None]) for frame in frames]

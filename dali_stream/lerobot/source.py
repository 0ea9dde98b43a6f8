"""Episodes of one dataset, or of several datasets one after the other, as a loader reads them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import NONE, Int64
from dali_stream.lerobot.common import comparison
from dali_stream.lerobot.dataset_files import DatasetFiles
from dali_stream.lerobot.features import Feature
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.timing import EpisodeTimes
from dali_stream.storage import Store
from dali_stream.storage.numbered import NumberedStores
from dali_stream.system.cached import cached_property


@dataclass(frozen=True)
class Part:
    """One dataset of a `Source`.

    Attributes:
        dataset: Dataset.
        first: Number of its first episode in the source.
        keys: {key in the source: key in the dataset} of its features.
        features: Its features by their keys in the source.
    """

    dataset: DatasetFiles
    first: int
    keys: Mapping[str, str]
    features: Mapping[str, Feature]


@dataclass(frozen=True)
class Videos:
    """MP4 files of a camera.

    Attributes:
        paths: Path of each of F files in its dataset.
        dataset: Number of each file's dataset, shape (F,).
        file: Number of each episode's file, shape (E,). `NONE` for the episodes of a dataset without video of the camera.
    """

    paths: list[str]
    dataset: Int64
    file: Int64


@dataclass(frozen=True)
class Source:
    """E episodes of M datasets, with their features and files. Episodes and datasets are numbered from 0.

    Attributes:
        parts: The datasets.
        dataset_names: Names of the datasets of a mixture. Empty for a single dataset.
        features: Features by key, without cameras that are not selected. See `Common.features` for several datasets.
        lengths: Number of frames of each episode, shape (E,).
        episodes: Index of each episode in its dataset, for messages, shape (E,).
        dataset_of: Number of each episode's dataset, shape (E,).
        videos: MP4 files of each camera whose frames are in MP4 files.
        images: Keys of the cameras whose frames are images in rows. A camera may be in `videos` too, if it is video in some
            datasets and images in others.
        constants: Values that a batch contains for each sample and that depend only on its dataset, {key: array of shape
            (M, ...)}.
    """

    parts: tuple[Part, ...]
    dataset_names: tuple[str, ...]
    features: Mapping[str, Feature]
    lengths: Int64
    episodes: Int64
    dataset_of: Int64
    videos: Mapping[str, Videos]
    images: tuple[str, ...]
    constants: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @cached_property
    def cameras(self) -> tuple[str, ...]:
        """Keys of the selected cameras."""
        return tuple(key for key, feature in self.features.items() if feature.is_camera)

    @cached_property
    def data_store(self) -> Store:
        """Store of the rows and videos. In a mixture, each path begins with the number of its dataset."""
        stores = [part.dataset.data_store for part in self.parts]
        return NumberedStores(stores) if self.dataset_names else stores[0]

    @property
    def cache_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the cache of the first remote dataset. None if a remote dataset has no cache, or if all are local."""
        folders = [part.dataset.cache_dir for part in self.parts if part.dataset.data_store.remote]
        return folders[0] if folders and all(folders) else None

    @cached_property
    def row_bytes_without_objects(self) -> int:
        """Memory of a row in bytes, without images and text."""
        return sum(feature.row_bytes for feature in self.features.values())

    @cached_property
    def row_bytes_of(self) -> Int64:
        """Approximate memory of a row of each dataset in bytes, with its images and text, shape (M,)."""
        objects = [sum(feature.object_bytes for feature in part.features.values()) for part in self.parts]
        return self.row_bytes_without_objects + np.array(objects, np.int64)

    @cached_property
    def row_bytes(self) -> int:
        """Approximate memory of a row in bytes, averaged over all frames."""
        frames = np.array([part.dataset.lengths.sum() for part in self.parts])
        return int(self.row_bytes_of @ frames // frames.sum())

    def part_of(self, episode: int) -> Part:
        """Return the dataset of an episode."""
        return self.parts[self.dataset_of[episode]]

    def episode_times(self, camera: str, episode: int, index: VideoIndex, rows: Mapping[str, npt.NDArray[Any]]) -> EpisodeTimes:
        """See `DatasetFiles.episode_times`."""
        part = self.part_of(episode)
        return part.dataset.episode_times(part.keys[camera], episode - part.first, index, rows)

    def path(self, camera: str, file: int) -> str:
        """Return the path to an MP4 file in `data_store`."""
        videos = self.videos[camera]
        return f"{videos.dataset[file]}/{videos.paths[file]}" if self.dataset_names else videos.paths[file]

    def frame_size(self, camera: str) -> tuple[int, int]:
        """Return the size (height, width) of a camera's frames. Raises ValueError if the datasets have different sizes."""
        have = [part.features for part in self.parts]
        if len({features[camera].frame_size for features in have if camera in features}) > 1:
            raise ValueError(
                f"image_size must be (height, width) because the frames of {camera!r} differ in size, got None:\n"
                f"{comparison([camera], self.dataset_names, have)}"
            )
        return self.features[camera].frame_size

    def names(self) -> dict[str, list[dict[int, str]]]:
        """Return the names of tasks and subtasks, {"task": [{task_index: task} for each dataset], "subtask": [...]}.

        Raises:
            DatasetError: If a file is broken.
            StorageError: If a file cannot be read.
        """
        datasets = [part.dataset for part in self.parts]
        subtasks = [dataset.subtasks if "subtask_index" in dataset.features else {} for dataset in datasets]
        # If only some datasets have subtasks, each sample of the others gets an empty name.
        if any(subtasks):
            subtasks = [names or defaultdict(str) for names in subtasks]
        return {"task": [dataset.tasks for dataset in datasets], "subtask": subtasks}

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties are left out, so that a copy derives `data_store` from the stores of its own datasets.
        return {each.name: getattr(self, each.name) for each in fields(self)}


def concatenate(
    datasets: Sequence[DatasetFiles],
    keys: Sequence[Mapping[str, str]],
    features: Mapping[str, Feature],
    names: Sequence[str] = (),
    constants: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Source:
    """Return the episodes of some datasets, one dataset after the other.

    Args:
        datasets: M datasets.
        keys: {key in the result: key in the dataset} of the features of each dataset.
        features: Features by key in the result.
        names: Names of the datasets of a mixture. Default: none, for a single dataset.
        constants: See `Source`. Default: none.
    """
    counts = np.array([dataset.num_episodes for dataset in datasets])
    parts = tuple(
        Part(dataset, int(first), own, {key: dataset.features[own[key]] for key in own})
        for dataset, first, own in zip(datasets, np.cumsum(counts) - counts, keys, strict=True)
    )
    return Source(
        parts=parts,
        dataset_names=tuple(names),
        features=features,
        lengths=_joined([dataset.lengths for dataset in datasets]),
        episodes=_joined([dataset.episodes for dataset in datasets]),
        dataset_of=np.repeat(np.arange(len(counts)), counts),
        videos={key: _videos(key, parts) for key in features if any(_has_video(part, key) for part in parts)},
        images=tuple(key for key in features if any(key in part.features and part.features[key].is_image for part in parts)),
        constants=constants or {},
    )


def _has_video(part: Part, camera: str) -> bool:
    return camera in part.features and part.features[camera].is_video


def _videos(camera: str, parts: Sequence[Part]) -> Videos:
    """Return the MP4 files of a camera of some datasets, numbered consecutively."""
    paths: list[str] = []
    counts, numbers = [], []
    for part in parts:
        before, rows = len(paths), part.dataset.rows
        if _has_video(part, camera):
            files = part.dataset.table.video[part.keys[camera]]
            paths += files.paths
            file = files.index if len(rows) == len(files.index) else files.index[rows]  # that of a whole dataset is not copied
            numbers.append(file + before if before else file)
        else:
            numbers.append(np.full(len(rows), NONE))
        counts.append(len(paths) - before)
    return Videos(paths, np.repeat(np.arange(len(parts)), counts), _joined(numbers))


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the values of some arrays, one array after the other. A single array is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

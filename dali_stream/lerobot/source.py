"""Interface through which the loader reads one dataset, or several combined datasets."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream.lerobot.features import Feature
from dali_stream.storage import Store

Int64 = npt.NDArray[np.int64]
S = TypeVar("S", bound="Source")
ABSENT = -1  # file number of episodes whose dataset has no video of the camera


class Timing(NamedTuple):
    """Frame rate of an episode, and tolerance for locating the frame of a row by its time.

    Attributes:
        fps: Frames per second.
        tolerance_s: Maximum difference between the time of a frame and the time of its row, in seconds.
    """

    fps: float
    tolerance_s: float


class Source(Protocol):
    """E episodes of M datasets, with their features and files. Episodes and datasets are numbered from 0.

    `DatasetFiles` and `CombinedSource` implement this protocol.

    Attributes:
        features: Features by key, without cameras that are not selected.
        cameras: Keys of the selected cameras.
        videos: Keys of the cameras whose frames are in MP4 files.
        images: Keys of the cameras whose frames are images in rows. A camera may be in `videos` too, if it is video in some
            datasets and images in others.
        lengths: Number of frames of each episode, int64, shape (E,).
        episodes: Index of each episode in its dataset, for messages, int64, shape (E,).
        dataset_of: Number of each episode's dataset, int64, shape (E,).
        dataset_names: Names of the datasets of a mixture. Empty for a single dataset.
        constants: Values that a batch contains for each sample and that depend only on its dataset, {key: array of shape
            (M, ...)}.
        data_store: Store of the rows and videos.
        cache_dir: Folder on the disk in which fetched bytes are cached, or None.
        row_bytes: Approximate memory of a row in bytes, averaged over all frames.
        row_bytes_of: Approximate memory of a row of each dataset in bytes, int64, shape (M,).
        row_bytes_without_objects: Memory of a row in bytes, without images and text.
    """

    @property
    def features(self) -> Mapping[str, Feature]: ...
    @property
    def cameras(self) -> tuple[str, ...]: ...
    @property
    def videos(self) -> tuple[str, ...]: ...
    @property
    def images(self) -> tuple[str, ...]: ...
    @property
    def lengths(self) -> Int64: ...
    @property
    def episodes(self) -> Int64: ...
    @property
    def dataset_of(self) -> Int64: ...
    @property
    def dataset_names(self) -> tuple[str, ...]: ...
    @property
    def constants(self) -> Mapping[str, npt.NDArray[Any]]: ...
    @property
    def data_store(self) -> Store: ...
    @property
    def cache_dir(self) -> str | os.PathLike[str] | None: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def row_bytes_of(self) -> Int64: ...
    @property
    def row_bytes_without_objects(self) -> int: ...

    def files(self, camera: str) -> Int64:
        """Return the number of each episode's MP4 file, shape (E,), or `ABSENT` if its dataset has no video of the camera."""
        ...

    def path(self, camera: str, file: int) -> str:
        """Return the path to an MP4 file in `data_store`."""
        ...

    def interval(self, camera: str, episode: int) -> tuple[float, float]:
        """Return the interval [start, stop) of an episode in its MP4 file, in seconds.

        `stop` is infinite for the last episode of a file.
        """
        ...

    def timing(self, episode: int) -> Timing:
        """Return the frame rate and the tolerance of an episode."""
        ...

    def seconds(self, episode: int, rows: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        """Return the times of some rows of an episode, in seconds from its beginning.

        Args:
            episode: Number of the episode.
            rows: Columns of the rows. Only `timestamp` or `frame_index` is used, shape (L,).

        Returns:
            Times, float64, shape (L,).
        """
        ...

    def feature(self, key: str, episode: int) -> Feature | None:
        """Return the feature that the dataset of an episode has for a key, or None if this dataset lacks it."""
        ...

    def picture_size(self, camera: str) -> tuple[int, int]:
        """Return the size (height, width) of a camera's frames. Raises ValueError if the datasets have different sizes."""
        ...

    def names(self) -> dict[str, list[dict[int, str]]]:
        """Return the names of tasks and subtasks, {"task": [{task_index: task} for each dataset], "subtask": [...]}.

        Raises:
            DatasetError: If a file is broken.
            StorageError: If a file cannot be read.
        """
        ...

    def names_place(self, key: str, dataset: int) -> str:
        """Return the address of the file with the names of "task" or "subtask" of a dataset, for messages."""
        ...

    def without(self: S, keys: Collection[str]) -> S:
        """Return the same episodes without some features and cameras. Raises ValueError if one cannot be left out."""
        ...

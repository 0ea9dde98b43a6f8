"""What is recorded, as the loader sees it: the episodes of one dataset, or those of several as if they were one."""

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
ABSENT = -1  # in place of a file number: the episode's dataset has no video of the camera


class Timing(NamedTuple):
    """Which frame of a video a row of an episode has: that at its time, within a tolerance.

    Attributes:
        fps: frames per second.
        tolerance_s: how far the frame may be from the row's time, in seconds.
    """

    fps: float
    tolerance_s: float


class Source(Protocol):
    """Episodes, numbered from 0, with their features and files. `DatasetFiles` and `CombinedSource` are such.

    Attributes:
        features: by key, without cameras that are not selected.
        cameras: keys of the features that hold frames.
        videos: those of the cameras whose frames are in MP4 files.
        images: those whose frames are images in rows; a camera may have both, in several datasets.
        lengths: (E,) int64, frames of each episode.
        episodes: (E,) int64, their indices in their datasets, for messages.
        dataset_of: (E,) int64, the number of each episode's dataset.
        dataset_names: of the M datasets of a mixture; empty of a single dataset.
        constants: values that a batch has of each sample's dataset: per key, (M, ...), M the number of datasets.
        data_store: where rows and video are.
        cache_dir: where fetched bytes are kept on the disk, or None.
        row_bytes: about how many bytes a row takes in memory, on average.
        row_bytes_of: the same of each dataset, (M,) int64.
        row_bytes_without_objects: the same beside images and text.
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
        """(E,) the number of each episode's MP4 file; `ABSENT` where its dataset has none for the camera."""
        ...

    def path(self, camera: str, file: int) -> str:
        """The path of an MP4 file in `data_store`."""
        ...

    def interval(self, camera: str, episode: int) -> tuple[float, float]:
        """Return where an episode lies in its MP4 file, up to where the next one begins: [start, stop) in seconds."""
        ...

    def timing(self, episode: int) -> Timing:
        """Of an episode's rows and frames."""
        ...

    def seconds(self, episode: int, rows: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        """(L,) seconds since their episode began of some rows, of which `timestamp` and `frame_index` are given."""
        ...

    def feature(self, key: str, episode: int) -> Feature | None:
        """A feature as the dataset of an episode has it, if it has it."""
        ...

    def picture_size(self, camera: str) -> tuple[int, int]:
        """(height, width) of a camera's frames. Raises ValueError where datasets differ in it."""
        ...

    def names(self) -> dict[str, list[dict[int, str]]]:
        """{"task": a table {task_index: task} of each dataset, "subtask": ...}. Raises DatasetError, StorageError."""
        ...

    def names_place(self, key: str, dataset: int) -> str:
        """The file that has one of these tables, for messages."""
        ...

    def without(self: S, keys: Collection[str]) -> S:
        """The same episodes without these features and cameras. Raises ValueError."""
        ...

"""A LeRobot v3.0 dataset as its metadata describes it: what there is, and where. Nothing is decoded here."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream import metadata
from dali_stream.errors import DatasetError
from dali_stream.storage import Store, open_store


class Dataset:
    """A dataset, or a part of it.

    Args:
        uri: a local folder, a `file://` or `memory://` address, or the id of a Hub repository that is in LeRobot's local
            cache (`HF_LEROBOT_HOME`).
        revision: of a Hub repository; a local dataset has none.
        cameras: video and image keys to use; the others are never read. None: all.
        episodes: episode indices to use. None: all.
        data_files_root: where `data/` and `videos/` lie, if not beside `meta/`.
        storage_options: passed to fsspec.
        cache_dir: where fetched bytes are kept; local files are read in place and never copied there.

    Attributes:
        uri: as given.
        num_frames, num_episodes: of the selected part.
        fps: frames per second.
        features: the features of `info.json`, without the cameras that are not selected.
        cameras: the selected camera keys.
        episodes: (E,) int64, the selected episode indices, rising.
        lengths: (E,) int64, their frames.
        fingerprint: a hash of what is read, equal wherever the same dataset lies.

    Raises:
        DatasetError: there is none, it is of another format, or its metadata is broken.
        ValueError: an unknown camera or episode.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cameras: Sequence[str] | None = None,
        episodes: Sequence[int] | None = None,
        data_files_root: str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.uri = os.fspath(uri)
        if revision is not None:
            raise ValueError(f"revision is {revision!r}; {self.uri} is read in place and has no revisions, so leave it out")
        self.store: Store = open_store(_address(self.uri), storage_options)
        self.data_store = self.store if data_files_root is None else open_store(os.fspath(data_files_root), storage_options)
        try:
            self._read(cameras, episodes)
        except BaseException:
            self.close()
            raise

    def _read(self, cameras: Sequence[str] | None, episodes: Sequence[int] | None) -> None:
        """Reads the metadata, all but tasks and statistics."""
        info = metadata.read_info(self.store)
        self.fps = info.fps
        self.cameras = _selected_cameras(info, cameras)
        self.features = {
            key: feature
            for key, feature in info.features.items()
            if feature["dtype"] not in ("video", "image") or key in self.cameras
        }
        for key in self.cameras:
            if len(self.features[key]["shape"]) != 3:
                shape = self.features[key]["shape"]
                raise DatasetError(f"{self.store.where(metadata.INFO)}: camera {key!r} has shape {shape}; it is (H, W, C)")
        for key in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
            if key not in info.features:
                raise DatasetError(f"{self.store.where(metadata.INFO)}: lacks the feature {key!r}, which v3.0 always has")
        self.videos = tuple(key for key in self.cameras if self.features[key]["dtype"] == "video")
        if self.videos and info.video_path is None:
            raise DatasetError(f"{self.store.where(metadata.INFO)}: has video features, and video_path is null")
        self.table = metadata.read_episodes(self.store, info, self.videos)
        self.rows = _selected_rows(self.table.index, episodes)
        self.episodes, self.lengths = self.table.index[self.rows], self.table.length[self.rows]
        self.num_episodes, self.num_frames = len(self.rows), int(self.lengths.sum())
        self._fingerprint_head = json.dumps([info.fps, info.features, info.data_path, info.video_path], sort_keys=True)

    @functools.cached_property
    def tasks(self) -> dict[int, str]:
        """{task_index: task}, out of `meta/tasks.parquet`."""
        return metadata.read_names(self.store, "meta/tasks.parquet", "task_index")

    @functools.cached_property
    def subtasks(self) -> dict[int, str]:
        """{subtask_index: subtask}; empty for datasets without subtasks."""
        return metadata.read_names(self.store, "meta/subtasks.parquet", "subtask_index")

    @functools.cached_property
    def stats(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Statistics per key (`mean`, `std`, `min`, `max`, quantiles), out of `meta/stats.json`."""
        return metadata.read_stats(self.store)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over the metadata and the selected episodes. Cameras and the place do not count."""
        table = self.table
        digest = hashlib.blake2b(self._fingerprint_head.encode(), digest_size=16)
        for values in (table.index, table.length, table.first_row, table.data.index, self.rows):
            digest.update(values.astype("<i8").tobytes())
        digest.update(json.dumps(sorted(self.tasks.items())).encode())
        return digest.hexdigest()

    def picture_size(self, camera: str) -> tuple[int, int]:
        """(height, width) of a camera's pictures. Its shape is (H, W, C); some datasets have (C, H, W)."""
        shape = self.features[camera]["shape"]
        height, width = shape[1:] if shape[0] in (1, 3) and shape[-1] not in (1, 3) else shape[:2]
        return height, width

    def __repr__(self) -> str:
        what = f"{self.num_episodes} episodes, {self.num_frames} frames at {self.fps:g} fps"
        return f"Dataset({self.uri!r}: {what}, cameras: {', '.join(self.cameras) or 'none'})"

    def close(self) -> None:
        """Gives back file handles; reading again opens them anew."""
        self.store.close()
        self.data_store.close()


def _address(uri: str) -> str:
    """The address of a dataset; a repository id is looked up in LeRobot's local cache."""
    if "://" in uri or Path(uri).expanduser().exists():
        return uri
    if uri.count("/") == 1 and not uri.startswith((".", "/", "~")):
        hub = os.environ.get("HF_HOME", "~/.cache/huggingface")
        cached = Path(os.environ.get("HF_LEROBOT_HOME", f"{hub}/lerobot")).expanduser() / uri
        if cached.is_dir():
            return str(cached)
        raise DatasetError(
            f"{uri}: no such folder, and LeRobot's cache has no {cached}. This version does not stream from the Hub yet; "
            f"download it first: hf download --repo-type dataset {uri} --local-dir {cached}"
        )
    return uri


def _selected_cameras(info: metadata.Info, cameras: Sequence[str] | None) -> tuple[str, ...]:
    there = tuple(key for key, feature in info.features.items() if feature["dtype"] in ("video", "image"))
    if cameras is None:
        return there
    if isinstance(cameras, str):
        raise ValueError(f"cameras is the string {cameras!r}; it is a list of keys")
    for camera in cameras:
        if camera not in there:
            raise ValueError(
                f"cameras has {camera!r}, which this dataset has not; its cameras are {', '.join(there) or 'none'}"
            )
    return tuple(key for key in there if key in cameras)


def _selected_rows(index: npt.NDArray[np.int64], episodes: Sequence[int] | None) -> npt.NDArray[np.int64]:
    """Rows of the episode table, by rising episode index."""
    if episodes is None:
        return np.arange(len(index))
    wanted = np.asarray(episodes)
    if wanted.ndim != 1 or not len(wanted) or not np.issubdtype(wanted.dtype, np.integer):
        raise ValueError(f"episodes is {episodes!r}; it is a list of one or more episode indices")
    wanted, count = np.unique(wanted, return_counts=True)
    if (count > 1).any():
        raise ValueError(f"episodes has {wanted[count > 1][0]} more than once")
    rows = np.minimum(np.searchsorted(index, wanted), len(index) - 1)
    unknown = wanted[index[rows] != wanted]
    if len(unknown):
        raise ValueError(
            f"episodes has {unknown[0]}, which this dataset has not; it has {len(index)}, from {index[0]} to {index[-1]}"
        )
    return rows

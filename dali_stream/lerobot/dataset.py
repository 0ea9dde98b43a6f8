"""A LeRobot v3.0 dataset as its metadata describes it: what there is, and where. Nothing is decoded here."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import byte_count, known_arguments
from dali_stream.errors import DatasetError, StorageError, counted
from dali_stream.lerobot import metadata
from dali_stream.lerobot.features import ENCODING
from dali_stream.storage import Store, open_store

Self = TypeVar("Self", bound="DatasetFiles")
_log = logging.getLogger("dali_stream")


class DatasetFiles:
    """What `dali_stream.Dataset` is, without what it decodes: see there for arguments, attributes and errors."""

    @known_arguments
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
        cache_bytes: int | str | None = None,
        give_up_after_s: float | None = None,
        stats: Mapping[str, Mapping[str, npt.ArrayLike]] | None = None,
    ) -> None:
        self.uri, self.cache_dir = os.fspath(uri), cache_dir
        self._own_stats = None if stats is None else _own_stats(stats)
        limits: dict[str, Any] = {
            "cache_dir": cache_dir,
            "cache_bytes": None if cache_bytes is None else byte_count(cache_bytes, "cache_bytes"),
            "give_up_after_s": give_up_after_s,
        }
        address, note = _address(self.uri, revision)
        self.store = _opened(address, note, storage_options, revision=revision, **limits)
        self.data_store = self.store
        self.uri = self.store.address if "://" in self.uri else self.uri
        try:
            if data_files_root is not None:
                self.data_store = open_store(os.fspath(data_files_root), storage_options, **limits)
            self.revision = self.store.revision
            self._read(cameras, episodes)
        except BaseException:
            self.close()
            raise

    def _read(self, cameras: Sequence[str] | None, episodes: Sequence[int] | None) -> None:
        """Reads the metadata, all but tasks and statistics."""
        info = metadata.read_info(self.store)
        self.fps = info.fps
        self.cameras = _selected_cameras(info, cameras)
        self.features = {key: feature for key, feature in info.features.items() if not feature.is_camera or key in self.cameras}
        for key in self.cameras:
            if len(shape := self.features[key]["shape"]) != 3:
                raise DatasetError(f"{self.store.where(metadata.INFO)}: camera {key!r} has shape {shape}; it is (H, W, C)")
        for key in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
            if key not in info.features:
                raise DatasetError(f"{self.store.where(metadata.INFO)}: lacks the feature {key!r}, which v3.0 always has")
        self.skips_images = any(f.is_image and key not in self.features for key, f in info.features.items())
        self.videos = tuple(key for key in self.cameras if self.features[key].is_video)
        self.table = metadata.read_episodes(self.store, info, self.videos)
        self.rows = _selected_rows(self.table.index, episodes)
        self.episodes, self.lengths = self.table.index[self.rows], self.table.length[self.rows]
        self.num_episodes, self.num_frames = len(self.rows), int(self.lengths.sum())
        meant = {key: {k: v for k, v in f.items() if k not in ENCODING} for key, f in info.features.items()}
        self._fingerprint_head = json.dumps([info.fps, meant], sort_keys=True)

    @functools.cached_property
    def tasks(self) -> dict[int, str]:
        """{task_index: task}, out of `meta/tasks.parquet`."""
        return metadata.read_names(self.store, "meta/tasks.parquet", "task_index")

    @functools.cached_property
    def subtasks(self) -> dict[int, str]:
        """{subtask_index: subtask}; empty for datasets without subtasks."""
        return metadata.read_names(self.store, "meta/subtasks.parquet", "subtask_index")

    @functools.cached_property
    def stats(self) -> metadata.Stats:
        """Statistics per key (`mean`, `std`, `min`, `max`, quantiles): those that were given, or else of `meta/stats.json`.

        The latter are of all episodes of the dataset, whichever are selected.
        """
        return metadata.read_stats(self.store) if self._own_stats is None else self._own_stats

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over the metadata and the selected episodes. Cameras, place, files and codecs do not count."""
        table = self.table
        digest = hashlib.blake2b((self._fingerprint_head + (self.revision or "")).encode(), digest_size=16)
        for values in (table.index, table.length, self.rows):
            digest.update(values.astype("<i8").tobytes())
        digest.update(json.dumps(sorted(self.tasks.items())).encode())
        if self.store.exists(metadata.STATS):  # episodes of equal lengths are common, equal statistics are not
            digest.update(self.store.read_all(metadata.STATS))
        return digest.hexdigest()

    @property
    def stats_place(self) -> str:
        """Where `stats` are from, for messages."""
        return metadata.STATS if self._own_stats is None else "stats="

    @property
    def stores(self) -> list[Store]:
        """Where it is read from: one place, or two."""
        return [self.store] if self.data_store is self.store else [self.store, self.data_store]

    @functools.cached_property
    def row_bytes(self) -> int:
        """About how many bytes a row takes in memory. Encoded images are taken for half of their pixels, text for 64."""
        return self.row_bytes_without_objects + sum(feature.object_bytes for feature in self.features.values())

    @functools.cached_property
    def row_bytes_without_objects(self) -> int:
        """How many bytes a row takes in memory, beside images and text."""
        return sum(feature.row_bytes for feature in self.features.values())

    def picture_size(self, camera: str) -> tuple[int, int]:
        """(height, width) of a camera's frames. Its shape is (H, W, C); some datasets have (C, H, W)."""
        return self.features[camera].frame_size

    def without(self: Self, keys: Collection[str]) -> Self:
        """The same dataset over the same open files, without these features and cameras."""
        rest = object.__new__(type(self))
        vars(rest).update({name: value for name, value in vars(self).items() if not name.startswith("row_bytes")})
        rest.features = {key: feature for key, feature in self.features.items() if key not in keys}
        rest.cameras, rest.videos = (tuple(key for key in of if key not in keys) for of in (self.cameras, self.videos))
        rest.skips_images = self.skips_images or any(self.features[key].is_image for key in keys)
        return rest

    def __getstate__(self) -> dict[str, Any]:
        store, data_store = copy.deepcopy((self.store, self.data_store))  # one object, where they are one
        return {**vars(self), "store": store, "data_store": data_store}

    def __len__(self) -> int:
        return self.num_frames

    def __getitem__(self, index: object) -> NoReturn:
        # What a DataLoader asks for.
        raise TypeError(
            "a dali_stream.Dataset has no items: it describes files and decodes nothing. Iterate dali_stream.Loader(dataset, "
            "...) without a DataLoader, since a Loader uses its own threads; or give the DataLoader a LeRobotDataset, "
            "with dali_stream.FrameSampler(dataset) as its sampler"
        )

    def __repr__(self) -> str:
        what = f"{counted(self.num_episodes, 'episode')}, {counted(self.num_frames, 'frame')} at {self.fps:g} fps"
        return f"Dataset({self.uri!r}: {what}, cameras: {', '.join(self.cameras) or 'none'})"

    def close(self) -> None:
        """Closes file handles and connections; reading opens them again."""
        for store in self.stores:
            store.close()


def _own_stats(stats: Mapping[str, Mapping[str, npt.ArrayLike]]) -> metadata.Stats:
    try:
        return metadata.stats_of(stats)
    except ValueError as error:
        raise ValueError(f"stats is {str(stats)[:80]}; {error}") from error


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _address(uri: str, revision: str | None) -> tuple[str, str]:
    """The address of a dataset; and where it could have been meant as another, what it is read as.

    A repository id is read where LeRobot has downloaded it, or else from the Hub.
    """
    if "://" in uri or Path(uri).expanduser().exists() or not _REPOSITORY.fullmatch(uri):
        return uri, ""
    hub = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cached = Path(os.environ.get("HF_LEROBOT_HOME", f"{hub}/lerobot")).expanduser() / uri
    if revision is None and (cached / metadata.INFO).is_file():
        return str(cached), ""
    address = f"hf://datasets/{uri}"
    return address, f"{uri}: there is no such folder in {Path.cwd()}, so it is read as the id of a Hub dataset, {address}"


def _opened(address: str, note: str, storage_options: dict[str, Any] | None, **options: Any) -> Store:
    """The store for an address. `note` is logged first, and precedes the message of an error."""
    if not note:
        return open_store(address, storage_options, **options)
    _log.warning("%s. Write %s to say that it is one", note, address)
    try:
        return open_store(address, storage_options, **options)
    except (DatasetError, StorageError) as error:
        raise type(error)(f"{note}. {error}") from error


def _selected_cameras(info: metadata.Info, cameras: Sequence[str] | None) -> tuple[str, ...]:
    there = tuple(key for key, feature in info.features.items() if feature.is_camera)
    if cameras is None:
        return there
    if isinstance(cameras, str):
        raise ValueError(f"cameras is the string {cameras!r}; it is a list of keys")
    for camera in cameras:
        if camera not in there:
            raise ValueError(f"Unknown camera {camera!r}. Available: {', '.join(there) or 'none'}")
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
        there = f"{len(index)} episodes, from {index[0]} to {index[-1]}" if len(index) > 1 else f"episode {index[0]}"
        raise ValueError(f"Unknown episode {unknown[0]}. Available: {there}")
    return rows

"""Description of a LeRobot dataset, read from its metadata. This module does not decode frames."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.checks.text import listed
from dali_stream.errors import DatasetError, counted
from dali_stream.lerobot import fingerprint, frame_ranges, selection, v2, v3
from dali_stream.lerobot.address import commit_of
from dali_stream.lerobot.episode_table import Episodes
from dali_stream.lerobot.features import CHANNELS, ENCODING, Feature
from dali_stream.lerobot.frame_ranges import FrameRanges, Frames
from dali_stream.lerobot.info import INFO, read_info
from dali_stream.lerobot.selection import EpisodeFilter
from dali_stream.lerobot.stats import STATS, Stats, read_stats
from dali_stream.mp4.timing import TOLERANCE
from dali_stream.storage import Store
from dali_stream.system.log_records import DATASET_LOG
from dali_stream.system.process import trim_memory

NEEDED = ("timestamp", "frame_index", "episode_index", "index", "task_index")  # features that every batch has
CLOCKS = ("timestamp", "frame_index")  # values of the argument `clock`; the first is the default
_MANY = 2000  # for more episodes than this, memory freed by parsing is returned to the operating system
Self = TypeVar("Self", bound="DatasetFiles")
_log = logging.getLogger(DATASET_LOG)


class _Identity(NamedTuple):
    """Parts of a dataset that its fingerprint covers, in the order in which they are hashed."""

    head: bytes
    clock: bytes
    episodes: bytes
    rows: bytes
    tasks: bytes
    ranges: bytes
    stats: bytes


class DatasetFiles:
    """Base class of `dali_stream.Dataset` that reads no frames. See `Dataset` for the attributes. Its constructor sets them."""

    uri: str
    address: str  # address that was opened, with credentials if the user gave any in it
    version: str
    fps: float
    cameras: tuple[str, ...]
    videos: tuple[str, ...]
    features: dict[str, Feature]
    num_frames: int
    num_episodes: int
    episodes: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    skips_images: bool
    revision: str | None
    cache_dir: str | os.PathLike[str] | None
    clock: str
    tolerance_s: float
    store: Store
    data_store: Store
    drops: tuple[int, int] | None  # frames dropped at both ends of each episode, or None if the user passed `frames`
    absent: tuple[str, ...]  # features without a column, which are left out
    opened: dict[int, tuple[Any, bytes, bytes]]  # {number of a data file: its footer, for the first reader of the file}
    own_stats: Stats | None  # statistics that the user passed

    def _read(
        self, cameras: Sequence[str] | None, episodes: Sequence[int] | None, episode_filter: EpisodeFilter | None
    ) -> None:
        """Read the metadata, except tasks and statistics."""
        # pyarrow imports pandas at its first conversion, and ignores all exceptions of this import, among them the
        # KeyboardInterrupt of Ctrl-C. If pandas is imported before, Ctrl-C is not lost.
        with contextlib.suppress(ImportError):
            importlib.import_module("pandas")
        self._info = info = read_info(self.store)
        self.version, self.fps, self.absent, self.opened = info.version, info.fps, (), {}
        self.cameras = selection.cameras(info, cameras)
        self.features = {key: feature for key, feature in info.features.items() if not feature.is_camera or key in self.cameras}
        for key in self.cameras:
            feature = self.features[key]
            if len(feature.shape) != 3 or feature.channels not in CHANNELS:
                raise DatasetError(
                    f"Invalid shape of camera {key!r} in {self.store.where(INFO)}: must be (H, W, C) or (C, H, W) "
                    f"with {' or '.join(map(str, CHANNELS))} channels, got {feature['shape']}"
                )
        for key in NEEDED:
            if key in info.left_out:
                raise DatasetError(f"Feature {key!r} in {self.store.where(INFO)} {info.left_out[key]}")
            if key not in info.features:
                raise DatasetError(f"Missing feature {key!r} in {self.store.where(INFO)}. Every dataset must have it")
        self.skips_images = any(f.is_image and key not in self.features for key, f in info.features.items())
        self.videos = tuple(key for key in self.cameras if self.features[key].is_video)
        self.table = self.read_table(self.videos)
        if len(self.table.index) > _MANY:
            pa.default_memory_pool().release_unused()
            trim_memory()
        self._take(selection.rows(self.table.index, episodes, episode_filter, self.episode_columns), None)

    def _leave_out(self, reasons: Mapping[str, str], cameras: Sequence[str] | None) -> None:
        """Leave out features without a column, with a warning.

        Args:
            reasons: {key: reason}, as in `Info.left_out`.
            cameras: Keys of the selected cameras, or None for all cameras.

        Raises:
            ValueError: If a selected camera cannot be read.
        """
        for key, why in reasons.items():
            _log.warning("%s: feature %.80r %s. Batches will lack it", self.store.where(INFO), key, why)
        stored = {key: feature for key, feature in self.stored_features.items() if key not in reasons}
        self._info = dataclasses.replace(self._info, features=stored, left_out={**self._info.left_out, **reasons})
        self.absent = tuple(reasons)
        self.cameras = selection.cameras(self._info, cameras)
        self.features = {key: feature for key, feature in self.features.items() if key not in reasons}

    def _take(self, rows: npt.NDArray[np.int64], ranges: FrameRanges | None) -> None:
        """Select the episodes in some rows of the table, and the frames in `ranges`, or all frames if `ranges` is None."""
        self.rows, self.frame_ranges = rows, ranges
        self.episodes, self.lengths = self.table.index[rows], self.table.length[rows]
        self.num_episodes = len(rows)
        self.num_frames = int(self.sampled_lengths.sum())

    def _sample(self, frames: Frames | str | os.PathLike[str] | None, first: int, last: int) -> None:
        """Restrict the frames that are sampled.

        Args:
            frames: See `Dataset`.
            first, last: Arguments `drop_n_first_frames` and `drop_n_last_frames` of `Dataset`.
        """
        if frames is None and not first and not last:
            return
        if frames is None:
            ranges = frame_ranges.whole(self.lengths)
        else:
            ranges = frame_ranges.parse_ranges(frames, self.table.index, self.table.length).of(self.rows)
        ranges = ranges.dropping(self.lengths, first, last)
        if not ranges.counts.any():
            raise ValueError(
                f"frames, drop_n_first_frames={first} and drop_n_last_frames={last} must leave at least one of the "
                f"{int(self.lengths.sum())} frames of {self.num_episodes} episodes. Give wider ranges, or drop fewer frames"
            )
        self._take(self.rows, ranges)

    def episode_columns(self, *, stats: bool = False) -> pa.Table:
        """Return the episode table of the whole dataset with all columns of its files.

        Args:
            stats: Whether to include columns of statistics, which only v3.0 has. Default: False.
        """
        if self.is_v2:
            return v2.read_episode_columns(self.store)
        return v3.read_episode_columns(self.store, self.table.tables, stats=stats)

    @property
    def sampled_lengths(self) -> npt.NDArray[np.int64]:
        """Number of frames of each selected episode that an epoch samples, shape (E,)."""
        return self.lengths if self.frame_ranges is None else self.frame_ranges.counts

    @property
    def is_v2(self) -> bool:
        """Whether the version of the dataset is v2.0 or v2.1."""
        return self._info.is_v2

    def read_table(self, cameras: Iterable[str]) -> Episodes:
        """Read the table of all episodes, with the columns of some cameras. Raises DatasetError if the metadata is broken."""
        read = v2.read_episodes if self.is_v2 else v3.read_episodes
        return read(self.store, self._info, cameras)

    @functools.cached_property
    def tasks(self) -> dict[int, str]:
        """Tasks {task_index: task} from `meta/tasks.parquet` or `meta/tasks.jsonl`."""
        return v2.read_tasks(self.store) if self.is_v2 else v3.read_names(self.store, v3.TASKS, "task_index")

    @functools.cached_property
    def subtasks(self) -> dict[int, str]:
        """Subtasks {subtask_index: subtask}. Empty for datasets without subtasks."""
        return v3.read_names(self.store, v3.SUBTASKS, "subtask_index")

    @functools.cached_property
    def stats(self) -> Stats:
        """Statistics per key (`mean`, `std`, `min`, `max`, quantiles).

        These are the statistics that the user passed or, by default, those of `meta/stats.json`, which cover all episodes,
        selected or not. For v2.1, they are aggregated from `meta/episodes_stats.jsonl` in the same way as in LeRobot's
        converter to v3.0.
        """
        return self.stored_stats if self.own_stats is None else self.own_stats

    @functools.cached_property
    def stored_stats(self) -> Stats:
        """Statistics in the files of the dataset, even if the user passed others."""
        return v2.read_aggregated_stats(self.store, self._info) if self.is_v2 else read_stats(self.store)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the metadata and of the selected episodes and frames, 32 hexadecimal digits.

        It does not depend on the selected cameras, the location of the dataset, its commit, its files, their codecs, or the
        version of the format. It includes `clock` and `tolerance_s` unless both have their defaults.
        """
        return hashlib.blake2b(b"".join(self._identity()), digest_size=16).hexdigest()

    @functools.cached_property
    def contents(self) -> dict[str, str]:
        """Hash of each part of the fingerprint, for messages. Parts with their default values are left out."""
        cameras, parts = {key for key, feature in self._info.features.items() if feature.is_camera}, self._identity()
        fps, features = json.loads(parts.head)
        stats = json.loads(parts.stats)
        every = len(self.rows) == len(self.table.index)
        contents = {
            fingerprint.FEATURES: json.dumps([fps, _without(features, *cameras)]).encode(),
            fingerprint.CAMERAS: json.dumps({key: features[key] for key in cameras}, sort_keys=True).encode(),
            fingerprint.CLOCK: parts.clock,
            fingerprint.EPISODES: parts.episodes,
            fingerprint.SELECTION: b"" if every else parts.rows,
            fingerprint.RANGES: parts.ranges,
            fingerprint.TASKS: parts.tasks,
            fingerprint.STATISTICS: json.dumps(_without(stats, *cameras)).encode(),
            fingerprint.CAMERA_STATISTICS: json.dumps({key: own for key, own in stats.items() if key in cameras}).encode(),
        }
        return {part: fingerprint.hashed(data) for part, data in contents.items() if data}

    @functools.cached_property
    def origin(self) -> dict[str, Any]:
        """Origin of the metadata, as information in the state of a run.

        It has the `address`, and the `commit` of a repository of the Hub. Without a commit, it has `versions`, the versions of
        some metadata files by path.
        """
        commit = self.revision or commit_of(self.store)
        if commit:
            return {"address": self.store.address, "commit": commit}
        paths = (INFO, self.tasks_place, self.stored_stats_place)
        versions = {path: version for path in paths if (version := self.store.version(path))}
        return {"address": self.store.address, "versions": versions}

    def _identity(self) -> _Identity:
        """Return what the fingerprint covers."""
        table = self.table
        features = {key: _without(feature, *ENCODING, "fps") for key, feature in self._info.features.items()}
        # Only min, max and count are exact after the statistics of episodes are aggregated, so only they are hashed.
        stats = {
            key: {name: _numbers(statistics[name]) for name in ("min", "max", "count") if name in statistics}
            for key, statistics in self.stored_stats.items()
        }
        default = (self.clock, self.tolerance_s) == (CLOCKS[0], TOLERANCE / self.fps)
        return _Identity(
            head=json.dumps([float(self.fps), features], sort_keys=True).encode(),
            clock=b"" if default else json.dumps([self.clock, self.tolerance_s]).encode(),  # may select different frames
            episodes=b"".join(values.astype("<i8").tobytes() for values in (table.index, table.length)),
            rows=self.rows.astype("<i8").tobytes(),
            tasks=json.dumps(sorted(self.tasks.items())).encode(),
            ranges=b"" if self.frame_ranges is None else b"frames" + self.frame_ranges.to_bytes(),
            stats=json.dumps(stats, sort_keys=True).encode(),  # tells datasets of equal lengths apart, which are common
        )

    @property
    def stored_features(self) -> dict[str, Feature]:
        """All features of `meta/info.json`, including cameras that are not selected."""
        return self._info.features

    @property
    def stored_splits(self) -> dict[str, Any]:
        """Entry `splits` of `meta/info.json`, unmodified. Empty if the file has none."""
        return self._info.splits

    @property
    def tasks_place(self) -> str:
        """Path of the file that contains `tasks`."""
        return v2.TASKS if self.is_v2 else v3.TASKS

    @property
    def stats_place(self) -> str:
        """Origin of `stats`, for messages."""
        return self.stored_stats_place if self.own_stats is None else "stats="

    @functools.cached_property
    def stored_stats_place(self) -> str:
        """Path of the file that contains `stored_stats`."""
        return v2.stats_place(self.store, self._info) if self.is_v2 else STATS

    @property
    def stores(self) -> list[Store]:
        """Stores of metadata and data, which may be the same one."""
        return [self.store] if self.data_store is self.store else [self.store, self.data_store]

    @property
    def row_bytes(self) -> int:
        """Approximate memory of a row in bytes, with half a byte per value of an image, and 64 bytes per string."""
        return sum(feature.row_bytes + feature.object_bytes for feature in self.features.values())

    @property
    def images(self) -> tuple[str, ...]:
        """Keys of the cameras whose frames are images in rows."""
        return tuple(key for key in self.cameras if key not in self.videos)

    def names_place(self, key: str) -> str:
        """Return the address of the file that contains the names of `key`, "task" or "subtask", for messages."""
        return self.store.where(self.tasks_place if key == "task" else v3.SUBTASKS)

    def needed_files(self) -> Iterator[str]:
        """Yield the paths in `data_store` of the rows and videos of the selected episodes and cameras."""
        for files in (self.table.data, *(self.table.video[camera] for camera in self.videos)):
            yield from (files.paths[number] for number in np.unique(files.index[self.rows]).tolist() if number >= 0)

    def seconds(self, rows: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        """Return the times of some rows of an episode, in seconds from its beginning.

        Args:
            rows: Columns of the rows. Only the column `clock` is used, which is `timestamp` or `frame_index`, shape (L,).

        Returns:
            Times, float64, shape (L,).
        """
        if self.clock == "frame_index":
            return rows["frame_index"] / self.fps
        return rows["timestamp"].astype(np.float64)

    def without(self: Self, keys: Collection[str]) -> Self:
        """Return the same dataset without some features and cameras, which are then not read. The datasets share open files.

        Args:
            keys: Keys of the features and cameras to leave out.

        Raises:
            ValueError: If a key is unknown, or if every dataset must have it.
        """
        check_left_out(keys, self.features)
        rest = object.__new__(type(self))
        vars(rest).update(vars(self))
        rest.features = {key: feature for key, feature in self.features.items() if key not in keys}
        rest.cameras, rest.videos = (tuple(key for key in group if key not in keys) for group in (self.cameras, self.videos))
        rest.skips_images = self.skips_images or any(self.features[key].is_image for key in keys)
        return rest

    def part(self: Self, rows: npt.NDArray[np.int64]) -> Self:
        """Return the same dataset with only some of the selected episodes. The datasets share open files.

        Args:
            rows: Rows of these episodes in the table, in increasing order, shape (E',).
        """
        part = object.__new__(type(self))
        vars(part).update({name: value for name, value in vars(self).items() if name not in ("fingerprint", "contents")})
        ranges = self.frame_ranges
        part._take(rows, None if ranges is None else ranges.of(np.searchsorted(self.rows, rows)))
        return part

    def __getstate__(self) -> dict[str, Any]:
        store, data_store = copy.deepcopy((self.store, self.data_store))  # copied together: they may be the same object
        return {**vars(self), "store": store, "data_store": data_store, "opened": {}}

    def __len__(self) -> int:
        return self.num_frames

    def __getitem__(self, index: object) -> NoReturn:
        # A PyTorch DataLoader calls this method.
        raise TypeError(
            "dali_stream.Dataset is not indexable, because it describes files and decodes nothing. Iterate "
            "dali_stream.Loader(dataset, ...) without a DataLoader, or give the DataLoader a LeRobotDataset with "
            "dali_stream.FrameSampler(dataset) as its sampler"
        )

    def __repr__(self) -> str:
        contents = f"{counted(self.num_episodes, 'episode')}, {counted(self.num_frames, 'frame')} at {self.fps:g} fps"
        return f"Dataset({self.uri!r}: {contents}, cameras: {listed(self.cameras)})"

    def close(self) -> None:
        """Close file handles and connections. Reading opens them again."""
        for store in self.stores:
            store.close()


def check_left_out(keys: Collection[str], features: Collection[str]) -> None:
    """Check that features can be left out. Raises ValueError if a key is unknown, or if every dataset must have it."""
    for key in keys:
        if key not in features or key in NEEDED:
            can = listed(other for other in features if other not in NEEDED)
            raise ValueError(f"keys must be features that can be left out, got {key!r}. Available: {can}")


def _without(feature: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in feature.items() if key not in keys}


def _numbers(values: npt.NDArray[Any]) -> list[Any]:
    """Return the values of a statistic as a flat list that does not depend on the dtype and nesting of the file."""
    flat = values.ravel()
    return [str(v) for v in flat] if flat.dtype.kind not in "biuf" else (flat.astype(np.float64) + 0.0).tolist()  # no -0.0

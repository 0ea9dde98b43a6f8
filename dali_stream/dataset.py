"""The public dataset."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import byte_count, from_zero, known_arguments, one_of
from dali_stream.checks.text import html_table, listed
from dali_stream.errors import DatasetError, StorageError, counted
from dali_stream.lerobot import selection
from dali_stream.lerobot.address import commit_of, local_copy, opened, resolved
from dali_stream.lerobot.dataset_files import CLOCKS, NEEDED, DatasetFiles, check_left_out
from dali_stream.lerobot.file_names import guessed_files
from dali_stream.lerobot.fingerprint import Identity, identity
from dali_stream.lerobot.frame_ranges import Frames
from dali_stream.lerobot.info import INFO, warn_of_left_out
from dali_stream.lerobot.parquet import parquet_errors
from dali_stream.lerobot.row_file import read_column_names
from dali_stream.lerobot.selection import EpisodeFilter
from dali_stream.lerobot.source import Source, concatenate
from dali_stream.lerobot.stats import Stats, stats_of
from dali_stream.mp4.counting import TOLERANCE
from dali_stream.order import windows
from dali_stream.order.orders import DatasetOrders
from dali_stream.order.rng import philox
from dali_stream.storage import open_store
from dali_stream.system.cached import cached_property
from dali_stream.system.log_records import DATASET_LOG

_log = logging.getLogger(DATASET_LOG)


class Dataset(DatasetFiles):
    """A LeRobot dataset, or a part of one. `len` returns its number of frames.

    A copy (`copy`, `pickle`) reads the same part of the same revision, with file handles and connections of its own. A pickle
    contains `storage_options` with their credentials.

    Args:
        uri: Local folder, id of a Hub repository ("lerobot/droid_1.0.1"), or address: `hf://datasets/...`,
            `hf://buckets/...`, `s3://`, `gs://`, `az://`, `http(s)://`, `file://`, `memory://` or another that fsspec knows. A
            repository that LeRobot has downloaded (`HF_LEROBOT_HOME`) is read from its folder if `revision` is None and the
            folder has all files of the selected episodes. The log then names the folder and its commit.
        revision: Branch, tag or commit of a Hub repository. It is resolved to a commit once, and that commit is read. Default:
            the main branch.
        cameras: Keys of the videos and images to use. Others are not read. Default: all.
        episodes: Indices of the episodes to use. Default: all.
        data_files_root: Address of the folder that contains `data/` and `videos/`. Default: the folder that contains `meta/`.
        storage_options: Credentials, endpoints and timeouts. See docs/remote.md for the options of each storage.
        cache_dir: Folder for fetched bytes, which the ranks of a machine and later runs share. Local files are never copied to
            it. Default: fetched bytes are kept in memory only.
        cache_bytes: Maximum size of the cache on disk, in bytes or as a text such as "200GiB". Least recently used bytes are
            evicted first. Default: no limit.
        give_up_after_s: Number of seconds after which a failing read is no longer retried. Default: 60, but 5 until the first
            connection succeeds.
        stats: Statistics for `normalize` in the form that `compute_stats` returns. They do not change the fingerprint. Default:
            those of the dataset, which cover all of its episodes.
        episode_filter: Function that gets one episode's columns in `meta/episodes` or `meta/episodes.jsonl` as a dict, and
            returns whether to use the episode (`lambda episode: episode["length"] > 50 and "fold the shirt" in
            episode["tasks"]`), or a `pyarrow.compute` expression (`pc.field("length") > 50`). The filter applies to the
            episodes in `episodes`. Default: all.
        frames: Frames to sample, {episode index: [(start, stop), ...]}, or the path of a JSON file with that content. Ranges
            exclude `stop`. Those of an episode must be in increasing order and must not overlap. Episodes without ranges yield
            no samples. Windows still extend to the ends of the episode. Default: all.
        drop_n_first_frames, drop_n_last_frames: Number of frames at the beginning and the end of each episode that are not
            sampled. Default: 0.
        clock: Time at which the frame of a row is located in a video: "timestamp" for the row's timestamp, as in LeRobot, or
            "frame_index" for frame_index / fps, which also works if the timestamps are those of a wall clock. It must then
            count the rows of each episode from 0. Rows are delivered unchanged. Default: "timestamp".
        tolerance_s: Maximum distance between this time and the frame, in seconds, up to half a frame. LeRobot's default is
            1e-4. Default: a quarter of a frame.
        trust_timestamps: Whether a row gets the frame at its time even if the number of frames in its video file shows that
            frames are missing or times are wrong. The frame may then be that of another row. Default: False, which
            raises an error for such rows.

    Attributes:
        uri: Address as given, without credentials.
        version: Version of the format: "v2.0", "v2.1" or "v3.0".
        num_frames: Number of frames sampled per epoch.
        num_episodes: Number of selected episodes.
        fps: Frames per second.
        features: Features of `meta/info.json`, without the cameras that are not selected and features that cannot be read.
        cameras: Keys of the selected cameras.
        episodes: Indices of the selected episodes in increasing order, int64 of shape (E,).
        lengths: Number of frames of each selected episode, sampled or not, int64 of shape (E,).
        fingerprint: Hash of the metadata and of the selected episodes and frames, 32 hexadecimal digits. It does not depend on
            the selected cameras, or on the location, commit, format version, files and encoding of the dataset. It does depend
            on `clock`, `tolerance_s` and `trust_timestamps` if they are not the defaults.
        skips_images: Whether the rows contain images that are not selected.
        revision: Commit of the Hub repository. None for other datasets.
        cache_dir, clock, trust_timestamps: Values of these arguments.
        tolerance_s: Tolerance in seconds.

    Raises:
        DatasetError: If the dataset does not exist, has an unsupported format, or has broken metadata.
        StorageError: If the dataset cannot be reached.
        ValueError: If an argument is invalid, or the selection is empty.
    """

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
        episode_filter: EpisodeFilter | None = None,
        frames: Frames | str | os.PathLike[str] | None = None,
        drop_n_first_frames: int = 0,
        drop_n_last_frames: int = 0,
        clock: str = "timestamp",
        tolerance_s: float | None = None,
        trust_timestamps: bool = False,
    ) -> None:
        one_of("clock", clock, CLOCKS)
        self.clock, self.trust_timestamps = clock, trust_timestamps
        self.uri, self.cache_dir = os.fspath(uri), cache_dir
        self.own_stats = None if stats is None else _own_stats(stats)
        limits: dict[str, Any] = {
            "cache_dir": cache_dir,
            "cache_bytes": None if cache_bytes is None else byte_count(cache_bytes, "cache_bytes"),
            "give_up_after_s": give_up_after_s,
            "guess": guessed_files,
        }
        drops = from_zero("drop_n_first_frames", drop_n_first_frames), from_zero("drop_n_last_frames", drop_n_last_frames)

        def read_at(address: str, note: str = "", revision: str | None = None) -> None:
            self.store = opened(address, note, storage_options, revision=revision, **limits)
            self.address, self.data_store, self.revision = address, self.store, self.store.revision
            try:
                if data_files_root is not None:
                    self.data_store = open_store(os.fspath(data_files_root), storage_options, **limits)
                self._read(cameras, episodes, episode_filter)
                self._leave_out_absent(cameras)
                self._sample(frames, *drops)
                self.tolerance_s = _tolerance(tolerance_s, self.fps)
            except BaseException:
                self.close()
                raise

        local = local_copy(self.uri, revision)
        lacks = "" if local is None else self._lack_of_copy(local, read_at)
        if local is None or lacks:
            read_at(*resolved(self.uri, lacks), revision)
        self.uri = self.store.address if "://" in self.uri else self.uri

    def _lack_of_copy(self, folder: str, read_at: Callable[[str], None]) -> str:
        """Open LeRobot's local copy. Return the reason why it cannot be used, or "" if it has the selected episodes."""
        try:
            read_at(folder)
        except (DatasetError, StorageError, ValueError) as error:  # ValueError: it may lack an episode or a camera
            return f"LeRobot's local copy in {folder} cannot be used ({error})"
        # Files of `data_files_root` do not belong to the copy.
        files = (self.table.data, *self.table.video.values()) if self.data_store is self.store else ()
        needed = (each.paths[number] for each in files for number in np.unique(each.index[self.rows]).tolist())
        if missing := next((path for path in (self.tasks_place, *needed) if not self.store.exists(path)), None):
            self.close()
            return f"LeRobot's local copy in {folder} is incomplete (it lacks {missing})"
        _log.warning(
            "%s is read from LeRobot's local copy in %s, %s. Write this folder or hf://datasets/%s to choose one of them",
            *(self.uri, folder, f"commit {commit}" if (commit := commit_of(self.store)) else "of unknown revision", self.uri),
        )
        return ""

    def _leave_out_absent(self, cameras: Sequence[str] | None) -> None:
        """Leave out features whose column the first data file lacks, as LeRobot reads them, with a warning.

        Raises ValueError if `cameras`, the argument of the constructor, has one of them.
        """
        number = int(self.table.data.index[self.rows[0]])
        path = self.table.data.paths[number]
        try:
            with parquet_errors(self.data_store, path):
                columns = read_column_names(self, self.data_store, number)
        except DatasetError:  # the file is missing or broken, which reading its rows reports
            return
        known = {*columns, *NEEDED, *(key for key, feature in self.info.features.items() if feature.is_video)}
        absent = {key: f"has no column in {path}" for key in self.info.features if key not in known}
        warn_of_left_out(self.store, absent)
        rest = {key: feature for key, feature in self.info.features.items() if key in known}
        self.info = dataclasses.replace(self.info, features=rest, left_out={**self.info.left_out, **absent})
        self.absent = tuple(absent)
        self.cameras = selection.cameras(self.info, cameras)
        self.features = {key: feature for key, feature in self.features.items() if key in known}

    def split(self, shares: Mapping[str, float] | None = None, *, seed: int = 0) -> dict[str, Dataset]:
        """Divide the selected episodes into parts, for example for training and for validation.

            parts = dataset.split({"train": 0.9, "val": 0.1})

        Args:
            shares: Share of the episodes of each part, with a sum of at most 1. Default: the `splits` of `meta/info.json`, such
                as {"train": "0:40", "test": "40:50"}.
            seed: Seed of the shuffle that assigns episodes to parts. Default: 0.

        Returns:
            {name: dataset}. The parts share open files, and each has its own fingerprint.

        Raises:
            DatasetError: If `splits` is missing from the metadata or does not contain ranges of episodes.
            ValueError: If a share is out of range, or if a part would have no episodes.
        """
        if shares is None:
            chosen = self._stored_splits()
        else:
            chosen = _shared(shares, philox("split", from_zero("seed", seed)).random_raw(self.num_episodes))
        for name, places in chosen.items():
            if not len(places):
                raise ValueError(
                    f"split {name!r} contains none of the {self.num_episodes} selected episodes. Give it a larger share"
                )
        return {name: self.part(self.rows[places]) for name, places in chosen.items()}

    def without(self, keys: Collection[str]) -> Dataset:
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

    def with_stats(self, stats: Mapping[str, Mapping[str, npt.ArrayLike]]) -> Dataset:
        """Return the same dataset with other statistics for `normalize`. The datasets share open files.

            parts = dataset.split({"train": 0.9, "val": 0.1})
            stats = parts["train"].compute_stats(["action", "observation.state"])
            parts = {name: part.with_stats(stats) for name, part in parts.items()}

        Args:
            stats: Statistics in the form that `compute_stats` returns, as arrays or nested lists.

        Raises:
            ValueError: If `stats` has another form.
        """
        changed = object.__new__(type(self))
        vars(changed).update(vars(self))
        changed.own_stats = _own_stats(stats)
        return changed

    def part(self, rows: npt.NDArray[np.int64]) -> Dataset:
        """Return the same dataset with only some of the selected episodes. The datasets share open files.

        Args:
            rows: Rows of these episodes in the table, in increasing order, shape (E',).
        """
        part = object.__new__(type(self))
        vars(part).update({name: value for name, value in vars(self).items() if name != "identity"})
        ranges = self.frame_ranges
        part._take(rows, None if ranges is None else ranges.of(np.searchsorted(self.rows, rows)))
        return part

    @cached_property
    def identity(self) -> Identity:
        """Properties that distinguish the dataset from others, for the state of a run."""
        return identity(self)

    @property
    def fingerprint(self) -> str:
        """Hash of the metadata and of the selected episodes and frames, 32 hexadecimal digits.

        It does not depend on the selected cameras, the location of the dataset, its commit, its files, their codecs, or the
        version of the format. It includes `clock` and `tolerance_s` unless both have their defaults.
        """
        return self.identity.fingerprint

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that annotations call, a copy of `tools` in `meta/info.json`. Empty if it has none.

        For such a dataset, LeRobot returns the schema of its tool `say` instead.
        """
        return copy.deepcopy(self.info.tools)

    @property
    def source(self) -> Source:
        """Selected episodes and features, as a Loader reads them."""
        return concatenate([self], [{key: key for key in self.features}], self.features)

    def orders(self) -> DatasetOrders:
        """Return the orders of the epochs for a Loader."""
        return DatasetOrders(self.lengths, self.frame_ranges)

    def window_offsets(self, deltas: Mapping[str, Sequence[float]], keys: Sequence[str]) -> dict[str, np.ndarray]:
        """Return {key: frame offsets of shape (1, T)} for `delta_timestamps`, whose keys must be among `keys`."""
        return {key: offsets[None] for key, offsets in windows.offsets(deltas, self.fps, keys).items()}

    def _stored_splits(self) -> dict[str, np.ndarray]:
        """Return the positions of the selected episodes in each split of `meta/info.json`."""
        where, splits = self.store.where(INFO), self.info.splits
        if not splits:
            raise DatasetError(f"{where} has no splits. Pass shares, such as dataset.split({{'train': 0.9, 'val': 0.1}})")
        chosen = {}
        for name, span in splits.items():
            limits = selection.split_range(span)
            if limits is None:
                raise DatasetError(f"Invalid split {name!r} in {where}: must be a range such as '0:40', got {str(span)[:40]!r}")
            start, stop = limits
            chosen[name] = np.flatnonzero((self.episodes >= start) & (self.episodes < stop))
        return chosen

    def compute_stats(
        self, keys: Iterable[str] | None = None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Stats:
        """Compute statistics of the selected episodes as LeRobot defines them.

        Pass them to `with_stats` or `Dataset(stats=...)` to exclude validation episodes from normalization. Memory does not
        grow with the dataset, because rows are read one episode at a time.

        Args:
            keys: Features to compute. Default: the selected cameras and all features except text.
            progress: Function that is called with (number of episodes done, number of episodes) in the caller's thread.
                Default: none.

        Returns:
            {key: {"min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99": array, "count": (1,) int}}. Statistics of
            rows are exact and have the shape of a row, (1,) for scalars. Quantiles of more than 4 million numbers are
            computed from evenly spaced rows. Statistics of a camera have shape (3, 1, 1) and values in [0, 1]. They are
            computed from about 100 evenly spaced frames per episode, at most 10 000, reduced in size as in LeRobot. Frames that
            `frames`, `drop_n_first_frames` or `drop_n_last_frames` leave out count only for rows. `count` counts rows or
            frames.

        Raises:
            DatasetError, StorageError, DecodeError: If rows or frames cannot be read.
            ValueError: If a key is unknown.
        """
        from dali_stream.decode.statistics import compute_stats  # imported on use, because it loads torch

        return compute_stats(self, keys, progress)

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

    def _repr_html_(self) -> str:
        """Return a table for a notebook: address, version, sizes and features."""
        seconds = self.num_frames / self.fps
        rows = [
            ("address", self.uri),
            ("version", self.version),
            ("episodes", f"{self.num_episodes:,}"),
            ("frames", f"{self.num_frames:,} at {self.fps:g} fps, {seconds:,.0f} s"),
        ]
        return html_table("Dataset", [*rows, *((key, f"{each.dtype} {each.shape}") for key, each in self.features.items())])


def _shared(shares: Mapping[str, float], key: np.ndarray) -> dict[str, np.ndarray]:
    """Return {name: increasing positions in `key`}. Each name gets its share of the positions, in the order of their keys."""
    if not isinstance(shares, Mapping):
        raise ValueError(f"shares must be a dict such as {{'train': 0.8, 'val': 0.2}}, got {str(shares)[:80]}")
    numbers = [isinstance(share, Real) and not isinstance(share, bool) and 0 < share <= 1 for share in shares.values()]
    if not shares or not all(numbers) or math.fsum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"shares must be positive numbers with a sum of at most 1, got {dict(shares)}")
    order = np.argsort(key, kind="stable")
    ends = np.round(np.cumsum(list(shares.values())) * len(key)).astype(int).tolist()
    return {name: np.sort(order[a:b]) for name, a, b in zip(shares, [0, *ends], ends, strict=False)}


def _own_stats(stats: Mapping[str, Mapping[str, npt.ArrayLike]]) -> Stats:
    try:
        return stats_of(stats)
    except ValueError as error:
        raise ValueError(f"stats {error}, got {str(stats)[:80]}") from error


def _tolerance(tolerance_s: float | None, fps: float) -> float:
    """Return the maximum distance of a frame from its row's time, in seconds."""
    if tolerance_s is None:
        return TOLERANCE / fps
    number = isinstance(tolerance_s, (int, float)) and not isinstance(tolerance_s, bool)
    if not number or not 0 < tolerance_s <= 0.5 / fps:
        raise ValueError(
            f"tolerance_s must be positive and at most half a frame, {0.5 / fps:.6g} s at {fps:g} fps, got {tolerance_s!r}"
        )
    return float(tolerance_s)

"""The public dataset."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import byte_count, from_zero, known_arguments, one_of
from dali_stream.errors import DatasetError
from dali_stream.lerobot import metadata
from dali_stream.lerobot.address import opened, resolved
from dali_stream.lerobot.dataset import CLOCKS, DatasetFiles
from dali_stream.lerobot.file_names import guessed_files
from dali_stream.lerobot.frame_ranges import Frames
from dali_stream.lerobot.metadata import INFO, Stats
from dali_stream.lerobot.selection import EpisodeFilter
from dali_stream.mp4.timing import TOLERANCE
from dali_stream.order import windows
from dali_stream.order.orders import DatasetOrders
from dali_stream.order.rng import philox
from dali_stream.storage import open_store


class Dataset(DatasetFiles):
    """A dataset, or a part of it. `len` is its number of frames.

    A copy (`copy`, `pickle`) is the same part of the same revision, with its own file handles and connections. A pickle
    holds `storage_options`, credentials included.

    Args:
        uri: a local folder, the id of a Hub repository ("lerobot/droid_1.0.1"), or an address: `hf://datasets/...`,
            `hf://buckets/...`, `s3://`, `gs://`, `az://`, `http(s)://`, `file://`, `memory://` or another that fsspec
            knows. A repository that LeRobot has downloaded (`HF_LEROBOT_HOME`) is read from there, unless a revision is given.
        revision: branch, tag or commit of a Hub repository. It is resolved to a commit once, which is then read to the end.
        cameras: video and image keys to use; the others are never read. None: all.
        episodes: episode indices to use. None: all.
        data_files_root: where `data/` and `videos/` lie, if not beside `meta/`.
        storage_options: credentials, endpoints, a timeout; the documentation's page on remote data lists them.
        cache_dir: a folder for fetched bytes, shared by the ranks of a host and by later runs; None: memory only. Local
            files are read in place and never copied there.
        cache_bytes: that the cache may take on disk, as an int or such as "200GiB"; what was used longest ago goes first.
            None: no bound.
        give_up_after_s: seconds for which a read that fails is tried again, all attempts together. None: 60, and 5 as long as
            no connection has been made at all (refused, or no DNS).
        stats: statistics for `normalize`, as `compute_stats` gives them, instead of the dataset's own, which are of all
            episodes. They are no part of the fingerprint, since no order depends on them.
        filter: takes episodes by the columns of the episode table, `meta/episodes` or `meta/episodes.jsonl`: a function of one
            episode's columns (`lambda episode: episode["length"] > 50 and "fold the shirt" in episode["tasks"]`), or a
            `pyarrow.compute` expression (`pc.field("length") > 50`). With `episodes`, both have to hold. None: all.
        frames: the frames that are sampled: {episode index: [(start, stop), ...]}, or a JSON file of that. Ranges are in
            frames of the episode, without `stop`; an episode that is not in it gives no sample. Windows still show the frames
            around them, up to the ends of the episode. None: all.
        drop_first, drop_last: frames at the beginning and the end of each episode that are not sampled.
        clock: which frame of a video a row has: "timestamp", the nearest to the row's `timestamp`, as LeRobot does; or
            "frame_index", the nearest to `frame_index` / fps, for datasets whose timestamps are those of a wall clock. Rows are
            delivered as they are.
        tolerance_s: how far that frame may be from that time, in seconds: up to half a frame. None: a quarter of a frame.
            LeRobot's default is 1e-4.

    Attributes:
        uri: as given, but for credentials in it.
        version: of the format: "v2.0", "v2.1" or "v3.0".
        num_frames: that an epoch shows: of the selected episodes, or those of `frames`, `drop_first` and `drop_last`.
        num_episodes: selected.
        fps: frames per second.
        features: the features of `info.json`, without the cameras that are not selected.
        cameras: the selected camera keys.
        episodes: (E,) int64, the selected episode indices, rising.
        lengths: (E,) int64, their frames, sampled or not.
        fingerprint: a hash of what is read, equal wherever, in whatever version and files and however encoded the same
            dataset lies; of a Hub repository also of its commit. Another `clock` or `tolerance_s` has another one.
        skips_images: whether the rows have images that are not selected.
        revision: the commit that is read, of a Hub repository; else None.
        cache_dir: as given.
        clock: as given.
        tolerance_s: in seconds.

    Raises:
        DatasetError: it does not exist, has another format, or its metadata is broken.
        StorageError: it cannot be reached.
        ValueError: an unknown camera or episode, a depth camera, a filter or frames that leave nothing, a revision of what has
            none, or another bad argument.
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
        filter: EpisodeFilter | None = None,
        frames: Frames | str | os.PathLike[str] | None = None,
        drop_first: int = 0,
        drop_last: int = 0,
        clock: str = "timestamp",
        tolerance_s: float | None = None,
    ) -> None:
        one_of("clock", clock, CLOCKS)
        self.clock = clock
        self.uri, self.cache_dir = os.fspath(uri), cache_dir
        self._own_stats = None if stats is None else _own_stats(stats)
        limits: dict[str, Any] = {
            "cache_dir": cache_dir,
            "cache_bytes": None if cache_bytes is None else byte_count(cache_bytes, "cache_bytes"),
            "give_up_after_s": give_up_after_s,
            "guess": guessed_files,
        }
        address, note = resolved(self.uri, revision)
        self.store = opened(address, note, storage_options, revision=revision, **limits)
        self.data_store = self.store
        self.uri = self.store.address if "://" in self.uri else self.uri
        try:
            if data_files_root is not None:
                self.data_store = open_store(os.fspath(data_files_root), storage_options, **limits)
            self.revision = self.store.revision
            self._read(cameras, episodes, filter)
            self._sample(frames, from_zero("drop_first", drop_first), from_zero("drop_last", drop_last))
            self.tolerance_s = _tolerance(tolerance_s, self.fps)
        except BaseException:
            self.close()
            raise

    def split(self, shares: Mapping[str, float] | None = None, *, seed: int = 0) -> dict[str, Dataset]:
        """Parts of the selected episodes that have no episode in common, such as for training and validation.

            parts = dataset.split({"train": 0.9, "val": 0.1})

        Args:
            shares: of the episodes, per name; together at most 1. Which episodes are whose depends on `seed` and on the number
                of episodes. None: the `splits` of `meta/info.json`, such as {"train": "0:40", "test": "40:50"}.
            seed: of the shuffle.

        Returns:
            {name: dataset}, over the same open files. Each has a fingerprint of its own.

        Raises:
            DatasetError: there are no `splits`, or they are no ranges of episodes.
            ValueError: shares out of range, or one that is less than an episode.
        """
        if shares is None:
            chosen = self._stored_splits()
        else:
            chosen = _shared(shares, philox("split", from_zero("seed", seed)).random_raw(self.num_episodes))
        for name, places in chosen.items():
            if not len(places):
                raise ValueError(
                    f"split {name!r} has none of the {self.num_episodes} selected episodes; give it a larger share"
                )
        return {name: self.part(self.rows[places]) for name, places in chosen.items()}

    def orders(self) -> DatasetOrders:
        """The orders of its epochs, as a Loader reads them."""
        return DatasetOrders(self.lengths, self.frame_ranges)

    def window_offsets(self, deltas: Mapping[str, Sequence[float]], keys: Sequence[str]) -> dict[str, np.ndarray]:
        """{key: (1, T) int64 frame offsets} of `delta_timestamps`, on this dataset's clock. `keys` are those that may have a
        window. Raises ValueError."""
        return {key: offsets[None] for key, offsets in windows.offsets(deltas, self.fps, keys).items()}

    def _stored_splits(self) -> dict[str, np.ndarray]:
        """Per split of `meta/info.json`, the selected episodes in it."""
        where, splits = self.store.where(INFO), self.stored_splits
        if not splits:
            raise DatasetError(f"{where}: has no splits; give shares, such as dataset.split({{'train': 0.9, 'val': 0.1}})")
        chosen = {}
        for name, span in splits.items():
            match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", span) if isinstance(span, str) else None
            if match is None:
                raise DatasetError(f"{where}: split {name!r} is {str(span)[:40]!r}; it is a range of episodes, such as '0:40'")
            start, stop = map(int, match.groups())
            chosen[name] = np.flatnonzero((self.episodes >= start) & (self.episodes < stop))
        return chosen

    def compute_stats(
        self, keys: Iterable[str] | None = None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Stats:
        """Statistics of the selected episodes, by LeRobot's definitions: for `Dataset(stats=...)`, where validation episodes
        must have no part in them.

        Args:
            keys: the features to compute; None: the selected cameras, and all that is not text.
            progress: called as (episodes done, episodes in all), in the caller's thread. Rows and each camera count on
                their own.

        Returns:
            {key: {"min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99": array, "count": (1,) int}}. Of rows they
            are exact, in the shape of a row, (1,) for scalars; quantiles of a feature of more than 4 million numbers are
            those of evenly spread rows of that many. Of a camera they are (3, 1, 1), of values in [0, 1], from about 100
            frames an episode and at most 10 000 in all, evenly spread and made smaller as LeRobot does. `count` is of rows,
            or of these frames. Rows are read an episode at a time, so memory does not grow with the dataset.

        Raises:
            DatasetError, StorageError, DecodeError: rows or frames cannot be read.
            ValueError: an unknown key.
        """
        from dali_stream.decode.statistics import compute_stats  # loads torch, which datasets alone do without

        return compute_stats(self, keys, progress)


def _shared(shares: Mapping[str, float], key: np.ndarray) -> dict[str, np.ndarray]:
    """Per name, its share of the places of `key`, rising; they go by rising key."""
    wrong = [share for share in shares.values() if isinstance(share, bool) or not 0 < share <= 1]
    if not shares or wrong or math.fsum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"shares is {dict(shares)}; it has a number above 0 for each name, together at most 1")
    order = np.argsort(key, kind="stable")
    ends = np.round(np.cumsum(list(shares.values())) * len(key)).astype(int).tolist()
    return {name: np.sort(order[a:b]) for name, a, b in zip(shares, [0, *ends], ends, strict=False)}


def _own_stats(stats: Mapping[str, Mapping[str, npt.ArrayLike]]) -> metadata.Stats:
    try:
        return metadata.stats_of(stats)
    except ValueError as error:
        raise ValueError(f"stats is {str(stats)[:80]}; {error}") from error


def _tolerance(tolerance_s: float | None, fps: float) -> float:
    """How far a row's frame may be from its time, in seconds."""
    if tolerance_s is None:
        return TOLERANCE / fps
    number = isinstance(tolerance_s, (int, float)) and not isinstance(tolerance_s, bool)
    if not number or not 0 < tolerance_s <= 0.5 / fps:
        raise ValueError(
            f"tolerance_s is {tolerance_s!r}; it is above 0 and up to half a frame, {0.5 / fps:.6g} s at {fps:g} fps, since "
            "farther away another frame is nearer"
        )
    return float(tolerance_s)

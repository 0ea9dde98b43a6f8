"""Files of a LeRobot dataset, with the selected episodes and features, read from its metadata."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.checks.text import listed
from dali_stream.errors import DatasetError
from dali_stream.lerobot import frame_ranges, selection, v2, v3
from dali_stream.lerobot.episode_table import Episodes
from dali_stream.lerobot.features import CHANNELS, Feature
from dali_stream.lerobot.frame_ranges import FrameRanges, Frames
from dali_stream.lerobot.info import INFO, Info, read_info
from dali_stream.lerobot.selection import EpisodeFilter
from dali_stream.lerobot.stats import STATS, Stats, read_stats
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.timing import EpisodeTimes
from dali_stream.storage import Store
from dali_stream.system.cached import cached_property
from dali_stream.system.heap import trim_memory
from dali_stream.system.log_records import DATASET_LOG

NEEDED = ("timestamp", "frame_index", "episode_index", "index", "task_index")  # features that every batch has
CLOCKS = ("timestamp", "frame_index")  # values of the argument `clock`; the first is the default
_log = logging.getLogger(DATASET_LOG)
_MANY = 2000  # for more episodes than this, memory freed by parsing is returned to the operating system


class DatasetFiles:
    """Files, selected episodes and features of a dataset: all that the readers of rows and videos need.

    This is the base class of `dali_stream.Dataset`, whose constructor sets the attributes. See `Dataset` for those without a
    comment.
    """

    uri: str
    info: Info  # contents of `meta/info.json`
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
    trust_timestamps: bool
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
        self.info = info = read_info(self.store)
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
            if feature.is_depth and (fault := feature.depth_fault):
                raise DatasetError(
                    f"Invalid info of depth camera {key[:80]!r} in {self.store.where(INFO)}: {fault}. Correct "
                    "meta/info.json, or leave the camera out of cameras"
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
        rows = selection.rows(self.table.index, episodes, episode_filter, self.episode_columns)
        self.table.check_videos(rows, self.cameras, self.store)
        self._take(rows, None)

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
        if self.info.is_v2:
            return v2.read_episode_columns(self.store)
        return v3.read_episode_columns(self.store, self.table.tables, stats=stats)

    @property
    def sampled_lengths(self) -> npt.NDArray[np.int64]:
        """Number of frames of each selected episode that an epoch samples, shape (E,)."""
        return self.lengths if self.frame_ranges is None else self.frame_ranges.counts

    def sampled(self, episodes: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the frame index within its episode of each sampled frame.

        Args:
            episodes: Position of each frame's episode among the selected ones.
            numbers: Number of each frame among the sampled frames of its episode, from 0, the same shape.
        """
        return numbers if self.frame_ranges is None else self.frame_ranges.frames(episodes, numbers)

    def read_table(self, cameras: Iterable[str]) -> Episodes:
        """Read the table of all episodes, with the columns of some cameras. Raises DatasetError if the metadata is broken."""
        read = v2.read_episodes if self.info.is_v2 else v3.read_episodes
        return read(self.store, self.info, cameras)

    @cached_property
    def tasks(self) -> dict[int, str]:
        """Tasks {task_index: task} from the file `tasks_place`."""
        return v2.read_tasks(self.store) if self.tasks_place == v2.TASKS else v3.read_names(self.store, v3.TASKS, "task_index")

    @cached_property
    def subtasks(self) -> dict[int, str]:
        """Subtasks {subtask_index: subtask}. Empty for datasets without subtasks."""
        return v3.read_names(self.store, v3.SUBTASKS, "subtask_index")

    @property
    def stats(self) -> Stats:
        """Statistics per key (`mean`, `std`, `min`, `max`, quantiles).

        These are the statistics that the user passed or, by default, those of `meta/stats.json`, which cover all episodes,
        selected or not. For v2.1, they are aggregated from `meta/episodes_stats.jsonl` in the same way as in LeRobot's
        converter to v3.0.
        """
        return self.stored_stats if self.own_stats is None else self.own_stats

    @cached_property
    def stored_stats(self) -> Stats:
        """Statistics in the files of the dataset, even if the user passed others."""
        return v2.read_aggregated_stats(self.store, self.info) if self.info.is_v2 else read_stats(self.store)

    @cached_property
    def tasks_place(self) -> str:
        """Path of the file that contains `tasks`.

        Some exporters of v3.0 write the file of v2.x, which is read if the file of v3.0 is missing.
        """
        is_v2 = self.info.is_v2 or (not self.store.exists(v3.TASKS) and self.store.exists(v2.TASKS))
        return v2.TASKS if is_v2 else v3.TASKS

    @property
    def stats_place(self) -> str:
        """Origin of `stats`, for messages."""
        return self.stored_stats_place if self.own_stats is None else "stats="

    @cached_property
    def stored_stats_place(self) -> str:
        """Path of the file that contains `stored_stats`."""
        return v2.stats_place(self.store, self.info) if self.info.is_v2 else STATS

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

    def unknown_name(self, key: str, number: int) -> DatasetError:
        """Return the error for rows whose task or subtask has no name.

        Args:
            key: Either "task" or "subtask".
            number: Value of the rows.
        """
        path, names = (self.tasks_place, self.tasks) if key == "task" else (v3.SUBTASKS, self.subtasks)
        if not self.store.exists(path):
            return DatasetError(
                f"No file {self.store.where(path)}, which must name {key}_index {number} of the rows. Copy or fetch it again"
            )
        return DatasetError(
            f"{self.store.where(path)}: rows of the dataset refer to {key}_index {number}, which is missing. The file has "
            f"{len(names)}. Copy the dataset again"
        )

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

    def episode_times(self, camera: str, episode: int, index: VideoIndex, rows: Mapping[str, npt.NDArray[Any]]) -> EpisodeTimes:
        """Return the times of an episode's rows, by which its frames are located in its video file.

        Args:
            camera: Key of the camera.
            episode: Position of the episode among the selected episodes.
            index: Index of its video file.
            rows: Columns `timestamp` and `frame_index` of its rows, each of shape (L,).
        """
        row, used = int(self.rows[episode]), int(self.lengths[episode])
        count = self.table.count(camera, row, index, self.fps)
        interval = float(self.table.start[camera][row]), count.declared_stop if self.trust_timestamps else count.stop
        if self.frame_ranges is not None:
            frames = self.frame_ranges
            used = int(frames.stop[np.searchsorted(frames.episode, episode, side="right") - 1]) if frames.counts[episode] else 0
        return EpisodeTimes(
            index, interval, self.seconds(rows), rows["frame_index"], self.fps, self.tolerance_s,
            count=None if self.trust_timestamps else count,
            used=used,
        )  # fmt: skip

    def warn_of_cut(self, camera: str, episode: int, times: EpisodeTimes) -> None:
        """Log a warning for the first episode of a camera whose video is shorter, if its last rows are not sampled."""
        if times.is_cut and camera not in self.table.warned:
            self.table.warned.add(camera)
            _log.warning(
                "%s: episode %d has %d rows, and its video %d frames. Rows that are not left out have the right frames only if "
                "the end of the video is missing, and not a frame before. Other episodes may be like this one",
                camera, self.episodes[episode], len(times.seconds), times.count_frames(),
            )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        store, data_store = copy.deepcopy((self.store, self.data_store))  # copied together: they may be the same object
        return {**vars(self), "store": store, "data_store": data_store, "opened": {}}

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

"""Table of the episodes of a dataset, whichever version of the format it has, and its checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import NONE
from dali_stream.errors import DatasetError, counted
from dali_stream.lerobot.info import INFO, Info
from dali_stream.mp4.counting import Count, FileCount, FileEpisodes, count_rows
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store
from dali_stream.system.cached import cached_property

_MANY_EPISODES = 8  # minimum number in a file for which results of counting are kept. Fewer are counted in less than 50 µs


@dataclass(frozen=True)
class Files:
    """Files that contain the episodes.

    Attributes:
        paths: Path to each file.
        index: Number of each episode's file in `paths`, shape (E,). `NONE` for an episode without a file.
    """

    paths: list[str]
    index: npt.NDArray[np.int64]

    def rows(self, file: int) -> npt.NDArray[np.int64]:
        """Return the rows of the episode table whose episodes are in one file."""
        order, sorted_index = self._by_file
        first, last = np.searchsorted(sorted_index, [file, file + 1])
        return order[first:last]

    def number(self, path: str) -> int:
        """Return the number of a file, or -1 if it is none of these files."""
        return self._number_of.get(path, -1)

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {path: number for number, path in enumerate(self.paths)}

    @cached_property
    def _by_file(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order = np.argsort(self.index, kind="stable")
        return order, self.index[order]


@dataclass(frozen=True)
class Episodes:
    """Columns of the episode table, for E episodes in increasing order of their index.

    Attributes:
        index: Index of each episode, shape (E,).
        length: Number of frames of each episode, shape (E,).
        first_row: Value of the feature `index` at the first frame of each episode, shape (E,).
        data: Parquet file of each episode.
        video: MP4 file of each episode, for each camera.
        start: Seconds at which each episode begins in its MP4 file (`from_timestamp`), shape (E,), for each camera. 0 for an
            episode without video of the camera.
        stop: Seconds at which the next episode begins in the same MP4 file, shape (E,), for each camera. Infinite for the
            last episode of a file.
        to_timestamp: Seconds at which each episode ends according to the metadata, shape (E,), for each camera. Infinite if
            the metadata lacks it, as in v2.x. Some exporters write the time of the last frame. It is therefore only used to
            tell episodes that share frames from those that lack frames, see `dali_stream.mp4.counting`.
        tables: Paths of the Parquet files that contain the episode table. Empty in v2.x.
    """

    index: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    data: Files
    video: dict[str, Files] = field(default_factory=dict)
    start: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    stop: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    to_timestamp: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)

    def check_videos(self, rows: npt.NDArray[np.int64], cameras: Collection[str], store: Store) -> None:
        """Check that some episodes have a video file of each camera.

        Args:
            rows: Rows of the episodes in the table.
            cameras: Keys of the selected cameras, for the message.
            store: Store of the dataset.

        Raises:
            DatasetError: If an episode has no file of a camera.
        """
        lacks = {camera: self.index[rows[files.index[rows] == NONE]] for camera, files in self.video.items()}
        lacks = {camera: episodes for camera, episodes in lacks.items() if len(episodes)}
        for camera, episodes in lacks.items():
            others = f", and of {counted(len(episodes) - 1, 'other episode')}" if len(episodes) > 1 else ""
            raise DatasetError(
                f"No video of camera {camera!r} in episode {episodes[0]}{others}: {store.where('meta/episodes')} lacks its "
                f"chunk_index or file_index. Leave such episodes out with episodes=, or the camera with "
                f"cameras={[key for key in cameras if key not in lacks]}"
            )

    def in_file(self, camera: str, file: int) -> FileEpisodes:
        """Return all episodes of an MP4 file, in the order of the table."""
        rows = self.video[camera].rows(file)
        return FileEpisodes(self.index[rows], self.start[camera][rows], self.length[rows], self.to_timestamp[camera][rows])

    def count(self, camera: str, row: int, index: VideoIndex, fps: float) -> Count:
        """Count the rows of all episodes of an MP4 file against its frames. Return the result for one of them.

        Args:
            camera: Key of the camera.
            row: Row of the episode in the table.
            index: Index of the file.
            fps: Frames per second of the dataset.
        """
        files = self.video[camera]
        file = int(files.index[row])
        result, moov_hash = self._counts.get((camera, file), (None, ""))
        if result is None or moov_hash != index.moov_hash:
            result = count_rows(self.in_file(camera, file), index, fps)
            if len(result.stop) >= _MANY_EPISODES:
                self._counts[camera, file] = result, index.moov_hash
        return result.of(int(np.searchsorted(files.rows(file), row)))

    @cached_property
    def _counts(self) -> dict[tuple[str, int], tuple[FileCount, str]]:
        """{(camera, file): result of `count_rows`, and hash of the index}, for files with many episodes."""
        return {}

    @cached_property
    def warned(self) -> set[str]:
        """Cameras about which a warning was logged. See `DatasetFiles.warn_of_cut`."""
        return set()


def check_episodes(table: Mapping[str, npt.NDArray[Any]], where: str, store: Store, info: Info) -> None:
    """Check the columns of an episode table, sorted by episode index, against each other and the totals of `info.json`.

    Args:
        table: Columns, with the names that they have in v3.0.
        where: Address of the file or folder of the table, for messages.
        store: Store of the dataset.
        info: Contents of `info.json`.

    Raises:
        DatasetError: If the table is empty, or if its numbers are invalid or contradict each other or the totals.
    """
    index, length = table["episode_index"], table["length"]

    def refuse(wrong: npt.NDArray[np.bool_], problem: str) -> None:
        if wrong.any():
            raise DatasetError(f"Invalid episode {index[np.argmax(wrong)]} in {where}: {problem}")

    if len(index) == 0:
        raise DatasetError(f"No episodes in {where}")
    refuse(np.append(False, np.diff(index) == 0) | (index < 0), "episode_index must be nonnegative and not duplicated")
    refuse((length < 1) | (length > 1 << 40), "length must be a positive number of frames")
    if "dataset_to_index" in table and "dataset_from_index" in table:
        promised = table["dataset_to_index"] - table["dataset_from_index"]
        refuse(promised != length, "length must be dataset_to_index - dataset_from_index")
    for name, values in table.items():
        if name.endswith(("chunk_index", "file_index")):
            is_missing = (values == NONE) & name.startswith("videos/")  # see `Episodes.check_videos`
            refuse(((values < 0) & ~is_missing) | (values > 1 << 40), f"{name} must be the number of a file")
        if name.endswith("timestamp"):
            refuse(~np.isfinite(values) | (np.abs(values) > 1e9), f"{name} must be a time in seconds")
        if name.endswith("/to_timestamp"):
            start = table[f"{name.removesuffix('to_timestamp')}from_timestamp"]
            refuse(values < start, f"{name} must not be less than from_timestamp")
    for unit, total, count in (("episodes", info.episodes, len(index)), ("frames", info.frames, int(length.sum()))):
        if total is not None and total != count:
            raise wrong_total(unit, count, where, total, store)


def wrong_total(unit: str, count: int, where: str, total: int | None, store: Store) -> DatasetError:
    """Return the error for a total of `info.json` that differs from the number of episodes or frames."""
    return DatasetError(
        f"Invalid total_{unit} in {store.where(INFO)}: must be {count}, the number of {unit} in {where}, got {total}. "
        "A file is missing, or the dataset was edited by hand: copy or edit it again with LeRobot's tools"
    )

"""Checks of a dataset: metadata, files, rows, tasks, and the frames of rows. They read data in the same way as a Loader."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, counted
from dali_stream.lerobot.row_memory import Columns
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.index import LACKING, Int64, VideoIndex
from dali_stream.mp4.timing import BY_FRAME_INDEX, TOLERANCE, find_packets
from dali_stream.tools.description import find_frames, missing_files
from dali_stream.tools.diagnosis.looks import look
from dali_stream.tools.diagnosis.report import OK, PROBLEM, Result
from dali_stream.tools.work import spread

_SHOWN = 5  # maximum number of missing files that a finding names
LOCAL, REMOTE = 1000, 32  # maximum number of episodes or files to read; for remote data, each may need a request
_NAMES = ("task_index", "subtask_index")


class Rows:
    """Subject of the checks of a dataset: its rows, without images. Each episode is read once, and its timestamps are kept.

    Attributes:
        dataset: Dataset of the rows.
        deep: Whether to check all episodes and files. Otherwise at most 1000 are checked, or 32 of remote data.
        errors: {episode: error} of episodes with broken rows.
        first_episodes: {column of `_NAMES`: {value: first episode in which it was read}}.
    """

    def __init__(self, dataset: Dataset, deep: bool) -> None:
        self.dataset, self.deep = dataset, deep
        self._reader = RowReader(dataset, keys={key for key, feature in dataset.features.items() if not feature.is_image})
        self._seconds: dict[int, npt.NDArray[np.float64]] = {}
        self.errors: dict[int, DatasetError] = {}
        self.first_episodes: dict[str, dict[int, int]] = {name: {} for name in _NAMES if name in dataset.features}

    def seconds(self, episode: int) -> npt.NDArray[np.float64] | None:
        """Return the times of the rows of an episode in seconds, shape (L,), or None if its rows are broken.

        Args:
            episode: Position of the episode among the selected episodes.

        Raises:
            StorageError: If rows cannot be read.
        """
        if episode not in self._seconds and episode not in self.errors:
            try:
                for number, rows in self._reader.read(episode).items():
                    self._keep(number, rows)
            except DatasetError as error:
                self.errors[episode] = error
        return self._seconds.get(episode)

    def spread(self, count: int) -> list[int]:
        """Return the numbers of the episodes or files to check, evenly spread over 0 to `count` - 1."""
        return spread(count, count if self.deep else REMOTE if self.dataset.data_store.remote else LOCAL)

    def _keep(self, episode: int, rows: Columns) -> None:
        self._seconds[episode] = self.dataset.seconds(episode, rows)
        for name, episodes in self.first_episodes.items():
            for value in np.unique(rows[name]).tolist():
                episodes.setdefault(value, episode)


def check_metadata(rows: Rows) -> Result:
    """Describe the size of the dataset. Its metadata is valid, since the dataset was opened."""
    dataset = rows.dataset
    size = f"{counted(dataset.num_episodes, 'episode')}, {counted(dataset.num_frames, 'frame')}"
    return OK, f"{dataset.store.address}: {size} at {dataset.fps:g} fps", ""


def check_statistics(rows: Rows) -> Result:
    """Check that the statistics of the dataset, if any, can be read."""
    place = rows.dataset.stored_stats_place
    try:
        stats = rows.dataset.stored_stats
    except DaliStreamError as error:
        return PROBLEM, str(error), f"copy or fetch {place} again, or write another: `dali-stream stats URI --out FILE`"
    if stats:
        return OK, f"{place} has those of {counted(len(stats), 'feature')}", ""
    return OK, f"{place} is missing: only `normalize` needs it, and `dali-stream stats URI` computes it", ""


def check_files(rows: Rows) -> Result:
    """Check that all files exist. Raises StorageError if the source cannot be reached."""
    dataset = rows.dataset
    try:
        missing, looked_for = missing_files(dataset, rows.deep)
    except DatasetError as error:
        return PROBLEM, str(error), "correct data_path and video_path in meta/info.json"
    if not missing:
        return OK, f"{counted(looked_for, 'file')} of rows and video, none missing", ""
    names = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    text = f"{dataset.data_store.address}: {len(missing)} of {counted(looked_for, 'file')} missing: {names}"
    remedy = "copy or fetch them again, or exclude their episodes (episodes=...). `dali-stream info URI --json` lists all"
    return PROBLEM, text, remedy


def check_rows(rows: Rows) -> Result:
    """Check that the rows of episodes agree with the metadata in number and type, and that their timestamps increase."""
    dataset, files = rows.dataset, rows.dataset.table.data
    episodes = rows.spread(dataset.num_episodes)
    episode = 0
    try:
        for episode in episodes:
            rows.seconds(episode)
        if rows.errors:
            episode, error = min(rows.errors.items())
            raise error
    except DaliStreamError as error:
        kind, remedy = look(dataset.data_store, files.paths[files.index[dataset.rows[episode]]])
        count = len(rows.errors)
        more = f"{count} of {len(episodes)} checked episodes have such rows" if count > 1 else ""
        return (
            PROBLEM,
            ". ".join(filter(None, (str(error), kind[:1].upper() + kind[1:], more))),
            remedy or "copy the dataset again",
        )
    return OK, f"rows are whole and timestamps rise in {len(episodes)} checked episodes of {dataset.num_episodes}", ""


def check_names(rows: Rows) -> Result:
    """Check that each task of the rows that were read has a name. Without the names, a Loader cannot deliver a batch."""
    dataset = rows.dataset
    for name, path in zip(_NAMES, (dataset.tasks_place, "meta/subtasks.parquet"), strict=True):
        try:
            names = dataset.tasks if name == "task_index" else dataset.subtasks
        except DaliStreamError as error:
            return PROBLEM, str(error), look(dataset.store, path)[1] or "copy the dataset again"
        if name != "task_index" and not names:  # a Loader then delivers no subtasks
            continue
        unknown = [(episode, value) for value, episode in rows.first_episodes.get(name, {}).items() if value not in names]
        if unknown:
            episode, value = min(unknown)
            lacks = f"has no {name} {value}" if dataset.store.exists(path) else f"no such file, which names {name} {value}"
            text = f"{dataset.store.where(path)}: {lacks} of the rows of episode {dataset.episodes[episode]}"
            return PROBLEM, text, f"copy or fetch {path} again"
    return OK, f"{len(dataset.tasks)} named in {dataset.tasks_place}, each that the checked rows have", ""


class FrameTimes:
    """Checks that the rows of a camera have frames, file by file.

    Attributes:
        faults: {episode: reason why it has rows without frames}.
        checked: Number of episodes that were checked.
        by_frame_index: Episodes of `faults` whose rows all have a frame at frame_index / fps.
    """

    def __init__(self, rows: Rows, camera: str) -> None:
        self._dataset, self._camera, self._rows = rows.dataset, camera, rows
        self._files = VideoFiles(rows.dataset, camera)
        self.faults = self._short_episodes()
        self.checked = 0
        self.by_frame_index: set[int] = set()

    def find(self, table: VideoIndex, episodes: Iterable[int]) -> dict[int, Int64]:
        """Return {episode: packets of its rows} for episodes of a file. The packet of a row without a frame is `LACKING`.

        Args:
            table: Index of the file.
            episodes: Positions of the episodes among the selected episodes. The result lacks episodes that cannot be checked.

        Raises:
            StorageError: If rows cannot be read.
        """
        dataset, packets = self._dataset, {}
        for episode in episodes:
            self.checked += 1
            seconds = self._rows.seconds(episode)
            if seconds is None:
                continue
            packets[episode], fault = find_frames(dataset, self._camera, table, episode, seconds)
            try:
                self._files.checked(table, packets[episode][packets[episode] != LACKING], episode)
            except DecodeError as error:
                self.faults.setdefault(episode, f": {error}")
                del packets[episode]
            if fault:
                self.faults[episode] = f", {fault}"
                regular = np.arange(len(seconds)) / dataset.fps
                interval, timing = dataset.interval(self._camera, episode), dataset.timing(episode)
                if (find_packets(table, interval, regular, *timing) != LACKING).all():
                    self.by_frame_index.add(episode)
        return packets

    def result(self) -> Result:
        """Return the result for all files that were checked so far."""
        dataset, faults = self._dataset, self.faults
        if not faults:
            return OK, f"each row has a frame of its episode, in {self.checked} checked episodes of {dataset.num_episodes}", ""
        first = min(faults)
        more = f". {len(faults)} of {dataset.num_episodes} episodes have such faults" if len(faults) > 1 else ""
        remedy = "exclude these episodes (episodes=...), or record or convert the dataset again"
        if faults.keys() == self.by_frame_index:
            remedy = f"each row has its frame at frame_index / fps. {BY_FRAME_INDEX}"
        return PROBLEM, f"episode {dataset.episodes[first]}{faults[first]}{more}", remedy

    def _short_episodes(self) -> dict[int, str]:
        """Return {episode: fault} of episodes that, according to the metadata, are longer than their interval of the file."""
        dataset = self._dataset
        start, stop = (times[self._camera][dataset.rows] for times in (dataset.table.start, dataset.table.stop))
        short = np.flatnonzero(stop - start <= (dataset.lengths - 1 + TOLERANCE) / dataset.fps).tolist()
        return {
            episode: f": meta/episodes: it begins at {start[episode]:.4f} s and the next episode of the file at "
            f"{stop[episode]:.4f} s, too early for {counted(int(dataset.lengths[episode]), 'frame')} at {dataset.fps:g} fps"
            for episode in short
        }

"""Checks of a dataset: statistics, files, rows and tasks.

They read data in the same way as a Loader, so what it refuses raises its error. `run` reports an error that a check raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError, StorageError, counted
from dali_stream.lerobot.dataset_files import CLOCKS
from dali_stream.lerobot.rows import Columns, RowReader
from dali_stream.tools.description import missing_files, used
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding
from dali_stream.tools.work import spread

_SHOWN = 5  # maximum number of files that a finding names
LOCAL, REMOTE = 1000, 32  # maximum number of episodes or files to read; for remote data, each may need a request
_REWRITE = "none is needed for training: a Loader finds these rows. `dali-stream prepare URI OUT` writes right metadata"
ROWS_FIRST = "repair the rows first, see the finding about them"
_NAMES = ("task_index", "subtask_index")


class Rows:
    """Context of the checks of a dataset: its rows, without images. Each episode is read once, and the columns that
    locate its frames are kept.

    Attributes:
        dataset: Dataset of the rows.
        deep: Whether to check all episodes and files. Otherwise at most 1000 are checked, or 32 of remote data.
        errors: {episode: error} of episodes with broken rows.
        episodes_read: Episodes whose rows were read.
        first_episodes: {column of `_NAMES`: {value: first episode in which it was read}}.
    """

    def __init__(self, dataset: Dataset, deep: bool) -> None:
        self.dataset, self.deep = dataset, deep
        self._reader = RowReader(dataset, keys={key for key, feature in dataset.features.items() if not feature.is_image})
        self._kept: dict[int, Columns] = {}
        self.errors: dict[int, DaliStreamError] = {}
        self.first_episodes: dict[str, dict[int, int]] = {name: {} for name in _NAMES if name in dataset.features}

    def read(self, episode: int) -> Columns | None:
        """Return the columns `timestamp` and `frame_index` of an episode, or None if its rows are broken.

        Args:
            episode: Position of the episode among the selected episodes.

        Raises:
            StorageError: If rows cannot be read.
        """
        if episode not in self._kept and episode not in self.errors:
            self._read(episode, self._reader.read)
            for other in self._reader.beside(episode):  # of the same row groups, which are in memory now
                if other not in self._kept and other not in self.errors:
                    self._read(other, self._reader.read_kept)
        return self._kept.get(episode)

    def _read(self, episode: int, read: Callable[[int], Columns | None]) -> None:
        try:
            if (rows := read(episode)) is not None:
                self._keep(episode, rows)
        except DatasetError as error:
            self.errors[episode] = DatasetError(str(error))  # without the traceback, which refers to the rows

    @property
    def misnamed(self) -> set[str]:
        """Data files that the metadata names for episodes whose rows were found in other files."""
        return self._reader.misnamed

    def are_elsewhere(self, path: str) -> bool:
        """Return whether a missing file is a data file, and the rows of its first episode are in another file."""
        files = self.dataset.table.data
        episodes = np.flatnonzero(files.index[self.dataset.rows] == files.number(path))
        return len(episodes) > 0 and self.read(int(episodes[0])) is not None

    @property
    def episodes_read(self) -> Collection[int]:
        return self._kept.keys()

    def spread(self, count: int) -> list[int]:
        """Return the numbers of the episodes or files to check, evenly spread over 0 to `count` - 1."""
        return spread(count, count if self.deep else REMOTE if self.dataset.data_store.remote else LOCAL)

    def _keep(self, episode: int, rows: Columns) -> None:
        self._kept[episode] = {key: rows[key] for key in CLOCKS}
        for name, episodes in self.first_episodes.items():
            for value in np.unique(rows[name]).tolist():
                episodes.setdefault(value, episode)


def check_statistics(rows: Rows) -> list[Finding]:
    """Check that the statistics of the dataset, if any, can be read."""
    place = rows.dataset.stored_stats_place
    try:
        stats = rows.dataset.stored_stats
    except StorageError as error:  # the other checks do not need this file
        return [Finding("dataset", "statistics", PROBLEM, str(error))]
    has = f"has those of {counted(len(stats), 'feature')}" if stats else "is missing: only `normalize` needs it"
    return [Finding("dataset", "statistics", OK, f"{place} {has}")]


def check_files(rows: Rows) -> list[Finding]:
    """Check that all files exist."""
    dataset = rows.dataset
    missing, looked_for = missing_files(dataset, rows.deep)
    if missing:
        listed = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        text = f"{dataset.data_store.address}: {len(missing)} of {counted(looked_for, 'file')} missing: {listed}"
        if all(rows.are_elsewhere(path) for path in missing):
            return [Finding("dataset", "files", WARNING, f"{text}. The rows of their episodes are in other files", _REWRITE)]
        remedy = "copy or fetch them again, or exclude their episodes (episodes=...). `dali-stream info URI --json` lists all"
        absent = [key for key in dataset.videos if set(missing).issuperset(used(dataset, dataset.table.video[key]))]
        if absent:
            kept = [key for key in dataset.cameras if key not in absent]
            remedy = f"no episode has {', '.join(absent)}: copy or fetch the files, or select other cameras with cameras={kept}"
        return [Finding("dataset", "files", PROBLEM, text, remedy)]
    return [Finding("dataset", "files", OK, f"{counted(looked_for, 'file')} of rows and video, none missing")]


def check_rows(rows: Rows) -> list[Finding]:
    """Read the rows of episodes, as a Loader does, and report the first error."""
    dataset = rows.dataset
    episodes = rows.spread(dataset.num_episodes)
    for episode in episodes:
        try:
            rows.read(episode)
        except StorageError as error:
            rows.errors[episode] = error
            break  # the others would fail as well, perhaps after a timeout each
    if count := len(rows.errors):
        more = f". {count} of {len(episodes)} checked episodes have such rows" if count > 1 else ""
        return [Finding("dataset", "rows", PROBLEM, f"{rows.errors[min(rows.errors)]}{more}")]
    text = f"rows are whole in {len(episodes)} checked episodes of {dataset.num_episodes}"
    if rows.misnamed:
        text += f", but not in the files that the metadata names, such as {min(rows.misnamed)}"
        return [Finding("dataset", "rows", WARNING, text, _REWRITE)]
    return [Finding("dataset", "rows", OK, text)]


def check_tasks(rows: Rows) -> list[Finding]:
    """Check that each task of the rows that were read has a name. Without the names, a Loader cannot deliver a batch."""
    dataset = rows.dataset
    for column, episodes in rows.first_episodes.items():
        names = dataset.tasks if column == "task_index" else dataset.subtasks
        unknown = [(episode, value) for value, episode in episodes.items() if value not in names]
        if unknown and (names or column == "task_index"):  # a Loader delivers no subtasks if none has a name
            episode, value = min(unknown)
            error = dataset.unknown_name(column.removesuffix("_index"), value)
            return [Finding("dataset", "tasks", PROBLEM, f"episode {dataset.episodes[episode]}: {error}")]
    text = f"{len(dataset.tasks)} named in {dataset.tasks_place}"
    if not rows.episodes_read:
        text += ". Whether rows have others is unknown, since no row could be read"
        return [Finding("dataset", "tasks", WARNING, text, ROWS_FIRST)]
    return [Finding("dataset", "tasks", OK, f"{text}, each that the checked rows have")]

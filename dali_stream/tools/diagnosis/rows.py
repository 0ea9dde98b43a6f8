"""The rows of episodes, checked as a Loader checks them: the rows themselves, the names of their tasks, and their frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, counted
from dali_stream.lerobot.rows import Columns, RowReader
from dali_stream.mp4.index import LACKING, Int64, VideoIndex
from dali_stream.mp4.timing import BY_FRAME_INDEX, TOLERANCE, explain, find_packets
from dali_stream.tools.diagnosis.looks import look
from dali_stream.tools.diagnosis.report import OK, PROBLEM, Result

LOCAL, REMOTE = 1000, 32  # episodes or files that are read; for remote data, each may be a request
_NAMES = ("task_index", "subtask_index")


class Rows:
    """Rows of episodes without images. Each episode is read once, and its timestamps are kept.

    Attributes:
        errors: per episode whose rows are broken.
        named: per column of `_NAMES`, each value in the rows with the first episode that has it.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._reader = RowReader(dataset, keys={key for key, feature in dataset.features.items() if not feature.is_image})
        self._seconds: dict[int, npt.NDArray[np.float64]] = {}
        self.errors: dict[int, DatasetError] = {}
        self.named: dict[str, dict[int, int]] = {name: {} for name in _NAMES if name in dataset.features}

    def seconds(self, episode: int) -> npt.NDArray[np.float64] | None:
        """(L,) timestamps of the `episode`-th selected episode; None if its rows are broken. Raises StorageError."""
        if episode not in self._seconds and episode not in self.errors:
            try:
                for number, rows in self._reader.read(episode).items():
                    self._keep(number, rows)
            except DatasetError as error:
                self.errors[episode] = error
        return self._seconds.get(episode)

    def _keep(self, episode: int, rows: Columns) -> None:
        self._seconds[episode] = self._dataset.seconds(episode, rows)
        for name, found in self.named.items():
            for value in np.unique(rows[name]).tolist():
                found.setdefault(value, episode)


def spread(dataset: Dataset, count: int, deep: bool) -> list[int]:
    """Which of `count` episodes or files to check: all if `deep`, else a number of them, evenly spread."""
    most = count if deep else min(count, REMOTE if dataset.data_store.remote else LOCAL)
    places: list[int] = np.linspace(0, count - 1, most).round().astype(int).tolist()
    return places


def examine(dataset: Dataset, rows: Rows, episodes: Sequence[int]) -> Result:
    """Checks the rows of these episodes: as many as promised, of the promised kinds, with timestamps that rise."""
    episode = 0
    try:
        for episode in episodes:
            rows.seconds(episode)
        if rows.errors:
            episode, error = min(rows.errors.items())
            raise error
    except DaliStreamError as error:
        files, count = dataset.table.data, len(rows.errors)
        said, remedy = look(dataset.data_store, files.paths[files.index[dataset.rows[episode]]])
        more = f"; {count} of {len(episodes)} checked episodes have such rows" if count > 1 else ""
        text = f"{error}{'; ' if said else ''}{said}{more}"
        return PROBLEM, text, remedy or "copy the dataset again"
    return OK, f"rows are whole and timestamps rise in {len(episodes)} checked episodes of {dataset.num_episodes}", ""


def examine_names(dataset: Dataset, rows: Rows) -> Result:
    """Checks that each task of the rows that were read has a name. Without that, a Loader delivers no batch."""
    for name, path in zip(_NAMES, (dataset.tasks_place, "meta/subtasks.parquet"), strict=True):
        try:
            names = dataset.tasks if name == "task_index" else dataset.subtasks
        except DaliStreamError as error:
            return PROBLEM, str(error), look(dataset.store, path)[1] or "copy the dataset again"
        if name != "task_index" and not names:  # not delivered then
            continue
        unknown = {value: episode for value, episode in rows.named.get(name, {}).items() if value not in names}
        where = dataset.store.where(path)
        if unknown:
            value, episode = min(unknown.items(), key=lambda item: item[1])
            lacks = f"has no {name} {value}" if dataset.store.exists(path) else f"no such file, which names {name} {value}"
            text = f"{where}: {lacks} of the rows of episode {dataset.episodes[episode]}"
            return PROBLEM, text, f"copy or fetch {path} again"
    return OK, f"{len(dataset.tasks)} named in {dataset.tasks_place}, each that the checked rows have", ""


class Timing:
    """The frames of a camera's rows, file by file.

    Attributes:
        faults: First row of each episode without a frame, and why.
        checked: Number of episodes that were looked at.
        by_frame_index: Episodes among them that have all of their frames at frame_index / fps.
    """

    def __init__(self, dataset: Dataset, camera: str, rows: Rows) -> None:
        self._dataset, self._camera, self._rows = dataset, camera, rows
        self._files = VideoFiles(dataset, camera)
        self.faults = dict(self._short())
        self.checked = 0
        self.by_frame_index: set[int] = set()

    def examine(self, table: VideoIndex, episodes: list[int]) -> Mapping[int, Int64]:
        """Looks up the frames of these episodes in their file. Returns their packets, `LACKING` for those without one.

        Raises:
            StorageError: rows cannot be read.
        """
        packets = {}
        for episode in episodes:
            self.checked += 1
            seconds = self._rows.seconds(episode)
            if seconds is None:
                continue
            interval = self._dataset.table.interval(self._camera, self._dataset.rows[episode])
            found = packets[episode] = find_packets(table, interval, seconds, self._dataset.fps, self._dataset.tolerance_s)
            try:
                self._files.checked(table, found[found != LACKING], episode)
            except DecodeError as error:
                self.faults.setdefault(episode, f": {error}")
                del packets[episode]
            if (lacking := found == LACKING).any():
                frame = int(np.argmax(lacking))
                why = explain(table, interval, float(seconds[frame]), self._dataset.fps, self._dataset.tolerance_s)
                self.faults[episode] = f", frame {frame}: {self._dataset.data_store.where(table.path)}: {why}"
                regular = np.arange(len(seconds)) / self._dataset.fps
                if (find_packets(table, interval, regular, self._dataset.fps, self._dataset.tolerance_s) != LACKING).all():
                    self.by_frame_index.add(episode)
        return packets

    def found(self) -> Result:
        """What was found in all files."""
        dataset, faults = self._dataset, self.faults
        if not faults:
            return OK, f"each row has a frame of its episode, in {self.checked} checked episodes of {dataset.num_episodes}", ""
        first = min(faults)
        more = f"; {len(faults)} of {dataset.num_episodes} episodes have such faults" if len(faults) > 1 else ""
        remedy = "exclude these episodes (episodes=...), or record or convert the dataset again"
        if faults.keys() == self.by_frame_index:
            remedy = f"each row has its frame at frame_index / fps. {BY_FRAME_INDEX}"
        return PROBLEM, f"episode {dataset.episodes[first]}{faults[first]}{more}", remedy

    def _short(self) -> Iterator[tuple[int, str]]:
        """Yield the episodes that the next one of the file leaves too little room, by the metadata alone."""
        dataset = self._dataset
        start, stop = (times[self._camera][dataset.rows] for times in (dataset.table.start, dataset.table.stop))
        for episode in np.flatnonzero(stop - start <= (dataset.lengths - 1 + TOLERANCE) / dataset.fps).tolist():
            yield (
                episode,
                f": meta/episodes: it begins at {start[episode]:.4f} s and the next episode of the file at {stop[episode]:.4f} "
                f"s, too early for {counted(int(dataset.lengths[episode]), 'frame')} at {dataset.fps:g} fps",
            )

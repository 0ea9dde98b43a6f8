"""Checks that timestamps rise, and that each row has a frame of its episode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.index import LACKING, VideoIndex
from dali_stream.mp4.timing import TOLERANCE, explain, find_packets
from dali_stream.tools.doctor.report import OK, PROBLEM, Finding

LOCAL, REMOTE = 1000, 32  # episodes whose rows are read; for remote data, each may be a request


class Timestamps:
    """Timestamps of episodes, read without large columns. Each episode is read once.

    Attributes:
        errors: per episode that cannot be read, or whose timestamps do not rise.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._reader = RowReader(dataset, keys=("timestamp", "frame_index"))
        self._found: dict[int, npt.NDArray[np.float32]] = {}
        self.errors: dict[int, DatasetError] = {}

    def of(self, episode: int) -> npt.NDArray[np.float32] | None:
        """(L,) seconds of the `episode`-th selected episode; None if it has an error. Raises StorageError."""
        if episode not in self._found and episode not in self.errors:
            try:
                self._found |= {e: rows["timestamp"] for e, rows in self._reader.read(episode).items()}
            except DatasetError as error:
                self.errors[episode] = error
        return self._found.get(episode)


def spread(dataset: Dataset, episodes: Sequence[int]) -> list[int]:
    """The episodes to check, evenly spread over these."""
    most = min(len(episodes), REMOTE if dataset.data_store.remote else LOCAL)
    return [episodes[i] for i in np.linspace(0, len(episodes) - 1, most).round().astype(int).tolist()]


def examine(dataset: Dataset, camera: str, tables: Iterable[VideoIndex], timestamps: Timestamps) -> Finding:
    """Checks that the rows of episodes in these files have their frames there. Raises StorageError."""
    files = dataset.table.video[camera]
    number = {path: n for n, path in enumerate(files.paths)}
    tables_by_number = {number[table.path]: table for table in tables}
    index = files.index[dataset.rows]
    looked_at = spread(dataset, np.flatnonzero(np.isin(index, list(tables_by_number))).tolist())
    faults = dict(_short(dataset, camera))
    for episode in looked_at:
        found = timestamps.of(episode)
        why = None if found is None else _fault(dataset, camera, tables_by_number[int(index[episode])], episode, found)
        if why:
            faults[episode] = why
    if not faults:
        text = f"each row has a frame of its episode, in {len(looked_at)} checked episodes of {dataset.num_episodes}"
        return Finding("dataset", f"{camera} timestamps", OK, text)
    first = min(faults)
    more = f"; {len(faults)} of {dataset.num_episodes} episodes have such faults" if len(faults) > 1 else ""
    remedy = "exclude these episodes (episodes=...), or record or convert the dataset again"
    return Finding(
        "dataset", f"{camera} timestamps", PROBLEM, f"episode {dataset.episodes[first]}{faults[first]}{more}", remedy
    )


def _fault(dataset: Dataset, camera: str, table: VideoIndex, episode: int, timestamp: npt.NDArray[np.float32]) -> str | None:
    interval = dataset.table.interval(camera, dataset.rows[episode])
    lacking = find_packets(table, interval, timestamp, dataset.fps) == LACKING
    if not lacking.any():
        return None
    frame = int(np.argmax(lacking))
    where = dataset.data_store.where(table.path)
    return f", frame {frame}: {where}: {explain(table, interval, float(timestamp[frame]), dataset.fps)}"


def _short(dataset: Dataset, camera: str) -> Iterator[tuple[int, str]]:
    """Episodes whose interval in the file is too short for their frames, by the metadata alone."""
    start, stop = (times[camera][dataset.rows] for times in (dataset.table.start, dataset.table.stop))
    for episode in np.flatnonzero(stop - start <= (dataset.lengths - 1 + TOLERANCE) / dataset.fps).tolist():
        yield (
            episode,
            (
                f": meta/episodes: from_timestamp {start[episode]:.4f} s to to_timestamp {stop[episode]:.4f} s is too short "
                f"for its {counted(dataset.lengths[episode], 'frame')} at {dataset.fps:g} fps"
            ),
        )

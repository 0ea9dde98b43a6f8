"""Checks that each row has a frame of its episode, of the promised size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DecodeError, counted
from dali_stream.mp4.index import LACKING, Int64, VideoIndex
from dali_stream.mp4.timing import TOLERANCE, explain, find_packets
from dali_stream.tools.doctor.report import OK, PROBLEM, Finding
from dali_stream.tools.doctor.rows import Rows


class Timing:
    """The frames of a camera's rows, file by file.

    Attributes:
        faults: per episode, its first row without a frame, and why.
        checked: episodes that were looked at.
    """

    def __init__(self, dataset: Dataset, camera: str, rows: Rows) -> None:
        self._dataset, self._camera, self._rows = dataset, camera, rows
        self._files = VideoFiles(dataset, camera)
        self.faults = dict(self._short())
        self.checked = 0

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
        return packets

    def finding(self) -> Finding:
        """What was found in all files."""
        dataset, faults, name = self._dataset, self.faults, f"{self._camera} timestamps"
        if not faults:
            text = f"each row has a frame of its episode, in {self.checked} checked episodes of {dataset.num_episodes}"
            return Finding("dataset", name, OK, text)
        first = min(faults)
        more = f"; {len(faults)} of {dataset.num_episodes} episodes have such faults" if len(faults) > 1 else ""
        remedy = "exclude these episodes (episodes=...), or record or convert the dataset again"
        return Finding("dataset", name, PROBLEM, f"episode {dataset.episodes[first]}{faults[first]}{more}", remedy)

    def _short(self) -> Iterator[tuple[int, str]]:
        """Episodes whose interval in the file is too short for their frames, by the metadata alone."""
        dataset = self._dataset
        start, stop = (times[self._camera][dataset.rows] for times in (dataset.table.start, dataset.table.stop))
        for episode in np.flatnonzero(stop - start <= (dataset.lengths - 1 + TOLERANCE) / dataset.fps).tolist():
            yield (
                episode,
                f": meta/episodes: from_timestamp {start[episode]:.4f} s to to_timestamp {stop[episode]:.4f} s is too short "
                f"for its {counted(int(dataset.lengths[episode]), 'frame')} at {dataset.fps:g} fps",
            )

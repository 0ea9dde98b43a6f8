"""Rows and video indices of the episodes that are coming up, within a byte budget.

The rows of all resident episodes lie end to end in one array per feature, so that the windows of a whole batch are one
gather per feature. A camera's frames are one more column: the sample in the episode's MP4 that shows each row.
Encoded pictures of local files stay where they are and are read when a clip is packed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError
from dali_stream.rows import Columns, RowReader
from dali_stream.video.table import SampleTable, read_table

Int64 = npt.NDArray[np.int64]
SAMPLE = "sample in the video of "  # prefix of the columns that map rows to samples
LACKING = -1  # the video shows nothing at that row's time


class _Block(NamedTuple):
    start: int
    length: int
    object_bytes: int


class Residency:
    """What is at hand. Used by one thread.

    Args:
        dataset: the selected part of a dataset.
        budget: bytes that rows and indices may take.
    """

    def __init__(self, dataset: Dataset, budget: int) -> None:
        self._dataset, self._budget = dataset, budget
        self._row_budget = budget - budget // 4  # a quarter is for the indices of MP4s
        self._reader = RowReader(dataset)
        self._columns: Columns = {}
        self._start = np.full(dataset.num_episodes, -1, np.int64)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # least recently used first
        self._used = 0
        self._object_bytes = 0
        self._tables: OrderedDict[str, SampleTable] = OrderedDict()
        self._broken: dict[str, DecodeError] = {}

    def load(self, episodes: Int64) -> None:
        """Makes the rows of these episodes resident; others go where the budget wants it, the longest unused first.

        Raises:
            DatasetError: rows are missing or broken.
            DaliStreamError: these episodes alone exceed the budget.
        """
        needed = set(episodes.tolist())
        for episode in sorted(needed):
            if episode not in self._blocks:
                for found, columns in self._reader.read(episode).items():
                    if found not in self._blocks:
                        self._admit(found, columns, needed)
            self._blocks.move_to_end(episode)

    def gather(self, key: str, episode: Int64, frame: Int64) -> npt.NDArray[Any]:
        """Values of a feature: `episode` is (B,), `frame` (B,) or (B, T); the result has the shape of `frame` in front."""
        start = self._start[episode]
        return self._columns[key][(start if frame.ndim == 1 else start[:, None]) + frame]

    def samples(self, camera: str, episode: Int64, frame: Int64) -> Int64:
        """Samples that show these (B, T) frames in their episodes' files; `LACKING` where nothing is shown then."""
        return self.gather(SAMPLE + camera, episode, frame).astype(np.int64)

    def table(self, camera: str, episode: int) -> SampleTable:
        """The sample table of the file that holds an episode. Raises DecodeError where it has none."""
        files = self._dataset.table.video[camera]
        path = files.paths[files.index[self._dataset.rows[episode]]]
        if path in self._broken:
            raise self._broken[path]
        if path not in self._tables:
            try:
                self._tables[path] = read_table(self._dataset.data_store, path)
            except (DecodeError, DatasetError) as error:  # DatasetError: there is no such file
                self._broken[path] = broken = DecodeError(str(error))
                raise broken from error
            while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > self._budget // 4:
                self._tables.popitem(last=False)
        self._tables.move_to_end(path)
        return self._tables[path]

    def resident_bytes(self) -> int:
        """Memory of rows and indices."""
        columns = sum(values.nbytes for values in self._columns.values())
        return columns + self._object_bytes + sum(table.nbytes for table in list(self._tables.values()))

    def _admit(self, episode: int, columns: Columns, needed: set[int]) -> None:
        length = int(self._dataset.lengths[episode])
        for camera in self._dataset.videos:
            columns[SAMPLE + camera] = self._map(camera, episode, columns["timestamp"])
        row_bytes = sum(values.nbytes for values in columns.values()) // length + 1
        object_bytes = sum(len(v) for values in columns.values() if values.dtype == object for v in values)
        live = sum(block.length for block in self._blocks.values()) + length

        def taken(rows: int) -> int:
            return rows * row_bytes + self._object_bytes + object_bytes

        for old in list(self._blocks):
            if taken(live + live // 2) <= self._row_budget:  # the half is room to move in, see `_make_room`
                break
            if old not in needed:
                live -= self._evict(old)
        if taken(live) > self._row_budget:
            if episode not in needed:
                return  # came along in a row group; it is read again when its time comes
            raise DaliStreamError(
                f"memory_budget is {self._budget} bytes, of which {self._row_budget} are for rows, and the rows of the "
                f"{len(needed)} episodes of one batch need {taken(live)}; give a larger memory_budget, or a smaller batch_size"
            )
        most = (self._row_budget - taken(0)) // row_bytes
        self._make_room(length, min(live + live // 2, most), columns)
        for key, values in columns.items():
            self._columns[key][self._used : self._used + length] = values
        self._blocks[episode] = _Block(self._used, length, object_bytes)
        self._start[episode] = self._used
        self._used += length
        self._object_bytes += object_bytes

    def _evict(self, episode: int) -> int:
        block = self._blocks.pop(episode)
        self._start[episode] = -1
        self._object_bytes -= block.object_bytes
        for values in self._columns.values():
            if values.dtype == object:
                values[block.start : block.start + block.length] = None
        return block.length

    def _make_room(self, length: int, capacity: int, columns: Columns) -> None:
        """Has `length` free rows at the end of the arrays. Evicted episodes leave holes; when the end is reached, what is
        left moves to new arrays of `capacity` rows."""
        if self._columns and self._used + length <= len(next(iter(self._columns.values()))):
            return
        old, self._columns = self._columns, {}
        for key, values in columns.items():
            self._columns[key] = np.empty((capacity, *values.shape[1:]), values.dtype)
        used = 0
        for episode, block in self._blocks.items():
            for key, values in old.items():
                self._columns[key][used : used + block.length] = values[block.start : block.start + block.length]
            self._blocks[episode] = block._replace(start=used)
            self._start[episode] = used
            used += block.length
        self._used = used

    def _map(self, camera: str, episode: int, timestamp: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        """Per row, the sample shown at the row's time. Time in the file is the episode's start there plus the timestamp.

        A picture counts as shown at a time within a quarter of a frame of it: no other can be meant, and files whose
        clock is coarse (milliseconds) still fit.
        """
        start = self._dataset.table.start[camera][self._dataset.rows[episode]]
        try:
            table = self.table(camera, episode)
        except DecodeError:  # reported when a frame of it is asked for
            return np.full(len(timestamp), LACKING, np.int32)
        samples, away = table.nearest(start + timestamp.astype(np.float64))
        return np.where(away <= 0.25 / self._dataset.fps, samples, LACKING).astype(np.int32)

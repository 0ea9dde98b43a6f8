"""Indices (sample tables) of the video files in use. A file's index is read when its first episode comes up."""

from __future__ import annotations

import threading
from collections import OrderedDict

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError, DecodeError
from dali_stream.once import Once
from dali_stream.storage import Store
from dali_stream.video.table import SampleTable, read_table


class Tables:
    """Safe to use from several threads.

    Args:
        dataset: the selected part of a dataset.
        budget: bytes that the tables may take; one is kept whatever it takes.

    Attributes:
        budget: as given.
        nbytes: that they take.
        index_bytes: of the `moov` boxes that have been read, each counted once.
    """

    def __init__(self, dataset: Dataset, budget: int) -> None:
        self._dataset, self.budget = dataset, budget
        self._tables: OrderedDict[str, SampleTable] = OrderedDict()  # least recently used first
        self._broken: dict[str, DecodeError] = {}
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._once = Once()
        self.nbytes = self.index_bytes = 0

    def of(self, camera: str, episode: int, store: Store) -> SampleTable:
        """The sample table of the file that holds an episode, read from `store`. Raises DecodeError where it has none."""
        path = self._path(camera, episode)
        with self._lock:
            if table := self._tables.get(path):
                self._tables.move_to_end(path)
                return table
            if path in self._broken:
                raise self._broken[path]
        return self._once(path, lambda: self._read(path, store))

    def has(self, camera: str, episode: int) -> bool:
        """Whether `of` would have nothing to read."""
        path = self._path(camera, episode)
        return path in self._tables or path in self._broken

    def _path(self, camera: str, episode: int) -> str:
        files = self._dataset.table.video[camera]
        return files.paths[files.index[self._dataset.rows[episode]]]

    def _read(self, path: str, store: Store) -> SampleTable:
        try:
            table = read_table(store, path)
        except (DecodeError, DatasetError) as error:  # DatasetError: there is no such file
            broken = DecodeError(str(error))
            with self._lock:
                self._broken[path] = broken
            raise broken from error
        with self._lock:
            self.index_bytes += 0 if path in self._seen else table.index_bytes
            self._seen.add(path)
            if path not in self._tables:
                self.nbytes += table.nbytes
            self._tables[path] = table
            while len(self._tables) > 1 and self.nbytes > self.budget:
                self.nbytes -= self._tables.popitem(last=False)[1].nbytes
        return table

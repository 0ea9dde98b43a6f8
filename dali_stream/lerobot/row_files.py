"""Open data files of a dataset, and the search for the files of an episode whose metadata names the wrong one."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from dali_stream.lerobot.dataset_files import DatasetFiles
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.parquet import parquet_errors
from dali_stream.lerobot.row_file import RowFile
from dali_stream.lerobot.row_search import RowSearch, data_files
from dali_stream.storage import Store
from dali_stream.system.log_records import DATASET_LOG
from dali_stream.system.process import trim_memory
from dali_stream.system.workers import Once

_log = logging.getLogger(DATASET_LOG)
_KEPT = 256  # maximum number of files whose footers are kept; the least recently used ones are dropped first
_MANY = 1000  # number of row groups above which memory is returned to the operating system after parsing


class RowFiles:
    """Data files of a dataset, which are opened when they are needed. Safe to use from several threads.

    Args:
        dataset: Dataset that contains the files.
        store: Store to read from.
        features: Features to read, by key.

    Attributes:
        misnamed: Data files that the metadata names for episodes whose rows are, at least in part, in other files.
        without_rows: Those of `misnamed` that contain no row of such an episode.
    """

    def __init__(self, dataset: DatasetFiles, store: Store, features: Mapping[str, Feature]) -> None:
        self._dataset, self._store, self._features = dataset, store, features
        self._open: OrderedDict[str, RowFile] = OrderedDict()
        self._lock, self._once = threading.Lock(), Once()
        self._search: RowSearch | None = None
        self.misnamed, self.without_rows = set[str](), set[str]()

    def open(self, path: str, number: int | None = None) -> RowFile:
        """Return a data file by its path, and its number if it is known. Files are cached with their footers."""
        with self._lock:
            file = self._open.get(path)
        if file is None:
            number = self._dataset.table.data.number(path) if number is None else number
            file = self._once(path, lambda: RowFile(self._dataset, self._store, path, number, self._features))
            if len(file.groups.rows) > _MANY:  # parsing such a footer takes several MB
                trim_memory()
        with self._lock:
            self._open[path] = file
            self._open.move_to_end(path)
            while len(self._open) > _KEPT:
                self._open.popitem(last=False)
        return file

    def candidates(self, index: int, named: str) -> Iterator[list[str]]:
        """Yield lists of files that may contain the rows of an episode together.

        Args:
            index: Index of the episode.
            named: File that the metadata names.
        """
        if self._dataset.info.is_v2:  # the name of a file contains the index of its episode
            yield [named]
            return
        search = self._once("search", self._row_search)
        yield search.in_order(index, named)
        if not self._store.remote:  # thousands of footers take too long over a network
            yield search.anywhere(index)

    def note(self, index: int, named: str, paths: list[str]) -> None:
        """Record that the rows of an episode are in `paths`. Warn the first time that the metadata names another file."""
        if paths == [named]:
            return
        with self._lock:
            is_first = not self.misnamed
            self.misnamed.add(named)
            self.without_rows |= {named} - {*paths}
        if is_first:
            _log.warning(
                "%s: the metadata names this file for episode %d, whose rows are in %s. Such rows are found by their "
                "episode_index, which takes more reads. `dali-stream prepare URI OUT` writes a dataset without this defect",
                self._store.where(named), index, " and ".join(paths),
            )  # fmt: skip

    def _row_search(self) -> RowSearch:
        if self._search is None:
            self._search = RowSearch(data_files(self._store, self._dataset.table.data.paths), self._episodes_of)
        return self._search

    def _episodes_of(self, path: str) -> tuple[int, int]:
        with parquet_errors(self._store, path):
            return self.open(path).episodes()

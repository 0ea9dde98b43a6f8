"""Search for the data files that contain the rows of an episode, for datasets whose metadata names the wrong ones.

LeRobot finds rows by their `episode_index` in all data files. Its converter and its merge tool have written metadata that names
the next file, a file that does not exist, or only the last file of an episode that continues from one file into the next.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Callable, Iterable, Sequence

from dali_stream.errors import DatasetError
from dali_stream.lerobot.file_names import parquet_files
from dali_stream.storage import Store
from dali_stream.storage.store import checked


class RowSearch:
    """Search for data files by the episodes that they contain. Safe to use from several threads.

    Even if the metadata names wrong files, the episodes usually increase from file to file. A bisection then needs the footers
    of a few files. The range of episodes of each file is kept.

    Args:
        paths: Paths of all data files.
        episodes: Function that returns the lowest and the highest episode index in a file, or (0, -1) if it has no rows. It
            raises `DatasetError` if the file is missing or broken. Such a file is ignored.
    """

    def __init__(self, paths: Iterable[str], episodes: Callable[[str], tuple[int, int]]) -> None:
        self._paths, self._episodes = sorted(paths), episodes
        self._known: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def in_order(self, episode: int, named: str) -> list[str]:
        """Return the files that contain an episode, in the order of its rows, if episodes increase from file to file.

        Args:
            episode: Index of the episode.
            named: File that the metadata names. This file and its neighbours are examined first.
        """
        with self._lock:
            start = bisect.bisect_left(self._paths, named)
            low, high = 0, len(self._paths)
            while low < high:  # files before `low` have earlier episodes only, and files from `high` on have none of them
                middle = next((i for i in (start, start - 1, start + 1) if low <= i < high), (low + high) // 2)
                if (episodes := self._range(middle)) is None:
                    high -= 1
                elif episodes[1] < episode:
                    low = middle + 1
                else:
                    high = middle
            found: list[str] = []
            while low < len(self._paths):
                if (episodes := self._range(low)) is None:
                    continue
                if episodes[0] <= episode:
                    found.append(self._paths[low])
                if episodes[1] > episode:
                    break
                low += 1
            return found

    def anywhere(self, episode: int) -> list[str]:
        """Return the files that may contain an episode, in order of their names. This reads the footers of all files."""
        with self._lock:
            for number in reversed(range(len(self._paths))):
                self._range(number)
            return [path for path in self._paths if self._known[path][0] <= episode <= self._known[path][1]]

    def _range(self, number: int) -> tuple[int, int] | None:
        """Return the lowest and the highest episode index in a file. Remove a file without rows, and return None."""
        path = self._paths[number]
        if path not in self._known:
            try:
                self._known[path] = self._episodes(path)
            except DatasetError:
                self._known[path] = 0, -1
        if self._known[path] == (0, -1):
            del self._paths[number]
            return None
        return self._known[path]


def data_files(store: Store, named: Sequence[str]) -> set[str]:
    """Return the paths of all data files. Without listings (HTTP), these are the named files and those numbered next to them.

    Args:
        store: Store of the data files.
        named: Data files that the metadata names.
    """
    folder, *rest = checked(named[0]).rsplit("/", 2)  # LeRobot's paths are data/chunk-000/file-000.parquet
    if store.listings and len(rest) == 2:
        return {*parquet_files(store, folder)}
    beside = {_beside(path, step) for path in named for step in (-1, 1)}
    return {*named, *beside} - {""}


def _beside(path: str, step: int) -> str:
    """Return a path whose last number is changed by `step`, or "" if that is impossible."""
    match = re.search(r"\d+(?=\D*$)", path)
    number = int(match[0]) + step if match else -1
    return f"{path[: match.start()]}{number:0{len(match[0])}d}{path[match.end() :]}" if match and number >= 0 else ""

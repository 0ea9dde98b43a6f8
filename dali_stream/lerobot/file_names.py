"""The names that LeRobot gives to files, for sources without listings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

_META = (
    "info.json",
    "stats.json",
    "tasks.parquet",
    "subtasks.parquet",
    *("episodes.jsonl", "episodes_stats.jsonl", "tasks.jsonl"),  # of v2.x
)


def guessed_files(folder: str, exists: Callable[[str], bool]) -> list[str]:
    """The files below a folder of a dataset, found by checking each name that LeRobot writes.

    Args:
        folder: `meta`, or one that holds `chunk-000/file-000.parquet` and so on, as `meta/episodes` and `data` do.
        exists: whether there is a file.
    """
    folder = folder.rstrip("/")
    if folder == "meta":
        return sorted(
            [name for name in (f"meta/{name}" for name in _META) if exists(name)] + guessed_files("meta/episodes", exists)
        )
    return list(_numbered(folder, exists))


def _numbered(folder: str, exists: Callable[[str], bool]) -> Iterator[str]:
    """Files are numbered up to `chunks_size` in a chunk, and then from 0 in the next; no number is left out."""
    for chunk in itertools.count():
        found = list(
            itertools.takewhile(exists, (f"{folder}/chunk-{chunk:03d}/file-{file:03d}.parquet" for file in itertools.count()))
        )
        if not found:
            return
        yield from found

"""Search for the files of a dataset by LeRobot's naming scheme, for storage that cannot list a folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

_META = (
    "info.json",
    "stats.json",
    "tasks.parquet",
    "subtasks.parquet",
    *("episodes.jsonl", "episodes_stats.jsonl", "tasks.jsonl"),  # in v2.x
)


def guessed_files(folder: str, exists: Callable[[str], bool]) -> list[str]:
    """Return the files in a folder of a dataset, by checking each name that LeRobot writes.

    Args:
        folder: Path of `meta`, or of a folder that contains files such as `chunk-000/file-000.parquet`, for example
            `meta/episodes` or `data`.
        exists: Function that returns whether a file exists.
    """
    folder = folder.rstrip("/")
    if folder == "meta":
        return sorted(
            [name for name in (f"meta/{name}" for name in _META) if exists(name)] + guessed_files("meta/episodes", exists)
        )
    return list(numbered_files(folder, exists))


def numbered_files(folder: str, exists: Callable[[str], bool]) -> Iterator[str]:
    """Yield the Parquet files of all chunks. Files are numbered from 0 in each chunk, without gaps."""
    for chunk in itertools.count():
        chunk_files = list(
            itertools.takewhile(exists, (f"{folder}/chunk-{chunk:03d}/file-{file:03d}.parquet" for file in itertools.count()))
        )
        if not chunk_files:
            return
        yield from chunk_files

"""Names of the files of a dataset, for storage that can list a folder, and for storage that cannot."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator

from dali_stream.errors import StorageError
from dali_stream.storage import Store
from dali_stream.system.log_records import DATASET_LOG

_META = (
    "info.json",
    "stats.json",
    "tasks.parquet",
    "subtasks.parquet",
    *("episodes.jsonl", "episodes_stats.jsonl", "tasks.jsonl"),  # in v2.x
)

_MANY = 32  # number of files after which a name without a file is tried
_NO_FILE = "no-such-file.parquet"
_log = logging.getLogger(DATASET_LOG)


def parquet_files(store: Store, folder: str) -> list[str]:
    """Return the paths of the Parquet files in the folders of a folder, `<folder>/*/*.parquet`, which is LeRobot's rule.

    Other files, such as backups, are no part of a dataset. Hidden files are left out with a note in the log.
    """
    depth = folder.count("/") + 2
    paths = [path for path in store.files(folder) if path.endswith(".parquet") and path.count("/") == depth]
    if hidden := [path for path in paths if "/." in path]:
        _log.info("%s and %d other hidden files are ignored", store.where(hidden[0]), len(hidden) - 1)
    return [path for path in paths if "/." not in path]


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
    """Yield the Parquet files of all chunks. Files are numbered from 0 in each chunk, without gaps.

    Raises:
        StorageError: If the storage says of any name that the file exists, as some web servers do.
    """
    count = 0
    for chunk in itertools.count():
        for file in itertools.count():
            path = f"{folder}/chunk-{chunk:03d}/file-{file:03d}.parquet"
            if not exists(path):
                break
            count += 1
            if count == _MANY and exists(f"{folder}/{_NO_FILE}"):
                raise StorageError(
                    f"{path}: the server answers with success for any name, so it does not tell which files exist. Configure "
                    "it to answer 404 for files that do not exist"
                )
            yield path
        if file == 0:
            return

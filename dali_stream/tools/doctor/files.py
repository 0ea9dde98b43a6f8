"""Checks that the files of a dataset exist."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError, counted
from dali_stream.tools.describe import selected_files
from dali_stream.tools.doctor.report import OK, PROBLEM, Finding
from dali_stream.tools.doctor.rows import REMOTE

_AT_A_TIME = 16  # requests
_SHOWN = 5  # missing files named


def missing_files(dataset: Dataset, deep: bool = False) -> tuple[list[str], int]:
    """The Parquet and video files of the selected episodes and cameras that do not exist, and how many were looked for.

    A source with listings takes one listing per folder. Without listings (HTTP), up to 32 files are looked for, evenly
    spread, or all if `deep`: each takes a request.

    Raises:
        DatasetError: a path leads out of the dataset.
        StorageError: the source cannot be reached.
    """
    paths = selected_files(dataset)
    store = dataset.data_store
    if store.remote and store.listings:
        there = {name for folder in {path.partition("/")[0] for path in paths} for name in store.files(folder)}
        return [path for path in paths if path not in there], len(paths)
    if store.remote and not deep:
        paths = paths[:: -(-len(paths) // REMOTE)]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        exists = list(pool.map(store.exists, paths))
    return [path for path, found in zip(paths, exists, strict=True) if not found], len(paths)


def examine(dataset: Dataset, deep: bool) -> Finding:
    """The finding on `missing_files`. Raises StorageError."""
    try:
        missing, looked_for = missing_files(dataset, deep)
    except DatasetError as error:
        return Finding("dataset", "files", PROBLEM, str(error), "correct data_path and video_path in meta/info.json")
    if not missing:
        return Finding("dataset", "files", OK, f"{counted(looked_for, 'file')} of rows and video, none missing")
    named = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    text = f"{dataset.data_store.address}: {len(missing)} of {counted(looked_for, 'file')} missing: {named}"
    remedy = "copy or fetch them again, or exclude their episodes (episodes=...); `dali-stream info --json` lists all"
    return Finding("dataset", "files", PROBLEM, text, remedy)

"""`index`: reads every file's index into the cache ahead of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError, DecodeError
from dali_stream.lerobot.metadata import parquet_errors
from dali_stream.lerobot.row_file import read_schema
from dali_stream.mp4.index import read_index
from dali_stream.tools.description import used
from dali_stream.tools.work import Work

THREADS = 16  # nearly all time is spent waiting for responses


@dataclass(frozen=True)
class IndexReport:
    """What was read.

    Attributes:
        files: video and Parquet files of the selected cameras and episodes.
        fetched_bytes: from the network. With everything cached, at most a byte of each file, to check whether it has changed.
        cached_bytes: from the cache.
        broken: files without a readable index, and why.
    """

    files: int
    fetched_bytes: int
    cached_bytes: int
    broken: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return dataclasses.asdict(self)


def index(dataset: Dataset, progress: Callable[[int, int], None] = lambda done, total: None) -> IndexReport:
    """Reads the index (`moov`) of each video file and the footer of each Parquet file through the dataset's cache, so that
    training starts without waiting for them.

    Files in the cache are not fetched again, so an interrupted run resumes.

    Args:
        dataset: a remote dataset with a `cache_dir`.
        progress: called as (files done, files in all), in the caller's thread.

    Returns:
        What was read, and which files are broken.

    Raises:
        ValueError: the dataset is local.
        StorageError: the source cannot be reached.
    """
    if not dataset.data_store.remote:
        raise ValueError(
            f"{dataset.data_store.address} is local. Only remote datasets have a cache; local files are read in place"
        )
    jobs, traffic = _jobs(dataset), dataset.data_store.traffic
    fetched, cached = traffic.fetched_bytes, traffic.cached_bytes
    work = Work(lambda _, done, total: progress(done, total), dataset.close, THREADS)
    errors = work.each("index", list(jobs.values()), _error)
    return IndexReport(
        files=len(jobs),
        fetched_bytes=traffic.fetched_bytes - fetched,
        cached_bytes=traffic.cached_bytes - cached,
        broken={path: why for path, why in sorted(zip(jobs, errors, strict=True)) if why},
    )


def _jobs(dataset: Dataset) -> dict[str, Callable[[], object]]:
    """The files of the selected cameras and episodes, each with what reads its index."""
    store, data = dataset.data_store, dataset.table.data
    jobs: dict[str, Callable[[], object]] = {}
    for number in dict.fromkeys(data.index[dataset.rows].tolist()):
        jobs[data.paths[number]] = partial(_read_footer, dataset, number)
    for camera in dataset.videos:
        jobs |= {path: partial(read_index, store, path) for path in used(dataset, dataset.table.video[camera])}
    return jobs


def _read_footer(dataset: Dataset, number: int) -> None:
    """Reads the footer of a data file as the loader does. Raises DatasetError if it is missing or broken."""
    store, path = dataset.data_store, dataset.table.data.paths[number]
    with parquet_errors(store, path):
        read_schema(dataset, store, number)


def _error(read: Callable[[], object]) -> str | None:
    """Reads an index; returns the error of a broken or missing file."""
    try:
        read()
    except (DatasetError, DecodeError) as error:
        return str(error)
    return None

"""`dali-stream info URI --index`: reads the index of every file into the cache before training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError, DecodeError
from dali_stream.lerobot.parquet import parquet_errors
from dali_stream.lerobot.row_file import read_schema
from dali_stream.mp4.index import read_index
from dali_stream.tools.description import used
from dali_stream.tools.work import in_threads

THREADS = 16  # nearly all time is spent waiting for responses


@dataclass(frozen=True)
class IndexReport:
    """Result of `index`.

    Attributes:
        files: Number of video and Parquet files of the selected cameras and episodes.
        fetched_bytes: Number of bytes read from the network. For a cached file, at most one byte is read, to check for changes.
        cached_bytes: Number of bytes read from the cache.
        broken: Error message of each file without a readable index, by path.
    """

    files: int
    fetched_bytes: int
    cached_bytes: int
    broken: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return dataclasses.asdict(self)


def index(dataset: Dataset, progress: Callable[[int, int], None] = lambda done, total: None) -> IndexReport:
    """Read the index (`moov`) of each video file and the footer of each Parquet file into the dataset's cache.

    Training then starts without waiting for them. Cached files are not fetched again, so an interrupted run resumes.

    Args:
        dataset: Remote dataset with a `cache_dir`.
        progress: Function that is called in the caller's thread with (files done, number of files).

    Returns:
        Numbers of files and bytes, and the broken files.

    Raises:
        ValueError: If the dataset is local.
        StorageError: If the source cannot be reached.
    """
    if not dataset.data_store.remote:
        raise ValueError(
            f"{dataset.data_store.address} is local. Only remote datasets have a cache, because local files are read in place"
        )
    jobs, traffic = _jobs(dataset), dataset.data_store.traffic
    fetched, cached = traffic.fetched_bytes, traffic.cached_bytes
    progress(0, len(jobs))
    broken: dict[str, str] = {}
    with closing(in_threads(jobs, THREADS, dataset.close)) as reads:
        for done, (path, read) in enumerate(reads, 1):
            try:
                read.result()
            except (DatasetError, DecodeError) as error:
                broken[path] = str(error)
            progress(done, len(jobs))
    return IndexReport(
        files=len(jobs),
        fetched_bytes=traffic.fetched_bytes - fetched,
        cached_bytes=traffic.cached_bytes - cached,
        broken=dict(sorted(broken.items())),
    )


def _jobs(dataset: Dataset) -> dict[str, Callable[[], object]]:
    """Return {path: function that reads the index} of the files of the selected cameras and episodes."""
    data = dataset.table.data
    numbers = dict.fromkeys(data.index[dataset.rows].tolist())
    jobs: dict[str, Callable[[], object]] = {data.paths[number]: partial(_read_footer, dataset, number) for number in numbers}
    for camera in dataset.videos:
        jobs |= {path: partial(read_index, dataset.data_store, path) for path in used(dataset, dataset.table.video[camera])}
    return jobs


def _read_footer(dataset: Dataset, number: int) -> None:
    """Read the footer of a data file as the loader does. Raises DatasetError if it is missing or broken."""
    with parquet_errors(dataset.data_store, dataset.table.data.paths[number]):
        read_schema(dataset, dataset.data_store, number)

"""`convert`: a dataset of LeRobot v2.0 or v2.1 as v3.0."""

from __future__ import annotations

import os

from dali_stream.dataset import Dataset
from dali_stream.tools.output.work import Progress
from dali_stream.tools.reshard import Report, reshard


def convert(
    dataset: Dataset,
    out: str | os.PathLike[str],
    *,
    data_file_size: int | str = "100MiB",
    video_file_size: int | str = "200MiB",
    progress: Progress | None = None,
) -> Report:
    """Converts a dataset of LeRobot v2.0 or v2.1 to v3.0 in a local folder, and verifies it.

    Rows and encoded frames stay as they are; statistics of episodes are aggregated as LeRobot's converter does. The source is
    not changed. The result has the same `fingerprint`, so that a run started on the source resumes on it; a commit of the Hub
    is a part of the fingerprint, and then it does not. `reshard` does the work: see there for arguments, resuming and errors.

    Returns:
        What changed: files, bytes and requests, before and after.

    Raises:
        ValueError: as `reshard`, or the dataset is of v3.0 already.
        DatasetError, DecodeError, StorageError, DaliStreamError: as `reshard`.
    """
    if not dataset.version.startswith("v2."):
        raise ValueError(f"{dataset.uri} is of {dataset.version} already; to rewrite it for streaming, use reshard")
    return reshard(dataset, out, data_file_size=data_file_size, video_file_size=video_file_size, progress=progress)

"""`reshard`: writing a dataset, and reading all of it back. `convert` also writes correct times."""

from __future__ import annotations

import contextlib
import os

from dali_stream.arguments import byte_count
from dali_stream.dataset import Dataset
from dali_stream.mp4.timing import TOLERANCE
from dali_stream.tools.output.checks import check_outside
from dali_stream.tools.output.folder import Folder
from dali_stream.tools.output.work import Progress
from dali_stream.tools.rewriting.job import Job
from dali_stream.tools.rewriting.report import RewriteReport
from dali_stream.tools.rewriting.verify import verify

STAGE = ".reshard"


def reshard(
    dataset: Dataset,
    out: str | os.PathLike[str],
    *,
    data_file_size: int | str = "100MiB",
    video_file_size: int | str = "200MiB",
    progress: Progress | None = None,
) -> RewriteReport:
    """Rewrites a dataset for streaming into a local folder, and verifies it: large row groups, few files, MP4s with their
    index in front. Rows and encoded frames stay as they are. A dataset of v2.x becomes one of v3.0.

    An interrupted run resumes when it is started again with the same arguments. The folder becomes a dataset only after
    verification. Up to 4 files are written at a time; each takes the memory of one row group of the source, encoded and
    decoded, and of one that is written, or of 8 MiB of video; 16 video indices are kept in all.

    Args:
        dataset: a whole dataset, local or remote.
        out: a folder that is empty, does not exist, or holds the unfinished copy of an earlier run.
        data_file_size, video_file_size: upper bound of a file in bytes, as an int or such as "100MiB"; an episode that is
            larger gets a file of its own.
        progress: called as (stage, done, total).

    Returns:
        What changed: files, bytes and requests, before and after.

    Raises:
        ValueError: an argument is invalid, `out` holds something else or overlaps the source, or only a part of the dataset
            is selected.
        DatasetError, DecodeError: the source is broken. The message names file, episode and camera.
        StorageError: the source cannot be read.
        DaliStreamError: verification failed. The message names file, episode and camera.
    """
    return _rewrite(dataset, out, data_file_size, video_file_size, progress, regular=False)


def convert(
    dataset: Dataset,
    out: str | os.PathLike[str],
    *,
    data_file_size: int | str = "100MiB",
    video_file_size: int | str = "200MiB",
    progress: Progress | None = None,
) -> RewriteReport:
    """Convert a dataset to LeRobot v3.0 in a local folder, and verify it.

    Encoded frames stay as they are. Rows stay as they are, too, unless the dataset is opened with `clock="frame_index"` or a
    `tolerance_s` above the default: then `timestamp` becomes frame_index / fps, with new statistics. A `to_timestamp` that
    precedes the end of the episode's last frame is corrected. Statistics of the episodes of v2.1 are aggregated as LeRobot's
    converter does. The source is not changed.

    A copy with unchanged rows has the `fingerprint` of its source, so that a run that was started on the source can resume on
    the copy. The fingerprint of a Hub dataset contains the commit, so it differs. See `reshard` for arguments, resuming
    and errors.

    Returns:
        Number of files, bytes and requests, before and after.

    Raises:
        ValueError, DatasetError, DecodeError, StorageError, DaliStreamError: See `reshard`.
    """
    regular = dataset.clock == "frame_index" or dataset.tolerance_s > TOLERANCE / dataset.fps
    return _rewrite(dataset, out, data_file_size, video_file_size, progress, regular)


def _rewrite(
    dataset: Dataset,
    out: str | os.PathLike[str],
    data_file_size: int | str,
    video_file_size: int | str,
    progress: Progress | None,
    regular: bool,
) -> RewriteReport:
    sizes = byte_count(data_file_size, "data_file_size"), byte_count(video_file_size, "video_file_size")
    check_outside(dataset, out)
    job = Job(dataset, *sizes, progress, regular)
    with contextlib.closing(Folder(out, STAGE, job.identity)) as job.folder:
        report = job.report(verify(job, *job.write()))
        job.folder.finish()
    return report

"""`dali-stream convert`: a dataset of LeRobot v2.0 or v2.1 as v3.0."""

from __future__ import annotations

import dali_stream
from dali_stream.cli import arguments
from dali_stream.cli.reshard import DataFileSize, Json, Out, Uri, VideoFileSize, rewrite


def convert(
    uri: Uri,
    out: Out,
    data_file_size: DataFileSize = "100MiB",
    video_file_size: VideoFileSize = "200MiB",
    as_json: Json = False,
    revision: arguments.Revision = None,
    data_files_root: arguments.DataFilesRoot = None,
    cache_dir: arguments.CacheDir = None,
    storage_options: arguments.StorageOptions = None,
) -> None:
    """Convert a dataset of v2.0 or v2.1 to v3.0. dali_stream reads it without; other programs may need v3.0.

    Nothing is decoded, encoded or pushed, and URI is not changed: rows and encoded frames stay as they are, which is verified
    at the end. After an interruption, the same command resumes. OUT becomes a dataset only after verification.
    """
    place = {"revision": revision, "data_files_root": data_files_root, "cache_dir": cache_dir}
    sizes = {"data_file_size": data_file_size, "video_file_size": video_file_size}
    with arguments.opened(uri, storage_options=storage_options, **place) as dataset:
        rewrite(dali_stream.convert, dataset, out, sizes, as_json)

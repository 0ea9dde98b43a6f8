"""`dali-stream index`: reads the index of a remote dataset into the cache before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dali_stream
from dali_stream.cli import arguments, console
from dali_stream.errors import counted

if TYPE_CHECKING:
    from dali_stream.tools.indexing import IndexReport

_SHOWN = 20  # maximum number of broken files in the text


def index(
    uri: Annotated[str, typer.Argument(metavar="URI", help="A dataset on the Hub, in a bucket, or on a web server.")],
    cache_dir: Annotated[Path, typer.Option(metavar="DIR", help="The cache, as in Dataset(cache_dir=...).")],
    cache_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size limit of the cache, such as 200GiB. Default: none.")
    ] = None,
    cameras: arguments.Cameras = None,
    revision: arguments.Revision = None,
    data_files_root: arguments.DataFilesRoot = None,
    storage_options: arguments.StorageOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Read the index of every video and Parquet file into the cache, so that training starts without waiting for it.

    After an interruption, the same command resumes. The exit code is 1 if a file is broken.
    """
    place: dict[str, Any] = {"revision": revision, "data_files_root": data_files_root, "cache_dir": cache_dir}
    place |= {"storage_options": storage_options, "cache_bytes": cache_bytes, "cameras": arguments.names(cameras)}
    with arguments.opened(uri, **place) as dataset, console.progress("reading indices") as show:
        report = dali_stream.tools.index(dataset, show)
    if as_json:
        console.print_json(report.as_dict())
    else:
        _say(report)
    if report.broken:
        raise typer.Exit(1)


def _say(report: IndexReport) -> None:
    console.say(
        f"{counted(report.files, 'file')}: {console.megabytes(report.fetched_bytes)} fetched, "
        f"{console.megabytes(report.cached_bytes)} from the cache"
    )
    for error in list(report.broken.values())[:_SHOWN]:
        console.say(f"broken: {error}")
    if len(report.broken) > _SHOWN:
        console.say(f"and {len(report.broken) - _SHOWN} more broken files; --json lists all")

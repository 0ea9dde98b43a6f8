"""`dali-stream reshard`: the same dataset, laid out for streaming."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dali_stream.arguments import byte_count
from dali_stream.cli import arguments, console

if TYPE_CHECKING:
    from rich.table import Table

    from dali_stream.tools.reshard import Report

_FILES = ("footers", "indices")  # stages that count files; the others count bytes


def reshard(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The dataset, whole.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A local folder, empty or not there yet.")],
    data_file_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a Parquet file at most, unless one episode is larger.")
    ] = "100MiB",
    video_file_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of an MP4 file at most, unless one episode is larger.")
    ] = "200MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    revision: arguments.Revision = None,
    data_files_root: arguments.DataFilesRoot = None,
    cache_dir: arguments.CacheDir = None,
    storage_options: arguments.StorageOptions = None,
) -> None:
    """Write a dataset anew, laid out for streaming: large row groups, MP4s with their index in front, few files.

    Nothing is decoded or encoded: rows and encoded frames stay what they are, which is verified at the end. May be
    interrupted: the same command continues where it was. OUT is a dataset when it is done, and not before.
    """
    sizes = byte_count(data_file_size, "--data-file-size"), byte_count(video_file_size, "--video-file-size")
    from dali_stream.tools.reshard import reshard as write

    dataset = arguments.dataset(
        uri,
        revision=revision,
        data_files_root=data_files_root,
        storage_options=storage_options,
        cache_dir=cache_dir,
    )
    try:
        with console.progress() as bar:
            show = console.stages(bar, files=_FILES)
            report = write(dataset, out, data_file_size=sizes[0], video_file_size=sizes[1], progress=show)
    finally:
        dataset.close()
    if as_json:
        console.print_json(report.as_dict())
        return
    console.results().print(_table(report))
    typer.echo(f"{out}: {report.episodes} episodes, {report.frames} frames; every row and every encoded frame is verified")


def _table(report: Report) -> Table:
    made = console.table("", "source", "out", right=("source", "out"))
    source, out = report.source, report.out
    made.add_row("data files", str(source.data_files), str(out.data_files))
    made.add_row("video files", str(source.video_files), str(out.video_files))
    made.add_row("bytes on disk", console.megabytes(source.bytes), console.megabytes(out.bytes))
    for what, name in (("index", "indices of an epoch"), ("row", "rows of an epoch")):
        for count, show in (("requests", str), ("bytes", console.megabytes)):
            cells = [show(getattr(side, f"{what}_{count}")) for side in (source, out)]
            made.add_row(f"{name}, {count}", *cells)
    return made

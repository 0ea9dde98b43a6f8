"""`dali-stream reshard` rewrites a dataset for streaming. `dali-stream convert` writes v3.0 with correct times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import dali_stream
from dali_stream.cli import arguments, console
from dali_stream.errors import counted

if TYPE_CHECKING:
    from dali_stream.tools.rewriting import RewriteReport

_FILES = ("footers", "indices")  # stages that count files; the others count bytes


Uri = Annotated[str, typer.Argument(metavar="URI", help="The dataset, whole.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A local folder, empty or new.")]
DataFileSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest Parquet file, unless one episode is larger.")]
VideoFileSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest MP4 file, unless one episode is larger.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def reshard(
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
    """Rewrite a dataset for streaming: large row groups, MP4s with their index in front, few files.

    Nothing is decoded or encoded: rows and encoded frames stay as they are, which is verified at the end. After an
    interruption, the same command resumes. OUT becomes a dataset only after verification.
    """
    place = {"revision": revision, "data_files_root": data_files_root, "cache_dir": cache_dir}
    sizes = {"data_file_size": data_file_size, "video_file_size": video_file_size}
    with arguments.opened(uri, storage_options=storage_options, **place) as dataset, console.progress() as show:
        report = dali_stream.tools.reshard(dataset, out, **sizes, progress=console.stages(show, *_FILES))
    _say(out, report, as_json)


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
    clock: arguments.Clock = None,
    tolerance_s: arguments.ToleranceS = None,
) -> None:
    """Convert a dataset of v2.0 or v2.1 to v3.0, or write correct times. dali_stream itself reads all versions.

    Encoded frames stay as they are, and so do rows, which is verified at the end. With --clock frame_index, timestamps become
    frame_index / fps. Nothing is decoded, encoded or pushed, and URI is not changed. After an interruption, the same command
    resumes. OUT becomes a dataset only after verification.
    """
    place = {"revision": revision, "data_files_root": data_files_root, "cache_dir": cache_dir}
    place |= arguments.located_by(clock, tolerance_s)
    sizes = {"data_file_size": data_file_size, "video_file_size": video_file_size}
    with arguments.opened(uri, storage_options=storage_options, **place) as dataset, console.progress() as show:
        report = dali_stream.tools.convert(dataset, out, **sizes, progress=console.stages(show, *_FILES))
    _say(out, report, as_json)


def _say(out: Path, report: RewriteReport, as_json: bool) -> None:
    if as_json:
        console.print_json(report.as_dict())
        return
    console.results().print(_table(report))
    typer.echo(
        f"{out}: {counted(report.episodes, 'episode')}, {counted(report.frames, 'frame')}; all rows and encoded frames are "
        "verified"
    )


def _table(report: RewriteReport) -> Table:
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

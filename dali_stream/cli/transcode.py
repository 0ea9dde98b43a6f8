"""`dali-stream transcode`: the same dataset, its videos re-encoded for the decoder at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dali_stream.cli import arguments, console

if TYPE_CHECKING:
    from rich.table import Table

    from dali_stream.tools.transcode import Report

_FILES = ("sizes",)  # the stage that counts files; the others count bytes of the source


def transcode(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The dataset, whole.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A local folder, empty or not there yet.")],
    codec: Annotated[str, typer.Option(help="hevc, h264, av1 or vp9.")],
    gop: Annotated[
        int, typer.Option(parser=arguments.count, metavar="N", help="Distance of keyframes: 2 is best for single frames.")
    ] = 2,
    encoder: Annotated[str, typer.Option(help="nvenc, cpu, or auto: NVENC where it works.")] = "auto",
    crf: Annotated[
        int | None,
        typer.Option(parser=arguments.natural, metavar="N", help="Quality, lower is better. Without: close to the source."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(parser=arguments.count, metavar="N", help="Files at a time. Without: what keeps the encoder busy."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    revision: arguments.Revision = None,
    data_files_root: arguments.DataFilesRoot = None,
    cache_dir: arguments.CacheDir = None,
    storage_options: arguments.StorageOptions = None,
) -> None:
    """Write a dataset with its videos re-encoded, so that the decoder at hand, such as a GPU's, can decode them.

    Rows, files and times stay what they are. Every frame comes out once, at its time, in closed GOPs without B-frames, as
    8 bit 4:2:0 in BT.601; a few of each episode are compared with the source. May be interrupted: the same command continues
    where it was. OUT is a dataset when it is done, and not before. Needs the program ffmpeg.
    """
    from dali_stream.tools.transcode import transcode as write

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
            report = write(
                dataset,
                out,
                codec=codec,
                gop=gop,
                encoder=encoder,
                crf=crf,
                jobs=jobs,
                progress=show,
            )
    finally:
        dataset.close()
    if as_json:
        console.print_json(report.as_dict())
        return
    console.results().print(_table(report))
    typer.echo(f"{out}: {report.episodes} episodes, {report.frames} frames; {_compared(report)}")


def _table(report: Report) -> Table:
    made = console.table(
        "camera",
        "files",
        "pictures",
        "codec",
        "bytes",
        "encoder",
        "PSNR min",
        "mean",
        right=("files", "pictures", "PSNR min", "mean"),
    )
    for name, camera in report.cameras.items():
        sizes = f"{console.megabytes(camera.bytes_before)} → {console.megabytes(camera.bytes_after)}"
        quality = ["" if value is None else f"{value:.1f} dB" for value in (camera.psnr_min, camera.psnr_mean)]
        codecs = f"{camera.codec_before} → {camera.codec_after}"
        made.add_row(name, str(camera.files), str(camera.pictures), codecs, sizes, camera.encoder or "copied", *quality)
    return made


def _compared(report: Report) -> str:
    files = sum(camera.files for camera in report.cameras.values())
    copied = sum(camera.copied for camera in report.cameras.values())
    if copied == files:
        return f"its {files} video files needed nothing and are copied"
    rest = f"; {copied} needed nothing and are copied" if copied else ""
    return f"{files - copied} video files encoded, their counts and times checked, and frames of each episode compared{rest}"

"""`dali-stream transcode`: a dataset with its videos re-encoded, for example for a GPU's decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import dali_stream
from dali_stream.cli import arguments, console
from dali_stream.cli.reshard import Json, Out, Uri
from dali_stream.errors import counted

if TYPE_CHECKING:
    from dali_stream.tools.transcoding import TranscodeReport

_FILES = ("sizes",)  # the stage that counts files; the others count bytes of the source


def transcode(
    uri: Uri,
    out: Out,
    codec: Annotated[str, typer.Option(help="hevc, h264, av1 or vp9.")],
    gop: Annotated[
        int, typer.Option(metavar="N", parser=arguments.count, help="Distance of keyframes: 2 is best for single frames.")
    ] = 2,
    encoder: Annotated[str, typer.Option(help="nvenc, cpu, or auto: NVENC where it works.")] = "auto",
    crf: Annotated[
        int | None,
        typer.Option(metavar="N", parser=arguments.natural, help="Quality, lower is better. Default: close to the source."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", parser=arguments.count, help="Files at a time. Default: enough to keep the encoder busy."),
    ] = None,
    as_json: Json = False,
    revision: arguments.Revision = None,
    data_files_root: arguments.DataFilesRoot = None,
    cache_dir: arguments.CacheDir = None,
    storage_options: arguments.StorageOptions = None,
) -> None:
    """Re-encode a dataset's videos, so that for example a GPU can decode them.

    Rows, files and times stay as they are. Every frame is encoded once, at its time, in closed GOPs without B-frames, as
    8 bit 4:2:0 in BT.601; some frames of each episode are compared with the source. After an interruption, the same command
    resumes. OUT becomes a dataset only after verification. Needs the program ffmpeg.
    """
    place = {"revision": revision, "data_files_root": data_files_root, "cache_dir": cache_dir}
    with arguments.opened(uri, storage_options=storage_options, **place) as dataset, console.progress() as show:
        options: dict[str, Any] = {"codec": codec, "gop": gop, "encoder": encoder, "crf": crf, "jobs": jobs}
        report = dali_stream.tools.transcode(dataset, out, **options, progress=console.stages(show, *_FILES))
    if as_json:
        console.print_json(report.as_dict())
        return
    console.results().print(_table(report))
    typer.echo(f"{out}: {counted(report.episodes, 'episode')}, {counted(report.frames, 'frame')}; {_compared(report)}")


def _table(report: TranscodeReport) -> Table:
    numbers = ("files", "frames", "PSNR min", "mean")
    made = console.table("camera", "files", "frames", "codec", "bytes", "encoder", "PSNR min", "mean", right=numbers)
    for name, camera in report.cameras.items():
        sizes = f"{console.megabytes(camera.bytes_before)} → {console.megabytes(camera.bytes_after)}"
        quality = ["" if value is None else f"{value:.1f} dB" for value in (camera.psnr_min, camera.psnr_mean)]
        codecs = f"{camera.codec_before} → {camera.codec_after}"
        made.add_row(name, str(camera.files), str(camera.frames), codecs, sizes, camera.encoder or "copied", *quality)
    return made


def _compared(report: TranscodeReport) -> str:
    files, copied = (sum(getattr(camera, name) for camera in report.cameras.values()) for name in ("files", "copied"))
    if copied == files:
        return f"its {files} video files already fit and are copied"
    rest = f"; {copied} already fit and are copied" if copied else ""
    return f"{files - copied} video files encoded, their counts and times checked, and frames of each episode compared{rest}"

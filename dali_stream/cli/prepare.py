"""`dali-stream prepare` rewrites a dataset for training."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from dali_stream.cli import arguments, console, kinds
from dali_stream.errors import DaliStreamError, counted

if TYPE_CHECKING:
    from dali_stream.tools.preparation import PrepareReport, PrepareStatus

_LINE_EVERY_S = 10.0  # time between two lines of progress if stderr is not a terminal


@arguments.with_options()
def prepare(
    dataset: arguments.SourceOptions,
    uri: Annotated[str, Argument(metavar="URI", help="The dataset.")],
    out: Annotated[str | None, Argument(metavar="OUT", help="A new folder, or an address such as s3://.")] = None,
    for_: Annotated[
        str | None,
        Option(
            "--for",
            metavar="cpu|nvdec|hub",
            help="Encoding that CPUs decode fast, that all GPUs decode, or that LeRobot writes.",
        ),
    ] = None,
    size: Annotated[Any, kinds.frame_size(help="Size of all cameras' frames.")] = None,
    codec: Annotated[str | None, Option(help="h264, hevc, av1 or vp9.")] = None,
    gop: Annotated[int | None, kinds.count(help="Distance of keyframes; 2 is best for single frames.")] = None,
    crf: Annotated[int | None, kinds.natural(help="Quality, lower is better. Default: close to the source.")] = None,
    encoder: Annotated[str | None, Option(help="cpu (default) or nvenc.")] = None,
    file_mb: Annotated[float | None, Option(metavar="MB", help="Approximate size of a file, in MiB.")] = None,
    rows_per_group: Annotated[int | None, kinds.count(help="Rows of a row group, of whole episodes.")] = None,
    images_to_video: Annotated[bool, Option("--images-to-video", help="Make videos of images in rows.")] = False,
    drop_broken: Annotated[
        bool, Option("--drop-broken", help="Check all episodes first, and leave out those that cannot be read.")
    ] = False,
    episode_filter: Annotated[
        Any, kinds.json_object(help="Only episodes with these values, such as '{\"success\": true}'.")
    ] = None,
    out_storage_options: Annotated[Any, kinds.json_object(help="Storage options of OUT, such as credentials.")] = None,
    jobs: Annotated[int | None, kinds.count(help="Files at a time. Default: one per core.")] = None,
    executor: Annotated[
        str, Option(metavar="local|slurm|ray", help="Executor: processes of this machine, or a cluster.")
    ] = "local",
    files_per_job: Annotated[int | None, kinds.count(help="Files of a job of SLURM. Default: 1000 jobs.")] = None,
    slurm_partition: Annotated[str | None, Option(metavar="NAME", help="Partition of the jobs.")] = None,
    slurm_time: Annotated[int | None, kinds.count(metavar="MINUTES", help="Time limit of a job.")] = None,
    slurm_account: Annotated[str | None, Option(metavar="NAME", help="Account of the jobs.")] = None,
    slurm_folder: Annotated[
        str, Option(metavar="DIR", help="Folder that all nodes share, for the jobs' files.")
    ] = "prepare-slurm",
    ray_address: Annotated[
        str | None, Option(metavar="ADDRESS", help="Address of a Ray cluster. Default: start Ray on this machine.")
    ] = None,
    as_status: Annotated[
        bool, Option("--status", help="Print the state of the run that writes OUT, and exit. URI may be left out.")
    ] = False,
    as_json: arguments.Json = False,
) -> None:
    """Rewrite a dataset of any version as LeRobot v3.0, with smaller frames, another codec, other files or fewer episodes.

    Without options, rows and encoded frames are copied without a change, except for what LeRobot does not read. Every file
    is verified before it gets its name. After an interruption, the same command continues. OUT becomes a dataset when all
    files are written.
    """
    from dali_stream.tools.preparation.run import prepare as run
    from dali_stream.tools.preparation.run import status

    if as_status:
        state = status(out or uri, out_storage_options)
        console.show(state.as_dict() if as_json else [str(state)])
        return
    if out is None:
        raise ValueError("OUT must be a new folder or an address, got none")
    settings: dict[str, Any] = {
        "for_": for_, "size": size, "codec": codec, "gop": gop, "crf": crf, "encoder": encoder,
        "file_mb": file_mb, "rows_per_group": rows_per_group, "images_to_video": images_to_video, "drop_broken": drop_broken,
        "episode_filter": None if episode_filter is None else functools.partial(_has, episode_filter),
        "jobs": jobs, "out_storage_options": out_storage_options,
    }  # fmt: skip
    slurm = {"partition": slurm_partition, "time": slurm_time, "account": slurm_account}
    slurm = {name: value for name, value in slurm.items() if value is not None}
    settings |= _cluster(executor, jobs, files_per_job, slurm_folder, slurm, ray_address)
    with _shown() as show:
        report = run(uri, out, **dataset, **settings, progress=show)
    console.show(report.as_dict() if as_json else _text(out, report))
    if report.failed:
        raise DaliStreamError(
            f"{out}: {counted(len(report.failed), 'file')} could not be written. Fix the source, or give --drop-broken with a "
            "new OUT, and run the command again"
        )


def _has(values: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether the row of an episode has these values."""
    return all(row.get(key) == value for key, value in values.items())


def _cluster(
    executor: str, jobs: int | None, files_per_job: int | None, folder: str, slurm: dict[str, Any], address: str | None
) -> dict[str, Any]:
    """Return the arguments of `prepare` that choose the executor."""
    from dali_stream.tools.preparation.executors import on_ray, on_slurm

    if executor not in ("local", "slurm", "ray"):
        raise ValueError(f"executor must be 'local', 'slurm' or 'ray', got {executor!r}")
    if executor != "slurm" and (files_per_job is not None or slurm):
        raise ValueError(f"--files-per-job and --slurm-... need --executor slurm, got {executor}")
    if executor != "ray" and address is not None:
        raise ValueError("--ray-address needs --executor ray")
    if executor == "slurm":
        slurm |= {} if jobs is None else {"array_parallelism": jobs}
        return {"map_tasks": functools.partial(on_slurm, folder=folder, files_per_job=files_per_job, **slurm)}
    if executor == "ray":
        limit: dict[str, Any] = {} if jobs is None else {"jobs": jobs}
        return {"map_tasks": functools.partial(on_ray, address=address, **limit)}
    return {}


@contextmanager
def _shown() -> Iterator[Callable[[PrepareStatus], None]]:
    """Show progress as a bar on a terminal. Elsewhere, print a line every 10 s."""
    last = time.monotonic()

    def line(state: PrepareStatus) -> None:
        nonlocal last
        if time.monotonic() - last > _LINE_EVERY_S:
            last = time.monotonic()
            console.say(state, err=True)

    with console.progress() as bar:
        yield (lambda state: bar(state.done, state.total, str(state))) if sys.stderr.isatty() else line


def _text(out: str, report: PrepareReport) -> Iterator[Table | str]:
    table = console.table("camera", "files", "bytes", "encoder", "PSNR min", "mean", right=("files", "bytes"))
    for key, camera in report.cameras.items():
        psnr = ["" if value is None else f"{value:.1f} dB" for value in (camera.psnr_min, camera.psnr_mean)]
        table.add_row(key, str(camera.files), console.megabytes(camera.bytes), camera.encoder or "copied", *psnr)
    if report.cameras:
        yield table
    for title, broken in (("file", report.failed), ("left-out episode", report.dropped)):
        if broken:
            lost = console.table(title, "why", rows=broken.items())
            lost.columns[0].no_wrap = True  # so that users can copy paths
            yield lost
    if not report.failed:
        outcome = (
            "nothing to do, since all files exist"
            if not report.written
            else f"{counted(report.written, 'file')} written and verified"
        )
        yield f"{out}: {counted(report.episodes, 'episode')}, {counted(report.frames, 'frame')}; {outcome}"

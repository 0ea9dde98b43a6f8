"""`dali-stream info`: describes a dataset, or the datasets of a mixture. With --index, reads the index of a remote dataset."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import dali_stream
from dali_stream.cli import arguments, console
from dali_stream.errors import counted
from dali_stream.mixture import open_all
from dali_stream.tools.description import CameraReport, DatasetReport
from dali_stream.tools.mixture import MixtureReport, describe_mixture

if TYPE_CHECKING:
    from dali_stream.tools.indexing import IndexReport
    from dali_stream.tools.stored_frames import Fill

_TASKS, _MISSING, _BROKEN = 20, 20, 20  # maximum numbers of tasks and of missing and broken files in the text


@arguments.with_dataset_options
def info(
    options: arguments.DatasetOptions,
    uris: arguments.Uris,
    episodes: arguments.Episodes = None,
    cameras: arguments.Cameras = None,
    image_size: Annotated[
        str | None,
        typer.Option(metavar="HxW|recorded", help="Also measure what a frame cache on disk takes for frames of this size."),
    ] = None,
    index: Annotated[
        bool,
        typer.Option("--index", help="Instead, read the index of every file of a remote dataset into --cache-dir."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Describe a dataset: episodes, features, cameras, and the decoder that this machine uses for each camera.

    The command reads metadata, the index of up to 32 video files per camera, and the rows of one episode per camera. It lists
    missing and broken files, and decodes no frame without --image-size. The exit code is 1 if a file is missing or broken, or
    if a row has no frame.

    For several datasets or a mixture file, show the share of each dataset, how often an epoch repeats it, and which features
    differ.

    With --index, the indices of all video and Parquet files are read into the cache, so that training starts without waiting
    for them. After an interruption, the same command resumes. The exit code is 1 if a file is broken.
    """
    place = options.arguments(cameras=arguments.names(cameras), episodes=arguments.numbers("--episodes", episodes))
    if index and options.cache_dir is None:
        raise typer.BadParameter("must be given with --index, got none", param_hint="--cache-dir")
    if index and image_size:
        raise typer.BadParameter("must be given without --index", param_hint="--image-size")
    if mixed := arguments.mixture_arguments(uris, **place):
        if image_size or index:
            message = "must be given for one dataset, got several. Run the command for each of them"
            raise typer.BadParameter(message, param_hint="--index" if index else "--image-size")
        _mixture(mixed, as_json)
        return
    with closing(dali_stream.Dataset(uris[0], **place)) as dataset:
        if index:
            _index(dataset, as_json)
            return
        report = dali_stream.tools.describe(dataset)
        fill = _fill(dataset, image_size) if image_size else None
    if as_json:
        console.print_json(report.as_dict() | ({"frame_cache": fill._asdict()} if fill else {}))
    else:
        _say(report)
        if fill:
            console.say(
                f"frame cache for {image_size}: {fill.size / 1e9:.3g} GB, filled in {_duration(fill.seconds)} at "
                f"{fill.frames_per_s:.0f} frames/s"
            )
    if not report.whole:
        raise typer.Exit(1)


def _fill(dataset: dali_stream.Dataset, image_size: str) -> Fill:
    from dali_stream.tools import stored_frames

    return stored_frames.estimate(dataset, None if image_size == "recorded" else arguments.size("--image-size", image_size))


def _index(dataset: dali_stream.Dataset, as_json: bool) -> None:
    with console.progress("reading indices") as show:
        report = dali_stream.tools.index(dataset, show)
    if as_json:
        console.print_json(report.as_dict())
    else:
        _say_index(report)
    if report.broken:
        raise typer.Exit(1)


def _say_index(report: IndexReport) -> None:
    console.say(
        f"{counted(report.files, 'file')}: {console.megabytes(report.fetched_bytes)} fetched, "
        f"{console.megabytes(report.cached_bytes)} from the cache"
    )
    for error in list(report.broken.values())[:_BROKEN]:
        console.say(f"broken: {error}")
    if len(report.broken) > _BROKEN:
        console.say(f"and {len(report.broken) - _BROKEN} more broken files; --json lists all")


def _mixture(arguments: dict[str, Any], as_json: bool) -> None:
    datasets = open_all(arguments.pop("datasets"))
    try:
        report = describe_mixture(datasets, arguments.pop("keys", {}), **arguments)
    finally:
        for dataset in datasets.values():
            dataset.close()
    if as_json:
        console.print_json(dataclasses.asdict(report))
        return
    out = console.results()
    frames, hours = (sum(getattr(part, name) for part in report.datasets.values()) for name in ("frames", "hours"))
    table = console.pairs()
    table.add_row("mixture", f"{counted(len(report.datasets), 'dataset')}, {frames} frames, {hours:.3g} h")
    table.add_row("epoch", f"{counted(report.epoch_samples, 'sample')} by {report.kind}")
    out.print(table)
    columns = ("episodes", "frames", "fps", "hours", "share", "passes")
    table = console.table("dataset", *columns, "URI", right=columns)
    for name, part in report.datasets.items():
        numbers = (f"{part.fps:g}", f"{part.hours:.3g}", f"{part.share:.1%}", f"{part.passes:.3g}")
        table.add_row(name, str(part.episodes), str(part.frames), *numbers, part.uri)
    out.print(table)
    if report.differences:
        table = console.table("differs in", *report.datasets, "")
        for key, have in report.differences.items():
            table.add_row(key, *(feature or "missing" for feature in have.values()), _remedy(report, key))
        out.print(table)
    if report.warning:
        console.say(f"Warning: {report.warning}")


def _remedy(report: MixtureReport, key: str) -> str:
    if key in report.conflicts:
        return "cannot be one: rename one with keys"
    sizes = ["image_size"] if key in report.sizes else []
    return ", ".join(sizes if sizes and None not in report.differences[key].values() else [*sizes, "missing: pad"])


def _say(report: DatasetReport) -> None:
    out = console.results()
    out.print(_summary(report))
    out.print(_features(report))
    if report.cameras:
        out.print(_cameras(report))
        out.print(_routes(report))
    out.print(_tasks(report))
    _say_missing(report)


def _summary(report: DatasetReport) -> Table:
    shortest, longest = report.episode_frames
    sizes = ", ".join(f"{console.megabytes(count)} {kind}" for kind, count in report.bytes.items())
    table = console.pairs()
    table.add_row("dataset", report.address)
    table.add_row("format", f"LeRobot {report.codebase_version}, robot {report.robot_type or 'unknown'}")
    length = counted(shortest, "frame") if shortest == longest else f"{shortest} to {longest} frames"
    table.add_row("episodes", f"{report.episodes}, of {length}")
    table.add_row("frames", f"{report.frames} at {report.fps:g} fps, {_duration(report.duration_s)}")
    for why in report.broken:
        table.add_row("broken", why)
    table.add_row("bytes", f"{console.megabytes(sum(report.bytes.values()))}: {sizes}")
    return table


def _features(report: DatasetReport) -> Table:
    table = console.table("feature", "dtype", "shape", "names")
    for key, feature in report.features.items():
        shape = " × ".join(map(str, feature.shape))
        table.add_row(key, feature.dtype, shape, _names(feature.names))
    return table


def _names(names: object) -> str:
    if isinstance(names, dict):
        return "; ".join(f"{key}: {_names(value)}" for key, value in names.items())
    if isinstance(names, (list, tuple)):
        return ", ".join(_names(name) for name in names)
    return "" if names is None else str(names)


def _cameras(report: DatasetReport) -> Table:
    table = console.table(
        "camera", "codec", "pixels", "H × W", "GOP", "B-frames", "open GOPs", "files", "size", right=("size",)
    )
    for key, camera in report.cameras.items():
        size = f"{camera.height} × {camera.width}"
        if camera.kind == "image":
            table.add_row(key, "images in Parquet", "", size, "", "", "", "", "")
            continue
        codec = " ".join(filter(None, (camera.codec, camera.profile)))
        if camera.codec is None:
            table.add_row(key, "unknown", "", size, "", "", "", _files(camera), console.megabytes(camera.bytes))
            continue
        gop = f"{camera.gop_min}" if camera.gop_min == camera.gop_max else f"{camera.gop_min} to {camera.gop_max}"
        flags = ["yes" if flag else "no" for flag in (camera.b_frames, camera.open_gops)]
        table.add_row(key, codec, camera.pixel_format, size, gop, *flags, _files(camera), console.megabytes(camera.bytes))
    return table


def _files(camera: CameraReport) -> str:
    if camera.files == camera.files_looked_at:
        return str(camera.files)
    return f"{camera.files}, {camera.files_looked_at} checked"


def _routes(report: DatasetReport) -> Table:
    table = console.table("camera", "decoded by", "because")
    for key, camera in report.cameras.items():
        table.add_row(key, camera.route.decoder, camera.route.reason)
        if camera.route_change:
            table.add_row("", "torchcodec", f"from a later file: {camera.route_change}")
        for other in camera.other_formats:
            table.add_row("", "", f"other files are {other}")
        for remark in (*camera.remarks, *camera.broken):
            table.add_row("", "", remark)
    return table


def _tasks(report: DatasetReport) -> Table:
    table = console.table("", "task", right=("",))
    for index, task in list(report.tasks.items())[:_TASKS]:
        table.add_row(str(index), task)
    if len(report.tasks) > _TASKS:
        table.add_row("", f"and {len(report.tasks) - _TASKS} more; --json lists all")
    return table


def _say_missing(report: DatasetReport) -> None:
    if report.missing:
        console.say(f"{counted(len(report.missing), 'file')} missing:")
    for path in report.missing[:_MISSING]:
        console.say(f"  {path}")
    if len(report.missing) > _MISSING:
        console.say(f"  and {len(report.missing) - _MISSING} more; --json lists all")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours and not minutes:
        return f"{seconds:.1f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

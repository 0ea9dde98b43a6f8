"""`dali-stream info`: describes a dataset, or the datasets of a mixture. With --index, reads the index of a remote dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Option

import dali_stream
from dali_stream.cli import arguments, console, datasets, kinds
from dali_stream.errors import counted
from dali_stream.mixture import open_all
from dali_stream.tools.description import CameraReport, DatasetReport
from dali_stream.tools.mixture import MixtureReport, describe_mixture

if TYPE_CHECKING:
    from dali_stream.tools.indexing import IndexReport

_MOST = 20  # maximum numbers of tasks, and of missing and broken files, in the text


@arguments.with_options()
def info(
    dataset: arguments.DatasetOptions,
    uris: arguments.Uris,
    image_size: Annotated[
        Any, kinds.image_size(help="Also measure what a frame cache on disk takes for frames of this size.")
    ] = None,
    index: Annotated[
        bool, Option("--index", help="Instead, read the index of every file of a remote dataset into --cache-dir.")
    ] = False,
    as_json: arguments.Json = False,
) -> None:
    """Describe a dataset: episodes, features, cameras, and the decoder that this machine uses for each camera.

    The command reads metadata and the index of up to 32 video files per camera. It lists missing and broken files, and decodes
    no frame without --image-size. The exit code is 1 if a file is missing or broken. To check rows and timestamps, use
    `dali-stream doctor URI`.

    For several datasets or a mixture file, show the share of each dataset, how often an epoch repeats it, and which features
    differ.

    With --index, the indices of all video and Parquet files are read into the cache, so that training starts without waiting
    for them. After an interruption, the same command resumes. The exit code is 1 if a file is broken.
    """
    if index and "cache_dir" not in dataset:
        raise ValueError("--cache-dir must be given with --index, got none")
    if index and image_size:
        raise ValueError("--image-size must be given without --index")
    if mixture := datasets.mixture_arguments(uris, dataset):
        if image_size or index:
            option = "--index" if index else "--image-size"
            raise ValueError(f"{option} must be given for one dataset, got several. Run the command for each of them")
        described = _described(mixture)
        console.show(dataclasses.asdict(described) if as_json else _mixture(described))
        return
    with closing(dali_stream.Dataset(uris[0], **dataset)) as opened:
        if index:
            _index(opened, as_json)
            return
        report = dali_stream.tools.describe(opened)
        content, text = report.as_dict(), list(_dataset(report))
        if image_size:
            from dali_stream.tools import stored_frames

            fill = stored_frames.estimate(opened, None if image_size == kinds.RECORDED else image_size)
            size = image_size if image_size == kinds.RECORDED else "x".join(map(str, image_size))
            rate = f"filled in {_duration(fill.seconds)} at {fill.frames_per_s:.0f} frames/s"
            content["frame_cache"] = fill._asdict()
            text.append(f"frame cache on disk for {size}: {fill.size / 1e9:.3g} GB, {rate}")
    console.show(content if as_json else text)
    if not report.whole:
        raise typer.Exit(1)


def _index(dataset: dali_stream.Dataset, as_json: bool) -> None:
    with console.progress("reading indices") as show:
        report = dali_stream.tools.index(dataset, show)
    console.show(report.as_dict() if as_json else _indexed(report))
    if report.broken:
        raise typer.Exit(1)


def _indexed(report: IndexReport) -> Iterator[str]:
    fetched, cached = console.megabytes(report.fetched_bytes), console.megabytes(report.cached_bytes)
    yield f"{counted(report.files, 'file')}: {fetched} fetched, {cached} from the cache"
    yield from _first([f"broken: {error}" for error in report.broken.values()])


def _first(lines: Sequence[str]) -> Iterator[str]:
    """Yield the first lines, and the number of the others."""
    yield from lines[:_MOST]
    if len(lines) > _MOST:
        yield f"  and {len(lines) - _MOST} more; --json lists all"


def _described(mixture: dict[str, Any]) -> MixtureReport:
    """Return the report of a mixture, whose features need not fit together."""
    opened = open_all(mixture.pop("datasets"))
    try:
        return describe_mixture(opened, mixture.pop("keys", {}), **mixture)
    finally:
        for dataset in opened.values():
            dataset.close()


def _mixture(report: MixtureReport) -> Iterator[Table | str]:
    frames, hours = (sum(getattr(part, name) for part in report.datasets.values()) for name in ("frames", "hours"))
    yield console.pairs([
        ("mixture", f"{counted(len(report.datasets), 'dataset')}, {frames} frames, {hours:.3g} h"),
        ("epoch", f"{counted(report.epoch_samples, 'sample')} by {report.kind}"),
    ])  # fmt: skip
    columns = ("episodes", "frames", "fps", "hours", "share", "passes")
    table = console.table("dataset", *columns, "URI", right=columns)
    for name, part in report.datasets.items():
        numbers = (f"{part.fps:g}", f"{part.hours:.3g}", f"{part.share:.1%}", f"{part.passes:.3g}")
        table.add_row(name, str(part.episodes), str(part.frames), *numbers, part.uri)
    yield table
    if report.differences:
        table = console.table("differs in", *report.datasets, "")
        for key, have in report.differences.items():
            table.add_row(key, *(feature or "missing" for feature in have.values()), _remedy(report, key))
        yield table
    if report.warning:
        yield f"Warning: {report.warning}"


def _remedy(report: MixtureReport, key: str) -> str:
    if key in report.conflicts:
        return "cannot be one: rename one with keys"
    sizes = ["image_size"] if key in report.sizes else []
    return ", ".join(sizes if sizes and None not in report.differences[key].values() else [*sizes, "missing: pad"])


def _dataset(report: DatasetReport) -> Iterator[Table | str]:
    yield console.pairs(_summary(report))
    yield _features(report)
    if report.cameras:
        yield _cameras(report)
        yield _routes(report)
    yield _tasks(report)
    if report.missing:
        yield f"{counted(len(report.missing), 'file')} missing:"
    yield from _first([f"  {path}" for path in report.missing])


def _summary(report: DatasetReport) -> Iterator[tuple[str, str]]:
    shortest, longest = report.episode_frames
    yield "dataset", report.address
    yield "format", f"LeRobot {report.codebase_version}, robot {report.robot_type or 'unknown'}"
    length = counted(shortest, "frame") if shortest == longest else f"{shortest} to {longest} frames"
    yield "episodes", f"{report.episodes}, of {length}"
    yield "frames", f"{report.frames} at {report.fps:g} fps, {_duration(report.duration_s)}"
    for why in report.broken:
        yield "broken", why
    sizes = ", ".join(f"{console.megabytes(count)} {kind}" for kind, count in report.bytes.items())
    yield "bytes", f"{console.megabytes(sum(report.bytes.values()))}: {sizes}"


def _features(report: DatasetReport) -> Table:
    rows = (
        (key, feature.dtype, " × ".join(map(str, feature.shape)), _names(feature.names))
        for key, feature in report.features.items()
    )
    return console.table("feature", "dtype", "shape", "names", rows=rows)


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
        is_video = camera.kind == "video"
        codec = " ".join(filter(None, (camera.codec, camera.profile))) or ("unknown" if is_video else "images in Parquet")
        gop = f"{camera.gop_min}" if camera.gop_min == camera.gop_max else f"{camera.gop_min} to {camera.gop_max}"
        known = [gop, *("yes" if flag else "no" for flag in (camera.b_frames, camera.open_gops))] if camera.codec else [""] * 3
        files = [_files(camera), console.megabytes(camera.bytes)] if is_video else ["", ""]
        table.add_row(key, codec, camera.pixel_format or "", f"{camera.height} × {camera.width}", *known, *files)
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
    rows = [(str(index), task) for index, task in report.tasks.items()]
    if len(rows) > _MOST:
        rows[_MOST:] = [("", f"and {len(rows) - _MOST} more; --json lists all")]
    return console.table("", "task", right=("",), rows=rows)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours and not minutes:
        return f"{seconds:.1f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

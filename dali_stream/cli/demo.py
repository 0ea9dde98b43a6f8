"""`dali-stream demo`: makes a small dataset, streams one epoch of it, and measures the speed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

import dali_stream
from dali_stream import DaliStreamError, Dataset, DatasetError
from dali_stream.cli import arguments, console, kinds
from dali_stream.errors import counted

_ROBOT = "simulated_pusher"  # `robot_type` of demo datasets, which identifies them


@arguments.with_options(batch_size=32, device="auto", decode="auto")
def demo(
    loader: arguments.LoaderOptions,
    root: Annotated[Path, Option(metavar="DIR", help="Folder of the dataset.")] = Path("dali-stream-demo"),
    episodes: Annotated[int | None, kinds.count(help="Episodes to write; 16 unless given.")] = None,
    size: Annotated[Any, kinds.frame_size(help="Frames' size, even, from 120x128 up; 240x320 unless given.")] = None,
    codec: Annotated[str | None, Option(metavar="av1|h264|hevc|vp9|mpeg4", help="Codec of the videos. Default: av1.")] = None,
    out: Annotated[Path | None, kinds.png(help="Contact sheet of the first batch; DIR-sheet.png unless given.")] = None,
    as_json: arguments.Json = False,
) -> None:
    """Make a small dataset unless it exists, stream one epoch of it, and report speed and correctness.

    The dataset shows a simulated robot that pushes blocks, seen by two cameras. A code in each frame identifies the frame.
    """
    wanted = {"episodes": episodes, "size": size, "codec": codec}
    out = out or Path(f"{root.absolute()}-sheet.png")
    from dali_stream.tools import sheet  # imported first, to fail before the dataset is written if a library is missing
    from dali_stream.tools.epoch import stream

    dataset = _dataset(root, {name: value for name, value in wanted.items() if value is not None})
    with console.progress("streaming one epoch") as show:
        report, first = stream(dataset, loader["batch_size"], loader["device"], loader["decode"], show)
    title = f"{Path(dataset.uri).name}: the first batch, {len(first)} of {dataset.num_frames} frames"
    width = sum(strip.data.shape[2] for strip in first[0].strips)
    sheet.save(out, title, first, columns=max(1, 2000 // width))
    report["sheet"] = str(out)
    console.show(report if as_json else [console.pairs(_rows(report))])
    if not report["exactly_once"]:
        raise DaliStreamError(
            f"{report['frames']} frames were delivered, {report['unique_frames']} of them different, and the epoch "
            f"has {dataset.num_frames}. This is a bug of dali_stream, so please report it with the output of --json"
        )


def _dataset(root: Path, wanted: dict[str, Any]) -> Dataset:
    """Return the dataset at `root`. Write it if the folder is empty or new. Otherwise, check that it agrees with `wanted`."""
    from dali_stream.demo import write_demo

    if root.is_dir() and any(root.iterdir()):
        return _existing(root, wanted)
    with console.progress("writing the demo") as show:
        try:
            write_demo(root, **wanted, progress=show)
        except FileExistsError as error:
            raise DaliStreamError(f"--root must be a folder, got {root}, which is a file") from error
        except OSError as error:
            raise DaliStreamError(f"{root} cannot be written: {error.strerror}. Give another folder with --root") from error
    return dali_stream.Dataset(root)


def _existing(root: Path, wanted: dict[str, Any]) -> Dataset:
    try:
        dataset = dali_stream.Dataset(root)
        report = dali_stream.tools.describe(dataset, look_at=1)
    except DaliStreamError as error:
        raise DatasetError(
            f"{root} is not empty, and holds no demo dataset ({error}). Give another folder with --root"
        ) from error
    if report.robot_type != _ROBOT:
        raise DatasetError(
            f"{root} holds a dataset of robot {report.robot_type}, not the demo. Give another folder with --root, or look at "
            f"this one with `dali-stream preview {root}`"
        )
    camera = next(iter(report.cameras.values()))
    existing = {"episodes": report.episodes, "size": (camera.height, camera.width), "codec": camera.codec}
    differing = [name for name, value in wanted.items() if value != existing[name]]
    if differing:
        new, old = (", ".join(f"{name} {_text(values[name])}" for name in differing) for values in (wanted, existing))
        raise ValueError(
            f"{root} already holds a demo with {old}, and {new} was requested. Give another folder with --root, remove "
            f"this one, or leave out {' and '.join(f'--{name}' for name in differing)}"
        )
    return dataset


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the table."""
    waits = report["wait_ms"]
    once = "yes" if report["exactly_once"] else "NO"
    yield "dataset", f"{report['root']}: {counted(report['episodes'], 'episode')}, {counted(report['frames'], 'frame')}"
    yield "speed", f"{report['samples_per_s']:.0f} samples/s, {report['frames_per_s']:.0f} frames/s after the first batch"
    yield "first batch", f"{report['first_batch_s']:.2f} s after creating the Loader"
    yield "batch wait", f"p50 {waits['p50']:.1f} ms, p95 {waits['p95']:.1f} ms, p99 {waits['p99']:.1f} ms"
    if report["bottleneck"]:
        yield "bottleneck", report["bottleneck"]["text"]
    yield "exactly once", f"{once}: {report['frames']} delivered, {report['unique_frames']} different"
    yield "correct frames", f"yes: {report['frames_checked']} frames of the first batch are the requested ones"
    yield from console.machine_rows(report, "this process")
    yield "contact sheet", report["sheet"]

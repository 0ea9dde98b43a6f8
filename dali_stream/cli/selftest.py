"""`dali-stream selftest`: tests DALI's video decoder on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dali_stream.cli import arguments, console


def selftest(
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Device that decodes.")] = "auto",
    soak: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time to stream.")] = 30.0,
    limit: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time limit in all.")] = 460.0,
    speed: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time per speed measurement.")] = 1.0,
    out: Annotated[Path | None, typer.Option(metavar="JSON", help="File for the report, written after each step.")] = None,
    as_json: arguments.Json = False,
) -> None:
    """Test NVDEC through DALI on this machine: whether frames are right, whether they stay right under load, and how fast it is
    compared with torchcodec.

    The command generates videos of every codec that the driver supports, with GOPs of 1, 2, 12 and 30. It takes up to 8
    minutes, and runs the most important tests first. It lists the tests for which no time remains. Without a GPU, nothing is
    tested, and the exit code is 0. --device cpu tests the codecs that DALI decodes on the CPU. The exit code is 1 if a test
    failed or was left out.
    """
    import dali_stream.loader  # noqa: F401 - imported first, to fail before any work if a library is missing
    from dali_stream.tools import environment
    from dali_stream.tools.selftest import selftest as run

    with console.progress() as show:

        def keep(report: dict[str, Any]) -> None:
            if out is not None:
                environment.write_report(out, report)

        report = run(
            device,
            soak_s=soak,
            speed_s=speed,
            limit_s=limit,
            progress=lambda step, done, total: show(done, total, step),
            keep=keep,
        )
        keep(report)
    console.show(environment.without_folders(report) if as_json else _text(report))
    if report["status"] in ("failed", "unfinished"):
        raise typer.Exit(1)


# Columns of the table for each part of the report, from left to right: header, key of the row, and format.
_TEST = (("test", "test", ""), ("decoder", "decoder", ""))
_FRAMES = (("frames", "frames", "d"), ("wrong", "wrong", "d"))
_RATE = ("frames/s", "frames_per_s", ".0f")
_NOTE = ("", "note", "")
_TABLES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "identity": (
        *_TEST, ("requests", "shape", ""), *_FRAMES, ("mean error", "mean_error", ".2f"),
        ("ms per clip", "clip_ms", ".2f"), _NOTE,
    ),
    "load": (
        *_TEST, ("routes", "routes", ""), *_FRAMES, ("worst mean error", "worst_mean", ".2f"),
        ("worst 16×16 pixels", "worst_block", ".1f"), _RATE, _NOTE,
    ),
    "speed": (
        *_TEST, ("requests per clip", "per_clip", "d"), ("threads", "threads", "d"), ("prefetch", "prefetch", "d"), _RATE,
        ("of the CPU", "ratio", ".2f"), ("GPU memory", "gpu_bytes", "B"), _NOTE,
    ),
}  # fmt: skip


def _text(report: dict[str, Any]) -> Iterator[Table | str]:
    """Yield the tables and lines of the report."""
    if "reason" in report:  # no usable GPU
        yield f"{report['status']}: {report['reason']}"
        return
    for part, columns in _TABLES.items():
        numbers = tuple(header for header, _, form in columns if form)
        table = console.table(*(header for header, _, _ in columns), right=numbers)
        for row in report[part]:
            table.add_row(*(_cell(row, key, form) for _, key, form in columns))
        yield table
    if ratios := [(row["ratio"], row["test"]) for row in report["speed"] if row["busy"] and "ratio" in row]:
        ratio, test = max(ratios)
        yield f"{test}: the fastest decoder reaches {ratio:.2f} of the CPU's speed"
    for codec, reason in report["codecs"].items():
        if reason:
            yield f"{codec} was not tested: {reason}"
    if report["left_out"]:
        yield f"no time was left for: {'; '.join(report['left_out'])}. Give a higher --limit"
    for problem in report["problems"]:
        yield f"failed: {problem}"
    place = report["machine"]["gpu"] or "the CPU"
    yield f"{report['status']} on {place}, in {report['seconds']:.0f} s"


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    if key == "note":
        return row.get("failed") or (f"informational: {row['refused']}" if row.get("refused") else "")
    if value is None:
        return ""
    if isinstance(value, dict):  # routes of cameras
        return ", ".join(value.values())
    return console.megabytes(value) if form == "B" else format(value, form)

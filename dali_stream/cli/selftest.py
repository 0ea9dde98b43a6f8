"""`dali-stream selftest`: tests DALI's video decoder on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Option

from dali_stream.cli import arguments, console


def selftest(
    device: Annotated[str, Option(metavar="auto|cpu|cuda|cuda:N", help="Device that decodes.")] = "auto",
    soak: Annotated[float, Option(metavar="SECONDS", min=0, help="Time to stream.")] = 30.0,
    limit: Annotated[float, Option(metavar="SECONDS", min=0, help="Time limit in all.")] = 460.0,
    speed: Annotated[float, Option(metavar="SECONDS", min=0, help="Time per speed measurement.")] = 1.0,
    out: Annotated[Path | None, Option(metavar="JSON", help="File for the report, written after each step.")] = None,
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


_TEXTS = ("test", "decoder", "shape", "routes", "note")  # columns without numbers
_COLUMNS = {
    "identity": ("test", "decoder", "shape", "frames", "wrong", "mean_error", "clip_ms", "note"),
    "load": ("test", "decoder", "routes", "frames", "wrong", "worst_mean", "worst_block", "frames_per_s", "note"),
    "speed": ("test", "decoder", "per_clip", "threads", "prefetch", "frames_per_s", "ratio", "gpu_bytes", "note"),
}
"""Entries of the rows that the table of each part of the report has, from left to right."""


def _text(report: dict[str, Any]) -> Iterator[Table | str]:
    """Yield the tables and lines of the report."""
    if "reason" in report:  # no usable GPU
        yield f"{report['status']}: {report['reason']}"
        return
    for part, columns in _COLUMNS.items():
        numbers = tuple(key for key in columns if key not in _TEXTS)
        yield console.table(*columns, right=numbers, rows=([_cell(row, key) for key in columns] for row in report[part]))
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


def _cell(row: dict[str, Any], key: str) -> str:
    if key == "note":
        return row.get("failed") or (f"informational: {row['refused']}" if row.get("refused") else "")
    value = row.get(key, "")
    if isinstance(value, dict):  # routes of cameras
        return ", ".join(value.values())
    if key == "gpu_bytes" and value:
        return console.megabytes(value)
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)

"""`dali-stream selftest`: tests this machine's decoder through DALI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dali_stream.cli import console


def selftest(
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where DALI decodes.")] = "auto",
    soak: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time to stream.")] = 30.0,
    limit: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time limit in all.")] = 460.0,
    speed: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time per speed measurement.")] = 1.0,
    out: Annotated[Path | None, typer.Option(metavar="JSON", help="File for the report, written after each stage.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object instead of tables.")] = False,
) -> None:
    """Test NVDEC through DALI on this machine: correct frames and colours, also on a busy GPU, memory, and speed compared with
    torchcodec.

    Generates videos of every codec that the driver supports, with GOPs of 1, 2, 12 and 30. Takes up to 8 minutes, the most
    important codecs and tests first; tests without time are listed. Without a GPU nothing is tested, with exit code 0;
    --device cpu tests the codecs that DALI decodes there. Exit code 1 if a test failed or was left out.
    """
    import dali_stream.loader  # noqa: F401 - a missing library is an error before all work
    from dali_stream.tools import environment
    from dali_stream.tools.selftest import selftest as run

    with console.progress() as show:

        def keep(report: dict[str, Any]) -> None:
            if out is not None:
                out.write_text(environment.report_json(report, indent=1) + "\n")

        report = run(
            device,
            soak_s=soak,
            speed_s=speed,
            limit_s=limit,
            progress=lambda what, done, total: show(done, total, what),
            keep=keep,
        )
        keep(report)
    if as_json:
        console.print_json(environment.without_folders(report))
    else:
        _print(report)
    if report["status"] in ("failed", "unfinished"):
        raise typer.Exit(1)


def _print(report: dict[str, Any]) -> None:
    if "reason" in report:  # no usable GPU
        typer.echo(f"{report['status']}: {report['reason']}")
        return
    screen = console.results()
    for made in (_identity(report), _cases(report), _lockstep(report), _verdict(report), _soak(report), _speed(report)):
        screen.print(made)
    if ratio := report["verdict"].get("ratio"):
        typer.echo(f"{report['verdict']['codec']}: the fastest decoder reaches {ratio:.2f} of the CPU's speed")
    for codec, reason in report["codecs"].items():
        if reason:
            typer.echo(f"{codec} was not tested: {reason}")
    if report["left_out"]:
        typer.echo(f"no time was left for: {'; '.join(report['left_out'])}; give a higher --limit")
    for problem in report["problems"]:
        typer.echo(f"failed: {problem}")
    where = report["machine"]["gpu"] or "the CPU"
    typer.echo(f"{report['status']} on {where}, in {report['seconds']:.0f} s")


def _identity(report: dict[str, Any]) -> Table:
    made = console.table(
        "codec", "videos", "requests", "frames", "wrong", "mean error", "", right=("frames", "wrong", "mean error")
    )
    for row in report["identity"]:
        error = "" if row["mean_error"] is None else f"{row['mean_error']:.2f}"
        note = row["failed"] or (f"informational, since the loader uses torchcodec: {row['refused']}" if row["refused"] else "")
        made.add_row(row["codec"], row["videos"], row["shape"], str(row["frames"]), str(row["wrong"]), error, note)
    return made


def _cases(report: dict[str, Any]) -> Table:
    numbers = ("frames", "wrong", "mean error", "ms per clip")
    made = console.table("kept from NVDEC", "decoder", "requests", *numbers, "", right=numbers)
    for row in report["cases"]:
        error, ms = ("" if row[key] is None else f"{row[key]:.2f}" for key in ("mean_error", "clip_ms"))
        note = row["failed"] or (f"informational: {row['refused']}" if row["refused"] else "")
        made.add_row(row["videos"], row["decoder"], row["shape"], str(row["frames"]), str(row["wrong"]), error, ms, note)
    return made


def _verdict(report: dict[str, Any]) -> Table:
    made = console.table("on a busy GPU", "threads", "frames/s", right=("threads", "frames/s"))
    for row in report["verdict"].get("rows", []):
        made.add_row(row.get("decoder", ""), str(row.get("threads", "")), row.get("failed") or f"{row['frames_per_s']:.0f}")
    return made


def _speed(report: dict[str, Any]) -> Table:
    numbers = ("requests per clip", "threads", "prefetch", "frames/s", "GPU memory")
    made = console.table("codec", "H × W", "decoder", *numbers, right=numbers)
    for row in report["speed"]:
        cells = [str(row.get(key, "")) for key in ("per_clip", "threads", "prefetch")]
        rate = row.get("failed") or f"{row['frames_per_s']:.0f}"
        memory = console.megabytes(row["gpu_bytes"]) if row.get("gpu_bytes") else ""
        size = " × ".join(map(str, row["size"]))
        made.add_row(row["codec"], size, row["decoder"], *cells, rate, memory)
    return made


def _lockstep(report: dict[str, Any]) -> Table:
    numbers = ("frames", "wrong", "worst mean error", "worst 16×16 pixels")
    made = console.table("in lockstep with torchcodec", "routes", *numbers, right=numbers)
    for row in report["lockstep"]:
        if row.get("failed"):
            made.add_row(row["loader"], row["failed"], "", "", "", "")
        else:
            routes, worst = ", ".join(row["routes"].values()), (f"{row['worst_mean']:.2f}", f"{row['worst_block']:.1f}")
            made.add_row(row["loader"], routes, str(row["frames"]), str(row["wrong"]), *worst)
    return made


def _soak(report: dict[str, Any]) -> Table:
    made = console.table("soak", "frames", "wrong", "frames/s", right=("frames", "wrong", "frames/s"))
    if row := report["soak"]:
        numbers = ("", "", "") if row.get("failed") else (str(row["frames"]), str(row["wrong"]), f"{row['frames_per_s']:.0f}")
        made.add_row(row.get("failed") or ", ".join(row["routes"].values()), *numbers)
    return made

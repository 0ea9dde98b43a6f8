"""`dali-stream doctor`: diagnosis of this machine and of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.styled import Styled
from rich.table import Table
from typer import Argument, Option

import dali_stream
from dali_stream.cli import arguments, console
from dali_stream.errors import counted

if TYPE_CHECKING:
    from dali_stream.tools.diagnosis import DoctorReport

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@arguments.with_options()
def doctor(
    dataset: arguments.DatasetOptions,
    uri: Annotated[str | None, Argument(metavar="URI", help="A dataset or a mixture file to examine as well.")] = None,
    as_json: arguments.Json = False,
    deep: Annotated[bool, Option("--deep", help="Check all files and rows of the dataset, and decode every frame.")] = False,
) -> None:
    """Check what this machine decodes and whether its software is compatible, and say how to fix problems.

    With a dataset, also check whether its files exist, and whether rows, tasks and videos agree. For each camera, show the
    video format, the decoder and the reason for it, and decode one frame with every decoder of this machine. At most 1000
    episodes and files are checked, or 32 of remote data. --deep checks all of them and decodes every frame. The datasets of a
    mixture file are examined one by one. The exit code is 1 if a check found a problem.
    """
    with console.progress("examining") as show:
        report = dali_stream.tools.doctor(uri, **dataset, deep=deep, progress=show)
    console.show(report.as_dict() if as_json else [_table(report), _sum(report)])
    if report.status == "problem":
        raise typer.Exit(1)


def _table(report: DoctorReport) -> Table:
    table = console.pairs()
    table.add_column(overflow="fold")
    area = ""
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            table.add_row(Styled(area, "bold"), "", "")
        table.add_row(Styled(finding.status, _STYLES[finding.status]), finding.name, finding.text)
        if finding.remedy:
            table.add_row("", "", Styled(f"→ {finding.remedy}", "bold"))
    return table


def _sum(report: DoctorReport) -> str:
    counts = [(sum(finding.status == status for finding in report.findings), status) for status in _STYLES]
    plural = ", ".join(f"{count} ok" if status == "ok" else counted(count, status) for count, status in reversed(counts))
    return f"{report.status}: {plural}"

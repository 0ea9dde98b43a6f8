"""Output of the commands: results on stdout, and progress on stderr.

All text of the commands goes through this module, which escapes control characters, since names in a dataset are text of
others. Text is never markup.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dali_stream.checks.text import visible

_TERM_OF_CELLS = "xterm-color"  # value of TERM that IPython's kernel sets, see `ZMQInteractiveShell.init_environment`


class _Console(Console):
    """Console that prints strings as they are, without markup, and with control characters escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a string, which may be a cell of a table."""
        return super().render_str(visible(text), **options | {"markup": False})


def results() -> Console:
    """Return the console for tables. In a pipe or a file, they are plain text, 120 columns wide unless `COLUMNS` is set."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return _Console(width=wide, highlight=False, emoji=False)


def say(text: object, *, err: bool = False) -> None:
    """Print a line to stdout, or to stderr if `err`."""
    typer.echo(visible(text), err=err)


def show(report: Mapping[str, Any] | Iterable[Table | str]) -> None:
    """Print a report to stdout: the content of a JSON object, or the tables and lines of a text."""
    if isinstance(report, Mapping):
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    out = results()
    for part in report:
        if isinstance(part, str):
            say(part)
        else:
            out.print(part)


def table(*columns: str, right: tuple[str, ...] = (), rows: Iterable[Iterable[str]] = ()) -> Table:
    """Return a table whose long cells wrap.

    Args:
        columns: Names of the columns.
        right: Names of the columns to align right, which contain numbers. Default: none.
        rows: Cells of each row. Default: none.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def pairs(rows: Iterable[tuple[str, str]] = ()) -> Table:
    """Return a table of names and values, without a header and lines.

    Args:
        rows: Name and value of each row. Default: none.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class Show(Protocol):
    """Function that shows progress towards a total."""

    def __call__(self, done: int, total: int, description: str = ...) -> None: ...


@contextmanager
def progress(description: str = "", enabled: bool = True) -> Iterator[Show]:
    """Show a progress bar on stderr, if it is a terminal. The bar disappears at the end.

    A cell of a notebook shows no bar, since it cannot move the cursor back. Its commands have a terminal, which only TERM
    tells from others: IPython's kernel sets it.

    Args:
        description: Text before the bar, which can be changed with each update. Default: "".
        enabled: Whether to show the bar at all. Default: True.
    """
    console = Console(stderr=True)
    shown = enabled and console.is_terminal and os.environ.get("TERM") != _TERM_OF_CELLS
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(description, total=None)

        def show(done: int, total: int, description: str = description) -> None:
            # A new description is drawn at once. Otherwise, the description of a short stage might never appear.
            description = visible(description)
            is_new = bar.tasks[task].description != description
            bar.update(task, description=description, completed=done, total=total, refresh=is_new)

        yield show


def megabytes(count: float) -> str:
    """Return a number of bytes as text, such as "3.4 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{1 if count < 100 * size else 0}f} {unit}"
    return f"{count:.0f} B"


def machine_rows(report: Mapping[str, Any], owner: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a table with the memory, the routes and the machine of a measurement.

    Args:
        report: Report of `demo` or `bench`.
        owner: Owner of the memory, such as "this process".
    """
    yield "peak memory", f"{megabytes(report['peak_rss_bytes'])} of {owner}"
    if report["peak_gpu_bytes"] is not None:
        yield "", f"{megabytes(report['peak_gpu_bytes'])} of the GPU, all processes"
    for camera, route in report["routes"].items():
        yield camera.rpartition(".")[2], f"{route['decoder']}: {route['reason']}"
    machine = report["machine"]
    yield "machine", f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or report['device']}"

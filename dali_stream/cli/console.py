"""Shared by the commands: results on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def results() -> Console:
    """Return the console for tables. A pipe or a file gets plain text in lines that are long enough for a table."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=wide, highlight=False, emoji=False)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return a plain table, whose columns in `right` hold numbers. Long cells wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def pairs() -> Table:
    """Return a table of names and values without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def print_json(content: dict[str, Any]) -> None:
    """Print one object to stdout."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


class Show(Protocol):
    """Show progress towards a total."""

    def __call__(self, done: int, total: int, description: str = ...) -> None: ...


@contextmanager
def progress(description: str = "", enabled: bool = True) -> Iterator[Show]:
    """Show a bar on stderr if that is a terminal. The bar disappears at the end."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task(description, total=None)

        def show(done: int, total: int, description: str = description) -> None:
            # A new description is drawn at once. Otherwise that of a short stage might never be.
            is_new = bar.tasks[task].description != description
            bar.update(task, description=description, completed=done, total=total, refresh=is_new)

        yield show


def stages(show: Show, *files: str) -> Callable[[str, int, int], None]:
    """Return a callback that shows the progress of writing a dataset, as (stage, done, total).

    The stages in `files` count files, and the others bytes.
    """

    def stage(name: str, done: int, total: int) -> None:
        size, unit = (1, "files") if name in files else (1_000_000, "MB")
        show(done // size, -(-total // size), f"{name}, {unit}")

    return stage


def megabytes(count: float) -> str:
    """Return bytes in readable form: "3.4 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{1 if count < 100 * size else 0}f} {unit}"
    return f"{count:.0f} B"

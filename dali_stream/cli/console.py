"""Shared by the commands: results on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


def results() -> Console:
    """The console for tables. A pipe or a file gets plain text in lines long enough for a table."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=wide, highlight=False, emoji=False)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A plain table; the columns in `right` hold numbers. Long cells wrap."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def pairs() -> Table:
    """A table of names and values without lines."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    return made


def print_json(content: dict[str, Any]) -> None:
    """One object, alone on stdout."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def progress() -> Progress:
    """A bar on stderr, on terminals only; it disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def stages(bar: Progress, *, files: tuple[str, ...]) -> Callable[[str, int, int], None]:
    """A callback that shows the progress of writing a dataset, as (stage, done, total). The stages in `files` count files,
    the others bytes."""
    task = bar.add_task("", total=None)

    def show(stage: str, done: int, total: int) -> None:
        unit, what = (1, "files") if stage in files else (1_000_000, "MB")
        bar.update(task, description=f"{stage}, {what}", completed=done // unit, total=-(-total // unit))

    return show


def megabytes(count: float) -> str:
    """Bytes in readable form: "3.4 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{1 if count < 100 * size else 0}f} {unit}"
    return f"{count:.0f} B"

"""Code that the programs of this folder share: errors in one line, reports, and the rate of an epoch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dali_stream
from dali_stream.checks.frame_size import join_sizes
from dali_stream.tools import environment

Report = dict[str, Any]


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Report], text: Callable[[Report], str]) -> int:
    """Parse the arguments, measure, and print the result. Return the exit code of the program.

    Args:
        parser: Parser of the arguments, to which --json is added.
        measure: Function that returns the report, without arguments, machine and versions.
        text: Function that returns the report as text.
    """
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object in the last line")
    arguments = parser.parse_args(join_sizes())
    try:
        report = measure(arguments)
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"{Path(parser.prog).stem}: {error}", file=sys.stderr)
        return 1
    print(text(report))
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        device = str(settings.get("device", "cpu"))
        print(environment.report_json({"arguments": settings, **report, **environment.ran_on(device)}))
    return 0


class Rows:
    """Report whose rows are printed, and written to a file, as soon as they are measured. A crash keeps the earlier ones.

    Args:
        arguments: Arguments of the program. `out` is the file, or None.
        device: Device of the measurements: "cpu" or "cuda:N".
    """

    def __init__(self, arguments: argparse.Namespace, device: str) -> None:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "out"}
        self.report: Report = {"arguments": settings, **environment.ran_on(device), "rows": []}
        self._out: Path | None = arguments.out

    def add(self, row: Report, part: str = "rows") -> None:
        """Add a row to a part of the report."""
        self.report.setdefault(part, []).append(row)
        print(row, flush=True)
        if self._out:
            environment.write_report(self._out, self.report)


def epoch_rate(loader: dali_stream.Loader) -> float:
    """Return the frames per second of an epoch, after its first batch."""
    batches = iter(loader)
    next(batches)
    before, began = loader.stats()["frames"], time.perf_counter()
    for _ in batches:
        pass
    return float(loader.stats()["frames"] - before) / (time.perf_counter() - began)

"""Code that the programs of this folder share: errors in one line, reports, and the rate of an epoch."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from argument_types import new_file

import dali_stream
from dali_stream.checks.frame_size import join_sizes
from dali_stream.decode.torchcodec_cuda import device_name
from dali_stream.system.gpu import gpu_index
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


def on_gpu(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments of a program that writes `Rows` about a GPU, to which --device and --out are added.

    Returns:
        The arguments, with `gpu`, the index of the CUDA device or None for the CPU, and `device`, torch's name of it.
    """
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N; cpu serves only to test this program")
    parser.add_argument("--out", type=new_file, help="write the report to this file after each row")
    arguments = parser.parse_args(join_sizes())
    arguments.gpu = gpu_index(arguments.device)
    arguments.device = device_name(arguments.gpu)
    return arguments


class Rows:
    """Report whose rows are printed, and written to a file, as soon as they are measured. A crash keeps the earlier ones.

    Args:
        arguments: Arguments of the program. See `on_gpu`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        settings = {key: str(value) for key, value in vars(arguments).items() if key not in ("out", "gpu")}
        self.report: Report = {"arguments": settings, **environment.ran_on(arguments.device), "rows": []}
        self._out: Path | None = arguments.out

    def add(self, row: Report, part: str = "rows") -> None:
        """Add a row to a part of the report."""
        self.report.setdefault(part, []).append(row)
        print(row, flush=True)
        if self._out:
            environment.write_report(self._out, self.report)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each value of some rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def have_started(count: int) -> bool:
    """Return whether this process has at least `count` descendants that all share memory, as they do once torch is imported."""
    started = psutil.Process().children(recursive=True)
    return len(started) >= count and all(any("memfd:" in each.path for each in own.memory_maps()) for own in started)


def epoch_rate(loader: dali_stream.Loader) -> float:
    """Return the frames per second of an epoch, after its first batch."""
    batches = iter(loader)
    next(batches)
    before, began = loader.stats()["frames"], time.perf_counter()
    for _ in batches:
        pass
    return float(loader.stats()["frames"] - before) / (time.perf_counter() - began)

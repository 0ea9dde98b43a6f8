"""Summarize the reports of `dali-stream bench` in a table and in summary.csv.

    python benchmarks/summarize.py DIR

The program reads DIR/*.json, and DIR/*.failed, which benchmarks/slurm/matrix.sh writes if a measurement fails. It writes
DIR/summary.csv. A report that cannot be read gets a row with the error, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = {  # entry of a report: name with its unit, and the size of this unit in the unit of the report
    "frames_per_s_node": ("frames/s", 1), "samples_per_s": ("samples/s", 1), "first_batch_latency_s": ("first batch, s", 1),
    "p50_sample_latency_ms": ("wait p50, ms", 1), "p95_sample_latency_ms": ("wait p95, ms", 1),
    "p99_sample_latency_ms": ("wait p99, ms", 1), "decoded_per_delivered_frame": ("decoded per frame", 1),
    "unique_episodes_per_batch": ("episodes per batch", 1), "cpu_s_per_sample": ("CPU per sample, ms", 1e-3),
    "fetched_bytes": ("fetched, MB", 1e6), "peak_rss_bytes": ("memory, MB", 1e6), "peak_gpu_bytes": ("GPU memory, MB", 1e6),
}  # fmt: skip
SECONDS = ("decode_s_total", "fetch_s_total", "wait_s_total", "wallclock_s")  # only in summary.csv
HEAD = ("source", "mode", "decode", "decoders", "ranks", "nodes", "batch_size", "status")
NAMED = HEAD[:3]  # parts of the name of a measurement
MAY_LACK = ("peak_gpu_bytes", "decoded_per_delivered_frame")  # values that are None without a GPU or without video
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder with reports")
    folder = parser.parse_args().folder
    rows = [*map(read, sorted(folder.glob("*.json"))), *map(failed, sorted(folder.glob("*.failed")))]
    if not (rows := [row for row in rows if row]):
        problem = "one without" if folder.is_dir() else "no folder"
        print(
            f"summarize: folder must be a folder with reports, got {problem}: {folder}. Write reports with "
            "`dali-stream bench URI --out-dir DIR`",
            file=sys.stderr,
        )
        return 1
    with (folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*HEAD, *COLUMNS, *SECONDS, "verdict"])
        writer.writeheader()
        writer.writerows(rows)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table([row for row in rows if "verdict" in row]))
    for row in rows:
        said = f"{number(row['frames_per_s_node'])} frames/s. {row['verdict']}" if "verdict" in row else row["status"]
        console.print(Text(f"{name(row)}: {said}"))
    print(folder / "summary.csv")
    return 1 if any(row["status"].startswith("unreadable") for row in rows) else 0


def read(path: Path) -> Row | None:
    """Return the row of a report, or of a file that cannot be read. None for JSON that is not a report."""
    try:
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or "frames_per_s_node" not in report:
            return None
        decoders = ", ".join(sorted({route["decoder"] for route in report["routes"].values()}))
        known = {"decoders": decoders, "status": "ok", "verdict": str(report["bottleneck"]["text"])} | report
        for key in (*COLUMNS, *SECONDS):
            value = report[key]
            if not (isinstance(value, (int, float)) and math.isfinite(value)) and not (value is None and key in MAY_LACK):
                raise ValueError(f"{key} must be a number, got {value!r}")
        return {key: known[key] for key in (*HEAD, *COLUMNS, *SECONDS, "verdict")}
    except (KeyError, TypeError, AttributeError) as error:
        text = f"not a report that `dali-stream bench URI` wrote: {type(error).__name__} {error}"
    except ValueError as error:
        text = str(error)
    return named(path) | {"status": f"unreadable: {text}"}


def failed(path: Path) -> Row:
    """Return the row of a failed measurement."""
    return named(path) | {"status": path.read_text(errors="replace").strip()}


def named(path: Path) -> Row:
    """Return the parts of a measurement's name from the name of its file. matrix.sh writes no other "-" into names."""
    parts = path.stem.rsplit("-", 2)
    return dict(zip(NAMED, parts, strict=True)) if len(parts) == 3 else {"source": path.stem}


def table(rows: list[Row]) -> Table:
    """Return a table of the successful measurements, without columns that are empty."""
    keys = [key for key in COLUMNS if any(row[key] for row in rows)]
    made = Table("measurement", "decoder", *(COLUMNS[key][0] for key in keys), box=None)
    made.columns[0].no_wrap = True
    for row in rows:
        numbers = (row[key] if row[key] is None else row[key] / COLUMNS[key][1] for key in keys)
        made.add_row(*map(Text, (name(row), row["decoders"], *map(number, numbers))))
    return made


def name(row: Row) -> str:
    """Return the name of a measurement."""
    return " ".join(str(row[key]) for key in NAMED if key in row)


def number(value: float | None) -> str:
    """Return a number as text: a whole number without decimals, and any other number with at least three digits."""
    if value is None:
        return ""
    return f"{value:.{0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2}f}"


if __name__ == "__main__":
    sys.exit(main())

"""The reports of `dali-stream bench` in one table, summary.csv, and a page with plots that needs no network.

    python benchmarks/summarize.py DIR [--json]

Reads DIR/*.json, and DIR/*.failed, which benchmarks/slurm/matrix.sh leaves where a measurement failed. Writes
DIR/summary.csv and DIR/summary.html. A report that cannot be read is a row that says so, and the exit code is 1 then. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = {
    "frames_per_s_node": "frames/s", "samples_per_s": "samples/s", "first_batch_latency_s": "first batch, s",
    "p50_sample_latency_ms": "p50, ms", "p95_sample_latency_ms": "p95, ms", "p99_sample_latency_ms": "p99, ms",
    "decode_s_total": "decode, s", "fetch_s_total": "fetch, s", "wait_s_total": "wait, s", "wallclock_s": "of, s",
    "fetched_bytes": "fetched, B", "decoded_per_delivered_frame": "decoded per frame",
    "unique_episodes_per_batch": "episodes per batch", "cpu_s_per_sample": "CPU s per sample",
    "peak_rss_bytes": "RSS, B", "peak_gpu_bytes": "GPU, B",
}  # fmt: skip
LINES = ("wait_s", "decode_s", "fetch_s")  # of the time line
SHOWN = list(COLUMNS)[:10]  # on a terminal
HEAD = ("source", "mode", "decode", "decoders", "ranks", "nodes", "batch_size", "status")
MAY_LACK = ("peak_gpu_bytes", "decoded_per_delivered_frame")  # a figure, where there is no GPU or no video


class Found(NamedTuple):
    """What a folder holds: a row for each measurement, and the whole reports of those that went well."""

    rows: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    unreadable: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with reports")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object as the last line")
    arguments = parser.parse_args()
    rows, reports, unreadable = read(arguments.folder)
    if not rows:
        what = "holds no report" if arguments.folder.is_dir() else "is no folder"
        print(f"summarize: {arguments.folder} {what}; write reports with dali-stream bench --out-dir", file=sys.stderr)
        return 1
    with (arguments.folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*HEAD, *COLUMNS])
        writer.writeheader()
        writer.writerows(rows)
    (arguments.folder / "summary.html").write_text(page(rows, reports))
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    print(f"{arguments.folder / 'summary.csv'}, {arguments.folder / 'summary.html'}")
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 1 if unreadable else 0


def read(folder: Path) -> Found:
    """The reports, what cannot be read as one, and the measurements that failed. Other JSON is passed over."""
    rows, reports, bad = [], [], []
    for path in sorted(folder.glob("*.json")):
        try:
            report = json.loads(path.read_text())
            if isinstance(report, dict) and "frames_per_s_node" in report:
                rows.append(row(report))
                reports.append(report)
        except ValueError as error:
            bad.append(named(path) | {"status": f"unreadable: {error}"})
    failed = [named(path) | {"status": path.read_text(errors="replace").strip()} for path in sorted(folder.glob("*.failed"))]
    return Found([*rows, *bad, *failed], reports, len(bad))


def named(path: Path) -> dict[str, str]:
    """What the name of a file says of its measurement, whose label has no "-" where matrix.sh gave it."""
    parts = path.stem.rsplit("-", 2)
    return dict(zip(HEAD, parts, strict=False)) if len(parts) == 3 else {"source": path.stem}


def row(report: dict[str, Any]) -> dict[str, Any]:
    """A report's plain figures. Raises ValueError where it lacks any that the table, the page or the plots show."""
    try:
        decoders = ", ".join(sorted({route["decoder"] for route in report["routes"].values()}))
        points = [(key, point[key]) for point in report["timeline"] for key in ("s", *LINES)]
        machine(report)  # raises where it is not said
        known = {"decoders": decoders, "status": "ok"} | report
        found = {key: known[key] for key in (*HEAD, *COLUMNS)}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no report of dali-stream bench: {type(error).__name__} {error}") from error
    for key, value in [*points, *((key, found[key]) for key in COLUMNS)]:
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if not number and not (value is None and key in MAY_LACK):
            raise ValueError(f"{key} is {value!r}, which is no number")
    return found


def machine(report: dict[str, Any]) -> str:
    """What it was measured on, and when."""
    on = report["machine"]
    return f"{on['processor']}, {on['cores']} cores, {on['gpu'] or 'no GPU'}, {report['date']}"


def table(rows: list[dict[str, Any]]) -> Table:
    """What a terminal shows."""
    made = Table(*HEAD[:4], *(COLUMNS[key] for key in SHOWN), "status", box=None)
    made.columns[0].no_wrap = True
    for each in rows:
        made.add_row(*(Text(text(each.get(key))) for key in (*HEAD[:4], *SHOWN, "status")))
    return made


def text(value: Any) -> str:
    """A number to four digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value)


def page(rows: list[dict[str, Any]], reports: list[dict[str, Any]]) -> str:
    """The page: the table and three plots, all in one file."""
    names = [*HEAD, *COLUMNS.values()]
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(text(each.get(key)))}</td>' for key in (*HEAD, *COLUMNS))}</tr>\n" for each in rows
    )
    plots = "".join(f"<h2>{title}</h2>\n{svg}\n" for title, svg in drawn(reports)) if reports else ""
    machines = sorted({machine(report) for report in reports})
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dali-stream bench</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} td, th {{ padding: 2px 8px; text-align: right }}
table {{ border-collapse: collapse }} tr:nth-child(even) {{ background: #eee }} svg {{ max-width: 100% }}</style></head><body>
<h1>dali-stream bench</h1>
<p>{html.escape("; ".join(machines))}</p>
<table><tr>{"".join(f"<th>{html.escape(name)}</th>" for name in names)}</tr>
{body}</table>
{plots}</body></html>
"""


def drawn(reports: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title, SVG) of each plot."""
    matplotlib.rcParams["text.parse_math"] = False  # a label's "$" is one
    labels = [f"{report['source']} {report['mode']} {report['decode']}" for report in reports]
    speed, latency = Figure(figsize=(9, 1 + 0.4 * len(reports))), Figure(figsize=(9, 1 + 0.7 * len(reports)))
    axes = speed.subplots()
    axes.barh(labels, [report["frames_per_s_node"] for report in reports])
    axes.set_xlabel("frames/s per node")
    axes.invert_yaxis()
    axes = latency.subplots()
    for number, percentile in enumerate((50, 95, 99)):
        places = [place + (number - 1) * 0.27 for place in range(len(reports))]
        axes.barh(places, [report[f"p{percentile}_sample_latency_ms"] for report in reports], 0.25, label=f"p{percentile}")
    axes.set_yticks(range(len(reports)), labels)
    axes.set_xlabel("ms from asking for a sample's batch until it is on the device")
    axes.invert_yaxis()
    axes.legend()
    lines = Figure(figsize=(9, 2.2 * len(reports)))
    for axes, report, label in zip(lines.subplots(len(reports), squeeze=False)[:, 0], reports, labels, strict=True):
        time_line(axes, report, label)
    return [("Throughput", svg(speed)), ("Latency", svg(latency)), ("Time line: seconds of work and of waiting", svg(lines))]


def time_line(axes: Axes, report: dict[str, Any], label: str) -> None:
    """Seconds so far that were waited, decoded (all threads) and fetched (all reads), over the time of the measurement."""
    points = report["timeline"]
    for name in LINES:
        axes.plot([point["s"] for point in points], [point[name] for point in points], label=name.removesuffix("_s"))
    axes.set_title(label, fontsize=9)
    axes.set_xlabel("s")
    axes.legend(fontsize=8)


def svg(figure: Figure) -> str:
    """The figure as an element of a page."""
    figure.set_layout_engine("constrained")
    made = io.StringIO()
    figure.savefig(made, format="svg", metadata={"Date": None})
    return made.getvalue()[made.getvalue().index("<svg") :]


if __name__ == "__main__":
    sys.exit(main())

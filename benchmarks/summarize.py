"""The reports of `dali-stream bench` in one table, summary.csv, and a page with plots that needs no network.

    python benchmarks/summarize.py DIR [--json]

Reads DIR/*.json, and DIR/*.failed, which benchmarks/slurm/matrix.sh leaves where a measurement failed. Writes
DIR/summary.csv and DIR/summary.html. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

COLUMNS = {
    "frames_per_s_node": "frames/s", "samples_per_s": "samples/s", "first_batch_latency_s": "first batch, s",
    "p50_sample_latency_ms": "p50, ms", "p95_sample_latency_ms": "p95, ms", "p99_sample_latency_ms": "p99, ms",
    "decode_s_total": "decode, s", "fetch_s_total": "fetch, s", "wait_s_total": "wait, s", "wallclock_s": "of, s",
    "fetched_bytes": "fetched, B", "decoded_per_delivered_frame": "decoded per frame",
    "unique_episodes_per_batch": "episodes per batch", "cpu_s_per_sample": "CPU s per sample",
    "peak_rss_bytes": "RSS, B", "peak_gpu_bytes": "GPU, B",
}  # fmt: skip
SHOWN = list(COLUMNS)[:10]  # on a terminal
HEAD = ("source", "mode", "decode", "decoders", "ranks", "nodes", "batch_size", "status")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with reports")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object as the last line")
    arguments = parser.parse_args()
    reports, failed = read(arguments.folder)
    if not reports and not failed:
        print(f"summarize: {arguments.folder} holds no report; write some with dali-stream bench --out-dir", file=sys.stderr)
        return 1
    rows = [row(report) for report in reports] + [{"source": name, "status": status} for name, status in failed]
    with (arguments.folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*HEAD, *COLUMNS])
        writer.writeheader()
        writer.writerows(rows)
    (arguments.folder / "summary.html").write_text(page(rows, reports))
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    print(f"{arguments.folder / 'summary.csv'}, {arguments.folder / 'summary.html'}")
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 0


def read(folder: Path) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The reports, and (name, what became of it) of the measurements that failed."""
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    reports = [report for report in found if isinstance(report, dict) and "frames_per_s_node" in report]
    failed = [(path.stem, f"failed with exit code {path.read_text().strip()}") for path in sorted(folder.glob("*.failed"))]
    return reports, failed


def row(report: dict[str, Any]) -> dict[str, Any]:
    """A report's plain figures."""
    decoders = ", ".join(sorted({route["decoder"] for route in report["routes"].values()}))
    known = {"decoders": decoders, "status": "ok"} | report
    return {key: known[key] for key in (*HEAD, *COLUMNS)}


def table(rows: list[dict[str, Any]]) -> Table:
    """What a terminal shows."""
    made = Table(*HEAD[:4], *(COLUMNS[key] for key in SHOWN), "status", box=None)
    for each in rows:
        made.add_row(*(text(each.get(key)) for key in (*HEAD[:4], *SHOWN, "status")))
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
    machines = sorted({f"{report['machine']['processor']}, {report['machine']['cores']} cores, "
                       f"{report['machine']['gpu'] or 'no GPU'}, {report['date']}" for report in reports})  # fmt: skip
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
    for name in ("wait_s", "decode_s", "fetch_s"):
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

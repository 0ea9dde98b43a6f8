"""Summarize the reports of `dali-stream bench` in a table, summary.csv, and a page with plots that needs no network.

    python benchmarks/summarize.py DIR [--json]

The program reads DIR/*.json, and DIR/*.failed, which benchmarks/slurm/matrix.sh writes if a measurement fails. It writes
DIR/summary.csv and DIR/summary.html. A report that cannot be read gets a row with the error, and the exit code is 1. matplotlib
is required.
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

from dali_stream.run.bottleneck import STAGES

COLUMNS = {  # entry of a report: name with its unit, and the size of this unit in the unit of the report
    "frames_per_s_node": ("frames/s", 1), "samples_per_s": ("samples/s", 1), "first_batch_latency_s": ("first batch, s", 1),
    "p50_sample_latency_ms": ("wait p50, ms", 1), "p95_sample_latency_ms": ("wait p95, ms", 1),
    "p99_sample_latency_ms": ("wait p99, ms", 1), "decoded_per_delivered_frame": ("decoded per frame", 1),
    "unique_episodes_per_batch": ("episodes per batch", 1), "cpu_s_per_sample": ("CPU per sample, ms", 1e-3),
    "fetched_bytes": ("fetched, MB", 1e6), "peak_rss_bytes": ("memory, MB", 1e6), "peak_gpu_bytes": ("GPU memory, MB", 1e6),
}  # fmt: skip
SECONDS = ("decode_s_total", "fetch_s_total", "wait_s_total", "wallclock_s")  # only in summary.csv; the page has their shares
LINES = {"wait_s": "waiting for batches", "decode_s": "decoding, all threads", "fetch_s": "fetching, all requests"}
HEAD = ("source", "mode", "decode", "decoders", "ranks", "nodes", "batch_size", "status")
NAMED = HEAD[:3]  # parts of the label of a measurement
MAY_LACK = ("peak_gpu_bytes", "decoded_per_delivered_frame")  # values that are None without a GPU or without video
MODES = {
    "single": "the current frame of all cameras",
    "sarm": "windows: 8 frames of all cameras, 1 s apart",
    "action_chunk": "the current frame of all cameras, and the next 50 actions",
}
HOW = {
    "measurement": "A consumer without a model asks for batches, waits until each is on the device, and drops it.",
    "frames/s, samples/s": "delivered frames or samples per second of wall-clock time, after the warm-up, per node",
    "first batch": "from making the Loader to its first batch",
    "wait p50, wait p95, wait p99": "percentiles of the time from asking for a batch until it is on the device",
    "decoded per frame": "frames that the decoder had to decode for each frame delivered, because of keyframes",
    "share of time": "of the thread that iterates, of the planner thread, and of the decode threads together",
    "MB": "10⁶ bytes; memory is the peak of one process",
}


class Contents(NamedTuple):
    """Contents of a folder: a row for each measurement, and the reports of successful measurements."""

    rows: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    unreadable: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder with reports")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object as the last line")
    arguments = parser.parse_args()
    rows, reports, unreadable = read(arguments.folder)
    if not rows:
        problem = "one without" if arguments.folder.is_dir() else "no folder"
        print(
            f"summarize: folder must be a folder with reports, got {problem}: {arguments.folder}. Write reports with "
            "`dali-stream bench URI --out-dir DIR`",
            file=sys.stderr,
        )
        return 1
    with (arguments.folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*HEAD, *COLUMNS, *SECONDS, "verdict"])
        writer.writeheader()
        writer.writerows(rows)
    (arguments.folder / "summary.html").write_text(page(rows, reports))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    head, *body = cells(rows)
    table = Table(*head, box=None)
    table.columns[0].no_wrap = True
    for each in body:
        table.add_row(*map(Text, each))
    console.print(table)
    for name, verdict in verdicts(rows):
        console.print(Text(f"{name}: {verdict}"))
    print(f"{arguments.folder / 'summary.csv'}, {arguments.folder / 'summary.html'}")
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 1 if unreadable else 0


def read(folder: Path) -> Contents:
    """Read the reports, unreadable files, and failed measurements. Other JSON files are ignored."""
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
    return Contents([*rows, *bad, *failed], reports, len(bad))


def named(path: Path) -> dict[str, str]:
    """Return the parts of a measurement's label from the name of its file. matrix.sh writes no other "-" into names."""
    parts = path.stem.rsplit("-", 2)
    return dict(zip(HEAD, parts, strict=False)) if len(parts) == 3 else {"source": path.stem}


def row(report: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a report. Raises ValueError if a value of the table, the page or the plots is missing."""
    try:
        decoders = ", ".join(sorted({route["decoder"] for route in report["routes"].values()}))
        points = [(key, point[key]) for point in report["timeline"] for key in ("s", *LINES)]
        points += [(key, share) for key, share in shares(report).items()]
        facts(report)  # raises if an entry is missing
        known = {"decoders": decoders, "status": "ok", "verdict": str(report["bottleneck"]["text"])} | report
        values = {key: known[key] for key in (*HEAD, *COLUMNS, *SECONDS, "verdict")}
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"not a report that `dali-stream bench URI` wrote: {type(error).__name__} {error}") from error
    for key, value in [*((key, values[key]) for key in (*COLUMNS, *SECONDS)), *points]:
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if not number and not (value is None and key in MAY_LACK):
            raise ValueError(f"{key} must be a number, got {value!r}")
    return values


def shares(report: dict[str, Any]) -> dict[str, float]:
    """Return the share of each stage in the time of its threads. A stage has one thread per rank, or all decode threads."""
    wall = report["wallclock_s"] * report["ranks"]
    threads = {"decode threads": report["num_threads"]}
    return {key: report["stage_s_total"][key] / wall / threads.get(who, 1) for who, keys in STAGES.items() for key in keys}


def facts(report: dict[str, Any]) -> dict[str, str]:
    """Return a description of machine, dataset, settings, decoder and versions."""
    on, size = report["machine"], report["image_size"]
    cameras = ", ".join(f"{name.rpartition('.')[2]} {height}×{width}" for name, (height, width) in report["cameras"].items())
    return {
        "machine": f"{on['processor']}, {on['cores']} cores, {on['gpu'] or 'no GPU'}; {report['nodes']} node(s), "
        f"{report['ranks']} rank(s); batches on {report['device']}",
        "dataset": f"{report['dataset']}: {report['episodes']} episodes, {report['dataset_frames']} frames at "
        f"{report['fps']:g} frames per second; cameras: {cameras}",
        "settings": f"batches of {report['batch_size']}, frames resized to "
        f"{'their recorded size' if size is None else f'{size[0]}×{size[1]}'}, {report['image_dtype']}, "
        f"{report['num_threads']} decode threads, memory_budget {report['memory_budget']}, cache_dir "
        f"{report['cache_dir'] or 'none'}, {report['consumers']} consumers",
        "measured": f"{report['num_batches']} batches after {report['warmup']} of warm-up, on {report['date']}",
        "decoder": "; ".join(
            f"{name.rpartition('.')[2]}: {r['decoder']}, since {r['reason']}" for name, r in report["routes"].items()
        ),
        "versions": ", ".join(f"{name} {version or 'none'}" for name, version in report["versions"].items()),
    }


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table of the successful measurements. Its first row has the names of all columns that are not empty."""
    well = [each for each in rows if "verdict" in each]
    keys = [key for key in COLUMNS if any(each[key] for each in well)]
    table = [["measurement", "decoder", *(COLUMNS[key][0] for key in keys)]]
    for each in well:
        numbers = (each[key] if each[key] is None else each[key] / COLUMNS[key][1] for key in keys)
        table.append([label(each), each["decoders"], *map(text, numbers)])
    return table


def label(measurement: dict[str, Any]) -> str:
    """Return the name of a measurement."""
    return " ".join(str(measurement[key]) for key in NAMED if key in measurement)


def verdicts(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (name of a measurement, its verdict or its error) for each measurement."""
    return [
        (label(each), f"{text(each['frames_per_s_node'])} frames/s. {each['verdict']}" if "verdict" in each else each["status"])
        for each in rows
    ]


def text(value: Any) -> str:
    """Return a number as text: a whole number without decimals, and any other number with at least three digits."""
    if isinstance(value, (int, float)):
        digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
        return f"{value:.{digits}f}"
    return "" if value is None else str(value)


def page(rows: list[dict[str, Any]], reports: list[dict[str, Any]]) -> str:
    """Return the page as HTML: verdicts, tables, descriptions and three plots."""
    items = "".join(f"<li><b>{html.escape(name)}</b>: {html.escape(verdict)}</li>\n" for name, verdict in verdicts(rows))
    parts = {"Verdicts": f"<ul>{items}</ul>"}
    if reports:
        modes = {f"mode {report['mode']}": MODES.get(report["mode"], "") for report in reports}
        times = [["share of time, %", *(name for stages in STAGES.values() for name in stages.values())]]
        times += [[label(report), *(f"{share * 100:.0f}" for share in shares(report).values())] for report in reports]
        threads = "".join(f"<th colspan={len(stages)}>{who}</th>" for who, stages in STAGES.items())
        parts |= {
            "Figures": grid(cells(rows)),
            "Share of time by stage": grid(times, f"<tr><th></th>{threads}</tr>"),
            "Conditions": listed({**circumstances(reports), **HOW, **modes}),
            **dict(drawn(reports)),
        }
    body = "\n".join(f"<h2>{title}</h2>\n{part}" for title, part in parts.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dali-stream bench</title>
<style>body {{ font: 14px sans-serif; margin: 2em auto; max-width: 1280px; padding: 0 16px; line-height: 1.4 }}
td, th {{ padding: 3px 8px; text-align: right; vertical-align: bottom }} th {{ font-weight: 600 }}
td:first-child, th:first-child {{ text-align: left; overflow-wrap: anywhere }} th[colspan] {{ text-align: center }}
table {{ border-collapse: collapse }} tr:nth-child(even) {{ background: #f0f0f0 }}
dt {{ font-weight: 600 }} dd {{ margin: 0 0 6px 2em }} dd, dt, li {{ overflow-wrap: anywhere }} li {{ margin-bottom: 4px }}
svg {{ max-width: 100%; height: auto }}</style></head><body>
<h1>Data loading without a model: dali-stream bench</h1>
{body}</body></html>
"""


def grid(cells: list[list[str]], above: str = "") -> str:
    """Return a table as HTML. The first row of cells has the names of the columns, and `above` is a row before it."""
    head, *body = [[html.escape(each) for each in row] for row in cells]
    rows = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>", *(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in body)]
    return "\n".join(["<table>", above, *rows, "</table>"])


def listed(entries: dict[str, str]) -> str:
    """Return names and their descriptions as HTML."""
    return "<dl>" + "\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in entries.items()) + "</dl>"


def circumstances(reports: list[dict[str, Any]]) -> dict[str, str]:
    """Return the `facts` of all reports: once if they agree, and otherwise with the names of their measurements."""
    descriptions = {}
    for name in facts(reports[0]):
        by_value: dict[str, list[str]] = {}
        for report in reports:
            by_value.setdefault(facts(report)[name], []).append(label(report))
        for value, labels in by_value.items():
            descriptions[name if len(by_value) == 1 else f"{name} of {', '.join(labels)}"] = value
    return descriptions


def drawn(reports: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (title, SVG) of each plot."""
    matplotlib.rcParams["text.parse_math"] = False  # a "$" in a label is not the start of a formula
    labels = [label(report) for report in reports]
    speed, waits = Figure(figsize=(9, 1 + 0.4 * len(reports))), Figure(figsize=(9, 1 + 0.7 * len(reports)))
    axes = speed.subplots()
    axes.bar_label(axes.barh(labels, [report["frames_per_s_node"] for report in reports]), fmt="%.0f", padding=3)
    axes.set_xlabel("frames per second and node")
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes = waits.subplots()
    for number, percentile in enumerate((50, 95, 99)):
        places = [place + (number - 1) * 0.27 for place in range(len(reports))]
        axes.barh(places, [report[f"p{percentile}_sample_latency_ms"] for report in reports], 0.25, label=f"p{percentile}")
    axes.set_yticks(range(len(reports)), labels)
    axes.set_xlabel("ms from asking for a batch until it is on the device")
    axes.invert_yaxis()
    axes.legend()
    lines = Figure(figsize=(9, 2.2 * len(reports)))
    for axes, report, name in zip(lines.subplots(len(reports), squeeze=False)[:, 0], reports, labels, strict=True):
        time_line(axes, report, name)
    return [("Throughput", svg(speed)), ("Wait for a batch", svg(waits)), ("Seconds of work and of waiting so far", svg(lines))]


def time_line(axes: Axes, report: dict[str, Any], name: str) -> None:
    """Plot the accumulated seconds of each of `LINES` over the time of the measurement. Flat lines are left out."""
    points = report["timeline"]
    for key, meaning in LINES.items():
        if key == "wait_s" or any(point[key] for point in points):
            axes.plot([point["s"] for point in points], [point[key] for point in points], label=meaning)
    axes.set_title(name, fontsize=9)
    axes.set_xlabel("time, s")
    axes.set_ylabel("sum, s")
    axes.legend(fontsize=8)


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element of a page."""
    figure.set_layout_engine("constrained")
    made = io.StringIO()
    figure.savefig(made, format="svg", metadata={"Date": None})
    return made.getvalue()[made.getvalue().index("<svg") :]


if __name__ == "__main__":
    sys.exit(main())

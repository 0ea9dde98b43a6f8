"""Draw a bar chart of reports of peers.py, as an SVG with its panels and numbers as text.

    python benchmarks/peers_chart.py REPORT.json ... [--frame-cache REPORT.json] --out CHART.svg

The chart has a panel per report, with a bar per loader. `--frame-cache` adds a panel with the first dataset of a report of
disk_frames.py: epochs of a dataset that does not fit in memory, without and with a frame cache on disk. A bar shows the median
of the rounds, and a line from the slowest to the fastest round. A loader whose second epoch was measured separately has two
bars. The footer names loaders that failed, the machine, the dataset, versions and the date. `make figures` draws
docs/figures/peers.svg.

matplotlib measures the text, so that none is cut, and draws it as outlines, which need no fonts of the reader. The file
therefore has its content as text in `<title>` and `<desc>` as well. Its background is white, so that it is readable on light
and on dark pages.
"""

from __future__ import annotations

import argparse
import io
import json
import textwrap
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from argument_types import new_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OWN, OTHER, INK, DIM = "#0b7a5c", "#a9b4c2", "#1c2128", "#57606a"  # bars of dali_stream, other bars, text, notes
# In pixels: width of the figure and of the space beside notes, and heights of a bar, of a title and of a line of a note.
WIDTH, MARGIN, ROW, HEADING, LINE = 860, 12, 30, 40, 20
PIXELS = 96  # per inch, as in browsers
NOTE = 125  # maximum number of characters in a line of a note
STYLE = {
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # part of matplotlib
    "font.size": 9,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "dali_stream",
    "text.color": INK,
    "text.parse_math": False,  # a "$" in a label is not the start of a formula
    "ytick.labelcolor": INK,
}
MODES = {
    "single": "Single frames",
    "sarm": "Windows of 8 frames, 1 s apart",
    "action_chunk": "Single frames with 50 actions",
}
NAMES = {  # names before the settings
    "torchcodec": "Plain torchcodec loop",
    "torchcodec-cuda": "Plain torchcodec loop, NVDEC",
    "lerobot": "LeRobotDataset",
    "lerobot-uint8": "LeRobotDataset, uint8",
    "lerobot-streaming": "StreamingLeRobotDataset",
    "lerobot-new-streaming": "New streaming",
    "lerobot-new-streaming-uint8": "New streaming, uint8",
}
NEW_STREAMING = "lerobot-new-streaming"  # the chart has the fastest of its settings, which the footer describes
NOT_RUN = ("no GPU", "no LeRobot")  # beginnings of the error of a side that was not run
EPOCHS = {  # of the report of disk_frames.py
    "without": "no frame cache, every epoch",
    "filling": "frame_cache, first epoch",
    "warm": "frame_cache, later epochs",
    "cold": "the same, not in page cache",
}
Report = dict[str, Any]


class Bar(NamedTuple):
    """A bar with a label before it and a figure after it. A line shows the rounds, from the slowest to the fastest."""

    label: str
    value: float
    figure: str
    ours: bool
    rounds: list[float]


class Picture(NamedTuple):
    """A chart.

    Attributes:
        figure: The drawn figure.
        svg: The SVG file.
        text: All panels and numbers, for readers who cannot see the chart. Pages have it as the text of the picture.
        notes: Sentences below the bars.
    """

    figure: Figure
    svg: str
    text: str
    notes: list[str]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="reports of peers.py")
    parser.add_argument("--frame-cache", type=Path, metavar="REPORT", help="report of disk_frames.py, for another panel")
    parser.add_argument("--out", type=new_file, required=True, help="the SVG")
    arguments = parser.parse_args(argv)
    on_disk = json.loads(arguments.frame_cache.read_text()) if arguments.frame_cache else None
    arguments.out.write_text(chart([json.loads(path.read_text()) for path in arguments.reports], on_disk).svg)


def chart(reports: list[Report], on_disk: Report | None = None) -> Picture:
    """Draw the chart. It depends only on the reports, so that a test can compare it with the committed chart."""
    panels = [panel(report) for report in reports] + ([frame_cache_panel(on_disk)] if on_disk else [])
    notes = footer(reports, on_disk)
    titles = "; ".join(title for title, _ in panels)
    text = " ".join(f"{title}: {'; '.join(f'{bar.label}: {bar.figure}' for bar in bars)}." for title, bars in panels)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the settings of the user
        matplotlib.rcParams.update(STYLE)
        figure = draw(panels, notes)
        return Picture(figure, svg(figure, f"Frames per second. {titles}", " ".join([text, *notes])), text, notes)


def draw(panels: list[tuple[str, list[Bar]]], notes: list[str]) -> Figure:
    """Draw the panels, one below the other, and the notes at the bottom."""
    lines = [line for note in notes for line in textwrap.wrap(note, NOTE)]
    below, sizes = LINE * len(lines) + MARGIN, [len(bars) for _, bars in panels]
    above = HEADING * len(panels) + ROW * sum(sizes)
    whole = above + below
    figure = Figure(figsize=(WIDTH / PIXELS, whole / PIXELS), layout="constrained")
    figure.get_layout_engine().set(rect=(0, below / whole, 1, above / whole), w_pad=0.1, h_pad=0.06, hspace=0)
    for number, line in enumerate(reversed(lines)):
        note = figure.text(MARGIN / WIDTH, (MARGIN + LINE * number) / whole, line, color=DIM, size=8.5, va="bottom")
        note.set_in_layout(False)
    all_axes = figure.subplots(len(panels), height_ratios=sizes, sharex=True, squeeze=False)[:, 0]
    for axes, (title, bars) in zip(all_axes, panels, strict=True):
        draw_panel(axes, title, bars)
    return figure


def draw_panel(axes: Axes, title: str, bars: list[Bar]) -> None:
    """Draw horizontal bars, from the top to the bottom, below a title at the left end of the figure."""
    axes.set_title(" ", size=13)  # room for the title
    place = axes.annotate(
        title,
        xy=(MARGIN / WIDTH, 1),
        xycoords=("figure fraction", "axes fraction"),
        xytext=(0, 7),
        textcoords="offset points",
        weight="bold",
        size=10.5,
        annotation_clip=False,
    )
    place.set_in_layout(False)
    rows = range(len(bars))
    drawn = axes.barh(
        rows,
        [bar.value for bar in bars],
        0.68,
        color=[OWN if bar.ours else OTHER for bar in bars],
        xerr=[[bar.value - min(bar.rounds) for bar in bars], [max(bar.rounds) - bar.value for bar in bars]],
        error_kw={"ecolor": INK, "elinewidth": 1.2},
    )
    figures = axes.bar_label(drawn, [bar.figure for bar in bars], padding=5)
    axes.set_yticks(rows, [bar.label for bar in bars])
    for bar, *texts in zip(bars, figures, axes.get_yticklabels(), strict=True):
        for text in texts:
            text.set_weight("bold" if bar.ours else "normal")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)


def svg(figure: Figure, title: str, text: str) -> str:
    """Return a figure as an SVG file with a title and its content as text. It depends on nothing but matplotlib's version."""
    made = io.StringIO()
    figure.savefig(made, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, head, rest = made.getvalue().partition("<svg ")
    attributes, _, content = rest.partition(">\n")
    texts = f"<title>{escape(title)}</title>\n <desc>{escape(text)}</desc>"
    lines = f'{head}role="img" {attributes}>\n {texts}\n{content}'.splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def panel(report: Report) -> tuple[str, list[Bar]]:
    """Return the title and the bars of a report, the fastest loader first."""
    bars = []
    for side in sorted(ran(report), key=lambda side: -side["frames_per_s"]):
        wrong = "" if side["frames"]["equal"] else ", WRONG FRAMES"
        second = side.get("second_epoch_rounds")
        epochs = [(", first epoch" if second else "", side["frames_per_s"], side["rounds"])]
        epochs += [(", second epoch", side["second_epoch_frames_per_s"], second)] if second else []
        for suffix, rate, rounds in epochs:
            bars.append(Bar(named(side) + suffix, rate, f"{rate:.0f}{wrong}", side["name"] == "dali_stream", rounds))
    return title(report), bars


def frame_cache_panel(report: Report) -> tuple[str, list[Bar]]:
    """Return the title and the bars of the first dataset of a report of disk_frames.py, with the cache on a disk."""
    (height, width), budget = report["arguments"]["image_size"], report["arguments"]["memory_budget"]
    place = next(place for place in report["datasets"][0]["folders"] if place["folder"] == "disk")
    rates, rounds = place["frames_per_s"], place["rounds"]
    bars = [Bar(label, rates[name], f"{rates[name]:.0f}", True, rounds[name]) for name, label in EPOCHS.items()]
    return f"Single frames, memory_budget={budget}, too small for all: uint8 frames/s of {height}×{width}, batch 64", bars


def ran(report: Report) -> list[Report]:
    """Return the loaders of a report that did not fail. LeRobot's new streaming is included with its fastest setting only."""
    able = [side for side in report["peers"] if side["frames_per_s"] and not side["error"]]
    new = [side for side in able if side["name"].startswith(NEW_STREAMING)]
    fastest = max(new, key=lambda side: side["frames_per_s"], default=None)
    return [side for side in able if side is fastest or side not in new]


def named(side: Report) -> str:
    """Return the name of a loader for readers."""
    kind, _, settings = side["name"].partition(", ")
    name = NAMES.get(kind, kind)
    return name if kind.startswith(NEW_STREAMING) or not settings else f"{name}, {settings}"


def title(report: Report) -> str:
    """Return a line with the request: mode, size and batch size."""
    settings = report["arguments"]
    height, _, width = settings.get("image_size", "None").strip("[]()").partition(", ")
    resized = f" of {height}×{width}" if width else ""
    return f"{MODES.get(settings['mode'], settings['mode'])}: float32 frames/s{resized}, batch {settings['batch_size']}"


def footer(reports: list[Report], on_disk: Report | None = None) -> list[str]:
    """Return the lines below the bars: loaders that failed, and the circumstances of the measurement."""
    failed: dict[str, list[str]] = {}
    for report in reports:
        for side in report["peers"]:
            if side["error"] and not side["error"].startswith(NOT_RUN):
                failed.setdefault(named(side), []).append(title(report).partition(":")[0].lower())
    lines = [f"Failed: {name} ({' and '.join(modes)})." for name, modes in failed.items()]
    lines.append(
        "Bar: median of the rounds. Line: slowest to fastest round. Frames of every loader were compared with FFmpeg's."
    )
    sides = [side for report in reports for side in ran(report)]
    if any(side["name"].startswith(NEW_STREAMING) for side in sides):
        lines.append(
            "New streaming: StreamingLeRobotDataset after LeRobot 0.6.1, with the fastest of its settings that were measured."
        )
    if any(side.get("second_epoch_rounds") for side in sides):
        larger = "as in the last panel" if on_disk else "every epoch at the first epoch's rate"
        lines.append(f"Second epoch: all frames of this recording fit in memory_budget. A larger dataset runs {larger}.")
    lines += dict.fromkeys(circumstances(report) for report in reports)
    return [*lines, f"Last panel: {circumstances(on_disk)}"] if on_disk else lines


def circumstances(report: Report) -> str:
    """Return the dataset, machine, versions and date of a report as text."""
    on, by_package = report["machine"], {"LeRobot": "", **report["versions"]}
    for side in report.get("peers", ()):
        by_package["LeRobot"] = by_package["LeRobot"] or side["versions"].get("lerobot", "")
    versions = [
        f"{name} {by_package[name].partition('+')[0]}" for name in ("torch", "torchcodec", "LeRobot") if by_package[name]
    ]
    machine = f"{on['processor']}, {on['cores']} cores, {on['gpu'] or 'no GPU'}"
    dataset = report["root"] if "root" in report else report["datasets"][0]["dataset"]
    return f"Dataset {dataset}; {machine}; {', '.join(versions)}; {report['date']}."


if __name__ == "__main__":
    main()

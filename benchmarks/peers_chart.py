"""Draw a bar chart of reports of peers.py, as an SVG with its panels and numbers as text.

    python benchmarks/peers_chart.py REPORT.json ... [--frame-cache REPORT.json] --out CHART.svg

The chart has a panel per report, with a bar per loader. `--frame-cache` adds a panel with the first dataset of a report of
disk_frames.py: epochs of a dataset that does not fit in memory, without and with a frame cache on disk. A bar shows the median
of the rounds, and a line from the slowest to the fastest round. A loader whose second epoch was measured separately has two
bars. The footer names loaders that failed, the machine, the dataset, versions and the date. `make figures` draws
docs/figures/peers.svg.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from argument_types import new_file
from drawing import INK, MARGIN, OTHER, WIDTH, Picture, new_figure, style
from matplotlib.axes import Axes

OWN = "#0b7a5c"  # color of our bars
ROW, HEADING = 30, 40  # pixels: the height of a bar and of a title
MODES = {
    "single": "Single frames",
    "sarm": "Windows of 8 frames, 1 s apart",
    "action_chunk": "Single frames with 50 actions",
}
NAMES = {
    "dali_stream": "dali_stream",
    "torchcodec": "Plain torchcodec loop",
    "torchcodec-cuda": "Plain torchcodec loop, NVDEC",
    "pynvvideocodec": "Plain PyNvVideoCodec loop",
    "lerobot-streaming": "StreamingLeRobotDataset",
}
KINDS = {  # names before the number of workers
    "lerobot": "LeRobotDataset",
    "lerobot-uint8": "LeRobotDataset, uint8",
    "lerobot-new-streaming": "New streaming",
    "lerobot-new-streaming-uint8": "New streaming, uint8",
}
NEW_STREAMING = "lerobot-new-streaming"  # of its settings, the chart shows the fastest
NOT_RUN = ("no GPU", "no LeRobot")  # beginnings of the error of a side that was not run
SECOND_EPOCH = "Second epoch: all frames of this recording fit in memory_budget. A larger dataset "
# By whether the chart has a panel of a larger dataset.
LARGER = {False: "runs every epoch at the first epoch's rate.", True: "runs as in the last panel."}
EPOCHS = {  # of the report of disk_frames.py
    "without": "no frame cache, every epoch",
    "filling": "frame_cache, first epoch",
    "warm": "frame_cache, later epochs",
    "cold": "the same, not in page cache",
}
Report = dict[str, Any]


class Bar(NamedTuple):
    """A bar with a label before it and a figure after it.

    Attributes:
        label: Label.
        value: Length.
        figure: Text after the bar.
        ours: Whether it is a bar of dali_stream.
        ends: Slowest and fastest round, which a line shows.
    """

    label: str
    value: float
    figure: str
    ours: bool
    ends: tuple[float, float]


def main(argv: list[str] | None = None) -> None:
    """Run the program.

    Args:
        argv: Arguments of the program. Default: the arguments of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="reports of peers.py; each becomes a panel")
    parser.add_argument("--frame-cache", type=Path, metavar="REPORT", help="report of disk_frames.py, for another panel")
    parser.add_argument("--out", type=new_file, required=True, help="the SVG")
    arguments = parser.parse_args(argv)
    on_disk = read(arguments.frame_cache) if arguments.frame_cache else None
    arguments.out.write_text(chart([read(path) for path in arguments.reports], on_disk).svg())


def read(path: Path) -> Report:
    """Read a report of peers.py or disk_frames.py."""
    report: Report = json.loads(path.read_text())
    return report


@style()
def chart(reports: list[Report], on_disk: Report | None = None) -> Picture:
    """Draw the chart. It depends only on the reports, so that a test can compare it with the committed chart."""
    panels = [panel(report) for report in reports] + ([frame_cache_panel(on_disk)] if on_disk else [])
    sizes, notes = [len(rows) for _, rows in panels], footer(reports, on_disk)
    figure = new_figure(HEADING * len(panels) + ROW * sum(sizes), notes)
    all_axes = figure.subplots(len(panels), height_ratios=sizes, sharex=True, squeeze=False)[:, 0]
    for axes, (title, rows) in zip(all_axes, panels, strict=True):
        bars(axes, title, rows)
    names = "; ".join(title for title, _ in panels)
    return Picture(figure, f"Frames per second. {names}", " ".join(spoken(*each) for each in panels), notes)


def bars(axes: Axes, title: str, rows: list[Bar]) -> None:
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
    places = range(len(rows))
    errors = [[row.value - row.ends[0] for row in rows], [row.ends[1] - row.value for row in rows]]
    drawn = axes.barh(
        places,
        [row.value for row in rows],
        0.68,
        color=[OWN if row.ours else OTHER for row in rows],
        xerr=errors,
        error_kw={"ecolor": INK, "elinewidth": 1.2},
    )
    figures = axes.bar_label(drawn, [row.figure for row in rows], padding=5)
    axes.set_yticks(places, [row.label for row in rows])
    for row, *texts in zip(rows, figures, axes.get_yticklabels(), strict=True):
        for text in texts:
            text.set_weight("bold" if row.ours else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)


def spoken(title: str, rows: list[Bar]) -> str:
    """Return the content of bars as text."""
    return f"{title}: {'; '.join(f'{row.label}: {row.figure}' for row in rows)}."


def panel(report: Report) -> tuple[str, list[Bar]]:
    """Return the title and the bars of a report, the fastest loader first."""
    rows = []
    for side in sorted(ran(report), key=lambda side: -side["frames_per_s"]):
        wrong = "" if side["frames"]["equal"] else ", WRONG FRAMES"
        for suffix, rate, rounds in epochs(side):
            ends = min(rounds), max(rounds)
            rows.append(Bar(named(side) + suffix, rate, f"{rate:.0f}{wrong}", side["name"] == "dali_stream", ends))
    return title(report), rows


def epochs(side: Report) -> list[tuple[str, float, list[float]]]:
    """Return (text after the name, median, rounds) for each bar of a loader."""
    if not side.get("second_epoch_rounds"):
        return [("", side["frames_per_s"], side["rounds"])]
    second = side["second_epoch_frames_per_s"], side["second_epoch_rounds"]
    return [(", first epoch", side["frames_per_s"], side["rounds"]), (", second epoch", *second)]


def frame_cache_panel(report: Report) -> tuple[str, list[Bar]]:
    """Return the title and the bars of the first dataset of a report of disk_frames.py, with the cache on a disk."""
    (height, width), budget = report["arguments"]["image_size"], report["arguments"]["memory_budget"]
    place = next(place for place in report["datasets"][0]["folders"] if place["folder"] == "disk")
    rows = []
    for name, label in EPOCHS.items():
        rate, rounds = place["frames_per_s"][name], place["rounds"][name]
        rows.append(Bar(label, rate, f"{rate:.0f}", True, (min(rounds), max(rounds))))
    return f"Single frames, memory_budget={budget}, too small for all: uint8 frames/s of {height}×{width}, batch 64", rows


def ran(report: Report) -> list[Report]:
    """Return the loaders of a report that did not fail. LeRobot's new streaming is included with its fastest setting only."""
    able = [side for side in report["peers"] if side["frames_per_s"] and not side["error"]]
    new = [side for side in able if side["name"].startswith(NEW_STREAMING)]
    fastest = max(new, key=lambda side: side["frames_per_s"], default=None)
    return [side for side in able if side is fastest or side not in new]


def named(side: Report) -> str:
    """Return the name of a loader for readers."""
    kind, _, settings = side["name"].partition(", ")
    if kind.startswith(NEW_STREAMING):  # the footer says what its settings are
        return KINDS[kind]
    return NAMES.get(side["name"], f"{KINDS[kind]}, {settings}" if kind in KINDS else side["name"])


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
    if any(side["name"].startswith(NEW_STREAMING) for report in reports for side in ran(report)):
        lines.append(
            "New streaming: StreamingLeRobotDataset after LeRobot 0.6.1, with the fastest of its settings that were measured."
        )
    if any(len(epochs(side)) > 1 for report in reports for side in ran(report)):
        lines.append(SECOND_EPOCH + LARGER[on_disk is not None])
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

"""Draw a bar chart of reports of peers.py, as an SVG that is readable on any background.

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
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from argument_types import new_file

WIDTH, LEFT, RIGHT, MARGIN = 860, 250, 70, 20  # pixels; bars are drawn between LEFT and WIDTH - RIGHT
BAR, ROW, LINE = 20, 30, 20
OWN, OTHER, INK, DIM = "#0b7a5c", "#a9b4c2", "#1c2128", "#57606a"
SIZES = {"title": 15, "text": 13, "small": 12}
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
LARGER = {False: "runs every epoch at the first epoch's rate.", True: "runs as in the last panel."}  # by: is there such a panel
EPOCHS = {  # of the report of disk_frames.py
    "without": "no frame cache, every epoch",
    "filling": "frame_cache, first epoch",
    "warm": "frame_cache, later epochs",
    "cold": "the same, not in page cache",
}
Report = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run the program. Return its exit code.

    Args:
        argv: Arguments of the program. Default: the arguments of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="reports of peers.py; each becomes a panel")
    parser.add_argument("--frame-cache", type=Path, metavar="REPORT", help="report of disk_frames.py, for another panel")
    parser.add_argument("--out", type=new_file, required=True, help="the SVG")
    arguments = parser.parse_args(argv)
    try:
        on_disk = None if arguments.frame_cache is None else read_frame_cache(arguments.frame_cache)
        arguments.out.write_text(chart([read(path) for path in arguments.reports], on_disk))
    except (OSError, ValueError) as error:
        print(f"peers_chart: {error}", file=sys.stderr)
        return 1
    return 0


def read(path: Path) -> Report:
    """Read a report. Raises ValueError if the file is not a report, or no loader ran."""
    try:
        report: Report = json.loads(path.read_text())
        if not ran(report):
            raise ValueError("at least one loader must have delivered a batch, got none. Measure again")
        title(report), footer([report])  # these raise if an entry that they need is missing
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must be a report of peers.py: {type(error).__name__}: {error}") from error
    return report


def read_frame_cache(path: Path) -> Report:
    """Read a report of disk_frames.py. Raises ValueError if the file is none."""
    try:
        report: Report = json.loads(path.read_text())
        list(frame_cache_bars(report, 0, 1.0)), frame_cache_title(report)  # these raise if an entry that they need is missing
    except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise ValueError(f"{path} must be a report of disk_frames.py: {type(error).__name__}: {error}") from error
    return report


def chart(reports: list[Report], on_disk: Report | None = None) -> str:
    """Return the SVG. It depends only on the reports, so that a test can compare it with the committed chart."""
    fastest = max(max(rounds) for report in reports for side in ran(report) for _, _, rounds in epochs(side))
    scale = (WIDTH - LEFT - RIGHT) / fastest
    parts: list[str] = []
    y = MARGIN
    for report in reports:
        y += LINE
        parts.append(text(MARGIN, y, title(report), "title", weight=600))
        y += 10
        for side in sorted(ran(report), key=lambda side: -side["frames_per_s"]):
            for epoch in epochs(side):
                parts += bar(side, epoch, y, scale)
                y += ROW
        y += 10
    if on_disk:
        y += LINE
        parts.append(text(MARGIN, y, frame_cache_title(on_disk), "title", weight=600))
        parts += frame_cache_bars(on_disk, y + 10, scale)
        y += 20 + ROW * len(EPOCHS)
    for line in footer(reports, on_disk):
        y += LINE
        parts.append(text(MARGIN, y, line, "small", DIM))
    height = y + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif">\n<title>Frames per second of {escape(listed(reports))}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def epochs(side: Report) -> list[tuple[str, float, list[float]]]:
    """Return (text after the name, median, rounds) for each bar of a loader."""
    if not side.get("second_epoch_rounds"):
        return [("", side["frames_per_s"], side["rounds"])]
    second = side["second_epoch_frames_per_s"], side["second_epoch_rounds"]
    return [(", first epoch", side["frames_per_s"], side["rounds"]), (", second epoch", *second)]


def bar(side: Report, epoch: tuple[str, float, list[float]], y: int, scale: float) -> Iterator[str]:
    """Yield the elements of a bar: the name of the loader, the bar, the range of its rounds, and the number."""
    suffix, rate, rounds = epoch
    figure = f"{rate:.0f}" if side["frames"]["equal"] else f"{rate:.0f}, WRONG FRAMES"
    yield from labelled(named(side) + suffix, figure, rate, rounds, y, scale, is_ours=side["name"] == "dali_stream")


def labelled(label: str, figure: str, rate: float, rounds: list[float], y: int, scale: float, is_ours: bool) -> Iterator[str]:
    """Yield the elements of a bar, with a label before it and a figure after it."""
    middle, length = y + BAR // 2, rate * scale
    slowest, fastest = (LEFT + limit * scale for limit in (min(rounds), max(rounds)))
    weight = 600 if is_ours else 400
    yield text(LEFT - 10, middle + 5, label, anchor="end", weight=weight)
    yield f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{OWN if is_ours else OTHER}"/>'
    yield f'<path d="M{slowest:.1f} {middle}H{fastest:.1f}" stroke="{INK}" stroke-width="1.5"/>'
    yield text(max(LEFT + length, fastest) + 8, middle + 5, figure, weight=weight)


def frame_cache_bars(report: Report, y: int, scale: float) -> Iterator[str]:
    """Yield the bars of the first dataset of a report of disk_frames.py, with the cache on a disk."""
    place = next(place for place in report["datasets"][0]["folders"] if place["folder"] == "disk")
    for number, (name, label) in enumerate(EPOCHS.items()):
        rate = place["frames_per_s"][name]
        yield from labelled(label, f"{rate:.0f}", rate, place["rounds"][name], y + ROW * number, scale, is_ours=True)


def frame_cache_title(report: Report) -> str:
    """Return a line with the request of disk_frames.py, and the memory."""
    (height, width), budget = report["arguments"]["image_size"], report["arguments"]["memory_budget"]
    return f"Single frames, memory_budget={budget}, too small for all: uint8 frames/s of {height}×{width}, batch 64"


def text(
    x: float, y: float, content: str, size: str = "text", fill: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    """Return a line of text. `y` is its baseline."""
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{SIZES[size]}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(content)}</text>'
    )


def ran(report: Report) -> list[Report]:
    """Return the loaders of a report that did not fail. Of the settings of LeRobot's new streaming, only the fastest."""
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


def listed(reports: list[Report]) -> str:
    """Return the loaders and their speeds as text, for readers who cannot see the bars."""
    return "; ".join(
        f"{title(report)}: "
        + ", ".join(f"{named(side)}{suffix} {rate:.0f}" for side in ran(report) for suffix, rate, _ in epochs(side))
        for report in reports
    )


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
    sys.exit(main())

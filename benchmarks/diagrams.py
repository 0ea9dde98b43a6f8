"""Draw the figures of the README and the documentation that are not charts of loaders.

They show the path of a frame, and the savings of the frame cache in memory and on disk.

    python benchmarks/diagrams.py path --out docs/figures/path.svg
    python benchmarks/diagrams.py cache --report benchmarks/results/frame_cache.json --out docs/figures/frame_cache.svg
    python benchmarks/diagrams.py disk --report benchmarks/results/disk_frames_2cores.json --out docs/figures/disk_frames.svg

`make figures` draws all of them. A figure depends only on the arguments, so a test compares it with the committed file.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from argument_types import new_file
from drawing import (
    DIM,
    HEADING,
    INK,
    OTHER,
    OWN,
    ROW,
    WIDTH,
    Bar,
    Picture,
    bars,
    heading,
    legend,
    new_figure,
    spoken,
    style,
    without_frame,
)
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

ORDER = ("Order", "which frame when: a function", "of seed, epoch and position")
SCHEDULE = ("Schedule", "per batch: what to fetch, decode, keep and drop")
STAGES = (  # name and two lines of text, in the order in which data flows
    ("Storage", "local disk, Hub, S3,", "HTTP, buckets"),
    ("Encoded bytes", "ranges of video, rows,", "prefetched"),
    ("Decode", "GOP prefixes, once:", "torchcodec or NVDEC"),
    ("Frame cache", "resized frames, kept", "until their last use"),
    ("Batch", "tensors for PyTorch,", "on your device"),
)
KEPT = ("no cache", "480×640, 4 GiB", "224×224, 4 GiB")  # cases of the report that are drawn
SHADES = ("#a9b4c2", "#6fae9a", OWN)


@style()
def path() -> Picture:
    """Draw the path of a frame from storage to a batch, and the stages that plan it."""
    title = "The path of a frame: storage, encoded bytes, decode, frame cache, batch; planned by order and schedule"
    note = "Frames that DALI decodes go straight into the batch."
    margin, gap, high, low = 12, 22, 74, 126  # pixels
    wide = (WIDTH - 2 * margin - (len(STAGES) - 1) * gap) / len(STAGES)
    height = low + high + 40
    figure = new_figure(height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    axes.text(margin, height - 20, note, size=8.5, color=DIM, va="center")
    lefts = [margin + place * (wide + gap) for place in range(len(STAGES))]
    schedule = margin + wide + 76
    box(axes, margin, margin, wide + 46, high, ORDER, "#f3f5f8")
    box(axes, schedule, margin, WIDTH - margin - schedule, high, SCHEDULE, "#e6f2ee")
    arrow(axes, (margin + wide + 46, margin + high / 2), (schedule, margin + high / 2))
    for left, stage in zip(lefts, STAGES, strict=True):
        box(axes, left, low, wide, high, stage, "white")
    for left, following in pairwise(lefts):
        arrow(axes, (left + wide, low + high / 2), (following, low + high / 2))
    for left in lefts[1:]:
        middle = max(left + wide / 2, schedule + 20)
        arrow(axes, (middle, margin + high), (middle, low), "dashed")
    parts = "; ".join(f"{name}: {' '.join(lines)}" for name, *lines in (ORDER, SCHEDULE, *STAGES))
    return Picture(figure, title, f"{parts}.", [note])


@style()
def cache(report: dict[str, Any]) -> Picture:
    """Draw the decoded frames per delivered frame by GOP and window, without a cache and with 4 GiB."""
    cases = {(case["gop"], case["steps"], case["name"]): case["decoded_per_frame"] for case in report["cases"]}
    requests = {
        (gop, steps): f"GOP {gop}, {'single frames' if steps == 1 else f'windows of {steps}, 1 s apart'}"
        for gop, steps, _ in cases
    }
    title, note = "Decoded frames per delivered frame", f"600 episodes of 250 to 500 frames, batch 64; {report['date']}"
    figure = new_figure(HEADING + 65 * len(requests) + ROW, [note])
    axes = figure.subplots()
    heading(axes, title)
    values = {name: [cases[(*request, name)] for request in requests] for name in KEPT}
    for number, (name, shade) in enumerate(zip(KEPT, SHADES, strict=True)):
        places = [place + (number - 1) * 0.27 for place in range(len(requests))]
        drawn = axes.barh(places, values[name], 0.23, color=shade, label=name)
        axes.bar_label(drawn, [f"{value:.2f}" for value in values[name]], padding=5, size=8.5)
    axes.set_yticks(range(len(requests)), list(requests.values()))
    axes.set_ylim(len(requests) - 0.5, -0.5)
    without_frame(axes)
    legend(axes)
    parts = [
        f"{request}: {', '.join(f'{name} {values[name][place]:.2f}' for name in KEPT)}"
        for place, request in enumerate(requests.values())
    ]
    return Picture(figure, title, f"{title}. {'; '.join(parts)}.", [note])


@style()
def disk(report: dict[str, Any]) -> Picture:
    """Draw the frames per second of epochs without and with the frame cache on a disk."""
    names = {"without": "without the cache", "filling": "first epoch, fills it", "warm": "later epochs", "cold": "cold"}
    each = [(dataset["dataset"], place) for dataset in report["datasets"] for place in dataset["folders"]]
    rates = {dataset: place["frames_per_s"] for dataset, place in each if place["folder"] == "disk"}
    title = f"Frames per second at 224×224, where memory_budget is {report['arguments']['memory_budget']}"
    note = f"{report['machine']['cores']} cores; {report['date']}"
    rows = [
        Bar(f"{dataset}, {label}", rate[name], f"{rate[name]:.0f}", name != "without")
        for dataset, rate in rates.items()
        for name, label in names.items()
    ]
    figure = new_figure(HEADING + ROW * len(rows), [note])
    bars(figure.subplots(), title, rows)
    return Picture(figure, title, spoken(title, rows), [note])


def box(axes: Axes, x: float, y: float, wide: float, high: float, lines: tuple[str, ...], fill: str) -> None:
    """Draw a box with a centred name and lines below it."""
    axes.add_patch(FancyBboxPatch((x, y), wide, high, "round,pad=0,rounding_size=6", facecolor=fill, edgecolor=OTHER))
    axes.text(x + wide / 2, y + 20, lines[0], ha="center", va="center", weight="bold", size=10.5)
    for place, line in enumerate(lines[1:]):
        axes.text(x + wide / 2, y + 42 + 16 * place, line, ha="center", va="center", size=8.5, color=DIM)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], line: str = "solid") -> None:
    """Draw an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK, "linestyle": line, "shrinkA": 0, "shrinkB": 2})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("drawing", choices=("path", "cache", "disk"))
    parser.add_argument("--report", type=Path, help="report of frame_cache.py or disk_frames.py")
    parser.add_argument("--out", type=new_file, required=True, help="the SVG")
    arguments = parser.parse_args()
    if (arguments.drawing == "path") != (arguments.report is None):
        parser.error("`cache` and `disk` need --report, and `path` does not take it")
    reports = [json.loads(arguments.report.read_text())] if arguments.report else []
    drawings = {"path": path, "cache": cache, "disk": disk}
    arguments.out.write_text(drawings[arguments.drawing](*reports).svg())


if __name__ == "__main__":
    main()

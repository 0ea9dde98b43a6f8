"""Draw the figure of the README that shows the path of a frame.

    python benchmarks/diagrams.py --out docs/figures/path.svg

`make figures` draws it. It depends on nothing else, so a test compares it with the committed file.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

from argument_types import new_file
from drawing import DIM, INK, OTHER, WIDTH, Picture, new_figure, style
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

ORDER = ("Order", "which frame when: a function", "of seed, epoch and position")
SCHEDULE = ("Schedule", "per batch: what to fetch, decode, keep and drop", "(planner thread)")
STAGES = (  # name and two lines of text, in the order in which data flows
    ("Storage", "local disk, Hub, S3,", "HTTP, buckets"),
    ("Encoded bytes", "ranges of video, rows", "(planner, fetch threads)"),
    ("Decode", "GOP prefixes, once", "(decode threads)"),
    ("Frame cache", "resized; copied into", "batches (batches thread)"),
    ("Batch", "tensors in the training", "process (calling thread)"),
)


@style()
def path() -> Picture:
    """Draw the path of a frame from storage to a batch, and the stages that plan it."""
    title = "The path of a frame: storage, encoded bytes, decode, frame cache, batch; planned by order and schedule"
    note = "Only the last box is in the training process. The others are in the process of the Loader."
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
    parser.add_argument("--out", type=new_file, required=True, help="the SVG")
    parser.parse_args().out.write_text(path().svg())


if __name__ == "__main__":
    main()

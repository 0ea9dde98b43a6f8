"""The drawings of the README and the docs that are not charts of loaders: the path of a frame, and what the frame cache saves.

    python benchmarks/diagrams.py path --out docs/figures/path.svg
    python benchmarks/diagrams.py cache --report benchmarks/results/frame_cache.json --out docs/figures/frame_cache.svg

`make figures` draws both. Each is a function of its arguments alone, so a test compares the committed file with it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from argument_types import new_file
from peers_chart import BAR, DIM, INK, OTHER, OWN, text

WIDTH, MARGIN = 860, 20  # pixels
ORDER = ("Order", "which frame when: a function", "of seed, epoch and position")
SCHEDULE = ("Schedule", "per batch: what to fetch, decode, keep and drop")
STAGES = (  # in the order in which data flows: a name, and two lines
    ("Storage", "local disk, Hub, S3,", "HTTP, buckets"),
    ("Encoded bytes", "ranges of video, rows,", "prefetched"),
    ("Decode", "GOP prefixes, once:", "torchcodec or NVDEC"),
    ("Frame cache", "resized frames, kept", "until their last use"),
    ("Batch", "tensors for PyTorch,", "on your device"),
)
KEPT = ("no cache", "480×640, 4 GiB", "224×224, 4 GiB")  # the cases of the report that are drawn
SHADES = ("#a9b4c2", "#6fae9a", OWN)


def path() -> str:
    """The way of a frame from storage to a batch, and what plans it."""
    gap, wide, high = 22, (WIDTH - 2 * MARGIN - 4 * 22) / 5, 74
    low = MARGIN + high + 52  # top of the lower row
    lefts = [MARGIN + place * (wide + gap) for place in range(len(STAGES))]
    parts = [*box(MARGIN, MARGIN, wide + 46, high, ORDER, "#f3f5f8"), arrow(MARGIN + wide + 46, MARGIN + high / 2, 26, 0)]
    schedule = MARGIN + wide + 76
    parts += box(schedule, MARGIN, WIDTH - MARGIN - schedule, high, SCHEDULE, "#e6f2ee")
    for left, stage in zip(lefts, STAGES, strict=True):
        parts += box(left, low, wide, high, stage, "#ffffff")
    parts += [arrow(left + wide, low + high / 2, gap - 4, 0) for left, _ in pairwise(lefts)]
    for left in lefts[1:]:
        parts.append(arrow(max(left + wide / 2, schedule + 20), MARGIN + high, 0, 48, dashed=True))
    parts.append(
        text(MARGIN, low + high + 28, "Frames that NVDEC decodes go through DALI straight into the batch.", "small", DIM)
    )
    return svg("The path of a frame: storage, encoded bytes, decode, frame cache, batch; planned by order and schedule",
               low + high + 28 + MARGIN, parts)  # fmt: skip


def cache(report: dict[str, Any]) -> str:
    """Decoded frames per delivered frame, by GOP and window, without a cache and with 4 GiB."""
    cases = {(case["gop"], case["steps"], case["name"]): case["decoded_per_frame"] for case in report["cases"]}
    left, right = 250, 70
    scale = (WIDTH - left - right) / max(cases[key] for key in cases if key[2] in KEPT)
    parts = [text(MARGIN, 40, "Decoded frames per delivered frame", "title", weight=600)]
    y = 52
    for gop, steps in dict.fromkeys((gop, steps) for gop, steps, _ in cases):
        request = "single frames" if steps == 1 else f"windows of {steps}, 1 s apart"
        parts.append(text(left - 10, y + BAR + 11, f"GOP {gop}, {request}", anchor="end"))
        for name, shade in zip(KEPT, SHADES, strict=True):
            value = cases[gop, steps, name]
            parts.append(f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="14" rx="2" fill="{shade}"/>')
            parts.append(text(left + value * scale + 8, y + 12, f"{value:.2f}", "small"))
            y += 17
        y += 14
    x = MARGIN
    for name, shade in zip(KEPT, SHADES, strict=True):
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{shade}"/>')
        parts.append(text(x + 18, y + 11, name, "small", DIM))
        x += 150
    parts.append(text(x, y + 11, f"600 episodes of 250 to 500 frames, batch 64; {report['date']}", "small", DIM))
    return svg("Decoded frames per delivered frame, by GOP, window and memory for decoded frames", y + 12 + MARGIN, parts)


def box(x: float, y: float, wide: float, high: float, lines: tuple[str, ...], fill: str) -> Iterator[str]:
    """A box with a name and lines below it, centred."""
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high}" rx="6" fill="{fill}" stroke="{OTHER}"/>'
    yield text(x + wide / 2, int(y) + 27, lines[0], "title", anchor="middle", weight=600)
    for place, line in enumerate(lines[1:]):
        yield text(x + wide / 2, int(y) + 46 + 16 * place, line, "small", DIM, "middle")


def arrow(x: float, y: float, right: float, down: float, dashed: bool = False) -> str:
    """An arrow of which one of both lengths is 0."""
    tip = "m-5 -4l5 4l-5 4" if right else "m-4 -5l4 5l4 -5"
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    line = f'<path d="M{x:.1f} {y:.1f}l{right} {down}" stroke="{INK}" stroke-width="1.5" fill="none"{dashes}/>'
    return f'{line}<path d="M{x + right:.1f} {y + down:.1f}{tip}" stroke="{INK}" stroke-width="1.5" fill="none"/>'


def svg(title: str, height: float, parts: list[str]) -> str:
    """The file's text."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif">\n<title>{title}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("drawing", choices=("path", "cache"))
    parser.add_argument("--report", type=Path, help="of frame_cache.py, for `cache`")
    parser.add_argument("--out", type=new_file, required=True, help="the SVG")
    arguments = parser.parse_args()
    if (arguments.drawing == "cache") != (arguments.report is not None):
        parser.error("--report goes with `cache`, and `cache` needs it")
    drawn = path() if arguments.drawing == "path" else cache(json.loads(arguments.report.read_text()))
    arguments.out.write_text(drawn)


if __name__ == "__main__":
    main()

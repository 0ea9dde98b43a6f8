"""Draw the figures of the README and the documentation that are not charts of loaders.

They show the path of a frame, the savings of the frame cache in memory and on disk, the shares of a mixture, and the work of
threads.

    python benchmarks/diagrams.py path --out docs/figures/path.svg
    python benchmarks/diagrams.py cache --report benchmarks/results/frame_cache.json --out docs/figures/frame_cache.svg
    python benchmarks/diagrams.py disk --report benchmarks/results/disk_frames_2cores.json --out docs/figures/disk_frames.svg
    python benchmarks/diagrams.py shares --out docs/figures/shares.svg
    python benchmarks/diagrams.py trace --report benchmarks/results/trace_g1_2cores.json --out docs/figures/trace.svg

`make figures` draws all of them. A figure depends only on the arguments, so a test compares it with the committed file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from argument_types import new_file
from peers_chart import BAR, DIM, INK, OTHER, OWN, text

from dali_stream import MixtureOrder
from dali_stream.order.rng import philox
from dali_stream.order.shares import shares as shares_of

WIDTH, MARGIN = 860, 20  # pixels
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
# Mixture: the weight and the number of episodes of each dataset, and the number of consumers. The next line contains the frames
# per episode, the number of positions of the epoch that are drawn, and the interval between two points of a curve.
WEIGHTS, EPISODES, CONSUMERS = {"pick": 2, "fold": 1, "old": 1}, (40, 60, 4), 8
FRAMES, POSITIONS, EVERY = 100, 2000, 3
LINES = (OWN, "#c2571a", "#3b6fb6")
# Colors of the stages of a trace. Other stages are not drawn.
STAGE_COLORS = {
    "training": "#d9dee5", "graph": "#a9b4c2", "starved": "#e3a27c", "copy": "#3b6fb6", "plan": OWN, "decode": "#6fae9a",
    "resize": "#2d7d64", "pack": "#c2571a",
}  # fmt: skip


def path() -> str:
    """Draw the path of a frame from storage to a batch, and the stages that plan it."""
    gap, wide, high = 22, (WIDTH - 2 * MARGIN - 4 * 22) / 5, 74
    low = MARGIN + high + 52  # y of the lower row
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
    return svg("The path of a frame: storage, encoded bytes, decode, cache in memory, batch; planned by order and schedule",
               low + high + 28 + MARGIN, parts)  # fmt: skip


def cache(report: dict[str, Any]) -> str:
    """Draw the decoded frames per delivered frame by GOP and window, without a cache and with 4 GiB."""
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


def disk(report: dict[str, Any]) -> str:
    """Draw the frames per second of epochs without and with the frame cache on a disk."""
    names = {"without": "without the cache", "filling": "first epoch, fills it", "warm": "later epochs", "cold": "cold"}
    left, right = 250, 70
    each = [(dataset["dataset"], place) for dataset in report["datasets"] for place in dataset["folders"]]
    rates = {dataset: place["frames_per_s"] for dataset, place in each if place["folder"] == "disk"}
    scale = (WIDTH - left - right) / max(rate[name] for rate in rates.values() for name in names)
    budget = report["arguments"]["memory_budget"]
    heading = f"Frames per second at 224×224, where memory_budget is {budget}"
    parts = [text(MARGIN, 40, heading, "title", weight=600)]
    y = 52
    for dataset, rate in rates.items():
        for name, label in names.items():
            colour, width = OTHER if name == "without" else OWN, rate[name] * scale
            parts.append(text(left - 10, y + 15, f"{dataset}, {label}", anchor="end"))
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            parts.append(text(left + width + 8, y + 15, f"{rate[name]:.0f}"))
            y += 26
        y += 10
    parts.append(text(MARGIN, y + 8, f"{report['machine']['cores']} cores; {report['date']}", "small", DIM))
    return svg(heading, y + 8 + MARGIN, parts)


def shares() -> str:
    """Draw the number of samples of each dataset minus its share, over the number of positions."""
    datasets = len(WEIGHTS)
    lengths, weights = [np.full(episodes, FRAMES) for episodes in EPISODES], list(WEIGHTS.values())
    mixture_shares = shares_of([episodes * FRAMES for episodes in EPISODES], weights=weights)
    episode, _ = MixtureOrder(lengths, mixture_shares, consumers=CONSUMERS).read(0, POSITIONS)
    ours = np.searchsorted(np.cumsum(EPISODES), episode, side="right")
    uniform = philox("diagram", 0).random_raw(POSITIONS) / 2**64
    random = np.searchsorted(np.cumsum(mixture_shares.targets), uniform, side="right")
    most, left, right, top, high = 30, 60, 150, 56, 240

    def place(position: float, off: float) -> tuple[float, float]:
        return left + position / POSITIONS * (WIDTH - left - right), top + (1 - off / most) * high / 2

    def curve(dataset: npt.NDArray[np.int64], number: int, color: str, dashes: str = "") -> str:
        off = np.cumsum(dataset == number) - mixture_shares.targets[number] * np.arange(1, POSITIONS + 1)
        points = " ".join("{:.0f},{:.1f}".format(*place(at + 1, off[at])) for at in range(0, POSITIONS, EVERY))
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.2"{dashes}/>'

    title = f"Samples of each dataset minus its share of them; weights {':'.join(map(str, weights))}, {CONSUMERS} consumers"
    parts = [text(MARGIN, 36, title, "title", weight=600)]
    for off in (-most, 0, most):
        (x, y), (end, _) = place(0, off), place(POSITIONS, off)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{end:.1f}" stroke="{OTHER}" stroke-width="1"/>')
        parts.append(text(x - 8, int(y) + 4, f"{off:+d}" if off else "0", "small", DIM, "end"))
    parts += [curve(random, number, OTHER) for number in range(datasets)]
    parts += [curve(ours, number, color) for number, color in enumerate(LINES)]
    for position in range(0, POSITIONS + 1, 500):
        parts.append(text(place(position, 0)[0], top + high + 20, str(position), "small", DIM, "middle"))
    x, y = left, top + high + 44
    for name, color in (*zip(WEIGHTS, LINES, strict=True), ("each of them, drawn with replacement", OTHER)):
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(text(x + 18, y, name, "small", DIM))
        x += 90
    parts.append(text(WIDTH - right, y, "positions of the epoch", "small", DIM, "end"))
    return svg("Shares of a mixture over the positions of an epoch: the order stays close to 0, random draws do not",
               y + MARGIN, parts)  # fmt: skip


def trace(report: dict[str, Any]) -> str:
    """Draw the work of each thread over time."""
    spans = [event for event in report["traceEvents"] if event["ph"] == "X" and event["name"] in STAGE_COLORS]
    names = {event["tid"]: event["args"]["name"] for event in report["traceEvents"] if event["ph"] == "M"}
    threads = sorted({span["tid"] for span in spans}, key=lambda tid: (names[tid] != "MainThread", names[tid]))
    left, top, high = 150, 58, 26
    first, last = min(span["ts"] for span in spans), max(span["ts"] + span["dur"] for span in spans)
    scale = (WIDTH - left - MARGIN) / (last - first)
    parts, numbers = [text(MARGIN, 34, "What each thread does", "title", weight=600)], []
    for row, tid in enumerate(threads):
        name = "your loop" if names[tid] == "MainThread" else names[tid].removeprefix("dali_stream ")
        parts.append(text(left - 10, top + row * high + 15, name, anchor="end"))
    for span in sorted(spans, key=lambda span: -span["dur"]):  # shorter spans are drawn on top of the longer ones around them
        x, y = left + (span["ts"] - first) * scale, top + threads.index(span["tid"]) * high
        size = f'width="{max(span["dur"] * scale, 0.5):.1f}" height="20"'
        parts.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{STAGE_COLORS[span["name"]]}"/>')
        if span["name"] in ("decode", "training") and span["dur"] * scale > 16 and "batch" in span["args"]:
            numbers.append(text(x + 3, y + 15, str(span["args"]["batch"]), "small"))
    parts += numbers
    x, y = left, top + len(threads) * high + 18
    for stage, color in STAGE_COLORS.items():
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(text(x + 17, y, stage, "small", DIM))
        x += 85
    parts.append(text(left, y + 20, f"{(last - first) / 1e3:.0f} ms; {report['batches']}; {report['date']}", "small", DIM))
    return svg("Spans of the threads of a Loader over some batches", y + 20 + MARGIN, parts)


def box(x: float, y: float, wide: float, high: float, lines: tuple[str, ...], fill: str) -> Iterator[str]:
    """Yield the elements of a box with a centred name and lines below it."""
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high}" rx="6" fill="{fill}" stroke="{OTHER}"/>'
    yield text(x + wide / 2, int(y) + 27, lines[0], "title", anchor="middle", weight=600)
    for place, line in enumerate(lines[1:]):
        yield text(x + wide / 2, int(y) + 46 + 16 * place, line, "small", DIM, "middle")


def arrow(x: float, y: float, right: float, down: float, dashed: bool = False) -> str:
    """Return a horizontal or vertical arrow. One of `right` and `down` must be 0."""
    tip = "m-5 -4l5 4l-5 4" if right else "m-4 -5l4 5l4 -5"
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    line = f'<path d="M{x:.1f} {y:.1f}l{right} {down}" stroke="{INK}" stroke-width="1.5" fill="none"{dashes}/>'
    return f'{line}<path d="M{x + right:.1f} {y + down:.1f}{tip}" stroke="{INK}" stroke-width="1.5" fill="none"/>'


def svg(title: str, height: float, parts: list[str]) -> str:
    """Return the text of an SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif">\n<title>{title}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("drawing", choices=("path", "cache", "disk", "shares", "trace"))
    parser.add_argument("--report", type=Path, help="report of frame_cache.py or disk_frames.py, or a trace")
    parser.add_argument("--out", type=new_file, required=True, help="the SVG")
    arguments = parser.parse_args()
    if (arguments.drawing in ("cache", "disk", "trace")) != (arguments.report is not None):
        parser.error("`cache`, `disk` and `trace` need --report, and the other drawings do not take it")
    reports = [json.loads(arguments.report.read_text())] if arguments.report else []
    drawings = {"path": path, "cache": cache, "disk": disk, "shares": shares, "trace": trace}
    arguments.out.write_text(drawings[arguments.drawing](*reports))


if __name__ == "__main__":
    main()

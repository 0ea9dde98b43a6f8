"""Measure how cost grows with threads, batch size, window, GOP, episodes, consumers, pool size and ranks.

    python benchmarks/scaling.py [--axes threads,batch,...] [--quick] [--rounds 3] [--json] [--out FILE]

Each axis is a table of values and costs. Costs are medians over rounds in which all values take turns. The table contains the
exponent of the power law that fits best, by least squares of logarithms: 1 is proportional growth, 0 is no growth, and -1 is
inverse proportion. If two straight lines fit much better than one, the cost bends at the value where they meet, and the table
contains the exponents on both sides.

Axes that decode use a Loader on small demo datasets, which are written first, with frames of 128×160 and two cameras. Axes of
the order and the metadata need no video. Their datasets have up to a million episodes of 100 frames.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from argument_types import count, new_file
from scaling_metadata import LENGTH, write_metadata

import dali_stream
from dali_stream import Dataset, Loader, Order
from dali_stream.demo import write_demo
from dali_stream.system.process import cores
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import endless, take

DIFFERS = 0.3  # minimum difference of the exponents on the two sides of a bend
BETTER = 0.25  # maximum squared error of two lines, as a share of that of one line
FRAMES = 1536  # number of frames over which a Loader is timed
QUICK_FRAMES = 192
Figures = dict[str, float]


class Fit(NamedTuple):
    """Exponent of a power law. If the law bends: the value `at` the bend, and the exponents before and after the bend."""

    exponent: float
    at: float | None = None
    before: float | None = None
    after: float | None = None


def fit(values: Sequence[float], costs: Sequence[float]) -> Fit | None:
    """Return the power law that fits some costs best, or None for fewer than two values.

    Two lines of at least three values each share the value at which they meet, so a bend needs at least five values.
    """
    if len(values) < 2:
        return None
    x, y = np.log(np.asarray(values, float)), np.log(np.maximum(np.asarray(costs, float), 1e-12))
    exponent, error = _line(x, y)
    bends = []
    for i in range(2, len(x) - 2):
        (before, left), (after, right) = _line(x[: i + 1], y[: i + 1]), _line(x[i:], y[i:])
        bends.append((left + right, i, before, after))
    if bends:
        least, i, before, after = min(bends)
        if abs(after - before) > DIFFERS and least < BETTER * error:
            return Fit(exponent, float(values[i]), before, after)
    return Fit(exponent)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope of the line that fits best, and the sum of its squared errors."""
    slope, offset = np.polyfit(x, y, 1)
    return float(slope), float(((y - slope * x - offset) ** 2).sum())


@dataclass(frozen=True)
class Axis:
    """A quantity that grows, and the measurement of its costs.

    Attributes:
        description: Text that describes the quantity.
        values: Values of the quantity, in increasing order.
        measure: Function that returns the costs at a value.
    """

    description: str
    values: list[int]
    measure: Callable[[int], Figures]


def axes(folder: Path, quick: bool) -> dict[str, Callable[[], Axis]]:
    """Return a function for each axis, by name. It writes the data of the axis to the folder, and returns the axis."""
    frames = QUICK_FRAMES if quick else FRAMES
    episodes = 500 if quick else 10_000

    @functools.cache
    def demo(gop: int) -> Path:
        return write_demo(folder / f"gop{gop}", episodes=2 if quick else 6, size=(128, 160), codec="h264", gop=gop)

    def load(root: Path, window: int = 1, **arguments: Any) -> Figures:
        return loading(root, frames, window, **arguments)

    def over_gops() -> Axis:
        gops = [2, 8] if quick else [1, 2, 4, 8, 16, 32, 64]
        roots = {gop: demo(gop) for gop in gops}
        return Axis("GOP, in frames", gops, lambda gop: load(roots[gop]))

    def over_loaders(description: str, values: list[int], argument: str) -> Axis:
        root = demo(2)
        return Axis(description, values, lambda value: load(root, **{argument: value}))

    def over_episodes() -> Axis:
        counts = [10**power for power in range(1, 4 if quick else 7)]
        roots = {count: write_metadata(folder / f"episodes{count}", count) for count in counts}
        return Axis("episodes", counts, lambda count: ordering(count) | opening(roots[count]))

    few = [1, 8, 64] if quick else [1, 2, 4, 8, 16, 32, 64, 128, 256]
    return {
        "threads": lambda: over_loaders("decode threads", _up_to(cores()), "threads"),
        "batch": lambda: over_loaders("batch size", [8, 32] if quick else [1, 2, 4, 8, 16, 32, 64, 128, 256], "batch_size"),
        "window": lambda: over_loaders("frames of a window", [1, 8] if quick else [1, 2, 4, 8, 16, 32], "window"),
        "gop": over_gops,
        "episodes": over_episodes,
        "consumers": lambda: Axis("consumers", few, lambda count: ordering(episodes, consumers=count)),
        "pool": lambda: Axis("episode_pool_size", few, lambda size: ordering(episodes, pool=size)),
        "ranks": lambda: Axis("ranks", few, lambda world: ordering(episodes, consumers=few[-1], world=world)),
    }


def _up_to(most: int) -> list[int]:
    """Return the powers of 2 up to `most`, and `most` itself."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


def loading(root: Path, frames: int, window: int = 1, batch_size: int = 32, threads: int | None = None) -> Figures:
    """Measure the time and the CPU time of a Loader per delivered frame in seconds, without its first batches."""
    dataset = Dataset(root)
    batch_size = min(batch_size, dataset.num_frames)
    each = batch_size * window * len(dataset.cameras)
    batches = max(frames // each, 4)
    deltas = {key: [-i / dataset.fps for i in reversed(range(window))] for key in dataset.cameras}
    with Loader(dataset, batch_size=batch_size, delta_timestamps=deltas, num_threads=threads, image_dtype="uint8") as loader:
        stream = endless(loader)
        take(stream, 2)
        began, cpu = time.perf_counter(), time.process_time()
        take(stream, batches)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"s_per_frame": wall / (batches * each), "cpu_s_per_frame": cpu / (batches * each)}


def ordering(episodes: int, consumers: int = 64, pool: int = 8, world: int = 1) -> Figures:
    """Measure an order.

    Returns:
        Time in seconds and memory in bytes of making the order and reading its first batch; seconds per million positions of a
        rank; and seconds until the first batch of a rank that resumes in the middle of the epoch, but at most after a million
        positions.
    """
    lengths = np.full(episodes, LENGTH)
    total = episodes * LENGTH

    def make() -> Order:
        order = Order(lengths, consumers=consumers, episode_pool_size=pool)
        order.read(0, 64, 0, world)
        return order

    make_s, order = _timed(make)
    count = min(1_000_000, total // world)
    read_s, _ = _timed(lambda: order.read(0, count, 0, world))
    each = consumers // world  # one sample of each consumer of the rank, so that all consumers skip
    resume_s, _ = _timed(lambda: make().read(min(total // 2, 1_000_000), each, 0, world))
    return {
        "make_s": make_s,
        "bytes": _kept(make),
        "read_s_per_million": read_s / count * 1e6,
        "resume_s": resume_s,
    }


def opening(root: Path) -> Figures:
    """Measure the time in seconds and the memory in bytes of opening a dataset."""
    open_s, dataset = _timed(lambda: Dataset(root))
    dataset.close()
    return {"open_s": open_s, "open_bytes": _kept(lambda: Dataset(root))}


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began, made = time.perf_counter(), work()
    return time.perf_counter() - began, made


def _kept(make: Callable[[], object]) -> float:
    """Return the memory that a new object uses in Python and NumPy, in bytes."""
    tracemalloc.start()
    try:
        made = make()
        size = float(tracemalloc.get_traced_memory()[0])
        del made
        return size
    finally:
        tracemalloc.stop()


def measured(axis: Axis, rounds: int) -> dict[str, Any]:
    """Measure an axis. Return the median costs over the rounds, and the power laws that fit them.

    All values take turns in a round, and every second round has the reverse order.
    """
    results: dict[int, list[Figures]] = {value: [] for value in axis.values}
    for number in range(rounds):
        for value in axis.values if number % 2 == 0 else reversed(axis.values):
            results[value].append(axis.measure(value))
    costs = {
        name: [statistics.median(figures[name] for figures in results[value]) for value in axis.values]
        for name in results[axis.values[0]][0]
    }
    fits = {name: one._asdict() if (one := fit(axis.values, cost)) else None for name, cost in costs.items()}
    return {"what": axis.description, "values": axis.values, "costs": costs, "fits": fits}


def table(name: str, axis: dict[str, Any]) -> str:
    """Return the costs of an axis as a text table."""
    width = max(len(cost) for cost in axis["costs"])
    lines = [f"{name}: {axis['what']}", " " * (width + 2) + "".join(f"{value:>10}" for value in axis["values"])]
    for cost, values in axis["costs"].items():
        shown = "".join(f"{_short(value):>10}" for value in values)
        lines.append(f"  {cost:{width}}{shown}   {_fit_text(axis['fits'][cost])}")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value / 1e6:.4g} M" if value >= 1e4 else f"{value:.3g}"


def _fit_text(power_law: dict[str, Any] | None) -> str:
    if power_law is None:
        return "one value"
    bend = (
        f", bends at {power_law['at']:g}: {power_law['before']:.2f}, then {power_law['after']:.2f}"
        if power_law["at"] is not None
        else ""
    )
    return f"exponent {power_law['exponent']:.2f}{bend}"


def main(argv: list[str] | None = None) -> int:
    """Run the program. Return its exit code.

    Args:
        argv: Arguments of the program. Default: the arguments of the command line.
    """
    names = list(axes(Path(), False))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--axes", type=functools.partial(_names, names), default=names, help=",".join(names))
    parser.add_argument("--rounds", type=count, help="default: 3, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="few and small values, to test that the program runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write the JSON object to this file")
    arguments = parser.parse_args(argv)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    try:
        report = measure(arguments.axes, arguments.quick, rounds)
    except dali_stream.DaliStreamError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 1
    if arguments.out:
        environment.write_report(arguments.out, report)
    if arguments.json:
        print(environment.report_json(report))
    return 0


def _names(known: list[str], text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {unknown[0]!r}")
    return wanted


def measure(names: Iterable[str], quick: bool, rounds: int) -> dict[str, Any]:
    """Measure the axes one after the other, and print each."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        known = axes(Path(folder), quick)
        for name in names:
            results[name] = measured(known[name](), rounds)
            print(table(name, results[name]), flush=True)
    return {
        "axes": results,
        "rounds": rounds,
        "quick": quick,
        **environment.ran_on("cpu"),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Measure how well batches are mixed, depending on consumers and episode_pool_size. No files are needed.

    python benchmarks/mixing.py --json > benchmarks/results/mixing.json    # takes some minutes
    python benchmarks/mixing.py --report benchmarks/results/mixing.json --figure docs/mixing.svg

The second command prints the tables of docs/order.md and draws its figure.

Each order is compared with NumPy's full shuffle of the same frames, which is called "i.i.d." here. A batch is a global batch,
that is, the samples of all ranks in one step. `Mixing` describes the measured quantities.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from drawing import Picture, new_figure, style

from dali_stream import Order
from dali_stream.order import default_pools
from dali_stream.tools import environment

Array = npt.NDArray[Any]
LAGS = 8
BATCH_SIZES = (1, 2, 3, 5, 8, 16, 37, 48, 64, 100, 128, 256)
RANKS = range(1, 9)
EPISODES = (5, 12, 100, 1000)
BEFORE = (32, 8)  # former defaults of consumers and episode_pool_size, which did not depend on the global batch size
CURVE_EPISODES = 12
LARGE = (76_000, 263)  # number of episodes, and frames per episode: the size of DROID


@dataclass(frozen=True)
class Mixing:
    """How well the batches of an order are mixed.

    Attributes:
        variance: Variance of the batch means of a quantity that differs from episode to episode, divided by that of
            independently drawn samples. It is 1 for i.i.d. samples, and smaller is better.
        autocorrelation: Autocorrelation of the episodes' shares in batches, at the lag from 1 to 8 at which its magnitude is
            largest. If it is near 1, a batch has the same episodes as a batch shortly before it.
        episodes: Mean number of distinct episodes in a batch.
    """

    variance: float
    autocorrelation: float
    episodes: float


class Case(NamedTuple):
    """Settings of an order, its measured `Mixing`, and that of a full shuffle of the same frames."""

    batch_size: int
    ranks: int
    episodes: int
    consumers: int
    pool: int
    held: bool  # whether the pools hold all episodes at the same time
    variance: float
    iid_variance: float
    autocorrelation: float
    iid_autocorrelation: float
    episodes_per_batch: float
    iid_episodes_per_batch: float


def mixing(epochs: Iterable[Array], lengths: Array, stride: int) -> Mixing:
    """Measure how well batches are mixed.

    Args:
        epochs: Episode at each position, for each epoch.
        lengths: Number of frames of each episode.
        stride: Number of samples per batch. An incomplete batch at the end of an epoch is left out.
    """
    variances, distinct, products = [], [], [[] for _ in range(LAGS)]
    for episodes in epochs:
        batches = len(episodes) // stride
        seen, number = np.unique(episodes[: batches * stride], return_inverse=True)
        batch, count = np.repeat(np.arange(batches), stride), len(seen)
        episode_counts = np.bincount(batch * count + number, minlength=batches * count).reshape(batches, count)
        distinct.append((episode_counts > 0).sum(1))
        off = (episode_counts - episode_counts.mean(0)).astype(np.float32)
        variances.append((off**2).sum(1))
        for lag in range(1, min(LAGS + 1, batches)):
            products[lag - 1].append(np.einsum("te,te->t", off[lag:], off[:-lag]))
    variance = float(np.concatenate(variances).mean())
    correlations = [float(np.concatenate(each).mean()) / variance if each and variance else 0.0 for each in products]
    share = lengths / lengths.sum()
    independent = stride * float((share * (1 - share)).sum())
    return Mixing(variance / independent, max(correlations, key=abs), float(np.concatenate(distinct).mean()))


def case(batch_size: int, ranks: int, episodes: int, consumers: int, pool: int, batches: int = 1000) -> Case:
    """Measure an order over about `batches` batches, in epochs of at least 40 batches."""
    stride = batch_size * ranks
    lengths = made_up(episodes, stride)
    epochs = max(round(batches * stride / lengths.sum()), 1)
    orders = [Order(lengths, True, 0, epoch, consumers, pool).read(0, int(lengths.sum()))[0] for epoch in range(epochs)]
    random, recorded = np.random.default_rng(0), np.repeat(np.arange(episodes), lengths)
    ours, iid = mixing(orders, lengths, stride), mixing((random.permutation(recorded) for _ in range(epochs)), lengths, stride)
    held = max(len(np.unique(order[consumer::consumers])) for order in orders for consumer in range(consumers)) <= pool
    figures = (value for pair in zip(asdict(ours).values(), asdict(iid).values(), strict=True) for value in pair)
    return Case(batch_size, ranks, episodes, consumers, pool, held, *(round(value, 4) for value in figures))


def large_case(pool: int | None) -> Case:
    """Measure the order of a large dataset over two stretches of 1000 batches. If `pool` is None, `shuffle` is "global"."""
    size, lengths = 256, np.full(*LARGE)
    consumers, default = default_pools(size, 1)
    order = Order(lengths, "global" if pool is None else True, 0, 0, consumers, pool or default)
    stretches = (order.read(int(at * len(order)), 1000 * size)[0] for at in (0.1, 0.6))
    random = np.random.default_rng(0)
    iid = (random.integers(len(lengths), size=1000 * size) for _ in range(2))
    figures = zip(asdict(mixing(stretches, lengths, size)).values(), asdict(mixing(iid, lengths, size)).values(), strict=True)
    return Case(size, 1, len(lengths), consumers, pool or 0, False, *(round(value, 4) for pair in figures for value in pair))


def made_up(episodes: int, stride: int) -> Array:
    """Return invented lengths of episodes, which differ by a factor of up to 2. An epoch has at least 40 batches.

    Args:
        episodes: Number of episodes.
        stride: Number of samples per batch.
    """
    mean = int(np.clip(3000 * stride / episodes, 20, 375))
    mean = max(mean, -(-40 * stride // episodes) + 1)
    return np.random.default_rng(episodes).integers(mean * 2 // 3, mean * 4 // 3 + 1, episodes) + mean // 16


def measure(batch_sizes: Iterable[int] = BATCH_SIZES, ranks: Iterable[int] = RANKS) -> dict[str, Any]:
    """Measure all cases. Return the report.

    It contains the defaults over a grid of batch sizes, ranks and episodes; the former and the present defaults over batch
    sizes; and the effects of the number of consumers, of the pool size, and of the pool size for a large dataset.
    """
    ranks = list(ranks)
    grid = [
        case(size, world, episodes, *default_pools(size, world))
        for size in batch_sizes
        for world in ranks
        for episodes in EPISODES
    ]
    curve = {
        name: [case(size, 1, CURVE_EPISODES, *choose(size)) for size in range(1, 257)]
        for name, choose in (("before", lambda size: BEFORE), ("default", lambda size: default_pools(size, 1)))
    }
    consumers = [case(16, 1, 12, count, -(-256 // count)) for count in (1, 2, 4, 8, 16, 32, 64)]
    pools = [case(256, 1, 1000, 32, pool) for pool in (1, 4, 8, 16, 32, 64)]
    return {
        "columns": Case._fields,
        "grid": grid,
        "curve": curve,
        "consumers": consumers,
        "pools": pools,
        "large": [large_case(pool) for pool in (4, 16, 64, 256, None)],
        **environment.ran_on("cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How well batches are mixed")
    parser.add_argument(
        "--report", type=Path, help="a report of --json to make tables and the figure of; measured unless given"
    )
    parser.add_argument("--figure", type=Path, help="write the figure, an SVG")
    parser.add_argument("--json", action="store_true", help="print the report alone")
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text()) if arguments.report else measure()
    if arguments.json:
        print(environment.report_json(report))
        return
    print(tables(report))
    if arguments.figure:
        arguments.figure.write_text(figure(report).svg())


# ---- tables and the figure


def tables(report: dict[str, Any]) -> str:
    """Return the tables of docs/order.md."""
    return "\n\n".join(
        (_grid_table(_cases(report["grid"])), *(_table(_cases(report[name])) for name in ("consumers", "pools", "large")))
    )


def _cases(rows: Iterable[Iterable[Any]]) -> list[Case]:
    return [Case(*row) for row in rows]


def _table(cases: list[Case]) -> str:
    lines = [
        f"{cases[0].episodes} episodes, batches of {cases[0].batch_size}:",
        "",
        "| `consumers` | `episode_pool_size` | segments | variance of batch means | autocorrelation | episodes in a batch |",
        "|---|---|---|---|---|---|",
    ]
    for c in cases:
        chosen = ", default" if (c.consumers, c.pool) == default_pools(c.batch_size, c.ranks) else ""
        pools = f"{c.consumers} | {c.pool}{chosen} | {c.consumers * c.pool}" if c.pool else '`shuffle="global"` | |'
        lines.append(f"| {pools} | {c.variance:.2f} | {c.autocorrelation:.2f} | {c.episodes_per_batch:.1f} |")
    c = cases[0]
    lines.append(f"| full shuffle | | | {c.iid_variance:.2f} | {c.iid_autocorrelation:.2f} | {c.iid_episodes_per_batch:.1f} |")
    return "\n".join(lines)


def _grid_table(cases: list[Case]) -> str:
    """Return a table with the worst values over all batch sizes and ranks for each number of episodes."""
    lines = [
        "| episodes | pools hold all | cases | variance of batch means | full shuffle | autocorrelation | full shuffle |",
        "|---|---|---|---|---|---|---|",
    ]
    for episodes in sorted({c.episodes for c in cases}):
        for held in (True, False):
            if not (matching := [c for c in cases if c.episodes == episodes and c.held is held]):
                continue
            worst = [max(abs(getattr(c, name)) for c in matching)
                     for name in ("variance", "iid_variance", "autocorrelation", "iid_autocorrelation")]  # fmt: skip
            lines.append(
                f"| {episodes} | {'yes' if held else 'no'} | {len(matching)} | {worst[0]:.2f} | {worst[1]:.2f} | "
                f"{worst[2]:.2f} | {worst[3]:.2f} |"
            )
    return "\n".join(lines)


COLOURS = {"before": "#d95f02", "default": "#1f77b4"}


@style()
def figure(report: dict[str, Any]) -> Picture:
    """Draw variance and autocorrelation over the batch size."""
    curves = {name: _cases(rows) for name, rows in report["curve"].items()}
    panels: tuple[tuple[str, Callable[[Case], float]], ...] = (
        ("variance of batch means (1: i.i.d.)", lambda case: max(case.variance, 0.05)),
        ("autocorrelation over 8 batches, the worst", lambda case: abs(case.autocorrelation)),
    )
    labels = {
        "before": f"consumers={BEFORE[0]}, episode_pool_size={BEFORE[1]}",
        "default": "chosen for the global batch (default)",
    }
    drawn = new_figure(360)
    texts = []
    for axes, (title, value) in zip(drawn.subplots(1, 2), panels, strict=True):
        axes.set_title(title, loc="left", size=10, weight="bold")
        for name, cases in curves.items():
            sizes, values = [case.batch_size for case in cases], list(map(value, cases))
            axes.plot(sizes, values, ".", color=COLOURS[name], alpha=0.7, label=labels[name], mec="none")
            texts.append(f"{title}, {labels[name]}: {min(values):.2f} to {max(values):.2f}")
        axes.set_xscale("log", base=2)
        axes.set_xticks([2**n for n in range(9)], [str(2**n) for n in range(9)])
        axes.set_xlabel(f"batch size; {CURVE_EPISODES} episodes")
        axes.grid(axis="y", color="#e4e8ee")
    drawn.axes[0].set_yscale("log")
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)
    drawn.axes[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    drawn.axes[0].minorticks_off()
    drawn.axes[1].set_ylim(-0.03, 1)
    drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    below = f"batch size; {CURVE_EPISODES} episodes"
    title = "Variance and autocorrelation over the batch size"
    return Picture(drawn, title, f"{title}. {below}: 1 to 256. {'; '.join(texts)}.")


if __name__ == "__main__":
    main()

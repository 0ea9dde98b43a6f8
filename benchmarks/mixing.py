"""Measure how well batches are mixed, depending on consumers and episode_pool_size. No files are needed.

    python benchmarks/mixing.py --json > benchmarks/results/mixing.json    # takes some minutes
    python benchmarks/mixing.py --report benchmarks/results/mixing.json

The second command prints the tables, of which docs/order.md has a part.

Each order is compared with NumPy's full shuffle of the same frames, which is called "i.i.d." here. A batch is a global batch,
that is, the samples of all ranks in one step. `Mixing` describes the measured quantities.

The values of `shuffle` are compared over several epochs, for global batches and for the batches of each rank, see `Spread`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream import Order
from dali_stream.order import Shuffle, default_pools
from dali_stream.tools import environment

Array = npt.NDArray[Any]
LAGS = 8
LARGE = (76_000, 263)  # number of episodes, and frames per episode: the size of DROID
SHUFFLES: tuple[Shuffle, ...] = (True, "global", "sharded")
# Cases in which the values of `shuffle` are compared: ranks, episodes, a rank's batch size, episodes per task, epochs of a run.
SPREAD_RANKS, SPREAD_EPISODES, SPREAD_BATCH, PER_TASK, EPOCHS = (1, 4, 8, 64), (12, 240, 1000), 16, 10, 4


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


class Spread(NamedTuple):
    """How the samples of runs with one value of `shuffle` are spread over batches, ranks and epochs.

    The first quantities are those of `Mixing`, of global batches. `rank_variance` is that of each rank's own batches. There,
    deviations are from the mean of the whole dataset, so that a rank that lacks episodes has a larger variance.

    Attributes:
        pairs: Share of the pairs of episodes that were in the same global batch at least once, after 1 epoch and after all.
        repetition: Correlation between the numbers of global batches that pairs of episodes share in an epoch and in the next.
        offset: Square of the difference between the mean over all samples of a rank and that of the dataset, divided by the
            variance of the means of independently drawn batches of the rank's size, after 1 epoch and after all. If it is 1,
            the rank's batches differ from the dataset as much by their rank as by chance.
        task_missing: Share of the tasks of which a rank has had no sample after all epochs.
    """

    shuffle: Shuffle
    batch_size: int
    ranks: int
    episodes: int
    tasks: int
    consumers: int
    pool: int
    variance: float
    autocorrelation: float
    episodes_per_batch: float
    pairs: tuple[float, float]
    repetition: float
    rank_variance: float
    offset: tuple[float, float]
    task_missing: float


def mixing(epochs: Iterable[Array], lengths: Array, stride: int, of_dataset: bool = False) -> Mixing:
    """Measure how well batches are mixed.

    Args:
        epochs: Episode at each position, for each epoch.
        lengths: Number of frames of each episode.
        stride: Number of samples per batch. An incomplete batch at the end of an epoch is left out.
        of_dataset: Whether deviations are from the mean of the dataset, and not from that of each epoch. Default: False.
    """
    share = lengths / lengths.sum()
    variances, distinct, products = [], [], [[] for _ in range(LAGS)]
    for episodes in epochs:
        batches = len(episodes) // stride
        seen, number = np.unique(episodes[: batches * stride], return_inverse=True)
        batch, count = np.repeat(np.arange(batches), stride), len(seen)
        episode_counts = np.bincount(batch * count + number, minlength=batches * count).reshape(batches, count)
        distinct.append((episode_counts > 0).sum(1))
        mean = stride * share[seen] if of_dataset else episode_counts.mean(0)
        off = (episode_counts - mean).astype(np.float32)
        lacking = float((np.delete(stride * share, seen) ** 2).sum()) if of_dataset else 0.0  # of episodes that do not occur
        variances.append((off**2).sum(1) + lacking)
        for lag in range(1, min(LAGS + 1, batches)):
            products[lag - 1].append(np.einsum("te,te->t", off[lag:], off[:-lag]) + lacking)
    variance = float(np.concatenate(variances).mean())
    correlations = [float(np.concatenate(each).mean()) / variance if each and variance else 0.0 for each in products]
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


def spread(shuffle: Shuffle, ranks: int, episodes: int, consumers: int, pool: int) -> Spread:
    """Measure 2 to 20 runs of 4 epochs, of episodes of about 300 frames or, for epochs of at least 40 batches, of more."""
    size, tasks = SPREAD_BATCH, -(-episodes // PER_TASK)
    mean = max(300, -(-60 * size * ranks // episodes))
    lengths = np.random.default_rng(episodes).integers(mean * 2 // 3, mean * 4 // 3 + 1, episodes)
    task = np.arange(episodes) // PER_TASK
    runs = [
        [Order(lengths, shuffle, seed, epoch, consumers, pool).read(0, int(lengths.sum()))[0] for epoch in range(EPOCHS)]
        for seed in range(min(max(2400 // episodes, 2), 20))
    ]
    orders = [order for run in runs for order in run]
    own = [order[rank::ranks] for order in orders for rank in range(ranks)]
    batches, rank_batches = mixing(orders, lengths, size * ranks), mixing(own, lengths, size, of_dataset=True)
    together = np.array([_pairs(run, lengths, size * ranks) for run in runs]).mean(0)
    first, last, missing = np.array([_of_ranks(run, lengths, task, size, ranks) for run in runs]).mean(0)
    return Spread(
        *(shuffle, size, ranks, episodes, tasks, consumers, pool),
        *_rounded(*asdict(batches).values()),
        _rounded(*together[:2]),
        *_rounded(together[2], rank_batches.variance),
        _rounded(first, last),
        *_rounded(missing),
    )  # fmt: skip


def _rounded(*values: float) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values)


def _pairs(run: list[Array], lengths: Array, stride: int) -> tuple[float, float, float]:
    """Return `Spread.pairs` and `Spread.repetition` of one run."""
    count, rates = len(lengths), []
    one, two = np.triu_indices(count, 1)
    for order in run:
        batches = len(order) // stride
        number = np.repeat(np.arange(batches), stride) * count + order[: batches * stride]
        has = np.bincount(number, minlength=batches * count).reshape(batches, count).astype(np.float32)
        rates.append((has.T @ has)[one, two])
    expected = lengths[one] * lengths[two]  # so that the lengths alone cause no correlation
    repetition = [np.corrcoef(a / expected, b / expected)[0, 1] for a, b in itertools.pairwise(rates)]
    return float((rates[0] > 0).mean()), float((sum(rates) > 0).mean()), float(np.mean(repetition))


def _of_ranks(run: list[Array], lengths: Array, task: Array, size: int, ranks: int) -> tuple[float, float, float]:
    """Return `Spread.offset` and `Spread.task_missing` of one run, each the mean over the ranks."""
    share = lengths / lengths.sum()
    counts = [[np.bincount(order[rank::ranks], minlength=len(lengths)) for rank in range(ranks)] for order in run]
    first, last = np.array(counts[0]), np.array(counts).sum(0)  # shape (ranks, episodes)
    offsets = [((each / each.sum(1, keepdims=True) - share) ** 2).sum(1).mean() for each in (first, last)]
    seen = [np.bincount(task, rank) > 0 for rank in last]
    chance = float((share * (1 - share)).sum()) / size
    return offsets[0] / chance, offsets[1] / chance, 1 - float(np.mean(seen))


def made_up(episodes: int, stride: int) -> Array:
    """Return invented lengths of episodes, which differ by a factor of up to 2. An epoch has at least 40 batches.

    Args:
        episodes: Number of episodes.
        stride: Number of samples per batch.
    """
    mean = int(np.clip(3000 * stride / episodes, 20, 375))
    mean = max(mean, -(-40 * stride // episodes) + 1)
    return np.random.default_rng(episodes).integers(mean * 2 // 3, mean * 4 // 3 + 1, episodes) + mean // 16


def measure() -> dict[str, Any]:
    """Measure all cases. Return the report.

    It contains the effects of the number of consumers, of the pool size, and of the pool size for a large dataset; and the
    values of `shuffle` over ranks and episodes.
    """
    consumers = [case(16, 1, 12, count, -(-256 // count)) for count in (1, 2, 4, 8, 16, 32, 64)]
    pools = [case(256, 1, 1000, 32, pool) for pool in (1, 4, 8, 16, 32, 64)]
    return {
        "columns": Case._fields,
        "consumers": consumers,
        "pools": pools,
        "large": [large_case(pool) for pool in (4, 16, 64, 256, None)],
        "spread_columns": Spread._fields,
        "spread": [
            spread(shuffle, world, episodes, *default_pools(SPREAD_BATCH, world))
            for episodes in SPREAD_EPISODES
            for world in SPREAD_RANKS
            for shuffle in SHUFFLES
        ],
        **environment.ran_on("cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How well batches are mixed")
    parser.add_argument("--report", type=Path, help="a report of --json to print the tables of; measured unless given")
    parser.add_argument("--json", action="store_true", help="print the report alone")
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text()) if arguments.report else measure()
    if arguments.json:
        print(environment.report_json(report))
        return
    print(tables(report))


def tables(report: dict[str, Any]) -> str:
    """Return all tables. docs/order.md has a part of them."""
    cases = [[Case(*row) for row in report[name]] for name in ("consumers", "pools", "large")]
    spreads = [Spread(*row) for row in report["spread"]]
    return "\n\n".join([*map(_table, cases), *(_spread_table(spreads, columns) for columns in (GLOBAL, OWN))])


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


# Columns of the tables of `Spread`: {title: (quantity, decimals)}.
GLOBAL: dict[str, tuple[Callable[[Spread], float], int]] = {
    "variance of batch means": (lambda s: s.variance, 2),
    "autocorrelation": (lambda s: s.autocorrelation, 2),
    "episodes in a batch": (lambda s: s.episodes_per_batch, 1),
    "pairs after 4 epochs": (lambda s: s.pairs[1], 2),
    "repetition": (lambda s: s.repetition, 2),
}
OWN: dict[str, tuple[Callable[[Spread], float], int]] = {
    "variance of a rank's batch means": (lambda s: s.rank_variance, 2),
    "offset after 1 epoch": (lambda s: s.offset[0], 2),
    "offset after 4": (lambda s: s.offset[1], 2),
    "tasks missing after 4": (lambda s: s.task_missing, 2),
}


def _spread_table(cases: list[Spread], columns: dict[str, tuple[Callable[[Spread], float], int]]) -> str:
    """Return a table with the values of all values of `shuffle` in each cell."""
    lines = [f"| {' | '.join(['episodes', 'ranks', *columns])} |", "|---" * (2 + len(columns)) + "|"]
    groups: dict[tuple[int, int], list[Spread]] = {}
    for s in cases:
        groups.setdefault((s.episodes, s.ranks), []).append(s)
    for names, group in groups.items():
        cells = [" / ".join(f"{value(s):.{decimals}f}" for s in group) for value, decimals in columns.values()]
        lines.append(f"| {' | '.join([*map(str, names), *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""How well the batches of an order are mixed, beside NumPy's full shuffle of the same frames. A batch is a global batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream import Order
from dali_stream.order import Shuffle, default_pools

Array = npt.NDArray[Any]
LAGS = 8
BATCH, EPOCHS = 16, 4  # of `sharded_mixing`: samples of a rank's batch, and epochs of a run


class Mixing(NamedTuple):
    """How well the batches of an order are mixed.

    Attributes:
        variance: Variance of the batch means of a quantity that differs from episode to episode, divided by that of
            independently drawn samples. It is 1 for independent samples, and smaller is better.
        autocorrelation: Autocorrelation of the episodes' shares in batches, at the lag from 1 to 8 at which its magnitude is
            largest. If it is near 1, a batch has the same episodes as a batch shortly before it.
        episodes: Mean number of distinct episodes in a batch.
    """

    variance: float
    autocorrelation: float
    episodes: float


def mixing(epochs: Iterable[Array], lengths: Array, batch: int) -> Mixing:
    """Measure how well batches are mixed.

    Args:
        epochs: Episode at each position, for each epoch.
        lengths: Number of frames of each episode.
        batch: Number of samples per batch. An incomplete batch at the end of an epoch is left out.
    """
    share, count = lengths / lengths.sum(), len(lengths)
    variances, distinct, products = [], [], [[] for _ in range(LAGS)]
    for episodes in epochs:
        batches = len(episodes) // batch
        cell = np.repeat(np.arange(batches), batch) * count + episodes[: batches * batch]
        samples = np.bincount(cell, minlength=batches * count).reshape(batches, count)
        distinct.append((samples > 0).sum(1))
        off = (samples - samples.mean(0)).astype(np.float32)
        variances.append((off**2).sum(1))
        for lag in range(1, min(LAGS + 1, batches)):
            products[lag - 1].append(np.einsum("te,te->t", off[lag:], off[:-lag]))
    variance = float(np.concatenate(variances).mean())
    correlations = [float(np.concatenate(each).mean()) / variance if each and variance else 0.0 for each in products]
    independent = batch * float((share * (1 - share)).sum())
    return Mixing(variance / independent, max(correlations, key=abs), float(np.concatenate(distinct).mean()))


def pool_mixing(batch: int, episodes: int, consumers: int, pool: int, batches: int = 400) -> tuple[Mixing, Mixing, bool]:
    """Return the mixing of an order and of a full shuffle, and whether the pools hold all episodes at the same time.

    Both are estimates over about `batches` batches, in epochs of at least 40 batches. Lengths differ by a factor of up to 2.
    """
    mean = max(int(np.clip(3000 * batch / episodes, 20, 375)), -(-40 * batch // episodes) + 1)
    lengths = np.random.default_rng(episodes).integers(mean * 2 // 3, mean * 4 // 3 + 1, episodes) + mean // 16
    epochs = max(round(batches * batch / lengths.sum()), 1)
    orders = [Order(lengths, True, 0, epoch, consumers, pool).read(0, int(lengths.sum()))[0] for epoch in range(epochs)]
    random, recorded = np.random.default_rng(0), np.repeat(np.arange(episodes), lengths)
    full = mixing((random.permutation(recorded) for _ in range(epochs)), lengths, batch)
    held = max(len(np.unique(order[consumer::consumers])) for order in orders for consumer in range(consumers)) <= pool
    return mixing(orders, lengths, batch), full, held


def sharded_mixing(shuffle: Shuffle, ranks: int, episodes: int) -> tuple[Mixing, float, float]:
    """Return the mixing of runs of 4 epochs with batches of 16 samples per rank, and the offset of a rank after 1 and 4 epochs.

    The offset is the square of the difference between the mean over all samples of a rank and that of the dataset, divided by
    the variance of the means of independently drawn batches of the rank's size. If it is 1, the batches of a rank differ from
    the dataset as much by their rank as by chance.
    """
    mean = max(300, -(-60 * BATCH * ranks // episodes))
    lengths = np.random.default_rng(episodes).integers(mean * 2 // 3, mean * 4 // 3 + 1, episodes)
    share, pools = lengths / lengths.sum(), default_pools(BATCH, ranks)
    runs = [
        [Order(lengths, shuffle, seed, epoch, *pools).read(0, int(lengths.sum()))[0] for epoch in range(EPOCHS)]
        for seed in range(min(max(2400 // episodes, 2), 20))
    ]

    def offset(epochs: int) -> float:
        squares = []
        for run in runs:
            for rank in range(ranks):
                seen = np.bincount(np.concatenate([order[rank::ranks] for order in run[:epochs]]), minlength=episodes)
                squares.append(((seen / seen.sum() - share) ** 2).sum())
        return float(np.mean(squares) * BATCH / (share * (1 - share)).sum())

    return mixing([order for run in runs for order in run], lengths, BATCH * ranks), offset(1), offset(EPOCHS)

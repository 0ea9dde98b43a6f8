"""Statistics of features, as LeRobot defines them. Statistics of cameras are computed from a sample of the frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DatasetError
from dali_stream.lerobot.json_files import read_json
from dali_stream.storage import Store

STATS = "meta/stats.json"
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
MAX_IMAGES = 100  # maximum number of frames sampled per episode; LeRobot samples about as many
Histogram = tuple[np.ndarray, int]  # see `image_histogram`
Stats = dict[str, dict[str, npt.NDArray[Any]]]
"""Statistics {key: {"mean": array, ...}}. Arrays have the shape of a row, or (C, 1, 1) with values in [0, 1] for a camera."""


def read_stats(store: Store) -> Stats:
    """Read `meta/stats.json`. Returns {} if the file does not exist. Raises DatasetError if it is broken."""
    if not store.exists(STATS):
        return {}
    try:
        return stats_of(read_json(store, STATS))
    except ValueError as error:
        raise DatasetError(f"Invalid statistics in {store.where(STATS)}: {error}") from error


def stats_of(values: Any) -> Stats:
    """Convert statistics from nested lists or arrays to arrays. Raises ValueError if they have another form."""
    try:
        return {key: {name: np.asarray(v) for name, v in statistics.items()} for key, statistics in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"must be {{key: {{statistic: numbers}}}} ({error})") from error


def table_stats(values: np.ndarray) -> dict[str, list[Any]]:
    """Return statistics of rows: min, max, mean, std, count and quantiles.

    Quantiles are exact for up to `TableStats.KEPT` numbers, while LeRobot estimates them from histograms.

    Args:
        values: Rows, shape (T, ...).

    Returns:
        Nested lists by name. Each has the shape of a row, or (1,) if a row is a scalar. `count` is [T].
    """
    stats = TableStats(len(values))
    stats.add(values)
    return {name: np.asarray(value).tolist() for name, value in stats.result().items()}


class TableStats:
    """Statistics as in `table_stats`, of rows that are added in parts. The memory does not grow with the number of rows.

    Quantiles are exact for up to `KEPT` numbers. For more numbers, they are computed from evenly spaced rows.

    Args:
        rows: Total number of rows that will be added.
    """

    KEPT = 1 << 22  # maximum number of values kept for the quantiles

    def __init__(self, rows: int) -> None:
        self._rows, self._count = rows, 0
        self._mean = self._squares = np.zeros(())
        self._least: np.ndarray | None = None
        self._most: np.ndarray | None = None
        self._kept: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Add the next rows.

        Args:
            values: Rows, shape (T, ...), with T of at least 1.
        """
        if values.ndim == 1:
            values = values[:, None]
        numbers, count = values.astype(np.float64), len(values)
        # Keep the rows whose number, counted over all parts, is a multiple of `every`.
        every = -(-self._rows * numbers[0].size // self.KEPT)
        self._kept.append(values[-self._count % every :: every].copy())
        extremes = numbers if values.dtype == bool else values
        least, most = extremes.min(axis=0), extremes.max(axis=0)
        self._least = least if self._least is None else np.minimum(self._least, least)
        self._most = most if self._most is None else np.maximum(self._most, most)
        # Combine the means and sums of squared deviations of two parts (Chan, Golub and LeVeque 1979). Unlike sums of squares,
        # this is accurate if the mean is much larger than the deviations.
        mean = numbers.mean(axis=0)
        away, total = mean - self._mean, self._count + count
        self._squares = self._squares + ((numbers - mean) ** 2).sum(axis=0) + away**2 * (self._count * count / total)
        self._mean = self._mean + away * (count / total)
        self._count = total

    def result(self) -> dict[str, Any]:
        """Return the statistics of all rows by name, as arrays. `count` is a list of one number."""
        kept = np.concatenate(self._kept).astype(np.float64)
        return {
            "min": self._least,
            "max": self._most,
            "mean": self._mean,
            "std": np.sqrt(self._squares / self._count),
            "count": [self._count],
            **{name: np.quantile(kept, share, axis=0) for name, share in QUANTILES.items()},
        }


def image_histogram(frames: np.ndarray) -> Histogram:
    """Return the histogram of each channel, computed from a sample of the frames.

    The sample has at most 100 evenly spaced frames. As in LeRobot, only every n-th row and column of pixels is used if the
    longer side has at least 300 pixels, so that 150 to 225 of its pixels remain.

    Args:
        frames: Frames, uint8, shape (N, H, W, C).

    Returns:
        Histograms, int64, shape (C, 256), and the number of frames in the sample.
    """
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), MAX_IMAGES)).round().astype(int))
    longest = max(frames.shape[1:3])
    step = 1 if longest < 300 else longest // 150
    channels = np.moveaxis(frames[chosen, ::step, ::step], -1, 0)
    return np.stack([np.bincount(channel.ravel(), minlength=256) for channel in channels]), len(chosen)


def add_histograms(parts: Sequence[Histogram]) -> Histogram:
    """Return the sum of the histograms, and the total number of sampled frames."""
    return np.sum([histogram for histogram, _ in parts], axis=0), sum(size for _, size in parts)


def image_stats(histograms: Sequence[Histogram]) -> dict[str, list[Any]]:
    """Return statistics of frames, computed from their histograms.

    Args:
        histograms: One or more results of `image_histogram`, with the same number of channels.

    Returns:
        Nested lists by name, with values in [0, 1] and shape (C, 1, 1). `count` is the number of frames, [N].
    """
    counts, size = add_histograms(histograms)
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    cumulative = np.cumsum(weights, axis=1)
    result = {
        "min": values[(counts > 0).argmax(axis=1)],
        "max": values[255 - (counts > 0)[:, ::-1].argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(weights @ values**2 - mean**2, 0)),
        **{name: values[(cumulative >= share).argmax(axis=1)] for name, share in QUANTILES.items()},
    }
    stats: dict[str, list[Any]] = {name: value.reshape(-1, 1, 1).tolist() for name, value in result.items()}
    stats["count"] = [size]
    return stats


def merged(shares: Sequence[float], parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return statistics of a mixture, computed from those of its parts.

    `min` and `max` are the extremes of all parts. `mean` and `std` are those of the mixed samples. Quantiles are approximate:
    the values of a part are assumed to be evenly spread between its known quantiles.

    Args:
        shares: Share of each part in the mixture. The shares need not sum to 1.
        parts: Statistics of each part by name: some of `mean`, `std`, `min`, `max` and the quantiles, as float64 arrays of one
            shape. NaN marks a number that a part lacks. The other parts then determine the result.

    Returns:
        Statistics with the names that all parts have, in the same shape.
    """
    names = [name for name in parts[0] if all(name in part for part in parts)]
    if not names:
        return {}
    stacked = {name: np.stack([part[name] for part in parts]) for name in names}
    weight = np.asarray(shares, np.float64).reshape(-1, *(1,) * (next(iter(stacked.values())).ndim - 1))

    # A number that a part lacks has no weight.
    def mean(values: np.ndarray) -> np.ndarray:
        is_present = ~np.isnan(values)
        return np.where(is_present, values * weight, 0).sum(axis=0) / (is_present * weight).sum(axis=0)

    statistics = {
        name: least(stacked[name], axis=0) for name, least in (("min", np.nanmin), ("max", np.nanmax)) if name in names
    }
    if "mean" in names:
        statistics["mean"] = mean(stacked["mean"])
        if "std" in names:
            # The variance of a mixture is the mean of the variances, plus the variance of the means.
            statistics["std"] = np.sqrt(mean(stacked["std"] ** 2 + (stacked["mean"] - statistics["mean"]) ** 2))
    known = {name: share for name, share in {"min": 0.0, **QUANTILES, "max": 1.0}.items() if name in names}
    quantiles = [name for name in QUANTILES if name in names]
    if quantiles:
        points = np.stack([stacked[level] for level in known], axis=1)  # (parts, levels, ...)
        columns = np.moveaxis(points.reshape(*points.shape[:2], -1), -1, 0)
        levels, wanted = list(known.values()), [QUANTILES[name] for name in quantiles]
        values = np.array([_mixed_quantiles(shares, column, levels, wanted) for column in columns])
        statistics |= {name: row.reshape(points.shape[2:]) for name, row in zip(quantiles, values.T, strict=True)}
    return statistics


def _mixed_quantiles(
    shares: Sequence[float], points: np.ndarray, levels: Sequence[float], wanted: Sequence[float]
) -> np.ndarray:
    """Return quantiles of a scalar in a mixture.

    Args:
        shares: Share of each of P parts.
        points: Quantiles of each part, shape (P, L). Parts whose first quantile is NaN are ignored.
        levels: Levels of these quantiles, in increasing order, shape (L,).
        wanted: Levels of the quantiles to return, shape (Q,).

    Returns:
        Quantiles of the mixture, shape (Q,).
    """
    is_present = ~np.isnan(points[:, 0])
    points, weight = points[is_present], np.asarray(shares)[is_present]
    # The distribution function of the mixture is the weighted sum of the distribution functions of its parts. It is linear
    # between the points `at`, so interpolation inverts it.
    at = np.unique(points)
    below = sum(share * np.interp(at, own, levels, left=0.0, right=1.0) for share, own in zip(weight, points, strict=True))
    return np.interp(np.asarray(wanted) * weight.sum(), below, at)

"""Statistics of features as LeRobot defines them. Of rows they are exact; of cameras they are those of some frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
MAX_IMAGES = 100  # LeRobot samples about this many of an episode
Histogram = tuple[np.ndarray, int]  # of some frames, as `image_histogram` gives it


def table_stats(values: np.ndarray) -> dict[str, list[Any]]:
    """Statistics over the rows of values (T, ...): min, max, mean, std, count and quantiles, as nested lists.

    Each has the shape of a row, and shape (1,) where a row is a scalar; `count` is [T]. Quantiles are exact, where
    LeRobot estimates them from histograms.
    """
    if values.ndim == 1:
        values = values[:, None]
    extremes = values.astype(np.float64) if values.dtype == bool else values
    numbers = values.astype(np.float64)
    return {
        "min": extremes.min(axis=0).tolist(),
        "max": extremes.max(axis=0).tolist(),
        "mean": numbers.mean(axis=0).tolist(),
        "std": numbers.std(axis=0).tolist(),
        "count": [len(values)],
        **{name: np.quantile(numbers, share, axis=0).tolist() for name, share in QUANTILES.items()},
    }


class TableStats:
    """The same as `table_stats` of rows that come in parts, in bounded memory.

    Quantiles are exact for up to `KEPT` numbers. Of more, they are those of rows that are evenly spread over the dataset.

    Args:
        rows: how many come.
    """

    KEPT = 1 << 22

    def __init__(self, rows: int) -> None:
        self._rows, self._count = rows, 0
        self._mean = self._squares = np.zeros(())
        self._least: np.ndarray | None = None
        self._most: np.ndarray | None = None
        self._kept: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Adds the next rows (T, ...), T of 1 or more."""
        if values.ndim == 1:
            values = values[:, None]
        numbers, count = values.astype(np.float64), len(values)
        every = -(-self._rows * numbers[0].size // self.KEPT)
        self._kept.append(values[-self._count % every :: every].copy())
        extremes = numbers if values.dtype == bool else values
        least, most = extremes.min(axis=0), extremes.max(axis=0)
        self._least = least if self._least is None else np.minimum(self._least, least)
        self._most = most if self._most is None else np.maximum(self._most, most)
        # Chan, Golub and LeVeque: means and sums of squared deviations of two parts.
        mean = numbers.mean(axis=0)
        away, total = mean - self._mean, self._count + count
        self._squares = self._squares + ((numbers - mean) ** 2).sum(axis=0) + away**2 * (self._count * count / total)
        self._mean = self._mean + away * (count / total)
        self._count = total

    def result(self) -> dict[str, Any]:
        """The statistics, as arrays."""
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
    """How often each value occurs per channel, int64 (C, 256), in a sample of frames (N, H, W, C); and its size.

    At most 100 frames, evenly spaced. Of sides of 300 pixels and more, LeRobot takes every n-th row and column, so that about
    150 of the longer are left; so does this.
    """
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), MAX_IMAGES)).round().astype(int))
    longest = max(frames.shape[1:3])
    step = 1 if longest < 300 else longest // 150
    channels = np.moveaxis(frames[chosen, ::step, ::step], -1, 0)
    return np.stack([np.bincount(channel.ravel(), minlength=256) for channel in channels]), len(chosen)


def add_histograms(parts: Sequence[Histogram]) -> Histogram:
    """One histogram of the frames behind some."""
    return np.sum([histogram for histogram, _ in parts], axis=0), sum(size for _, size in parts)


def image_stats(histograms: Sequence[Histogram]) -> dict[str, list[Any]]:
    """Statistics of the frames behind some histograms: as `table_stats`, shape (C, 1, 1), values in [0, 1]."""
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
    """Statistics of a mixture out of those of its parts, of which it has these shares.

    It has those that all parts have; NaN stands for a number that a part lacks. `min` and `max` are the
    extremes, `mean` and `std` those of the mixed samples. Quantiles are approximate: values are taken to be evenly spread
    between the quantiles of a part that are known.

    Args:
        shares: of each part.
        parts: of each, float64 arrays of one shape: `mean`, `std`, `min`, `max` and quantiles, all or some of them.
    """
    names = [name for name in parts[0] if all(name in part for part in parts)]
    if not names:
        return {}
    stacked = {name: np.stack([part[name] for part in parts]) for name in names}
    weight = np.asarray(shares, np.float64).reshape(-1, *(1,) * (next(iter(stacked.values())).ndim - 1))

    def mean(values: np.ndarray) -> np.ndarray:
        there = ~np.isnan(values)
        return np.where(there, values * weight, 0).sum(axis=0) / (there * weight).sum(axis=0)

    found = {name: least(stacked[name], axis=0) for name, least in (("min", np.nanmin), ("max", np.nanmax)) if name in names}
    if "mean" in names:
        found["mean"] = mean(stacked["mean"])
        if "std" in names:
            found["std"] = np.sqrt(mean(stacked["std"] ** 2 + (stacked["mean"] - found["mean"]) ** 2))
    known = {name: share for name, share in {"min": 0.0, **QUANTILES, "max": 1.0}.items() if name in names}
    quantiles = [name for name in QUANTILES if name in names]
    if quantiles:
        points = np.stack([stacked[level] for level in known], axis=1)  # (parts, levels, ...)
        columns = np.moveaxis(points.reshape(*points.shape[:2], -1), -1, 0)
        levels, wanted = list(known.values()), [QUANTILES[name] for name in quantiles]
        values = np.array([_mixed_quantiles(shares, column, levels, wanted) for column in columns])
        found |= {name: row.reshape(points.shape[2:]) for name, row in zip(quantiles, values.T, strict=True)}
    return found


def _mixed_quantiles(
    shares: Sequence[float], points: np.ndarray, levels: Sequence[float], wanted: Sequence[float]
) -> np.ndarray:
    """The values below which `wanted` of a mixture lies, whose parts have quantiles `points` (parts, levels)."""
    there = ~np.isnan(points[:, 0])
    points, weight = points[there], np.asarray(shares)[there]
    at = np.unique(points)
    below = sum(share * np.interp(at, own, levels, left=0.0, right=1.0) for share, own in zip(weight, points, strict=True))
    return np.interp(np.asarray(wanted) * weight.sum(), below, at)

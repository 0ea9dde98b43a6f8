"""Statistics of features as LeRobot defines them. Of rows they are exact; of cameras they are those of some frames."""

from __future__ import annotations

from collections.abc import Sequence
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


def image_stats(histograms: Sequence[Histogram]) -> dict[str, list[Any]]:
    """Statistics of the frames behind some histograms: as `table_stats`, shape (C, 1, 1), values in [0, 1]."""
    counts = np.sum([histogram for histogram, _ in histograms], axis=0)
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
    stats["count"] = [sum(size for _, size in histograms)]
    return stats

"""Comparison of the features of several datasets."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.text import visible
from dali_stream.lerobot.features import Feature

Bools = npt.NDArray[np.bool_]
_COLUMNS, _LEAST = 80, len("video 480×640")  # width of a terminal, and minimum width of a dataset's column


@dataclass(frozen=True)
class Common:
    """Features of M datasets by common key.

    Attributes:
        features: Features by key. A vector has the largest width of all datasets. A camera has the feature of the first dataset
            in which it is video, or else of the dataset with the largest frames.
        missing: Whether each dataset lacks the key, shape (M,), for each key that some datasets lack.
        padded: Whether each dimension of the widest vector is padding in each dataset, shape (M, D), for each key whose widths
            differ. It is False for datasets that lack the key.
        differences: Keys that some datasets lack, or whose widths differ.
        conflicts: Keys whose features are incompatible.
    """

    features: dict[str, Feature] = field(default_factory=dict)
    missing: dict[str, Bools] = field(default_factory=dict)
    padded: dict[str, Bools] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


def common(datasets: Sequence[Mapping[str, Feature]]) -> Common:
    """Compare the features of datasets, given by common key. The result lists keys in the order of their first occurrence."""
    result = Common()
    for key in dict.fromkeys(key for features in datasets for key in features):
        have = [features.get(key) for features in datasets]
        present = [feature for feature in have if feature is not None]
        if len({_kind(feature) for feature in present}) > 1:
            result.conflicts.append(key)
            continue
        largest = max(present, key=lambda feature: np.prod(feature.shape or (1,)))
        result.features[key] = next((feature for feature in present if feature.is_video), largest)
        if len(present) < len(have):
            result.missing[key] = np.array([feature is None for feature in have])
        if len({feature.row_shape for feature in present}) > 1 and not present[0].is_camera:
            [width] = result.features[key].row_shape
            widths = [width if feature is None else (feature.row_shape or (1,))[0] for feature in have]
            result.padded[key] = np.arange(width) >= np.array(widths)[:, None]
        if key in result.missing or key in result.padded:
            result.differences.append(key)
    return result


def table(keys: Sequence[str], names: Sequence[str], datasets: Sequence[Mapping[str, Feature]]) -> str:
    """Return a table with a row per key and a column per dataset, or a list if the table would be wider than a terminal."""
    names = [visible(name) for name in names]
    rows = [(visible(key), *(visible(described(features.get(key))) for features in datasets)) for key in keys]
    widths = _widths([("key", *names), *rows])
    if widths is None:
        lines = [line for key, *cells in rows for line in (key, *map("  {}: {}".format, names, cells))]
    else:
        lines = [line for row in [("key", *names), *rows] for line in _folded(row, widths)]
    return "\n".join(f"  {line}" for line in lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int] | None:
    """Return column widths at which a row fits on a terminal, or None if a dataset's column would become too narrow."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * len(widths) > _COLUMNS:
        widest = max(range(1, len(widths)), key=widths.__getitem__)  # the column of keys keeps its width
        if widths[widest] <= _LEAST:
            return None
        widths[widest] -= 1
    return widths


def _folded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of a row, with wrapped cells."""
    cells = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = itertools.zip_longest(*cells, fillvalue="")
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def described(feature: Feature | None) -> str:
    """Return a short description of a feature."""
    if feature is None:
        return "missing"
    if feature.is_camera:
        height, width = feature.frame_size
        channels = "" if feature.channels == 3 else " depth" if feature.is_depth else f"×{feature.channels}"
        return f"{feature.dtype} {height}×{width}{channels}"
    return f"{feature.dtype} {feature.row_shape}" if feature.row_shape else feature.dtype


def _kind(feature: Feature) -> tuple[Any, ...]:
    """Return a value that is the same for all features that are compatible with this one."""
    if feature.is_camera:  # a camera may be video in some datasets, and images in others
        return "camera", feature.channels, feature.is_depth
    shape = feature.row_shape
    # Scalars and vectors of all widths are compatible, since shorter ones are padded. Matrices and text must have equal shapes.
    return (feature.dtype if feature.is_text else feature.numpy), None if len(shape) < 2 and not feature.is_text else shape

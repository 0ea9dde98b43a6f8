"""Comparison of the features of several datasets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.text import visible
from dali_stream.lerobot.features import Feature

Bools = npt.NDArray[np.bool_]


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


def alike(datasets: Sequence[Mapping[str, Feature]]) -> list[list[str]]:
    """Return groups of keys that look like names of one feature, such as "state" and "observation.state".

    Keys look alike if they differ only in case, separators, a plural, or words such as "observation" and "images" before the
    name. If a dataset has two keys of a group, they are different features, so the group is left out.
    """
    groups: dict[tuple[Any, ...], dict[str, None]] = {}
    for features in datasets:
        for key, feature in features.items():
            groups.setdefault((_bare(key), feature.is_camera, feature.is_text), {})[key] = None
    return [
        list(group)
        for group in groups.values()
        if len(group) > 1 and all(len(group.keys() & features.keys()) < 2 for features in datasets)
    ]


def _bare(key: str) -> str:
    """Return the part of a key that names the feature, in lower case and without separators and plurals."""
    words = [word.removesuffix("s") for word in re.split(r"[\W_]+", key.lower())]
    while len(words) > 1 and words[0] in ("", "observation", "ob", "image"):
        del words[0]
    return "".join(words) or key


def comparison(keys: Sequence[str], names: Sequence[str], datasets: Sequence[Mapping[str, Feature]]) -> str:
    """Return indented lines with each key, and below it the feature of each dataset."""
    lines = []
    for key in keys:
        lines.append(f"  {visible(key)}")
        for name, features in zip(names, datasets, strict=True):
            lines.append(f"    {visible(name)}: {visible(described(features.get(key)))}")
    return "\n".join(lines)


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

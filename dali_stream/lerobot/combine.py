"""Combination of several datasets into one source, with common keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.text import listed
from dali_stream.lerobot.common import common, comparison
from dali_stream.lerobot.dataset_files import NEEDED, DatasetFiles
from dali_stream.lerobot.source import Source, concatenate

MISSING = ("error", "pad")
RESERVED = ("dataset", "dataset_index", "task", "subtask")  # keys of a mixture's batches that no feature can be renamed to


def combine(datasets: Mapping[str, DatasetFiles], keys: Mapping[str, Mapping[str, str]], missing: str = "error") -> Source:
    """Return the episodes of several datasets as one source.

    Its `constants` contain `dataset_index`, the number of each dataset, shape (M,). If a dataset lacks a feature that others
    have, they also contain `<key>_is_missing`, bool, shape (M,). If a vector is shorter in some datasets, they also contain
    `<key>_dim_is_pad`, bool, shape (M, D).

    Args:
        datasets: Datasets by name.
        keys: Renamed features of each dataset, {name: {key in the dataset: common key}}. Other features keep their key.
        missing: Either "pad", or "error" to raise ValueError if datasets lack features or vectors differ in width. Default:
            "error".

    Raises:
        ValueError: If `keys` is invalid, if features with the same key are incompatible, or if the datasets differ and
            `missing` is "error".
    """
    names = list(datasets)
    own = [own_keys(name, dataset, keys.get(name, {})) for name, dataset in datasets.items()]
    have = [
        {key: dataset.features[old] for key, old in renamed.items()}
        for dataset, renamed in zip(datasets.values(), own, strict=True)
    ]
    union = common(have)
    if union.conflicts:
        fixed = [key for key in union.conflicts if key in NEEDED]
        advice = (
            f"Convert the datasets to one dtype and shape of {', '.join(fixed)}, which every batch has"
            if fixed
            else "Give one of them another key with keys=, or leave it out with Dataset.without"
        )
        raise ValueError(
            f"Features with the same key must be compatible, got:\n{comparison(union.conflicts, names, have)}\n{advice}"
        )
    if union.differences and missing == "error":
        raise ValueError(
            f"Datasets must have the same features, got:\n{comparison(union.differences, names, have)}\n"
            'Give missing="pad" to fill up with zeros and masks, or keys={name: {key: common key}} where they are the same '
            "under other keys, or leave features out with Dataset.without"
        )
    constants: dict[str, npt.NDArray[Any]] = {"dataset_index": np.arange(len(datasets))}
    constants |= {f"{key}_is_missing": lacks for key, lacks in union.missing.items()}
    constants |= {f"{key}_dim_is_pad": padded for key, padded in union.padded.items()}
    return concatenate(list(datasets.values()), own, union.features, names, constants)


def own_keys(name: str, dataset: DatasetFiles, keys: Mapping[str, str]) -> dict[str, str]:
    """Return {common key: key in the dataset} for all features of a dataset.

    Args:
        name: Name of the dataset, for messages.
        dataset: Dataset.
        keys: Common keys of the features to rename, {key in the dataset: common key}.

    Raises:
        ValueError: If a feature is unknown or must keep its key, if a new key is reserved, or if two features get the same key.
    """
    for key, other in keys.items():
        if key not in dataset.features or (key in NEEDED and key != other):
            can = listed(key for key in dataset.features if key not in NEEDED)
            raise ValueError(f"keys[{name!r}] must rename features of dataset {name!r}, got {key!r}. Available: {can}")
        if other in RESERVED and other != key:
            raise ValueError(
                f"keys[{name!r}] must not rename {key!r} to {other!r}, because batches have another value under that key"
            )
    own_key_of: dict[str, str] = {}
    for key in dataset.features:
        new = keys.get(key, key)
        if new in own_key_of:
            free = " or ".join(each for each in (own_key_of[new], key) if each not in NEEDED)
            raise ValueError(
                f"keys[{name!r}] must give each feature its own key, got {new!r} for both {own_key_of[new]!r} and {key!r}. "
                f"Give {free} another key, or leave it out with Dataset.without"
            )
        own_key_of[new] = key
    return own_key_of

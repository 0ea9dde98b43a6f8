"""Features brought to a common scale by `Dataset.stats`, and back.

    mean_std    (x - mean) / std
    min_max     minimum to -1, maximum to 1
    quantiles   the 1 % quantile to -1, the 99 % quantile to 1

As LeRobot's NormalizerProcessorStep has it, but for dimensions that never change: those are moved to 0 and not divided.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import known_arguments
from dali_stream.errors import DatasetError

if TYPE_CHECKING:
    import torch

    from dali_stream.dataset import Dataset

MODES = {"mean_std": ("mean", "std"), "min_max": ("min", "max"), "quantiles": ("q01", "q99")}
_COMPUTE = (
    "Dataset(uri, stats=dataset.compute_stats()), or `dali-stream stats URI --out stats.json` once and "
    'Dataset(uri, stats=json.load(open("stats.json")))'
)
Modes = str | Mapping[str, str | None] | None
_log = logging.getLogger("dali_stream")


class Normalizer:
    """Normalises the keys of batches, of `Loader` or of others, and takes it back.

    Args:
        dataset: whose features, and whose `stats`: those of `meta/stats.json`, which are of all episodes, or those that were
            given as `Dataset(stats=...)`.
        normalize: {key: "mean_std", "min_max", "quantiles" or None}; or one of them for the action and all of
            `observation.*` that is floats and no camera. A camera's statistics are of frames in [0, 1], per channel.

    Attributes:
        modes: {key: mode} of what is normalised.

    Raises:
        ValueError: an unknown mode or key, a feature that is no floats, or statistics that the dataset lacks.
        DatasetError: its statistics are of another shape, or not finite; where they were given, a ValueError.
    """

    @known_arguments
    def __init__(self, dataset: Dataset, normalize: Modes) -> None:
        self.modes = _modes(dataset, normalize)
        self._affine = {key: _affine(dataset, key, mode) for key, mode in self.modes.items()}
        self._on: dict[tuple[str, Any], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with its keys normalised. Tensors are (B, ...) or (B, T, ...) float, as the Loader delivers them."""
        return {key: self._forward(key, value) if key in self._affine else value for key, value in batch.items()}

    def inverse(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Takes it back, for example of {"action": what a policy predicts}. Keys that are not normalised stay as they are."""
        return {key: self._back(key, value) if key in self._affine else value for key, value in batch.items()}

    def _forward(self, key: str, value: torch.Tensor) -> torch.Tensor:
        shift, scale = self._tensors(key, value)
        return (value - shift) / scale

    def _back(self, key: str, value: torch.Tensor) -> torch.Tensor:
        shift, scale = self._tensors(key, value)
        return value * scale + shift

    def _tensors(self, key: str, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if (key, like.device) not in self._on:
            shift, scale = self._affine[key]
            self._on[key, like.device] = (torch.tensor(shift, device=like.device), torch.tensor(scale, device=like.device))
        of = self._affine[key][0].shape
        # What is not of that shape would be broadcast to something else without a word.
        if like.shape[like.ndim - len(of) :][: 1 if len(of) == 3 else None] != of[: 1 if len(of) == 3 else None]:
            raise ValueError(f"{key} has shape {tuple(like.shape)}, and what is normalised of it ends in {of}; see `normalize`")
        return self._on[key, like.device]


def _modes(dataset: Dataset, normalize: Modes) -> dict[str, str]:
    if normalize is None:
        return {}
    if not isinstance(normalize, (str, Mapping)):
        raise ValueError(
            f"normalize is {normalize!r}; it is one of {', '.join(map(repr, MODES))}, or a dict with one of them or None per "
            "key, or None"
        )
    if isinstance(normalize, str):
        normalize = {key: normalize for key in dataset.features if _is_floats(dataset, key) and key not in dataset.cameras
                     and (key == "action" or key.startswith("observation."))}  # fmt: skip
    for key, mode in normalize.items():
        if mode is not None and not (isinstance(mode, str) and mode in MODES):
            raise ValueError(f"normalize has {mode!r} for {key}; allowed are {', '.join(map(repr, MODES))} and None")
        if key not in dataset.features or not _is_floats(dataset, key):
            can = [other for other in dataset.features if _is_floats(dataset, other)]
            raise ValueError(f"normalize names {key!r}, which is no feature of floats or frames; those are {', '.join(can)}")
    return {key: mode for key, mode in normalize.items() if mode is not None}


def _is_floats(dataset: Dataset, key: str) -> bool:
    return key in dataset.cameras or dataset.features[key].is_float


def _affine(dataset: Dataset, key: str, mode: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(shift, scale): a value is normalised as (value - shift) / scale."""
    first, second = (_statistic(dataset, key, name) for name in MODES[mode])
    shift, scale = (first, second) if mode == "mean_std" else ((first + second) / 2, (second - first) / 2)
    flat = scale == 0
    why = "std is 0" if mode == "mean_std" else f"{MODES[mode][0]} is {MODES[mode][1]}"
    if {"min", "max"} <= dataset.stats.get(key, {}).keys():
        # LeRobot adds a deviation up in float32, so that of a dimension that never changes is seldom quite 0.
        least, most = (_statistic(dataset, key, name) for name in ("min", "max"))
        why = why if flat.any() else "min is max"
        flat, shift = flat | (least == most), np.where(least == most, least, shift)
    if flat.any():
        names = ", ".join(_name(dataset, key, place) for place in np.flatnonzero(flat).tolist())
        _log.warning("%s: dimension %s never changes by the dataset's statistics (%s); it is moved to 0, and not divided",
                     key, names, why)  # fmt: skip
    return shift.astype(np.float32), np.where(flat, 1, scale).astype(np.float32)


def _statistic(dataset: Dataset, key: str, name: str) -> npt.NDArray[np.float64]:
    found = dataset.stats.get(key, {}).get(name)
    if found is None:
        has = ", ".join(dataset.stats.get(key, {}))
        if not dataset.stats:
            wrong = f"{dataset.stats_place} is missing or empty"
        else:
            wrong = f"{dataset.stats_place} has {has or 'nothing'} of it"
        what = "Take another mode, or compute" if has else "Compute"
        raise ValueError(f"normalize needs {name} of {key}, and {wrong}. {what} it: {_COMPUTE}")
    feature = dataset.features[key]
    shape = (feature.channels, 1, 1) if feature.is_camera else feature.shape or (1,)
    if found.shape != shape or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        said = f"{name} of {key} is {str(found.tolist())[:80]}, of shape {found.shape}"
        wrong = f"{said}; expected finite numbers of shape {shape}"
        if dataset.stats_place == "stats=":
            raise ValueError(f"stats=: {wrong}")
        raise DatasetError(f"{dataset.store.where(dataset.stats_place)}: {wrong}")
    # A feature of one number is a scalar in a batch.
    return found.astype(np.float64).reshape(() if shape == (1,) else shape)


def _name(dataset: Dataset, key: str, place: int) -> str:
    names = dataset.features[key].get("names")
    if isinstance(names, Mapping) and len(names) == 1:
        [names] = names.values()
    return f"{place} ({names[place]})" if isinstance(names, list) and place < len(names) else str(place)

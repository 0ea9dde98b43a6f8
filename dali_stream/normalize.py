"""Normalization of features with `Dataset.stats`, and its inverse.

    mean_std    (x - mean) / std
    min_max     maps the minimum to -1 and the maximum to 1
    quantiles   maps the 1 % quantile to -1 and the 99 % quantile to 1

The formulas are those of LeRobot's NormalizerProcessorStep, with one exception: a dimension that never changes is shifted to 0
and not divided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import known_arguments
from dali_stream.checks.text import listed
from dali_stream.errors import DatasetError, prefixed
from dali_stream.mixture import Mixture
from dali_stream.system.log_records import DATASET_LOG

if TYPE_CHECKING:
    import torch

    from dali_stream.dataset import Dataset
    from dali_stream.pipeline.config import Config

MODES = {"mean_std": ("mean", "std"), "min_max": ("min", "max"), "quantiles": ("q01", "q99")}
_COMPUTE = (
    "Dataset(uri, stats=dataset.compute_stats()), or `dali-stream stats URI --out stats.json` once and "
    'Dataset(uri, stats=json.load(open("stats.json")))'
)
PER_DATASET = "_per_dataset"  # suffix of modes that use the statistics of each sample's own dataset
INDEX = "dataset_index"  # key of the number of each sample's dataset
Modes = str | Mapping[str, str | None] | None
"""Mode of each key, such as {"action": "min_max"}. A single mode applies to the action and to all float features
`observation.*` except cameras. None disables normalization."""
Affine = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
_log = logging.getLogger(DATASET_LOG)


class Normalizer:
    """Normalization of the features of batches, and its inverse.

    Args:
        dataset: `Dataset` or `Mixture` with the features and statistics. The statistics are those of the dataset's metadata,
            which cover all episodes, unless others were passed as `Dataset(stats=...)`.
        normalize: Mode per key, {key: "mean_std", "min_max", "quantiles" or None}, or one mode for the action and all float
            features `observation.*` except cameras. Statistics of a camera are those of frames in [0, 1], per channel. For a
            mixture, these modes use the merged statistics of all datasets, see `Mixture.stats`. "mean_std_per_dataset",
            "min_max_per_dataset" and "quantiles_per_dataset" use those of each sample's own dataset. Values that a dataset
            lacks remain 0.

    Attributes:
        modes: {key: mode} of the keys that are normalized.

    Raises:
        ValueError: If a mode or key is unknown, a feature does not contain floats, or the dataset lacks statistics.
        DatasetError: If statistics of the dataset have another shape or are not finite. For `Dataset(stats=...)`, this is a
            ValueError.
    """

    @known_arguments
    def __init__(self, dataset: Dataset | Mixture, normalize: Modes) -> None:
        self.modes = _modes(dataset, normalize)
        # (shift, scale) of each key, stacked if the datasets of a mixture differ.
        self._affine = {key: _affine(dataset, key, mode) for key, mode in self.modes.items()}
        self._shape = {key: dataset.features[key].statistic_shape for key in self.modes}
        self._on: dict[tuple[str, Any], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with the keys of `modes` normalized. Other keys are returned unchanged.

        Args:
            batch: {key: tensor or list}. Tensors to normalize are float of shape (B, ...) or (B, T, ...).

        Raises:
            ValueError: If a tensor has another shape, or if `dataset_index` is needed and missing, see `inverse`.
        """
        return self._mapped(batch, lambda value, shift, scale: (value - shift) / scale)

    def inverse(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Undo the normalization, for example of {"action": predicted actions}. Other keys are returned unchanged.

        If the datasets of a mixture are normalized differently, the batch must contain `dataset_index`, int64 of shape (B,).

        Raises:
            ValueError: See `__call__`.
        """
        return self._mapped(batch, lambda value, shift, scale: value * scale + shift)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return mode, shape, shift and scale of each key, as a small dict of text, lists and numbers.

        Save it with the policy. `from_state_dict` then needs no dataset. `torch.load(weights_only=True)` and JSON read it.

        Returns:
            {key: {"mode": mode, "shape": shape of a step, "shift": list, "scale": list}}. A value is normalized as
            (x - shift) / scale. The lists have a first axis for the datasets of a mixture if these are normalized differently.
        """
        return {
            key: {
                "mode": mode,
                "shape": list(self._shape[key]),
                "shift": self._affine[key][0].tolist(),
                "scale": self._affine[key][1].tolist(),
            }
            for key, mode in self.modes.items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Mapping[str, Any]]) -> Normalizer:
        """Return the normalizer that a `state_dict` describes. It needs no dataset.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: If `state` has another form.
        """
        normalizer = object.__new__(cls)
        normalizer.modes, normalizer._affine, normalizer._shape, normalizer._on = {}, {}, {}, {}
        try:
            for key, own in state.items():
                shift, scale, shape = (
                    np.array(own["shift"], np.float32),
                    np.array(own["scale"], np.float32),
                    tuple(own["shape"]),
                )
                several = shift.ndim - len(shape)  # 1 with an axis for the datasets of a mixture
                if several not in (0, 1) or shift.shape != scale.shape or shift.shape[several:] != shape:
                    raise ValueError(f"shift {shift.shape} and scale {scale.shape} of {key!r} do not fit its shape {shape}")
                if not (np.isfinite(shift).all() and np.isfinite(scale).all() and scale.all()):
                    raise ValueError(f"shift and scale of {key!r} must be finite, and scale not 0")
                if own["mode"].removesuffix(PER_DATASET) not in MODES:
                    raise ValueError(f"mode of {key!r} must be one of {listed(MODES)}, got {own['mode']!r}")
                normalizer.modes[key], normalizer._affine[key], normalizer._shape[key] = own["mode"], (shift, scale), shape
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state must be the result of Normalizer.state_dict, got {type(error).__name__}: {error}"
            ) from None
        return normalizer

    def _mapped(self, batch: Mapping[str, Any], change: Callable[[Any, Any, Any], Any]) -> dict[str, Any]:
        index = batch.get(INDEX)
        return {
            key: change(value, *self._tensors(key, value, index)) if key in self._affine else value
            for key, value in batch.items()
        }

    def _tensors(self, key: str, like: torch.Tensor, index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return shift and scale in a shape that broadcasts to a tensor."""
        import torch

        if (key, like.device) not in self._on:
            first, second = self._affine[key]
            self._on[key, like.device] = (torch.tensor(first, device=like.device), torch.tensor(second, device=like.device))
        shift, scale = self._on[key, like.device]
        feature_shape = self._shape[key]
        # A tensor of another shape would be broadcast without an error. Statistics of a camera have shape (C, 1, 1), and only
        # C must match.
        if (
            like.shape[like.ndim - len(feature_shape) :][: 1 if len(feature_shape) == 3 else None]
            != feature_shape[: 1 if len(feature_shape) == 3 else None]
        ):
            raise ValueError(f"{key} must have a shape that ends in {feature_shape} to be normalized, got {tuple(like.shape)}")
        if shift.ndim == len(feature_shape):
            return shift, scale
        if index is None:
            raise ValueError(
                f"The batch must contain {INDEX!r}, int64 of shape (B,), because {key} is normalized differently for each "
                "dataset, or is missing from some. The Loader delivers it"
            )
        index = index.to(like.device)
        shape = len(index), *(1,) * (like.ndim - 1 - len(feature_shape)), *feature_shape
        return shift[index].reshape(shape), scale[index].reshape(shape)


def _modes(dataset: Dataset | Mixture, normalize: Modes) -> dict[str, str]:
    """Return {key: mode} of the keys to normalize."""
    if normalize is None:
        return {}
    allowed = ", ".join(map(repr, MODES))
    if not isinstance(normalize, (str, Mapping)):
        raise ValueError(
            f"normalize must be one of {allowed}, a dict with one of them or None per key, or None, got {normalize!r}"
        )
    if not isinstance(normalize, Mapping):
        single = _checked(dataset, "normalize", normalize)
        floats = [key for key in dataset.features if _is_floats(dataset, key) and key not in dataset.cameras]
        normalize = {key: single for key in floats if key == "action" or key.startswith("observation.")}
        if not normalize:
            floats = [key for key in floats if key != "timestamp"]
            _log.warning(
                "normalize=%r changes nothing, because no float feature is 'action' or begins with 'observation.'. Give a mode "
                "per key, such as normalize={%r: %r}. Float features: %s",
                *(single, floats[0] if floats else "key", single, listed(floats)),
            )
    for key, mode in normalize.items():
        if mode is not None:
            _checked(dataset, f"normalize[{key!r}]", mode)
        if key not in dataset.features or not _is_floats(dataset, key):
            float_keys = [other for other in dataset.features if _is_floats(dataset, other)]
            if key in dataset.features and dataset.features[key].is_depth:
                raise ValueError(
                    f"normalize must not name a depth camera, got {key!r}. Scale its distances in the model, for example by "
                    "the largest one"
                )
            raise ValueError(f"normalize must name float features, got {key!r}. Available: {listed(float_keys)}")
    return {key: mode for key, mode in normalize.items() if mode is not None}


def _checked(dataset: Dataset | Mixture, name: str, mode: object) -> str:
    """Return a mode. Raises ValueError if it is unknown, or not allowed for a single dataset."""
    allowed = ", ".join(map(repr, MODES))
    if not isinstance(mode, str) or mode.removesuffix(PER_DATASET) not in MODES:
        raise ValueError(
            f"{name} must be one of {allowed} or None, or for a mixture also one of them with {PER_DATASET!r} added, "
            f"got {mode!r}"
        )
    if mode.endswith(PER_DATASET) and not dataset.source.dataset_names:
        raise ValueError(f"{name} must be one of {allowed} for a single dataset, got {mode!r}")
    return mode


def _is_floats(dataset: Dataset | Mixture, key: str) -> bool:
    feature = dataset.features[key]
    return feature.is_float or (key in dataset.cameras and not feature.is_depth)


def _affine(dataset: Dataset | Mixture, key: str, mode: str) -> Affine:
    """Return shift and scale of (value - shift) / scale. They have shape (M, ...) if they differ among the M datasets."""
    mode, per_dataset = mode.removesuffix(PER_DATASET), mode.endswith(PER_DATASET)
    if not isinstance(dataset, Mixture):
        return _of_statistics({name: _statistic(dataset, key, name) for name in _names(dataset, key, mode)}, dataset, key, mode)
    having, shape = dataset.having(key), dataset.features[key].statistic_shape
    shift, scale = np.zeros((len(dataset.datasets), *shape), np.float32), np.ones((len(dataset.datasets), *shape), np.float32)
    for number, (part, own) in having.items():
        try:
            statistics = {name: _statistic(part, own, name) for name in _names(part, own, mode)}
        except (ValueError, DatasetError) as error:
            raise prefixed(f"dataset {dataset.source.dataset_names[number]!r}", error) from error
        if per_dataset:
            own_dims = dataset.dimensions(key, number)
            affine = _of_statistics(statistics, part, own, mode)
            shift[number, ...][own_dims], scale[number, ...][own_dims] = (values.reshape(-1) for values in affine)
    if not per_dataset:
        affine = _of_statistics(dataset.merged_stats(key), dataset, key, mode)
        for number in having:
            own_dims = dataset.dimensions(key, number)
            shift[number, ...][own_dims], scale[number, ...][own_dims] = (values[own_dims] for values in affine)
    same = bool((shift == shift[:1]).all() and (scale == scale[:1]).all())
    return (shift[0], scale[0]) if same else (shift, scale)


def _names(dataset: Dataset, key: str, mode: str) -> list[str]:
    """Return the names of the statistics that a mode needs, and of the extremes if the dataset has them."""
    extremes = ("min", "max") if {"min", "max"} <= dataset.stats.get(key, {}).keys() else ()
    return [*dict.fromkeys((*MODES[mode], *extremes))]


def _of_statistics(stats: Mapping[str, npt.NDArray[np.float64]], dataset: Dataset | Mixture, key: str, mode: str) -> Affine:
    first, second = (stats[name] for name in MODES[mode])
    shift, scale = (first, second) if mode == "mean_std" else ((first + second) / 2, (second - first) / 2)
    flat = scale == 0
    why = "std is 0" if mode == "mean_std" else f"{MODES[mode][0]} is {MODES[mode][1]}"
    if {"min", "max"} <= stats.keys():
        # LeRobot computes `std` in float32, so it is rarely exactly 0 for a dimension that never changes.
        least, most = stats["min"], stats["max"]
        why = why if flat.any() else "min is max"
        flat, shift = flat | (least == most), np.where(least == most, least, shift)
    if flat.any():
        names = listed(_name(dataset, key, place) for place in np.flatnonzero(flat).tolist())
        _log.warning("%s: dimension %s never changes by the dataset's statistics (%s). It is shifted to 0, and not divided",
                     key, names, why)  # fmt: skip
    return shift.astype(np.float32), np.where(flat, 1, scale).astype(np.float32)


def _statistic(dataset: Dataset, key: str, name: str) -> npt.NDArray[np.float64]:
    values = dataset.stats.get(key, {}).get(name)
    if values is None:
        has = listed(dataset.stats.get(key, {}), "")
        if not dataset.stats:
            problem = f"{dataset.stats_place} is missing or empty"
        else:
            problem = f"{dataset.stats_place} has {has or 'nothing'} of it"
        advice = "Use another mode, or compute" if has else "Compute"
        raise ValueError(f"normalize needs {name} of {key}, but {problem}. {advice} it: {_COMPUTE}")
    feature = dataset.features[key]
    shape = (feature.channels, 1, 1) if feature.is_camera else feature.shape or (1,)
    if values.shape != shape or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        problem = f"must be finite numbers of shape {shape}, got {str(values.tolist())[:80]} of shape {values.shape}"
        if dataset.stats_place == "stats=":
            raise ValueError(f"{name} of {key} in stats= {problem}")
        raise DatasetError(f"Invalid {name} of {key} in {dataset.store.where(dataset.stats_place)}: {problem}")
    # A feature of one number is a scalar in a batch.
    return values.astype(np.float64).reshape(() if shape == (1,) else shape)


def _name(dataset: Dataset | Mixture, key: str, place: int) -> str:
    names = dataset.features[key].get("names")
    if isinstance(names, Mapping) and len(names) == 1:
        [names] = names.values()
    return f"{place} ({names[place]})" if isinstance(names, list) and place < len(names) else str(place)


def make_normalizer(dataset: Dataset | Mixture, config: Config, modes: Modes) -> Normalizer:
    """Return the normalizer of a Loader.

    Args:
        dataset: Dataset of the Loader.
        config: Configuration of the Loader.
        modes: Argument `normalize` of the Loader.

    Raises:
        ValueError: If `modes` is invalid, or contains a camera although `image_dtype` is "uint8".
    """
    left_out = [key for key in dataset.features if key not in config.source.features]
    normalizer = Normalizer(dataset.without(left_out) if left_out else dataset, modes)
    frames = [key for key in normalizer.modes if key in config.source.cameras]
    if config.image_dtype != "float32" and frames:
        raise ValueError(f'image_dtype must be "float32" to normalize {frames[0]}, got {config.image_dtype!r}')
    return normalizer

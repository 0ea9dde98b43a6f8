"""Features brought to a common scale by `Dataset.stats`, and back.

    mean_std    (x - mean) / std
    min_max     minimum to -1, maximum to 1
    quantiles   the 1 % quantile to -1, the 99 % quantile to 1

As LeRobot's NormalizerProcessorStep has it, but for dimensions that never change: those are moved to 0 and not divided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import known_arguments
from dali_stream.errors import DatasetError
from dali_stream.mixture import Mixture

if TYPE_CHECKING:
    import torch

    from dali_stream.dataset import Dataset

MODES = {"mean_std": ("mean", "std"), "min_max": ("min", "max"), "quantiles": ("q01", "q99")}
_COMPUTE = (
    "Dataset(uri, stats=dataset.compute_stats()), or `dali-stream stats URI --out stats.json` once and "
    'Dataset(uri, stats=json.load(open("stats.json")))'
)
WHOSE = ("merged", "own")
INDEX = "dataset_index"  # the key of the number of each sample's dataset
Mode = str | tuple[str, str] | None
Modes = Mode | Mapping[str, Mode]
Affine = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
_log = logging.getLogger("dali_stream")


class Normalizer:
    """Normalises the keys of batches, of `Loader` or of others, and takes it back.

    Args:
        dataset: whose features, and whose `stats`: those of `meta/stats.json`, which are of all episodes, or those that were
            given as `Dataset(stats=...)`. Or a `Mixture`.
        normalize: {key: "mean_std", "min_max", "quantiles" or None}; or one of them for the action and all of
            `observation.*` that is floats and no camera. A camera's statistics are of frames in [0, 1], per channel.
            Of a mixture also ("min_max", "own"), by the statistics of each sample's own dataset; "min_max" alone is
            ("min_max", "merged"), by those of all together, see `Mixture.stats`. What a dataset lacks stays 0.

    Attributes:
        modes: {key: mode} of what is normalised.

    Raises:
        ValueError: an unknown mode or key, a feature that is no floats, or statistics that the dataset lacks.
        DatasetError: its statistics are of another shape, or not finite; where they were given, a ValueError.
    """

    @known_arguments
    def __init__(self, dataset: Dataset | Mixture, normalize: Modes) -> None:
        chosen = _modes(dataset, normalize)
        self.modes = {key: mode for key, (mode, _) in chosen.items()}
        # (shift, scale) of each key; where the datasets of a mixture differ, one after the other.
        self._affine = {key: _affine(dataset, key, *mode) for key, mode in chosen.items()}
        self._shape = {key: dataset.features[key].statistic_shape for key in chosen}
        self._on: dict[tuple[str, Any], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with its keys normalised. Tensors are (B, ...) or (B, T, ...) float, as the Loader delivers them."""
        return self._mapped(batch, lambda value, shift, scale: (value - shift) / scale)

    def inverse(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Takes it back, for example of {"action": what a policy predicts}. Keys that are not normalised stay as they are.

        Of a mixture whose datasets are normalised differently, the batch also needs `dataset_index`, int64 (B,).
        """
        return self._mapped(batch, lambda value, shift, scale: value * scale + shift)

    def _mapped(self, batch: Mapping[str, Any], change: Callable[[Any, Any, Any], Any]) -> dict[str, Any]:
        index = batch.get(INDEX)
        return {
            key: change(value, *self._tensors(key, value, index)) if key in self._affine else value
            for key, value in batch.items()
        }

    def _tensors(self, key: str, like: torch.Tensor, index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Shift and scale in a shape that broadcasts to a tensor."""
        import torch

        if (key, like.device) not in self._on:
            first, second = self._affine[key]
            self._on[key, like.device] = (torch.tensor(first, device=like.device), torch.tensor(second, device=like.device))
        shift, scale = self._on[key, like.device]
        of = self._shape[key]
        # What is not of that shape would be broadcast to something else without a word.
        if like.shape[like.ndim - len(of) :][: 1 if len(of) == 3 else None] != of[: 1 if len(of) == 3 else None]:
            raise ValueError(f"{key} has shape {tuple(like.shape)}, and what is normalised of it ends in {of}; see `normalize`")
        if shift.ndim == len(of):
            return shift, scale
        if index is None:
            raise ValueError(
                f"{key} is normalised differently from dataset to dataset, by its own statistics or since one lacks some of "
                f"it, and the batch has no {INDEX!r}: int64 (B,), as the Loader delivers it. Keep it beside what is normalised"
            )
        index = index.to(like.device)
        shape = len(index), *(1,) * (like.ndim - 1 - len(of)), *of
        return shift[index].reshape(shape), scale[index].reshape(shape)


def _modes(dataset: Dataset | Mixture, normalize: Modes) -> dict[str, tuple[str, str]]:
    """{key: (mode, whose)} of what is normalised."""
    if normalize is None:
        return {}
    if not isinstance(normalize, (str, tuple, Mapping)):
        raise ValueError(
            f"normalize is {normalize!r}; it is one of {', '.join(map(repr, MODES))}, or a dict with one of them or None per "
            "key, or None"
        )
    if not isinstance(normalize, Mapping):
        normalize = {key: normalize for key in dataset.features if _is_floats(dataset, key) and key not in dataset.cameras
                     and (key == "action" or key.startswith("observation."))}  # fmt: skip
    found = {}
    for key, given in normalize.items():
        mode = (given, WHOSE[0]) if given is None or isinstance(given, str) else given
        if not (isinstance(mode, tuple) and len(mode) == 2 and mode[0] in (*MODES, None) and mode[1] in WHOSE):
            raise ValueError(
                f"normalize has {given!r} for {key}; allowed are {', '.join(map(repr, MODES))} and None, and of a mixture "
                f'one of them with {" or ".join(map(repr, WHOSE))}, such as ("min_max", "own")'
            )
        if isinstance(given, tuple) and not dataset.dataset_names:
            raise ValueError(f"normalize has {given!r} for {key}, and only a mixture has statistics of several datasets")
        if key not in dataset.features or not _is_floats(dataset, key):
            can = [other for other in dataset.features if _is_floats(dataset, other)]
            raise ValueError(f"normalize names {key!r}, which is no feature of floats or frames; those are {', '.join(can)}")
        if mode[0] is not None:
            found[key] = (mode[0], mode[1])
    return found


def _is_floats(dataset: Dataset | Mixture, key: str) -> bool:
    return key in dataset.cameras or dataset.features[key].is_float


def _affine(dataset: Dataset | Mixture, key: str, mode: str, whose: str) -> Affine:
    """(shift, scale): a value is normalised as (value - shift) / scale. (M, ...) where M datasets have different ones."""
    if not isinstance(dataset, Mixture):
        return _of_statistics({name: _statistic(dataset, key, name) for name in _names(dataset, key, mode)}, dataset, key, mode)
    having, shape = dataset.having(key), dataset.features[key].statistic_shape
    shift, scale = np.zeros((len(dataset.datasets), *shape), np.float32), np.ones((len(dataset.datasets), *shape), np.float32)
    for number, (part, own) in having.items():
        try:
            statistics = {name: _statistic(part, own, name) for name in _names(part, own, mode)}
        except (ValueError, DatasetError) as error:
            raise type(error)(f"dataset {dataset.dataset_names[number]!r}: {error}") from error
        if whose == "own":
            there = dataset.dimensions(key, number)
            found = _of_statistics(statistics, part, own, mode)
            shift[number, ...][there], scale[number, ...][there] = (values.reshape(-1) for values in found)
    if whose == "merged":
        found = _of_statistics(dataset.merged_stats(key), dataset, key, mode)
        for number in having:
            there = dataset.dimensions(key, number)
            shift[number, ...][there], scale[number, ...][there] = (values[there] for values in found)
    same = bool((shift == shift[:1]).all() and (scale == scale[:1]).all())
    return (shift[0], scale[0]) if same else (shift, scale)


def _names(dataset: Dataset, key: str, mode: str) -> list[str]:
    """The statistics that a mode needs, and the extremes where there are any."""
    extremes = ("min", "max") if {"min", "max"} <= dataset.stats.get(key, {}).keys() else ()
    return [*dict.fromkeys((*MODES[mode], *extremes))]


def _of_statistics(stats: Mapping[str, npt.NDArray[np.float64]], dataset: Dataset | Mixture, key: str, mode: str) -> Affine:
    first, second = (stats[name] for name in MODES[mode])
    shift, scale = (first, second) if mode == "mean_std" else ((first + second) / 2, (second - first) / 2)
    flat = scale == 0
    why = "std is 0" if mode == "mean_std" else f"{MODES[mode][0]} is {MODES[mode][1]}"
    if {"min", "max"} <= stats.keys():
        # LeRobot adds a deviation up in float32, so that of a dimension that never changes is seldom quite 0.
        least, most = stats["min"], stats["max"]
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


def _name(dataset: Dataset | Mixture, key: str, place: int) -> str:
    names = dataset.features[key].get("names")
    if isinstance(names, Mapping) and len(names) == 1:
        [names] = names.values()
    return f"{place} ({names[place]})" if isinstance(names, list) and place < len(names) else str(place)

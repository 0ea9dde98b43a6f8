"""The public mixture: several datasets in one epoch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import Any, NoReturn

import numpy as np

from dali_stream import mixture_file
from dali_stream.arguments import known_arguments, one_of
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, counted
from dali_stream.lerobot.combined import MISSING, CombinedSource
from dali_stream.lerobot.metadata import Stats
from dali_stream.lerobot.stats import merged
from dali_stream.order import windows
from dali_stream.order.orders import MixtureOrders
from dali_stream.order.shares import shares

_OPENED_AT_ONCE = 16  # datasets: opening one is a few round trips, one after the other


class Mixture(CombinedSource[Dataset]):
    """Several datasets, of which each batch has samples in given shares. A `Loader` takes it in place of a `Dataset`.

        mixture = dali_stream.Mixture({"pick": "owner/pick", "fold": "s3://bucket/fold"}, weights={"pick": 2, "fold": 1})
        loader = dali_stream.Loader(mixture, batch_size=64, image_size=(224, 224))

    At most one of `weights`, `repeats` and `temperature` says how many samples of an epoch are of which dataset:

    none of them    an epoch shows every frame of every dataset once
    repeats         an epoch shows each dataset so many times; half a pass is half of its frames, and the next epoch has the
                    other half
    weights         shares of the samples
    temperature     shares that are proportional to frames ** (1 / temperature): 1 is the union's, large ones are equal

    In each of them, every prefix of an epoch has each dataset's share within one sample per consumer, on each rank and over
    all (with `shuffle="global"` or False within one sample over all, and about that on a rank). Each dataset has its own
    passes, across epochs too, and each pass has every frame once. See docs/mixtures.md.

    A batch has `dataset`, a list of str, and `dataset_index`, int64 (B,), which of `datasets` each sample is of. Where
    datasets differ and `missing` is "pad", it also has `<key>_is_missing`, bool (B,), for each key that some lack, whose values
    are zeros there (or empty text), and `<key>_dim_is_pad`, bool (B, D), for vectors that are shorter in some. Frames of
    different sizes need `Loader(image_size=...)`. A window is laid out in seconds on each dataset's own clock.

    Args:
        datasets: by name, a `Dataset`, anything that it takes, or a dict of its arguments. Several are opened at once.
        weights: per name, a number above 0.
        repeats: per name, passes per epoch, a number above 0.
        temperature: above 0.
        epoch_samples: of an epoch, with `weights` or `temperature`, which have no end of their own. None: as many as the
            datasets have frames.
        keys: per name, {key in that dataset: common key}, for features that are the same under different keys.
        missing: "error", a ValueError that lists in what the datasets differ; or "pad", see above.
        nearest: Whether an offset of a window that is not a multiple of 1/fps of a dataset selects the nearest frame. Otherwise
            it is an error.

    Attributes:
        datasets: by name.
        features: under the common keys; vectors as wide as the widest.
        cameras: the common camera keys.
        num_frames: of all datasets, those that can be sampled.
        num_episodes: of all datasets.
        shares: what each dataset gives: `targets` (M,), its share of the samples, and `passes` (M,) over it in an epoch.
        fps: per name, frames per second.

    Raises:
        ValueError: a bad argument, or the datasets differ and `missing` is "error".
        DatasetError, StorageError: as `Dataset`, with the name of the one.
    """

    @known_arguments
    def __init__(
        self,
        datasets: Mapping[str, Dataset | str | os.PathLike[str] | Mapping[str, Any]],
        *,
        weights: Mapping[str, float] | None = None,
        repeats: Mapping[str, float] | None = None,
        temperature: float | None = None,
        epoch_samples: int | None = None,
        keys: Mapping[str, Mapping[str, str]] | None = None,
        missing: str = "error",
        nearest: bool = False,
    ) -> None:
        one_of("missing", missing, MISSING)
        if not isinstance(datasets, Mapping) or not datasets or not all(isinstance(name, str) for name in datasets):
            raise ValueError(f"datasets is {str(datasets)[:80]}; it is a dict of one or more datasets by name")
        for what, given in (("weights", weights), ("repeats", repeats), ("keys", keys)):
            check_names(what, given, datasets, every=what != "keys")
        for name, renamed in (keys or {}).items():
            if not isinstance(renamed, Mapping) or not all(isinstance(key, str) for key in (*renamed, *renamed.values())):
                raise ValueError(f"keys[{name!r}] is {str(renamed)[:80]!r}; it is a dict {{key in the dataset: common key}}")
        opened = open_all(datasets)
        try:
            super().__init__(opened, keys or {}, missing)
            self.fps = {name: dataset.fps for name, dataset in opened.items()}
            self.nearest = nearest
            self.num_frames = int(self.sampled_lengths.sum())
            self.shares = shares(
                [dataset.num_frames for dataset in opened.values()],
                weights=None if weights is None else [weights[name] for name in opened],
                repeats=None if repeats is None else [repeats[name] for name in opened],
                temperature=temperature,
                epoch_samples=epoch_samples,
                names=list(opened),
            )
        except BaseException:
            close_opened(opened, datasets)
            raise
        self.uri = f"the mixture of {', '.join(opened)}"
        self.renamed_keys = {name: dict((keys or {}).get(name, {})) for name in opened}
        self.shares_given = _plain(weights=weights, repeats=repeats, temperature=temperature, epoch_samples=epoch_samples)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Mixture:
        """The mixture of a YAML or JSON file, `.yaml`, `.yml` or `.json`, which has the arguments by name.

            datasets:
              pick: owner/pick
              old: {uri: ../v21, drop_last: 10}    # arguments of a Dataset
            weights: {pick: 2, old: 1}
            missing: pad

        Relative paths are relative to the file. A name such as "owner/pick" that is no folder there is the id of a Hub dataset.

        Raises:
            ValueError: the file cannot be read, or has unknown keys or bad values.
            DatasetError, StorageError: as of `Mixture`.
        """
        arguments = cls.file_arguments(path)
        try:
            return cls(**arguments)
        except (DaliStreamError, ValueError) as error:
            raise type(error)(f"mixture file {os.fspath(path)}: {error}") from error

    @staticmethod
    def file_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
        """What `from_file` gives to `Mixture`: the arguments in a file, with each of `datasets` a dict of arguments of a
        `Dataset`. Raises ValueError."""
        return mixture_file.read(path)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over the names, keys and fingerprints of the datasets. Shares do not count."""
        parts = [
            [name, dataset.fingerprint, sorted(self.renamed_keys[name].items())] for name, dataset in self.datasets.items()
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def has_fingerprint(self, found: object) -> bool:
        """Whether a saved state is of this mixture."""
        return found == self.fingerprint

    def orders(self) -> MixtureOrders:
        """The orders of its epochs, as a Loader reads them."""
        parts = self.datasets.values()
        return MixtureOrders([part.lengths for part in parts], [part.frame_ranges for part in parts], self.shares)

    def window_offsets(self, deltas: Mapping[str, Sequence[float]], keys: Sequence[str]) -> dict[str, np.ndarray]:
        """{key: (M, T) int64 frame offsets} of `delta_timestamps`, on each dataset's own clock. Raises ValueError."""
        found = []
        for name, fps in self.fps.items():
            try:
                found.append(windows.offsets(deltas, fps, keys, self.nearest))
            except windows.BetweenFrames as error:
                raise ValueError(f"dataset {name!r}: {error}. Mixture(nearest=True) takes the nearest frame") from error
        return {key: np.stack([offsets[key] for offsets in found]) for key in found[0]}

    @property
    def stats(self) -> Stats:
        """Statistics of the samples per common key, merged from those of the datasets by their shares.

        Means and deviations are those of the mixed samples, `min` and `max` the extremes, and quantiles approximate. Of each
        feature it has what all datasets have that have the feature.
        """
        return {key: found for key in self.features if (found := self.merged_stats(key))}

    def merged_stats(self, key: str) -> dict[str, np.ndarray]:
        """Those of one feature, in the shape of a row, or (C, 1, 1) of a camera."""
        having, shape = self.having(key), self.features[key].statistic_shape
        parts = []
        for number, (part, own) in having.items():
            there = self.dimensions(key, number)
            stats = {}
            for name, values in part.stats.get(own, {}).items():
                if name != "count" and values.dtype.kind in "iuf" and values.size == there.sum():
                    stats[name] = np.full(shape, np.nan)
                    stats[name][there] = values.reshape(-1)
            parts.append(stats)
        return merged([float(self.shares.targets[number]) for number in having], parts) if all(parts) else {}

    def dimensions(self, key: str, number: int) -> np.ndarray:
        """Which numbers of a row of a feature, (C, 1, 1) of a camera, dataset `number` has, and are no padding."""
        padded = self.constants.get(f"{key}_dim_is_pad")
        return np.ones(self.features[key].statistic_shape, np.bool_) if padded is None else ~padded[number]

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self.shares.epoch_samples

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError("a dali_stream.Mixture has no items; its datasets are in `datasets`, and Loader(mixture, ...) reads it")

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {target:.3g}" for name, target in zip(self.datasets, self.shares.targets, strict=True))
        return f"Mixture({counted(len(self.datasets), 'dataset')}, {counted(len(self), 'sample')} an epoch: {parts})"


def _plain(**given: Any) -> dict[str, Any]:
    """Return the arguments that are not None, with numbers that JSON can hold."""

    def number(value: Any) -> int | float:
        return int(value) if isinstance(value, Integral) else float(value)

    return {
        name: {key: number(each) for key, each in value.items()} if isinstance(value, Mapping) else number(value)
        for name, value in given.items()
        if value is not None
    }


def check_names(what: str, given: object, datasets: Mapping[str, Any], every: bool) -> None:
    """Raises ValueError where an argument is no dict by the datasets' names."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is {str(given)[:80]}; it is a dict by the names of the datasets, {', '.join(datasets)}")
    if unknown := [name for name in given if name not in datasets]:
        raise ValueError(f"{what} names {unknown[0]!r}, which is no dataset. Available: {', '.join(datasets)}")
    if every and (left := [name for name in datasets if name not in given]):
        raise ValueError(f"{what} lacks {left[0]!r}; give each dataset one, or leave the dataset out")


def open_all(datasets: Mapping[str, Dataset | str | os.PathLike[str] | Mapping[str, Any]]) -> dict[str, Dataset]:
    """All of them, opened at once. Raises as `Mixture`."""

    def opened(name: str) -> Dataset:
        dataset = datasets[name]
        try:
            if isinstance(dataset, Mapping):
                return Dataset(**dataset)
            if isinstance(dataset, (str, os.PathLike)):
                return Dataset(dataset)
        except (DaliStreamError, ValueError, TypeError) as error:
            raise type(error)(f"dataset {name!r}: {error}") from error
        if not isinstance(dataset, Dataset):
            allowed = "a Dataset, an address, or a dict of arguments of a Dataset"
            raise ValueError(f"dataset {name!r} is {str(dataset)[:80]}; it is {allowed}")
        return dataset

    with ThreadPoolExecutor(min(len(datasets), _OPENED_AT_ONCE), "dali_stream open") as pool:
        futures = {name: pool.submit(opened, name) for name in datasets}
    failed = [future.exception() for future in futures.values() if future.exception()]
    if failed:
        close_opened({name: future.result() for name, future in futures.items() if not future.exception()}, datasets)
        assert failed[0] is not None
        raise failed[0]
    return {name: future.result() for name, future in futures.items()}


def close_opened(opened: Mapping[str, Dataset], given: Mapping[str, Any]) -> None:
    """Closes datasets, but not those that the caller has opened."""
    for name, dataset in opened.items():
        if dataset is not given[name]:
            dataset.close()

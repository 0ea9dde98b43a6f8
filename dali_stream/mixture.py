"""Mixture, the public class for several datasets in one epoch."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from dali_stream.checks.arguments import known_arguments, one_of
from dali_stream.checks.text import html_table, listed
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, counted, prefixed
from dali_stream.lerobot import fingerprint, mixture_file
from dali_stream.lerobot.combine import MISSING, combine
from dali_stream.lerobot.common import alike, common
from dali_stream.lerobot.dataset_files import check_left_out
from dali_stream.lerobot.fingerprint import Identity
from dali_stream.lerobot.stats import Stats, merged
from dali_stream.order import windows
from dali_stream.order.orders import MixtureOrders
from dali_stream.order.shares import shares
from dali_stream.storage import Store
from dali_stream.system.cached import cached_property
from dali_stream.system.log_records import DATASET_LOG

_log = logging.getLogger(DATASET_LOG)
_OPENED_AT_ONCE = 16  # maximum number of datasets that are opened in parallel, since each needs several requests in sequence


class Mixture:
    """Several datasets whose samples are mixed in each batch. A `Loader` accepts it instead of a `Dataset`.

        mixture = dali_stream.Mixture({"pick": "owner/pick", "fold": "s3://bucket/fold"}, weights={"pick": 2, "fold": 1})
        loader = dali_stream.Loader(mixture, batch_size=64, image_size=(224, 224))

    At most one of `weights`, `repeats` and `temperature` determines the number of samples of each dataset in an epoch:

    none of them    An epoch samples each frame of each dataset once.
    repeats         An epoch makes this number of passes over each dataset. With half a pass, an epoch samples half of the
                    frames, and the next epoch samples the other half.
    weights         The numbers of samples of the datasets are proportional to the weights.
    temperature     The numbers of samples are proportional to frames ** (1 / temperature). With 1, they are proportional to the
                    numbers of frames. With a large temperature, they are almost equal.

    After any number of draws of a consumer, the number of samples of each dataset deviates by about 2 or less from its share,
    and the deviations of different consumers mostly cancel. Each dataset has its own passes, which may extend over several
    epochs. Each pass contains each frame once. See docs/mixtures.md.

    A batch contains `dataset`, the name of each sample's dataset as a list of str, and `dataset_index`, its number in
    `datasets`, int64 of shape (B,). If the datasets differ and `missing` is "pad", it also contains `<key>_is_missing`, bool of
    shape (B,), for each key that some datasets lack, and `<key>_dim_is_pad`, bool of shape (B, D), for each vector that is
    shorter in some datasets. Missing values are zeros or empty strings. If the sizes of frames differ, the Loader needs
    `image_size`. A window has the same times in seconds for all datasets, even if their frame rates differ.

    Args:
        datasets: Datasets by name. Each is a `Dataset`, an address that `Dataset` accepts, or a dict of arguments of `Dataset`.
            The datasets are opened in parallel.
        weights: Weight of each dataset by name, a positive number.
        repeats: Number of passes of each dataset per epoch by name, a positive number.
        temperature: Positive number that determines how strongly the number of frames affects the number of samples.
        epoch_samples: Number of samples in an epoch, only with `weights` or `temperature`. Default: the number of frames of all
            datasets together.
        keys: Features to rename in each dataset, {name: {key in the dataset: common key}}, for features that are the same but
            have different keys. Default: none.
        missing: "error" to raise a ValueError that lists the differences of the datasets, or "pad" to fill missing values as
            described above. Default: "error".
        nearest: Whether a time of a window that is not a multiple of 1/fps of a dataset selects the nearest frame. If False,
            such a time raises a ValueError. Default: False.

    Attributes:
        datasets: Opened datasets by name.
        features: Features by common key. Vectors have the largest width of all datasets.
        cameras: Common keys of the cameras.
        num_frames: Number of frames of all datasets that can be sampled.
        num_episodes: Number of episodes of all datasets.
        shares: Shares of the M datasets. `targets` is the share of each dataset in the samples, and `passes` the average number
            of times that an epoch samples each frame of a dataset, both of shape (M,).
        fps: Frames per second of each dataset by name.

    Raises:
        ValueError: If an argument is invalid, or if the datasets differ and `missing` is "error".
        DatasetError, StorageError: See `Dataset`. The message contains the name of the dataset.
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
            raise ValueError(f"datasets must be a dict of one or more datasets by name, got {str(datasets)[:80]}")
        for argument, value in (("weights", weights), ("repeats", repeats), ("keys", keys)):
            check_names(argument, value, datasets, every=argument != "keys")
        for name, renamed in (keys or {}).items():
            if not isinstance(renamed, Mapping) or not all(isinstance(key, str) for key in (*renamed, *renamed.values())):
                raise ValueError(f"keys[{name!r}] must be a dict {{key in the dataset: common key}}, got {str(renamed)[:80]!r}")
        opened = open_all(datasets)
        try:
            self.missing, self.nearest = missing, nearest
            self._combine(opened, keys or {})
            if missing == "pad":
                self._warn_of_other_keys(keys or {})
            self.fps = {name: dataset.fps for name, dataset in opened.items()}
            self.num_episodes = len(self.lengths)
            self.num_frames = sum(dataset.num_frames for dataset in opened.values())
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
        self.uri = f"the mixture of {listed(opened)}"
        self.renamed_keys = {name: dict((keys or {}).get(name, {})) for name in opened}

    def _combine(self, datasets: Mapping[str, Dataset], keys: Mapping[str, Mapping[str, str]]) -> None:
        """Combine datasets. `keys` is the argument of `Mixture`."""
        self.datasets = dict(datasets)
        self.source = combine(self.datasets, keys, self.missing)
        self.features, self.cameras = self.source.features, self.source.cameras
        self.lengths, self.dataset_of = self.source.lengths, self.source.dataset_of

    def _warn_of_other_keys(self, keys: Mapping[str, Mapping[str, str]]) -> None:
        """Warn about features that look the same, but have different keys in the datasets. `keys` is the argument."""
        parts = dict(zip(self.datasets, self.source.parts, strict=True))
        renamed, found, advice = {name: dict(own) for name, own in keys.items()}, [], ""
        for group in alike([part.features for part in parts.values()]):
            having = {key: [name for name, part in parts.items() if key in part.features] for key in group}
            text = " and ".join(f"{key!r} ({listed(names)})" for key, names in having.items())
            if common([{"": parts[name].features[key]} for key, names in having.items() for name in names]).conflicts:
                found.append(f"{text}, which can have one key only after their types are made equal")
                continue
            found.append(text)
            new = max(group, key=lambda key: len(having[key]))
            for key, names in having.items():
                for name in names if key != new else ():
                    renamed.setdefault(name, {})[parts[name].keys[key]] = new
            advice = f". If they are the same, pass keys={renamed}"
        if found:
            _log.warning(
                "features that look the same have different keys in the datasets of the mixture, so each is missing in the "
                "others: %s%s",
                *("; ".join(found), advice),
            )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Mixture:
        """Return the mixture of a YAML or JSON file (`.yaml`, `.yml` or `.json`) that contains the arguments by name.

            datasets:
              pick: owner/pick
              old: {uri: ../v21, drop_n_last_frames: 10}    # arguments of a Dataset
            weights: {pick: 2, old: 1}
            missing: pad

        Relative paths are relative to the folder of the file. A name such as "owner/pick" is the id of a Hub dataset, unless
        this folder contains such a path.

        Raises:
            ValueError: If the file cannot be read, or has unknown keys or invalid values.
            DatasetError, StorageError: See `Mixture`.
        """
        arguments = cls.file_arguments(path)
        try:
            return cls(**arguments)
        except (DaliStreamError, ValueError) as error:
            raise prefixed(f"mixture file {os.fspath(path)}", error) from error

    @staticmethod
    def file_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the arguments of a `Mixture` in a file. Each value in `datasets` is a dict of arguments of a `Dataset`.

        Raises:
            ValueError: See `from_file`.
        """
        return mixture_file.read(path)

    @cached_property
    def identity(self) -> Identity:
        """Properties that distinguish the mixture from others, for the state of a run."""
        parts = {name: dataset.identity for name, dataset in self.datasets.items()}
        named = [[name, part.fingerprint, sorted(self.renamed_keys[name].items())] for name, part in parts.items()]
        contents = {f"{name}: {key}": digest for name, part in parts.items() for key, digest in part.contents.items()}
        for name, keys in self.renamed_keys.items():
            if keys:
                contents[f"{name}: {fingerprint.KEYS}"] = fingerprint.hashed(json.dumps(sorted(keys.items())).encode())
        digest = hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()
        return Identity(self.uri, digest, contents, {name: part.origin for name, part in parts.items()})

    @property
    def fingerprint(self) -> str:
        """Hash of the names, renamed keys and fingerprints of the datasets, 32 hexadecimal digits, without the shares."""
        return self.identity.fingerprint

    @property
    def stores(self) -> list[Store]:
        """Stores of all datasets, without duplicates. Parts of one dataset share their stores."""
        return list({id(store): store for dataset in self.datasets.values() for store in dataset.stores}.values())

    def without(self, keys: Collection[str]) -> Mixture:
        """Return the same mixture without some features and cameras, which are then not read. The mixtures share open files.

        Args:
            keys: Common keys of the features and cameras to leave out.

        Raises:
            ValueError: If a key is unknown, or if every dataset must have it.
        """
        check_left_out(keys, self.features)
        rest, parts = copy.copy(self), dict(zip(self.datasets, self.source.parts, strict=True))
        rest._combine(
            {
                name: dataset.without([parts[name].keys[key] for key in keys if key in parts[name].keys])
                for name, dataset in self.datasets.items()
            },
            {name: {own: key for key, own in part.keys.items() if key not in keys} for name, part in parts.items()},
        )
        return rest

    def orders(self) -> MixtureOrders:
        """Return the orders of the epochs for a Loader."""
        parts = self.datasets.values()
        return MixtureOrders([part.lengths for part in parts], [part.frame_ranges for part in parts], self.shares)

    def window_offsets(self, deltas: Mapping[str, Sequence[float]], keys: Sequence[str]) -> dict[str, np.ndarray]:
        """Return {key: frame offsets of shape (M, T)} for `delta_timestamps`, computed with the frame rate of each dataset.

        Raises:
            ValueError: If a key or a window is invalid, or if an offset is not a multiple of 1/fps and `nearest` is False.
        """
        parts = []
        for name, fps in self.fps.items():
            try:
                parts.append(windows.offsets(deltas, fps, keys, self.nearest))
            except windows.BetweenFrames as error:
                raise ValueError(f"dataset {name!r}: {error}. Mixture(nearest=True) takes the nearest frame") from error
        return {key: np.stack([offsets[key] for offsets in parts]) for key in parts[0]}

    @property
    def stats(self) -> Stats:
        """Statistics of the samples per common key, merged from the datasets' statistics and weighted by the datasets' shares.

        `mean` and `std` are those of the mixed samples, `min` and `max` are the extremes, and quantiles are approximate. A
        statistic of a feature is included if all datasets with this feature have it.
        """
        return {key: values for key in self.features if (values := self.merged_stats(key))}

    def having(self, key: str) -> dict[int, tuple[Dataset, str]]:
        """Return the datasets that have a feature, {number of the dataset: (dataset, key in the dataset)}."""
        parts = enumerate(zip(self.datasets.values(), self.source.parts, strict=True))
        return {number: (dataset, part.keys[key]) for number, (dataset, part) in parts if key in part.keys}

    def merged_stats(self, key: str) -> dict[str, np.ndarray]:
        """Return the merged statistics of one feature. They have the shape of a row, or (C, 1, 1) for a camera."""
        having, shape = self.having(key), self.features[key].statistic_shape
        parts = []
        for number, (part, own) in having.items():
            own_dims = self.dimensions(key, number)
            stats = {}
            for name, values in part.stats.get(own, {}).items():
                if name != "count" and values.dtype.kind in "iuf" and values.size == own_dims.sum():
                    stats[name] = np.full(shape, np.nan)
                    stats[name][own_dims] = values.reshape(-1)
            parts.append(stats)
        return merged([float(self.shares.targets[number]) for number in having], parts) if all(parts) else {}

    def dimensions(self, key: str, number: int) -> np.ndarray:
        """Return a mask of the elements of a feature that are not padding in a dataset.

        Args:
            key: Common key of the feature.
            number: Number of the dataset.

        Returns:
            Mask of the shape of a row, or (C, 1, 1) for a camera.
        """
        padded = self.source.constants.get(f"{key}_dim_is_pad")
        return np.ones(self.features[key].statistic_shape, np.bool_) if padded is None else ~padded[number]

    def close(self) -> None:
        """Close file handles and connections. Reading opens them again."""
        for dataset in self.datasets.values():
            dataset.close()

    def __len__(self) -> int:
        """Number of samples of an epoch."""
        return self.shares.epoch_samples

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "dali_stream.Mixture is not indexable. Its datasets are in `datasets`, and Loader(mixture, ...) reads it"
        )

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {target:.3g}" for name, target in zip(self.datasets, self.shares.targets, strict=True))
        return f"Mixture({counted(len(self.datasets), 'dataset')}, {counted(len(self), 'sample')} an epoch: {parts})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook: the share and the size of each dataset."""
        parts = zip(self.datasets.items(), self.shares.targets, strict=True)
        rows = [(name, f"{target:.3g} of the samples, from {part.num_frames:,} frames") for (name, part), target in parts]
        return html_table("Mixture", [("samples of an epoch", f"{len(self):,}"), ("cameras", listed(self.cameras)), *rows])


def check_names(argument: str, value: object, datasets: Mapping[str, Any], every: bool) -> None:
    """Check that an argument is a dict whose keys are names of datasets.

    Args:
        argument: Name of the argument.
        value: Value of the argument. None is allowed.
        datasets: Datasets by name.
        every: Whether the dict must contain the names of all datasets.

    Raises:
        ValueError: If the argument is invalid.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"{argument} must be a dict by the names of the datasets, {listed(datasets)}, got {str(value)[:80]}")
    if unknown := [name for name in value if name not in datasets]:
        raise ValueError(f"Unknown dataset {unknown[0]!r} in {argument}. Available: {listed(datasets)}")
    if every and (left := [name for name in datasets if name not in value]):
        raise ValueError(f"{argument} must name each dataset, got none for {left[0]!r}. Add one, or leave the dataset out")


def open_all(datasets: Mapping[str, Dataset | str | os.PathLike[str] | Mapping[str, Any]]) -> dict[str, Dataset]:
    """Open all datasets in parallel. See `Mixture` for the errors."""

    def opened(name: str) -> Dataset:
        dataset = datasets[name]
        try:
            if isinstance(dataset, Mapping):
                return Dataset(**dataset)
            if isinstance(dataset, (str, os.PathLike)):
                return Dataset(dataset)
        except (DaliStreamError, ValueError, TypeError) as error:
            raise prefixed(f"dataset {name!r}", error) from error
        if not isinstance(dataset, Dataset):
            allowed = "a Dataset, an address, or a dict of arguments of a Dataset"
            raise ValueError(f"dataset {name!r} must be {allowed}, got {str(dataset)[:80]}")
        return dataset

    with ThreadPoolExecutor(min(len(datasets), _OPENED_AT_ONCE), "dali_stream open") as pool:
        futures = {name: pool.submit(opened, name) for name in datasets}
    failed = [future.exception() for future in futures.values() if future.exception()]
    if failed:
        close_opened({name: future.result() for name, future in futures.items() if not future.exception()}, datasets)
        assert failed[0] is not None
        raise failed[0]
    return {name: future.result() for name, future in futures.items()}


def close_opened(opened: Mapping[str, Dataset], passed: Mapping[str, Any]) -> None:
    """Close datasets, except those that the caller passed as `Dataset`."""
    for name, dataset in opened.items():
        if dataset is not passed[name]:
            dataset.close()


def open_dataset(dataset: Dataset | Mixture | str | os.PathLike[str]) -> Dataset | Mixture:
    """Return the dataset of a Loader.

    Raises:
        ValueError: If `dataset` is a list, a mapping, or the path to a mixture file.
        DatasetError: See `Dataset`.
    """
    if isinstance(dataset, (list, tuple)):
        raise ValueError(
            f"dataset must be one dataset or a Mixture, got a {type(dataset).__name__}. Give several datasets as "
            'Loader(dali_stream.Mixture({"first": uri, "second": uri}), ...)'
        )
    if isinstance(dataset, Mapping) or (isinstance(dataset, (str, os.PathLike)) and mixture_file.is_mixture_file(dataset)):
        how = "Mixture(datasets)" if isinstance(dataset, Mapping) else "Mixture.from_file(path)"
        raise ValueError(
            f"dataset must be one dataset or a Mixture, got {str(dataset)[:80]!r}. Use Loader(dali_stream.{how}, ...)"
        )
    return dataset if isinstance(dataset, (Dataset, Mixture)) else Dataset(dataset)

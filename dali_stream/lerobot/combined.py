"""Source that combines several datasets: it concatenates their episodes and gives their features common keys."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream.checks.text import listed
from dali_stream.lerobot.common import common, table
from dali_stream.lerobot.dataset import NEEDED, DatasetFiles, check_left_out
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.row_memory import Columns, Found, RowMemory
from dali_stream.lerobot.rows import RowReader, Rows
from dali_stream.lerobot.source import ABSENT, Source, Timing
from dali_stream.storage import Store

Int64 = npt.NDArray[np.int64]
D = TypeVar("D", bound=DatasetFiles)
Self = TypeVar("Self", bound="CombinedSource[Any]")
MISSING = ("error", "pad")
RESERVED = ("dataset", "dataset_index", "task", "subtask")  # keys of a mixture's batches that no feature can be renamed to


class CombinedSource(Generic[D]):
    """A `Source` of M datasets.

    `constants` contains `dataset_index`, the number of each dataset, shape (M,). If a dataset lacks a feature that others have,
    its rows contain zeros or empty strings, and `constants` contains `<key>_is_missing`, bool, shape (M,). If a vector is
    shorter in some datasets, it is padded with zeros, and `constants` contains `<key>_dim_is_pad`, bool, shape (M, D).

    Args:
        datasets: Datasets by name.
        keys: Renamed features of each dataset, {name: {key in the dataset: common key}}. Other features keep their key.
        missing: Either "pad", or "error" to raise ValueError if datasets lack features or vectors differ in width. Default:
            "error".

    Attributes:
        datasets: Datasets by name.
        first: Number of the first episode of each dataset, shape (M,).

    Raises:
        ValueError: If `keys` is invalid, if features with the same key are incompatible, or if the datasets differ and
            `missing` is "error".
    """

    def __init__(self, datasets: Mapping[str, D], keys: Mapping[str, Mapping[str, str]], missing: str = "error") -> None:
        self.datasets, self.missing = dict(datasets), missing
        self._parts = list(self.datasets.values())
        self._own = [own_keys(name, part, keys.get(name, {})) for name, part in self.datasets.items()]
        self.dataset_names = tuple(self.datasets)
        lengths = [part.lengths for part in self._parts]
        counts = np.array([len(part_lengths) for part_lengths in lengths])
        self.first = np.cumsum(counts) - counts
        self.dataset_of = np.repeat(np.arange(len(counts)), counts)
        self.lengths = np.concatenate(lengths)
        self.sampled_lengths = np.concatenate([part.sampled_lengths for part in self._parts])
        self.episodes = np.concatenate([part.episodes for part in self._parts])
        self.num_episodes = len(self.lengths)
        have = [{key: part.features[own] for key, own in own_keys.items()} for part, own_keys in self._each()]
        union, names = common(have), list(self.datasets)
        if union.conflicts:
            fixed = [key for key in union.conflicts if key in NEEDED]
            advice = (
                f"Convert the datasets to one dtype and shape of {', '.join(fixed)}, which every batch has"
                if fixed
                else "Give one of them another key with keys=, or leave it out with Dataset.without"
            )
            raise ValueError(
                f"Features with the same key must be compatible, got:\n{table(union.conflicts, names, have)}\n{advice}"
            )
        if union.differences and missing == "error":
            raise ValueError(
                f"Datasets must have the same features, got:\n{table(union.differences, names, have)}\n"
                'Give missing="pad" to fill up with zeros and masks, or keys={name: {key: common key}} where they are the same '
                "under other keys, or leave features out with Dataset.without"
            )
        self.features, self._features = union.features, have
        self.cameras = tuple(key for key, feature in self.features.items() if feature.is_camera)
        self.videos = tuple(key for key in self.cameras if any(key in own and own[key].is_video for own in have))
        self.images = tuple(key for key in self.cameras if any(key in own and own[key].is_image for own in have))
        self.constants: dict[str, npt.NDArray[Any]] = {"dataset_index": np.arange(len(self._parts))}
        self.constants |= {f"{key}_is_missing": lacks for key, lacks in union.missing.items()}
        self.constants |= {f"{key}_dim_is_pad": padded for key, padded in union.padded.items()}
        self._files = {key: self._number_files(key) for key in self.videos}

    def _each(self) -> list[tuple[D, dict[str, str]]]:
        """Return each dataset, with {common key: key in the dataset}."""
        return list(zip(self._parts, self._own, strict=True))

    def _place(self, episode: int) -> tuple[int, int]:
        """Return the number of the dataset of an episode, and the number of the episode within the dataset."""
        dataset = int(self.dataset_of[episode])
        return dataset, int(episode - self.first[dataset])

    def _number_files(self, camera: str) -> tuple[Int64, Int64]:
        """Return the number of each episode's file, shape (E,), and the first file number of each dataset, shape (M,)."""
        numbers, before, count = [], [], 0
        for part, own in self._each():
            before.append(count)
            if camera in own and own[camera] in part.videos:
                numbers.append(count + part.files(own[camera]))
                count += len(part.table.video[own[camera]].paths)
            else:
                numbers.append(np.full(part.num_episodes, ABSENT))
        return np.concatenate(numbers).astype(np.int64), np.array(before, np.int64)

    @functools.cached_property
    def data_store(self) -> Store:
        """Store of the rows and videos."""
        return CombinedStore([part.data_store for part in self._parts])

    @property
    def stores(self) -> list[Store]:
        """Stores of all datasets, without duplicates. Parts of one dataset share their stores."""
        return list({id(store): store for part in self._parts for store in part.stores}.values())

    @property
    def cache_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the cache of the first remote dataset. None if a remote dataset has no cache, or if all are local."""
        folders = [part.cache_dir for part in self._parts if part.data_store.remote]
        return folders[0] if folders and all(folders) else None

    @functools.cached_property
    def row_bytes_without_objects(self) -> int:
        """Memory of a row in bytes, without images and text."""
        return sum(feature.row_bytes for feature in self.features.values())

    @functools.cached_property
    def row_bytes(self) -> int:
        """Approximate memory of a row in bytes, averaged over all frames."""
        return int(np.average(self.row_bytes_of[self.dataset_of], weights=self.lengths))

    @functools.cached_property
    def row_bytes_of(self) -> Int64:
        """Approximate memory of a row of each dataset in bytes, with its images and text, shape (M,)."""
        objects = [sum(feature.object_bytes for feature in have.values()) for have in self._features]
        return self.row_bytes_without_objects + np.array(objects, np.int64)

    def having(self, key: str) -> dict[int, tuple[D, str]]:
        """Return the datasets that have a feature, {number of the dataset: (dataset, key in the dataset)}."""
        return {d: (part, own[key]) for d, (part, own) in enumerate(self._each()) if key in own}

    def files(self, camera: str) -> Int64:
        return self._files[camera][0]

    def path(self, camera: str, file: int) -> str:
        _, before = self._files[camera]
        # Only datasets with video of this camera count. Their files are numbered consecutively, so a file belongs to the last
        # of these datasets whose first file number is at most `file`.
        dataset = max(d for d, (part, own) in enumerate(self._each()) if own.get(camera) in part.videos and before[d] <= file)
        return f"{dataset}/{self._parts[dataset].path(self._own[dataset][camera], int(file - before[dataset]))}"

    def interval(self, camera: str, episode: int) -> tuple[float, float]:
        dataset, number = self._place(episode)
        return self._parts[dataset].interval(self._own[dataset][camera], number)

    def timing(self, episode: int) -> Timing:
        dataset, number = self._place(episode)
        return self._parts[dataset].timing(number)

    def seconds(self, episode: int, rows: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        dataset, number = self._place(episode)
        return self._parts[dataset].seconds(number, rows)

    def feature(self, key: str, episode: int) -> Feature | None:
        return self._features[self.dataset_of[episode]].get(key)

    def picture_size(self, camera: str) -> tuple[int, int]:
        """Return the size (height, width) of a camera's frames. Raises ValueError if the datasets have different sizes."""
        if len({have[camera].frame_size for have in self._features if camera in have}) > 1:
            raise ValueError(
                f"image_size must be (height, width) because the frames of {camera!r} differ in size, got None:\n"
                f"{table([camera], list(self.datasets), self._features)}"
            )
        return self.features[camera].frame_size

    def names(self) -> dict[str, list[dict[int, str]]]:
        tables_by_key: dict[str, list[dict[int, str]]] = {"task": [], "subtask": []}
        for part in self._parts:
            for key, tables in part.names().items():
                tables_by_key[key] += tables
        # If only some datasets have subtasks, each sample of the others gets an empty name.
        if any(tables_by_key["subtask"]):
            tables_by_key["subtask"] = [names or defaultdict(str) for names in tables_by_key["subtask"]]
        return tables_by_key

    def names_place(self, key: str, dataset: int) -> str:
        return self._parts[dataset].names_place(key, 0)

    def without(self: Self, keys: Collection[str]) -> Self:
        """Return the same episodes without some features and cameras, which are then not read. The sources share open files.

        Args:
            keys: Common keys of the features and cameras to leave out.

        Raises:
            ValueError: If a key is unknown, or if every dataset must have it.
        """
        check_left_out(keys, self.features)
        rest = object.__new__(type(self))
        vars(rest).update({name: value for name, value in vars(self).items() if not name.startswith("row_bytes")})
        left = {
            name: part.without([own[key] for key in keys if key in own])
            for (name, part), own in zip(self.datasets.items(), self._own, strict=True)
        }
        renamed = {
            name: {own: key for key, own in own_keys.items() if key not in keys}
            for name, own_keys in zip(self.datasets, self._own, strict=True)
        }
        CombinedSource.__init__(rest, left, renamed, self.missing)
        return rest

    def __getstate__(self) -> dict[str, Any]:
        # `data_store` is derived from the stores of the datasets, so a copy must derive it from its own datasets.
        return {name: value for name, value in vars(self).items() if name != "data_store"}

    def close(self) -> None:
        """Close file handles and connections. Reading opens them again."""
        for part in self._parts:
            part.close()


def row_reader(source: Source, store: Store, memory: RowMemory | None = None) -> Rows:
    """Return a reader of the rows of all features of a source.

    Args:
        source: Source of the episodes.
        store: Session of the source's `data_store`.
        memory: Memory for decoded row groups. Default: a new one that is not shared.
    """
    if isinstance(source, CombinedSource):
        return CombinedReader(source, store, memory)
    assert isinstance(source, DatasetFiles)
    return RowReader(source, store, memory)


class CombinedReader:
    """Reader of the rows of several datasets, with the common keys. Safe to use from several threads.

    Args:
        union: Source of the datasets.
        store: Session of the source's `data_store`.
        memory: Memory for decoded row groups of all datasets together. Default: a new one that is not shared.
    """

    def __init__(self, union: CombinedSource[Any], store: Store, memory: RowMemory | None = None) -> None:
        assert isinstance(store, CombinedStore)
        self._source = union
        memory = memory or RowMemory()
        self._readers = [
            RowReader(part, part_store, memory) for (part, _), part_store in zip(union._each(), store.stores, strict=True)
        ]

    def expect(self, episodes: Sequence[int]) -> None:
        """See `Rows.expect`."""
        numbers = np.array(episodes, np.int64)
        datasets = self._source.dataset_of[numbers]
        for dataset in np.unique(datasets).tolist():
            self._readers[dataset].expect((numbers[datasets == dataset] - self._source.first[dataset]).tolist())

    def read(self, episode: int) -> Found:
        """Return the rows of an episode, and of others of its dataset, with the common keys. See `RowReader.read`."""
        union = self._source
        dataset, number = union._place(episode)
        read = self._readers[dataset].read(number)
        # The result refers to the row groups until its own `release`. Its `convert` function keeps `read` alive, so `read` must
        # drop its reference here. Otherwise, the row groups would stay in memory after that `release`.
        group, first = read.release(number), int(union.first[dataset])
        lengths = {first + own: length for own, length in read.lengths.items()}
        row_bytes = int(union.row_bytes_of[dataset])
        return Found(lengths, lambda _, e: self._renamed(dataset, read[e - first]), row_bytes, group)

    def _renamed(self, dataset: int, columns: Columns) -> Columns:
        """Return the columns of an episode under the common keys, padded as described in `CombinedSource`."""
        union, own = self._source, self._source._own[dataset]
        length = len(columns["frame_index"])
        renamed: Columns = {}
        for key, feature in union.features.items():
            if key in union.cameras and key not in union.images:
                continue
            if own.get(key) not in columns:
                renamed[key] = _nothing(feature, length)
            elif f"{key}_dim_is_pad" not in union.constants:
                renamed[key] = columns[own[key]]
            else:
                values = columns[own[key]].reshape(length, -1)
                renamed[key] = np.zeros((length, *feature.row_shape), values.dtype)
                renamed[key][:, : values.shape[1]] = values
        return renamed


class CombinedStore(Store):
    """Store that combines the stores of several datasets. Each path begins with the number of its dataset.

    Args:
        stores: Store of each dataset.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)
        self.address = "a mixture"
        self.remote = any(store.remote for store in stores)

    def _of(self, path: str) -> tuple[Store, str]:
        dataset, _, rest = path.partition("/")
        return self.stores[int(dataset)], rest

    def size(self, path: str) -> int:
        store, path = self._of(path)
        return store.size(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        store, path = self._of(path)
        return store.read(path, start, stop)

    def exists(self, path: str) -> bool:
        store, path = self._of(path)
        return store.exists(path)

    def files(self, folder: str) -> list[str]:
        store, path = self._of(folder)
        number = folder.partition("/")[0]
        return [f"{number}/{name}" for name in store.files(path)]

    def session(self) -> CombinedStore:
        return CombinedStore([store.session() for store in self.stores])

    def where(self, path: str) -> str:
        store, path = self._of(path)
        return store.where(path)

    def close(self) -> None:
        for store in self.stores:
            store.close()


def _nothing(feature: Feature, length: int) -> npt.NDArray[Any]:
    """Return the rows of a feature that a dataset lacks: zeros, empty strings, or empty bytes for images."""
    if feature.is_camera:
        return np.full(length, b"", object)
    if feature.is_text:
        return np.full((length, *feature.row_shape), "", object)
    return np.zeros((length, *feature.row_shape), feature.numpy)


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

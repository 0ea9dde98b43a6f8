"""Reader of the rows of a source, which may have several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.row_memory import Columns, Found, RowMemory
from dali_stream.lerobot.rows import RowReader
from dali_stream.lerobot.source import Part, Source
from dali_stream.storage import Store
from dali_stream.storage.numbered import NumberedStores


class SourceRows:
    """Reader of the rows of a source, with its keys. Safe to use from several threads.

    If a dataset lacks a feature of the source, its rows contain zeros, or empty strings or images. If its vectors are shorter,
    they are padded with zeros.

    Args:
        source: Episodes.
        store: Session of the source's `data_store`.
        memory: Memory for decoded row groups of all datasets together. Default: a new one that is not shared.
    """

    def __init__(self, source: Source, store: Store, memory: RowMemory | None = None) -> None:
        self._source, memory = source, memory or RowMemory()
        stores = store.stores if isinstance(store, NumberedStores) else [store]
        self._readers = [RowReader(part.dataset, own, memory) for part, own in zip(source.parts, stores, strict=True)]

    def expect(self, episodes: Sequence[int]) -> None:
        """Announce the next episodes to read. See `RowReader.expect`."""
        numbers = np.array(episodes, np.int64)
        datasets = self._source.dataset_of[numbers]
        for number in np.unique(datasets).tolist():
            first = self._source.parts[number].first
            self._readers[number].expect((numbers[datasets == number] - first).tolist())

    def read(self, episode: int) -> Found:
        """Return the rows of an episode, and of others of its dataset that had to be read with it. See `RowReader.read`."""
        number = int(self._source.dataset_of[episode])
        part = self._source.parts[number]
        read = self._readers[number].read(episode - part.first)
        if not self._source.dataset_names:  # the keys and the numbers of the episodes are those of the dataset
            return read
        # The result refers to the row groups until its own `release`. Its `convert` function keeps `read` alive, so `read` must
        # drop its reference here. Otherwise, the row groups would stay in memory after that `release`.
        group = read.release(episode - part.first)
        lengths = {part.first + own: length for own, length in read.lengths.items()}
        row_bytes = int(self._source.row_bytes_of[number])
        return Found(lengths, lambda _, e: self._renamed(part, read[e - part.first]), row_bytes, group)

    def _renamed(self, part: Part, columns: Columns) -> Columns:
        """Return the columns of an episode of a dataset under the keys of the source."""
        source, length = self._source, len(columns["frame_index"])
        renamed: Columns = {}
        for key, feature in source.features.items():
            if feature.is_camera and key not in source.images:
                continue
            if part.keys.get(key) not in columns:
                renamed[key] = _nothing(feature, length)
                continue
            renamed[key] = columns[part.keys[key]]
            if part.features[key].row_shape != feature.row_shape and not feature.is_camera:
                values = renamed[key].reshape(length, -1)
                renamed[key] = np.zeros((length, *feature.row_shape), values.dtype)
                renamed[key][:, : values.shape[1]] = values
        return renamed


def _nothing(feature: Feature, length: int) -> npt.NDArray[Any]:
    """Return the rows of a feature that a dataset lacks: zeros, empty strings, no annotations, or empty bytes for images."""
    if feature.is_camera:
        return np.full(length, b"", object)
    if feature.is_language:
        return np.full(length, b"[]", object)
    if feature.is_text:
        return np.full((length, *feature.row_shape), "", object)
    return np.zeros((length, *feature.row_shape), feature.numpy)

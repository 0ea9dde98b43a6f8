"""Rows of the Parquet files as NumPy columns, one episode at a time.

Dtypes are LeRobot's: it goes through Python lists and `torch.tensor`, so every float becomes float32, every integer int64.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dali_stream.errors import DatasetError, StorageError, counted
from dali_stream.lerobot.dataset import DatasetFiles
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.metadata import parquet_errors
from dali_stream.lerobot.row_file import RowFile
from dali_stream.storage import Store
from dali_stream.workers import Once

_log = logging.getLogger("dali_stream")
Columns = dict[str, npt.NDArray[Any]]


class Found(dict[int, Columns]):
    """{episode: {key: (L, ...) array}} of some row groups; strings and encoded images are arrays of objects.

    Attributes:
        rows: per episode index that was there, how many.
        bytes_read: that it took.
        renamed: the one that it was made of, if any; while it is referenced, it is not read again.
    """

    rows: dict[int, int]
    bytes_read: int
    renamed: Found | None = None

    def take_bytes(self) -> int:
        """`bytes_read`, to whoever asks first; 0 to others."""
        taken, self.bytes_read = self.bytes_read, 0
        return taken


class Rows(Protocol):
    """Reads rows. Safe to use from several threads."""

    def read(self, episode: int) -> Found:
        """The rows of an episode, and of others that had to be read with it. Raises DatasetError, StorageError."""
        ...


class ReadLimit:
    """Bytes of row groups that are read at the same time, by one reader or by several together.

    Args:
        at_once: how many, unless a single row group has more.
    """

    def __init__(self, at_once: int = 1 << 62) -> None:
        self.at_once, self._reading = at_once, 0
        self._room = threading.Condition()

    @contextmanager
    def turn(self, size: int) -> Iterator[None]:
        """Waits until row groups of `size` bytes may be read beside those that are."""
        with self._room:
            self._room.wait_for(lambda: not self._reading or self._reading + size <= self.at_once)
            self._reading += size
        try:
            yield
        finally:
            with self._room:
                self._reading -= size
                self._room.notify_all()


class RowReader:
    """Reads the rows of episodes, and only the features that `dataset` selects. Safe to use from several threads.

    Args:
        dataset: the selected part of a dataset.
        store: where its rows are read; None: where the dataset lies.
        limit: of what is read at the same time; None: there is none.
        keys: of these features only; None: of all that `dataset` selects.
    """

    FILES = 256  # whose footers are kept, least recently used first to go

    def __init__(
        self,
        dataset: DatasetFiles,
        store: Store | None = None,
        limit: ReadLimit | None = None,
        keys: Container[str] | None = None,
    ) -> None:
        self._dataset, self._store = dataset, store or dataset.data_store
        self._limit, self._warned = limit or ReadLimit(), False
        self.features = {k: f for k, f in dataset.features.items() if not f.is_video and (keys is None or k in keys)}
        self._files: OrderedDict[str, RowFile] = OrderedDict()
        self._lock = threading.Lock()
        self._once = Once()
        self._alive: weakref.WeakValueDictionary[tuple[object, ...], Found] = weakref.WeakValueDictionary()

    def read(self, episode: int) -> Found:
        """The rows of the `episode`-th selected episode, and of the others that had to be read with it.

        Row groups that are still referenced are returned again without reading, so do not modify the arrays.

        Raises:
            DatasetError: a file is missing or broken, or holds other rows than the metadata promises.
        """
        dataset = self._dataset
        row = int(dataset.rows[episode])
        number = int(dataset.table.data.index[row])
        path = dataset.table.data.paths[number]
        first, index = int(dataset.table.first_row[row]), int(dataset.episodes[episode])
        with parquet_errors(self._store, path):
            file = self._file(path, number)
            found = self._read(file, path, file.groups_at(first, first + int(dataset.lengths[episode])))
            if episode not in found:  # the file does not hold its episodes in their order
                found = self._read(file, path, file.groups_of(index))
        if episode not in found:
            raise DatasetError(
                f"{self._store.where(path)}: episode {dataset.episodes[episode]}: the metadata promises "
                f"{counted(dataset.lengths[episode], 'row')}, and the file holds "
                f"{found.rows.get(index, 0)}; copy the dataset again"
            )
        return found

    def _read(self, file: RowFile, path: str, groups: list[int]) -> Found:
        def read() -> Found:
            table, bytes_read = file.read(groups)
            found = self._cut(path, table)
            episodes, rows = np.unique(_episode_index(table, path), return_counts=True)
            found.rows = dict(zip(episodes.tolist(), rows.tolist(), strict=True))
            found.bytes_read += bytes_read
            return found

        def read_in_turn() -> Found:
            with self._lock:
                found = self._alive.get(key)
            if found is None:
                with self._turn(path, int(file.groups.sizes[groups].sum())):
                    found = read()
                with self._lock:
                    self._alive[key] = found
            return found

        key = (path, *groups)
        return self._once(key, read_in_turn)

    @contextmanager
    def _turn(self, path: str, size: int) -> Iterator[None]:
        """See `ReadLimit`. Warn once if a row group is too large to be kept."""
        if size > self._limit.at_once and not self._warned:
            self._warned = True
            _log.warning(
                "%s: a row group has %d bytes, and memory_budget leaves %d for rows, so it is read again for each of its "
                "episodes. `dali-stream reshard URI OUT` writes smaller ones",
                self._store.where(path), size, self._limit.at_once,
            )  # fmt: skip
        with self._limit.turn(size):
            yield

    def _file(self, path: str, number: int) -> RowFile:
        """The dataset's data file of that number."""
        with self._lock:
            file = self._files.get(path)
        if file is None:
            file = self._once(path, lambda: RowFile(self._dataset, self._store, number, list(self.features)))
        with self._lock:
            self._files[path] = file
            self._files.move_to_end(path)
            while len(self._files) > self.FILES:
                self._files.popitem(last=False)
        return file

    def _cut(self, path: str, table: pa.Table) -> Found:
        """The selected episodes that are whole in `table`."""
        dataset = self._dataset
        index = _episode_index(table, self._store.where(path))
        found = Found()
        found.bytes_read = 0

        def image(name: str) -> bytes:
            data = self._store.read_all(name)
            found.bytes_read += len(data)
            return data

        if not len(index):
            return found
        starts = np.flatnonzero(np.append(True, index[1:] != index[:-1]))
        stops = np.append(starts[1:], len(index))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            episode = int(np.searchsorted(dataset.episodes, index[start]))
            known = episode < len(dataset.episodes) and dataset.episodes[episode] == index[start]
            if known and stop - start == dataset.lengths[episode]:
                rows = table.slice(start, stop - start)
                where = f"{self._store.where(path)}: episode {index[start]}"
                found[episode] = {
                    key: to_numpy(rows[key], self.features[key], f"{where}: {key}", image) for key in self.features
                }
                counted = found[episode].get("frame_index")
                if counted is not None and (np.diff(counted) != 1).any():
                    raise DatasetError(f"{where}: its frame_index does not count its rows; record or convert it again")
                if "timestamp" in found[episode] and dataset.clock == "timestamp":
                    check_rising(where, found[episode]["timestamp"])
        return found


def check_rising(where: str, timestamp: npt.NDArray[Any]) -> None:
    """Raises DatasetError where a row's timestamp is not above that of the row before: it would get another row's frame."""
    row = _not_rising(timestamp)
    if row is not None:
        before = f", and that of row {row - 1} is {timestamp[row - 1]:.4f} s" if row else ""
        raise DatasetError(
            f"{where}: row {row}: its timestamp is {timestamp[row]:.4f} s{before}. Timestamps rise within an episode; the "
            "file is damaged: copy or record it again"
        )


_EPISODE_INDEX = Feature(dtype="int64", shape=[1])


def _episode_index(table: pa.Table, where: str) -> npt.NDArray[np.int64]:
    return to_numpy(table["episode_index"], _EPISODE_INDEX, f"{where}: episode_index")


def to_numpy(
    column: pa.ChunkedArray, feature: Feature, where: str, image: Callable[[str], bytes] | None = None
) -> npt.NDArray[Any]:
    """A column as (L, *shape), or (L,) where the shape is (1,) or (). Images and strings as objects, bytes and str.

    `image` reads an image that is in a file of its own, by its path in the dataset.

    Raises:
        DatasetError: a value is missing, is of another shape or dtype than the feature, or has no room in the dtype of a batch.
    """
    array = _storage(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
    if feature.is_image:
        return _objects(_encoded(array, where, image), bytes, where)
    if array.null_count:
        raise DatasetError(f"{where}: {array.null_count} of {len(array)} values are missing{_LEAVE_OUT}")
    shape, depth = feature.row_shape, 0
    while depth < len(shape) or _is_list(array.type):  # one number of shape (1,) may be in a list of one
        size = shape[depth] if depth < len(shape) else 1
        if not _is_list(array.type):
            raise DatasetError(f"{where}: holds {column.type}, and meta/info.json says shape {feature['shape']}")
        if pc.any(pc.not_equal(pc.list_value_length(array), size)).as_py():
            raise DatasetError(f"{where}: a value has another shape than {feature['shape']}, which meta/info.json says")
        array, depth = array.flatten(), depth + 1
        if array.null_count:
            raise DatasetError(f"{where}: {array.null_count} numbers are missing")
    values = _objects(array.to_pylist(), str, where) if feature.is_text else _numbers(array, feature, where)
    return values.reshape(len(column), *shape)


_LEAVE_OUT = ". Record or convert the dataset again, or leave the feature out with Dataset.without"


def _storage(array: pa.Array) -> pa.Array:
    """An array without its extension type: the library `datasets`, where it is imported, has types for matrices."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))


def _numbers(array: pa.Array, feature: Feature, where: str) -> npt.NDArray[Any]:
    """Numbers in the dtype of a batch. Floats are rounded to float32; all others have to fit exactly."""
    kind = array.type
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DatasetError(
            f"{where}: holds {kind}, and meta/info.json says {feature.dtype} of shape {feature['shape']}{_LEAVE_OUT}"
        )
    values = array.to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore", over="ignore"):
        found: npt.NDArray[Any] = values.astype(feature.numpy, copy=False)
    if not feature.is_float and values.dtype != found.dtype and (wrong := found != values).any():
        raise DatasetError(
            f"{where}: has the value {values[wrong][0]} ({kind}), and meta/info.json says {feature.dtype}, which is "
            f"{found.dtype} in batches{_LEAVE_OUT}"
        )
    return found


def _encoded(array: pa.Array, where: str, read: Callable[[str], bytes] | None) -> list[Any]:
    """The bytes of images: binary, a struct of `bytes` and `path` as the library `datasets` writes them, or paths alone.

    Where a struct has bytes, its path is where they once were.
    """
    named = pa.nulls(len(array), pa.string())
    if pa.types.is_struct(array.type):
        columns = {field.name: pc.struct_field(array, field.name) for field in array.type}
        array, named = columns.get("bytes", pa.nulls(len(array), pa.binary())), columns.get("path", named)
    elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array, named = pa.nulls(len(array), pa.binary()), array
    encoded = array.to_pylist()
    for frame in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
        path = named[frame].as_py()
        if not isinstance(path, str):
            raise DatasetError(f"{where}: {array.null_count} of {len(array)} images are missing, the first of frame {frame}")
        if read is None or path.startswith("/") or "://" in path:
            raise DatasetError(
                f"{where}: frame {frame}: its image is in the file {path[:200]!r}; images are in Parquet rows, where LeRobot "
                "writes them, or in files of the dataset, whose paths begin at its root. Embed it on the machine that has the "
                "file, for example with lerobot.datasets.io_utils.embed_images, or leave the camera out with cameras=..."
            )
        try:
            encoded[frame] = read(path)
        except (DatasetError, StorageError) as error:
            raise type(error)(f"{where}: frame {frame}: {error}") from error
    return encoded


def _objects(values: list[Any], kind: type, where: str) -> npt.NDArray[np.object_]:
    wrong = {type(value).__name__ for value in values if not isinstance(value, kind)}
    if wrong:
        raise DatasetError(f"{where}: holds {', '.join(sorted(wrong))}, and {kind.__name__} is needed{_LEAVE_OUT}")
    objects = np.empty(len(values), object)
    objects[:] = values
    return objects


def _not_rising(timestamp: npt.NDArray[Any]) -> int | None:
    """The first row whose timestamp is not above that of the row before; None where all rise."""
    with np.errstate(invalid="ignore"):  # of infinite ones
        wrong = ~(np.diff(timestamp, prepend=-np.inf) > 0)
    return int(np.argmax(wrong)) if wrong.any() else None

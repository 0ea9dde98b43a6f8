"""The files below `meta/` of the dataset that is written, and its README and LICENSE."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream import metadata
from dali_stream.dataset import Dataset
from dali_stream.metadata import Episodes
from dali_stream.reshard.folder import STAGE, Folder
from dali_stream.reshard.stores import RANGE
from dali_stream.storage import Store

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
AT_THE_ROOT = ("README.md", "README", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
_ALWAYS = ("meta/stats.json", "meta/tasks.parquet", "meta/subtasks.parquet")  # where a source cannot list its files


@dataclass
class Layout:
    """Where everything lies in the new dataset.

    Attributes:
        chunks_size: files per chunk folder.
        columns: columns of the episode table with their new values, (E,) by place of the episode.
        moved: columns of times, with ticks per second and the ticks to add, (E,) each.
        info: entries of info.json that are new.
    """

    chunks_size: int
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    moved: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def path(self, template: str, number: int, key: str = "") -> str:
        """The path of the n-th file."""
        chunk, file = divmod(number, self.chunks_size)
        return template.format(chunk_index=chunk, file_index=file, video_key=key)

    def put(self, prefix: str, number: npt.NDArray[np.int64]) -> None:
        """Notes in which file each episode lies."""
        chunk, file = np.divmod(number, self.chunks_size)  # new arrays: `number` may change
        self.columns |= {f"{prefix}chunk_index": chunk, f"{prefix}file_index": file}


def write_meta(folder: Folder, dataset: Dataset, table: Episodes, layout: Layout, file_size: int) -> None:
    """Writes all of it into the folder's stage."""
    folder.fresh_meta()
    for name in small_files(dataset.store):
        _copy(dataset.store, name, folder, f"{STAGE}/{name}")
    for name in AT_THE_ROOT:
        if dataset.store.exists(name):
            _copy(dataset.store, name, folder, name)
    _write_episodes(folder, dataset.store, table, layout, file_size)
    info = metadata.read_json(dataset.store, metadata.INFO) | layout.info
    with folder.writing(f"{STAGE}/{metadata.INFO}") as file:
        file.write(json.dumps(info, indent=4).encode())


def small_files(store: Store) -> list[str]:
    """Files below `meta/` that are copied as they are."""
    names = {*store.files("meta"), *(name for name in _ALWAYS if store.exists(name))}
    return sorted(names - {metadata.INFO, *episode_files(store)})


def episode_files(store: Store) -> list[str]:
    """Files of the episode table."""
    return [name for name in store.files("meta/episodes") if name.endswith(".parquet")]


def renewed(found: pa.Table, table: Episodes, layout: Layout) -> pa.Table:
    """A part of the episode table with the layout's values in the columns that it has of these."""
    place = np.searchsorted(table.index, found["episode_index"].to_numpy())
    values = {name: column[place] for name, column in layout.columns.items() if name in found.column_names}
    for name, (clock, shift) in layout.moved.items():
        values[name] = _moved(found[name].to_numpy(), clock[place], shift[place])
    for name, column in values.items():
        at = found.column_names.index(name)
        kind = found.schema.field(at)
        found = found.set_column(at, kind, pa.array(column).cast(kind.type))
    return found


def _moved(seconds: npt.NDArray[Any], clock: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Times moved by whole ticks. What was a whole tick but for the rounding of a float is one again."""
    ticks = seconds.astype(np.float64) * clock
    whole = np.round(ticks)
    return (np.where(np.abs(ticks - whole) < 1e-3, whole, ticks) + shift) / clock


def _write_episodes(folder: Folder, store: Store, table: Episodes, layout: Layout, file_size: int) -> None:
    """The files of the source, joined up to a size as long as they are of one schema."""
    names = episode_files(store)
    numbers, number, in_file = np.zeros(len(table.index), np.int64), -1, 0
    before, open_file = None, ExitStack()
    writer: Any = None
    with open_file:
        for name in names:
            found, size = metadata.read_parquet(store, name), store.size(name)
            if before is None or in_file + size > file_size or not found.schema.equals(before, check_metadata=True):
                open_file.close()
                number, in_file, before = number + 1, 0, found.schema
                path = f"{STAGE}/{layout.path(EPISODES_PATH, number)}"
                out = open_file.enter_context(folder.writing(path))
                writer = open_file.enter_context(pq.ParquetWriter(out, before, write_page_index=True))
            in_file += size
            numbers[np.searchsorted(table.index, found["episode_index"].to_numpy())] = number
            layout.put("meta/episodes/", numbers)
            writer.write_table(renewed(found, table, layout), row_group_size=max(len(found), 1))


def _copy(store: Store, name: str, folder: Folder, target: str) -> None:
    size = store.size(name)
    with folder.writing(target) as file:
        for at in range(0, size, RANGE):
            file.write(store.read(name, at, min(at + RANGE, size)))

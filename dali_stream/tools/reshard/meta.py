"""Paths and the episode table of the new dataset."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.dataset import Dataset
from dali_stream.lerobot.metadata import Episodes
from dali_stream.tools.output.folder import Folder
from dali_stream.tools.reshard import source

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


@dataclass
class Layout:
    """Paths and changed metadata of the new dataset.

    Attributes:
        chunks_size: files per chunk folder.
        columns: columns of the episode table with their new values, (E,) in the order of the table.
        moved: columns of times, with ticks per second and the ticks to add, (E,) each.
        info: new entries of info.json.
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
        """Sets the file of each episode."""
        chunk, file = np.divmod(number, self.chunks_size)  # new arrays: `number` may change
        self.columns |= {f"{prefix}chunk_index": chunk, f"{prefix}file_index": file}


def renewed(found: pa.Table, table: Episodes, layout: Layout) -> pa.Table:
    """A part of the episode table with the layout's values in its columns."""
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
    """Times moved by whole ticks. Times within rounding of a whole tick become one."""
    ticks = seconds.astype(np.float64) * clock
    whole = np.round(ticks)
    return (np.where(np.abs(ticks - whole) < 1e-3, whole, ticks) + shift) / clock


def write_episodes(folder: Folder, dataset: Dataset, table: Episodes, layout: Layout, file_size: int) -> None:
    """Writes the episode table: the source's parts, joined up to a size while their schema stays the same."""
    numbers, number, in_file = np.zeros(len(table.index), np.int64), -1, 0
    before, open_file = None, ExitStack()
    writer: Any = None
    with open_file:
        for found, size in source.episode_tables(dataset, table):
            if before is None or in_file + size > file_size or not found.schema.equals(before, check_metadata=True):
                open_file.close()
                number, in_file, before = number + 1, 0, found.schema
                path = f"{folder.stage.name}/{layout.path(EPISODES_PATH, number)}"
                out = open_file.enter_context(folder.writing(path))
                writer = open_file.enter_context(pq.ParquetWriter(out, before, write_page_index=True))
            in_file += size
            numbers[np.searchsorted(table.index, found["episode_index"].to_numpy())] = number
            layout.put("meta/episodes/", numbers)
            writer.write_table(renewed(found, table, layout), row_group_size=max(len(found), 1))

"""Files copied byte for byte, and packets of video files. Both are read in large ranges."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DecodeError, StorageError
from dali_stream.lerobot import metadata
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store
from dali_stream.tools.output.folder import AGAIN, Folder

RANGE = 8 << 20  # bytes of one request: few requests, and little to fetch again after a failure
HOLE = 256 << 10  # bytes between packets up to which they are fetched in one request
AT_THE_ROOT = ("README.md", "README", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")


def copy(
    store: Store,
    name: str,
    folder: Folder,
    target: str,
    note: dict[str, Any] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copies a file into a folder. `note` is as for `Folder.writing`; `advance` is called with the bytes of each part.

    Raises:
        StorageError: the file has become shorter in the meantime.
    """
    size = store.size(name)
    with folder.writing(target, note) as file:
        for at in range(0, size, RANGE):
            data = store.read(name, at, min(at + RANGE, size))
            file.write(data)
            advance(len(data))
        if file.tell() != size:
            raise StorageError(f"{store.where(name)}: got {file.tell()} bytes of {size}; the file has changed, so {AGAIN}")


def write_meta(dataset: Dataset, folder: Folder, copied: list[str], written: Mapping[str, bytes]) -> None:
    """Copies and writes these files below `meta/` into the folder's stage, and copies README and license into its root."""
    shutil.rmtree(folder.stage / "meta", ignore_errors=True)  # unfinished, of an earlier run
    for name in copied:
        copy(dataset.store, name, folder, f"{folder.stage.name}/{name}")
    for name in AT_THE_ROOT:
        if dataset.store.exists(name):
            copy(dataset.store, name, folder, name)
    for name, data in written.items():
        with folder.writing(f"{folder.stage.name}/{name}") as file:
            file.write(data)


def small_files(store: Store) -> list[str]:
    """Files below `meta/` except info.json and the episode table."""
    return sorted({*store.files("meta")} - {metadata.INFO, *episode_files(store)})


def episode_files(store: Store) -> list[str]:
    """Files of the episode table."""
    return [name for name in store.files("meta/episodes") if name.endswith(".parquet")]


def check_same(source: Store, out: Store, names: list[str]) -> None:
    """Raises DaliStreamError if one of these files differs."""
    for name in names:
        if out.read_all(name) != source.read_all(name):
            raise DaliStreamError(f"{out.where(name)}: differs from the source's; {AGAIN}")


def read_samples(store: Store, table: VideoIndex, start: int, stop: int) -> Iterator[list[memoryview]]:
    """The packets [start, stop) in decode order, as many at a time as one range of a few megabytes holds.

    Raises:
        DecodeError: the file has become shorter.
    """
    offset, end = table.offset, table.offset + table.size
    while start < stop:
        last, after = start, int(end[start])
        while last + 1 < stop and 0 <= offset[last + 1] - after <= HOLE and end[last + 1] - offset[start] <= RANGE:
            last += 1
            after = int(end[last])
        begin = int(offset[start])
        data = memoryview(store.read(table.path, begin, after))
        if len(data) != after - begin:
            raise DecodeError(
                f"{store.where(table.path)}: bytes {begin} to {after} are not all there: the file has become shorter since its "
                "index was read; run the same command again"
            )
        yield [data[offset[i] - begin : end[i] - begin] for i in range(start, last + 1)]
        start = last + 1

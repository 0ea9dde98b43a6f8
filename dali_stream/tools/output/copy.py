"""Files copied byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, StorageError
from dali_stream.lerobot import metadata
from dali_stream.storage import Store
from dali_stream.tools.output.folder import AGAIN, Folder

RANGE = 8 << 20  # bytes of one request: few requests, and little to fetch again after a failure
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


def copy_small_files(dataset: Dataset, folder: Folder, names: list[str]) -> None:
    """Copies these files below `meta/` into the folder's stage, and README and license into its root."""
    for name in names:
        copy(dataset.store, name, folder, f"{folder.stage.name}/{name}")
    for name in AT_THE_ROOT:
        if dataset.store.exists(name):
            copy(dataset.store, name, folder, name)


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

"""Runs with a frame cache on disk, and its files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dali_stream import Loader
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage.local import LocalStore
from support.batches import equal

TOP = "observation.images.top"
SIZE = (64, 80)
FRAME = 64 * 80 * 3
ARGUMENTS: dict[str, Any] = {"batch_size": 16, "image_size": SIZE, "image_dtype": "uint8", "device": "cpu", "consumers": 4}


def run(root: object, folder: Path | None, epochs: int = 2, **arguments: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The batches of some epochs of a new Loader, and its counters."""
    with Loader(root, **(ARGUMENTS | {"frame_cache": folder} | arguments)) as loader:  # type: ignore[arg-type]
        batches = list(itertools.chain.from_iterable(itertools.repeat(loader, epochs)))
        return batches, loader.stats()


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(equal(a, b) for a, b in zip(found, expected, strict=True))


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*"))


def indices(root: Path) -> Iterator[tuple[LocalStore, VideoIndex]]:
    """The index of each video of a local dataset, with a store that reads it."""
    store = LocalStore(str(root))
    for path in sorted(root.rglob("*.mp4")):
        yield store, read_index(store, path.relative_to(root).as_posix())

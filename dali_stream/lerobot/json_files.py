"""Readers of JSON and JSON Lines files in `meta/`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dali_stream.errors import DatasetError
from dali_stream.storage import Store, lfs

_LARGEST = 64 << 20  # maximum bytes of a JSON file, and of a line of a JSON Lines file
_PART = 8 << 20  # number of bytes per read


def read_json(store: Store, path: str) -> Any:
    """Read a JSON file of at most 64 MiB. Raises DatasetError if it is larger, empty or not valid JSON."""
    data = store.read(path, 0, _LARGEST + 1)
    if len(data) > _LARGEST:
        raise DatasetError(f"Invalid JSON in {store.where(path)}: must have at most {_LARGEST} bytes, got {store.size(path)}")
    if pointer := lfs.pointer(data):
        raise DatasetError(f"{store.where(path)}: {pointer}")
    if not data.strip():
        raise DatasetError(f"{store.where(path)} is empty. Copy or fetch it again")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"Invalid JSON in {store.where(path)}: {error}. Fetch the file again") from None


def read_lines(store: Store, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (address for messages, object) of each line of a JSON Lines file. Raises DatasetError if a line is broken."""
    for number, line in enumerate(_lines(store, path), start=1):
        where = f"{store.where(path)}, line {number}"
        if number == 1 and (pointer := lfs.pointer(line)):
            raise DatasetError(f"{store.where(path)}: {pointer}")
        if len(line) > _LARGEST:
            raise DatasetError(f"Invalid {where}: must have at most {_LARGEST} bytes. Check that the file is JSON Lines")
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"Invalid JSON in {where}: {error}. Fetch the file again") from error
        if not isinstance(entry, dict):
            raise DatasetError(f"Invalid entry in {where}: must be a JSON object, got {type(entry).__name__}")
        yield where, entry


def _lines(store: Store, path: str) -> Iterator[bytes]:
    """Yield the lines of a file. Stops at a line that is longer than `_LARGEST`, which is then incomplete."""
    rest, at = b"", 0
    while part := store.read(path, at, at + _PART):
        at += len(part)
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
        if len(rest) > _LARGEST:
            break
    yield rest

"""Bytes from where a dataset lies. Nothing here knows what a frame is.

A `Store` reads byte ranges of named files below one root. `open_store` chooses the one that fits an address.
"""

from __future__ import annotations

from typing import Any

from dali_stream.errors import DatasetError
from dali_stream.storage.filesystem import FilesystemStore
from dali_stream.storage.local import LocalStore
from dali_stream.storage.store import Store

__all__ = ["FilesystemStore", "LocalStore", "Store", "open_store"]

REMOTE = ("hf", "s3", "gs", "gcs", "http", "https")


def open_store(address: str, storage_options: dict[str, Any] | None = None) -> Store:
    """The store for a local folder, a `file://` or a `memory://` address.

    Raises:
        DatasetError: nothing is there, or the address is of a kind that cannot be read.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        return LocalStore(address)
    if scheme in ("file", "local"):
        return LocalStore(rest)
    if scheme == "memory":
        return FilesystemStore(address, storage_options)
    known = "is not read by this version yet" if scheme in REMOTE else "is unknown"
    raise DatasetError(
        f"{address}: the scheme {scheme}:// {known}; allowed are a local folder, file:// and memory://. "
        "Copy the dataset to a local folder first"
    )

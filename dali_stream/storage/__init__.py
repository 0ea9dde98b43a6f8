"""Access to the bytes of a dataset's files, on local disks and over networks.

A `Store` reads byte ranges of named files below one root. `open_store` chooses the store for an address. This package does not
interpret the bytes.
"""

from __future__ import annotations

import os
from typing import Any

from dali_stream.storage.cache import DiskCache
from dali_stream.storage.local import LocalStore
from dali_stream.storage.remote import Guess, RemoteStore
from dali_stream.storage.retry import Patience, seconds
from dali_stream.storage.store import Store, Traffic

OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")  # keys of `object_options.CLOUDS`; its module requires obstore

__all__ = ["DiskCache", "LocalStore", "RemoteStore", "Store", "Traffic", "local_folder", "open_store"]


def local_folder(address: str) -> str | None:
    """Return the folder of a local address, with or without `file://`. Return None for any other address."""
    scheme, separator, folder = address.partition("://")
    if not separator:
        return address
    return folder if scheme in ("file", "local") else None


def open_store(
    address: str,
    storage_options: dict[str, Any] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    give_up_after_s: float | None = None,
    guess: Guess | None = None,
) -> Store:
    """Return the store for an address.

    Args:
        address: Local folder, `hf://datasets/<owner>/<name>`, `hf://buckets/<owner>/<name>`, or a URL with the scheme
            `file://`, `memory://`, `http(s)://`, `s3://`, `gs://`, `az://`, or that of any other fsspec filesystem.
        storage_options: Options of the storage backend, such as credentials. Default: none.
        revision: Branch, tag or commit of a Hub repository. Default: the main branch.
        cache_dir: Folder for a cache of fetched bytes, shared with other processes and later runs. Local files are not cached.
            Default: no cache.
        cache_bytes: Maximum size of that cache on disk, in bytes. Default: no limit.
        give_up_after_s: Time limit of a read over the network, including retries, in seconds. Default: see `Patience`.
        guess: Function that returns the files in a folder, for a protocol without listings (HTTP). Its arguments are the folder
            and a function that returns whether a file exists. Default: none.

    Raises:
        DatasetError: If a local folder, a repository or a bucket of the Hub does not exist, or if the scheme is unknown.
        StorageError: If the Hub or an fsspec filesystem cannot be reached. Other storage is not contacted until the first read.
        ValueError: If an argument does not fit the address.
    """
    patience = Patience(None if give_up_after_s is None else seconds(give_up_after_s, "give_up_after_s"))
    scheme = address.partition("://")[0]
    if revision is not None and scheme != "hf":
        raise ValueError(f"revision must be None except for repositories on the Hub, got {revision!r}")
    if (folder := local_folder(address)) is not None:
        return LocalStore(folder)
    cache = None if cache_dir is None else DiskCache(cache_dir, cache_bytes)
    common: dict[str, Any] = {"patience": patience, "cache": cache, "guess": guess}
    # Each store is imported on use, because each requires a library that the others do not.
    if scheme in ("http", "https"):
        from dali_stream.storage.http import HttpStore

        return HttpStore(address, storage_options, **common)
    if scheme == "hf":
        from dali_stream.storage.hub import HubStore

        return HubStore(address, storage_options, revision, **common)
    if scheme in OBJECTS:
        from dali_stream.storage.objects import ObjectStore

        return ObjectStore(address, storage_options, **common)
    from dali_stream.storage.filesystem import FsspecStore

    return FsspecStore(address, storage_options, **common)

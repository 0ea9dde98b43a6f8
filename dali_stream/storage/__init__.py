"""Bytes of a dataset's files, from anywhere. Nothing here knows what a frame is.

A `Store` reads byte ranges of named files below one root. `open_store` chooses the store for an address.
"""

from __future__ import annotations

import os
from typing import Any

from dali_stream.storage.cache import DiskCache
from dali_stream.storage.local import LocalStore
from dali_stream.storage.remote import Guess, RemoteStore
from dali_stream.storage.retry import Patience, seconds
from dali_stream.storage.store import Store, Traffic

OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")  # see `object_options.CLOUDS`, whose import takes obstore

__all__ = ["DiskCache", "LocalStore", "RemoteStore", "Store", "Traffic", "open_store"]


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
    """The store for an address.

    Args:
        address: a local folder, or a URL: `file://`, `memory://`, `http(s)://`, `hf://datasets/<owner>/<name>`,
            `hf://buckets/<owner>/<name>`, `s3://`, `gs://`, `az://`, or of any other fsspec filesystem.
        storage_options: passed to the reader of the address.
        revision: branch, tag or commit of a Hub repository.
        cache_dir: folder for a cache of fetched bytes, shared with other processes and later runs. Local files are not cached.
        cache_bytes: limit of that folder. None: no limit.
        give_up_after_s: total seconds for a read over the network, retries included; None: see `Patience`.
        guess: lists a folder where the protocol cannot (HTTP): (folder, whether there is a file of a name) to names.

    Raises:
        DatasetError: nothing is there, or the scheme is unknown.
        StorageError: it cannot be reached.
        ValueError: an argument does not fit the address.
    """
    patience = Patience(None if give_up_after_s is None else seconds(give_up_after_s, "give_up_after_s is "))
    scheme, separator, rest = address.partition("://")
    if revision is not None and scheme != "hf":
        raise ValueError(f"revision is {revision!r}, but only repositories on the Hub have revisions; omit it")
    if not separator:
        return LocalStore(address)
    if scheme in ("file", "local"):
        return LocalStore(rest)
    cache = None if cache_dir is None else DiskCache(cache_dir, cache_bytes)
    common: dict[str, Any] = {"patience": patience, "cache": cache, "guess": guess}
    # Imported on use: each needs a library that the others do not.
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

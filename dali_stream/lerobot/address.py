"""Resolution of the location of a dataset, which may be a folder, the id of a Hub repository, or an address."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from dali_stream.errors import DatasetError, StorageError
from dali_stream.lerobot.info import INFO
from dali_stream.storage import Store, open_store
from dali_stream.system.log_records import DATASET_LOG

_log = logging.getLogger(DATASET_LOG)
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # the id of a Hub dataset


def local_copy(uri: str, revision: str | None) -> str | None:
    """Return the folder into which LeRobot downloads or records a repository, or None if it has no metadata.

    The folder may lack files, and may be of any revision. With a `revision`, the result is None.

    Args:
        uri: Folder, address, or id of a Hub dataset.
        revision: Revision of the dataset, or None.
    """
    if revision is not None or not _is_repository(uri):
        return None
    hub = os.environ.get("HF_HOME", "~/.cache/huggingface")
    folder = Path(os.environ.get("HF_LEROBOT_HOME", f"{hub}/lerobot")).expanduser() / uri
    return str(folder) if (folder / INFO).is_file() else None


def resolved(uri: str, lacks: str = "") -> tuple[str, str]:
    """Return the address of a dataset, and a note if a repository id is read from the Hub.

    Args:
        uri: Folder, address, or id of a Hub dataset.
        lacks: Reason why a local copy of the repository is not used. Default: no local copy exists.

    Returns:
        Address, and the note, which is empty unless an id was resolved to an address of the Hub.
    """
    if not _is_repository(uri):
        return uri, ""
    address = f"hf://datasets/{uri}"
    if lacks:
        return address, f"{lacks}, so {uri} is read as the id of a Hub dataset, {address}"
    return address, f"{uri} does not exist in {Path.cwd()}, so it is read as the id of a Hub dataset, {address}"


def _is_repository(uri: str) -> bool:
    return not ("://" in uri or Path(uri).expanduser().exists() or not REPOSITORY.fullmatch(uri))


def commit_of(store: Store) -> str | None:
    """Return the commit of the Hub from which the metadata in a local folder were downloaded. None if it is unknown."""
    if store.remote:
        return None
    # huggingface_hub writes this file for each file that it downloads into a folder. Its first line is the commit.
    record = Path(store.address, ".cache/huggingface/download", f"{INFO}.metadata")
    with suppress(OSError, UnicodeDecodeError):
        commit = record.read_text().partition("\n")[0].strip()
        return commit if re.fullmatch(r"[0-9a-f]{40}", commit) else None
    return None


def opened(address: str, note: str, storage_options: dict[str, Any] | None, **options: Any) -> Store:
    """Return the store for an address. If `note` is not empty, it is logged first, and prepended to the message of an error."""
    if not note:
        return open_store(address, storage_options, **options)
    _log.warning("%s. Write %s to say that it is one", note, address)
    try:
        return open_store(address, storage_options, **options)
    except (DatasetError, StorageError) as error:
        kind = DatasetError if isinstance(error, DatasetError) else StorageError
        raise kind(f"{note}. {error}") from error

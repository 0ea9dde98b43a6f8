"""Store for all fsspec filesystems that no other store supports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.logs import private
from dali_stream.storage.remote import Answer, RemoteStore, Version
from dali_stream.storage.retry import Deadline, TransientError, cleaned

# Keys in the result of `info` that identify a version, in order of preference.
_TAGS = ("generation", "etag", "ETag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "modified", "created")
# Exceptions for which a retry is useless.
_FINAL = (AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError)


def check_scheme(address: str) -> None:
    """Raise DatasetError if fsspec has no driver for the scheme of an address."""
    scheme = address.partition("://")[0]
    if scheme not in fsspec.available_protocols():
        raise DatasetError(
            f"{cleaned(address).rstrip('/')}: unknown scheme {scheme}://. Allowed: a local folder, file://, http(s)://, hf://, "
            "s3://, gs://, az:// and the schemes for which fsspec has a driver"
        )


class FsspecStore(RemoteStore):
    """Folder of any fsspec filesystem. The version of a file is checked after each read, and before the first one.

    Args:
        address: URL of the folder.
        storage_options: Options of the fsspec driver, or None.
        common: Arguments of `RemoteStore`.

    Raises:
        DatasetError: If fsspec has no driver for the scheme, or the driver is not installed.
        StorageError: If the driver connects when it is created, and the connection fails.
        ValueError: If the driver does not accept the address or the options.
    """

    def __init__(self, address: str, storage_options: dict[str, Any] | None, **common: Any) -> None:
        scheme, shown = address.partition("://")[0], cleaned(address).rstrip("/")
        super().__init__(shown, urlsplit(shown).netloc or scheme, **common)
        # Listings are not cached, because a cache would hide a changed file.
        self._options = {"use_listings_cache": False, "skip_instance_cache": True, **(storage_options or {})}
        self._given, self._scheme = address, scheme
        self._filesystems: dict[int, tuple[Any, str]] = {}
        check_scheme(address)
        try:
            self.in_memory = isinstance(self._filesystem()[0], MemoryFileSystem)
            return
        except ImportError:
            failure: Exception = DatasetError(
                f"{shown}: the driver for {scheme}:// is not installed: {known_implementations[scheme].get('err', '')}"
            )
        except (TypeError, ValueError) as error:
            failure = ValueError(
                f"{shown}: the driver for {scheme}:// does not accept this address or these storage_options "
                f"({type(error).__name__})"
            )
        except OSError as error:
            failure = StorageError(
                f"{shown}: cannot be reached ({type(error).__name__}). Check the address and storage_options"
            )
        raise failure  # outside of `except`, so that it has no context, since the driver's message may contain credentials

    def __getstate__(self) -> dict[str, Any]:
        # A copy creates its own filesystem. In another process, it may first have to import and register the driver.
        driver = fsspec.get_filesystem_class(self._scheme)
        return {**super().__getstate__(), "_filesystems": {}, "_driver": driver, "_conf": dict(fsspec.config.conf)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fsspec.config.conf.update(state.pop("_conf"))  # what the program has set
        fsspec.register_implementation(state["_scheme"], state.pop("_driver"), clobber=True)
        super().__setstate__(state)

    def release(self) -> None:
        """Release the filesystem, which closes its connections."""
        super().release()
        self._filesystems.clear()

    def _get(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """Read a range, and then check that the version is still `version`. An unknown version is requested first.

        fsspec has no conditional reads, so bytes are used only if the version is the same before and after the read.
        """
        before = version if version is not None and version.tag else self._head(path, deadline)
        stop = min(stop, before.size)
        data = self._call(path, lambda files, full: files.cat_file(full, start=start, end=stop)) if stop > start else b""
        self._traffic.add(requests=1, fetched_bytes=len(data))
        after = self._head(path, deadline)
        if after == before:
            return Answer(after, data[: stop - start])
        if version is None:
            raise TransientError("the file changed while it was read for the first time")
        return Answer(after, b"")

    def _head(self, path: str, deadline: Deadline) -> Version:
        """Return the version from the filesystem's `info`."""
        info = self._call(path, lambda files, full: files.info(full))
        if info.get("type") == "directory" or info.get("size") is None:
            raise DatasetError(f"{self.where(path)} is not a file")
        return Version(int(info["size"]), next((str(info[name]) for name in _TAGS if info.get(name)), ""))

    def _list(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Return the sizes of the files below a folder, by path."""
        prefix = f"{self._filesystem()[1]}/"
        try:
            infos: dict[str, Any] = self._call(folder, lambda files, full: files.find(full, detail=True))
        except DatasetError:
            return {}
        return {name.removeprefix(prefix): int(info["size"]) for name, info in infos.items() if info["type"] == "file"}

    def _filesystem(self) -> tuple[Any, str]:
        """Return (filesystem, root in it).

        A forked process creates its own filesystem, because the event loop of an asynchronous driver does not survive a fork.
        """
        if (opened := self._filesystems.get(os.getpid())) is None:
            with private():
                filesystem, root = fsspec.core.url_to_fs(self._given, **self._options)
            self._filesystems[os.getpid()] = opened = filesystem, str(root).rstrip("/")
        return opened

    def _call(self, path: str, call: Callable[[Any, str], Any]) -> Any:
        """Return `call(filesystem, full path)`.

        Exceptions of the driver are replaced, because their texts and causes may contain credentials.
        """
        try:
            filesystem, root = self._filesystem()
            with private():
                return call(filesystem, f"{root}/{path}")
        except Exception as error:
            failure = self._failure(path, error)
        raise failure

    def _failure(self, path: str, error: Exception) -> Exception:
        """Return the exception that replaces one of the driver."""
        values = (str(getattr(error, name, "")) for name in ("status", "status_code", "code"))
        status = next((int(value) for value in values if value.isdigit()), 0)
        words = (f"HTTP {status}, " if status else "") + type(error).__name__
        if isinstance(error, FileNotFoundError):
            status = 404
        elif isinstance(error, PermissionError):
            status = 403
        elif isinstance(error, _FINAL) and not status:
            status = 400
        elif isinstance(error, ConnectionRefusedError):
            return TransientError(words, unreachable=True)
        if status >= 500:
            return TransientError(words)
        return self._refusal(path, status, words)

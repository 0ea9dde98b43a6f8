"""Files behind an fsspec filesystem on a network: s3://, gs:// and others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import sync
from fsspec.registry import known_implementations

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.http import AGAIN, content_range
from dali_stream.storage.logs import private
from dali_stream.storage.remote import Answer, Transport, Version
from dali_stream.storage.retry import PER_HOST, Deadline, TransientError, cleaned
from dali_stream.storage.store import Traffic

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_HINTS = {
    "s3": "give storage_options={'key': …, 'secret': …} or AWS's environment; for a public bucket {'anon': True}",
    "gcs": "run `gcloud auth application-default login`, or give storage_options={'token': …}; for a public bucket "
    "{'token': 'anon'}",
}
_TIMEOUT_S = 10.0
_CHUNK = 1 << 18
_TAGS = ("generation", "etag", "ETag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "modified", "created")
# Mistakes, which a retry does not fix.
_FINAL = (AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError)


def object_transport(address: str, storage_options: dict[str, Any] | None) -> Transport:
    """The transport for a URL of any scheme that fsspec has a driver for.

    Raises:
        DatasetError: there is no driver, or it is not installed.
    """
    scheme = address.partition("://")[0]
    if scheme not in fsspec.available_protocols():
        raise DatasetError(
            f"{cleaned(address)}: the scheme {scheme}:// is unknown; allowed are a local folder, file://, http(s)://, hf://, "
            "s3://, gs:// and what fsspec has a driver for"
        )
    return (S3Transport if scheme in ("s3", "s3a") else FsspecTransport)(address, storage_options)


class FsspecTransport(Transport):
    """A folder of any fsspec filesystem. The version of a file is checked after each read of it.

    An asynchronous driver gets a timeout. With any other, an attempt takes as long as the driver does.

    Args:
        address: with the scheme.
        storage_options: passed on.

    Raises:
        DatasetError: the driver is not installed.
        ValueError: the driver does not take the options.
    """

    def __init__(self, address: str, storage_options: dict[str, Any] | None) -> None:
        self._given, self._options = address, self._filled(storage_options or {})
        self._filesystems: dict[int, tuple[Any, str]] = {}
        scheme = address.partition("://")[0]
        self.address = _shown(address)
        self._hint = _HINTS.get(_EXTRAS.get(scheme, ""), "give credentials in storage_options")
        endpoint = cleaned(str((storage_options or {}).get("endpoint_url") or ""))
        self.host = endpoint or self.address.split("/")[2]
        self.source, self.traffic = f"{endpoint} {self.address}".strip(), Traffic()
        self._filesystem()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_filesystems": {}}  # a copy makes its own

    def read(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """A read between two checks of the version, of which the first is often known."""
        before = version if version is not None and version.tag else self.stat(path, deadline)
        stop = min(stop, before.size)
        data = self._call("cat_file", path, deadline, start=start, end=stop) if stop > start else b""
        self.traffic.add(requests=1, fetched_bytes=len(data))
        after = self.stat(path, deadline)
        if after != before:
            return Answer(after, b"") if version is not None else self._unsteady()
        return Answer(after, data[: stop - start])

    def stat(self, path: str, deadline: Deadline) -> Version:
        """From the filesystem's `info`."""
        info = self._call("info", path, deadline)
        if info.get("type") == "directory" or info.get("size") is None:
            raise DatasetError(f"{self._where(path)}: is not a file")
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return Version(int(info["size"]), tag)

    def files(self, folder: str, deadline: Deadline) -> dict[str, Version] | None:
        """The files below a folder, with sizes."""
        root = self._filesystem()[1]
        try:
            found: dict[str, Any] = self._call("find", folder, deadline, detail=True)
        except DatasetError:
            return {}
        prefix = root.rstrip("/") + "/"
        return {name.removeprefix(prefix): Version(int(info["size"])) for name, info in found.items() if info["type"] == "file"}

    def close(self) -> None:
        """Drops the filesystem, which closes its connections."""
        self._filesystems.clear()

    def _filled(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of the filesystem. Listings are not cached: a cache would hide a change."""
        return {"use_listings_cache": False, "skip_instance_cache": True, **options}

    def _filesystem(self) -> tuple[Any, str]:
        """The filesystem and the root in it; a new one after a fork, where its loop does not run."""
        if os.getpid() not in self._filesystems:
            self._filesystems[os.getpid()] = self._made()
        return self._filesystems[os.getpid()]

    def _made(self) -> tuple[Any, str]:
        scheme = self._given.partition("://")[0]
        reason = ""
        try:
            with private():
                filesystem, root = fsspec.core.url_to_fs(self._given, **self._options)
                return filesystem, str(root)
        except ImportError:
            pass
        except (TypeError, ValueError) as error:
            reason = type(error).__name__
        if reason:
            raise ValueError(
                f"{self.address}: the driver for {scheme}:// does not accept this address or these storage_options ({reason})"
            )
        extra = _EXTRAS.get(scheme)
        command = f"pip install 'dali-stream[{extra}]'" if extra else known_implementations.get(scheme, {}).get("err", "")
        raise DatasetError(f"{self.address}: the driver for {scheme}:// is not installed: {command}")

    def _call(self, method: str, path: str, deadline: Deadline, **arguments: Any) -> Any:
        """One call of the filesystem. Its exceptions stay in here: their texts and causes may contain credentials."""
        filesystem, root = self._filesystem()
        full = f"{root.rstrip('/')}/{path}"
        if not filesystem.async_impl:
            return self._guarded(path, lambda: getattr(filesystem, method)(full, **arguments))
        call = getattr(filesystem, f"_{method}")
        left = max(deadline.left(), 0.001)
        return self._guarded(path, lambda: sync(filesystem.loop, call, full, timeout=left, **arguments))

    def _guarded(self, path: str, call: Any) -> Any:
        try:
            with private():
                return call()
        except Exception as error:
            failure = self._failure(path, error)
        raise failure

    def _failure(self, path: str, error: BaseException) -> Exception:
        """The exception to raise for one of a driver."""
        status, words, after_s = _described(error)
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            return DatasetError(f"{self._where(path)}: no such file, but the dataset's metadata refers to it ({words})")
        if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in words:
            return StorageError(f"{self._where(path)}: access denied ({words}); {self._hint}")
        if isinstance(error, _FINAL) or (status is not None and status < 500 and status not in AGAIN):
            return StorageError(f"{self._where(path)}: cannot be read ({words}); check the address and storage_options")
        return TransientError(words, after_s, unreachable=_unreachable(error))

    def _unsteady(self) -> Answer:
        raise TransientError("the file changed while it was read for the first time")

    def _where(self, path: str) -> str:
        return f"{self.address.rstrip('/')}/{path}"


def _shown(address: str) -> str:
    """The address for messages and for the cache. Azure's has the container where others have a user and a password."""
    parts = urlsplit(address)
    container, _, host = parts.netloc.rpartition("@")
    if parts.scheme in ("abfs", "abfss") and container and ":" not in container:
        return f"{parts.scheme}://{container}@{host}{parts.path}".rstrip("/")
    return cleaned(address).rstrip("/")


class S3Transport(FsspecTransport):
    """A folder in an S3 bucket. Each GET asks for the version that was seen first (`If-Match`)."""

    def _filled(self, options: dict[str, Any]) -> dict[str, Any]:
        """Our retries, not botocore's nor s3fs's: the stated time would not hold."""
        config = {
            "connect_timeout": _TIMEOUT_S,
            "read_timeout": _TIMEOUT_S,
            "max_pool_connections": PER_HOST,
            **(options.get("config_kwargs") or {}),
            "retries": {"total_max_attempts": 1},
        }
        return super()._filled(options) | {"config_kwargs": config}

    def _made(self) -> tuple[Any, str]:
        filesystem, root = super()._made()
        filesystem.retries = 1
        return filesystem, root

    def read(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """One ranged GET."""
        matching = {"IfMatch": version.tag} if version is not None and version.tag else {}
        try:
            answer = self._guarded(path, lambda: self._ranged(path, start, stop, matching, deadline))
        except _ConditionError:
            answer = None
        if answer is None:  # it changed, or ends before `start`
            return Answer(self.stat(path, deadline), b"")
        self.traffic.add(requests=1, fetched_bytes=len(answer.data))
        return answer  # type: ignore[no-any-return]

    def stat(self, path: str, deadline: Deadline) -> Version:
        """A HEAD."""
        filesystem, _ = self._filesystem()
        left = max(deadline.left(), 0.001)
        arguments = self._object(path)
        head = self._guarded(path, lambda: sync(filesystem.loop, filesystem._call_s3, "head_object", timeout=left, **arguments))
        return Version(int(head["ContentLength"]), str(head.get("ETag", "")))

    def _object(self, path: str) -> dict[str, Any]:
        filesystem, root = self._filesystem()
        bucket, key, _ = filesystem.split_path(f"{root.rstrip('/')}/{path}")
        return {"Bucket": bucket, "Key": key, **filesystem.req_kw}

    def _ranged(self, path: str, start: int, stop: int, matching: dict[str, str], deadline: Deadline) -> Answer:
        filesystem, _ = self._filesystem()

        async def get() -> Answer:
            found = await filesystem._call_s3("get_object", Range=f"bytes={start}-{stop - 1}", **self._object(path), **matching)
            span = content_range(found.get("ContentRange"), start, stop)
            version = Version(span.size, str(found.get("ETag", "")))
            data, cut = await self._drained(found["Body"], span.stop - start, deadline)
            return Answer(version, data, cut)

        return sync(filesystem.loop, get, timeout=max(deadline.left(), 0.001))  # type: ignore[no-any-return]

    async def _drained(self, stream: Any, length: int, deadline: Deadline) -> tuple[bytes, str | None]:
        """The bytes of a body, and what ended it before that."""
        chunks: list[bytes] = []
        got, cut = 0, None
        try:
            async with stream as body:
                while got < length and deadline.left() > 0 and (chunk := await body.read(_CHUNK)):
                    chunks.append(chunk)
                    got += len(chunk)
        except Exception as error:
            cut = _described(error)[1]
        if got < length:
            cut = f"the response ended after {got} of {length} bytes" + (f": {cut}" if cut else "")
        return b"".join(chunks)[:length], cut

    def _failure(self, path: str, error: BaseException) -> Exception:
        if isinstance(error, TransientError):
            return error
        if _described(error)[0] in (412, 416):
            return _ConditionError()
        return super()._failure(path, error)


class _ConditionError(Exception):
    """The object has another version, or no such bytes."""


def _described(error: BaseException) -> tuple[int | None, str, float | None]:
    """HTTP status, words and the requested pause, from a driver's exception. Not its text, which may contain anything."""
    words, status, after_s = type(error).__name__, None, None
    for link in (error, error.__cause__, error.__context__):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):  # botocore's ClientError
            metadata = response.get("ResponseMetadata", {})
            status = metadata.get("HTTPStatusCode")
            words = f"HTTP {status}, {response.get('Error', {}).get('Code')}"
            seconds = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
            after_s = float(seconds) if seconds.isdigit() else None
            break
        if status is None:
            status = _status(link)
            words = words if status is None else f"HTTP {status}, {type(link).__name__}"
    return status, words, after_s


def _unreachable(error: BaseException) -> bool:
    """Whether a driver could not connect, by the exceptions of botocore, aiohttp and the system."""
    names = ("EndpointConnectionError", "ClientConnectorError", "ClientConnectorDNSError")
    links = (error, error.__cause__, error.__context__)
    return any(isinstance(link, (ConnectionRefusedError, socket.gaierror)) or type(link).__name__ in names for link in links)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status in an exception of gcsfs, aiohttp or Azure."""
    if type(error).__name__ == "ClientResponseError" and getattr(error, "status", None) == 400:
        return None  # aiohttp's status for an answer that it cannot parse
    values = (str(getattr(error, name)) for name in ("status", "status_code", "code") if getattr(error, name, None))
    return next((int(value) for value in values if value.isdigit()), None)

"""Store for S3, Google Cloud Storage and Azure, based on obstore (https://developmentseed.org/obstore).

Requests use obstore's blocking functions, in the threads of `retry.bounded`. Its coroutines in an event loop need twice as much
CPU time for ranges of 64 KiB, because each result goes through several threads that wait for the interpreter.
"""

from __future__ import annotations

import os
import re
import threading
from typing import Any

import obstore
from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.object_hosts import NOWHERE
from dali_stream.storage.object_options import parsed
from dali_stream.storage.remote import Answer, RemoteStore, Version
from dali_stream.storage.retry import TIMED_OUT, Deadline, Patience, TransientError

# Descriptions of failures, by the names in obstore's error messages (object_store 0.14: HttpErrorKind, GetResultError).
_FAILURES = {
    "Connect": "cannot connect to the host",
    "Timeout": TIMED_OUT,
    "Interrupted": "the connection broke",
    "UnexpectedRange": "the response has another range than requested",
    "NoContentRange": "Content-Range is missing",
}
_NAMES = re.compile(rf"\b({'|'.join(_FAILURES)})\b")
_INSTANCE = re.compile(r"169\.254\.|metadata\.google\.internal")  # hosts that provide the credentials of a machine in the cloud

_user: int | None = None  # id of the process that used obstore first


_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # codes of S3 and Google Cloud Storage, and of Azure


class ObjectStore(RemoteStore):
    """Folder in a bucket. If the first response for an object has a strong ETag, each later GET sends it as `If-Match`.

    Args:
        address: URL, such as `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` or
            `abfs://container@account…/folder`.
        storage_options: Options of obstore, such as credentials, or None. `object_options` lists eight other names.
        patience: Time limits of each request.
        common: Arguments of `RemoteStore`.

    Raises:
        ValueError: If an option is unknown or invalid, or the address has no bucket.
    """

    def __init__(self, address: str, storage_options: dict[str, Any] | None, patience: Patience, **common: Any) -> None:
        self._bucket = bucket = parsed(address, storage_options or {}, patience)
        source = f"{bucket.endpoint} {bucket.address}".strip()
        super().__init__(bucket.address, bucket.endpoint or bucket.name, patience, source=source, **common)
        self.hint = bucket.hint
        self._clients: list[Any] = []  # at most one, created on first use
        self._opening = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_clients": [], "_opening": None}  # a copy creates its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._opening = threading.Lock()

    def release(self) -> None:
        """Release the client, which closes its connections."""
        super().release()
        self._clients.clear()

    def _get(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """Send one GET with a range. Return the current version without data if it differs from `version`."""
        options: obstore.GetOptions = {"range": (start, stop)}
        if version is not None and version.tag.startswith('"'):  # a strong ETag
            options["if_match"] = version.tag
        try:
            result = obstore.get(self._opened(), path, options=options)
            meta, (first, last) = result.meta, result.range
            data = _body(result, stop - start)
        except Exception as error:
            failure = self._failure(path, error)
        else:
            self._traffic.add(requests=1, fetched_bytes=len(data))
            if (first, len(data)) != (start, last - first):
                raise TransientError(
                    f"the response must have {last - first} bytes, got {len(data)}" + " or more" * (len(data) > stop - start)
                )
            return Answer(_version(meta), data)
        if failure is None:  # the object changed, or ends at or before `start`
            return Answer(self._head(path, deadline), b"")
        raise failure

    def _head(self, path: str, deadline: Deadline) -> Version:
        """Return the version from a HEAD."""
        try:
            return _version(obstore.head(self._opened(), path))
        except Exception as error:
            failure = self._failure(path, error)
        raise failure or TransientError("unexpected HTTP 412 or 416")

    def _list(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Return the sizes of the files below a folder, by path."""
        try:
            pages = list(obstore.list(self._opened(), folder, chunk_size=1000))
            return {meta["path"]: meta["size"] for page in pages for meta in page}
        except Exception as error:
            failure = self._failure(folder, error)
        raise failure or TransientError("unexpected HTTP 412 or 416")

    def _opened(self) -> Any:
        """Return the client. It is created on first use, because finding credentials may require requests.

        Raises:
            StorageError: If another process used obstore before it forked this one, or no credentials are found.
        """
        global _user
        _user = _user or os.getpid()
        if _user != os.getpid():
            raise StorageError(
                f"{self.address} is read in process {os.getpid()}, which was forked from process {_user} after that one had "
                "read from a bucket. obstore's threads do not outlive a fork, so start processes with spawn or forkserver"
            )
        if (client := next(iter(self._clients), None)) is None:
            with self._opening:
                client = next(iter(self._clients), None) or self._bucket.open()
                self._clients[:] = [client]
        return client

    def _failure(self, path: str, error: Exception) -> Exception | None:
        """Return the exception that replaces one of obstore, and contains no URLs. Return None for HTTP 412 and 416."""
        if isinstance(error, (StorageError, TransientError)):
            return error
        text = str(error)
        number, code = re.search(r"status code: (\d{3})", text), re.search(r"<Code>(\w{1,64})</Code>", text)
        status = int(number[1]) if number else 0
        words = ", ".join([f"HTTP {status}"] * bool(status) + [code[1] if code else type(error).__name__])
        if isinstance(error, PreconditionError) or status == 416:
            return None
        if NOWHERE in text:
            return StorageError(
                f"{self.where(path)}: the server redirects to another host. Such a redirect is not followed, since the request "
                "may contain credentials. Give the address of that host as endpoint_url in storage_options or, if it may have "
                "them, its name in {'client_options': {'proxy_excludes': …}}"
            )
        if "redirect without LOCATION" in text:
            return StorageError(f"{self.where(path)}: the bucket is in another region. Give storage_options={{'region': …}}")
        if "NotPartial" in text:
            return StorageError(f"{self.where(path)}: the server does not support byte ranges. Check the address")
        if status == 0 and (name := _NAMES.search(text)) and not _INSTANCE.search(text):
            return TransientError(_FAILURES[name[1]], unreachable=name[1] == "Connect")
        if code and code[1] in _NO_BUCKET:
            return DatasetError(f"{self.address}: no such bucket ({words}). Check the address, the endpoint and the region")
        if isinstance(error, FileNotFoundError):
            status = 404
        elif isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or _INSTANCE.search(text):
            status = 403
        if status >= 500:
            return TransientError(words)
        return self._refusal(path, status, words)


def _body(result: Any, most: int) -> bytes:
    """Return the body of a response. If it has more than `most` bytes, the rest is not read."""
    chunks: list[bytes] = []
    got = 0
    for chunk in result.stream(min_chunk_size=most):  # a chunk has about this number of bytes, or it is the last one
        chunks.append(bytes(chunk))
        got += len(chunk)
        if got > most:
            break
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _version(meta: Any) -> Version:
    return Version(meta["size"], meta["e_tag"] or str(meta["last_modified"]))

"""Files behind http:// and https://, read with Range requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

import urllib3

from dali_stream.errors import StorageError
from dali_stream.storage import connection
from dali_stream.storage.connection import Client, Response, basic_authorization
from dali_stream.storage.remote import Answer, RemoteStore, Version
from dali_stream.storage.retry import Deadline, TransientError, cleaned, silence_s

WHOLE_FILE = 1 << 20  # bytes of a file that may come whole from a server without byte ranges
_MAX_REDIRECTS = 5


class HttpStore(RemoteStore):
    """A folder on an HTTP server.

    Args:
        root: the folder's URL. User and password in it are sent as basic authentication, and its query goes with each
            file's URL (a signature that is valid for the folder).
        storage_options: `headers` (or, as fsspec spells it, `client_kwargs={"headers": …}`) and `timeout`, seconds without
            a byte after which an attempt has failed. Headers go to the root's host only.
        common: arguments of `RemoteStore`.

    Raises:
        ValueError: another storage option, or a URL without a host.
    """

    listings = False
    hint = "give credentials in the URL (https://user:password@host/…) or storage_options={'headers': {'Authorization': …}}"

    def __init__(self, root: str, storage_options: dict[str, Any] | None = None, **common: Any) -> None:
        parts = urlsplit(root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{cleaned(root)!r} is not the URL of a folder; give one like https://host/folder")
        user, _, host = parts.netloc.rpartition("@")
        self._headers, timeout_s = _options(storage_options or {})
        if user:
            self._headers["Authorization"] = basic_authorization(user)
        self._folder, self._query = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), parts.query
        self._client = Client(timeout_s)
        self._targets: dict[str, _Target] = {}  # where files' URLs redirected to
        super().__init__(self._folder, host, **common)

    def close(self) -> None:
        """Closes idle connections and forgets redirects."""
        super().close()
        self._targets.clear()
        self._client.close()

    def _get(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """One GET with a Range, and those that its redirects take."""
        remembered = self._targets.get(path)
        target = remembered or self._original(path)
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                answer = self._request(path, target, start, stop, deadline, target is remembered)
                if isinstance(answer, Answer):
                    if answer.cut:
                        self._targets.pop(path, None)  # the next attempt asks the original URL again
                    elif target.url != self._original(path).url:
                        self._targets[path] = target
                    return answer
                target = answer
        except BaseException:
            self._targets.pop(path, None)
            raise
        raise StorageError(f"{self.where(path)}: more than {_MAX_REDIRECTS} redirects; check the address")

    def _head(self, path: str, deadline: Deadline) -> Version:
        """A GET of one byte: signed URLs are valid for GET only, and not every server reports the size in a HEAD."""
        return self._get(path, 0, 1, None, deadline).version

    def _list(self, folder: str, deadline: Deadline) -> dict[str, int]:
        raise StorageError(f"{self.where(folder)}: HTTP has no listings; give open_store a guess")

    def _original(self, path: str) -> _Target:
        return _Target(f"{self._folder}/{quote(path)}" + (f"?{self._query}" if self._query else ""), "")

    def _request(
        self, path: str, target: _Target, start: int, stop: int, deadline: Deadline, remembered: bool
    ) -> Answer | _Target:
        """One request, and what to ask next if it is redirected."""
        given = self._headers if origin(target.url) == origin(self._folder) else {}
        headers = {**given, "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}

        def use(response: Response) -> Answer | _Target:
            if remembered and response.status in (400, 401, 403, 404, 410):  # a signed URL has expired
                return self._original(path)
            if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                return self._redirected(path, target, response.headers)
            return self._answer(path, response, target.tag, start, stop, deadline)

        return self._client.get(target.url, headers, deadline, use, self.where(path))

    def _redirected(self, path: str, target: _Target, headers: Mapping[str, str]) -> _Target:
        there, scheme, host = "", "", None
        with suppress(ValueError):  # e.g. a port that is not a number
            there = urljoin(target.url, headers["Location"])
            scheme, host, _ = origin(there)
        if scheme not in ("http", "https") or not host:
            raise TransientError("the server redirects to an invalid URL")
        if scheme == "http" and target.url.startswith("https:"):
            raise StorageError(f"{self.where(path)}: redirects from https to http, which is not allowed; use its new address")
        # The Hub gives the version with the redirect; its CDNs have ETags of their own.
        return _Target(there, target.tag or headers.get("X-Linked-ETag") or headers.get("X-Xet-Hash") or "")

    def _answer(self, path: str, response: Response, tag: str, start: int, stop: int, deadline: Deadline) -> Answer:
        headers, length = response.headers, connection.length(response)
        if response.status not in (200, 206, 416):
            raise self._refusal(path, response.status, after_s=retry_after(headers))
        if headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
            raise StorageError(
                f"{self.where(path)}: the server sends Content-Encoding {headers['Content-Encoding']!r}, in which byte "
                "ranges have no meaning; configure it to send the file uncompressed"
            )
        tag = tag or headers.get("ETag") or headers.get("Last-Modified") or ""
        if response.status == 200:  # the whole file: allowed for small ones, and for reads of a whole file
            if length is None or (length > WHOLE_FILE and (start > 0 or stop < length)):
                found = "of unknown size" if length is None else f"of {length} bytes"
                raise StorageError(
                    f"{self.where(path)}: the server does not support byte ranges: it answers a Range request with the whole "
                    f"file, {found} (up to {WHOLE_FILE} are accepted). Use a server that does (nginx, Apache, Caddy, S3), or "
                    "copy the dataset to a local folder"
                )
            size = wanted = length
        else:
            end, size = content_range(headers, start, stop)
            if response.status == 416:
                return Answer(Version(size, tag), b"")
            wanted = end - start
            if length not in (None, wanted):
                raise TransientError(f"Content-Length is {length} for a range of {wanted} bytes")
        data, cut = connection.body(response, wanted, deadline)
        self._traffic.add(requests=1, fetched_bytes=len(data))
        return Answer(Version(size, tag), data[start:stop] if response.status == 200 else data, cut)


class _Target(NamedTuple):
    """A URL of a file, and the version that came with the redirect to it."""

    url: str
    tag: str


def content_range(headers: Mapping[str, str], start: int, stop: int) -> tuple[int, int]:
    """The end of the range in Content-Range and the size of the file, checked against the requested range."""
    found = headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", found)
    first, last, size = map(int, match.groups("-1")) if match else (-1, -1, -1)
    if first < 0 <= size <= start:  # of HTTP 416: the file ends before `start`
        return start, size
    if first != start or not start <= last < min(stop, size):
        raise TransientError(f"Content-Range is {found!r} instead of 'bytes {start}-{stop - 1}/<size>'")
    return last + 1, size


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from Retry-After (a number or a date) or the Hub's `RateLimit: "api";r=0;t=55`."""
    if limit := re.search(r"\br=0;t=(\d{1,9})", headers.get("RateLimit", "")):
        return float(limit[1])
    with suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return urllib3.Retry().parse_retry_after(headers.get("Retry-After", ""))
    return None


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port, to which credentials belong."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _options(options: Mapping[str, Any]) -> tuple[dict[str, str], float]:
    """Headers and timeout."""
    client = options.get("client_kwargs") or {}
    unknown = [*sorted(set(options) - {"headers", "client_kwargs", "timeout"})]
    unknown += [f"client_kwargs[{name!r}]" for name in sorted(set(client) - {"headers"})]
    if unknown:
        raise ValueError(
            f"storage_options has {', '.join(unknown)}; allowed for http(s):// are headers, client_kwargs={{'headers': …}} "
            "and timeout"
        )
    return {**(client.get("headers") or {}), **(options.get("headers") or {})}, silence_s(options)

"""Files behind http:// and https://, read with Range requests."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.message import Message
from http.client import HTTPResponse
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.connection import Pool, basic_authorization, body
from dali_stream.storage.remote import Answer, Transport, Version
from dali_stream.storage.retry import AGAIN, Deadline, TransientError, checked_timeout, cleaned
from dali_stream.storage.store import Traffic

WHOLE_FILE = 1 << 20  # bytes of a file that may come whole from a server without byte ranges
_MAX_REDIRECTS = 5
_REDIRECT_S = 1800.0  # how long a redirect is remembered; signed URLs are valid for an hour or more
_HINT = "give credentials in the URL (https://user:password@host/…) or storage_options={'headers': {'Authorization': …}}"


class HttpTransport(Transport):
    """A folder on an HTTP server.

    Args:
        root: the folder's URL. User and password in it are sent as basic authentication, and its query goes with each
            file's URL (a signature that is valid for the folder).
        storage_options: `headers` (or, as fsspec spells it, `client_kwargs={"headers": …}`) and `timeout`, seconds without
            a byte after which an attempt has failed. Headers go to the root's host only.
        shown: the root for messages, where the URL would say less.
        source: the root for the cache.
        hint: how to give credentials.
        pool: connections to use.

    Raises:
        ValueError: another storage option, or a URL without a host.
    """

    listings = False

    def __init__(
        self,
        root: str,
        storage_options: dict[str, Any] | None = None,
        *,
        shown: str | None = None,
        source: str | None = None,
        hint: str = _HINT,
        pool: Pool | None = None,
    ) -> None:
        parts = urlsplit(root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{cleaned(root)!r} is not the URL of a folder; give one like https://host/folder")
        user, _, host = parts.netloc.rpartition("@")
        self._folder = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._query, self._hint = parts.query, hint
        self._headers, timeout_s = _options(storage_options or {})
        if user:
            self._headers["Authorization"] = basic_authorization(user)
        self._pool = pool or Pool(timeout_s)
        self._targets: dict[str, _Target] = {}
        self.address = shown or self._folder
        self.host, self.source, self.traffic = host, source or self._folder, Traffic()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_targets": {}}  # their `until` is of this process's clock

    def read(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """One GET with a Range."""
        if (target := self._target(path)) is not None:
            try:
                answer = self._follow(path, target.url, target, start, stop, deadline)
            except BaseException:
                self._targets.pop(path, None)  # the next attempt asks the original URL again
                raise
            if answer is None or answer.cut:
                self._targets.pop(path, None)
            if answer is not None:
                return answer
        answer = self._follow(path, self._url(path), None, start, stop, deadline)
        assert answer is not None
        return answer

    def stat(self, path: str, deadline: Deadline) -> Version:
        """A GET of one byte: signed URLs are valid for GET only, and not every server reports the size in a HEAD."""
        return self.read(path, 0, 1, None, deadline).version

    def files(self, folder: str, deadline: Deadline) -> dict[str, int] | None:
        """HTTP has no listings."""
        return None

    def close(self) -> None:
        """Closes idle connections and forgets redirects."""
        self._targets.clear()
        self._pool.close()

    def _url(self, path: str) -> str:
        return f"{self._folder}/{quote(path)}" + (f"?{self._query}" if self._query else "")

    def _target(self, path: str) -> _Target | None:
        target = self._targets.get(path)
        return target if target is not None and time.monotonic() < target.until else None

    def _follow(self, path: str, url: str, target: _Target | None, start: int, stop: int, deadline: Deadline) -> Answer | None:
        """The answer for a URL, or for what it redirects to. None if a remembered target has expired."""
        tag = target.tag if target else ""
        for hop in range(_MAX_REDIRECTS + 1):
            step = self._request(path, url, tag, start, stop, deadline, remembered=target is not None and hop == 0)
            if not isinstance(step, _Redirect):
                if hop and step is not None:
                    self._targets[path] = _Target(url, tag, time.monotonic() + _REDIRECT_S)
                return step
            url, tag = self._next(path, url, step.location), tag or step.tag
        raise StorageError(f"{self.where(path)}: more than {_MAX_REDIRECTS} redirects; check the address")

    def _next(self, path: str, url: str, location: str) -> str:
        there, scheme, host = "", "", None
        with suppress(ValueError):  # e.g. a port that is not a number
            there = urljoin(url, location)
            scheme, host, _ = origin(there)
        if scheme not in ("http", "https") or not host:
            raise TransientError("the server redirects to an invalid URL")
        if scheme == "http" and url.startswith("https:"):
            raise StorageError(f"{self.where(path)}: redirects from https to http, which is not allowed; use its new address")
        return there

    def _request(
        self, path: str, url: str, tag: str, start: int, stop: int, deadline: Deadline, *, remembered: bool
    ) -> Answer | _Redirect | None:
        """One request."""
        given = self._headers if origin(url) == origin(self._folder) else {}
        headers = {**given, "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}

        def use(response: HTTPResponse) -> Answer | _Redirect | None:
            if remembered and response.status in (401, 403, 404, 410):
                return None
            if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                return _Redirect(response.headers["Location"], _linked_tag(response.headers))
            return self._answer(path, response, tag, start, stop)

        return self._pool.get(url, headers, deadline, use, self.where(path))

    def _answer(self, path: str, response: HTTPResponse, tag: str, start: int, stop: int) -> Answer:
        headers = response.headers
        if response.status not in (200, 206, 416):
            self._refused(path, response)
        if headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
            raise StorageError(
                f"{self.where(path)}: the server sends Content-Encoding {headers['Content-Encoding']!r}, in which byte "
                "ranges have no meaning; configure it to send the file uncompressed"
            )
        tag = tag or headers.get("ETag") or headers.get("Last-Modified") or ""
        if response.status == 416:
            return Answer(Version(_size_at_416(headers, start), tag), b"")
        if response.status == 200:
            return self._whole(path, response, tag, start, stop)
        span = content_range(headers.get("Content-Range"), start, stop)
        if headers.get("Content-Length", str(span.stop - start)) != str(span.stop - start):
            raise TransientError(f"Content-Length is {headers['Content-Length']} for a range of {span.stop - start} bytes")
        data, cut = self._body(response, span.stop - start)
        return Answer(Version(span.size, tag), data, cut)

    def _whole(self, path: str, response: HTTPResponse, tag: str, start: int, stop: int) -> Answer:
        """An answer without a range, allowed for small files and for reads of a whole file."""
        length = response.headers.get("Content-Length", "")
        size = int(length) if re.fullmatch(r"\d{1,18}", length) else None
        if size is None or (size > WHOLE_FILE and (start > 0 or stop < size)):
            found = "of unknown size" if size is None else f"of {size} bytes"
            raise StorageError(
                f"{self.where(path)}: the server does not support byte ranges: it answers a Range request with the whole "
                f"file, {found} (up to {WHOLE_FILE} are accepted). Use a server that does (nginx, Apache, Caddy, S3), or copy "
                "the dataset to a local folder"
            )
        data, cut = self._body(response, size)
        return Answer(Version(size, tag), data[start:stop], cut)

    def _body(self, response: HTTPResponse, length: int) -> tuple[bytes, str | None]:
        """Up to `length` bytes of a body, and what ended it before that."""
        data, cut = body(response, length)
        self.traffic.add(requests=1, fetched_bytes=len(data))
        return data, cut

    def _refused(self, path: str, response: HTTPResponse) -> NoReturn:
        where, status = self.where(path), response.status
        if status in (404, 410):
            raise DatasetError(f"{where}: no such file, but the dataset's metadata refers to it (HTTP {status})")
        if status in AGAIN:
            raise TransientError(f"HTTP {status}", retry_after(response.headers))
        if status in (401, 403):
            raise StorageError(f"{where}: access denied (HTTP {status}); {self._hint}")
        if 200 <= status < 300:
            raise TransientError(f"unexpected HTTP {status}")
        raise StorageError(f"{where}: the server answers HTTP {status}; check the address")


class _Target(NamedTuple):
    """Where a file's URL redirected to."""

    url: str
    tag: str
    until: float


class _Redirect(NamedTuple):
    location: str
    tag: str


class Span(NamedTuple):
    """The end of a range, and the size of its file."""

    stop: int
    size: int


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
    return {**(client.get("headers") or {}), **(options.get("headers") or {})}, checked_timeout(options)


def content_range(found: str | None, start: int, stop: int) -> Span:
    """Parses a Content-Range and checks it against the requested range."""
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", found or "")
    if match is None:
        raise TransientError(f"Content-Range is {found!r} instead of 'bytes {start}-{stop - 1}/<size>'")
    first, last, size = map(int, match.groups())
    if first != start or not start <= last < min(stop, size):
        raise TransientError(f"Content-Range is {found!r} for bytes {start}-{stop - 1}")
    return Span(last + 1, size)


def _size_at_416(headers: Message, start: int) -> int:
    """The size of a file that ends before `start`."""
    match = re.fullmatch(r"bytes \*/(\d{1,18})", headers.get("Content-Range", ""))
    if match is None:
        raise TransientError("HTTP 416 without the size of the file")
    if int(match[1]) > start:
        raise TransientError(f"HTTP 416 for byte {start} of {match[1]}")
    return int(match[1])


def _linked_tag(headers: Message) -> str:
    """The version that the Hub gives with a redirect; its CDNs have ETags of their own."""
    return headers.get("X-Linked-ETag") or headers.get("X-Xet-Hash") or ""


def retry_after(headers: Message) -> float | None:
    """Seconds to wait, from Retry-After (a number or a date) or the Hub's `RateLimit: "api";r=0;t=55`."""
    if limit := re.search(r"\br=0;t=(\d{1,9})", headers.get("RateLimit", "")):
        return float(limit[1])
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, OverflowError):
        return None


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port, to which credentials belong."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)

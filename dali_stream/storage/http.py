"""Store for http:// and https://, which reads with Range requests."""

from __future__ import annotations

import ipaddress
import re
import socket
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

WHOLE_FILE = 1 << 20  # if a server ignores a Range, a whole file of up to this size in bytes is accepted
_MAX_REDIRECTS = 5


class HttpStore(RemoteStore):
    """Folder on an HTTP server.

    Args:
        root: URL of the folder. A user and password in it are sent as basic authentication. Its query, for example a signature
            that is valid for the folder, is appended to the URL of each file.
        storage_options: `headers` (or `client_kwargs={"headers": …}`, as in fsspec), which are sent to the host of `root` only,
            and `timeout`, the time limit for each wait for further bytes in seconds. Default of `timeout`: 10.
        common: Arguments of `RemoteStore`.

    Raises:
        ValueError: If a storage option is unknown or invalid, or the URL has no host.
    """

    listings = False
    hint = "Give credentials in the URL (https://user:password@host/…) or storage_options={'headers': {'Authorization': …}}"

    def __init__(self, root: str, storage_options: dict[str, Any] | None = None, **common: Any) -> None:
        parts = urlsplit(root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address must be the URL of a folder, such as https://host/folder, got {cleaned(root)!r}")
        user, _, host = parts.netloc.rpartition("@")
        self._headers, timeout_s = _options(storage_options or {})
        if user:
            self._headers["Authorization"] = basic_authorization(user)
        self._folder, self._query = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), parts.query
        self._client = Client(timeout_s)
        self._targets: dict[str, _Target] = {}  # redirect targets, by path
        super().__init__(self._folder, host, **common)

    def release(self) -> None:
        """Close idle connections and forget redirects."""
        super().release()
        self._targets.clear()
        self._client.close()

    def _get(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """Send a GET with a Range, and follow redirects. Later reads of the file start at the target of the redirects."""
        remembered = self._targets.get(path)
        target = remembered or self._original(path)
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                answer = self._request(path, target, start, stop, deadline, target is remembered)
                if isinstance(answer, Answer):
                    if answer.cut:
                        self._targets.pop(path, None)  # the next attempt starts at the original URL again
                    elif target.url != self._original(path).url:
                        self._targets[path] = target
                    return answer
                target = answer
        except BaseException:
            self._targets.pop(path, None)
            raise
        raise StorageError(f"{self.where(path)}: more than {_MAX_REDIRECTS} redirects. Check the address")

    def _head(self, path: str, deadline: Deadline) -> Version:
        """Return the version from a GET of one byte.

        A HEAD would fail for signed URLs, which are valid for GET only. Some servers do not report the size in a HEAD, either.
        """
        return self._get(path, 0, 1, None, deadline).version

    def _list(self, folder: str, deadline: Deadline) -> dict[str, int]:
        raise StorageError(f"{self.where(folder)}: HTTP has no listings. Pass guess to open_store")

    def _original(self, path: str) -> _Target:
        return _Target(f"{self._folder}/{quote(path)}" + (f"?{self._query}" if self._query else ""), "")

    def _request(
        self, path: str, target: _Target, start: int, stop: int, deadline: Deadline, remembered: bool
    ) -> Answer | _Target:
        """Send one request. Return its answer, or the URL to try next if it is redirected."""
        own_headers = self._headers if origin(target.url) == origin(self._folder) else {}
        headers = {**own_headers, "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}

        def use(response: Response) -> Answer | _Target:
            if remembered and response.status in (400, 401, 403, 404, 410):  # probably, the signed URL has expired
                return self._original(path)
            if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                return self._redirected(path, target, response.headers)
            return self._answer(path, response, target.tag, start, stop, deadline)

        return self._client.get(target.url, headers, deadline, use, self.where(path))

    def _redirected(self, path: str, target: _Target, headers: Mapping[str, str]) -> _Target:
        url, scheme, host = "", "", None
        with suppress(ValueError):  # e.g. a port that is not a number
            url = urljoin(target.url, headers["Location"])
            scheme, host, _ = origin(url)
        if scheme not in ("http", "https") or not host:
            raise TransientError("the server redirects to an invalid URL")
        if scheme == "http" and target.url.startswith("https:"):
            raise StorageError(f"{self.where(path)}: redirects from https to http are not allowed. Use its new address")
        if is_link_local(host) and not is_link_local(urlsplit(self._folder).hostname):
            raise StorageError(
                f"{self.where(path)}: redirects to {host} are not allowed, since a machine in the cloud gets its credentials "
                "from such addresses. Use another server"
            )
        # The Hub sends the version with the redirect. Its CDNs send other ETags for the same file.
        return _Target(url, target.tag or headers.get("X-Linked-ETag") or headers.get("X-Xet-Hash") or "")

    def _answer(self, path: str, response: Response, tag: str, start: int, stop: int, deadline: Deadline) -> Answer:
        headers, length = response.headers, connection.content_length(response)
        if response.status not in (200, 206, 416):
            raise self._refusal(path, response.status, after_s=retry_after(headers))
        if headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
            raise StorageError(
                f"{self.where(path)}: the server must send the file uncompressed, since byte ranges have no meaning "
                f"otherwise, got Content-Encoding {headers['Content-Encoding']!r}. Configure the server"
            )
        tag = tag or headers.get("ETag") or headers.get("Last-Modified") or ""
        if response.status == 200:  # the whole file, which is accepted if it is small or was requested
            if length is None or (length > WHOLE_FILE and (start > 0 or stop < length)):
                size_text = "of unknown size" if length is None else f"of {length} bytes"
                raise StorageError(
                    f"{self.where(path)}: the server does not support byte ranges, and answers a Range request with the whole "
                    f"file, {size_text} (up to {WHOLE_FILE} are accepted). Use a server that does (nginx, Apache, Caddy, S3), "
                    "or copy the dataset to a local folder"
                )
            size = wanted = length
        else:
            end, size = content_range(headers, start, stop)
            if response.status == 416:
                return Answer(Version(size, tag), b"")
            wanted = end - start
            if length not in (None, wanted):
                raise TransientError(f"Content-Length must be {wanted} for the requested range, got {length}")
        data, cut = connection.body(response, wanted, deadline)
        if start == 0 and data[:1] == b"<" and headers.get("Content-Type", "").lower().startswith("text/html"):
            # Applications on one page answer so for each unknown path. No file of a dataset is HTML.
            raise self._refusal(path, 404, "the server answers with a web page")
        self._traffic.add(requests=1, fetched_bytes=len(data))
        return Answer(Version(size, tag), data[start:stop] if response.status == 200 else data, cut)


class _Target(NamedTuple):
    """URL of a file, and the version in the redirect that led to it, or an empty string."""

    url: str
    tag: str


def content_range(headers: Mapping[str, str], start: int, stop: int) -> tuple[int, int]:
    """Parse Content-Range and compare it with the requested range [start, stop).

    Returns:
        End of the range (exclusive) and size of the file, in bytes.

    Raises:
        TransientError: If the header is missing, or names another range.
    """
    content = headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", content)
    first, last, size = map(int, match.groups("-1")) if match else (-1, -1, -1)
    if first < 0 <= size <= start:  # HTTP 416: the file ends at or before `start`
        return start, size
    if first != start or not start <= last < min(stop, size):
        raise TransientError(f"Content-Range must be 'bytes {start}-{stop - 1}/<size>', got {content!r}")
    return last + 1, size


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait according to `Retry-After` (a number or a date), or None.

    The Hub's header `RateLimit: "api";r=0;t=55` takes precedence.
    """
    if limit := re.search(r"\br=0;t=(\d{1,9})", headers.get("RateLimit", "")):
        return float(limit[1])
    with suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return urllib3.Retry().parse_retry_after(headers.get("Retry-After", ""))
    return None


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Return (scheme, host, port) of a URL. Credentials are sent to their own origin only."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def is_link_local(host: str | None) -> bool:
    """Return whether a host is a link-local IP address, such as 169.254.169.254, in any spelling."""
    host = host or ""
    with suppress(ValueError, OSError):
        address = ipaddress.ip_address(host if ":" in host else socket.inet_aton(host))
        return (getattr(address, "ipv4_mapped", None) or address).is_link_local
    return False


def _options(options: Mapping[str, Any]) -> tuple[dict[str, str], float]:
    """Return (headers, timeout in seconds) from storage options.

    Raises:
        ValueError: If an option is unknown.
    """
    client = options.get("client_kwargs") or {}
    unknown = [*sorted(set(options) - {"headers", "client_kwargs", "timeout"})]
    unknown += [f"client_kwargs[{name!r}]" for name in sorted(set(client) - {"headers"})]
    if unknown:
        raise ValueError(
            f"Unknown storage_options for http(s)://: {', '.join(unknown)}. Allowed: headers, "
            "client_kwargs={'headers': …} and timeout"
        )
    return {**(client.get("headers") or {}), **(options.get("headers") or {})}, silence_s(options)

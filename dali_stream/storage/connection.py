"""HTTP client whose connections are kept alive by urllib3."""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, ProxyError

from dali_stream.errors import StorageError
from dali_stream.storage import logs
from dali_stream.storage.retry import PER_HOST, TIMED_OUT, Deadline, TransientError

_CHUNK = 1 << 18  # maximum number of bytes per read of a body
_LARGEST = 1 << 26  # maximum number of bytes of a body of unknown length, such as a page of a listing
_SHORT = 1 << 16  # up to this size in bytes, the body of a redirect or an error is read, so that the connection can be reused
_NO_NAME = "the name of the host could not be resolved (DNS)"
_FAILURES = (HTTPError, http.client.HTTPException, OSError, ValueError)  # invalid host names raise UnicodeError, a ValueError
_UNREACHABLE = (ConnectTimeoutError, ProxyError, socket.gaierror, ValueError)
_T = TypeVar("_T")
Response = urllib3.BaseHTTPResponse


class Client:
    """HTTP client with keep-alive connections. It uses the proxies of the environment, and is safe to use after a fork.

    Args:
        timeout_s: Time limit for connecting, and for each wait for further bytes, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pools: dict[tuple[int, str, str], urllib3.PoolManager] = {}
        logs.filter_drivers()

    def __reduce__(self) -> tuple[type[Client], tuple[float]]:
        return Client, (self.timeout_s,)  # a copy opens its own connections

    def get(self, url: str, headers: dict[str, str], deadline: Deadline, use: Callable[[Response], _T], where: str) -> _T:
        """Send a GET, and return `use(response)`. Redirects are not followed.

        Exceptions of urllib3 are neither raised nor kept as causes, because some contain the URL with its query.

        Args:
            url: URL of the request.
            headers: Headers of the request.
            deadline: Time limit of the request.
            use: Function that reads the response.
            where: Name of the file for error messages.

        Raises:
            TransientError: If the server does not respond, or its response cannot be parsed.
            StorageError: If the server's certificate is not trusted.
        """
        try:
            response = self._response(url, headers, deadline)
            deadline.patience.reached = True
            try:
                return use(response)
            finally:
                size = content_length(response)
                if response.status not in (200, 206) and size is not None and size <= _SHORT:
                    response.drain_conn()
                response.close()  # keeps the connection if the response was read to its end
        except _FAILURES as error:
            causes = list(_causes(error))
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
            raise StorageError(
                f"{where}: the server's certificate is not trusted. Install that of its authority, or name it in SSL_CERT_FILE"
            )
        unreachable = any(isinstance(cause, _UNREACHABLE) for cause in causes)
        deadline.patience.reached |= not unreachable  # in any other failure, the host has responded
        raise TransientError(_words(causes), unreachable=unreachable)

    def close(self) -> None:
        """Close idle connections."""
        for (process, *_), pool in list(self._pools.items()):
            if process == os.getpid():  # the lock of a parent's pool may have been held at the fork
                pool.clear()

    def _response(self, url: str, headers: dict[str, str], deadline: Deadline) -> Response:
        """Send a GET, and return the response after reading its headers only."""
        addresses = 1  # a host that was reached before probably responds at its first address
        if not deadline.patience.reached:
            host = urlsplit(_proxy(url) or url).hostname
            deadline.connecting = _NO_NAME  # the reason to report if the deadline passes, since DNS may take minutes to fail
            try:
                addresses = len(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
            finally:
                deadline.connecting = ""
        silence_s = min(self.timeout_s, deadline.allowed_s() / 3)  # leaves time for further attempts
        connect_s = max(min(silence_s, deadline.left(unreachable=True)) / addresses, 0.001)  # for each address
        return self._pool(url).request(
            "GET",
            url,
            headers={"user-agent": "dali_stream", **{name.lower(): value for name, value in headers.items()}},
            timeout=urllib3.Timeout(connect=connect_s, read=silence_s),
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )

    def _pool(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        key = os.getpid(), parts.scheme, parts.netloc  # a child process must not use its parent's connections
        if key not in self._pools:
            proxy = _proxy(url)
            user, _, host = urlsplit(proxy).netloc.rpartition("@")
            options: dict[str, Any] = {"maxsize": PER_HOST}
            if parts.scheme == "https":  # reading the certificates takes tens of milliseconds
                options["ssl_context"] = ssl.create_default_context()
            if proxy:
                proxy_headers = {"proxy-authorization": basic_authorization(user)} if user else {}
                pool: urllib3.PoolManager = urllib3.ProxyManager(f"http://{host}", proxy_headers=proxy_headers, **options)
            else:
                pool = urllib3.PoolManager(**options)
            self._pools.setdefault(key, pool)
        return self._pools[key]


def basic_authorization(user: str) -> str:
    """Return the Authorization header for `user:password`, which is percent-encoded as in a URL."""
    return f"Basic {base64.b64encode(unquote(user).encode()).decode()}"


def body(response: Response, length: int | None, deadline: Deadline) -> tuple[bytes, str | None]:
    """Read the body of a response.

    Args:
        response: Response whose body is read.
        length: Number of bytes to read, or None for the whole body, which ends early after `_LARGEST` bytes.
        deadline: Time limit.

    Returns:
        The bytes, and the reason why they end early, or None.
    """
    chunks: list[bytes] = []
    got, cut = 0, ""
    try:
        while (wanted := _CHUNK if length is None else min(length - got, _CHUNK)) and (chunk := response.read1(wanted)):
            chunks.append(chunk)
            got += len(chunk)
            if length is None and got > _LARGEST:
                cut = f"the response must have at most {_LARGEST} bytes"
                break
            if deadline.left() <= 0:  # the caller no longer waits
                cut = TIMED_OUT
                break
    except _FAILURES as error:
        cut = _words(list(_causes(error)))
    if length is not None and got < length:
        cut = f"the response ended after {got} of {length} bytes" + (f": {cut}" if cut else "")
    return b"".join(chunks), cut or None


def content_length(response: Response) -> int | None:
    """Return the Content-Length in bytes, or None if it is missing or invalid."""
    text = response.headers.get("Content-Length", "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _proxy(url: str) -> str:
    """Return the proxy of the environment for a URL, or an empty string.

    Raises:
        StorageError: If the scheme of the proxy is not `http`.
    """
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return ""
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if (scheme := urlsplit(proxy).scheme) != "http":
        raise StorageError(
            f"the proxy for {parts.scheme}:// must have the scheme http://, got {scheme}://. Change the "
            f"environment variable {parts.scheme}_proxy or all_proxy"
        )
    return proxy


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and, recursively, its cause and the exceptions among its arguments."""
    yield error
    for inner in (error.__cause__, *error.args):
        if isinstance(inner, BaseException):
            yield from _causes(inner)


def _words(causes: list[BaseException]) -> str:
    """Return a description of a failure without the URL."""
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return _NO_NAME
    if text := next((cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror), None):
        return text
    if any(isinstance(cause, (TimeoutError, urllib3.exceptions.TimeoutError)) for cause in causes):
        return TIMED_OUT
    return f"connection or response broken ({type(causes[0]).__name__})"

"""HTTP connections that are kept alive."""

from __future__ import annotations

import base64
import http.client
import os
import select
import socket
import ssl
import string
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

from dali_stream.errors import StorageError
from dali_stream.storage.retry import Deadline, TransientError

_SMALL = 1 << 16
_CHUNK = 1 << 18
_NO_NAME = "the name of the host could not be resolved (DNS)"
_T = TypeVar("_T")
_FAILURES = (http.client.HTTPException, OSError, ValueError)  # of host names, UnicodeError is a ValueError


class Pool:
    """Connections that are kept alive, through the proxies that the environment names. Safe after a fork.

    Args:
        timeout_s: seconds without a connection, or then without a byte, after which an attempt has failed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._idle: dict[tuple[object, ...], list[http.client.HTTPConnection]] = {}
        self._tls: ssl.SSLContext | None = None

    def __reduce__(self) -> tuple[type[Pool], tuple[float]]:
        return Pool, (self.timeout_s,)  # a copy has connections of its own

    def get(
        self, url: str, headers: dict[str, str], deadline: Deadline, use: Callable[[http.client.HTTPResponse], _T], where: str
    ) -> _T:
        """Returns `use(response)` for the response to a GET. Redirects are responses. `deadline.abort` ends it.

        Exceptions of the standard library stay in here, out of the chain of causes too: some contain the URL with its query.

        Raises:
            TransientError: no response, or none that can be parsed.
            StorageError: the server is not trusted; `where` names what is read.
        """
        try:
            with self._response(urlsplit(url), headers, deadline) as response:
                return use(response)
        except _FAILURES as error:
            problem, final = _words(error)
        if final:
            raise StorageError(f"{where}: {problem}")
        raise TransientError(problem, unreachable=not deadline.patience.reached)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        for idle in list(self._idle.values()):
            while (connection := _pop(idle)) is not None:
                connection.close()

    @contextmanager
    def _response(self, url: SplitResult, headers: dict[str, str], deadline: Deadline) -> Iterator[http.client.HTTPResponse]:
        """The response to a GET. Its connection is kept if the response was read to its end."""
        proxy = _proxy(url)
        # A child process must not use its parent's connections.
        idle = self._idle.setdefault((os.getpid(), url.scheme, url.netloc, proxy), [])
        while (connection := _pop(idle)) is not None and _dropped(connection.sock):
            connection.close()
        silence_s = min(self.timeout_s, deadline.total_s / 3)  # leaves time for other attempts
        if connection is None:
            connection = self._connected(url, proxy, deadline, silence_s)
        deadline.abort = partial(_abort, connection)
        keep = False
        try:
            connection.sock.settimeout(silence_s)
            connection.request("GET", _target(url, proxy), headers=_headers(url, proxy, headers))
            response = connection.getresponse()
            try:
                yield response
            finally:
                _read_to_end(response)
                # A connection that the server closes has lost its socket.
                keep = response.isclosed() and connection.sock is not None
                response.close()
        finally:
            deadline.abort = None
            if keep:
                idle.append(connection)
            else:
                connection.close()

    def _connected(
        self, url: SplitResult, proxy: SplitResult | None, deadline: Deadline, silence_s: float
    ) -> http.client.HTTPConnection:
        """A new connection to a server, or to the proxy in front of it."""
        host, port = _address(proxy or url)
        timeout_s = max(min(silence_s, deadline.connect_left()), 0.001)
        connection = http.client.HTTPConnection(host, port, timeout_s)
        if url.scheme == "https":
            self._tls = self._tls or ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
            if proxy is not None:
                connection.set_tunnel(*_address(url), _proxy_authorization(proxy))
        try:
            deadline.connecting = _NO_NAME  # which may take the system minutes to find out
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            deadline.connecting = "connecting timed out"
            connection.connect()
        except BaseException:
            connection.close()
            raise
        finally:
            deadline.connecting = ""
        deadline.patience.reached = True
        return connection


def basic_authorization(user: str) -> str:
    """The Authorization header for `user:password`, percent-encoded as in a URL."""
    return f"Basic {base64.b64encode(unquote(user).encode()).decode()}"


def body(response: http.client.HTTPResponse, length: int | None) -> tuple[bytes, str | None]:
    """Up to `length` bytes of a response's body, and what ended it before that. None: all of it."""
    chunks: list[bytes] = []
    got, cut = 0, None
    try:
        while (wanted := _CHUNK if length is None else min(length - got, _CHUNK)) and (chunk := response.read1(wanted)):
            chunks.append(chunk)
            got += len(chunk)
    except _FAILURES as error:
        cut, _ = _words(error)
    if length is not None and got < length:
        cut = f"the response ended after {got} of {length} bytes" + (f": {cut}" if cut else "")
    return b"".join(chunks), cut


def _pop(idle: list[http.client.HTTPConnection]) -> http.client.HTTPConnection | None:
    with suppress(IndexError):  # another thread may take the last one
        return idle.pop()
    return None


def _dropped(sock: socket.socket) -> bool:
    """Whether the server has closed an idle connection, or sent what nobody asked for."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _read_to_end(response: http.client.HTTPResponse) -> None:
    """Reads the short body of a redirect or an error, or the end of a body that was read, for the next response."""
    length = response.getheader("Content-Length", "")
    if response.status in (200, 206) or (length.isdigit() and int(length) <= _SMALL):
        with suppress(*_FAILURES):
            response.read(0 if response.status in (200, 206) else None)


def _abort(connection: http.client.HTTPConnection) -> None:
    """Ends what another thread waits for on a connection."""
    with suppress(OSError, AttributeError):  # it is closed
        connection.sock.shutdown(socket.SHUT_RDWR)


def _address(url: SplitResult) -> tuple[str, int]:
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _target(url: SplitResult, proxy: SplitResult | None) -> str:
    """What the request line asks for."""
    root = f"http://{url.netloc}" if proxy is not None and url.scheme == "http" else ""
    return root + quote((url.path or "/") + (f"?{url.query}" if url.query else ""), safe=string.punctuation)


def _headers(url: SplitResult, proxy: SplitResult | None, headers: dict[str, str]) -> dict[str, str]:
    if not any(name.lower() == "user-agent" for name in headers):
        headers = {**headers, "User-Agent": "dali_stream"}
    # Through a tunnel, the request goes to the server and not to the proxy.
    return headers if proxy is None or url.scheme == "https" else {**headers, **_proxy_authorization(proxy)}


def _proxy(url: SplitResult) -> SplitResult | None:
    """The proxy for a URL, from the environment."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or not url.hostname or urllib.request.proxy_bypass(url.hostname):
        return None
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme != "http":
        raise StorageError(
            f"the proxy for {url.scheme}:// is of the scheme {parts.scheme}://; allowed is http://. Change the "
            f"environment variable {url.scheme}_proxy or all_proxy"
        )
    return parts


def _proxy_authorization(proxy: SplitResult) -> dict[str, str]:
    user = proxy.netloc.rpartition("@")[0]
    return {"Proxy-Authorization": basic_authorization(user)} if user else {}


def _words(error: BaseException) -> tuple[str, bool]:
    """What failed, without the URL, and whether it will fail again."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the server's certificate is not trusted; install its authority's, or name it in SSL_CERT_FILE", True
    if isinstance(error, socket.gaierror):
        return _NO_NAME, False
    if isinstance(error, OSError) and error.strerror:
        return error.strerror, False
    if isinstance(error, TimeoutError):
        return "timed out", False
    return f"connection or response broken ({type(error).__name__})", False

"""HTTP connections that are kept alive, and whose reads end in time."""

from __future__ import annotations

import base64
import http.client
import io
import os
import select
import socket
import ssl
import string
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

from dali_stream.errors import StorageError
from dali_stream.storage.retry import Deadline, Patience, TransientError

_SMALL = 1 << 16
_CHUNK = 1 << 18
_WAKE_S = 0.2  # how often a thread that waits for the network checks whether to stop
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
        """Returns `use(response)` for the response to a GET. Redirects are responses.

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
        keep = False
        try:
            connection.response_class = partial(_Response, deadline, silence_s)  # type: ignore[assignment]  # only called
            connection.sock.settimeout(max(min(silence_s, deadline.left()), 0.001))
            connection.request("GET", _target(url, proxy), headers=_headers(url, proxy, headers))
            response = connection.getresponse()
            try:
                yield response
            finally:
                keep = _read_to_end(response)
                response.close()
        finally:
            if keep:
                idle.append(connection)
            else:
                connection.close()

    def _connected(
        self, url: SplitResult, proxy: SplitResult | None, deadline: Deadline, silence_s: float
    ) -> http.client.HTTPConnection:
        """A new connection to a server, or to the proxy in front of it."""
        host, port = _address(proxy or url)
        _look_up(host, port, deadline.connect_left())
        timeout_s = max(min(silence_s, deadline.connect_left()), 0.001)
        connection = http.client.HTTPConnection(host, port, timeout_s)
        if url.scheme == "https":
            self._tls = self._tls or ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
            if proxy is not None:
                connection.set_tunnel(*_address(url), _proxy_authorization(proxy))
        connection.response_class = partial(_Response, deadline, silence_s)  # type: ignore[assignment]  # of the tunnel
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
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


def _read_to_end(response: http.client.HTTPResponse) -> bool:
    """Whether the next response on this connection starts cleanly. Reads the short body of a redirect or an error."""
    if response.status not in (200, 206) and response.length is not None and response.length <= _SMALL:
        with suppress(*_FAILURES):
            response.read()
    return not response.will_close and (response.isclosed() or response.length == 0)


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


def _look_up(host: str, port: int, seconds: float) -> None:
    """Looks up a host's name in a thread, since the system may take minutes for it."""
    found: Future[object] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=look_up, name="dali_stream name", daemon=True).start()
    wait([found], max(seconds, 0.001))
    if not found.done():
        raise socket.gaierror("timed out")
    found.result()


def _words(error: BaseException) -> tuple[str, bool]:
    """What failed, without the URL, and whether it will fail again."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the server's certificate is not trusted; install its authority's, or name it in SSL_CERT_FILE", True
    if isinstance(error, socket.gaierror):
        return "the name of the host could not be resolved (DNS)", False
    if isinstance(error, OSError) and error.strerror:
        return error.strerror, False
    if isinstance(error, TimeoutError):
        return "timed out", False
    return f"connection or response broken ({type(error).__name__})", False


class _Response(http.client.HTTPResponse):
    """A response whose status line, headers and body arrive before a deadline."""

    def __init__(self, deadline: Deadline, silence_s: float, sock: socket.socket, *arguments: Any, **keywords: Any) -> None:
        super().__init__(sock, *arguments, **keywords)
        self.fp = io.BufferedReader(_Timed(sock, self.fp.detach(), deadline, silence_s))


class _Timed(io.RawIOBase):
    """The bytes of a socket. A socket's own timeout ends silence only: a server that sends a byte now and then, in headers
    too, could continue for ever."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, deadline: Deadline, silence_s: float) -> None:
        self._sock, self._raw, self._deadline, self._silence_s = sock, raw, deadline, silence_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        silence = Deadline(Patience(self._silence_s))
        while (left := min(self._deadline.left(), silence.left())) > 0:
            self._sock.settimeout(min(left, _WAKE_S))
            with suppress(TimeoutError):
                return self._sock.recv_into(buffer)
        raise TimeoutError("timed out")

    def close(self) -> None:
        self._raw.close()  # the socket closes after its last reader
        super().close()

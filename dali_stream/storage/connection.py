"""HTTP connections whose reads end in time."""

from __future__ import annotations

import http.client
import io
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3 import exceptions
from urllib3.util import Timeout, make_headers
from urllib3.util.response import is_fp_closed

from dali_stream.errors import StorageError
from dali_stream.storage.logs import private
from dali_stream.storage.retry import PER_HOST, Deadline, Patience, TransientError

_SMALL = 1 << 16
_CHUNK = 1 << 18
_WAKE_S = 0.2  # a thread that waits for the network looks so often whether it should still
_T = TypeVar("_T")
_FAILURES = (exceptions.HTTPError, http.client.HTTPException, OSError, ValueError)  # UnicodeError is one, of host names


class _Limits(NamedTuple):
    """What a request has to keep to."""

    deadline: Deadline
    silence_s: float


_under_way: ContextVar[_Limits | None] = ContextVar("dali_stream_limits", default=None)


class Pool:
    """urllib3's connections, through the proxies that the environment names. Safe after a fork.

    Args:
        timeout_s: seconds without a connection, or then without a byte, after which an attempt has failed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._managers: dict[tuple[int, str | None], urllib3.PoolManager] = {}

    def __reduce__(self) -> tuple[type[Pool], tuple[float]]:
        return Pool, (self.timeout_s,)  # a copy has connections of its own

    def get(
        self, url: str, headers: dict[str, str], deadline: Deadline, use: Callable[[urllib3.BaseHTTPResponse], _T], where: str
    ) -> _T:
        """What `use` makes of the answer to a GET. Redirects are answers.

        What urllib3 raises stays in here, out of the chain of causes too: it knows the URL with its query.

        Raises:
            TransientError: no answer came, or none that can be understood.
            StorageError: the server is not to be trusted; `where` names what is read.
        """
        token, connected = _under_way.set(_Limits(deadline, self._silence_s(deadline))), True
        try:
            with private():
                response = self._sent(url, headers, deadline)
                try:
                    return use(response)
                finally:
                    _finish(response)
        except _FAILURES as error:
            problem, final = _words(error)
            connected = deadline.patience.reached
        finally:
            _under_way.reset(token)
        if final:
            raise StorageError(f"{where}: {problem}")
        raise TransientError(problem, unreachable=not connected)

    def _sent(self, url: str, headers: dict[str, str], deadline: Deadline) -> urllib3.BaseHTTPResponse:
        silence_s = self._silence_s(deadline)
        connect, read = (max(min(silence_s, left), 0.001) for left in (deadline.connect_left(), deadline.left()))
        return self._manager(url).request(
            "GET",
            url,
            headers=headers,
            redirect=False,
            retries=False,
            preload_content=False,
            decode_content=False,
            timeout=Timeout(connect=connect, read=read),
        )

    def _silence_s(self, deadline: Deadline) -> float:
        """So short that there is time for other attempts."""
        return min(self.timeout_s, deadline.total_s / 3)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        for manager in list(self._managers.values()):
            manager.clear()

    def _manager(self, url: str) -> urllib3.PoolManager:
        proxy = _proxy(url)
        key = (os.getpid(), proxy)  # a child must not speak over its parent's connections
        if key not in self._managers:
            self._managers.setdefault(key, _new_manager(proxy))
        return self._managers[key]


def _finish(response: urllib3.BaseHTTPResponse) -> None:
    """Gives the connection back if its answer is behind it, and else closes it: what is left of one answer must not be
    taken for the next."""
    left = response.length_remaining
    if left is not None and left <= _SMALL and not response.tell() and response.status not in (200, 206):
        response.drain_conn()  # the text beside a redirect or an error
    if not is_fp_closed(response):
        response.close()
    response.release_conn()


def _proxy(url: str) -> str | None:
    """The proxy for a URL, out of the environment."""
    parts = urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _new_manager(proxy: str | None) -> urllib3.PoolManager:
    options: dict[str, Any] = {"maxsize": PER_HOST, "num_pools": 32}
    if proxy is None:
        manager = urllib3.PoolManager(**options)
    else:
        user = urlsplit(proxy).netloc.rpartition("@")[0]
        headers = make_headers(proxy_basic_auth=unquote(user)) if user else None
        manager = urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
    manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
    return manager


def body(response: urllib3.BaseHTTPResponse, length: int | None) -> tuple[bytes, str | None]:
    """Up to `length` bytes of an answer's body, and what ended it before that. None: all of it."""
    chunks: list[bytes] = []
    got, cut = 0, None
    try:
        while (wanted := _CHUNK if length is None else min(length - got, _CHUNK)) and (chunk := response.read1(wanted)):
            chunks.append(chunk)
            got += len(chunk)
    except _FAILURES as error:
        cut, _ = _words(error)
    if length is not None and got < length:
        cut = f"the answer ended after {got} of {length} bytes" + (f": {cut}" if cut else "")
    return b"".join(chunks), cut


def _words(error: BaseException) -> tuple[str, bool]:
    """What went wrong, without the URL, and whether it stays wrong."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__ or _argument(chain[-1])) and inner not in chain:
        chain.append(inner)
    if any(isinstance(link, ssl.SSLCertVerificationError) for link in chain):
        return "the server's certificate is not trusted; install its authority's, or name it in SSL_CERT_FILE", True
    if any(isinstance(link, exceptions.NameResolutionError) for link in chain):
        return "the name of the host could not be resolved (DNS)", False
    # A refused connection is a timeout to urllib3, so what the system said comes first.
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:
            return link.strerror, False
    if any(isinstance(link, (exceptions.TimeoutError, TimeoutError)) for link in chain):
        return "timed out", False
    return f"connection or answer broken ({type(chain[-1]).__name__})", False


def _argument(error: BaseException) -> BaseException | None:
    """urllib3 puts what it caught into the arguments."""
    return next((value for value in error.args if isinstance(value, BaseException)), None)


class _Timed(io.RawIOBase):
    """What a socket brings, each read of it within what is left of the time. A socket's own timeout ends at silence only: a
    server that sends a byte now and then, in headers too, would continue for ever."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw = sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        limits = _under_way.get()
        assert limits is not None
        silence = Deadline(Patience(limits.silence_s))
        while (left := min(limits.deadline.left(), silence.left())) > 0:
            self._sock.settimeout(min(left, _WAKE_S))
            with suppress(TimeoutError):
                return self._sock.recv_into(buffer)
        raise TimeoutError("timed out")

    def close(self) -> None:
        self._raw.close()  # the socket counts those who read from it
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **keywords: Any) -> None:
        super().__init__(sock, *arguments, **keywords)
        self.fp = io.BufferedReader(_Timed(sock, self.fp.detach()))


class _Connecting(urllib3.connection.HTTPConnection):
    """A connection that notes when a place has been reached. Until then the look-up of its name ends in time too."""

    response_class = _Response

    def _new_conn(self) -> socket.socket:
        limits = _under_way.get()
        assert limits is not None
        if not limits.deadline.patience.reached:
            self._look_up(limits.deadline.connect_left())
        made = super()._new_conn()
        limits.deadline.patience.reached = True
        return made

    def _look_up(self, seconds: float) -> None:
        """Looks up the host's name in a thread, since the system may take minutes for it."""
        outcome: list[Exception | None] = []

        def look_up() -> None:
            try:
                socket.getaddrinfo(self._dns_host, self.port, type=socket.SOCK_STREAM)
                outcome.append(None)
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=look_up, name="dali_stream name", daemon=True)
        thread.start()
        thread.join(max(seconds, 0.001))
        error = outcome[0] if outcome else socket.gaierror("no answer in time")
        if isinstance(error, socket.gaierror):  # others come again where the connection is made
            raise exceptions.NameResolutionError(self.host, self, error) from error


class _HTTPConnection(_Connecting):
    pass


class _HTTPSConnection(_Connecting, urllib3.connection.HTTPSConnection):
    pass


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection

"""Servers on loopback for tests and benchmarks: files with byte ranges, scripted faults, the Hub's API, S3.

Each is a context manager with a `url`; its threads are joined at the end of the block.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

CHUNK = 1 << 16


@dataclass
class Request:
    """One request as the server saw it."""

    method: str
    path: str  # decoded, without the query
    query: str
    range: str | None
    headers: dict[str, str]  # names in lower case
    sent: int = 0  # bytes of the answer's body


def spans(requests: Iterable[Request], ending: str) -> list[tuple[str, int, int]]:
    """(path, start, stop) of the ranges that were asked for in files of that ending."""
    found = []
    for request in requests:
        if request.path.endswith(ending) and request.range:
            start, stop = request.range.removeprefix("bytes=").split("-")
            found.append((request.path, int(start), int(stop) + 1))
    return found


class Network:
    """Latency per request, and a bandwidth that all connections share.

    Args:
        latency_s: from a request to the first byte of its answer.
        bytes_per_s: of all answers together. None: no limit.
    """

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def delay(self) -> None:
        """The wait before an answer."""
        if self.latency_s:
            time.sleep(self.latency_s)

    def send(self, size: int) -> None:
        """Wait as long as it takes to send `size` bytes at the limited bandwidth."""
        if self.bytes_per_s:
            with self._lock:
                # A sleep that lasts too long costs no bandwidth, up to a twentieth of a second.
                self._free_at = max(self._free_at, time.monotonic() - 0.05) + size / self.bytes_per_s
                wait = self._free_at - time.monotonic()
            time.sleep(max(wait, 0.0))


Fault = Callable[["Handler", bytes, dict[str, str]], None]


class Server:
    """Serves files with single byte ranges, ETags and keep-alive, and records each request.

    Args:
        files: a folder, or {path: bytes}, which may be changed while the server runs.
        latency_s, bytes_per_s: see `Network`.
        faults: what to do instead of answering well; see `set_faults`.
        tls: for https.
        host, port: address that it listens on. Port 0 is any free one.
    """

    def __init__(
        self,
        files: Path | dict[str, bytes],
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        faults: Iterable[Fault | None] | Mapping[str, Iterable[Fault | None]] = (),
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.files, self.tls, self.host, self.port = files, tls, host, port
        self.network = Network(latency_s, bytes_per_s)
        self.requests: list[Request] = []
        self.connections = 0  # that were made
        self.busy, self.peak = 0, 0  # requests that wait out the latency, now and at most
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.set_faults(faults)
        self._sockets: set[socket.socket] = set()

    def set_faults(self, faults: Iterable[Fault | None] | Mapping[str, Iterable[Fault | None]]) -> None:
        """Faults for the requests that come, in their order, None for a good answer; or by path. Good ones follow."""
        by_path = faults if isinstance(faults, Mapping) else {"": faults}
        self._faults = {path: iter(script) for path, script in by_path.items()}

    def fault_for(self, path: str) -> Fault | None:
        """The next of the script that is for this path, or for any."""
        with self.lock:
            script = self._faults.get(path, self._faults.get(""))
            return next(script, None) if script is not None else None

    def __enter__(self) -> Server:
        self._http = _Threading((self.host, self.port), partial(self.handler(), self))
        self._http.owner = self
        if self.tls is not None:
            self._http.socket = self.tls.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'http' if self.tls is None else 'https'}://{self.host}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=partial(self._http.serve_forever, poll_interval=0.02), name="test-server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._http.shutdown()
        with self.lock:
            for connection in self._sockets:
                _quietly(connection.shutdown, socket.SHUT_RDWR)
        self._http.server_close()  # joins the connections' threads
        self._thread.join()

    def handler(self) -> type[Handler]:
        """Class that answers the requests."""
        return Handler

    def content(self, path: str) -> bytes | None:
        """A file's bytes."""
        if isinstance(self.files, dict):
            return self.files.get(path)
        file = self.files / path
        return file.read_bytes() if file.is_file() else None

    def part(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file."""
        if isinstance(self.files, dict):
            return self.files[path][start:stop]
        with open(self.files / path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def version(self, path: str) -> tuple[int, str] | None:
        """Size and ETag of a file."""
        if isinstance(self.files, dict):
            data = self.files.get(path)
            return None if data is None else (len(data), _etag(data))
        file = self.files / path
        if not file.is_file():
            return None
        found = file.stat()
        return found.st_size, f'"{found.st_size:x}-{found.st_mtime_ns:x}"'

    @property
    def sent(self) -> int:
        """Bytes of all answers' bodies."""
        return sum(request.sent for request in self.requests)


class _Threading(ThreadingHTTPServer):
    daemon_threads = False  # joined by server_close
    request_queue_size = 128
    owner: Server

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.owner.lock:
            self.owner._sockets.add(request)
            self.owner.connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.owner.lock:
            self.owner._sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away, or a fault


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, owner: Server, *arguments: Any) -> None:
        self.owner = owner
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        """Records the request, waits the latency, and answers or does what the script says."""
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_seen = Request(self.command, unquote(parts.path), parts.query, headers.get("range"), headers)
        with self.owner.lock:
            self.owner.requests.append(self.request_seen)
            self.owner.busy += 1
            self.owner.peak = max(self.owner.peak, self.owner.busy)
        try:
            self.owner.network.delay()
        finally:
            with self.owner.lock:
                self.owner.busy -= 1
        self.answer(self.request_seen)

    do_HEAD = do_GET

    def answer(self, request: Request) -> None:
        """The file that the path names, in whole or in part."""
        self.send_file(request.path.lstrip("/"))

    def send_file(self, path: str, headers: dict[str, str] | None = None) -> None:
        """A file or the range of it that is asked for, or the script's fault."""
        fault = self.owner.fault_for(path)
        version = self.owner.version(path)
        if version is None:
            return self.reply(404, b"not found")
        size, etag = version
        fields = {"ETag": etag, "Accept-Ranges": "bytes", "Last-Modified": formatdate(0, usegmt=True)} | (headers or {})
        if self.headers.get("If-Match", etag) != etag:
            return self.reply(412, b"changed", fields)
        start, stop, status = self._span(size)
        if status == 416:
            return self.reply(416, b"", fields | {"Content-Range": f"bytes */{size}"})
        if status == 206:
            fields["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if fault is not None:
            return fault(self, self.owner.part(path, start, stop), fields)
        if self.command == "HEAD":
            return self.head(status, stop - start, fields)
        return self._send_part(path, start, stop, status, fields)

    def _span(self, size: int) -> tuple[int, int, int]:
        """Start, stop and status for the Range header."""
        unit, _, span = self.headers.get("Range", "").partition("=")
        first, _, last = span.partition("-")
        if unit != "bytes" or not first:
            return 0, size, 200
        start, stop = int(first), min(int(last) + 1, size) if last else size
        return (start, stop, 206) if start < size else (0, 0, 416)

    def _send_part(self, path: str, start: int, stop: int, status: int, fields: dict[str, str]) -> None:
        self.head(status, stop - start, fields)
        for at in range(start, stop, CHUNK):
            self.body(self.owner.part(path, at, min(at + CHUNK, stop)))

    def head(self, status: int, length: int | None, fields: Mapping[str, str] | None = None) -> None:
        """Status line and headers."""
        self.send_response(status)
        for name, value in (fields or {}).items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def body(self, data: bytes) -> None:
        """Bytes of the body, at the network's pace."""
        if self.command != "HEAD":
            self.owner.network.send(len(data))
            self.request_seen.sent += len(data)
            self.wfile.write(data)

    def reply(self, status: int, data: bytes, fields: Mapping[str, str] | None = None) -> None:
        """A whole answer."""
        self.head(status, len(data), fields)
        self.body(data)

    def cut(self, *, reset: bool) -> None:
        """Ends the connection, with a reset or as if all were said."""
        self.close_connection = True
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            _quietly(self.connection.shutdown, socket.SHUT_RDWR)

    def wait(self) -> None:
        """Says nothing until the server closes, or the client goes."""
        self.close_connection = True
        self.connection.settimeout(0.05)
        while not self.owner.closing.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return


@lru_cache(maxsize=256)
def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _quietly(call: Callable[..., object], *arguments: object) -> None:
    with suppress(OSError):
        call(*arguments)

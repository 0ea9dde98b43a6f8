"""Ways in which a server fails, for the scripts of `servers.Server`.

Each receives the connection, the bytes of a good answer, and that answer's headers.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from email.utils import formatdate

from support.servers import Handler

Fault = Callable[[Handler, bytes, dict[str, str]], None]


def reset(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """The connection is reset before an answer."""
    handler.cut(reset=True)


def reset_inside(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """The connection is reset in the middle of the body."""
    handler.head(206, len(data), fields)
    handler.body(data[: len(data) // 2])
    handler.cut(reset=True)


def short(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """The connection ends in the middle of the body, as if all were said."""
    handler.head(206, len(data), fields)
    handler.body(data[: len(data) // 2])
    handler.cut(reset=False)


def short_length(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """The body is short, and its Content-Length is as short."""
    handler.reply(206, data[: len(data) // 2], fields)


def hanging() -> tuple[Fault, threading.Event]:
    """A fault that never answers, and an event that a request with this fault sets."""
    is_hanging = threading.Event()

    def fault(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        is_hanging.set()
        handler.wait()

    return fault, is_hanging


def hang(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """No answer, for as long as the client waits."""
    handler.wait()


def hang_inside(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """Half of the body, and no more."""
    handler.head(206, len(data), fields)
    handler.body(data[: len(data) // 2])
    handler.wait()


def drip(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """A byte of the body now and then: never silent, never done."""
    handler.head(206, len(data), fields)
    _drip(handler, data)


def drip_headers(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """A byte of the headers now and then."""
    _drip(handler, b"HTTP/1.1 206 Partial Content\r\nX-Long: " + b"x" * 10_000)


def _drip(handler: Handler, data: bytes) -> None:
    handler.close_connection = True
    for at in range(len(data)):
        handler.wfile.write(data[at : at + 1])
        if handler.owner.closing.wait(0.02):
            return


def status(code: int, retry_after: str | None = None) -> Fault:
    """An error, perhaps with a pause to keep."""

    def answer(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        handler.reply(code, b"no", {} if retry_after is None else {"Retry-After": retry_after})

    return answer


def retry_at(seconds: float) -> Fault:
    """429 with the date from which on requests are welcome."""

    def answer(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        handler.reply(429, b"no", {"Retry-After": formatdate(time.time() + seconds, usegmt=True)})

    return answer


def long_length(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """More bytes than the range that it says it has."""
    handler.reply(206, data[:7] + data, fields)


def late(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """A range that starts later than was asked for, and says so."""
    span, _, size = fields.pop("Content-Range").removeprefix("bytes ").partition("/")
    first, _, last = span.partition("-")
    handler.reply(206, data[3:], fields | {"Content-Range": f"bytes {int(first) + 3}-{last}/{size}"})


def content_range(shift: int = 0, total: int = 0, *, missing: bool = False) -> Fault:
    """A Content-Range whose start or total is off, or none."""

    def answer(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        span, _, size = fields.pop("Content-Range").removeprefix("bytes ").partition("/")
        first, _, last = span.partition("-")
        if not missing:
            fields["Content-Range"] = f"bytes {int(first) + shift}-{int(last) + shift}/{int(size) + total}"
        handler.reply(206, data, fields)

    return answer


def ignored_range(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """The whole file, where a range was asked for."""
    fields.pop("Content-Range")
    path = handler.request_seen.path.lstrip("/")
    size, _ = handler.owner.version(path) or (0, "")
    handler.reply(200, handler.owner.part(path, 0, size), fields)


def garbage(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """Something that is not HTTP."""
    handler.wfile.write(b"\x00\x17garbage\r\n\r\n" * 20)
    handler.cut(reset=False)


def odd_header(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """An error with a header that cannot be parsed, of which an HTTP library may log something."""
    handler.wfile.write(b"HTTP/1.1 503 no\r\nnot a header\r\n\r\n")
    handler.cut(reset=False)


def changed_tag(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """The file has been replaced by another of the same size: other bytes, another ETag."""
    handler.reply(206, bytes(255 - byte for byte in data), fields | {"ETag": '"another"'})


def changed_size(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """The file has grown."""
    span, _, size = fields["Content-Range"].partition("/")
    other = {"Content-Range": f"{span}/{int(size) + 7}", "ETag": '"grown"'}
    handler.reply(206, bytes(255 - byte for byte in data), fields | other)


def gzipped(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
    """A body that was compressed on the way, though nobody asked for it."""
    handler.reply(206, gzip.compress(data), fields | {"Content-Encoding": "gzip"})


def redirect(to: str, code: int = 302) -> Fault:
    """A redirect to another URL, in which `{path}` is replaced by the requested path."""

    def answer(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        handler.reply(code, b"", {"Location": to.format(path=handler.request_seen.path.lstrip("/"))})

    return answer

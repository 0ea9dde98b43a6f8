"""Helpers that the tests of remote storage share."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dali_stream.errors import DaliStreamError
from dali_stream.storage import Store, open_store, retry

CONTENT = random.Random(0).randbytes(3 << 20)  # more than a server without ranges may send whole
SMALL = CONTENT[:1000]


def quick(address: str, options: dict[str, object] | None = None, **arguments: object) -> Store:
    """A store that soon stops waiting for one answer, and then tries again for as long as the tests may take."""
    return open_store(address, {"timeout": 0.3, **(options or {})}, **{"give_up_after_s": 60.0, **arguments})  # type: ignore[arg-type]


def failure(store: Store, path: str, start: int = 0, stop: int = 10) -> DaliStreamError:
    """Error that reading this range raises."""
    with pytest.raises(DaliStreamError) as caught:
        store.read(path, start, stop)
    return caught.value


def chain(error: BaseException | None) -> Iterator[str]:
    """All that an error and what it is chained to say, whether it would be printed or not."""
    while error is not None:
        yield f"{error!s} {error!r} {error.args!r} {vars(error)!r}"
        yield from chain(error.__context__)
        error = error.__cause__


def said(caplog: pytest.LogCaptureFixture, *errors: BaseException) -> str:
    """All that was logged and raised."""
    records = [f"{record.getMessage()} {record.args!r} {record.exc_text}" for record in caplog.records]
    return "\n".join([*records, caplog.text, *(text for error in errors for text in chain(error))])


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of all libraries, at DEBUG."""
    caplog.set_level(logging.DEBUG)
    return caplog


class Clock:
    """Time that passes while a pause between two attempts lasts, and only then."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_by(self, seconds: float) -> None:
        """A pause."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of retries."""
    made = Clock()
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(retry.Deadline, "sleep", lambda _, seconds: made.pass_by(seconds))
    return made


@pytest.fixture
def refusing() -> Iterator[str]:
    """The URL of a port that refuses connections: bound, and nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"

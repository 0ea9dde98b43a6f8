"""Retries within a time limit, and a bound on concurrent requests to a host."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from dali_stream.errors import StorageError
from dali_stream.storage import logs

AGAIN = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that may not last
PER_HOST = 32  # requests at a time, of all stores of this process

_TIMEOUT_S = 10.0
_CLOSE_S = 2.0  # how long a request may take to end after its store was closed
_IDLE_S = 0.5  # how long a thread waits for the next request before it ends
_WAKE_S = 0.2  # how often a thread that waits for an answer checks whether to stop
_T = TypeVar("_T")

_slots: dict[str, threading.BoundedSemaphore] = {}
os.register_at_fork(after_in_child=_slots.clear)  # a child would wait for slots that threads of its parent hold


class TransientError(Exception):
    """Retryable failure.

    Args:
        reason: what happened, without credentials.
        after_s: the server asks for a pause of so many seconds.
        unreachable: there was no connection to the host.
    """

    def __init__(self, reason: str, after_s: float | None = None, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.unreachable = after_s, unreachable


class Patience:
    """How long requests to one host are retried.

    Args:
        total_s: seconds for a request, all attempts and pauses together. None: 60, or 5 until the first connection was
            made: without one, the address is wrong or this machine has no network.

    Attributes:
        total_s: as given, or 60.
        first_s: seconds for the first connection.
        reached: whether a connection has been made.
    """

    def __init__(self, total_s: float | None = None) -> None:
        self.total_s, self.first_s = (60.0, 5.0) if total_s is None else (total_s, total_s)
        self.reached = False


class Deadline:
    """The time for a request, all its attempts and pauses together. An event ends it earlier.

    Attributes:
        connecting: what failed if the time is over now, while the request looks for a host; else empty.
        abandoned: nobody waits for the request any more.
    """

    def __init__(self, patience: Patience, stop: threading.Event) -> None:
        self.patience, self.stop = patience, stop
        self.connecting, self.abandoned = "", False
        self._start = time.monotonic()

    def allowed_s(self, unreachable: bool = False) -> float:
        """Seconds in all, for a host that answers or for one that could not be reached."""
        return self.patience.first_s if unreachable and not self.patience.reached else self.patience.total_s

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self, unreachable: bool = False) -> float:
        """Seconds that are left; 0 or less when the time is over."""
        return 0.0 if self.abandoned or self.stop.is_set() else self.allowed_s(unreachable) - self.elapsed()

    def sleep(self, seconds: float) -> None:
        """Waits, until the event at the latest."""
        self.stop.wait(seconds)


@contextmanager
def slot(host: str, stop: threading.Event) -> Iterator[None]:
    """Holds one of the `PER_HOST` connection slots of a host. Waits until there is one, or until the event."""
    slots = _slots.setdefault(host, threading.BoundedSemaphore(PER_HOST))
    while not (held := slots.acquire(timeout=_WAKE_S)) and not stop.is_set():
        pass
    try:
        yield
    finally:
        if held:
            slots.release()


def seconds(given: Any, found: str) -> float:
    """The value itself, a time. `found` is what the error says that it is."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise ValueError(f"{found}{given!r}; give a positive number of seconds")
    return float(given)


def silence_s(options: Mapping[str, Any]) -> float:
    """`timeout` of storage options: seconds without a byte, after which an attempt has failed."""
    return seconds(options.get("timeout", _TIMEOUT_S), "storage_options has timeout=")


def cleaned(url: str) -> str:
    """A URL for messages, without what may hold credentials: user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def pause_s(attempts: int, after_s: float | None, deadline: Deadline) -> float:
    """Seconds until the next attempt: what the server asks for, if there is time for a last attempt after it."""
    # Random up to 0.1 s, 0.2 s, … 4 s, so that many readers do not come back at once.
    backoff = 0.05 + random.uniform(0, min(0.1 * 2 ** min(attempts - 1, 10), 4))
    if after_s is None:
        return backoff
    return max(backoff, min(after_s, deadline.left() - min(5.0, deadline.allowed_s() / 4)))


def given_up(what: str, failures: list[str], deadline: Deadline, allowed_s: float) -> StorageError:
    """The error after failures for which no time is left."""
    if deadline.stop.is_set():
        return StorageError(f"{what}: not read, because the store was closed meanwhile")
    tries = f"{len(failures)} {'try' if len(failures) == 1 else 'tries'} in {deadline.elapsed():.1f} s"
    reasons = ", ".join(reason + (f" ({times} times)" if times > 1 else "") for reason, times in Counter(failures).items())
    return StorageError(
        f"{what}: not read after {tries}, where {allowed_s:g} s are allowed (give_up_after_s). What failed: {reasons}. Check "
        "the address, the network and the server, then resume from the last saved state if there is one"
    )


class _Helper:
    """A thread that makes requests for others, one after the other, until it is given None or nothing for a while."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        # A daemon: an interpreter that ends does not wait for a server that hangs.
        self.thread = threading.Thread(target=self._work, name="dali_stream request", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        logs.ours.set(True)
        while (request := self._next()) is not None:
            answer: tuple[Any, BaseException | None]
            try:
                answer = request(), None
            except BaseException as error:
                answer = None, error.with_traceback(None)
            self.answers.put(answer)
            del request, answer  # an idle thread must not keep an answer alive

    def _next(self) -> Callable[[], Any] | None:
        while True:
            try:
                return self.requests.get(timeout=_IDLE_S)
            except Empty:
                with suppress(ValueError):  # it was taken just now, and a request is on its way
                    _idle.remove(self)
                    return None


_idle: list[_Helper] = []  # the last one used is the next one to be used
os.register_at_fork(after_in_child=_idle.clear)  # a child has no threads but its own


def bounded(request: Callable[[Deadline], _T], deadline: Deadline) -> _T:
    """`request(deadline)` in another thread, which is left behind when the time is over."""
    try:
        helper = _idle.pop()
    except IndexError:
        helper = _Helper()
    busy = True
    try:
        helper.requests.put(partial(request, deadline))
        while (left := deadline.left(bool(deadline.connecting))) > 0:
            with suppress(Empty):
                found, error = helper.answers.get(timeout=min(left, _WAKE_S))
                busy = False
                if error is not None:
                    raise error
                return found  # type: ignore[no-any-return]
    finally:
        if busy:
            deadline.abandoned = True
            helper.requests.put(None)
        else:
            _idle.append(helper)
        if deadline.stop.is_set():
            end_idle()
    if deadline.stop.is_set():
        helper.thread.join(_CLOSE_S)
    raise TransientError(deadline.connecting or "timed out", unreachable=bool(deadline.connecting))


def end_idle() -> None:
    """Ends the threads that wait for requests, and waits for them."""
    while _idle:
        with suppress(IndexError):  # another thread takes the last one
            helper = _idle.pop()
            helper.requests.put(None)
            helper.thread.join()

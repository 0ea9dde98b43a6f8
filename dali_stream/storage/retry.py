"""Retries within a time limit, and a bound on concurrent requests to a host."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from dali_stream.errors import StorageError
from dali_stream.storage.store import Traffic

AGAIN = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that may not last
PER_HOST = 32  # requests at a time, of all stores of this process

_TIMEOUT_S = 10.0
_IDLE_S = 0.5  # how long a thread waits for the next request before it ends
_ABORT_S = 1.0  # how long a request that was ended may take to end
_WAKE_S = 0.2  # how often a thread that waits for an answer checks whether to stop
_R = TypeVar("_R")
_T = TypeVar("_T")


class TransientError(Exception):
    """Retryable failure.

    Args:
        reason: what happened, without credentials.
        after_s: the server asks for a pause of so many seconds.
        unreachable: no connection to the host has been made.
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
    """A point in time after which a request ends; an event ends it earlier.

    Attributes:
        connecting: what failed if the time is over now, while the request connects to a host; else empty.
        abort: ends the request at once, if its client can do that.
    """

    def __init__(self, patience: Patience, stop: threading.Event | None = None) -> None:
        self.patience, self.total_s = patience, patience.total_s
        self._start, self._stop = time.monotonic(), stop or threading.Event()
        self.connecting = ""
        self.abort: Callable[[], None] | None = None

    @property
    def stopped(self) -> bool:
        """Whether the event was set."""
        return self._stop.is_set()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds until the deadline; 0 or less after it."""
        return 0.0 if self.stopped else self.total_s - self.elapsed()

    def connect_left(self) -> float:
        """Seconds until the deadline, for a request that still has to connect."""
        patience = self.patience
        return self.left() if patience.reached else min(self.left(), patience.first_s - self.elapsed())

    def sleep(self, seconds: float) -> None:
        """Waits, until the event at the latest."""
        self._stop.wait(seconds)


def retried(
    request: Callable[[Deadline], _R],
    accept: Callable[[_R], _T],
    what: str,
    *,
    host: str,
    patience: Patience,
    traffic: Traffic,
    stop: threading.Event | None = None,
) -> _T:
    """Repeats `accept(request(deadline))`, with pauses, until it returns or raises anything but a `TransientError`.

    Args:
        request: may block; runs in another thread, which is left behind when the time is over.
        accept: runs in this thread.
        what: names what is read, for the message.
        host: whose connection slots it takes. Requests wait for each other beyond `PER_HOST`.
        patience: for how long, counted from the first attempt without its wait for a connection slot.
        traffic: counts the retries.
        stop: ends it early.

    Raises:
        StorageError: the time is over.
    """
    deadline: Deadline | None = None
    failures: list[str] = []
    while True:
        try:
            slot = _slot(host, deadline)
            deadline = deadline or Deadline(patience, stop)
            found = accept(_bounded(request, deadline, slot))
            patience.reached = True
            return found
        except TransientError as error:
            failure = error.with_traceback(None)  # which would refer to this frame
        assert deadline is not None  # without one, `_slot` waits until there is a slot
        failures.append(str(failure))
        pause = _pause(len(failures), failure.after_s, deadline)
        if (deadline.connect_left() if failure.unreachable else deadline.left()) <= pause:
            break
        traffic.add(retries=1)
        deadline.sleep(pause)
    raise _given_up(what, failures, deadline, patience.first_s if failure.unreachable else patience.total_s)


def checked_timeout(options: Mapping[str, Any]) -> float:
    """`timeout` of storage options: seconds without a byte, after which an attempt has failed."""
    timeout_s = options.get("timeout", _TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < float("inf"):
        raise ValueError(f"storage_options has timeout={timeout_s!r}; give a positive number of seconds")
    return float(timeout_s)


def cleaned(url: str) -> str:
    """A URL for messages, without what may hold credentials: user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _pause(attempts: int, after_s: float | None, deadline: Deadline) -> float:
    """Seconds until the next attempt: what the server asks for, if there is time for a last attempt after it."""
    # Random up to 0.1 s, 0.2 s, … 4 s, so that many readers do not come back at once.
    backoff = 0.05 + random.uniform(0, min(0.1 * 2 ** min(attempts - 1, 10), 4))
    if after_s is None:
        return backoff
    return max(backoff, min(after_s, deadline.left() - min(5.0, deadline.total_s / 4)))


def _given_up(what: str, failures: list[str], deadline: Deadline, allowed_s: float) -> StorageError:
    if deadline.stopped:
        return StorageError(f"{what}: not read, because the store was closed meanwhile")
    tries = f"{len(failures)} {'try' if len(failures) == 1 else 'tries'} in {deadline.elapsed():.1f} s"
    reasons = ", ".join(reason + (f" ({times} times)" if times > 1 else "") for reason, times in Counter(failures).items())
    return StorageError(
        f"{what}: not read after {tries}, where {allowed_s:g} s are allowed (give_up_after_s). What failed: {reasons}. Check "
        "the address, the network and the server, then resume from the last saved state if there is one"
    )


_slots: dict[str, threading.BoundedSemaphore] = {}
_idle: list[tuple[SimpleQueue[Any], threading.Thread]] = []  # threads that wait for a job, and where they wait
# A child process has no threads, and would wait for slots that threads of its parent hold.
os.register_at_fork(after_in_child=_slots.clear)
os.register_at_fork(after_in_child=_idle.clear)


def _slot(host: str, deadline: Deadline | None) -> threading.BoundedSemaphore:
    """A connection slot, taken: one of the requests that may run at a time to a host."""
    slots = _slots.setdefault(host, threading.BoundedSemaphore(PER_HOST))
    if not slots.acquire(timeout=None if deadline is None else max(deadline.left(), 0.001)):
        raise TransientError(f"timed out waiting for a connection slot ({PER_HOST} requests at a time to {host})")
    return slots


def _bounded(request: Callable[[Deadline], _R], deadline: Deadline, slot: threading.BoundedSemaphore) -> _R:
    """`request(deadline)` in another thread, which releases the slot. No longer waited for after the deadline."""
    answer: SimpleQueue[tuple[_R | None, BaseException | None]] = SimpleQueue()
    try:
        jobs, _ = _idle.pop()
    except IndexError:
        jobs = SimpleQueue()
        # A daemon: an interpreter that ends does not wait for a server that hangs.
        threading.Thread(target=_work, args=(jobs,), name="dali_stream request", daemon=True).start()
    jobs.put((partial(request, deadline), slot, answer))
    while (left := deadline.connect_left() if deadline.connecting else deadline.left()) > 0:
        with suppress(Empty):
            found, error = answer.get(timeout=min(left, _WAKE_S))
            if error is not None:
                raise error
            return found  # type: ignore[return-value]  # there is one, since there is no error
    if deadline.abort is not None:
        deadline.abort()
        with suppress(Empty):
            answer.get(timeout=_ABORT_S)
    raise TransientError(deadline.connecting or "timed out", unreachable=bool(deadline.connecting))


def end_idle_threads() -> None:
    """Ends the threads that have no request, and waits for that."""
    with suppress(IndexError):
        while True:
            jobs, thread = _idle.pop()
            jobs.put(None)
            thread.join()


def _work(jobs: SimpleQueue[Any]) -> None:
    """Makes requests until none has come for a while, or until it is told to end."""
    me = jobs, threading.current_thread()
    while True:
        try:
            job = jobs.get(timeout=_IDLE_S)
        except Empty:
            with suppress(ValueError):  # it has just been given one
                _idle.remove(me)
                return
            continue
        if job is None:
            return
        request, slot, answer = job
        found: Any = None
        failure: BaseException | None = None
        try:
            found = request()
        except BaseException as error:
            failure = error.with_traceback(None)
        slot.release()
        _idle.append(me)
        answer.put((found, failure))
        del job, request, answer, found, failure  # an idle thread must not keep an answer alive

"""Attempts within a stated time, and a bound on the requests that are under way to a host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

import tenacity

from dali_stream.errors import StorageError
from dali_stream.storage.store import Traffic

PER_HOST = 32  # requests at a time, of all stores of this process
# At random up to 0.1 s, 0.2 s, … 4 s, so that many readers do not come back at once.
_BACKOFF = tenacity.wait_random_exponential(multiplier=0.1, max=4) + tenacity.wait_fixed(0.05)

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
    """How long requests to one place are tried again.

    Args:
        total_s: seconds for a request, all attempts and pauses together. None: 60, and 5 as long as no connection has ever been
            made there: then the address is wrong, or this machine has no network.

    Attributes:
        total_s: as given, or 60.
        first_s: seconds for the first connection.
        reached: whether a connection has been made.
    """

    def __init__(self, total_s: float | None = None) -> None:
        self.total_s, self.first_s = (60.0, 5.0) if total_s is None else (total_s, total_s)
        self.reached = False


class Deadline:
    """An end in time, which an event may bring forward."""

    def __init__(self, patience: Patience, stop: threading.Event | None = None) -> None:
        self.patience, self.total_s = patience, patience.total_s
        self._start, self._stop = time.monotonic(), stop or threading.Event()

    @property
    def stopped(self) -> bool:
        """Whether the event came."""
        return self._stop.is_set()

    def elapsed(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds until the end; 0 or less behind it."""
        return 0.0 if self.stopped else self.total_s - self.elapsed()

    def connect_left(self) -> float:
        """Seconds until the end for what still has to connect."""
        patience = self.patience
        return self.left() if patience.reached else min(self.left(), patience.first_s - self.elapsed())

    def sleep(self, seconds: float) -> None:
        """Waits, and not past the event."""
        self._stop.wait(seconds)


def retried(
    attempt: Callable[[Deadline], _T],
    what: str,
    *,
    host: str,
    patience: Patience,
    traffic: Traffic,
    stop: threading.Event | None = None,
) -> _T:
    """Makes attempts, with pauses in between, until one ends in something else than a `TransientError`.

    Args:
        attempt: is told until when.
        what: is read, for the message.
        host: whose capacity it takes. Attempts of one host wait for each other beyond `PER_HOST`.
        patience: for how long. It counts from the first attempt; its wait for a place is not in it.
        traffic: where retries are counted.
        stop: ends it early.

    Raises:
        StorageError: the time is over.
    """
    deadline: Deadline | None = None
    failures: dict[str, int] = {}  # how often for which reason

    def once() -> _T:
        nonlocal deadline
        try:
            with _place(host, deadline):
                deadline = deadline or Deadline(patience, stop)
                found = attempt(deadline)
        except TransientError as error:
            failures[str(error)] = failures.get(str(error), 0) + 1
            raise
        patience.reached = True
        return found

    def pause(state: tenacity.RetryCallState) -> float:
        assert deadline is not None
        return _pause(state, deadline)

    def over(state: tenacity.RetryCallState) -> bool:
        if deadline is None:
            return False
        return (deadline.connect_left() if _unreachable(state) else deadline.left()) <= state.upcoming_sleep

    def sleep(seconds: float) -> None:
        assert deadline is not None
        deadline.sleep(seconds)

    def give_up(state: tenacity.RetryCallState) -> NoReturn:
        assert deadline is not None
        _give_up(what, failures, deadline, patience.first_s if _unreachable(state) else patience.total_s)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransientError),
        wait=pause,
        stop=over,
        sleep=sleep,
        before_sleep=lambda state: traffic.add(retries=1),
        retry_error_callback=give_up,
    )(once)


def cleaned(url: str) -> str:
    """A URL for messages: without user, password, query and fragment, where credentials stand."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _unreachable(state: tenacity.RetryCallState) -> bool:
    """Whether the last attempt ended without a connection, at a place to which there never was one."""
    error = state.outcome.exception() if state.outcome else None
    return isinstance(error, TransientError) and error.unreachable


def _pause(state: tenacity.RetryCallState, deadline: Deadline) -> float:
    """Seconds until the next attempt: what the server asks for, as far as there is time for a last try after it."""
    backoff = _BACKOFF(state)
    error = state.outcome.exception() if state.outcome else None
    wanted = error.after_s if isinstance(error, TransientError) else None
    if wanted is None:
        return backoff
    return max(backoff, min(wanted, deadline.left() - min(5.0, deadline.total_s / 4)))


def _give_up(what: str, failures: dict[str, int], deadline: Deadline, allowed_s: float) -> NoReturn:
    if deadline.stopped:
        raise StorageError(f"{what}: not read, as the store was closed meanwhile")
    count = sum(failures.values())
    tries = f"{count} {'try' if count == 1 else 'tries'} in {deadline.elapsed():.1f} s"
    reasons = ", ".join(reason + (f" ({times} times)" if times > 1 else "") for reason, times in failures.items())
    raise StorageError(
        f"{what}: not read after {tries}, where {allowed_s:g} s are allowed (give_up_after_s). What failed: {reasons}. Check "
        "the address, the network and the server, then start again from the last saved state if there is one"
    )


_places: dict[str, threading.BoundedSemaphore] = {}
# A child would wait for places that threads of its parent hold.
os.register_at_fork(after_in_child=_places.clear)


@contextmanager
def _place(host: str, deadline: Deadline | None) -> Iterator[None]:
    """One of the requests that may be under way to a host."""
    places = _places.setdefault(host, threading.BoundedSemaphore(PER_HOST))
    if not places.acquire(timeout=None if deadline is None else max(deadline.left(), 0.001)):
        raise TransientError(f"{PER_HOST} other requests to {host} took all the time")
    try:
        yield
    finally:
        places.release()

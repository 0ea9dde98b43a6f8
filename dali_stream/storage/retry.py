"""Time limits and pauses of retries, outages of hosts and files, and the limit of concurrent requests to a host."""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from dali_stream.errors import StorageError
from dali_stream.storage import logs

AGAIN = (408, 425, 429, 500, 502, 503, 504)  # retryable HTTP statuses
PER_HOST = 32  # maximum number of concurrent requests to a host by all stores of this process

TIMED_OUT = "timed out"  # part of the reason if an attempt failed at its time limit

_TIMEOUT_S = 10.0  # default of the storage option `timeout`
_CLOSE_S = 2.0  # time in which a request can end after its store was closed
_IDLE_S = 0.5  # time after which an idle thread ends
_WAKE_S = 0.2  # interval at which a waiting thread checks whether to stop
_T = TypeVar("_T")

_log = logging.getLogger("dali_stream")
_TELL_S = 60.0  # minimum time between two warnings about retries to the same host, in seconds
_TELL_OUTAGE_S = 1.0  # minimum length of an outage whose end is logged, in seconds
_PROBE_S = 1.0  # minimum time between two attempts in an outage that exceeds its time limit, in seconds
_IDLE_OUTAGE_S = 5.0  # time without any read after which an outage no longer counts, in seconds
_told: dict[str, tuple[float, int]] = {}  # {host: time of its last warning, number of retries since}
_telling = threading.Lock()
_slots: dict[str, SimpleQueue[None]] = {}  # {host: free connection slots}; a semaphore takes several times as long
_outages: dict[str, Outage] = {}  # {name of a host or file that is being read, or has failed: its outage}
_counting = threading.Lock()  # held while an outage changes


def _after_fork() -> None:
    """Renew what threads of the parent hold, since no thread of a forked process would release it."""
    global _telling, _counting
    _slots.clear()
    _outages.clear()
    _telling, _counting = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class TransientError(Exception):
    """Retryable failure.

    Args:
        reason: Description of the failure, without credentials.
        after_s: Pause that the server requests, in seconds. Default: none.
        unreachable: Whether no connection to the host was made. Default: False.
    """

    def __init__(self, reason: str, after_s: float | None = None, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.unreachable = after_s, unreachable


class Patience:
    """Time limits of requests to one host.

    Args:
        total_s: Time limit of a request including all attempts and pauses, and of an outage, in seconds. Default: 60, or 5
            until the first connection, because a failure before it probably means a wrong address or a machine without a
            network.

    Attributes:
        total_s: Time limit of a request and of an outage, in seconds.
        first_s: Time limit of a request that cannot connect, until the first connection is made, in seconds.
        reached: Whether a connection has been made.
    """

    def __init__(self, total_s: float | None = None) -> None:
        self.total_s, self.first_s = (60.0, 5.0) if total_s is None else (total_s, total_s)
        self.reached = False


class Outage:
    """Failures of a host or a file since its last good answer. All reads of this process that use it share one object.

    The time without a good answer counts from the first failure, so idle time before it does not count. An outage is forgotten
    if nothing was read for `_IDLE_OUTAGE_S` after the last failure.

    Args:
        name: Name of the host or the file, without credentials.

    Attributes:
        name: See above.
        reason: Reason of the last failure.
        ended: End of the last outage that was long enough to explain failures of files.
    """

    def __init__(self, name: str) -> None:
        self.name, self.reason, self._reads, self._failures = name, "", 0, 0
        self._since: float | None = None  # time of the first failure
        self._last = self._good = -math.inf  # times of the last failure, and of the last good answer
        self.ended = -math.inf

    def lasted(self) -> float:
        """Return the seconds since the first failure, or 0 if the last answer was good."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def begin(self, host_ended: float = -math.inf) -> None:
        """Count a read that begins. Failures of a file do not count if its host had an outage until `host_ended`."""
        is_idle = not self._reads and time.monotonic() - self._last > _IDLE_OUTAGE_S
        if is_idle or (self._since is not None and self._since < host_ended):
            self._since, self._failures = None, 0
        self._reads += 1

    def end(self) -> bool:
        """Count a read that ends. Return whether the object is no longer needed."""
        self._reads -= 1
        return not self._reads and self._since is None and self.ended == -math.inf

    def is_given_up(self, allowed_s: float) -> bool:
        """Return whether the outage has lasted for `allowed_s`, and an attempt has just failed, so another one is useless."""
        return self.lasted() >= allowed_s and time.monotonic() - self._last < _PROBE_S

    def failed(self, reason: str, took_s: float = 0.0) -> None:
        """Count a failed attempt.

        Args:
            reason: Why it failed, without credentials.
            took_s: Seconds for which the attempt waited. They belong to the outage if no good answer arrived then. Default: 0.
        """
        with _counting:
            self._last, self.reason = time.monotonic(), reason
            self._since = max(self._last - took_s, self._good) if self._since is None else self._since
            self._failures += 1

    def answered(self) -> tuple[float, int]:
        """Record a good answer. Return the duration in seconds of the outage that it ends, and the number of its failures."""
        self._good = time.monotonic()
        if self._since is None:
            return 0.0, 0
        with _counting:
            ended = self.lasted(), self._failures
            self._since, self._failures = None, 0
            return ended


@contextmanager
def reading(host: str, file: str) -> Iterator[tuple[Outage, Outage]]:
    """Return the outages of a host and of a file, and count a read of them while the body runs."""
    with _counting:
        own_host, own_file = (_outages.setdefault(name, Outage(name)) for name in (host, file))
        own_host.begin()
        own_file.begin(own_host.ended)
    try:
        yield own_host, own_file
    finally:
        with _counting:
            for outage in (own_host, own_file):
                if outage.end():
                    _outages.pop(outage.name, None)


class Deadline:
    """Time limit of a request including all attempts and pauses. It starts when the object is created.

    The request also ends when its host or its file has given no good answer for that time. Each later request makes one
    attempt, which may end the outage, unless another attempt has just failed. A queue of requests therefore ends at once.

    Args:
        patience: Time limits of requests to the host.
        stop: Event that ends the request early.
        outages: Outages of the host and the file. Default: none.

    Attributes:
        connecting: Reason to report if the time is over while the host's name is being resolved. Empty at other times.
        abandoned: Whether the caller no longer waits for the request.
        failed: Whether an attempt has failed.
    """

    def __init__(self, patience: Patience, stop: threading.Event, outages: Sequence[Outage] = ()) -> None:
        self.patience, self.stop, self._outages = patience, stop, outages
        self.connecting, self.abandoned, self.failed = "", False, False
        self._start = time.monotonic()

    def allowed_s(self, unreachable: bool = False) -> float:
        """Return the time limit in seconds.

        Args:
            unreachable: Whether the last attempt could not connect to the host. Default: False.
        """
        return self.patience.first_s if unreachable and not self.patience.reached else self.patience.total_s

    def elapsed(self) -> float:
        """Return the seconds since the start, without the time for which the request waited for a connection slot."""
        return time.monotonic() - self._start

    def exclude(self, seconds: float) -> None:
        """Exclude the time for which the request waited for a connection slot."""
        self._start += seconds

    def outage(self) -> Outage | None:
        """Return the longest outage, or None if it began after the request."""
        longest = max(self._outages, key=Outage.lasted, default=None)
        return longest if longest is not None and longest.lasted() > self.elapsed() else None

    def is_given_up(self) -> bool:
        """Return whether an attempt has just failed, in an outage of the host or the file that exceeds the time limit."""
        return any(outage.is_given_up(self.allowed_s()) for outage in self._outages)

    def left(self, unreachable: bool = False) -> float:
        """Return the remaining seconds, which are 0 or less when the time is over. See `allowed_s` for `unreachable`."""
        if self.abandoned or self.stop.is_set():
            return 0.0
        allowed, own = self.allowed_s(unreachable), self.elapsed()
        left = allowed - max(own, *(outage.lasted() for outage in self._outages), 0.0)
        return left if self.failed else max(left, allowed / 3 - own)

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`, or until the event is set if that is earlier."""
        self.stop.wait(seconds)


@contextmanager
def slot(host: str, deadline: Deadline) -> Iterator[None]:
    """Hold one of the `PER_HOST` connection slots of a host.

    This waits until a slot is free, which the deadline does not count. If the event of the deadline is set first, the body runs
    without a slot.
    """
    slots = _slots.get(host) or _slots.setdefault(host, _free_slots())
    held, began = False, time.monotonic()
    while not held and not deadline.stop.is_set():
        with suppress(Empty):
            slots.get(timeout=_WAKE_S)
            held = True
    deadline.exclude(time.monotonic() - began)
    try:
        yield
    finally:
        if held:
            slots.put(None)


def _free_slots() -> SimpleQueue[None]:
    slots: SimpleQueue[None] = SimpleQueue()
    for _ in range(PER_HOST):
        slots.put(None)
    return slots


def seconds(value: Any, name: str) -> float:
    """Check a time that a user has passed, and return it as a float.

    Args:
        value: Time in seconds.
        name: Name of the argument, for the message.

    Raises:
        ValueError: If the value is not a positive, finite number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)


def silence_s(options: Mapping[str, Any]) -> float:
    """Return the storage option `timeout`, the time limit for each wait for further bytes in seconds. Default: 10."""
    return seconds(options.get("timeout", _TIMEOUT_S), "storage_options['timeout']")


def cleaned(url: str) -> str:
    """Return a URL for messages, without the parts that may contain credentials: user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def pause_s(attempts: int, after_s: float | None, deadline: Deadline) -> float:
    """Return the pause before the next attempt in seconds.

    A pause that the server requests is shortened if it would leave too little time for a last attempt.

    Args:
        attempts: Number of failed attempts.
        after_s: Pause that the server requests, in seconds, or None.
        deadline: Time limit of the request.
    """
    # The pause has a random part of up to 0.1 s, 0.2 s, … 4 s, so that many readers do not retry at the same time.
    backoff = 0.05 + random.uniform(0, min(0.1 * 2 ** min(attempts - 1, 10), 4))
    if after_s is None:
        return backoff
    return max(backoff, min(after_s, deadline.left() - min(5.0, deadline.allowed_s() / 4)))


def given_up(request: str, failures: list[str], deadline: Deadline, allowed_s: float) -> StorageError:
    """Return the error for a request whose store was closed, or that has exceeded its time limit.

    Args:
        request: Description of the request.
        failures: Description of each failed attempt.
        deadline: Time limit of the request.
        allowed_s: Time limit that the message states, in seconds.
    """
    if deadline.stop.is_set():
        return StorageError(f"{request}: not read, because the store was closed meanwhile")
    tries = f"{len(failures)} {'try' if len(failures) == 1 else 'tries'} in {deadline.elapsed():.1f} s"
    if outage := deadline.outage():
        failures = failures or [outage.reason]
        tries += f", and {outage.name} has given no good answer for {outage.lasted():.1f} s"
    reasons = ", ".join(reason + (f" ({times} times)" if times > 1 else "") for reason, times in Counter(failures).items())
    return StorageError(
        f"{request}: not read after {tries}, where {allowed_s:g} s are allowed (give_up_after_s). Reasons: {reasons}. Check "
        "the address, the network and the server, then resume from the last saved state if one exists"
    )


def tell_retry(host: str, request: str, reason: str) -> None:
    """Log the first retry of each minute and host as a warning, with the number of retries since the last one.

    Args:
        host: Host of the request.
        request: Description of the request, without credentials.
        reason: Reason why the attempt failed, without credentials.
    """
    with _telling:
        last, untold = _told.get(host, (-math.inf, 0))
        now = time.monotonic()
        due = now - last >= _TELL_S
        _told[host] = (now, 0) if due else (last, untold + 1)
    if due:
        more = f" {untold} more requests to it were repeated since the last such message." if untold else ""
        _log.warning(
            "%s: a request to %s failed (%s), and is repeated.%s stats() and metrics() count all retries",
            *(request, host, reason, more),
        )


def tell_end(host: Outage, file: Outage, patience: Patience) -> None:
    """Record a good answer about a file. If it ends an outage of the host of at least `_TELL_OUTAGE_S`, log a warning."""
    file.answered()
    lasted, failures = host.answered()
    if lasted >= patience.total_s / 2:
        host.ended = time.monotonic()
    if lasted >= _TELL_OUTAGE_S:
        _log.warning("%s gives good answers again, after %.1f s in which %d requests to it failed", host.name, lasted, failures)


class _Helper:
    """Thread that makes requests for other threads, one at a time. It ends on None, or after `_IDLE_S` without a request."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        # A daemon thread, so that the interpreter can exit while a server does not respond.
        self.thread = threading.Thread(target=self._work, name="dali_stream request", daemon=True)

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
                with suppress(ValueError):  # `bounded` has just removed this thread from the list, and will send it a request
                    _idle.remove(self)
                    return None


_idle: list[_Helper] = []  # used as a stack, so that surplus threads stay idle and end
os.register_at_fork(after_in_child=_idle.clear)  # threads of the parent do not exist in a child


def bounded(request: Callable[[Deadline], _T], deadline: Deadline) -> _T:
    """Call `request(deadline)` in another thread, and return the result. The thread is abandoned when the time is over.

    Without this thread, a call that ignores time limits, such as resolving a name, could block the caller for minutes.

    Raises:
        TransientError: If the time is over, or the event of the deadline is set.
    """
    try:
        helper = _idle.pop()
    except IndexError:
        helper = _Helper()
    busy = True
    try:
        helper.requests.put(partial(request, deadline))
        if helper.thread.ident is None:
            helper.thread.start()  # within `try`, so that the thread ends if Ctrl-C interrupts its start
        while (left := deadline.left(bool(deadline.connecting))) > 0:
            with suppress(Empty):
                answer, error = helper.answers.get(timeout=min(left, _WAKE_S))
                busy = False
                if error is not None:
                    raise error
                return answer  # type: ignore[no-any-return]
    finally:
        if busy:  # the thread cannot be interrupted, so it ends after its request, and its answer is dropped
            deadline.abandoned = True
            helper.requests.put(None)
        else:
            _idle.append(helper)
        if deadline.stop.is_set():
            end_idle()
    if deadline.stop.is_set():
        helper.thread.join(_CLOSE_S)
    raise TransientError(deadline.connecting or TIMED_OUT, unreachable=bool(deadline.connecting))


def end_idle() -> None:
    """End the threads that wait for requests, and join them."""
    while _idle:
        with suppress(IndexError):  # another thread has removed the last one
            helper = _idle.pop()
            helper.requests.put(None)
            helper.thread.join()

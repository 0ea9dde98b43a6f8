"""Thread pool for decoding, copying and reading, and calls whose results several threads share."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from dali_stream.observe.tracing import bound

Priority = tuple[int, ...]
_Job = tuple[Priority, int, "Future[Any]", Callable[..., Any], tuple[Any, ...]]

V = TypeVar("V")
_START_S = 5.0  # seconds to wait for a thread that the system has not begun to run, which normally takes microseconds


class Workers:
    """Pool of threads. Jobs with a lower priority value run first. Jobs with equal priority run in the order of `submit`.

    The threads start with the first job. Until then, an object that is not yet constructed completely, for example because of
    Ctrl-C, leaves no threads. They are daemons, so the interpreter can exit while a job waits for a server that hangs. With the
    standard library's pool, it could not.

    Args:
        name: Name of the threads.
        threads: Number of threads. With 0, `submit` runs the job in the calling thread.
        around: Function that returns a context, such as a measurement, in which a thread runs each job. Default: none.
        reserved: Number of further threads, for jobs that are needed while all others are busy. They run only jobs that are
            due, see `set_due`. Default: 0.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        reserved: int = 0,
    ) -> None:
        self._name, self._count, self._around, self._reserved = name, threads, around, reserved
        self._jobs: list[_Job] = []  # a heap
        # The condition is written in Python, so Ctrl-C in `with self._changed` may leave it locked. The lock is written in C.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._due_changed = threading.Condition(self._lock)  # for the reserved threads
        self._due: Priority = ()
        self._number = itertools.count()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return self._count

    def submit(self, call: Callable[..., Any], /, *args: Any, priority: Priority = ()) -> Future[Any]:
        """Schedule `call(*args)`, and return its future. After `stop`, the future is cancelled.

        Args:
            call: Function of the job.
            args: Positional arguments of `call`.
            priority: Priority of the job, compared as a tuple. Lower values run first. Default: ().
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._stopping:
                future.cancel()
            elif self._count:
                self._start()
                heapq.heappush(self._jobs, (priority, next(self._number), future, bound(call), args))
                self._changed.notify()
                self._due_changed.notify()
                return future
        _run(future, call, args, Exception)  # KeyboardInterrupt is raised in the calling thread, and not set in the future
        return future

    def set_due(self, priority: Priority) -> None:
        """Let the reserved threads run jobs whose priority is at most `priority`, compared as a tuple."""
        with self._lock:
            self._due = priority
            self._due_changed.notify_all()

    def stop(self) -> None:
        """Cancel jobs that have not begun. Return without waiting for the others."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
            self._due_changed.notify_all()
            while self._jobs:  # a job is removed last, so that another call continues if Ctrl-C interrupts this one
                _, _, future, _, _ = self._jobs[-1]
                future.cancel()
                with contextlib.suppress(RuntimeError):  # an interrupted call has already notified the threads that wait
                    future.set_running_or_notify_cancel()
                self._jobs.pop()

    def join(self) -> None:
        """Wait for the threads to end, after `stop`."""
        for thread in self._threads:
            join_started(thread)

    def _start(self) -> None:
        """Start the threads that have not been started yet."""
        for number in range(len(self._threads), self._count + self._reserved):
            take = self._take if number < self._count else self._take_due
            thread = threading.Thread(target=self._work, args=(take,), name=f"{self._name} {number}", daemon=True)
            self._threads.append(thread)  # before it starts, so that `join` knows it even if the start is interrupted
            thread.start()

    def _work(self, take: Callable[[], _Job | None]) -> None:
        while (job := take()) is not None:
            _, _, future, call, args = job
            with self._around():
                _run(future, call, args)
            del job, future, call, args  # an idle thread must not keep a job's result alive

    def _take(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            return None if self._stopping else heapq.heappop(self._jobs)

    def _take_due(self) -> _Job | None:
        with self._due_changed:
            self._due_changed.wait_for(lambda: (self._jobs and self._jobs[0][0] <= self._due) or self._stopping)
            return None if self._stopping else heapq.heappop(self._jobs)


def _run(
    future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...], caught: type[BaseException] = BaseException
) -> None:
    """Run a job and set its future. If the future was cancelled, only wake the threads that wait for it.

    Args:
        future: Future of the job.
        call, args: Function of the job, and its arguments.
        caught: Exceptions that are set in the future. Others are raised.
    """
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call(*args))
        except caught as error:
            future.set_exception(error)


def join_started(thread: threading.Thread) -> None:
    """Wait for a thread to end. Return at once if it was never started, or if an exception ended its start before it ran.

    `Thread.join` refuses a thread until it runs. If Ctrl-C interrupts `Thread.start`, the thread may begin to run later.
    """
    until = time.monotonic() + _START_S
    while thread.ident is None and thread in threading.enumerate() and time.monotonic() < until:
        time.sleep(0.001)
    with contextlib.suppress(RuntimeError):  # it was never started
        thread.join()


class Once:
    """Runner of calls by key. Calls with the same key that overlap in time run only once, and share the result or the error."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, Future[object]] = {}
        self._lock = threading.Lock()

    def __call__(self, key: Hashable, call: Callable[[], V]) -> V:
        """Return `call()`, or the result of another thread's call for the same key if one is running.

        Args:
            key: Key of the call. All calls for a key must return the same type.
            call: Function to call. It must not request its own key, because it would then wait for itself.
        """
        with self._lock:
            future = self._under_way.get(key)
            if mine := future is None:
                future = self._under_way[key] = Future()
        if not mine:
            return future.result()  # type: ignore[return-value]  # all calls for a key return the same type
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(result)
            return result
        finally:
            with self._lock:
                del self._under_way[key]

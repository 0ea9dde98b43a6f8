"""Threads that take turns on a simulated clock.

`Clock.instead_of_threads` gives modules these in place of `threading` and `Future`, so that their code runs as it stands:
each simulated thread is a real one, of which only that with the turn runs. It gives the turn away where it would wait; when
all wait, the clock jumps to what happens next. So a run is the same every time, and computing takes no simulated time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


class Over(BaseException):
    """Ends a simulated thread that waits when the simulation is over."""


class Deadlock(RuntimeError):
    """All simulated threads wait, and nothing is going to happen."""


class Task:
    """A simulated thread, with the methods of `threading.Thread` that are in use. A clock's maker has one that never starts."""

    def __init__(self, clock: Clock, target: Callable[..., object], name: str = "", args: tuple[Any, ...] = ()) -> None:
        self.name, self.ended = name, False
        self._clock, self._target, self._args = clock, target, args
        self._done = Condition(clock)
        self.turn = threading.Lock()  # taken, but for the moment in which the turn is given
        self.turn.acquire()
        self.thread = threading.Thread(target=self._run, name=f"simulated {name}", daemon=True)

    def start(self) -> None:
        self._clock.tasks.append(self)
        self._clock.wake(self)
        self.thread.start()

    def join(self) -> None:
        with self._done:
            self._done.wait_for(lambda: self.ended)

    def _run(self) -> None:
        self.turn.acquire()
        try:
            self._clock.check()
            self._target(*self._args)
        except Over:
            pass
        except BaseException as error:
            self._clock.failure = self._clock.failure or error
        self.ended = True
        with contextlib.suppress(Over):
            self._done.notify_all()
            self._clock.leave(self)


class Clock:
    """Simulated seconds, and whose turn it is. A context manager, whose end is the end of all simulated threads.

    Attributes:
        now: seconds since the beginning.
        failure: what a thread has failed with, which the one that made the clock gets to see.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.failure: BaseException | None = None
        self.tasks: list[Task] = []
        self._main = self.current = Task(self, lambda: None, "main")
        self._ready: deque[Task] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._over = False

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for task in self.tasks:
            if not task.ended:
                self.current = task
                task.turn.release()
            task.thread.join()

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Has something happen when so many seconds have gone by. It must not wait."""
        heapq.heappush(self._timers, (self.now + seconds, next(self._number), call))

    def sleep(self, seconds: float) -> None:
        """The current thread waits."""
        me = self.current
        self.after(seconds, lambda: self.wake(me))
        self.wait()

    def wake(self, task: Task) -> None:
        """A thread that waits goes on when it has the turn."""
        self._ready.append(task)

    def wait(self) -> None:
        """The current thread waits until `wake` was called for it."""
        self.check()
        me = self.current
        if (task := self._next()) is not me:
            self.current = task
            task.turn.release()
            me.turn.acquire()
        self.check()

    def leave(self, task: Task) -> None:
        """A thread has ended."""
        self.check()
        self.tasks.remove(task)
        self.current = self._next()
        self.current.turn.release()

    def check(self) -> None:
        """Ends the current thread when the simulation is over, and tells the main one what has failed."""
        if self._over:
            raise Over
        if self.failure is not None and self.current is self._main:
            raise self.failure

    def _next(self) -> Task:
        while not self._ready:
            if self.failure is None and not self._timers:
                names = ", ".join(task.name for task in self.tasks)
                self.failure = Deadlock(f"at {self.now:.3f} s all simulated threads wait for each other: {names}")
            if self.failure is not None:
                return self._main
            self.now, _, call = heapq.heappop(self._timers)
            call()
        return self._ready.popleft()

    @contextlib.contextmanager
    def instead_of_threads(self, *modules: ModuleType) -> Iterator[None]:
        """What these modules make of `threading` and `Future` in the block is simulated."""
        clock = self

        class Simulated(Future):  # type: ignore[type-arg]
            def result(self, timeout: float | None = None) -> Any:
                if not self.done():
                    me = clock.current
                    self.add_done_callback(lambda _: clock.wake(me))
                    clock.wait()
                return super().result(timeout)

        def thread(target: Callable[..., object], name: str = "", args: tuple[Any, ...] = (), daemon: bool = True) -> Task:
            return Task(clock, target, name, args)

        threads = SimpleNamespace(
            Thread=thread,
            Condition=lambda: Condition(clock),
            Lock=lambda: Condition(clock),
            Semaphore=lambda value=1: Semaphore(clock, value),
            current_thread=lambda: clock.current,
        )
        with contextlib.ExitStack() as stack:
            for module in modules:
                for name, simulated in (("threading", threads), ("Future", Simulated)):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, simulated))
            yield


class Condition:
    """`threading.Condition` with its lock, which the same thread may take again; also a lock alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._owner: Task | None = None
        self._depth = 0
        self._entering: deque[Task] = deque()
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> None:
        me = self._clock.current
        while self._owner is not None and self._owner is not me:
            self._entering.append(me)
            self._clock.wait()
        self._owner, self._depth = me, self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._entering:
                self._clock.wake(self._entering.popleft())

    def wait(self) -> None:
        depth, self._depth = self._depth, 1
        self.__exit__()
        self._waiting.append(self._clock.current)
        try:
            self._clock.wait()
        finally:
            if not self._clock._over:
                self.__enter__()
            self._depth = depth

    def wait_for(self, there: Callable[[], Any]) -> None:
        while not there():
            self.wait()

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._clock.wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Semaphore:
    """`threading.Semaphore`."""

    def __init__(self, clock: Clock, value: int) -> None:
        self._value, self._changed = value, Condition(clock)

    def acquire(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._value)
            self._value -= 1

    def release(self) -> None:
        with self._changed:
            self._value += 1
            self._changed.notify()

"""Threads that read from storage, or none for files on the disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from dali_stream.storage.retry import PER_HOST
from dali_stream.workers import Priority, Workers

# Threads. While the pools fill, a batch misses blocks all over them, and waits for as many round trips as these do not do at
# once: at 50 ms 16 threads bring 21 MB/s, however fast the network is.
FETCHERS = PER_HOST


class Readers(Protocol):
    """Whatever reads: threads, or the caller itself."""

    def submit(self, call: Callable[..., Any], /, *args: Any, priority: Priority = ()) -> Future[Any]:
        """Schedule a call."""
        ...

    def stop(self) -> None:
        """Cancel reads that have not begun."""
        ...

    def join(self) -> None:
        """Wait for the end, after `stop`."""
        ...


class AtOnce:
    """No threads: `submit` runs the call, for files on the disk."""

    def submit(self, call: Callable[..., Any], /, *args: Any, priority: Priority = ()) -> Future[Any]:
        """Run a call."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        """Do nothing: no call is in progress."""

    def join(self) -> None:
        """Do nothing: no call is in progress."""


def readers(remote: bool) -> Readers:
    """Return fetch threads for remote data, and `AtOnce` for files on the disk."""
    return Workers("dali_stream fetch", FETCHERS) if remote else AtOnce()

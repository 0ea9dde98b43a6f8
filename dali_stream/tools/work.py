"""Jobs in several threads, with progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import TypeVar

THREADS = 4
T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str, int, int], None]
"""Function that is called as (stage, done, total)."""


class Work:
    """Runs jobs in a few threads.

    Args:
        progress: called as (stage, done, total), by one thread at a time.
        interrupt: aborts whatever jobs may be waiting for; may be called again.
        threads: jobs at a time.
    """

    def __init__(self, progress: Progress | None, interrupt: Callable[[], None], threads: int = THREADS) -> None:
        self._progress, self._interrupt, self._threads = progress, interrupt, threads
        self._lock = threading.Lock()
        self._stage, self._done, self._total = "", 0, 0
        self._stopping = False

    def each(self, stage: str, items: Sequence[T], call: Callable[[T], R], total: int | None = None) -> list[R]:
        """`call` of each item. Calls report progress with `advance` up to `total`; without one, each call counts as 1.

        The first failure is raised; the other calls stop at their next `advance`.
        """
        counted = total is None
        self._stage, self._done, self._total = stage, 0, len(items) if total is None else total
        self.advance(0)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="dali_stream output") as pool:
            jobs: list[Future[R]] = []
            ended: SimpleQueue[Future[R]] = SimpleQueue()
            try:
                for item in items:
                    jobs.append(pool.submit(call, item))
                    jobs[-1].add_done_callback(ended.put)
                for _ in jobs:
                    ended.get().result()
                    self.advance(int(counted))
            except BaseException:
                self._stopping = True
                pool.shutdown(wait=False, cancel_futures=True)
                begun = [job for job in jobs if not job.cancelled()]  # `wait` never returns for the others
                self._interrupt()
                while wait(begun, timeout=0.5).not_done:
                    self._interrupt()  # a job was between two reads
                raise
        return [job.result() for job in jobs]

    def advance(self, by: int) -> None:
        """Adds to the progress, from within a job."""
        if self._stopping:
            raise _Stopped
        with self._lock:
            self._done += by
            if self._progress is not None:
                self._progress(self._stage, min(self._done, self._total), self._total)


class _Stopped(Exception):
    """Another job has failed. Never leaves `Work`."""

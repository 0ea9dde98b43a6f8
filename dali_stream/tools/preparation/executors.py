"""Running tasks on any `concurrent.futures.Executor`: processes of this machine, SLURM, Ray, or another one's.

There is no scheduler, queue or worker protocol here: a task is a function call, and an executor runs it somewhere.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from typing import Any

Json = dict[str, Any]
Call = Callable[[Sequence[Json]], list[Json]]
_ALONE = 2  # times that a task may end its worker while nothing else runs


class ThisProcess(Executor):
    """Runs each call in `submit`."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Processes(ProcessPoolExecutor):
    """Processes of this machine. They are new interpreters, since obstore's and torch's threads do not outlive a fork."""

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs, multiprocessing.get_context("spawn"), initializer=_begin_worker, initargs=(os.getpid(),))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, at once if their calls are cancelled."""
        processes = list((self._processes or {}).values()) if cancel_futures else []
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        for process in processes:
            process.kill()


def local(jobs: int) -> Callable[[], Executor]:
    """Return what makes executors on this machine: this process for one job, or more processes."""
    return ThisProcess if jobs == 1 else functools.partial(Processes, jobs)


def _begin_worker(parent: int) -> None:
    """End with the parent, leave Ctrl-C to it, and use one thread, since the processes are the parallelism."""
    import ctypes
    import sys

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    import torch

    torch.set_num_threads(1)


def run_tasks(
    make: Callable[[], Executor],
    call: Call,
    tasks: Sequence[Json],
    at_once: int,
    per_call: int = 1,
    starting: Callable[[Sequence[Json]], None] = lambda tasks: None,
) -> Iterator[tuple[Json, Json]]:
    """Yield each task with its result, in the order in which they end.

    A worker that dies breaks a pool of processes. Then a new one is made. The tasks that were running come last, one at a
    time, so that one that always ends its worker is found, and fails alone.

    Args:
        make: Makes an executor.
        call: Function of some tasks that returns their results.
        tasks: Arguments.
        at_once: Calls at a time.
        per_call: Tasks of a call.
        starting: Called with the tasks of each call when it is handed over.

    Raises:
        BrokenExecutor: If an executor broke twice without the end of a single task in between.
    """
    waiting = deque(list(tasks[at : at + per_call]) for at in range(0, len(tasks), per_call))
    suspects, alone = deque[list[Json]](), dict[str, int]()
    while waiting or suspects:
        limit, queue = (at_once, waiting) if waiting else (1, suspects)
        executor, running, ended = make(), dict[Future[list[Json]], list[Json]](), 0
        try:
            while queue or running:
                while queue and len(running) < limit:
                    starting(queue[0])
                    running[executor.submit(call, queue[0])] = queue[0]
                    queue.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    part = running[future]
                    results = _results(future, part)
                    del running[future]
                    ended += 1
                    yield from zip(part, results, strict=True)
        except BrokenExecutor as error:
            lost = [*running.values(), *([queue.popleft()] if queue and not running else [])]
            for part in lost:
                alone[part[0]["path"]] = alone.get(part[0]["path"], 0) + (limit == 1)
            for part in [each for each in lost if alone[each[0]["path"]] >= _ALONE]:
                lost.remove(part)
                why = f"its worker died each time ({error}); is there enough memory?"
                yield from ((task, {"path": task["path"], "bytes": 0, "error": why}) for task in part)
            suspects.extend([task] for part in lost for task in part)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _results(future: Future[list[Json]], part: Sequence[Json]) -> list[Json]:
    """Return the results of a call; if it failed as a whole, an error for each task."""
    try:
        return future.result()
    except BrokenExecutor:
        raise
    except Exception as error:  # of the executor, such as Ray's when a worker died too often
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [{"path": task["path"], "bytes": 0, "error": why} for task in part]

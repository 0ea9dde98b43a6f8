"""Running tasks on any `concurrent.futures.Executor`: processes of this machine, SLURM, Ray, or another one's.

There is no scheduler, queue or worker protocol here: a task is a function call, and an executor runs it somewhere.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from typing import Any

Json = dict[str, Any]
Call = Callable[[Sequence[Json]], list[Json]]
_TICK_S = 10.0
_TRIES = 2  # times that a task is run without others


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
    time, so that one that always ends its worker is found, and fails alone. A call that fails in an executor that does not
    break, such as a job of SLURM that was killed, is split and repeated once.

    Args:
        make: Makes an executor.
        call: Function of some tasks that returns their results.
        tasks: Arguments.
        at_once: Calls at a time.
        per_call: Tasks of a call.
        starting: Called with the tasks of each call when it is handed over, and with none while nothing happens.
    """
    waiting = deque(list(tasks[at : at + per_call]) for at in range(0, len(tasks), per_call))
    suspects, tries = deque[list[Json]](), Counter[str]()
    while waiting or suspects:
        limit, queue = (at_once, waiting) if waiting else (1, suspects)
        executor, running = make(), dict[Future[list[Json]], list[Json]]()
        try:
            while queue or running:
                while queue and len(running) < limit:
                    starting(queue[0])
                    running[executor.submit(call, queue[0])] = queue[0]
                    queue.popleft()
                ended = wait(running, _TICK_S, FIRST_COMPLETED).done
                if not ended:
                    starting(())  # so that progress shows that this process lives
                for future in ended:
                    if isinstance(error := future.exception(), BrokenExecutor):
                        raise error
                    part = running.pop(future)
                    if error is None:
                        yield from zip(part, future.result(), strict=True)
                    else:
                        yield from _failed(part, error, tries, queue)
        except BrokenExecutor as error:
            lost = [*running.values(), *([queue.popleft()] if queue and not running else [])]
            if limit > 1:
                suspects.extend([task] for part in lost for task in part)
            else:
                for part in lost:
                    yield from _failed(part, error, tries, suspects)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _failed(
    part: Sequence[Json], error: BaseException, tries: Counter[str], again: deque[list[Json]]
) -> Iterator[tuple[Json, Json]]:
    """Put the tasks of a call that was lost back one by one. Yield those that were lost alone before."""
    for task in part:
        tries[task["path"]] += 1
        if tries[task["path"]] < _TRIES:
            again.append([task])
        else:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            why = f"its worker died each time ({cause}). Check its memory"
            yield task, {"path": task["path"], "bytes": 0, "error": why}

"""Runs tasks on any `concurrent.futures.Executor`: processes of this machine, SLURM, Ray, or an executor of the caller.

A task is a plain function call, and the executor decides where it runs. This module needs no scheduler, queue or worker
protocol of its own.
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
_TICK_S = 10.0  # interval at which progress is updated while no call ends
_TRIES = 2  # number of attempts after which a task fails. An attempt does not count if other tasks ran in the pool that broke


class ThisProcess(Executor):
    """Executor that runs each call in `submit`, in the caller's thread."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the function. Return a future that is already done."""
        future: Future[Any] = Future()
        settle(future, lambda: call(*args, **kwargs))
        return future


class Processes(ProcessPoolExecutor):
    """Processes of this machine. They are spawned, since the threads of obstore and torch do not survive a fork.

    Args:
        jobs: Number of processes.
    """

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs, multiprocessing.get_context("spawn"), initializer=_begin_worker, initargs=(os.getpid(),))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes. If `cancel_futures`, kill them instead of waiting for running calls."""
        processes = list((self._processes or {}).values()) if cancel_futures else []
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        for process in processes:
            process.kill()


def settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Call a function. Its result, or the error that it raises, becomes that of the future."""
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)


def local(jobs: int) -> Callable[[], Executor]:
    """Return a function that makes an executor on this machine: this process for one job, or otherwise `jobs` processes."""
    return ThisProcess if jobs == 1 else functools.partial(Processes, jobs)


def _begin_worker(parent: int) -> None:
    """Prepare a worker process. It ends with its parent, ignores Ctrl-C, and uses one thread."""
    import ctypes
    import sys

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
    import torch

    torch.set_num_threads(1)


def run_tasks(
    make: Callable[[], Executor],
    call: Callable[[Sequence[Json]], list[Json]],
    tasks: Sequence[Json],
    at_once: int,
    per_call: int = 1,
    starting: Callable[[Sequence[Json]], None] = lambda tasks: None,
) -> Iterator[tuple[Json, Json]]:
    """Run tasks. Yield each task with its result, in the order in which they end.

    If a worker dies, a pool of processes is broken, and a new one is made. It is not known which task killed the worker, so the
    tasks that were running are retried last and one at a time. A task that then kills its worker twice fails. Other executors,
    such as SLURM, do not break if a job is killed. The tasks of the killed job are retried once, each on its own.

    Args:
        make: Function that makes an executor.
        call: Function that takes some tasks and returns their results.
        tasks: Tasks to run.
        at_once: Maximum number of concurrent calls.
        per_call: Maximum number of tasks per call. Default: 1.
        starting: Function that is called with the tasks of each call when the call is submitted. While no call ends, it is also
            called every 10 s with an empty sequence.
    """
    waiting = deque(list(tasks[at : at + per_call]) for at in range(0, len(tasks), per_call))
    suspects, tries = deque[list[Json]](), Counter[str]()
    while waiting or suspects:
        # Suspects run alone, so that a worker that dies identifies its task.
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
                    starting(())  # lets progress show that the run is alive
                for future in ended:
                    if isinstance(error := future.exception(), BrokenExecutor):
                        raise error
                    part = running.pop(future)
                    if error is None:
                        yield from zip(part, future.result(), strict=True)
                    else:
                        yield from _failed(part, error, tries, queue)
        except BrokenExecutor as error:
            # If nothing was running, `submit` itself failed, and the call is still at the front of the queue.
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
    """Queue the tasks of a lost call again, one by one. Yield tasks that have failed too often, with an error."""
    for task in part:
        tries[task["path"]] += 1
        if tries[task["path"]] < _TRIES:
            again.append([task])
        else:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            why = f"its worker died each time ({cause}). Check its memory"
            yield task, {"path": task["path"], "bytes": 0, "error": why}

"""Executors, which run tasks in processes of this machine, on SLURM, or on Ray.

An executor is a function like the built-in `map`, except that results may be in any order. It takes a function and tasks, and
yields the result of each task. If nothing ends for some time, it may yield None, so that progress shows that it is alive. A
task that fails, such as one whose worker dies, is repeated. If it fails each time, its result is an error.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from typing import Any

from dali_stream.errors import DaliStreamError
from dali_stream.tools.task_process import begin, call_each

Json = dict[str, Any]
Call = Callable[[Json], Json]
MapTasks = Callable[[Callable[[dict[str, Any]], dict[str, Any]], Sequence[dict[str, Any]]], Iterable[dict[str, Any] | None]]
"""Function like the built-in `map`: it takes a picklable function and its arguments, and yields the results in any order. It
may also yield None, so that progress shows that it is alive."""
# Yields results, and returns the tasks whose worker died, with the error.
_Attempt = Generator[Json | None, None, list[tuple[Json, BaseException]]]
_TICK_S = 10.0  # time without a result after which None is yielded
_POLL_S = 1.0  # interval of polling the jobs of SLURM
_MOST_JOBS = 1000  # maximum number of jobs of SLURM at a time
_SAID = 200  # maximum number of characters at both ends of an error's text
_REPEATS = 2  # number of times that a task is repeated after it has failed


def _repeated(tasks: Sequence[Json], attempt: Callable[[Sequence[Json], bool], _Attempt]) -> Iterator[Json | None]:
    """Run tasks, and repeat those whose worker died. `attempt` takes tasks, and whether this is their first attempt."""
    lost = yield from attempt(tasks, True)
    for _ in range(_REPEATS):
        if lost:
            lost = yield from attempt([task for task, _ in lost], False)
    for task, error in lost:
        yield _failed(task, error)


def _failed(task: Json, error: BaseException) -> Json:
    text = " ".join(str(error).split())
    if len(text) > 2 * _SAID:  # a traceback begins with the worker, and ends with the error
        text = f"{text[:_SAID]} ... {text[-_SAID:]}"
    cause = f"{type(error).__name__}: {text}"
    return {"path": task["path"], "error": f"its worker died or failed each time ({cause}). Check its memory"}


class Processes:
    """Processes of this machine, as an executor. They are kept between calls, since each takes seconds to start.

    If a process dies, its task is repeated last, when no other task runs.

    Args:
        jobs: Number of processes.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        # A pool breaks if a process dies. With a pool per process, the task that was running in it is known.
        self._idle: list[ProcessPoolExecutor] = []

    def map(self, call: Call, tasks: Sequence[Json]) -> Iterator[Json | None]:
        """Run tasks.

        Args:
            call: Function that takes a task and returns its result.
            tasks: Tasks to run.
        """
        return _repeated(tasks, lambda part, is_first: self._run(call, part, self._jobs if is_first else 1))

    def _run(self, call: Call, tasks: Sequence[Json], jobs: int) -> _Attempt:
        waiting, lost = deque(tasks), list[tuple[Json, BaseException]]()
        running: dict[Future[Json], tuple[Json, ProcessPoolExecutor]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    pool = self._idle.pop() if self._idle else _pool()
                    with contextlib.suppress(BrokenExecutor):  # the process died while it was idle
                        future = pool.submit(call, waiting[0])
                        running[future] = waiting.popleft(), pool
                ended = wait(running, _TICK_S, FIRST_COMPLETED).done
                if not ended:
                    yield None
                for future in ended:
                    task, pool = running.pop(future)
                    error = future.exception()
                    if not isinstance(error, BrokenExecutor):
                        self._idle.append(pool)
                    if error is None:
                        yield future.result()
                    else:
                        lost.append((task, error))
        finally:
            for _, pool in running.values():
                _kill(pool)
        return lost

    def close(self) -> None:
        """End the processes."""
        for pool in self._idle:
            _kill(pool)
        self._idle.clear()


def _kill(pool: ProcessPoolExecutor) -> None:
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _pool() -> ProcessPoolExecutor:
    """Return a pool of one process. It is spawned, since the threads of obstore and torch do not survive a fork."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=begin, initargs=(os.getpid(),))


def on_slurm(
    call: Call, tasks: Sequence[Json], folder: str, files_per_job: int | None = None, **parameters: Any
) -> Iterator[Json | None]:
    """Run tasks as jobs of SLURM, which submitit submits in arrays. If a job dies, each of its tasks gets a job of its own.

    Args:
        call, tasks: See `Processes.map`.
        folder: Folder for submitit's files, which all nodes share.
        files_per_job: Number of tasks per job. Default: the number that results in at most 1,000 jobs.
        parameters: Arguments of `submitit.SlurmExecutor.update_parameters`, such as `partition`, or `time` in minutes.

    Raises:
        DaliStreamError: If SLURM does not accept a job.
    """
    import submitit

    cluster = submitit.SlurmExecutor(folder)
    cluster.update_parameters(**parameters)
    per_job = files_per_job or max(1, -(-len(tasks) // _MOST_JOBS))
    return _repeated(tasks, lambda part, is_first: _run_on_slurm(cluster, call, part, per_job if is_first else 1))


def _run_on_slurm(cluster: Any, call: Call, tasks: Sequence[Json], per_job: int) -> _Attempt:
    import cloudpickle  # submitit depends on it

    waiting, lost = deque(tasks[at : at + per_job] for at in range(0, len(tasks), per_job)), list[tuple[Json, BaseException]]()
    running: list[tuple[Any, Sequence[Json]]] = []
    try:
        while waiting or running:
            parts = [waiting.popleft() for _ in range(min(len(waiting), _MOST_JOBS - len(running)))]
            if parts:
                try:
                    jobs = cluster.map_array(functools.partial(call_each, cloudpickle.dumps(call)), parts)
                except Exception as error:  # sbatch is missing, or rejects the jobs
                    raise DaliStreamError(f"SLURM does not accept the jobs: {' '.join(str(error).split())[:300]}") from error
                running += zip(jobs, parts, strict=True)
            time.sleep(_POLL_S)
            yield None
            for job, part in [each for each in running if each[0].done()]:
                running.remove((job, part))
                try:
                    results = job.result()
                except Exception as error:  # the job was killed
                    lost += [(task, error) for task in part]
                else:
                    yield from results
    finally:
        for job, _ in running:
            job.cancel()
    return lost


def on_ray(call: Call, tasks: Sequence[Json], address: str | None = None, jobs: int = 1000) -> Iterator[Json | None]:
    """Run tasks on a Ray cluster. Ray repeats a task up to three times if its worker or node dies.

    Args:
        call, tasks: See `Processes.map`.
        address: Address of the cluster, or "auto". Default: None, which starts Ray on this machine.
        jobs: Maximum number of tasks at a time. Default: 1,000.
    """
    import ray

    if not ray.is_initialized():
        # "local" starts Ray also if this machine runs another one. It ends with this process, since a start takes seconds.
        ray.init(address or "local", log_to_driver=False, include_dashboard=False if address is None else None)
    remote: Any = ray.remote(num_cpus=1, max_retries=3)(call_each)
    pickled = ray.cloudpickle.dumps(call)
    waiting, running = deque(tasks), dict[Any, Json]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.popleft()
                running[remote.remote(pickled, [task])] = task
            ended = ray.wait(list(running), timeout=_TICK_S)[0]
            if not ended:
                yield None
            for reference in ended:
                task = running.pop(reference)
                try:
                    [result] = ray.get(reference)
                except ray.exceptions.RayError as error:
                    result = _failed(task, error)
                yield result
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            for reference in running:
                ray.cancel(reference, force=True)

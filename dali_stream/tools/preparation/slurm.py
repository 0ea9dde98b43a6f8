"""Adapter that makes SLURM, through submitit, a `concurrent.futures.Executor`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any

MOST = 1000  # maximum number of jobs per array
_POLL_S = 1.0  # interval of submitting and polling jobs


class SlurmExecutor(Executor):
    """Executor that runs calls as jobs of SLURM. Calls that are submitted within a second become one job array.

    Args:
        folder: Folder for submitit's files, which all nodes share.
        parameters: Arguments of `submitit.SlurmExecutor.update_parameters`, such as `partition`, or `time` in minutes.
    """

    def __init__(self, folder: str | os.PathLike[str], **parameters: Any) -> None:
        import submitit

        self._slurm = submitit.SlurmExecutor(os.fspath(folder))
        self._slurm.update_parameters(**parameters)
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self._jobs: list[tuple[Future[Any], Any]] = []
        self._stop = threading.Event()
        threading.Thread(target=self._poll, name="dali_stream slurm", daemon=True).start()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future of `call(*args)`, which runs in a job."""
        future: Future[Any] = Future()
        self._waiting.put((future, call, args))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop watching the jobs, and cancel those that have not ended."""
        self._stop.set()
        for _, job in self._jobs:
            job.cancel()

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            part: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
            with contextlib.suppress(Empty):
                while len(part) < MOST:
                    part.append(self._waiting.get_nowait())
            futures, calls = [each[0] for each in part], [each[1:] for each in part]
            try:
                jobs = self._slurm.map_array(_call, calls) if calls else []
                self._jobs += zip(futures, jobs, strict=True)
            except Exception as error:  # sbatch is missing, or rejects the jobs
                for future in futures:
                    future.set_exception(error)
            for future, job in [each for each in self._jobs if each[1].done()]:
                self._jobs.remove((future, job))
                try:
                    future.set_result(job.result())
                except Exception as error:  # the job was killed
                    future.set_exception(error)


def _call(call_and_arguments: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    call, arguments = call_and_arguments
    return call(*arguments)

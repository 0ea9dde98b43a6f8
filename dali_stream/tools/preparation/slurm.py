"""Adapter that makes SLURM, through submitit, a `concurrent.futures.Executor`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from dali_stream.tools.preparation.executors import settle

MOST = 1000  # maximum number of jobs per array
_POLL_S = 1.0  # interval of submitting and polling jobs


class SlurmExecutor(Executor):
    """Executor that runs calls as jobs of SLURM. Calls that are submitted within a second become one job array.

    Args:
        folder: Folder for submitit's files, which all nodes share.
        parameters: Arguments of `submitit.SlurmExecutor.update_parameters`, such as `partition`, or `time` in minutes.
    """

    def __init__(self, folder: str, **parameters: Any) -> None:
        import submitit

        self._slurm = submitit.SlurmExecutor(folder)
        self._slurm.update_parameters(**parameters)
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._jobs: dict[Future[Any], submitit.Job[Any]] = {}
        self._stop = threading.Event()
        threading.Thread(target=self._poll, name="dali_stream slurm", daemon=True).start()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future of `call(*args, **kwargs)`, which runs in a job."""
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: call(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop watching the jobs, and cancel those that have not ended."""
        self._stop.set()
        for job in list(self._jobs.values()):
            job.cancel()

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            part = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST))]
            try:
                jobs = self._slurm.submit_array([call for _, call in part]) if part else []
                self._jobs |= zip([future for future, _ in part], jobs, strict=True)
            except Exception as error:  # sbatch is missing, or rejects the jobs
                for future, _ in part:
                    future.set_exception(error)
            for future in [each for each, job in self._jobs.items() if job.done()]:
                settle(future, self._jobs.pop(future).result)  # raises an error if the job was killed

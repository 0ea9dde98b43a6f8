"""Adapter that makes Ray a `concurrent.futures.Executor`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class RayExecutor(Executor):
    """Executor that runs calls as tasks of a Ray cluster. Ray repeats a task if its worker or node dies.

    Args:
        address: Address of the cluster, or "auto". Default: None, which starts Ray on this machine.
        retries: Maximum number of times that a task is repeated. Default: 3.
    """

    def __init__(self, address: str | None = None, retries: int = 3) -> None:
        import ray

        self._own = not ray.is_initialized()
        if self._own:
            ray.init(address, log_to_driver=False, include_dashboard=False if address is None else None)
        self._ray, self._running = ray, set[Any]()
        self._remote: Any = ray.remote(num_cpus=1, max_retries=retries)(lambda call, args: call(*args))

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future of `call(*args)`, which runs in the cluster."""
        reference = self._remote.remote(call, args)
        self._running.add(reference)
        future: Future[Any] = reference.future()
        future.add_done_callback(lambda _: self._running.discard(reference))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the tasks that have not ended, and disconnect from a cluster that this executor has connected to."""
        for reference in list(self._running):
            self._ray.cancel(reference, force=True)
        if self._own:
            self._ray.shutdown()

"""Mutual exclusion of the DALI pipelines that use the same GPU."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Generator
from typing import Protocol


class Runs(Protocol):
    """Pipeline that may have a run in progress."""

    def finish_run(self) -> None:
        """Wait for the run in progress, if any. Any thread that holds the lock of the turns may call this method."""
        ...


class Turns:
    """Lock that lets only one pipeline of a device run at a time.

    The pipelines of a process share DALI's memory pool of the device, and DALI's decoder frees buffers without synchronization
    (`DeviceBuffer` in the sources of DALI 2.4). With B-frames, one pipeline could still be copying a buffer that another one
    has allocated again. This was not observed: two Loaders with the lock delivered right frames on an H100.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._last: weakref.ReferenceType[Runs] | None = None

    def begin(self, pipeline: Runs) -> None:
        """Wait for the run of another pipeline before `pipeline` begins a run. The caller holds the lock."""
        last = self._last() if self._last is not None else None
        if last is not None and last is not pipeline:
            last.finish_run()
        self._last = weakref.ref(pipeline)

    @contextlib.contextmanager
    def alone(self) -> Generator[None, None, None]:
        """Context manager for running a pipeline to its end, while no other pipeline of the device runs."""
        with self.lock:
            if self._last is not None and (last := self._last()) is not None:
                last.finish_run()
            yield


_turns: dict[int | None, Turns] = {}
os.register_at_fork(after_in_child=_turns.clear)  # a thread of the parent may have held a lock


def turns(device: int | None) -> Turns:
    """Return the lock of a CUDA device. For None, each call returns a new lock, because pipelines on the CPU need none."""
    return Turns() if device is None else _turns.setdefault(device, Turns())

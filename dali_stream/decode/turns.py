"""Turns of the DALI pipelines that use one GPU."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Generator
from typing import Protocol


class Runs(Protocol):
    """A pipeline whose runs may be pending."""

    def finish_run(self) -> None:
        """Wait for the run in progress, if any. Any thread that holds the lock of the turns may call it."""
        ...


class Turns:
    """Lets one pipeline of a device run at a time.

    Pipelines of a process share DALI's memory pool of the device, and its decoder frees buffers without synchronisation
    (`DeviceBuffer`, read in DALI 2.4's sources). With B-frames, a copy that is pending in one pipeline could read memory that
    another one has got. Not seen on a GPU.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._last: weakref.ReferenceType[Runs] | None = None

    def begin(self, pipeline: Runs) -> None:
        """Wait for the run of another pipeline, before `pipeline` begins one. The caller holds the lock."""
        last = self._last() if self._last is not None else None
        if last is not None and last is not pipeline:
            last.finish_run()
        self._last = weakref.ref(pipeline)

    @contextlib.contextmanager
    def alone(self) -> Generator[None, None, None]:
        """Run a pipeline to its end while no other one runs."""
        with self.lock:
            if self._last is not None and (last := self._last()) is not None:
                last.finish_run()
            yield


_turns: dict[int | None, Turns] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.clear)  # a thread of the parent may have held a lock


def turns(device: int | None) -> Turns:
    """Return the turns of a CUDA device. Pipelines without a device do not share any."""
    return Turns() if device is None else _turns.setdefault(device, Turns())

"""Orderly end of a run on Ctrl-C and on SIGTERM, which SLURM, Kubernetes and torchrun send before they kill a process."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import torch
from torch import distributed


class Preemption:
    """Signal handler that makes all ranks stop at the same step.

    If a rank stopped alone, the others would wait forever for its gradients. Create the handler in the main thread, before any
    long operation.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Signal that this rank has received, or after `agreed` the highest signal of all ranks. 0 for no signal."""
        self._group: distributed.ProcessGroup | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def agreed(self) -> bool:
        """Return whether any rank has received a signal. All ranks must call this at the same step. The GPU is not used."""
        if distributed.is_initialized():
            self._group = self._group or distributed.new_group(backend="gloo")
            highest = torch.tensor(self.signal, dtype=torch.int32)
            distributed.all_reduce(highest, distributed.ReduceOp.MAX, self._group)
            self.signal = max(self.signal, agreed := int(highest))  # a signal that arrives in between counts at the next call
            return agreed != 0
        return self.signal != 0

    def leave(self) -> NoReturn:
        """End this process with the exit code 128 plus the signal, as shells do. Call this after everything is saved."""
        # After one process has ended, torchrun sends SIGTERM to the others. Python removes its own handlers at shutdown, so the
        # signal must be ignored until the end, or it would change the exit code.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + self.signal)

    def _note(self, number: int, _: object) -> None:
        self.signal = max(self.signal, number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second Ctrl-C ends the process at once

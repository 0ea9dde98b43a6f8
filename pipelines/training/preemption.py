"""An orderly end on SIGTERM, which is how SLURM, Kubernetes and torchrun ask for one before they kill, and on Ctrl-C."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import torch
from torch import distributed


class Preemption:
    """Notes the signal, and lets the ranks agree on the step at which they stop.

    To be made before anything that takes long, on the main thread. A rank that stopped by itself would leave the others
    waiting for its gradients for ever.
    """

    def __init__(self) -> None:
        self.signal = 0
        """The signal that has asked for an end, of any rank since the last `agreed`; 0: none."""
        self._group: distributed.ProcessGroup | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def agreed(self) -> bool:
        """Whether any rank has been asked to end. All ranks have to call it at the same step; it does not touch the GPU."""
        if distributed.is_initialized():
            self._group = self._group or distributed.new_group(backend="gloo")
            found = torch.tensor(self.signal, dtype=torch.int32)
            distributed.all_reduce(found, distributed.ReduceOp.MAX, self._group)
            self.signal = int(found)
        return self.signal != 0

    def leave(self) -> NoReturn:
        """Ends this process when all is saved, with the shells' exit code of a program that the signal ended."""
        # torchrun sends SIGTERM to the others once one has ended, and Python's own handlers are gone while it shuts down.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + self.signal)

    def _note(self, number: int, _: object) -> None:
        self.signal = max(self.signal, number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second one is not to wait for anything

"""An orderly end on SIGTERM, which is how SLURM, Kubernetes and torchrun ask for one before they kill."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import torch
from torch import distributed

EXIT_CODE = 128 + signal.SIGTERM  # by the shells' convention: a program that a signal ended


class Preemption:
    """Notes SIGTERM, and lets the ranks agree on the step at which they stop.

    To be made before anything that takes long, on the main thread. A rank that stopped by itself would leave the others
    waiting for its gradients for ever.
    """

    def __init__(self) -> None:
        self._asked = False
        self._group: distributed.ProcessGroup | None = None
        signal.signal(signal.SIGTERM, self._note)

    def agreed(self) -> bool:
        """Whether any rank has been asked to end. All ranks have to call it at the same step; it does not touch the GPU."""
        if not distributed.is_initialized():
            return self._asked
        self._group = self._group or distributed.new_group(backend="gloo")
        asked = torch.tensor(self._asked, dtype=torch.int32)
        distributed.all_reduce(asked, distributed.ReduceOp.MAX, self._group)
        return bool(asked)

    def leave(self) -> NoReturn:
        """Ends this process with the conventional exit code, when all is saved."""
        # torchrun sends SIGTERM to the others once one has ended, and Python's own handlers are gone while it shuts down.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(EXIT_CODE)

    def _note(self, *_: object) -> None:
        self._asked = True

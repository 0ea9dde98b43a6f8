"""Start of a process of a pool. This module imports little, so that it can state first what the process does not import."""

from __future__ import annotations

import ctypes
import os
import signal

from dali_stream.system.torchcodec_import import compile_nothing


def begin(parent: int) -> None:
    """Prepare a process. It ends with its parent, ignores Ctrl-C, compiles nothing, and uses one thread.

    Args:
        parent: Number of the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
    compile_nothing()
    import torch

    torch.set_num_threads(1)

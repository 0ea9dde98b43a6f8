"""Processes in which executors run tasks. This module imports little, so that it can state first what they do not import."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
from collections.abc import Sequence
from typing import Any

from dali_stream.system.torchcodec_import import compile_nothing


def begin(parent: int) -> None:
    """Prepare a process of a pool. It ends with its parent, ignores Ctrl-C, compiles nothing, and uses one thread.

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


def call_each(call: bytes, tasks: Sequence[Any]) -> list[Any]:
    """Call a function with each task, in a process that compiles nothing. Return the results.

    Args:
        call: Function pickled by cloudpickle. Its module may import torchcodec.
        tasks: Its arguments.
    """
    compile_nothing()
    function = pickle.loads(call)
    return [function(task) for task in tasks]

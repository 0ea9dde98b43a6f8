"""What this process is in a run: its rank, its cores, its GPU."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import platform
import re
import sys
from pathlib import Path

from dali_stream.errors import DaliStreamError


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The arguments where given; else Accelerate's, torch.distributed's, RANK and WORLD_SIZE, or 0 of 1.

    Raises:
        ValueError: only one of the two is given, or the environment holds no integers.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world_size is {world_size}; give both or neither")
    if rank is not None and world_size is not None:
        try:
            return operator.index(rank), operator.index(world_size)
        except TypeError:
            raise ValueError(f"rank is {rank!r} and world_size is {world_size!r}; both are integers") from None
    accelerate = sys.modules.get("accelerate.state")  # not imported here: a program that uses Accelerate has imported it
    if accelerate is not None and accelerate.PartialState._shared_state:
        state = accelerate.PartialState()
        return state.process_index, state.num_processes
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return int(found[0]), int(found[1])
    except ValueError:
        raise ValueError(f"RANK is {found[0]!r} and WORLD_SIZE is {found[1]!r} in the environment; both are integers") from None


def refuse_workers() -> None:
    """Raises DaliStreamError in a worker of a DataLoader."""
    import torch.utils.data

    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        raise DaliStreamError(
            f"this Loader is made in worker {worker.id} of the {worker.num_workers} of a torch DataLoader, and each of them "
            "would deliver the same batches. Make it in the process that trains and iterate it there, without a DataLoader: it "
            "decodes in its own threads, see threads="
        )


def cores() -> int:
    """Cores for this process: those it may run on, shared with the other ranks of this machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(available // max(int(local) if local.isdigit() else 1, 1), 1)


def reading_threads(remote: bool) -> int:
    """Threads for work that reads and decodes: one per core, and at least 16 where each mostly waits for answers."""
    return max(cores(), 16) if remote else cores()


def same_python(script: str | os.PathLike[str]) -> list[str]:
    """The command that runs a script in another process, with the same modules as here, wherever they come from.

    `python -m`, and a script's own folder, would put other folders in front of them.
    """
    code = f"import sys, runpy; sys.path[:] = {sys.path!r}; runpy.run_path({os.fspath(script)!r}, run_name='__main__')"
    return [sys.executable, "-c", code]


def processor() -> str:
    """The processor's name, for reports."""
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def gpu(device: str) -> int | None:
    """Index of the CUDA device that "auto", "cpu", "cuda" or "cuda:1" names; None for the CPU.

    Raises:
        ValueError: another name, or a GPU that torch does not find.
    """
    # "cpu:0" is Accelerate's name for the CPU of one of several processes.
    found = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", "cpu" if str(device) == "cpu:0" else str(device))
    if not found or (found[2] and found[1] != "cuda"):
        raise ValueError(f'device is {device!r}; allowed are "auto", "cpu", "cuda" and "cuda:<index>"')
    if found[1] == "cpu" or (found[1] == "auto" and not _has_driver()):
        return None
    import torch

    if not torch.cuda.is_available():
        if found[1] == "auto":
            return None
        raise ValueError(f'device is {device!r}, and torch {torch.__version__} finds no GPU; use device="cpu" or "auto"')
    local = os.environ.get("LOCAL_RANK", "")
    # A launcher may show each process all GPUs of the machine, or only its own.
    own = local.isdigit() and int(local) < torch.cuda.device_count()
    default = int(local) if own else torch.cuda.current_device()
    index = int(found[2]) if found[2] else default
    if index >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, which is GPU {index}, and there are {torch.cuda.device_count()}")
    return index


def _has_driver() -> bool:
    """Whether there is a CUDA driver: spares loading torch, which is slow, to learn that there is no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def trim_memory() -> None:
    """Returns free memory of the heaps to the system, with glibc's malloc_trim; elsewhere it does nothing.

    glibc keeps freed blocks of decoded frames in each thread's heaps, where others do not always fit: an aligned block is not
    used again for another of its size while a small one beside it lives on (its bug 14581).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

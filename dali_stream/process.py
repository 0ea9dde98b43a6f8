"""Rank, cores and GPU of this process."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dali_stream.errors import DaliStreamError


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of ranks.

    Attributes:
        rank: Rank of this process, from 0.
        world_size: Number of ranks.
        source: Source of both numbers.
    """

    rank: int
    world_size: int
    source: Literal["arguments", "process group", "environment"]

    def check(self, owner: str) -> None:
        """Check that these ranks match the current process group.

        A constructor must not check this. Frameworks such as Lightning create the process group later, and an error in one
        process before that would leave the others waiting. Explicit arguments may differ from the process group, since
        processes that share a model, as in tensor parallelism, need the same samples.

        Args:
            owner: Class of the object that uses these ranks, for the message.

        Raises:
            DaliStreamError: If the process group has another rank or world size. If no process group exists, the environment is
                checked instead. It is also an error if the environment has only one of `RANK` and `WORLD_SIZE`, unless that is
                RANK=0 or WORLD_SIZE=1.
        """
        if self.source == "arguments":
            return
        group = _process_group()
        if group is None and self.source == "environment":
            _check_environment(owner)
            now = ranks(None, None)
            if (now.rank, now.world_size) != (self.rank, self.world_size):
                group = _ProcessGroup("the environment", now.rank, now.world_size)
        if group is not None and (group.rank, group.world_size) != (self.rank, self.world_size):
            raise DaliStreamError(
                f"This {owner} was made as rank {self.rank} of {self.world_size}, but {group.name} has rank {group.rank} of "
                f"{group.world_size}. Make the {owner} after the process group is initialized (with Lightning in "
                "train_dataloader() or setup()), or pass rank= and world_size="
            )


class _ProcessGroup(NamedTuple):
    name: str
    rank: int
    world_size: int


def ranks(rank: int | None, world_size: int | None) -> Ranks:
    """Return the rank and the number of ranks.

    They are the arguments if these are not None, otherwise those of torch.distributed or Accelerate if initialized, otherwise
    the environment variables `RANK` and `WORLD_SIZE` if both are set, otherwise 0 and 1. See also `Ranks.check`.

    Raises:
        ValueError: If only one argument is None, or if the arguments or the environment variables are not integers.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must both be passed or both be None, got {rank} and {world_size}")
    if rank is not None and world_size is not None:
        try:
            return Ranks(operator.index(rank), operator.index(world_size), "arguments")
        except TypeError:
            raise ValueError(f"rank and world_size must be integers, got {rank!r} and {world_size!r}") from None
    if group := _process_group():
        return Ranks(group.rank, group.world_size, "process group")
    values = _environment()
    return Ranks(*(values["RANK"], values["WORLD_SIZE"]) if len(values) == 2 else (0, 1), "environment")


def _process_group() -> _ProcessGroup | None:
    # Neither module is imported here: a program that has a process group has imported its module.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return _ProcessGroup("torch.distributed", distributed.get_rank(), distributed.get_world_size())
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.PartialState._shared_state:
        state = accelerate.PartialState()
        return _ProcessGroup("Accelerate", state.process_index, state.num_processes)
    return None


def _environment() -> dict[str, int]:
    """Return {name: value} of the environment variables `RANK` and `WORLD_SIZE` that are set."""
    values = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        return {name: int(value) for name, value in values.items()}
    except ValueError:
        text = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"RANK and WORLD_SIZE in the environment must be integers, got {text}") from None


def _check_environment(owner: str) -> None:
    values = _environment()
    if len(values) == 1 and values not in ({"RANK": 0}, {"WORLD_SIZE": 1}):
        [(name, value)] = values.items()
        missing = "WORLD_SIZE" if name == "RANK" else "RANK"
        raise DaliStreamError(
            f"{name} is {value} in the environment, but {missing} is not set. Set both, or make the {owner} after the process "
            "group is initialized (with Lightning in train_dataloader() or setup()), or pass rank= and world_size="
        )


def refuse_workers() -> None:
    """Raise DaliStreamError if this process is a worker of a DataLoader."""
    import torch.utils.data

    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        raise DaliStreamError(
            f"a Loader must be made and iterated in the training process, got worker {worker.id} of the {worker.num_workers} "
            "of a torch DataLoader, each of which would deliver the same batches. Use it without a DataLoader, because it "
            "decodes in its own threads (num_threads=)"
        )


def cores() -> int:
    """Return the number of cores for this process: all cores that it may run on, divided by the number of local ranks."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(available // local_ranks(), 1)


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(int(local), 1) if local.isdigit() else 1


def reading_threads(remote: bool) -> int:
    """Return the number of threads for reading and decoding: one per core, and at least 16 if they wait for a network."""
    return max(cores(), 16) if remote else cores()


def local_rank() -> int:
    """Return the number of this process among those of its machine, or 0 if the launcher does not say it."""
    names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:  # a process of srun, and not the script of sbatch
        names.append("SLURM_LOCALID")
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), 0)


def same_python(script: str | os.PathLike[str]) -> list[str]:
    """Return the command that runs a script in another process with the same module search path as this one.

    `python SCRIPT` and `python -m` would search another folder first.
    """
    code = f"import sys, runpy; sys.path[:] = {sys.path!r}; runpy.run_path({os.fspath(script)!r}, run_name='__main__')"
    return [sys.executable, "-c", code]


def processor() -> str:
    """Return the name of the processor, for reports."""
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.processor() or platform.machine()


def gpu(device: str) -> int | None:
    """Return the index of a CUDA device, or None for the CPU.

    Args:
        device: Name of the device: "auto", "cpu", "cuda", or an index such as "cuda:1". "cuda" is the GPU with the index
            `LOCAL_RANK` if it is visible to this process, otherwise torch's current device. "auto" is the same GPU if torch
            finds one, otherwise the CPU.

    Raises:
        ValueError: If the name is invalid, or if torch does not find the GPU.
    """
    # "cpu:0" is Accelerate's name for the CPU of one of several processes.
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", "cpu" if str(device) == "cpu:0" else str(device))
    if not match or (match[2] and match[1] != "cuda"):
        raise ValueError(f'device must be "auto", "cpu", "cuda" or "cuda:<index>", got {device!r}')
    if match[1] == "cpu" or (match[1] == "auto" and not _has_driver()):
        return None
    import torch

    if not torch.cuda.is_available():
        if match[1] == "auto":
            return None
        raise ValueError(f'device must be "cpu" or "auto", because torch {torch.__version__} finds no GPU, got {device!r}')
    local = os.environ.get("LOCAL_RANK", "")
    # Some launchers make all GPUs visible to each process, and others only its own GPU.
    own = local.isdigit() and int(local) < torch.cuda.device_count()
    default = int(local) if own else torch.cuda.current_device()
    index = int(match[2]) if match[2] else default
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one of {torch.cuda.device_count()} GPUs that torch finds, got {device!r}, which is GPU {index}"
        )
    return index


def _has_driver() -> bool:
    """Return whether a CUDA driver is installed. Importing torch to find this out would be slow."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def trim_memory() -> None:
    """Return free memory of the heaps to the operating system, with glibc's malloc_trim. Do nothing without glibc.

    glibc keeps freed blocks of decoded frames in the heaps of the threads, and cannot always reuse them: a freed aligned block
    is not reused for a block of the same size while a small block next to it is in use (glibc bug 14581).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

"""Rank, cores and GPU of this process."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dali_stream.errors import DaliStreamError
from dali_stream.system.cgroups import cpu_quota, cpuset_cores

_LOCAL_RANKS = "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"  # of torchrun, Open MPI and MPICH
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from malloc.h


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


@dataclass(frozen=True)
class LocalRanks:
    """Number of ranks on this machine.

    Attributes:
        count: Number of ranks, at least 1.
        source: Environment variable that contains the number. Empty if the number is unknown, so that `count` is 1.
    """

    count: int
    source: str = ""


def local_ranks(environment: Mapping[str, str] = os.environ) -> LocalRanks:
    """Return the number of ranks on this machine, from the environment variables of torchrun, Open MPI, MPICH or SLURM.

    Args:
        environment: Environment variables. Default: those of this process.
    """
    counts = {name: environment.get(name, "") for name in _LOCAL_RANKS}
    if {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys():  # set by srun; the shell of sbatch is a single process
        tasks, node = environment.get("SLURM_STEP_TASKS_PER_NODE", ""), environment.get("SLURM_NODEID", "")
        counts["SLURM_STEP_TASKS_PER_NODE"] = _tasks_of_node(tasks, node)
        counts["SLURM_NTASKS_PER_NODE"] = environment.get("SLURM_NTASKS_PER_NODE", "")
    return next((LocalRanks(int(text), name) for name, text in counts.items() if text.isdecimal() and int(text)), LocalRanks(1))


def _tasks_of_node(tasks: str, node: str) -> str:
    """Return the number of tasks on a node from SLURM's list for all nodes: "2(x3),1" means 2, 2, 2 and 1. Empty if unknown."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    nodes = [count for count, repeated in counts for _ in range(int(repeated or 1))]
    return nodes[int(node)] if node.isdecimal() and int(node) < len(nodes) else ""


@dataclass(frozen=True)
class Cores:
    """Facts that determine how many CPU cores this process may use.

    Attributes:
        affinity: Number of cores that this process may run on.
        cpuset: Number of cores in the cpuset of the cgroup, or of the machine without one.
        quota: CPU quota of the cgroup in cores. None without a quota.
        ranks: Ranks on this machine.
    """

    affinity: int
    cpuset: int
    quota: float | None = None
    ranks: LocalRanks = LocalRanks(1)

    @property
    def sharing(self) -> int:
        """Number of local ranks that run on the same cores as this one.

        If the launcher pins each rank to cores of its own, this is 1. If it pins half of the ranks to each half of the cores,
        this is half of them. Without pinning, all local ranks share all cores.
        """
        return max(round(self.ranks.count * self.affinity / self.cpuset), 1)

    @property
    def count(self) -> int:
        """Number of cores for this process, at least 1. All local ranks share the quota, whatever cores they run on."""
        cores = self.affinity // self.sharing
        return max(cores if self.quota is None else min(cores, int(self.quota / self.ranks.count)), 1)

    def __str__(self) -> str:
        """Explanation of `count`."""
        ranks = f" for {self.ranks.count} local ranks ({self.ranks.source})" if self.ranks.count > 1 else ""
        if self.quota is not None and self.quota / self.ranks.count < self.affinity // self.sharing:
            return f"the cgroup has a CPU quota of {self.quota:.3g} cores{ranks}"
        if self.sharing > 1:
            return f"{self.sharing} of {self.ranks.count} local ranks ({self.ranks.source}) share {self.affinity} cores"
        return f"this process may run on {self.affinity} of {self.cpuset} cores"


def available_cores(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Cores:
    """Return the facts that determine how many CPU cores this process may use.

    Args:
        root: Root of the file system with the cgroups. Default: "/".
        environment: Environment variables. Default: those of this process.
    """
    machine = os.cpu_count() or 1
    return Cores(len(os.sched_getaffinity(0)), cpuset_cores(root) or machine, cpu_quota(root), local_ranks(environment))


def cores() -> int:
    """Return the number of CPU cores for this process. See `Cores.count`."""
    return available_cores().count


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

    During an epoch of the recording g1 at 224×224 with memory_budget="200MiB", on 2 shared cores of an AMD EPYC, 2026-11-25,
    13 calls took 0.06 s of 16 s of CPU time, and the process had 748 MB at most, and 793 MB without them. A threshold of 1 MiB
    for mmap, set once with mallopt, gave 705 MB but took 20 s, and would also apply to all other code in the process.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory of this process for later allocations, up to 256 MiB. Do nothing without glibc.

    A function that allocates a frame for each of its steps then gets memory that it has used before, which needs no page
    faults. LeRobot's transforms of frames of 480×640 took 4 % less CPU time, on 2 cores of an AMD EPYC, 2026-11-28.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc allows
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)

"""Memory that this process may use."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from dali_stream.checks.arguments import budget_text, byte_count
from dali_stream.errors import MemoryBudgetError
from dali_stream.system.cgroups import cgroup_values
from dali_stream.system.ranks import local_ranks

_DEFAULT_BUDGET = 4 << 30  # largest default of `memory_budget`, in bytes
# Memory of a process without frames in the budget, in bytes. With torch for CPUs, the process of a Loader takes about 400 MB,
# and a decode process 140 MB and 8 MiB per thread.
PROCESS_BYTES, DECODE_PROCESS_BYTES = 512 << 20, 256 << 20
_UNLIMITED = 1 << 60  # larger limits mean no limit: without a limit, version 1 of cgroups reports a number near 2^63


class MemoryLimit(NamedTuple):
    """Limit of the memory of this process.

    Attributes:
        size: Limit in bytes.
        owner: Owner of the limit for messages, such as "this machine".
    """

    size: int
    owner: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Return the memory of this machine, or the limit of a cgroup of this process if that is lower.

    Args:
        root: Root of the file system with the cgroups. Default: "/".
    """
    machine = MemoryLimit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")
    size = cgroup_memory_limit(root)
    return machine if size is None else min(machine, MemoryLimit(size, "the cgroup of this process"))


def is_in_memory(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder, which need not exist yet, is on a file system in memory, such as /dev/shm."""
    path = Path(folder).expanduser().resolve()
    with contextlib.suppress(OSError):  # no Linux
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        below = [(len(place), kind) for place, kind in mounts if path.is_relative_to(place.replace("\\040", " "))]
        return max(below, default=(0, ""))[1] in ("tmpfs", "ramfs")
    return False


def file_system_size(folder: str | os.PathLike[str]) -> int:
    """Return the size in bytes of the file system of a folder, which need not exist yet. 0 if it has no limit."""
    path = Path(folder).expanduser().absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if os.path.exists(each))).total


def fits(size: int | None) -> bool:
    """Return whether each rank of this machine may use `size` bytes. False if `size` is None."""
    return size is not None and size * local_ranks().count <= memory_limit().size


class Budget(NamedTuple):
    """Argument `memory_budget` of a Loader.

    Attributes:
        size: Memory budget in bytes.
        reason: Explanation of the number, for the log.
    """

    size: int
    reason: str

    def __str__(self) -> str:
        return f'memory_budget="{budget_text(self.size)}" ({self.reason})'


def has_room_for_process(limit: MemoryLimit, ranks: int) -> bool:
    """Return whether each of the ranks of this machine has enough memory for another process, see `PROCESS_BYTES`."""
    return limit.size // ranks >= 4 * PROCESS_BYTES


def budget(given: int | str | None, limit: MemoryLimit, ranks: int, process_bytes: int) -> Budget:
    """Return the memory budget of a Loader.

    The default is 4 GiB, but at most a quarter of the limit divided by the number of ranks that share it. Training and
    validation on each rank then leave half of the memory to everything else.

    Args:
        given: Argument of the Loader. None for the default.
        limit: Memory limit of this process.
        ranks: Number of ranks on this machine.
        process_bytes: Memory of the processes of the Loader without frames, which reduces the default.

    Raises:
        ValueError: If the argument is invalid.
        MemoryBudgetError: If the argument exceeds the limit.
    """
    if given is None:
        size = (limit.size // ranks - process_bytes) // 4
        if size >= _DEFAULT_BUDGET:
            return Budget(_DEFAULT_BUDGET, "the default")
        shared = f", divided by {ranks} local ranks" if ranks > 1 else ""
        less = f", less {budget_text(process_bytes)} for its processes" if process_bytes else ""
        return Budget(size, f"the default, a quarter of the {budget_text(limit.size)} of {limit.owner}{shared}{less}")
    size = byte_count(given)
    if size > limit.size:
        raise MemoryBudgetError(
            f"memory_budget must be at most {limit.size} bytes, the memory of {limit.owner}, got {given!r}. Each rank has its "
            "own budget, and torch and the model need memory too. Leave memory_budget out to get the default"
        )
    return Budget(size, "given")


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit of the cgroup of this process in bytes, or None if it has no limit.

    Args:
        root: Root of the file system with the cgroups. Default: "/".
    """
    values = [value for name in ("memory.max", "memory.limit_in_bytes") for value in cgroup_values(root, "memory", name)]
    return min((int(value) for value in values if value.isdigit() and int(value) < _UNLIMITED), default=None)

"""Memory that this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dali_stream.process import local_ranks

_UNLIMITED = 1 << 60  # larger limits mean no limit: without a limit, version 1 of cgroups reports a number near 2^63


class MemoryLimit(NamedTuple):
    """Limit of the memory of this process.

    Attributes:
        size: Limit in bytes.
        owner: Owner of the limit for messages, such as "this machine".
    """

    size: int
    owner: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the memory of this machine, or the limit of a cgroup of this process if that is lower.

    Args:
        root: Root of the file system with the cgroups. Default: "/".

    Returns:
        Limit with its owner, or None on systems that report neither.
    """
    size = cgroup_memory_limit(root)
    limits = [] if size is None else [MemoryLimit(size, "the cgroup of this process")]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        limits.append(MemoryLimit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"))
    return min(limits, default=None)


def fits(size: int | None) -> bool:
    """Return whether each rank of this machine may use `size` bytes. False if `size` is None."""
    limit = memory_limit()
    return size is not None and (limit is None or size * local_ranks() <= limit.size)


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit of the cgroup of this process in bytes, or None if it has no limit.

    Args:
        root: Root of the file system with the cgroups. Default: "/".
    """
    values = [value for name in ("memory.max", "memory.limit_in_bytes") for value in cgroup_values(root, "memory", name)]
    return min((int(value) for value in values if value.isdigit() and int(value) < _UNLIMITED), default=None)


def cgroup_values(root: Path, controller: str, name: str) -> Iterator[str]:
    """Yield the contents of a file in the cgroup of this process and in each of its parents.

    Args:
        root: Root of the file system with the cgroups.
        controller: Controller of the file, such as "memory".
        name: Name of the file in version 1 or 2 of cgroups. No name exists in both.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2; if version 1 is mounted too, version 2 is in the folder `unified`
            folders = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        else:
            folders = [f"sys/fs/cgroup/{controller}"] if controller in controllers.split(",") else []
        for folder in folders:
            yield from _values_above(root / folder, path.strip("/"), name)


def _values_above(hierarchy: Path, path: str, name: str) -> Iterator[str]:
    """Yield the contents of a file in a cgroup and its parents.

    In a container, the root of the hierarchy may be the container's own cgroup. Then `path` may not exist below it.
    """
    group = hierarchy / path
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # a missing file, or one that is not text
            yield (folder / name).read_text().strip()
        if folder == hierarchy:
            return

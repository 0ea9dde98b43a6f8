"""Memory that this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dali_stream.process import local_ranks

# File of the limit and folder of the hierarchy, by the controllers in /proc/self/cgroup: version 2, and version 1.
_HIERARCHIES = {"": ("memory.max", "sys/fs/cgroup"), "memory": ("memory.limit_in_bytes", "sys/fs/cgroup/memory")}


class MemoryLimit(NamedTuple):
    """Number of bytes, and whose limit it is."""

    size: int
    owner: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the memory of this machine, or the limit of a cgroup of this process if that is lower.

    Args:
        root: Root of the file system with the cgroups.

    Returns:
        None on systems that tell neither.
    """
    limits = [MemoryLimit(size, "the cgroup of this process") for size in _cgroup_limits(root)]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        limits.append(MemoryLimit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"))
    return min(limits, default=None)


def fits(size: int | None) -> bool:
    """Return whether each rank of this machine may use `size` bytes. None does not fit."""
    limit = memory_limit()
    return size is not None and (limit is None or size * local_ranks() <= limit.size)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of the cgroups of this process and of all cgroups that contain them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _HIERARCHIES:
                name, folder = _HIERARCHIES[controller]
                yield from _limits_above(root / folder, path.strip("/"), name)


def _limits_above(hierarchy: Path, path: str, name: str) -> Iterator[int]:
    """Limits from a cgroup up to the root. In a container, the root may be the container's own cgroup, without the path."""
    group = hierarchy / path
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # a missing file, or "max"
            yield int((folder / name).read_text())
        if folder == hierarchy:
            return

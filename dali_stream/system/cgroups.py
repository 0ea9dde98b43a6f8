"""Control groups of this process: its CPU quota, its cores, and other limits that the files of a group contain."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of the cgroup in cores, or None without a quota.

    Args:
        root: Root of the file system with the cgroups. Default: "/".
    """
    quotas = [*cgroup_values(root, "cpu", "cpu.max")]  # version 2: "quota period" or "max period"
    version_1 = (cgroup_values(root, "cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))  # -1 means no quota
    quotas += map(" ".join, zip(*version_1, strict=False))
    limited = filter(None, (re.fullmatch(r"(\d+) ([1-9]\d*)", text) for text in quotas))
    return min((int(quota) / int(period) for quota, period in (each.groups() for each in limited)), default=None)


def cpuset_cores(root: Path = Path("/")) -> int | None:
    """Return the number of cores in the cpuset of the cgroup, or None if the system reports no cpuset.

    Args:
        root: Root of the file system with the cgroups. Default: "/".
    """
    names = "cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"  # in version 2, in version 1, in both
    lists = [value for name in names for value in cgroup_values(root, "cpuset", name)]
    # A group cannot use cores that a group around it lacks, so the smallest set counts. A list may be empty.
    return min((_listed(text) for text in lists if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)), default=None)


def _listed(cores: str) -> int:
    """Return the number of cores in a list such as "0-47,96"."""
    ranges = [part.split("-") for part in cores.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ranges)


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

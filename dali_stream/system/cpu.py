"""CPU cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dali_stream.system.cgroups import cpu_quota, cpuset_cores
from dali_stream.system.ranks import LocalRanks, local_ranks


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
    ranks: LocalRanks = field(default_factory=lambda: LocalRanks(1))

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

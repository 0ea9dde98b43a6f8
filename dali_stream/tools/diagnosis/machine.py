"""Context of the checks of a machine, and the checks of the limits of this process: container, cores, memory and disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dali_stream.checks.arguments import budget_text
from dali_stream.system import process
from dali_stream.system.cached import cached_property
from dali_stream.system.cgroups import cpu_quota
from dali_stream.system.memory_limit import MemoryLimit, budget, cgroup_memory_limit
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding
from dali_stream.tools.isolated import Answer

CAPABILITIES = ("all", "compat32", "compute", "display", "graphics", "ngx", "utility", "video")
_GIB, _SMALL_SHM, _LITTLE_DISK = 1 << 30, 1 << 28, 1 << 30


class ProcessLimits(NamedTuple):
    """Limits of this process, for the report. Sizes are in bytes. Unknown limits are None."""

    system: str
    processor: str
    cores: int
    cpu_quota: float | None
    memory: int
    memory_limit: int | None
    shm: int | None
    disk_free: int | None


@dataclass(frozen=True)
class Machine:
    """Context of the checks of a machine.

    Attributes:
        gpus: GPUs that the driver reports. See `gpu.read_gpus`.
        answers: {name of the function in `answers`: its answer}.
        cache_dir: Folder of the cache. Default: None, which checks the working directory instead.
        environment: Environment variables. The report does not repeat their values, except for known words of NVIDIA's
            container toolkit.
        root: Root of the file system, which contains `proc`, `sys`, `run`, `dev` and `etc`. Default: "/".
    """

    gpus: Sequence[dict[str, Any]] = ()
    answers: Mapping[str, Answer] = field(default_factory=dict)
    cache_dir: str | os.PathLike[str] | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")

    @property
    def cuda(self) -> tuple[int, int] | None:
        """Newest CUDA version that the driver supports. None without a GPU."""
        return tuple(self.answers["driver"].value["cuda"]) if self.gpus else None

    @property
    def folder(self) -> Path:
        """Folder whose disk is checked: that of the cache, or the working directory.

        The cache is created on first use. Until then, the result is its closest parent that exists.
        """
        folder = Path(self.cache_dir).expanduser().absolute() if self.cache_dir else Path.cwd()
        return next(path for path in (folder, *folder.parents) if path.exists())

    @cached_property
    def limits(self) -> ProcessLimits:
        """Limits of this process."""
        shm, writable = self.root / "dev/shm", self.folder.is_dir() and os.access(self.folder, os.W_OK)
        total_kib = re.search(r"MemTotal:\s*(\d+) kB", read_text(self.root / "proc/meminfo"))
        return ProcessLimits(
            system=f"{platform.system()} {platform.release()}",
            processor=process.processor(),
            cores=len(os.sched_getaffinity(0)),
            cpu_quota=cpu_quota(self.root),
            memory=int(total_kib[1]) << 10 if total_kib else 0,
            memory_limit=cgroup_memory_limit(self.root),
            shm=shutil.disk_usage(shm).total if shm.exists() else None,
            disk_free=shutil.disk_usage(self.folder).free if writable else None,
        )


def check_container(machine: Machine) -> list[Finding]:
    """Check that NVIDIA's container toolkit makes GPUs and NVDEC available, if its environment variables are set."""
    environment, texts = machine.environment, []
    capabilities, devices = (environment.get(f"NVIDIA_{name}", "") for name in ("DRIVER_CAPABILITIES", "VISIBLE_DEVICES"))
    known = [word for word in re.split(r"[,\s]+", capabilities) if word in CAPABILITIES]
    if "NVIDIA_DRIVER_CAPABILITIES" in environment:
        texts.append(f"NVIDIA_DRIVER_CAPABILITIES has {', '.join(known) or 'nothing'}")
    if "NVIDIA_VISIBLE_DEVICES" in environment:
        named = f"{len(devices.split(','))} of the machine's GPUs"
        texts.append(f"NVIDIA_VISIBLE_DEVICES names {(devices or 'none') if devices in ('all', 'none', 'void', '') else named}")
    if not texts:
        return []
    text = "; ".join(texts)
    if devices not in ("", "none", "void") and not machine.gpus:
        remedy = "start the container with --gpus all (Docker), --nv (apptainer), or a claim to nvidia.com/gpu (Kubernetes)"
        return [Finding("machine", "container", PROBLEM, f"{text}, and no GPU is usable", remedy)]
    # libnvcuvid may be available nevertheless, as in a virtual machine that copies the variable.
    has_nvdec = any(gpu["engines"] for gpu in machine.gpus)
    if machine.gpus and capabilities and not has_nvdec and not {"all", "video"} & set(known):
        remedy = "set NVIDIA_DRIVER_CAPABILITIES=video,compute,utility (on Kubernetes, in the pod's env)"
        return [Finding("machine", "container", WARNING, f"{text}, which lacks video, so NVDEC is unavailable", remedy)]
    return [Finding("machine", "container", OK, text)]


def check_cores(machine: Machine) -> list[Finding]:
    """Check that the CPU quota of a container is not less than its number of cores."""
    cores, quota = machine.limits.cores, machine.limits.cpu_quota
    text = f"{cores} for this process"
    if quota is None or quota >= cores:
        return [Finding("machine", "cores", OK, text)]
    text += f", and the container's quota is {quota:.3g}: the kernel pauses threads beyond that"
    # A Loader's default `num_threads` follows the quota.
    remedy = f"set OMP_NUM_THREADS={max(int(quota), 1)} for torch's threads, or give the container more cores"
    return [Finding("machine", "cores", WARNING, text, remedy)]


def check_memory(machine: Machine) -> list[Finding]:
    """Check that the default memory budget and a model have enough memory."""
    total, limit = machine.limits.memory, machine.limits.memory_limit
    usable = min(total, limit or total)
    text = f"{usable / _GIB:.1f} GiB" + (f", the container's limit, of {total / _GIB:.1f}" if limit and limit < total else "")
    if usable >= 8 * _GIB:
        return [Finding("machine", "memory", OK, text)]
    default = budget(None, MemoryLimit(usable, "this machine"), 1).size
    remedy = f'give the container more memory. The default of Loader(memory_budget=...) is "{budget_text(default)}" here'
    return [Finding("machine", "memory", WARNING, text, remedy)]


def check_shared_memory(machine: Machine) -> list[Finding]:
    """Check that NCCL has enough shared memory for several GPUs, if the size of /dev/shm is known."""
    size = machine.limits.shm
    if size is None:
        return []
    text = f"{size / _GIB:.2g} GiB in /dev/shm"
    if len(machine.gpus) < 2 or size >= _SMALL_SHM:
        return [Finding("machine", "shared memory", OK, text)]
    text += ", and NCCL needs more for several GPUs"
    return [Finding("machine", "shared memory", WARNING, text, "start the container with --shm-size=8g or --ipc=host")]


def check_disk(machine: Machine) -> list[Finding]:
    """Check that the disk of the cache has free space. Without a cache, check the disk of the working directory."""
    folder, free, name = machine.folder, machine.limits.disk_free, "cache_dir" if machine.cache_dir else "disk"
    if free is None and machine.cache_dir:
        text = f"{folder} {'cannot be written to' if folder.is_dir() else 'is a file'}"
        return [Finding("machine", name, PROBLEM, text, "give a folder that this user may write to")]
    if free is None:
        return [Finding("machine", name, OK, "the working directory is read-only, which does not affect training")]
    text = f"{free / 1e9:.1f} GB free at {folder}"
    if free < _LITTLE_DISK:
        return [Finding("machine", name, WARNING, text, "free some space, or give another folder")]
    return [Finding("machine", name, OK, text)]


def read_text(path: Path) -> str:
    """Return the text of a file. Empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""

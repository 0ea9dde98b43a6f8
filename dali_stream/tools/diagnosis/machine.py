"""Findings on the limits of this process: container, cores, memory, shared memory, disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dali_stream import process
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding, Result

CAPABILITIES = ("all", "compat32", "compute", "display", "graphics", "ngx", "utility", "video")
_GIB, _SMALL_SHM, _LITTLE_DISK = 1 << 30, 1 << 28, 1 << 30
_PLENTY = 1 << 60  # cgroup v1 reports no limit as a number near 2^63


def examine(
    cache_dir: str | os.PathLike[str] | None,
    gpus: int,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and the facts for the report.

    Args:
        cache_dir: as for `Dataset`; None: the working directory is checked instead.
        gpus: of the driver.
        environment: of its values, only words of NVIDIA's container toolkit are reported.
        root: the folder of `proc`, `sys`, `run` and `dev`.
    """
    kind = container(environment, root)
    cores, quota, memory = len(os.sched_getaffinity(0)), cpu_quota(root), memory_limit(root)
    total = _total_memory(root)
    found = {"container": _container(kind, gpus, environment), "cores": _cores(cores, quota), "memory": _memory(total, memory)}
    shm = _free(root / "dev/shm")
    if shm is not None:
        found["shared memory"] = _shm(shm[0], gpus)
    found["cache_dir" if cache_dir else "disk"], free = _disk(cache_dir)
    return [Finding("machine", name, *result) for name, result in found.items()], {
        "system": f"{platform.system()} {platform.release()}",
        "processor": process.processor(),
        "container": kind,
        "cores": cores,
        "cpu_quota": quota,
        "memory": total,
        "memory_limit": memory,
        "shm": shm[0] if shm else None,
        "disk_free": free,
    }


def container(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """The kind of container that this process runs in; None if none is detected."""
    if environment.get("APPTAINER_CONTAINER") or environment.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if environment.get("ENROOT_ROOTFS") or (root / "etc/enroot").exists():
        return "enroot"
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    found = re.search(r"docker|kubepods|containerd|libpod|lxc", _text(root / "proc/1/cgroup"))
    return found[0] if found else None


def _container(kind: str | None, gpus: int, environment: Mapping[str, str]) -> Result:
    given = environment.get("NVIDIA_DRIVER_CAPABILITIES", "")
    known = [word for word in re.split(r"[,\s]+", given) if word in CAPABILITIES]
    text = f"{kind}" if kind else "none"
    if "NVIDIA_DRIVER_CAPABILITIES" in environment:
        text += f"; NVIDIA_DRIVER_CAPABILITIES has {', '.join(known) or 'nothing'}"
    devices = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if "NVIDIA_VISIBLE_DEVICES" in environment:
        named = f"{len(devices.split(','))} of the machine's GPUs"
        text += f"; NVIDIA_VISIBLE_DEVICES names {(devices or 'none') if devices in ('all', 'none', 'void', '') else named}"
    if devices not in ("", "none", "void") and not gpus:
        remedy = "start the container with --gpus all (Docker), --nv (apptainer), or a claim to nvidia.com/gpu (Kubernetes)"
        return PROBLEM, f"{text}, and no GPU is usable", remedy
    # If libnvcuvid is there nevertheless, the findings of `gpu` say so.
    if kind and gpus and given and not {"all", "video"} & set(known):
        remedy = "set NVIDIA_DRIVER_CAPABILITIES=video,compute,utility; on Kubernetes in the pod's env"
        return WARNING, f"{text}, and without video there is no NVDEC", remedy
    return OK, text, ""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores of the control group's quota; None without one."""
    found = []
    for text in _group_files(root, "cpu", "cpu.max"):  # version 2: "quota period", or "max period"
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    quotas = _group_files(root, "cpu", "cpu.cfs_quota_us")  # version 1: -1 is none
    for text, period in zip(quotas, _group_files(root, "cpu", "cpu.cfs_period_us"), strict=False):
        if text.isdigit() and period.isdigit() and int(period):
            found.append(int(text) / int(period))
    return min(found, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Memory limit of the control group in bytes; None without one."""
    texts = _group_files(root, "memory", "memory.max") + _group_files(root, "memory", "memory.limit_in_bytes")
    return min((int(text) for text in texts if text.isdigit() and int(text) < _PLENTY), default=None)


def _group_files(root: Path, controller: str, name: str) -> list[str]:
    """Contents of a file of this name in this process's control group and its parents, which limit it too.

    A container sees its own group at the top, whatever path the kernel reports, so the top is always included.
    """
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for depth in range(len(parts) + 1):
                if text := _text(base.joinpath(*parts[:depth], name)).strip():
                    found.append(text)
    return found


def _cores(cores: int, quota: float | None) -> Result:
    text = f"{cores} for this process"
    if quota is None or quota >= cores:
        return OK, text, ""
    text += f", and the container's quota is {quota:.3g}: the kernel pauses threads beyond that"
    return WARNING, text, f"give Loader(num_threads={max(int(quota), 1)}), or the container more cores"


def _memory(total: int, limit: int | None) -> Result:
    usable = min(total, limit or total)
    text = f"{usable / _GIB:.1f} GiB" + (f", the container's limit, of {total / _GIB:.1f}" if limit and limit < total else "")
    if usable >= 8 * _GIB:
        return OK, text, ""
    remedy = 'set Loader(memory_budget=...) to what the model leaves free; its default is "4GiB"'
    return WARNING, text, remedy


def _total_memory(root: Path) -> int:
    found = re.search(r"MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"))
    return int(found[1]) << 10 if found else 0


def _shm(size: int, gpus: int) -> Result:
    text = f"{size / _GIB:.2g} GiB in /dev/shm"
    if gpus < 2 or size >= _SMALL_SHM:
        return OK, text, ""
    text += ", and NCCL needs more for several GPUs; dali_stream uses none"
    return WARNING, text, "start the container with --shm-size=8g or --ipc=host"


def _disk(cache_dir: str | os.PathLike[str] | None) -> tuple[Result, int | None]:
    """Also the free bytes."""
    folder = Path(cache_dir).expanduser().absolute() if cache_dir else Path.cwd()
    there = next(path for path in (folder, *folder.parents) if path.exists())  # the cache is created on first use
    if not there.is_dir() or not os.access(there, os.W_OK):
        if not cache_dir:
            return (OK, "the working directory is read-only, which does not affect training", ""), None
        wrong = "cannot be written to" if there.is_dir() else "is a file"
        return (PROBLEM, f"{there} {wrong}", "give a folder that this user may write to"), None
    free = _free(there)
    text = f"{(free or (0, 0))[1] / 1e9:.1f} GB free at {there}"
    if free and free[1] < _LITTLE_DISK:
        return (WARNING, text, "free some space, or give another folder"), free[1]
    return (OK, text, ""), free[1] if free else None


def _free(path: Path) -> tuple[int, int] | None:
    """(bytes, free bytes) of the file system of a path; None if unknown."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""

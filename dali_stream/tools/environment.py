"""Versions, machine and memory use that reports of measurements contain."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
import resource
import subprocess
import time
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import psutil

import dali_stream
from dali_stream.storage.local_files import replace_text

_LIBRARIES = {"torch": "torch", "torchcodec": "torchcodec", "dali": "nvidia.dali"}  # {name in reports: module}
# Matches a path that is absolute, or begins with ~ or `..`. The path may be a whole string, a quoted part of it, or a word.
# Addresses (https://...) do not match.
_BEGINS = r"(?:file://)?(?:~\w*|\.\.)?/(?!/)"
_PATH = re.compile(
    rf"""\A{_BEGINS}[^:,;"'\n]*\Z|(?<=["']){_BEGINS}[^"'\n]*(?=["'])|(?<![\w/.\]-]){_BEGINS}[^\s"'`<>|,;:()\[\]{{}}]+"""
)


def ran_on(device: str) -> dict[str, Any]:
    """Return the entries `versions`, `machine` and `date` of a report."""
    return {"versions": versions(), "machine": machine(device), "date": time.strftime("%Y-%m-%d")}


def report_json(report: dict[str, Any], indent: int | None = None) -> str:
    """Return a report as JSON text, with paths reduced to file names. See `without_folders`."""
    return json.dumps(without_folders(report), indent=indent)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report to a file as JSON. See `report_json`. A process that is killed leaves the previous report or this one."""
    replace_text(path, report_json(report, indent=1) + "\n")


def without_folders(value: Any) -> Any:
    """Return a copy of a JSON value with the paths of this machine reduced to file names: "/data/g1" becomes "g1".

    Reports are published, and a path may name a user or a project. Relative paths inside the working folder and addresses
    (https://, s3://, hf://) are not changed. A `Path` becomes text.
    """
    if isinstance(value, (str, PurePath)):
        return _PATH.sub(lambda path: PurePosixPath(path[0]).name, str(value))
    if isinstance(value, dict):
        return {without_folders(key): without_folders(each) for key, each in value.items()}
    return [without_folders(each) for each in value] if isinstance(value, (list, tuple)) else value


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the decoding libraries and the program ffmpeg. A missing program or library is None."""
    own = {"dali_stream": dali_stream.__version__, "python": platform.python_version()}
    return own | {name: _version(module) for name, module in _LIBRARIES.items()} | {"ffmpeg": ffmpeg_program()}


def _version(module: str) -> str | None:
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return None


def ffmpeg_program() -> str | None:
    """Return the version of the program ffmpeg. None if it is missing or does not run."""
    try:
        done = subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    version = re.match(r"ffmpeg version (\S+)", done.stdout)
    return version[1] if version else None


def machine(device: str) -> dict[str, Any]:
    """Return the processor, the number of cores that this process may use, the platform, and the GPU of a CUDA device."""
    import torch

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    }


def memory_bytes(figure: str, process: int | str = "self") -> int | None:
    """Return the memory of a process in bytes, or None without /proc.

    Args:
        figure: "VmRSS" for the current memory, "VmHWM" for its peak, or "RssShmem" for the shared part of the current memory.
        process: Number of the process. Default: this process.
    """
    with contextlib.suppress(OSError):
        if kibibytes := re.search(rf"{figure}:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text()):
            return int(kibibytes[1]) * 1024
    return None


def forget_peak() -> None:
    """Reset the memory peak of this process, if Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Return the peak memory of this process since its start or the last `forget_peak`, in bytes.

    The peaks of the processes that it has started and that are running are added. Memory that they share with it counts once.
    """
    started = [process.pid for process in psutil.Process().children(recursive=True)]
    own = memory_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shared = [memory_bytes("RssShmem", process) or 0 for process in (os.getpid(), *started)]
    return own + sum(memory_bytes("VmHWM", process) or 0 for process in started) - (sum(shared) - max(shared))


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the processes that it has started and that are running."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def gpu_bytes_used(gpu: int | None) -> int | None:
    """Return the memory that all processes use on a GPU, in bytes. None for the CPU."""
    if gpu is None:
        return None
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    return int(total - free)


def processor() -> str:
    """Return the name of the processor, for reports."""
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.processor() or platform.machine()

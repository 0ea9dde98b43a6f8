"""The circumstances of a measurement, for reports: versions and the machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path, PurePosixPath
from typing import Any

import dali_stream
from dali_stream import process

# An absolute path, or one in a home or outside the working folder: a whole string, a quoted part, or a word. Addresses
# (https://...) do not match.
_BEGINS = r"(?:file://)?(?:~\w*|\.\.)?/(?!/)"
_PATH = re.compile(
    rf"""\A{_BEGINS}[^:,;"'\n]*\Z|(?<=["']){_BEGINS}[^"'\n]*(?=["'])|(?<![\w/.\]-]){_BEGINS}[^\s"'`<>|,;:()\[\]{{}}]+"""
)


def ran_on(device: str) -> dict[str, Any]:
    """Entries of a report: `versions`, `machine` and `date`."""
    return {"versions": versions(), "machine": machine(device), "date": time.strftime("%Y-%m-%d")}


def report_json(report: dict[str, Any], indent: int | None = None) -> str:
    """A report as JSON text, `without_folders`."""
    return json.dumps(without_folders(report), indent=indent)


def without_folders(value: Any) -> Any:
    """A copy of a JSON value with the paths of this machine reduced to file names: "/data/g1" becomes "g1".

    Reports are published, and a path may name a user or a project. Relative paths inside the working folder and addresses
    (https://, s3://, hf://) stay.
    """
    if isinstance(value, str):
        return _PATH.sub(lambda found: PurePosixPath(found[0]).name, value)
    if isinstance(value, dict):
        return {without_folders(key): without_folders(each) for key, each in value.items()}
    return [without_folders(each) for each in value] if isinstance(value, (list, tuple)) else value


def versions() -> dict[str, str | None]:
    """Versions of Python, of the decoding libraries, and of the program ffmpeg. None for what is not installed."""
    import torch
    import torchcodec

    return {
        "dali_stream": dali_stream.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchcodec": torchcodec.__version__,
        "dali": _dali_version(),
        "ffmpeg": ffmpeg_program(),
    }


def _dali_version() -> str | None:
    try:
        import nvidia.dali
    except ImportError:
        return None
    return str(nvidia.dali.__version__)


def ffmpeg_program() -> str | None:
    """The version of the program ffmpeg; None if it is missing or does not run."""
    path = shutil.which("ffmpeg")
    try:
        done = subprocess.run([path or "", "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    found = re.match(r"ffmpeg version (\S+)", done.stdout)
    return found[1] if found else None


def machine(device: str) -> dict[str, Any]:
    """Processor, cores that this process may use, platform and, for a device such as "cuda:0", the GPU's name."""
    import torch

    return {
        "processor": process.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    }


def memory_bytes(figure: str) -> int | None:
    """Memory of this process: "VmRSS", now, or "VmHWM", its peak; None without /proc."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"{figure}:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    return None


def forget_peak() -> None:
    """Resets the memory peak of this process, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Peak memory of this process in bytes, since its start or `forget_peak`."""
    return memory_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_bytes_used(gpu: int | None) -> int | None:
    """Bytes in use on a GPU by all processes; None on a CPU."""
    if gpu is None:
        return None
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    return int(total - free)

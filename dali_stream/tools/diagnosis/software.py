"""Checks that the installed versions are compatible with each other and with the driver."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from typing import Any

from dali_stream.system.install import install_command, requirements
from dali_stream.tools import environment
from dali_stream.tools.diagnosis.machine import Machine
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding
from dali_stream.tools.isolated import Answer

_DRIVERS = {12: "525", 13: "580"}  # first driver of each CUDA version, see "toolkit driver versions" in CUDA's release notes
_INSTALL_DALI = (
    f"`{install_command('cuda12')}` (driver 525 or later) or `{install_command('cuda13')}` (driver 580 or later), never both"
)
_INSTALL_FFMPEG = "install FFmpeg 4 to 8 as shared libraries (Debian, Ubuntu: apt-get install ffmpeg)"
_TORCH_COMMAND = "https://pytorch.org/get-started has the command"


def versions(machine: Machine) -> dict[str, Any]:
    """Return all versions for the report. Unknown versions are None."""
    return {
        "python": platform.python_version(),
        **{library: machine.answers[library].value.get("version") for library in ("dali", "torch", "torchcodec")},
        "dali_builds": _dali_builds(),
        "torch_cuda": machine.answers["torch"].value.get("cuda"),
        "ffmpeg": machine.answers["torchcodec"].value.get("ffmpeg"),
        "ffmpeg_program": environment.ffmpeg_program(),
    }


def _dali_builds() -> list[str]:
    """Return the names of the installed packages that contain DALI, such as nvidia-dali-cuda120."""
    names = {str(package.metadata["Name"]) for package in importlib.metadata.distributions()}
    return sorted(name for name in names if re.fullmatch(r"nvidia[-_]dali[-_](?:nightly[-_]|weekly[-_])?cuda\d+", name))


def check_python(machine: Machine) -> list[Finding]:
    """Check that this version of Python is one of the tested versions."""
    if (3, 10) <= sys.version_info[:2] < (3, 14):
        return [Finding("software", "Python", OK, platform.python_version())]
    return [Finding("software", "Python", WARNING, platform.python_version(), "use Python 3.10 to 3.13, which are tested")]


def check_dali(machine: Machine) -> list[Finding]:
    """Check that a single build of DALI is installed and loads, and that the driver supports its CUDA version."""
    answer, driver, builds = machine.answers["dali"], machine.cuda, _dali_builds()
    if len(builds) > 1:
        right = "cuda13" if driver and driver[0] >= 13 else "cuda12"
        remedy = f"`pip uninstall {' '.join(builds)}`, then `{install_command(right)}`"
        text = f"{' and '.join(builds)} are both installed, and overwrite each other"
        return [Finding("software", "DALI", PROBLEM, text, remedy)]
    if answer.error:
        is_missing = answer.kind == "ModuleNotFoundError"
        remedy = f"{'install' if is_missing else 'reinstall'} it with {_INSTALL_DALI}"
        if is_missing and not machine.gpus:
            text = f"not installed ({answer.reason}), which only a GPU and dali_graph need"
            return [Finding("software", "DALI", WARNING, text, remedy)]
        return [_unloadable("DALI", answer, "nvidia.dali", remedy)]
    build, version = builds[0] if builds else "", answer.value["version"]
    text = version
    if digits := build.rpartition("cuda")[2]:
        cuda = int(digits[:-1] or 0), int(digits[-1])
        text += f", for CUDA {cuda[0]}.{cuda[1]}"
        if driver and cuda > driver:
            remedy = f"install driver {_DRIVERS.get(cuda[0], 'of that CUDA')} or later"
            if cuda[0] > 12 and driver >= (12, 0):
                remedy += f", or `pip uninstall {build}`, then `{install_command('cuda12')}`"
            text += f", and the driver supports up to {driver[0]}.{driver[1]}"
            return [Finding("software", "DALI", PROBLEM, text, remedy)]
    return [_new_enough("DALI", build, version, text)]


def check_torch(machine: Machine) -> list[Finding]:
    """Check that torch loads, and that it finds the driver's GPUs."""
    answer, driver, remedy = machine.answers["torch"], machine.cuda, f"install a CUDA build of torch: {_TORCH_COMMAND}"
    if answer.error:
        return [_unloadable("torch", answer, "torch", f"reinstall it: {_TORCH_COMMAND}")]
    version, cuda = answer.value["version"], answer.value["cuda"]
    text = f"{version}, for CUDA {cuda}" if cuda else f"{version}, without CUDA"
    if driver and not cuda:
        return [Finding("software", "torch", PROBLEM, f"{text}, which cannot use the GPU of this machine", remedy)]
    if driver and int(cuda.partition(".")[0]) > driver[0]:
        text += f", and the driver supports up to {driver[0]}.{driver[1]}"
        return [Finding("software", "torch", PROBLEM, text, f"update the driver, or {remedy} for CUDA {driver[0]}")]
    if driver and not answer.value["finds_gpu"]:
        remedy = '`python -c "import torch; torch.cuda.init()"` says why'
        return [Finding("software", "torch", PROBLEM, f"{text}: it finds none of the driver's GPUs", remedy)]
    return [_new_enough("torch", "torch", version, text)]


def check_torchcodec(machine: Machine) -> list[Finding]:
    """Check that torchcodec loads with the installed torch and FFmpeg's shared libraries."""
    answer = machine.answers["torchcodec"]
    if answer.kind == "skipped":
        text = "not checked, since torch does not load"
        return [Finding("software", "torchcodec", PROBLEM, text, "repair torch first")]
    if answer.error:
        remedy = f"{_INSTALL_FFMPEG}, and a torchcodec that fits torch (constraints.txt has a pair that does)"
        return [_unloadable("torchcodec", answer, "torchcodec.decoders", remedy)]
    if "failed" in answer.value:
        remedy = f"{answer.value['remedy']}. `python -c 'import dali_stream.decode.torchcodec'` shows the whole error"
        return [Finding("software", "torchcodec", PROBLEM, f"cannot be loaded: {answer.value['failed']}", remedy)]
    version, ffmpeg = answer.value["version"], answer.value["ffmpeg"]
    return [_new_enough("torchcodec", "torchcodec", version, f"{version}, fits torch and FFmpeg {ffmpeg}")]


def _unloadable(name: str, answer: Answer, module: str, remedy: str) -> Finding:
    if answer.kind == "ModuleNotFoundError":
        return Finding("software", name, PROBLEM, f"not installed ({answer.reason})", remedy)
    see = f". `python -c 'import {module}'` shows the whole error"
    return Finding("software", name, PROBLEM, f"cannot be loaded: {answer.reason.rstrip('.:')}", remedy + see)


def _new_enough(name: str, package: str, version: str, text: str) -> Finding:
    """Check that a version is not below the lower bound in the requirements of dali_stream."""
    bounds = (re.match(rf"{re.escape(package)}>=([\d.]+)", line) for line in requirements())
    least = next((match[1] for match in bounds if match), "0")
    if _major_minor(version) < _major_minor(least):
        text += f", and {least} or later is needed"
        return Finding("software", name, PROBLEM, text, f"`pip install '{package}>={least}'`")
    return Finding("software", name, OK, text)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def check_ffmpeg_program(machine: Machine) -> list[Finding]:
    """Check that the program ffmpeg, which encodes videos, is installed."""
    if version := environment.ffmpeg_program():
        return [Finding("software", "ffmpeg program", OK, version)]
    text = "the program ffmpeg is not on the PATH: the command prepare needs it to encode, training does not"
    return [Finding("software", "ffmpeg program", WARNING, text, "install FFmpeg (Debian, Ubuntu: apt-get install ffmpeg)")]

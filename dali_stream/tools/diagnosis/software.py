"""Findings on the versions of what is installed, and on whether they fit together and to the driver."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dali_stream.install import install_command
from dali_stream.tools import environment
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding, Result
from dali_stream.tools.isolated import Answer

_DRIVERS = {12: "525", 13: "580"}  # the first driver for this CUDA: CUDA's release notes, table "toolkit driver versions"
_INSTALL_DALI = (
    f"`{install_command('cuda12')}` (driver 525 or later) or `{install_command('cuda13')}` (driver 580 or later), never both"
)
_INSTALL_FFMPEG = "install FFmpeg 4 to 8 as shared libraries (Debian, Ubuntu: apt-get install ffmpeg)"


@dataclass(frozen=True)
class Asked:
    """Answers of the libraries; the driver's CUDA version (None without a driver) and its number of GPUs."""

    dali: Answer
    torch: Answer
    torchcodec: Answer
    ffmpeg: Answer
    cuda: tuple[int, int] | None
    gpus: int


def examine(asked: Asked) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and the versions for the report."""
    builds = dali_builds()
    ffmpeg = asked.torchcodec.value.get("ffmpeg") or asked.ffmpeg.value.get("ffmpeg")
    program = environment.ffmpeg_program()
    found = {"Python": _python(), "DALI": _dali(asked, builds), "torch": _torch(asked), "torchcodec": _torchcodec(asked)}
    found |= _ffmpeg(ffmpeg) | {"ffmpeg program": _program(program)}
    return [Finding("software", name, *result) for name, result in found.items()], {
        "python": platform.python_version(),
        "dali": asked.dali.value.get("version"),
        "dali_builds": builds,
        "torch": asked.torch.value.get("version"),
        "torch_cuda": asked.torch.value.get("cuda"),
        "torchcodec": asked.torchcodec.value.get("version"),
        "ffmpeg": ffmpeg,
        "ffmpeg_program": program,
    }


def dali_builds() -> list[str]:
    """The installed packages with `nvidia.dali`, such as nvidia-dali-cuda120."""
    names = {str(found.metadata["Name"]) for found in importlib.metadata.distributions()}
    return sorted(name for name in names if re.fullmatch(r"nvidia[-_]dali[-_](?:nightly[-_]|weekly[-_])?cuda\d+", name or ""))


def _python() -> Result:
    if (3, 10) <= sys.version_info[:2] < (3, 14):
        return OK, platform.python_version(), ""
    return WARNING, platform.python_version(), "use Python 3.10 to 3.13, which are tested"


def _dali(asked: Asked, builds: Sequence[str]) -> Result:
    answer = asked.dali
    if len(builds) > 1:
        right = "cuda13" if asked.cuda and asked.cuda[0] >= 13 else "cuda12"
        remedy = f"`pip uninstall {' '.join(builds)}`, then `{install_command(right)}`"
        return PROBLEM, f"{' and '.join(builds)} are both installed, and overwrite each other", remedy
    if answer.kind == "ModuleNotFoundError":
        level, what = (PROBLEM, "") if asked.gpus else (WARNING, ", which only a GPU and dali_graph need")
        return level, f"not installed ({answer.reason}){what}", f"install it with {_INSTALL_DALI}"
    if answer.error:
        return _unloadable(answer, "nvidia.dali", f"reinstall it with {_INSTALL_DALI}")
    cuda = _cuda_of(builds[0]) if builds else None
    text = answer.value["version"] + (f", for CUDA {cuda[0]}.{cuda[1]}" if cuda else "")
    if cuda and asked.cuda and cuda > asked.cuda:
        remedy = f"install driver {_DRIVERS.get(cuda[0], 'of that CUDA')} or later"
        if cuda[0] > 12 and asked.cuda >= (12, 0):
            remedy += f"; or `pip uninstall {builds[0]}`, then `{install_command('cuda12')}`"
        return PROBLEM, f"{text}, and the driver supports up to {asked.cuda[0]}.{asked.cuda[1]}", remedy
    return _new_enough(builds[0] if builds else "", answer.value["version"], text)


def _cuda_of(build: str) -> tuple[int, int]:
    digits = build.rpartition("cuda")[2]
    return int(digits[:-1] or 0), int(digits[-1])


def _torch(asked: Asked) -> Result:
    answer, remedy = asked.torch, "install a CUDA build of torch: https://pytorch.org/get-started has the command"
    if answer.error:
        return _unloadable(answer, "torch", "reinstall it: https://pytorch.org/get-started has the command")
    version, cuda = answer.value["version"], answer.value["cuda"]
    text = f"{version}, for CUDA {cuda}" if cuda else f"{version}, without CUDA"
    if asked.gpus and not cuda:
        return PROBLEM, f"{text}, and there is a GPU that it cannot use", remedy
    if cuda and asked.cuda and int(cuda.partition(".")[0]) > asked.cuda[0]:
        text += f", and the driver supports up to {asked.cuda[0]}.{asked.cuda[1]}"
        return PROBLEM, text, f"update the driver, or {remedy} for CUDA {asked.cuda[0]}"
    if asked.gpus and not answer.value["finds_gpu"]:
        return PROBLEM, f"{text}: it finds none of the driver's GPUs", '`python -c "import torch; torch.cuda.init()"` says why'
    return _new_enough("torch", version, text)


def _torchcodec(asked: Asked) -> Result:
    answer = asked.torchcodec
    if not answer.error:
        return _new_enough("torchcodec", answer.value["version"], f"{answer.value['version']}, fits torch")
    if answer.kind == "skipped":
        return PROBLEM, "not checked, since torch does not load", "repair torch first"
    if not asked.ffmpeg.value.get("ffmpeg"):
        return _unloadable(answer, "torchcodec.decoders", f"{_INSTALL_FFMPEG}: none were found")
    remedy = "install a version that fits torch (constraints.txt has a pair that does)"
    return _unloadable(answer, "torchcodec.decoders", remedy)


def _unloadable(answer: Answer, module: str, remedy: str) -> Result:
    if answer.kind == "ModuleNotFoundError":
        return PROBLEM, f"not installed ({answer.reason})", remedy
    see = f"; `python -c 'import {module}'` shows the whole error"
    return PROBLEM, f"cannot be loaded: {answer.reason.rstrip('.:')}", remedy + see


def _new_enough(package: str, version: str, text: str) -> Result:
    least = _least(package)
    if least and _number(version) < _number(least):
        return PROBLEM, f"{text}; {least} or later is needed", f"`pip install '{package}>={least}'`"
    return OK, text, ""


def _least(package: str) -> str:
    """The lower bound in this package's metadata; empty without one."""
    try:
        needed = importlib.metadata.requires("dali-stream") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = (re.match(rf"{re.escape(package)}>=([\d.]+)", line) for line in needed)
    return next((match[1] for match in found if match), "")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def _ffmpeg(ffmpeg: dict[str, Any] | None) -> dict[str, Result]:
    """By name: of FFmpeg's libraries and their decoders."""
    if ffmpeg is None:
        return {"FFmpeg": (PROBLEM, "no shared libraries of FFmpeg 4 to 8 were found", _INSTALL_FFMPEG)}
    text = f"{ffmpeg['version']}, libraries in {ffmpeg['path'].rpartition('/')[0]}"
    fits = 4 <= ffmpeg["libavcodec"] - 54 <= 8
    found: dict[str, Result] = {"FFmpeg": (OK, text, "") if fits else (PROBLEM, text, _INSTALL_FFMPEG)}
    there = {codec: d["default"] for codec, d in ffmpeg["decoders"].items() if d["default"] in d["software"]}
    names = [codec if name == codec else f"{codec} ({name})" for codec, name in there.items()]
    found["decoders"] = OK, f"FFmpeg on the CPU: {', '.join(names) or 'none'}", ""
    if there.get("av1", "libdav1d") != "libdav1d":
        text = f"FFmpeg decodes AV1 with {there['av1']}, which is slower than libdav1d"
        found["decoder av1"] = WARNING, text, "use an FFmpeg with libdav1d"
    for codec in [codec for codec in ffmpeg["decoders"] if codec not in there]:
        # AV1 is what LeRobot writes. Without libdav1d or libaom, FFmpeg has only a decoder that needs hardware.
        status, wants = (PROBLEM, " with libdav1d") if codec == "av1" else (WARNING, "")
        text = f"FFmpeg has no {codec} decoder that works on a CPU"
        found[f"decoder {codec}"] = status, text, f"install a build of FFmpeg{wants} that has one"
    return found


def _program(version: str | None) -> Result:
    if version:
        return OK, version, ""
    text = "the program ffmpeg is not on the PATH: the commands demo and transcode need it, training does not"
    return WARNING, text, "install FFmpeg (Debian, Ubuntu: apt-get install ffmpeg)"

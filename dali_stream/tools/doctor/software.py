"""Findings on the versions of what is installed, and on whether they fit together and to the driver."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dali_stream.tools import environment
from dali_stream.tools.doctor.report import OK, PROBLEM, WARNING, Finding
from dali_stream.tools.isolated import Answer

_DRIVERS = {12: "525", 13: "580"}  # the first driver for this CUDA: CUDA's release notes, table "toolkit driver versions"
_INSTALL_DALI = (
    "`pip install 'dali-stream[cuda12]'` (driver 525 or later) or `'dali-stream[cuda13]'` (580 or later), never both"
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
    findings = [_python(), _dali(asked, builds), _torch(asked), _torchcodec(asked), *_ffmpeg(ffmpeg), _program(program)]
    return findings, {
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


def _python() -> Finding:
    fits = (3, 10) <= sys.version_info[:2] < (3, 14)
    remedy = "" if fits else "use Python 3.10 to 3.13, which are tested"
    return Finding("software", "Python", OK if fits else WARNING, platform.python_version(), remedy)


def _dali(asked: Asked, builds: Sequence[str]) -> Finding:
    answer = asked.dali
    if len(builds) > 1:
        text = f"{' and '.join(builds)} are both installed, and overwrite each other"
        right = "cuda13" if asked.cuda and asked.cuda[0] >= 13 else "cuda12"
        remedy = f"`pip uninstall {' '.join(builds)}`, then `pip install 'dali-stream[{right}]'`"
        return Finding("software", "DALI", PROBLEM, text, remedy)
    if answer.kind == "ModuleNotFoundError":
        return Finding("software", "DALI", PROBLEM, f"not installed ({answer.reason})", f"install it with {_INSTALL_DALI}")
    if answer.error:
        return _unloadable("DALI", answer, "nvidia.dali", f"reinstall it with {_INSTALL_DALI}")
    cuda = _cuda_of(builds[0]) if builds else None
    text = answer.value["version"] + (f", for CUDA {cuda[0]}.{cuda[1]}" if cuda else "")
    if cuda and asked.cuda and cuda > asked.cuda:
        text += f", and the driver supports up to {asked.cuda[0]}.{asked.cuda[1]}"
        remedy = f"install driver {_DRIVERS.get(cuda[0], 'of that CUDA')} or later"
        if cuda[0] > 12 and asked.cuda >= (12, 0):
            remedy += f"; or `pip uninstall {builds[0]}`, then `pip install 'dali-stream[cuda12]'`"
        return Finding("software", "DALI", PROBLEM, text, remedy)
    return _new_enough("DALI", builds[0] if builds else "", answer.value["version"], text)


def _cuda_of(build: str) -> tuple[int, int]:
    digits = build.rpartition("cuda")[2]
    return int(digits[:-1] or 0), int(digits[-1])


def _torch(asked: Asked) -> Finding:
    answer, remedy = asked.torch, "install a CUDA build of torch: https://pytorch.org/get-started has the command"
    if answer.error:
        return _unloadable("torch", answer, "torch", "reinstall it: https://pytorch.org/get-started has the command")
    version, cuda = answer.value["version"], answer.value["cuda"]
    if not cuda:
        text = f"{version}, without CUDA"
        if asked.gpus:
            return Finding("software", "torch", PROBLEM, f"{text}, and there is a GPU that it cannot use", remedy)
        return _new_enough("torch", "torch", version, text)
    text = f"{version}, for CUDA {cuda}"
    if asked.cuda and int(cuda.partition(".")[0]) > asked.cuda[0]:
        text += f", and the driver supports up to {asked.cuda[0]}.{asked.cuda[1]}"
        return Finding("software", "torch", PROBLEM, text, f"update the driver, or {remedy} for CUDA {asked.cuda[0]}")
    if asked.gpus and not answer.value["finds_gpu"]:
        remedy = '`python -c "import torch; torch.cuda.init()"` says why'
        return Finding("software", "torch", PROBLEM, f"{text}: it finds none of the driver's GPUs", remedy)
    return _new_enough("torch", "torch", version, text)


def _torchcodec(asked: Asked) -> Finding:
    answer = asked.torchcodec
    if not answer.error:
        return _new_enough("torchcodec", "torchcodec", answer.value["version"], f"{answer.value['version']}, fits torch")
    if answer.kind == "skipped":
        text, remedy = "not checked, since torch does not load", "repair torch first"
        return Finding("software", "torchcodec", PROBLEM, text, remedy)
    remedy = "install a version that fits torch (constraints.txt has a pair that does)"
    if not asked.ffmpeg.value.get("ffmpeg"):
        remedy = f"{_INSTALL_FFMPEG}: none were found"
    return _unloadable("torchcodec", answer, "torchcodec.decoders", remedy)


def _unloadable(name: str, answer: Answer, module: str, remedy: str) -> Finding:
    if answer.kind == "ModuleNotFoundError":
        return Finding("software", name, PROBLEM, f"not installed ({answer.reason})", remedy)
    see = f"; `python -c 'import {module}'` shows the whole error"
    return Finding("software", name, PROBLEM, f"cannot be loaded: {answer.reason.rstrip('.:')}", remedy + see)


def _new_enough(name: str, package: str, version: str, text: str) -> Finding:
    least = _least(package)
    if least and _number(version) < _number(least):
        return Finding("software", name, PROBLEM, f"{text}; {least} or later is needed", f"`pip install '{package}>={least}'`")
    return Finding("software", name, OK, text)


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


def _ffmpeg(ffmpeg: dict[str, Any] | None) -> list[Finding]:
    if ffmpeg is None:
        return [Finding("software", "FFmpeg", PROBLEM, "no shared libraries of FFmpeg 4 to 8 were found", _INSTALL_FFMPEG)]
    major = ffmpeg["libavcodec"] - 54
    text = f"{ffmpeg['version']}, libraries in {ffmpeg['path'].rpartition('/')[0]}"
    fits = 4 <= major <= 8
    found = [Finding("software", "FFmpeg", OK if fits else PROBLEM, text, "" if fits else _INSTALL_FFMPEG)]
    return found + _decoders(ffmpeg["decoders"])


def _decoders(decoders: dict[str, dict[str, Any]]) -> list[Finding]:
    there = {codec: d["default"] for codec, d in decoders.items() if d["default"] in d["software"]}
    names = [codec if name == codec else f"{codec} ({name})" for codec, name in there.items()]
    findings = [Finding("software", "decoders", OK, f"FFmpeg on the CPU: {', '.join(names) or 'none'}")]
    if there.get("av1", "libdav1d") != "libdav1d":
        text, remedy = f"FFmpeg decodes AV1 with {there['av1']}, which is slower than libdav1d", "use an FFmpeg with libdav1d"
        findings.append(Finding("software", "decoder av1", WARNING, text, remedy))
    for codec in [codec for codec in decoders if codec not in there]:
        # AV1 is what LeRobot writes. Without libdav1d or libaom, FFmpeg has only a decoder that needs hardware.
        status = PROBLEM if codec == "av1" else WARNING
        wants = " with libdav1d" if codec == "av1" else ""
        text = f"FFmpeg has no {codec} decoder that works on a CPU"
        findings.append(Finding("software", f"decoder {codec}", status, text, f"install a build of FFmpeg{wants} that has one"))
    return findings


def _program(version: str | None) -> Finding:
    if version:
        return Finding("software", "ffmpeg program", OK, version)
    text = "the program ffmpeg is not on the PATH: `dali-stream demo` and `transcode` need it, training does not"
    return Finding("software", "ffmpeg program", WARNING, text, "install FFmpeg (Debian, Ubuntu: apt-get install ffmpeg)")

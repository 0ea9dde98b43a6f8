"""Checks of a machine: driver, GPUs and NVDEC, DALI, torch, torchcodec, and the FFmpeg that it loads.

A machine without a GPU is fine, but a GPU that cannot be used is a problem.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_stream.errors import counted
from dali_stream.system.install import install_command
from dali_stream.system.torchcodec_import import NVDEC_REMEDY, refusal_on_nvdec
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding, Status
from dali_stream.tools.isolated import Answer

NAMES = {"h264": "H.264", "hevc": "HEVC", "av1": "AV1", "vp9": "VP9", "mpeg4": "MPEG-4"}
FORMATS = {("420", 8): "4:2:0 8 bit", ("420", 10): "4:2:0 10 bit", ("422", 8): "4:2:2", ("444", 8): "4:4:4"}
_NO_GPU = "frames are decoded on the CPU, which works for every codec"
NOTHING_TO_DO = "nothing to do: the CPU decodes every codec"
_BROKEN = "check nvidia-smi and the kernel log (dmesg) of this machine. Restart it if they fail too"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NO_DRIVER = "libcuda.so.1: cannot open shared object file"
_DALI = (
    f"`{install_command('cuda12')}` (driver 525 or later) or `{install_command('cuda13')}` (driver 580 or later), never both"
)
_TORCH = "install the torch that fits the driver: https://pytorch.org/get-started has the command"
_TORCHCODEC = (
    "install FFmpeg 4 to 8 as shared libraries (Debian, Ubuntu: apt-get install ffmpeg), and a torchcodec that fits torch "
    "(constraints.txt has a pair that does)"
)


@dataclass(frozen=True)
class Decoders:
    """Decoders that load on this machine.

    Attributes:
        torchcodec: Whether torchcodec loads.
        dali: Whether DALI loads.
        gpus: {name: index} of one GPU of each kind whose NVDEC capabilities are known.
    """

    torchcodec: bool
    dali: bool
    gpus: Mapping[str, int]


@dataclass(frozen=True)
class Machine:
    """Context of the checks of a machine: the answers of libraries and of the driver.

    Attributes:
        gpus: GPUs that the driver reports. See `read_gpus`.
        answers: {name of the function in `answers`: its answer}.
    """

    gpus: Sequence[dict[str, Any]]
    answers: Mapping[str, Answer]

    @property
    def cuda(self) -> tuple[int, int] | None:
        """Newest CUDA version that the driver supports. None without a GPU."""
        return tuple(self.answers["driver"].value["cuda"]) if self.gpus else None

    @property
    def decoders(self) -> Decoders:
        """Decoders that load, and one GPU of each kind whose capability is known."""
        loads = {name: not answer.error and "failed" not in answer.value for name, answer in self.answers.items()}
        gpus = {name: first["index"] for name, first in group_equal(self.gpus).items() if not first["error"]}
        return Decoders(loads["torchcodec"], loads["dali"], gpus)


def read_gpus(driver: Answer, nvdec: Answer) -> list[dict[str, Any]]:
    """Return the GPUs for the report.

    Each GPU has the capability of NVDEC for each format, or the reason why the driver does not report it.

    Args:
        driver: Answer of `answers.driver`.
        nvdec: Answer of `answers.nvdec`.
    """
    unknown = {"decoders": [], "engines": 0, "error": nvdec.reason, "remedy": _BROKEN if nvdec.error else ""}
    gpus = [gpu | unknown for gpu in driver.value.get("gpus", [])]
    for gpu, capability in zip(gpus, nvdec.value, strict=False):
        gpu |= capability
        gpu["engines"] = max((each["engines"] for each in gpu["decoders"] if each["supported"]), default=0)
    return gpus


def group_equal(gpus: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Group GPUs that differ only in their index. Return {name of the group, such as "GPU 0, 1": its first GPU}."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for gpu in gpus:
        groups.setdefault(repr(gpu | {"index": None}), []).append(gpu)
    return {"GPU " + ", ".join(str(gpu["index"]) for gpu in group): group[0] for group in groups.values()}


def check_driver(machine: Machine) -> list[Finding]:
    """Check that the driver works. A machine without a GPU needs no driver."""
    driver = machine.answers["driver"]
    if driver.error:
        return [_driver(PROBLEM, f"NVIDIA's driver did not report its GPUs: {driver.reason}", _BROKEN)]
    if "failed" in driver.value:
        return [_explain_failure(**driver.value)]
    version = ".".join(map(str, driver.value["cuda"]))
    return [_driver(OK, f"supports CUDA {version} and older, {counted(len(machine.gpus), 'GPU')}")]


def _driver(status: Status, text: str, remedy: str = "") -> Finding:
    return Finding("gpu", "driver", status, text, remedy)


def _explain_failure(failed: str, remedy: str, code: int) -> Finding:
    """Return the finding for a driver that is missing or fails. `remedy` and `code` are those of its error."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    is_promised = os.environ.get("NVIDIA_VISIBLE_DEVICES", "") not in ("", "none", "void")  # read by NVIDIA's container toolkit
    if code == 0 and _NO_DRIVER in failed and not (has_gpu or is_promised):
        return _driver(OK, f"NVIDIA's driver is not installed: {_NO_GPU}")
    if code == _NO_DEVICE and not is_promised and (not has_gpu or "CUDA_VISIBLE_DEVICES" in os.environ):
        return _driver(WARNING, f"{failed}: {_NO_GPU}", remedy)
    return _driver(PROBLEM, failed, remedy)


def check_gpus(machine: Machine) -> list[Finding]:
    """Check what NVDEC decodes on each kind of GPU."""
    return [finding for name, gpu in group_equal(machine.gpus).items() for finding in _check_gpu(name, gpu)]


def _check_gpu(name: str, gpu: Mapping[str, Any]) -> list[Finding]:
    text = f"{gpu['name']}, {gpu['memory'] >> 30} GiB, compute {'.'.join(map(str, gpu['compute']))}"
    if gpu["error"]:
        return [Finding("gpu", name, PROBLEM, f"{text}: {gpu['error']}", gpu["remedy"])]
    formats = {(each["codec"], each["chroma"], each["depth"]): each for each in gpu["decoders"]}
    if gpu["engines"]:
        engines = Finding("gpu", name, OK, f"{text}, {gpu['engines']} NVDEC engines")
        return [engines, *(_check_codec(f"{name} {NAMES[codec]}", codec, formats) for codec in NAMES)]
    reason = formats["h264", "420", 8]["reason"]
    if "no NVDEC engine" not in reason:
        return [Finding("gpu", name, PROBLEM, f"{text}: NVDEC decodes nothing: {reason}", _BROKEN)]
    remedy = "to decode on the GPU, use a GPU or a MIG profile with media engines (+me)"
    return [Finding("gpu", name, WARNING, f"{text}: {reason}, so frames are decoded on the CPU", remedy)]


def _check_codec(name: str, codec: str, formats: Mapping[tuple[str, str, int], Any]) -> Finding:
    plain = formats[codec, "420", 8]
    if not plain["supported"]:
        better = next((each for each in ("hevc", "h264") if formats[each, "420", 8]["supported"]), None)
        command = f"`dali-stream prepare URI OUT --codec {better}` re-encodes a dataset to {NAMES[better]}" if better else ""
        return Finding("gpu", name, WARNING, f"{plain['reason']}: frames are decoded on the CPU", command or NOTHING_TO_DO)
    by_size: dict[str, list[str]] = {}
    for (chroma, depth), kind in FORMATS.items():
        capability = formats[codec, chroma, depth]
        height, width = capability["max_size"]
        by_size.setdefault(f"up to {height}×{width}" if capability["supported"] else "no", []).append(kind)
    unsupported = ", ".join(by_size.pop("no", []))
    sizes = "; ".join(f"{', '.join(kinds)} {size}" for size, kinds in by_size.items())
    return Finding("gpu", name, OK, sizes + (f"; no {unsupported}" if unsupported else ""))


def _dali_builds() -> list[str]:
    """Return the names of the installed packages that contain DALI, such as nvidia-dali-cuda120."""
    names = {str(package.metadata["Name"]) for package in importlib.metadata.distributions()}
    return sorted(name for name in names if re.fullmatch(r"nvidia[-_]dali[-_](?:nightly[-_]|weekly[-_])?cuda\d+", name))


def check_software(machine: Machine) -> list[Finding]:
    """Check that each library loads, that the driver supports its version of CUDA, and that torchcodec may use NVDEC."""
    driver, builds = machine.cuda, _dali_builds()
    cuda = int(builds[0].rpartition("cuda")[2][:2]) if builds else 0
    supported = f"the driver supports up to {driver[0]}.{driver[1]}" if driver else ""

    dali, torch, torchcodec = (_library(machine, name) for name in ("DALI", "torch", "torchcodec"))
    if len(builds) > 1:
        dali = _problem("DALI", f"{' and '.join(builds)} are both installed, and overwrite each other", f"keep one: {_DALI}")
    elif dali.status == OK and driver and cuda > driver[0]:
        dali = _problem("DALI", f"{dali.text}, for CUDA {cuda}, and {supported}", f"update the driver, or install {_DALI}")
    if torch.status == OK:
        known = machine.answers["torch"].value
        build = f"for CUDA {known['cuda']}" if known["cuda"] else "without CUDA"
        torch = Finding("software", "torch", OK, f"{torch.text}, {build}")
        if driver and not known["finds_gpu"]:
            remedy = f"{_TORCH}. `python -c 'import torch; torch.cuda.init()'` says why it finds none"
            torch = _problem("torch", f"{torch.text}: it finds none of the driver's GPUs, and {supported}", remedy)
    if torchcodec.status == OK:
        known = machine.answers["torchcodec"].value
        torchcodec = Finding("software", "torchcodec", OK, f"{torchcodec.text}, fits torch and FFmpeg {known['ffmpeg']}")
        if torch.status == OK and any(gpu["engines"] for gpu in machine.gpus):
            of_torch = machine.answers["torch"].value
            if refused := refusal_on_nvdec(known["version"], of_torch["version"], of_torch["cuda"]):
                text = f"{torchcodec.text}. The CPU decodes all videos: {refused}"
                torchcodec = Finding("software", "torchcodec", WARNING, text, NVDEC_REMEDY)
    return [dali, torch, torchcodec]


def _library(machine: Machine, name: str) -> Finding:
    """Return the version of a library, or the error of its import."""
    answer = machine.answers[name.lower()]
    error = answer.reason or answer.value.get("failed", "")
    if not error:
        return Finding("software", name, OK, answer.value["version"])
    remedy = answer.value.get("remedy") or {"DALI": f"install {_DALI}", "torch": _TORCH, "torchcodec": _TORCHCODEC}[name]
    if name == "DALI" and answer.kind == "ModuleNotFoundError" and not machine.gpus:
        return Finding("software", name, WARNING, f"not installed ({error}), which only a GPU and dali_graph need", remedy)
    return _problem(name, f"{name} does not import: {error}", remedy)


def _problem(name: str, text: str, remedy: str) -> Finding:
    return Finding("software", name, PROBLEM, text, remedy)

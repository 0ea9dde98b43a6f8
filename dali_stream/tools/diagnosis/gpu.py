"""Checks of the driver, the GPUs and NVDEC. A machine without a GPU is fine, but a GPU that cannot be used is a problem."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dali_stream.errors import counted
from dali_stream.tools.diagnosis.machine import Machine, read_text
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding, Status
from dali_stream.tools.isolated import Answer

NAMES = {"h264": "H.264", "hevc": "HEVC", "av1": "AV1", "vp9": "VP9", "mpeg4": "MPEG-4"}
FORMATS = {("420", 8): "4:2:0 8 bit", ("420", 10): "4:2:0 10 bit", ("422", 8): "4:2:2", ("444", 8): "4:4:4"}
_NO_GPU = "frames are decoded on the CPU, which works for every codec"
NOTHING_TO_DO = "nothing to do: the CPU decodes every codec"
_BROKEN = "check nvidia-smi and the kernel log (dmesg) of this machine. Restart it if they fail too"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


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
        return [_explain_failure(machine.root, **driver.value)]
    version = ".".join(map(str, driver.value["cuda"]))
    return [_driver(OK, f"supports CUDA {version} and older, {counted(len(machine.gpus), 'GPU')}")]


def _driver(status: Status, text: str, remedy: str = "") -> Finding:
    return Finding("gpu", "driver", status, text, remedy)


def _explain_failure(root: Path, failed: str, remedy: str, code: int) -> Finding:
    missing = code == 0 and "libcuda.so.1: cannot open shared object file" in failed
    if not missing and code != _NO_DEVICE:
        return _driver(PROBLEM, failed, remedy)
    devices = any(root.glob("dev/nvidia[0-9]*"))
    if devices and not missing and "CUDA_VISIBLE_DEVICES" in os.environ:
        remedy = "unset CUDA_VISIBLE_DEVICES to use a GPU in this process"
        return _driver(WARNING, f"CUDA_VISIBLE_DEVICES hides all GPUs: {_NO_GPU}", remedy)
    if devices:
        return _driver(PROBLEM, f"this machine has an NVIDIA GPU (/dev/nvidia0), but {failed}", remedy)
    if missing and _is_on_pci(root):
        text = f"this machine has an NVIDIA GPU that this process cannot use, since the driver is missing: {_NO_GPU}"
        return _driver(WARNING, text, remedy)
    if missing:
        return _driver(OK, f"no NVIDIA driver and no GPU: {_NO_GPU}")
    return _driver(WARNING, f"NVIDIA's driver is installed and finds no GPU: {_NO_GPU}", remedy)


def _is_on_pci(root: Path) -> bool:
    """Return whether the PCI bus has a display or 3D controller by NVIDIA."""
    devices = {vendor.with_name("class"): read_text(vendor) for vendor in root.glob("sys/bus/pci/devices/*/vendor")}
    return any(vendor.strip() == "0x10de" and read_text(kind).startswith("0x03") for kind, vendor in devices.items())


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

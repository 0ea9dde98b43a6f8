"""Findings on the driver, the GPUs and NVDEC. No GPU is fine; an unusable GPU is a problem."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dali_stream.errors import counted
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding, Result
from dali_stream.tools.isolated import Answer

NAMES = {"h264": "H.264", "hevc": "HEVC", "av1": "AV1", "vp9": "VP9", "mpeg4": "MPEG-4"}
FORMATS = {("420", 8): "4:2:0 8 bit", ("420", 10): "4:2:0 10 bit", ("422", 8): "4:2:2", ("444", 8): "4:4:4"}
_NO_GPU = "frames are decoded on the CPU, which works for every codec"
NOTHING_TO_DO = "nothing to do: the CPU decodes every codec"
_BROKEN = "check nvidia-smi and the kernel log (dmesg) of this machine; restart it if they fail too"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def examine(driver: Answer, nvdec: Answer, root: Path = Path("/")) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Findings, and the GPUs for the report. `root` is the folder of `dev` and `sys`."""
    if driver.error:
        failed = PROBLEM, f"NVIDIA's driver did not report its GPUs: {driver.reason}", _BROKEN
        return [Finding("gpu", "driver", *failed)], []
    if "failed" in driver.value:
        return [Finding("gpu", "driver", *_no_driver(driver.value, root))], []
    version = ".".join(map(str, driver.value["cuda"]))
    text = f"supports CUDA {version} and older, {counted(len(driver.value['gpus']), 'GPU')}"
    results: dict[str, Result] = {"driver": (OK, text, "")}
    gpus = [dict(gpu) for gpu in driver.value["gpus"]]
    for gpu, found in zip(gpus, nvdec.value.get("gpus") or [{}] * len(gpus), strict=True):
        decoders = found.get("decoders", [])
        gpu["engines"] = max((d["engines"] for d in decoders if d["supported"]), default=0)
        gpu["decoders"] = decoders
        gpu["error"] = found.get("failed", nvdec.reason)
        gpu["remedy"] = found.get("remedy", _BROKEN if nvdec.error else "")
    for name, same in alike(gpus).items():
        results |= _gpu(name, same)
    return [Finding("gpu", name, *result) for name, result in results.items()], gpus


def _no_driver(failed: Mapping[str, Any], root: Path) -> Result:
    """The driver is missing or fails, which is fine on a machine without GPU."""
    said, remedy = failed["failed"], failed["remedy"]
    missing = failed["code"] == 0 and "libcuda.so.1: cannot open shared object file" in said
    if not missing and failed["code"] != _NO_DEVICE:
        return PROBLEM, said, remedy
    devices = any(root.glob("dev/nvidia[0-9]*"))
    if devices and not missing and "CUDA_VISIBLE_DEVICES" in os.environ:
        remedy = "unset CUDA_VISIBLE_DEVICES to use a GPU in this process"
        return WARNING, f"CUDA_VISIBLE_DEVICES hides all GPUs: {_NO_GPU}", remedy
    if devices:
        return PROBLEM, f"this machine has an NVIDIA GPU (/dev/nvidia0), but {said}", remedy
    if missing and _on_pci(root):
        text = f"this machine has an NVIDIA GPU that this process cannot use, since the driver is missing: {_NO_GPU}"
        return WARNING, text, remedy
    if missing:
        return OK, f"no NVIDIA driver and no GPU: {_NO_GPU}", ""
    return WARNING, f"NVIDIA's driver is installed and finds no GPU: {_NO_GPU}", remedy


def _on_pci(root: Path) -> bool:
    """Whether the machine has a display or 3D controller by NVIDIA."""
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        try:
            if vendor.read_text().strip() == "0x10de" and vendor.with_name("class").read_text().startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def alike(gpus: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{"GPU 0, 1": the first of them}: GPUs grouped if they differ only by their index."""
    groups: list[list[dict[str, Any]]] = []
    for gpu in gpus:
        for group in groups:
            if {**group[0], "index": None} == {**gpu, "index": None}:
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return {"GPU " + ", ".join(str(gpu["index"]) for gpu in group): group[0] for group in groups}


def _gpu(name: str, gpu: Mapping[str, Any]) -> dict[str, Result]:
    """By the name of the finding."""
    text = f"{gpu['name']}, {gpu['memory'] >> 30} GiB, compute {'.'.join(map(str, gpu['compute']))}"
    if gpu["error"]:
        return {name: (PROBLEM, f"{text}: {gpu['error']}", gpu["remedy"])}
    caps = {(d["codec"], d["chroma"], d["depth"]): d for d in gpu["decoders"]}
    if not gpu["engines"]:
        reason = caps["h264", "420", 8]["reason"]
        if "no NVDEC engine" not in reason:
            return {name: (PROBLEM, f"{text}: NVDEC decodes nothing: {reason}", _BROKEN)}
        remedy = "to decode on the GPU, use a GPU or a MIG profile with media engines (+me)"
        return {name: (WARNING, f"{text}: {reason}, so frames are decoded on the CPU", remedy)}
    codecs = {f"{name} {said}": _codec(codec, caps) for codec, said in NAMES.items()}
    return {name: (OK, f"{text}, {gpu['engines']} NVDEC engines", ""), **codecs}


def _codec(codec: str, caps: Mapping[tuple[str, str, int], Any]) -> Result:
    has: dict[str, list[str]] = {}
    for (chroma, depth), shown in FORMATS.items():
        cap = caps[codec, chroma, depth]
        height, width = cap["max_size"]
        has.setdefault(f"up to {width}×{height}" if cap["supported"] else "no", []).append(shown)
    lacking = ", ".join(has.pop("no", []))
    formats = "; ".join(f"{', '.join(shown)} {size}" for size, shown in has.items()) + (f"; no {lacking}" if lacking else "")
    plain = caps[codec, "420", 8]
    if plain["supported"]:
        return OK, formats, ""
    better = [c for c in ("hevc", "h264") if caps[c, "420", 8]["supported"]]
    command = f"`dali-stream transcode URI OUT --codec {better[0]}`" if better else ""
    remedy = f"{command} re-encodes a dataset to {NAMES[better[0]]}" if better else NOTHING_TO_DO
    return WARNING, f"{plain['reason']}: frames are decoded on the CPU", remedy

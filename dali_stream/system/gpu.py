"""CUDA device that a program means."""

from __future__ import annotations

import ctypes
import os
import re


def gpu_index(device: str) -> int | None:
    """Return the index of a CUDA device, or None for the CPU.

    Args:
        device: Name of the device: "auto", "cpu", "cuda", or an index such as "cuda:1". "cuda" is the GPU with the index
            `LOCAL_RANK` if it is visible to this process, otherwise torch's current device. "auto" is the same GPU if torch
            finds one, otherwise the CPU.

    Raises:
        ValueError: If the name is invalid, or if torch does not find the GPU.
    """
    # "cpu:0" is Accelerate's name for the CPU of one of several processes.
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", "cpu" if str(device) == "cpu:0" else str(device))
    if not match or (match[2] and match[1] != "cuda"):
        raise ValueError(f'device must be "auto", "cpu", "cuda" or "cuda:<index>", got {device!r}')
    if match[1] == "cpu" or (match[1] == "auto" and not _has_driver()):
        return None
    import torch

    if not torch.cuda.is_available():
        if match[1] == "auto":
            return None
        raise ValueError(f'device must be "cpu" or "auto", because torch {torch.__version__} finds no GPU, got {device!r}')
    local = os.environ.get("LOCAL_RANK", "")
    # Some launchers make all GPUs visible to each process, and others only its own GPU.
    own = local.isdigit() and int(local) < torch.cuda.device_count()
    default = int(local) if own else torch.cuda.current_device()
    index = int(match[2]) if match[2] else default
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one of {torch.cuda.device_count()} GPUs that torch finds, got {device!r}, which is GPU {index}"
        )
    return index


def _has_driver() -> bool:
    """Return whether a CUDA driver is installed. Importing torch to find this out would be slow."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

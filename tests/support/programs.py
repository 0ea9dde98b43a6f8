"""Runs of `dali-stream`, in a process of its own or in this one, and what they print."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_stream.cli import main


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `python -m dali_stream`."""
    command = [sys.executable, "-m", "dali_stream", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def failed(capsys: pytest.CaptureFixture[str], arguments: Sequence[object], code: int) -> str:
    """Runs the program in this process. It is to fail in one line and with this exit code; returns the line."""
    assert main([str(argument) for argument in arguments]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert err.startswith("dali-stream: ")
    return err


def pictures(path: Path) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Frames of a contact sheet: the description of each frame in the metadata, and its pixels, cut out of the sheet."""
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        said = json.loads(sheet.text["dali_stream"])["frames"]  # type: ignore[attr-defined]  # PNGs have it
        pixels = np.asarray(sheet.convert("RGB"))
    boxes = [picture["box"] for picture in said]
    return [(picture, pixels[b[1] : b[3], b[0] : b[2]]) for picture, b in zip(said, boxes, strict=True)]


def driver() -> bool:
    """Whether a CUDA driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

"""Small file systems."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_file_system(place: Path, size: str) -> Iterator[Path]:
    """A file system in memory, of a size such as "1m", at a new folder. Skip the test where mounting is not allowed."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)

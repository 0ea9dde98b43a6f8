"""A fake driver, built from driver.c with this machine's compiler, for programs that a test starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("driver.c")
FakeDriver = Callable[..., dict[str, str]]


def compiler() -> str:
    """The C compiler of this machine. The test is skipped if none is installed."""
    found = next(filter(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")), None)
    if found is None:
        pytest.skip("the fake driver needs a C compiler, and none is installed")
    return found


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    """A function (*gpus, fails={call: error}, video=True, cuda="13000") -> environment of a process that has such a driver.

    `gpus` are names that driver.c knows; `video=False` is a container without the video capability. The test is skipped if
    no C compiler is installed.
    """
    folders = {}
    for video in (True, False):
        folder = folders[video] = tmp_path_factory.mktemp("driver")
        build = [compiler(), "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-O1", str(SOURCE)]
        subprocess.run([*build, "-o", str(folder / "libcuda.so.1"), "-Wl,-soname,libcuda.so.1"], check=True)
        if video:
            link = ["-DVIDEO", str(folder / "libcuda.so.1"), "-Wl,-rpath,$ORIGIN", "-o", str(folder / "libnvcuvid.so.1")]
            subprocess.run([*build[:-1], *link[:1], str(SOURCE), *link[1:]], check=True)

    def environment(*gpus: str, fails: dict[str, int] | None = None, video: bool = True, cuda: str = "13000") -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(folders[video]), os.environ.get("LD_LIBRARY_PATH"))))
        failing = ",".join(f"{call}={error}" for call, error in (fails or {}).items())
        return {**os.environ, "LD_LIBRARY_PATH": path, "FAKE_GPUS": ",".join(gpus), "FAKE_FAILS": failing, "FAKE_CUDA": cuda}

    return environment

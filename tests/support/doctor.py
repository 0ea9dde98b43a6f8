"""How the tests of the doctor run it, and libraries that only look like torch, torchcodec and DALI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import dali_stream
from dali_stream import Dataset
from dali_stream.tools import isolated
from dali_stream.tools.diagnosis import Finding
from dali_stream.tools.diagnosis import run as diagnosis
from dali_stream.tools.diagnosis.machine import Decoders
from dali_stream.tools.diagnosis.run import examine

NO_DECODER, TORCHCODEC = Decoders(False, False, {}), Decoders(True, False, {})
TORCH = """
class version: cuda = {cuda!r}
class cuda:
    is_available = staticmethod(lambda: {gpu})
uint8 = "uint8"
def frombuffer(data, dtype): return data
"""
ABSENT, ABORTS, HANGS = (
    "raise ModuleNotFoundError('No module named X')",
    "import os; os.abort()",
    "import time; time.sleep(600)",
)
BROKEN = "raise ImportError('libX.so: undefined symbol')"


@pytest.fixture
def doctor_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor asks all questions in this process, since each process that it starts imports torch."""

    def answer(call: isolated.Call) -> isolated.Answer:
        try:
            return isolated.Answer(call())
        except Exception as error:
            return isolated.Answer({}, str(error) or type(error).__name__, type(error).__name__)

    def call(calls: Sequence[isolated.Call], limit_s: float) -> isolated.Called:
        return isolated.Called(list(map(answer, calls)), "", "")

    for module in (isolated, diagnosis):
        monkeypatch.setattr(module, "call", call)


def shadows(folder: Path, *, torch: str | None = None, torchcodec: str | None = None, dali: str | None = None) -> Path:
    """A folder for PYTHONPATH whose packages Python imports instead of the real ones: given code, or small ones that work."""
    healthy = f"__version__ = '2.13.0'\n{TORCH.format(cuda='13.0', gpu=True)}"
    for name, code in {
        "torch/__init__.py": torch or healthy,
        "torchcodec/__init__.py": torchcodec or "__version__, ffmpeg_major_version = '0.17.0', 7\n",
        "torchcodec/decoders/__init__.py": "",
        "nvidia/__init__.py": "",
        "nvidia/dali/__init__.py": dali or "__version__ = '2.4.0'\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return folder


def cpu_torch() -> str:
    """A torch without CUDA."""
    return f"__version__ = '2.13.0+cpu'\n{TORCH.format(cuda=None, gpu=False)}"


def doctor(
    *arguments: Any, environment: Mapping[str, str] | None = None, libraries: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Report of `dali_stream.tools.doctor`. The processes that it starts have these variables and packages."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if libraries is not None:
            patch.syspath_prepend(libraries)
        report: dict[str, Any] = json.loads(json.dumps(dali_stream.tools.doctor(*arguments, **options).as_dict()))
    return report


def run(
    *arguments: object, environment: Mapping[str, str] | None = None, libraries: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m dali_stream doctor`."""
    env = dict(environment or os.environ)
    if libraries is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(libraries), env.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "dali_stream", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, check=False)


def found(report: Mapping[str, Any], name: str) -> dict[str, str]:
    """The one finding of a name."""
    [finding] = [f for f in report["findings"] if f["name"] == name]
    assert not (finding["remedy"] and finding["status"] == "ok"), finding
    return finding


def bad(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(status, name) of findings that are not ok."""
    return [(f["status"], f["name"]) for f in report["findings"] if f["status"] != "ok"]


def looked_at(dataset: Path | Dataset, decoders: Decoders = NO_DECODER, limit_s: float = 120) -> dict[str, Finding]:
    """Findings of the doctor's examination of a dataset, on a machine with these decoders."""
    findings = examine(dataset if isinstance(dataset, Dataset) else Dataset(dataset), decoders, limit_s)
    assert not [finding for finding in findings if finding.remedy and finding.status == "ok"]
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}

"""Runs of the tools that rewrite a dataset, and programs that play ffmpeg."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dali_stream import DaliStreamError
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore
from dali_stream.tools import PrepareReport, prepare

SMALL = {"file_mb": 0.02}  # several files of each kind out of a demo
FAST = ["--codec", "h264", "--jobs", "1"]


def prepared(source: Path | str, out: Path | str, **options: Any) -> PrepareReport:
    """Prepares in this process. Raises DaliStreamError if a file cannot be written."""
    report = prepare(source, out, **({"jobs": 1} | options))
    if report.failed:
        raise DaliStreamError("\n".join(report.failed.values()))
    return report


# Plays ffmpeg: notes its arguments, may change them, and else is the real one.
_STUB = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + chr(10))
encoding = any(a.endswith(".mp4") for a in arguments[-1:])
{body}
os.execv({real!r}, [{real!r}, *arguments])
"""


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Puts a program that plays ffmpeg in front of the PATH; returns its log, a line of JSON per run."""
    real = shutil.which("ffmpeg")
    if real is None:
        pytest.skip("the ffmpeg program is not installed")
    place = folder / "bin/ffmpeg"
    place.parent.mkdir()
    place.write_text(_STUB.format(python=sys.executable, log=str(folder / "log"), real=real, body=body))
    place.chmod(0o755)
    monkeypatch.setenv("PATH", str(place.parent))
    return folder / "log"


def runs(log: Path) -> list[list[str]]:
    """The arguments of each run of a stub."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def table_of(path: Path) -> tuple[VideoIndex, VideoFormat]:
    """Index and format of a file."""
    table = read_index(LocalStore(str(path.parent)), path.name)
    return table, describe(table.configs[0])


def assert_same_rows(source: Path, out: Path) -> None:
    """The rows of all data files, bit for bit."""
    first, second = (pa.concat_tables(pq.read_table(p) for p in sorted(r.glob("data/*/*.parquet"))) for r in (source, out))
    assert second.schema.equals(first.schema, check_metadata=True)
    assert repr(second.to_pydict()) == repr(first.to_pydict())  # as text, since rows may contain NaNs

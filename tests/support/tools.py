"""Runs of the tools that rewrite a dataset, and programs that play ffmpeg."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dali_stream import Dataset
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore
from dali_stream.tools import RewriteReport, TranscodeReport
from dali_stream.tools.rewriting import reshard
from dali_stream.tools.transcoding import transcode

SMALL = {"data_file_size": 15_000, "video_file_size": 100_000}  # several files of each kind out of a demo


def resharded(source: Path | str, out: Path, **options: Any) -> RewriteReport:
    """Reshards."""
    dataset = Dataset(source)
    try:
        return reshard(dataset, out, **options)
    finally:
        dataset.close()


FAST = ["--codec", "h264", "--encoder", "cpu"]


def transcoded(source: Path | str, out: Path, **options: Any) -> TranscodeReport:
    """Transcodes."""
    dataset = Dataset(source)
    try:
        return transcode(dataset, out, **({"encoder": "cpu"} | options))
    finally:
        dataset.close()


# Plays ffmpeg: notes its arguments, may change them, may have no NVENC, and else is the real one.
_STUB = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + chr(10))
encoding = any(a.endswith(".mp4") for a in arguments[-1:])
{body}
os.execv({real!r}, [{real!r}, *arguments])
"""
# NVENC, played by the CPU's encoder.
PLAYS_NVENC = """
if "hevc_nvenc" in arguments:
    at = arguments.index("-preset")
    del arguments[at : arguments.index("-forced-idr") + 2]
    arguments[arguments.index("hevc_nvenc")] = "libx265"
    params = "keyint=2:min-keyint=2:bframes=0:open-gop=0:scenecut=0:log-level=none"
    arguments[at:at] = ["-preset", "ultrafast", "-profile:v", "main", "-crf", "20", "-x265-params", params]
"""
LACKS_NVENC = """
if any(a.endswith("_nvenc") for a in arguments):
    sys.exit("[hevc_nvenc @ 0x1] OpenEncodeSessionEx failed: no encode device (1): (no details)")
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


def assert_rest_is_the_same(source: Path, out: Path) -> None:
    """All but videos and info.json, byte for byte."""
    files = [{p.relative_to(r) for p in r.rglob("*") if p.is_file()} for r in (source, out)]
    assert files[0] == files[1]
    for name in files[0]:
        if name.suffix != ".mp4" and name != Path("meta/info.json"):
            assert (source / name).read_bytes() == (out / name).read_bytes(), name

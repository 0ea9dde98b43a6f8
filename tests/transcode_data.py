"""What the tests of `dali-stream transcode` share: running it, looking into files, programs that play ffmpeg."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import video_data
from loader_data import CAMERAS, pictures

import dali_stream
from dali_stream import Dataset
from dali_stream.demo import read_identities, stamp
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore
from dali_stream.tools.transcode import Report, transcode

FAST = ["--codec", "h264", "--encoder", "cpu"]
OPTIONS: dict[str, Any] = {"batch_size": 16, "shuffle": False, "image_dtype": "uint8", "last_batch": "partial"}

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


@pytest.fixture(scope="module")
def small(written: Callable[..., Path]) -> Path:
    """Two episodes of AV1, two cameras: of one in one file, of the other in two. Read only."""
    return written(episodes=2, size=(120, 128))


def transcoded(source: Path | str, out: Path, **options: Any) -> Report:
    """Transcodes."""
    dataset = Dataset(source)
    try:
        return transcode(dataset, out, **({"encoder": "cpu"} | options))
    finally:
        dataset.close()


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


def assert_same_but_for_pictures(first: Path, second: Path) -> int:
    """Every batch of an epoch is the same but for its frames, which carry the same stamps. Returns how many samples."""
    options: dict[str, Any] = {**OPTIONS, "device": "cpu", "decode": "torchcodec", "threads": 2}
    count = 0
    with dali_stream.Loader(str(first), **options) as a, dali_stream.Loader(str(second), **options) as b:
        for left, right in zip(a, b, strict=True):
            assert left.keys() == right.keys()
            for key, value in left.items():
                if key in CAMERAS:
                    expected = zip(left["episode_index"].tolist(), left["frame_index"].tolist(), strict=True)
                    found = read_identities(pictures(right[key])).tolist()
                    assert found == [[episode, frame, CAMERAS[key]] for episode, frame in expected]
                elif isinstance(value, torch.Tensor):
                    assert value.dtype == right[key].dtype
                    assert torch.equal(value, right[key])
                else:
                    assert value == right[key]
            count += len(left["index"])
    return count


def assert_rest_is_the_same(source: Path, out: Path) -> None:
    """All but videos and info.json, byte for byte."""
    files = [{p.relative_to(r) for p in r.rglob("*") if p.is_file()} for r in (source, out)]
    assert files[0] == files[1]
    for name in files[0]:
        if name.suffix != ".mp4" and name != Path("meta/info.json"):
            assert (source / name).read_bytes() == (out / name).read_bytes(), name


def probe(path: Path) -> dict[str, Any]:
    """What ffprobe says of a file's video stream."""
    if not shutil.which("ffprobe"):
        pytest.skip("needs the program ffprobe")
    asked = ["-show_entries", "stream=pix_fmt,color_range,color_space,codec_name,codec_tag_string,has_b_frames"]
    done = subprocess.run(["ffprobe", "-v", "error", *asked, "-of", "json", path], capture_output=True, text=True, check=True)
    stream: dict[str, Any] = json.loads(done.stdout)["streams"][0]
    return stream


def colourful() -> video_data.Pictures:
    """As `video_data.draw`, but in large areas of strong colours, which subsampling leaves alone."""
    height, width = video_data.SIZE
    areas = np.random.default_rng(0).integers(20, 236, (height // 32, width // 32, 3))
    back = np.kron(areas, np.ones((32, 32, 1))).astype(np.uint8)
    pictures = np.stack([np.roll(back, 4 * frame, 1) for n in video_data.EPISODES for frame in range(n)])
    for number, (episode, frame) in enumerate((e, f) for e, n in enumerate(video_data.EPISODES) for f in range(n)):
        stamp(pictures[number], episode, frame, 0)
    return pictures


def recorded(
    folder: Path, arguments: tuple[str, ...], *, delay: float = 0.0, pictures: video_data.Pictures | None = None
) -> Path:
    """A dataset of one camera, with two episodes in one file of this encoding."""
    path = video_data.encode(video_data.draw() if pictures is None else pictures, folder / "a.mp4", arguments)
    return video_data.write_dataset(folder / "data", [path], delay=delay)


def video(root: Path) -> Path:
    """The only video file of a dataset."""
    (path,) = root.glob("videos/**/*.mp4")
    return path


def difference(first: Path, second: Path) -> float:
    """The largest of the mean differences between frames of two files, of 255, over RGB as torchcodec has it."""
    a, b = (video_data.whole_file(path).numpy().astype(np.int16) for path in (first, second))
    return float(np.abs(a - b).mean((1, 2, 3)).max())

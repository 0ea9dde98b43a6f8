"""`dali-stream transcode` and the program ffmpeg: the encoders that it has, and what it does otherwise than it was told to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import videos as video_data
from support.batches import assert_same_but_for_frames
from support.datasets import videos
from support.programs import failed
from support.tools import FAST, LACKS_NVENC, PLAYS_NVENC, runs, stub, table_of, transcoded
from support.videos import recorded

from dali_stream import DaliStreamError
from dali_stream.cli import main

pytestmark = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="the ffmpeg program is not installed")


# ---- NVENC, played by a stub


def test_nvenc_is_taken_where_it_works(written: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(episodes=2, size=(128, 160))  # multiples of 32, which NVENC does not pad
    log = stub(tmp_path, monkeypatch, PLAYS_NVENC)
    report = transcoded(source, tmp_path / "out", codec="hevc", encoder="auto", crf=19)
    assert {camera.encoder for camera in report.cameras.values()} == {"hevc_nvenc"}
    assert_same_but_for_frames(source, tmp_path / "out")
    told = "-c:v hevc_nvenc -bf 0 -tag:v hvc1 -g 2 -preset p5 -rc vbr -cq 19 -b:v 0 -no-scenecut 1 -forced-idr 1"
    encoding = [" ".join(run) for run in runs(log) if "hevc_nvenc" in run]
    assert len(encoding) == 1 + len(videos(source))  # tried once, with the size of the cameras
    assert "-s 160x128" in encoding[0]
    assert all(told in run for run in encoding)
    assert "rawvideo" in encoding[0]
    for run in encoding[1:]:
        for part in ("-nostdin", "-protocol_whitelist file -f mov -i file:", "-copyts", "passthrough", "-xerror", "+faststart"):
            assert part in run


def test_frames_that_nvenc_would_pad_are_encoded_on_the_cpu(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In HEVC, NVENC pads frames to multiples of 32, and DALI's route to NVDEC needs them without padding."""
    stub(tmp_path, monkeypatch, PLAYS_NVENC)
    report = transcoded(small, tmp_path / "out", codec="hevc", encoder="auto")
    assert {camera.encoder for camera in report.cameras.values()} == {"libx265"}
    assert {table_of(path)[1].coded for path in videos(tmp_path / "out")} == {(120, 128)}
    with pytest.raises(ValueError, match="it pads frames of 120×128 to multiples of 32"):
        transcoded(small, tmp_path / "other", codec="hevc", encoder="nvenc")


def test_without_nvenc_the_cpu_is_taken(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(tmp_path, monkeypatch, LACKS_NVENC)
    line = failed(capsys, ["transcode", small, tmp_path / "out", "--codec", "h264", "--encoder", "nvenc"], 2)
    for said in ("h264_nvenc", "no encode device", "--encoder cpu"):
        assert said in line
    assert not (tmp_path / "out").exists()
    assert main(["transcode", str(small), str(tmp_path / "out"), "--codec", "h264", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {camera["encoder"] for camera in report["cameras"].values()} == {"libx264"}


@pytest.mark.slow
def test_a_size_that_nvenc_does_not_take_is_the_cpus(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_small = "if 'hevc_nvenc' in arguments and '128x120' in arguments: sys.exit('Frame Dimension less than the minimum')"
    stub(tmp_path, monkeypatch, too_small + PLAYS_NVENC)
    report = transcoded(small, tmp_path / "out", codec="hevc", encoder="auto")
    assert {camera.encoder for camera in report.cameras.values()} == {"libx265"}
    with pytest.raises(ValueError, match=r"Frame Dimension less than the minimum \(frames of 120×128\)"):
        transcoded(small, tmp_path / "other", codec="hevc", encoder="nvenc")


@pytest.mark.slow
def test_nvenc_is_asked_for_key_frames_alone(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = stub(tmp_path, monkeypatch, LACKS_NVENC)
    transcoded(small, tmp_path / "out", codec="h264", gop=1, encoder="auto")
    [told] = [" ".join(run) for run in runs(log) if "h264_nvenc" in run]
    assert "-g 250 -force_key_frames expr:1" in told
    assert "-forced-idr 1" in told


def test_quality_beyond_what_nvenc_counts_is_the_cpus(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = stub(tmp_path, monkeypatch, "")
    with pytest.raises(ValueError, match="64"):
        transcoded(small, tmp_path / "out", codec="av1", encoder="auto", crf=64)
    assert not any("av1_nvenc" in run for run in runs(log))


# ---- what ffmpeg lacks, or does otherwise


def test_a_missing_program_and_a_missing_encoder_are_named(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(tmp_path, monkeypatch, "if 'libx264' in arguments: sys.exit(\"Unknown encoder 'libx264'\")")
    line = failed(capsys, ["transcode", small, tmp_path / "out", *FAST], 1)
    assert "libx264" in line
    assert "Unknown encoder" in line
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install ffmpeg" in failed(capsys, ["transcode", small, tmp_path / "out", *FAST], 1)
    assert not (tmp_path / "out").exists()


_FILTER = "at = arguments.index('-vf') + 1; arguments[at]"
_ANOTHER = ",trim=start_frame=1,tpad=stop=1:stop_mode=clone,setpts=PTS-512"
_WRONG = {
    "frames are lost": ("arguments[-1:-1] = ['-frames:v', '20']", "frames went in, and 20 came out"),
    "frames are late": (f"{_FILTER} += ',setpts=PTS+0.02/TB'", "has moved by 0.0"),
    "frames are others": (f"{_FILTER} += '{_ANOTHER}'", r"episode \d+, frame \d+: it looks like frame \d+ of the source"),
    "frames are blurred": (f"{_FILTER} += ',boxblur=20'", r"PSNR .* dB, and at least 25 is required"),
    "colours are of another range": (f"{_FILTER} = 'scale=out_range=pc,setparams=range=pc'", "full range|yuvj420p"),
    "GOPs are longer": ("arguments = ['9' if a == '2' else a for a in arguments]", "longest GOP has 9"),
    "frames are cropped": (
        "arguments[-1:-1] = ['-bsf:v', 'h264_metadata=crop_bottom=16']",
        "its bitstream has frames of 112×160",
    ),
    "frames are interlaced": ("arguments[-1:-1] = ['-flags', '+ildct+ilme', '-top', '1']", "its frames are interlaced"),
    "there are B-frames": ("arguments = [{'0': '2', '2': '12'}.get(a, a) for a in arguments]", "B-frames"),
}


@pytest.mark.parametrize("how", _WRONG)
def test_nothing_else_comes_out_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    change, said = _WRONG[how]
    root = recorded(tmp_path, video_data.mpeg4(12))
    stub(tmp_path, monkeypatch, f"if encoding:\n    {change}")
    with pytest.raises(DaliStreamError, match=said) as caught:
        transcoded(root, tmp_path / "out", codec="h264")
    assert video_data.CAMERA in str(caught.value)
    assert video_data.VIDEO.format(video_data.CAMERA, 0) in str(caught.value)
    assert not (tmp_path / "out/meta").exists()
    assert not list((tmp_path / "out").rglob("*.mp4"))

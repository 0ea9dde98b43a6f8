"""`dali-stream doctor URI`: what a dataset's videos are, a frame by every decoder, broken files, and frames of the rows."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.datasets import SIDE, TOP, VIDEO, copied
from support.doctor import NO_DECODER, TORCHCODEC, bad, doctor, found, looked_at, shadows
from support.gpu_machine import GpuMachine
from support.programs import driver
from support.videos import CAMERA, draw, encode, ffmpeg, h264, loader, shifted, write_dataset

from dali_stream import Dataset, DecodeError, Loader
from dali_stream.lerobot.info import INFO
from dali_stream.tools.description import describe
from dali_stream.tools.diagnosis import Finding
from dali_stream.tools.diagnosis.camera import Camera, check_frame
from dali_stream.tools.diagnosis.rows import Rows
from dali_stream.tools.isolated import Answer


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function (encoder's arguments) -> dataset of one camera and one file."""

    def dataset(*arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("encoded")
        return write_dataset(folder / "data", [encode(draw(), folder / "a.mp4", arguments)])

    return dataset


@pytest.fixture(scope="module")
def healthy(vp9_demo: Path) -> dict[str, Any]:
    """The report on this machine and a healthy dataset."""
    return doctor(vp9_demo)


@pytest.mark.slow
def test_a_healthy_machine_without_a_gpu(healthy: dict[str, Any]) -> None:
    if driver():
        pytest.skip("this machine has a driver")
    report = healthy
    assert list(report) == ["findings", "gpus", "status"]
    assert report["status"] in ("ok", "warning")
    assert not [f for f in bad(report) if f[0] == "problem"]
    assert all(list(f) == ["area", "name", "status", "text", "remedy"] for f in report["findings"])
    assert len({(f["area"], f["name"]) for f in report["findings"]}) == len(report["findings"])
    assert report["gpus"] == []
    assert re.search(r", fits torch and FFmpeg [4-8]$", found(report, "torchcodec")["text"])


@pytest.mark.slow
def test_a_frame_of_each_camera_by_every_decoder(healthy: dict[str, Any]) -> None:
    report = healthy
    assert [(f["status"], f["name"]) for f in report["findings"] if f["area"] == "dataset" and f["status"] != "ok"] == []
    for key in (TOP, SIDE):
        said = {f["name"].removeprefix(f"{key} "): f["text"] for f in report["findings"] if f["name"].startswith(key)}
        assert said.pop(key).startswith("vp9 Profile 0 yuv420p, 128×160, colours ")
        assert said.pop("on CPU").startswith("torchcodec: ")
        assert said.pop("timestamps").startswith("each row has a frame of its episode, ")
        assert said == {"frame, torchcodec": "decoded", "frame, DALI on the CPU": "decoded, like torchcodec"}
    assert found(report, "rows")["status"] == "ok"


def findings_about(root: Path, decoded: dict[str, Answer]) -> dict[str, Finding]:
    """{decoder: finding} about the frame that decoders have delivered."""
    examined = Camera(CAMERA, Rows(Dataset(root), False), NO_DECODER)
    examined.decoded = decoded
    return {finding.name.removeprefix(f"{CAMERA} frame, "): finding for finding in check_frame(examined)}


def test_a_decoder_that_fails_where_another_does_not_is_not_the_files_fault(plain: Path) -> None:
    frame, failed = Answer(draw()[0]), Answer({}, "no surface", "DecodeError")
    found = findings_about(plain, {"torchcodec": frame, "DALI on the CPU": failed})
    assert (found["torchcodec"].status, found["torchcodec"].text) == ("ok", "decoded")
    failing = found["DALI on the CPU"]
    assert (failing.status, failing.text) == ("problem", "no surface. torchcodec decodes it")
    assert "copy" not in failing.remedy


def test_a_decoder_that_delivers_another_frame_is_a_problem(plain: Path) -> None:
    right, other = draw()[:2]
    found = findings_about(plain, {"torchcodec": Answer(right), "DALI on the CPU": Answer(other)})
    assert (found["torchcodec"].status, found["torchcodec"].text) == ("ok", "decoded")
    wrong = found["DALI on the CPU"]
    assert wrong.status == "problem"
    assert wrong.text.startswith("its frame must differ from FFmpeg's by at most 4 of 255 on average, got ")
    assert 'decode="torchcodec"' in wrong.remedy


def test_decoders_are_compared_with_each_other_where_torchcodec_fails(plain: Path) -> None:
    right, other = draw()[:2]
    decoded = {
        "torchcodec": Answer({}, "no such codec", "DecodeError"),
        "DALI on the CPU": Answer(right),
        "NVDEC of GPU 0": Answer(other),
        "NVDEC of GPU 1": Answer(right),
    }
    failing, first, wrong, same = findings_about(plain, decoded).values()
    assert (failing.status, failing.text) == ("problem", "no such codec. DALI on the CPU decodes it")
    assert (first.status, first.text) == ("ok", "decoded")
    assert (same.status, same.text) == ("ok", "decoded, like DALI on the CPU")
    assert wrong.status == "problem"
    assert wrong.text.startswith("its frame must differ from that of DALI on the CPU by at most 4 of 255 on average, got ")
    assert "torchcodec" not in wrong.remedy


@pytest.mark.slow
def test_a_decoder_that_crashes_takes_nothing_with_it(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = shadows(tmp_path)
    (libraries / "torchcodec/decoders/__init__.py").write_text("import os\ndef VideoDecoder(*a, **k): os.abort()\n")
    monkeypatch.syspath_prepend(libraries)
    findings = looked_at(demo, TORCHCODEC)
    for key in (TOP, SIDE):
        assert findings[f"{key} frame, torchcodec"].status == "problem"
        assert "crashed with SIGABRT" in findings[f"{key} frame, torchcodec"].text


@pytest.mark.usefixtures("doctor_here")
def test_a_size_that_no_codec_brings_to_nvdec_is_not_sent_round_in_circles(tmp_path: Path, gpu_machine: GpuMachine) -> None:
    size = (120, 128)  # of less than 80×144 the fake driver decodes nothing
    encode(draw(size=size), tmp_path / "a.mp4", h264(12))
    root = write_dataset(tmp_path / "odd", [tmp_path / "a.mp4"], size=size)
    gpu_machine.has("h100")
    finding = found(doctor(root), f"{CAMERA} on GPU 0")
    assert "120×128 is outside what NVDEC takes" in finding["text"]
    assert "prepare" not in finding["remedy"]


@pytest.mark.usefixtures("doctor_here")
def test_the_route_on_each_gpu_and_why(demo: Path, gpu_machine: GpuMachine) -> None:
    """AV1, which an H100 does not decode and an L4 does."""
    gpu_machine.has("h100", "h100", "l4", "mig")
    report = doctor(demo)
    first, other = found(report, f"{TOP} on GPU 0, 1"), found(report, f"{TOP} on GPU 2")
    assert (first["status"], "no NVDEC decoder for av1" in first["text"]) == ("warning", True)
    assert "`dali-stream prepare URI OUT --codec hevc`" in first["remedy"]
    assert (other["status"], other["text"].startswith("NVDEC decodes av1")) == ("ok", True)
    assert "prepare" not in found(report, f"{TOP} on GPU 3")["remedy"]  # a MIG slice without engines decodes nothing
    assert [found(report, f"{TOP} on {where}")["text"].startswith("torchcodec: ") for where in ("CPU", "GPU 3")] == [True] * 2

    gpu_machine.installs("0.16.0", "13.0")
    gpu_machine.has("h100", "h100", "l4", "mig")
    report = doctor(demo)
    other = found(report, f"{TOP} on GPU 2")
    assert other["status"] == "warning"
    assert other["text"].startswith("torchcodec: on NVDEC, torchcodec must be 0.17 or later, with torch for CUDA 13, got ")
    assert "pip install --upgrade 'torch>=2.11' 'torchcodec>=0.17'" in other["text"]
    assert "prepare" not in other["remedy"]
    assert "no NVDEC decoder for av1" in found(report, f"{TOP} on GPU 0, 1")["text"]


@pytest.mark.usefixtures("doctor_here")
def test_a_frame_of_an_open_gop(encoded: Callable[..., Path]) -> None:
    """FFmpeg outputs every frame of such a file only if it decodes from the start."""
    assert looked_at(encoded(*h264(12, open_gop=True)), TORCHCODEC)[f"{CAMERA} frame, torchcodec"].text == "decoded"


def fat(data: bytes) -> bytes:
    """The file with a media box whose header states a gibibyte."""
    at = data.index(b"mdat")
    return data[: at - 4] + struct.pack(">I", 1 << 30) + data[at:]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "lfs": (lambda _: POINTER, "git lfs pull"),
    "html": (lambda _: b"<!DOCTYPE html><html>404</html>", "HTML page"),
    "json": (lambda _: b'{"error":"Repository not found"}', "begins with b'{\"error"),
    "xml": (lambda _: b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", 'begins with b"<?xml'),
    "empty": (lambda _: b"", "the file is empty"),
    "gzip": (gzip.compress, "begins with b'\\x1f\\x8b"),
    "zeros": (lambda data: bytes(len(data)), "no moov box"),
    "cut": (lambda data: data[: len(data) // 2], ": box 'mdat' at byte"),
    "fat": (fat, ": box 'mdat' at byte"),
    "no index": (lambda data: data[: data.index(b"moov") - 4], "its recording was not finished"),
    "noise": (lambda data: bytes(range(1, 255)) * 9, "not an MP4"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_has_the_error_of_a_loader(kind: str, vp9_demo: Path, tmp_path: Path) -> None:
    make, said = BROKEN[kind]
    root = copied(vp9_demo, tmp_path)
    path = sorted(root.glob(f"videos/{SIDE}/**/*.mp4"))[0]
    path.write_bytes(make(path.read_bytes()))
    findings = looked_at(root)
    finding = findings[f"{SIDE} file 1"]
    assert finding.status == "problem"
    assert finding.text.startswith(str(path))
    assert said in finding.text
    with pytest.raises(DecodeError, match=re.escape(finding.text)), loader(root) as batches:
        list(batches)
    assert {f.status for name, f in findings.items() if name.startswith(TOP)} == {"ok"}  # the other camera is as it was


def test_links_to_nothing_and_to_a_pointer(vp9_demo: Path, tmp_path: Path) -> None:
    """As in the Hub's cache, where names are links to files named by their hash."""
    root = copied(vp9_demo, tmp_path)
    first, second = sorted(root.glob(f"videos/{SIDE}/**/*.mp4"))[0], sorted(root.glob(f"videos/{TOP}/**/*.mp4"))[0]
    blob = tmp_path / "blobs/4d7a214614ab2935"
    blob.parent.mkdir()
    blob.write_bytes(POINTER)
    for path, target in ((first, blob), (second, tmp_path / "blobs/gone")):
        path.unlink()
        path.symlink_to(os.path.relpath(target, path.parent))
    findings = looked_at(root)
    assert "git lfs pull" in findings[f"{SIDE} file 1"].text
    assert "no such file" in findings[f"{TOP} file 1"].text
    assert findings[SIDE].status == "ok"  # by its other file


def test_damage_behind_a_whole_index(encoded: Callable[..., Path]) -> None:
    root = encoded(*h264(2))
    path = root / VIDEO.format(CAMERA, 0)
    data = bytearray(path.read_bytes())
    at = data.index(b"mdat") + 4
    size = struct.unpack_from(">I", data, at - 8)[0] - 8
    data[at + 1000 : at + size] = bytes(size - 1000)
    path.write_bytes(data)
    findings = looked_at(root)
    assert findings[CAMERA].status == "ok"
    finding = findings[f"{CAMERA} file 1"]
    assert finding.text.startswith(str(path))
    assert "is damaged: " in finding.text


def test_an_edit_list_that_hides_frames(tmp_path: Path) -> None:
    """The first 15 frames. FFmpeg copies the file from the keyframe before them, which is frame 12."""
    whole = encode(draw(), tmp_path / "whole.mp4", h264(12))
    ffmpeg("-ss", "0.5", "-i", whole, "-c", "copy", tmp_path / "cut.mp4")
    findings = looked_at(write_dataset(tmp_path / "right", [tmp_path / "cut.mp4"], [(72 - 15,)]))
    assert [finding.name for finding in findings.values() if finding.status == "problem"] == []
    assert describe(Dataset(tmp_path / "right")).whole
    findings = looked_at(write_dataset(tmp_path / "wrong", [tmp_path / "cut.mp4"], [(72 - 14,)]))
    text = findings[f"{CAMERA} timestamps"].text
    assert "the file has 57 frames (3 more are hidden by its edit list), and its episodes have 58 rows" in text


def test_rows_that_are_offset_against_the_video(encoded: Callable[..., Path]) -> None:
    root = shifted(encoded(*h264(12)), 1)
    finding = looked_at(root)[f"{CAMERA} timestamps"]
    assert finding.status == "problem"
    assert finding.text.startswith(f"{CAMERA}: episode 0, frame 30: {root}/")
    assert "outside its episode, which begins at 0.0000 s, and the next episode of the file begins at 1.0333 s" in finding.text
    assert finding.text.endswith(". 2 of 2 episodes have such faults")


def test_wall_clock_timestamps_have_the_clock_as_their_remedy(encoded: Callable[..., Path]) -> None:
    """Every episode has faults, and none of them has to be excluded."""
    findings = looked_at(shifted(encoded(*h264(12)), 0.3))
    finding = findings[f"{CAMERA} timestamps"]
    assert [each.name for each in findings.values() if each.status == "problem"] == [finding.name]
    assert 'Dataset(clock="frame_index"), or --clock frame_index on the command line' in finding.text
    assert "`dali-stream prepare URI OUT --clock frame_index`" in finding.text


def test_frames_of_another_size_than_promised(demo_copy: Path) -> None:
    info = json.loads((demo_copy / INFO).read_text())
    info["features"][TOP]["shape"][:2] = [64, 64]
    (demo_copy / INFO).write_text(json.dumps(info))
    findings = looked_at(demo_copy)
    finding = findings[f"{TOP} timestamps"]
    assert "frames must be 64×64, as meta/info.json says, got 128×160. Set image_size=" in finding.text
    assert findings[SIDE].status == "ok"


@pytest.mark.usefixtures("doctor_here")
def test_the_cpu_in_place_of_nvdec_since_there_are_many_threads(
    plain: Path, gpu_machine: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The route of a Loader on this machine, and no reason to encode the videos again."""
    texts = []
    for cores in (8, 9):
        monkeypatch.setattr("dali_stream.system.cpu.cores", lambda cores=cores: cores)
        gpu_machine.has("t4")
        finding = found(doctor(plain), f"{CAMERA} on GPU 0")
        assert (finding["status"], finding["remedy"]) == ("ok", "")
        texts.append(finding["text"])
        with Loader(plain, batch_size=1, device="cuda", num_threads=cores) as loader:
            assert loader.routes[CAMERA].reason in finding["text"]
    with_engines = "h264 420 8 bit of 128×160 with 2 engines, worth about 8 threads, and num_threads is"
    assert texts == [f"NVDEC decodes {with_engines} 8", f"torchcodec: NVDEC would decode {with_engines} 9"]

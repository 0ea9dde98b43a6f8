"""`dali-stream doctor URI`: what a dataset's videos are, a frame by every decoder, and what broken files are instead."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support import broken
from support.datasets import ODD_CAMERA, ODD_SIZE, SIDE, TOP, VIDEO, Column, build, copied, image_file
from support.doctor import bad, cpu_torch, doctor, found, run, shadows
from support.driver import FakeDriver
from support.programs import driver, failed
from support.servers import Server
from support.slow import slow
from support.tools import table_of
from support.videos import CAMERA, av1, draw, encode, ffmpeg, h264, hevc, loader, shifted, vp9, write_dataset

import dali_stream
from dali_stream import Dataset
from dali_stream.lerobot.info import INFO
from dali_stream.system import memory_limit
from dali_stream.system.memory_limit import MemoryLimit
from dali_stream.tools.description import describe
from dali_stream.tools.diagnosis import Finding, frames, video
from dali_stream.tools.diagnosis.camera import Camera
from dali_stream.tools.diagnosis.frames import Decoders, Deep
from dali_stream.tools.diagnosis.rows import Rows
from dali_stream.tools.diagnosis.run import examine as examine_dataset
from dali_stream.tools.diagnosis.run import open_dataset
from dali_stream.tools.isolated import Answer

NO_DECODER = Decoders(False, False, {})
TORCHCODEC = Decoders(True, False, {})


def looked_at(root: Path, decoders: Decoders = NO_DECODER, limit_s: float = 120) -> tuple[dict[str, Finding], dict[str, Any]]:
    """Findings and facts of the doctor's examination of a dataset, on a machine with these decoders."""
    findings, facts = examine_dataset(Dataset(root), decoders, limit_s)
    assert all(bool(f.remedy) == (f.status != "ok") for f in findings)
    return {finding.name: finding for finding in findings}, facts


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function (encoder's arguments) -> dataset of one camera and one file."""

    def dataset(*arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("encoded")
        return write_dataset(folder / "data", [encode(draw(), folder / "a.mp4", arguments)])

    return dataset


# ---- healthy datasets


@pytest.fixture(scope="module")
def healthy(vp9_demo: Path) -> dict[str, Any]:
    """The report on this machine and a healthy dataset."""
    return doctor(vp9_demo)


@pytest.mark.slow
def test_a_healthy_machine_without_a_gpu(healthy: dict[str, Any]) -> None:
    if driver():
        pytest.skip("this machine has a driver")
    report = healthy
    assert list(report) == ["findings", "gpus", "software", "machine", "dataset", "status"]
    assert report["status"] in ("ok", "warning")
    assert not [f for f in bad(report) if f[0] == "problem"]
    assert all(list(f) == ["area", "name", "status", "text", "remedy"] for f in report["findings"])
    assert len({(f["area"], f["name"]) for f in report["findings"]}) == len(report["findings"])
    assert report["gpus"] == []
    assert set(report["software"]) == {
        "python", "dali", "dali_builds", "torch", "torch_cuda", "torchcodec", "ffmpeg", "ffmpeg_program",
    }  # fmt: skip
    assert 4 <= report["software"]["ffmpeg"] <= 8
    assert report["machine"]["cores"] >= 1


@pytest.mark.slow
def test_a_frame_of_each_camera_by_every_decoder(healthy: dict[str, Any]) -> None:
    report = healthy
    assert [(f["status"], f["name"]) for f in report["findings"] if f["area"] == "dataset" and f["status"] != "ok"] == []
    assert set(report["dataset"]) == {"uri", "address", "episodes", "frames", "fps", "cameras"}
    for camera in (TOP, SIDE):
        facts = report["dataset"]["cameras"][camera]
        assert facts["routes"]["CPU"]["decoder"] == "torchcodec"
        assert set(facts["decoded"]) == {"torchcodec", "DALI on the CPU"}
        assert facts["decoded"]["DALI on the CPU"] == {"error": "", "difference": ""}
        assert found(report, f"{camera} frame, DALI on the CPU")["text"] == "decoded, like torchcodec on the CPU"
        assert (facts["codec"], facts["gop_max"], facts["hidden_frames"]) == ("vp9", 12, 0)
    assert found(report, "rows")["status"] == "ok"


@pytest.mark.slow
def test_a_decoder_that_fails_where_another_does_not_is_not_the_files_fault(
    vp9_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call_each(calls: Sequence[partial[Any]], limit_s: float) -> list[Answer]:
        return [Answer({}, "no surface", "DecodeError") if call.args[2] else Answer(draw()[0]) for call in calls]

    monkeypatch.setattr(frames, "call_each", call_each)
    report = doctor(vp9_demo, libraries=shadows(tmp_path))
    finding = found(report, f"{TOP} frame, DALI on the CPU")
    assert (finding["status"], finding["text"]) == ("problem", "no surface. torchcodec decodes it")
    assert "copy" not in finding["remedy"]
    assert found(report, f"{TOP} frame, torchcodec")["status"] == "ok"


@pytest.mark.slow
def test_a_decoder_that_delivers_another_frame_is_a_problem(
    vp9_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call_each(calls: Sequence[partial[Any]], limit_s: float) -> list[Answer]:
        return [Answer(draw()[1 if call.args[2] else 0]) for call in calls]

    monkeypatch.setattr(frames, "call_each", call_each)
    report = doctor(vp9_demo, libraries=shadows(tmp_path))
    finding = found(report, f"{TOP} frame, DALI on the CPU")
    assert finding["status"] == "problem"
    assert finding["text"].startswith("its frame must differ from FFmpeg's by at most 4 of 255 on average, got ")
    assert 'decode="torchcodec"' in finding["remedy"]
    assert found(report, f"{TOP} frame, torchcodec")["status"] == "ok"


def test_decoders_are_compared_with_each_other_where_torchcodec_fails(encoded: Callable[..., Path]) -> None:
    right, other = draw()[:2]
    camera = Camera(CAMERA, Rows(Dataset(encoded(*vp9(12))), False), NO_DECODER, None)
    camera.frame = {"episode": 0, "frame": 0}
    camera.decoded = {
        "torchcodec": Answer({}, "no such codec", "DecodeError"),
        "DALI on the CPU": Answer(right),
        "NVDEC of GPU 0": Answer(other),
        "NVDEC of GPU 1": Answer(right),
    }
    failing, first, wrong, same = video.check_frame(camera)
    assert (failing.status, failing.text) == ("problem", "no such codec. DALI on the CPU decodes it")
    assert (first.status, first.text) == ("ok", "decoded")
    assert (same.status, same.text) == ("ok", "decoded, like DALI on the CPU")
    assert wrong.status == "problem"
    assert wrong.text.startswith("its frame must differ from that of DALI on the CPU by at most 4 of 255 on average, got ")
    assert "torchcodec" not in wrong.remedy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "codec", "reason"),
    [
        ((120, 128), h264(12), "120×128 is outside what NVDEC takes"),  # of less than 80×144 the fake driver decodes nothing
        slow((242, 326), hevc(12), "242×326 is coded as 248×328 in hevc"),
    ],
)
def test_sizes_that_no_codec_brings_to_nvdec_are_not_sent_round_in_circles(
    size: tuple[int, int], codec: tuple[str, ...], reason: str, tmp_path: Path, fake_driver: FakeDriver
) -> None:
    encode(draw(size=size), tmp_path / "a.mp4", codec)
    root = write_dataset(tmp_path / "odd", [tmp_path / "a.mp4"], size=size)
    done = run(root, "--json", environment=fake_driver("h100"), libraries=shadows(tmp_path / "libraries", torch=cpu_torch()))
    finding = found(json.loads(done.stdout), f"{CAMERA} on GPU 0")
    assert reason in finding["text"]
    assert "prepare" not in finding["remedy"]


@pytest.mark.slow
def test_the_route_on_each_gpu_and_why(demo: Path, fake_driver: FakeDriver, tmp_path: Path) -> None:
    """AV1, which an H100 does not decode and an L4 does."""
    libraries = shadows(tmp_path, torch=cpu_torch(), dali="raise ImportError('not here')")
    done = run(demo, "--json", environment=fake_driver("h100", "h100", "l4", "mig"), libraries=libraries)
    report = json.loads(done.stdout)
    first, other = found(report, f"{TOP} on GPU 0, 1"), found(report, f"{TOP} on GPU 2")
    assert (first["status"], "no NVDEC decoder for av1" in first["text"]) == ("warning", True)
    assert "`dali-stream prepare URI OUT --codec hevc`" in first["remedy"]
    assert (other["status"], other["text"].startswith("NVDEC decodes av1")) == ("ok", True)
    assert "prepare" not in found(report, f"{TOP} on GPU 3")["remedy"]  # a MIG slice without engines decodes nothing
    routes = report["dataset"]["cameras"][TOP]["routes"]
    assert {where: route["decoder"] for where, route in routes.items()} == {
        "CPU": "torchcodec", "GPU 0, 1": "torchcodec", "GPU 2": "dali", "GPU 3": "torchcodec",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "traits", "hidden"),
    [
        slow(h264(12, open_gop=True), {"open_gops": True, "b_frames": True, "codec": "h264"}, False),
        (hevc(12), {"open_gops": False, "b_frames": True, "codec": "hevc"}, False),
        (av1(2), {"open_gops": False, "b_frames": False, "codec": "av1", "gop_max": 2}, False),
        (av1(30), {"codec": "av1", "gop_max": 30}, True),
        slow(vp9(12), {"codec": "vp9", "b_frames": False}, False),
    ],
    ids=["h264 open", "hevc", "av1 2", "av1 30", "vp9"],
)
def test_what_a_cameras_video_is(
    arguments: tuple[str, ...], traits: dict[str, Any], hidden: bool, encoded: Callable[..., Path]
) -> None:
    """Hidden frames against what is known of the encoders: SVT-AV1 has them at GOP 30 and not at 2."""
    findings, facts = looked_at(encoded(*arguments), TORCHCODEC if "libx264" in arguments else NO_DECODER)
    camera = facts["cameras"][CAMERA]
    assert {key: camera[key] for key in traits} == traits
    assert (camera["hidden_frames"] > 0) == hidden
    said = findings[f"{CAMERA} structure"].text.partition(";")[0]
    assert ("hidden frames in" in said) == hidden
    assert said.startswith("no ") or ("B-frames" in said) == camera["b_frames"]
    if "libx264" in arguments:
        assert findings[f"{CAMERA} frame, torchcodec"].status == "ok"


@pytest.mark.parametrize(
    ("split", "arguments"),
    [
        ("av1_frame_split", av1(30)),
        slow("vp9_superframe_split", vp9(60, hidden=True)),
        # Profile 3, whose header has a bit more.
        slow("vp9_superframe_split", vp9(60, pixels="yuv444p10le", hidden=True)),
    ],
    ids=["av1", "vp9", "vp9 profile 3"],
)
def test_hidden_frames_are_those_that_ffmpeg_counts(
    split: str, arguments: tuple[str, ...], encoded: Callable[..., Path]
) -> None:
    """A sample shows one frame, so what FFmpeg's filters split samples into, beyond one each, is hidden."""
    root = encoded(*arguments)
    source = root / VIDEO.format(CAMERA, 0)
    command = ["ffmpeg", "-v", "error", "-i", source, "-c", "copy", "-bsf:v", split, "-f", "framecrc", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    frames = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    camera = looked_at(root)[1]["cameras"][CAMERA]
    assert camera["hidden_of"] == 72
    assert camera["hidden_frames"] == len(frames) - 72 > 0


def test_images_in_rows(tmp_path: Path, odd: Path) -> None:
    findings, facts = looked_at(odd)
    assert findings["rows"].status == "ok"
    assert all(findings[key].status == "ok" for key in facts["cameras"])


# ---- broken ones: whatever the Loader refuses


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Healthy datasets by codec, as `broken.healthy` writes them. Read only."""
    return functools.cache(lambda codec: broken.healthy(tmp_path_factory.mktemp(codec), codec))


def problems(root: Path, deep: bool) -> list[str]:
    """The problems that the doctor finds in a dataset, without the decoders of its one frame, which take processes."""
    opened = open_dataset(root)
    if isinstance(opened, Finding):
        return [opened.text]
    every = Deep(opened, lambda done, total: None) if deep else None
    return [f.text for f in examine_dataset(opened, NO_DECODER, 120, every)[0] if f.status == "problem"]


def refused(root: Path) -> str:
    """Error message of an epoch of a Loader, empty if it succeeds."""
    try:
        with loader(root) as batches:
            for _ in batches:
                pass
    except dali_stream.DaliStreamError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", broken.WAYS)
def test_what_the_loader_refuses_is_a_problem(name: str, sound: Callable[[str], Path], tmp_path: Path) -> None:
    """All ways of breaking a dataset that the tests know; those that need decoding with --deep."""
    way = broken.WAYS[name]
    root = copied(sound(way.codec), tmp_path)
    way.apply(root)
    assert refused(root)
    assert problems(root, way.decodes)


@pytest.mark.parametrize("name", [name for name in broken.WAYS if name.endswith("LFS pointer")])
def test_a_git_lfs_pointer_is_named_wherever_it_lies(name: str, sound: Callable[[str], Path], tmp_path: Path) -> None:
    """JSON, JSON Lines, Parquet and MP4."""
    root = copied(sound(broken.WAYS[name].codec), tmp_path)
    broken.WAYS[name].apply(root)
    said = refused(root)
    assert "the file is a Git LFS pointer, which only names the content. Run `git lfs pull`" in said
    assert "hf://datasets/OWNER/NAME" in said


@pytest.mark.parametrize("codec", ["h264", "image", "v2.1"])
def test_a_sound_dataset_has_no_problem(codec: str, sound: Callable[[str], Path]) -> None:
    assert refused(sound(codec)) == ""
    assert problems(sound(codec), deep=False) == problems(sound(codec), deep=True) == []


def test_what_deep_says_of_a_damaged_packet(sound: Callable[[str], Path], tmp_path: Path) -> None:
    root = copied(sound("h264"), tmp_path)
    broken.WAYS["packet: zeros"].apply(root)
    done: list[tuple[int, int]] = []
    every = Deep(Dataset(root), lambda *counts: done.append(counts))
    findings, _ = examine_dataset(Dataset(root), NO_DECODER, 120, every)
    [finding] = [f for f in findings if f.name == f"{CAMERA} all frames"]
    assert finding.text.startswith(f"episode 1, frame 8: {root}/videos/")  # the frame that the Loader names
    assert done[-1] == (72, 72)


def test_every_missing_file_is_counted_and_named(demo_copy: Path) -> None:
    gone = [*sorted(demo_copy.glob(f"videos/{SIDE}/**/*.mp4"))[1:], *demo_copy.glob("data/**/*.parquet")]
    for path in gone:
        path.unlink()
    finding = looked_at(demo_copy)[0]["files"]
    assert finding.status == "problem"
    assert f"{len(gone)} of " in finding.text
    assert all(str(path.relative_to(demo_copy)) in finding.text for path in gone[:3])


def test_a_remote_dataset_takes_few_requests(tmp_path: Path) -> None:
    """HTTP has no listings: 32 of 100 files are looked for, and the missing one is among those that are read."""
    video = encode(draw((6,)), tmp_path / "a.mp4", h264(2))
    root = write_dataset(tmp_path / "many", [video] * 100, [(6,)] * 100)
    (root / VIDEO.format(CAMERA, 99)).unlink()
    with Server(root) as server:
        findings = {f.name: f for f in examine_dataset(Dataset(server.url), NO_DECODER, 120)[0]}
        assert len(server.requests) < 250
    assert "file-099.mp4: no such file" in findings[f"{CAMERA} file 1"].text
    assert findings["rows"].text.endswith("in 32 checked episodes of 100")


def test_what_long_gops_cost(encoded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """72 frames in two GOPs of 36: 18.5 decodes for a random frame."""
    findings, _ = looked_at(encoded(*h264(36)))
    finding = findings[f"{CAMERA} GOPs"]
    assert finding.status == "ok"
    assert "without the cache in memory, which holds all frames of 224×224 with the default memory_budget of" in finding.text
    frames_bytes = 72 * 224 * 224 * 3  # half of the default, which is a quarter of the machine's memory, must hold them
    monkeypatch.setattr(memory_limit, "memory_limit", lambda: MemoryLimit(8 * frames_bytes - 8, "this machine"))
    findings, _ = looked_at(encoded(*h264(36)))
    finding = findings[f"{CAMERA} GOPs"]
    assert finding.status == "warning"
    assert finding.text == "GOP 36 decodes 18 frames per delivered frame without the cache in memory"
    assert "`dali-stream prepare URI OUT --codec h264 --gop 2`" in finding.remedy
    assert finding.remedy.endswith("`dali-stream bench URI` measures the frames per second with each of them")
    assert f"{CAMERA} GOPs" not in looked_at(encoded(*h264(2)))[0]


# ---- broken datasets: findings


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _late_index(data: bytes) -> bytes:
    """File of a recorder that died: media data and no index."""
    return data[: data.index(b"moov") - 4]


def _fat(data: bytes) -> bytes:
    at = data.index(b"mdat")
    return data[: at - 4] + struct.pack(">I", 1 << 30) + data[at:]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "lfs": (lambda _: POINTER, "a Git LFS pointer", "git lfs pull"),
    "html": (lambda _: b"<!DOCTYPE html><html>404</html>", "an HTML page", "a server's answer"),
    "json": (lambda _: b'{"error":"Repository not found"}', "JSON", "a server's answer"),
    "xml": (lambda _: b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML", "a server's answer"),
    "empty": (lambda _: b"", "The file is empty", "fetch or copy"),
    "gzip": (gzip.compress, "gzip", "unpack it"),
    "zeros": (lambda data: bytes(len(data)), "zeros", "fetch or copy"),
    "cut": (_cut, ": box 'mdat' at byte", "fetch or copy"),
    "fat": (_fat, ": box 'mdat' at byte", "fetch or copy"),
    "no index": (_late_index, "its recording was not finished", "record it again"),
    "noise": (lambda data: bytes(range(1, 255)) * 9, "an unknown format", "fetch or copy"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_a_broken_file_looks_like(kind: str, vp9_demo: Path, tmp_path: Path) -> None:
    make, looks, remedy = BROKEN[kind]
    root = copied(vp9_demo, tmp_path)
    path = sorted(root.glob(f"videos/{SIDE}/**/*.mp4"))[0]
    data = make(path.read_bytes())
    path.write_bytes(data)
    findings, _ = looked_at(root)
    finding = findings[f"{SIDE} file 1"]
    assert finding.status == "problem"
    assert finding.text.startswith(str(path))
    assert looks in finding.text
    assert remedy in finding.remedy
    assert data[:16].hex(" ") in finding.text
    assert {f.status for name, f in findings.items() if name.startswith(TOP)} == {"ok"}  # the other camera is as it was


def test_where_a_link_leads(vp9_demo: Path, tmp_path: Path) -> None:
    """As in the Hub's cache, where names are links to files named by their hash."""
    root = copied(vp9_demo, tmp_path)
    first, second = sorted(root.glob(f"videos/{SIDE}/**/*.mp4"))[0], sorted(root.glob(f"videos/{TOP}/**/*.mp4"))[0]
    blob = tmp_path / "blobs/4d7a214614ab2935"
    blob.parent.mkdir()
    blob.write_bytes(POINTER)
    for path, target in ((first, blob), (second, tmp_path / "blobs/gone")):
        path.unlink()
        path.symlink_to(os.path.relpath(target, path.parent))
    findings, facts = looked_at(root)
    assert f"Its name leads to {blob}" in findings[f"{SIDE} file 1"].text
    assert f"Its name leads to {tmp_path / 'blobs/gone'}, which does not exist" in findings[f"{TOP} file 1"].text
    assert facts["cameras"][SIDE]["frame"]["episode"] == 1  # the first whose file is whole


def test_damage_behind_a_whole_index(encoded: Callable[..., Path]) -> None:
    root = encoded(*h264(2))
    path = root / VIDEO.format(CAMERA, 0)
    data = bytearray(path.read_bytes())
    at = data.index(b"mdat") + 4
    size = struct.unpack_from(">I", data, at - 8)[0] - 8
    data[at + 1000 : at + size] = bytes(size - 1000)
    path.write_bytes(data)
    findings, _ = looked_at(root)
    assert findings[CAMERA].status == "ok"
    finding = findings[f"{CAMERA} file"]
    assert finding.text.startswith(str(path))
    assert "is damaged: " in finding.text
    assert "It looks like an MP4" in finding.text
    assert "exclude its episodes" in finding.remedy


def test_an_edit_list_that_hides_frames(tmp_path: Path) -> None:
    """The first 15 frames. FFmpeg copies the file from the keyframe before them, which is frame 12."""
    whole = encode(draw(), tmp_path / "whole.mp4", h264(12))
    ffmpeg("-ss", "0.5", "-i", whole, "-c", "copy", tmp_path / "cut.mp4")
    findings, facts = looked_at(write_dataset(tmp_path / "right", [tmp_path / "cut.mp4"], [(72 - 15,)]))
    assert [finding.name for finding in findings.values() if finding.status == "problem"] == []
    assert "3 of 60 frames hidden by edit lists" in findings[f"{CAMERA} structure"].text
    assert facts["cameras"][CAMERA]["hidden_by_edit_lists"] == 3
    assert describe(Dataset(tmp_path / "right")).whole
    findings, _ = looked_at(write_dataset(tmp_path / "wrong", [tmp_path / "cut.mp4"], [(72 - 14,)]))
    text = findings[f"{CAMERA} timestamps"].text
    assert "the file has 57 frames (3 more are hidden by its edit list), and its episodes have 58 rows" in text


@pytest.mark.slow
def test_rows_that_cannot_be_read(demo_copy: Path) -> None:
    for path in demo_copy.glob("data/**/*.parquet"):
        path.write_bytes(POINTER)
    findings, _ = looked_at(demo_copy, Decoders(torchcodec=True, dali=False, gpus={}))
    assert "a Git LFS pointer" in findings["rows"].text
    assert "git lfs pull" in findings["rows"].remedy
    assert findings[f"{TOP} frame, torchcodec"].status == "ok", "broken rows do not hide a decoder"
    assert findings[TOP].status == "ok"


def test_rows_that_are_offset_against_the_video(encoded: Callable[..., Path]) -> None:
    root = shifted(encoded(*h264(12)), 1)
    finding = looked_at(root)[0][f"{CAMERA} timestamps"]
    assert finding.status == "problem"
    assert finding.text.startswith("episode 0, frame 30: ")
    assert "outside its episode, which begins at 0.0000 s, and the next episode of the file begins at 1.0333 s" in finding.text
    assert finding.text.endswith(". 2 of 2 episodes have such faults")


def test_a_to_timestamp_that_is_a_frame_short_is_a_warning(encoded: Callable[..., Path]) -> None:
    root = encoded(*h264(12))
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    at = table.column_names.index(f"videos/{CAMERA}/to_timestamp")
    pq.write_table(table.set_column(at, table.column_names[at], pa.array([31 / 30, 71 / 30])), path)
    findings = looked_at(root)[0]
    assert findings[f"{CAMERA} timestamps"].status == "ok"
    finding = findings[f"{CAMERA} to_timestamp"]
    assert finding.status == "warning"
    assert (
        "end of the last frame in 1 of 2 episodes: episode 1 has 41 frames at 30 fps from 1.0333 s to 2.3667 s" in finding.text
    )


def test_wall_clock_timestamps_have_the_clock_as_their_remedy(encoded: Callable[..., Path]) -> None:
    """Every episode has faults, and none of them has to be excluded."""
    findings = looked_at(shifted(encoded(*h264(12)), 0.3))[0]
    finding = findings[f"{CAMERA} timestamps"]
    assert [each.name for each in findings.values() if each.status == "problem"] == [finding.name]
    assert finding.remedy.startswith("each row has its frame at frame_index / fps. Dataset(clock=")
    assert "`dali-stream prepare URI OUT --clock frame_index`" in finding.remedy


def test_a_timestamp_that_falls(demo_copy: Path) -> None:
    """In the last episode, which is not the one whose rows are read whole."""
    path = max(demo_copy.glob("data/**/*.parquet"))
    table = pq.read_table(path)
    times = table["timestamp"].to_numpy().copy()
    times[-5] = 0.15
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", pa.array(times)), path)
    findings, _ = looked_at(demo_copy)
    assert findings["rows"].status == "problem"
    message = rf"Invalid timestamp of row \d+ in {re.escape(str(path))}: episode 5: must be greater than .*, got 0\.1500 s"
    assert re.search(message, findings["rows"].text)


def test_frames_of_another_size_than_promised(demo_copy: Path) -> None:
    info = json.loads((demo_copy / INFO).read_text())
    info["features"][TOP]["shape"][:2] = [64, 64]
    (demo_copy / INFO).write_text(json.dumps(info))
    findings, _ = looked_at(demo_copy)
    finding = findings[f"{TOP} timestamps"]
    assert "frames must be 64×64, as meta/info.json says, got 128×160. Set image_size=" in finding.text
    assert finding.remedy == "correct the shape in meta/info.json, or do what the message says"
    assert findings[SIDE].status == "ok"


@pytest.mark.slow
def test_a_decoder_that_crashes_takes_nothing_with_it(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = shadows(tmp_path)
    (libraries / "torchcodec/decoders/__init__.py").write_text("import os\ndef VideoDecoder(*a, **k): os.abort()\n")
    monkeypatch.syspath_prepend(libraries)
    findings, facts = looked_at(demo, TORCHCODEC)
    for camera in (TOP, SIDE):
        assert "crashed with SIGABRT" in findings[f"{camera} frame, torchcodec"].text
        assert facts["cameras"][camera]["decoded"]["torchcodec"]["error"]


@pytest.mark.slow
def test_broken_metadata_is_a_finding(demo_copy: Path, tmp_path: Path) -> None:
    (demo_copy / INFO).write_text("{")
    report = doctor(demo_copy, libraries=shadows(tmp_path / "libraries"))
    assert (report["status"], report["dataset"], found(report, "metadata")["status"]) == ("problem", None, "problem")
    assert str(demo_copy / INFO) in found(report, "metadata")["text"]


@pytest.mark.slow
def test_a_storage_that_does_not_answer_is_a_finding_without_secrets(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: it refuses
        address = f"http://me:hunter2@127.0.0.1:{unused.getsockname()[1]}/data?sig=hunter2"
        options = {"give_up_after_s": 0.3, "storage_options": {"headers": {"Authorization": "hunter2"}}}
        report = doctor(address, libraries=shadows(tmp_path), **options)
    assert found(report, "storage")["status"] == "problem"
    assert "127.0.0.1" in found(report, "storage")["text"]
    assert "hunter2" not in json.dumps(report)


# ---- mixture files


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Folder with the datasets `pick` of 9 rows, and `fold` of 50, without cameras."""
    for name, lengths in (("pick", (5, 4)), ("fold", (25, 25))):
        build(tmp_path / name, lengths, {"observation.state": Column("float32", [2], np.zeros((sum(lengths), 2)))})
    return tmp_path


def mixture(folder: Path, **content: Any) -> Path:
    (path := folder / "mixture.json").write_text(json.dumps({"datasets": {"pick": "pick", "fold": "fold"}, **content}))
    return path


@pytest.mark.slow
def test_the_datasets_of_a_mixture_file_are_examined_one_by_one(parts: Path, tmp_path: Path) -> None:
    libraries = shadows(tmp_path / "libraries")
    report = doctor(mixture(parts), libraries=libraries)
    names = [f["name"] for f in report["findings"] if f["area"] == "dataset"]
    checks = ("metadata", "statistics", "files", "rows", "tasks")
    assert names == [*(f"{part}: {check}" for part in ("pick", "fold") for check in checks), "mixture"]
    assert found(report, "fold: rows")["text"] == "rows are whole in 2 checked episodes of 2"
    assert found(report, "mixture")["text"] == "2 datasets, 59 samples an epoch"
    assert report["dataset"]["uri"] == str(parts / "mixture.json")
    assert {name: part["frames"] for name, part in report["dataset"]["datasets"].items()} == {"pick": 9, "fold": 50}
    report = doctor(mixture(parts), libraries=libraries, episodes=[1])  # in each dataset
    assert found(report, "mixture")["text"] == "2 datasets, 29 samples an epoch"

    # A dataset that cannot be opened hides nothing of the others.
    (parts / "pick" / INFO).write_text("{")
    [path] = parts.glob("fold/data/**/*.parquet")
    path.unlink()
    report = doctor(mixture(parts), libraries=libraries)
    problems = [name for status, name in bad(report) if status == "problem"]
    assert problems == ["pick: metadata", "fold: files", "fold: rows"]
    assert str(parts / "pick" / INFO) in found(report, "pick: metadata")["text"]
    assert report["dataset"]["datasets"]["pick"] is None
    assert "mixture" not in [f["name"] for f in report["findings"]]


@pytest.mark.slow
def test_datasets_that_cannot_be_mixed_are_a_problem(parts: Path, tmp_path: Path) -> None:
    libraries = shadows(tmp_path / "libraries")
    report = doctor(mixture(parts, weights={"pick": 9, "fold": 1}), libraries=libraries)
    assert (found(report, "mixture")["status"], report["status"]) == ("warning", "warning")
    assert "An epoch shows each frame of pick 50 times as often as those of fold" in found(report, "mixture")["text"]
    for content, said in (
        ({"weights": {"pick": 1}}, "weights must name each dataset, got none for 'fold'"),
        ({"keys": {"fold": {"observation.state": "state"}}}, "observation.state"),
    ):
        finding = found(doctor(mixture(parts, **content), libraries=libraries), "mixture")
        assert finding["status"] == "problem"
        assert said in finding["text"]


def test_bad_arguments_of_a_mixture_file_are_told_in_a_line(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mixture(parts)
    assert "data_files_root belongs to one dataset" in failed(capsys, ["doctor", path, "--data-files-root", parts], 2)
    assert "Cannot read mixture file" in failed(capsys, ["doctor", parts / "no.yaml"], 2)
    said = failed(capsys, ["doctor", path, "--cameras", "top"], 2)
    assert "dataset 'pick': " in said
    assert "'top'" in said


# ----------------------------------------------------------------------- what is readable, and teaches nothing


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


def test_git_lfs_pointers_are_counted_and_nothing_else_is_said_of_unread_rows(demo_copy: Path) -> None:
    for path in demo_copy.rglob("data/**/*.parquet"):
        path.write_bytes(POINTER)
    findings, _ = looked_at(demo_copy)
    rows = len(list(demo_copy.rglob("data/**/*.parquet")))
    assert findings["files"].status == "problem"
    assert f"{rows} of " in findings["files"].text
    assert "are Git LFS pointers, which only name the content: data/" in findings["files"].text
    assert "git lfs pull" in findings["files"].remedy
    for name in ("tasks", f"{TOP} timestamps"):
        assert findings[name].status == "warning"
        assert "no row could be read" in findings[name].text


def test_an_image_that_is_a_git_lfs_pointer(tmp_path: Path) -> None:
    images = Column("image", (*ODD_SIZE, 3), [{"bytes": POINTER, "path": None}] * 5)
    findings, _ = looked_at(build(tmp_path, (5,), {ODD_CAMERA: images}))
    assert findings[ODD_CAMERA].status == "problem"
    assert "Git LFS pointer" in findings[ODD_CAMERA].text


@pytest.mark.parametrize("key", ["action", "actions", "action.arm"])
def test_an_action_that_never_changes_is_a_warning(tmp_path: Path, key: str) -> None:
    still = Column("float32", [7], np.full((9, 7), 0.25))
    moving = Column("float32", [2], np.arange(18).reshape(9, 2))
    findings, _ = looked_at(build(tmp_path / "still", (5, 4), {key: still, "observation.state": still}))
    assert findings["actions"].status == "warning"
    said = f"{key} never changes in the 9 rows of the checked episodes: 0.25, 0.25, 0.25, 0.25, 0.25, ..."
    assert findings["actions"].text == said
    assert "actions" not in looked_at(build(tmp_path / "moving", (5, 4), {key: moving, "observation.state": still}))[0]


@pytest.mark.parametrize("level", [0, 128])
def test_a_camera_that_is_one_flat_colour_is_a_warning(tmp_path: Path, level: int) -> None:
    """The frames have the noise of a sensor, as under a lens cap."""
    noise = np.random.default_rng(0).normal(level, 1, (9, *ODD_SIZE, 3)).round().clip(0, 255).astype(np.uint8)
    values = [{"bytes": image_file(Image.fromarray(frame)), "path": None} for frame in noise]
    findings, _ = looked_at(build(tmp_path, (9,), {ODD_CAMERA: Column("image", (*ODD_SIZE, 3), values)}))
    assert findings[f"{ODD_CAMERA} picture"].status == "warning"
    assert re.search(r"episode 0, frame 4 is one flat colour, \[\d+, \d+, \d+\] of 255", findings[f"{ODD_CAMERA} picture"].text)


@pytest.mark.slow
def test_a_video_that_is_one_flat_colour_is_a_warning(demo: Path, tmp_path: Path) -> None:
    """The other camera of the dataset shows something."""
    root = copied(demo, tmp_path)
    for path in root.glob(f"videos/{SIDE}/**/*.mp4"):
        count = len(table_of(path)[0])
        encode(np.full((count, 128, 160, 3), 90, np.uint8), path, av1(2), fps=20)
    findings, _ = looked_at(root, TORCHCODEC)
    assert findings[f"{SIDE} picture"].status == "warning"
    assert re.search(r"is one flat colour, \[(89|90), (89|90), (89|90)\] of 255", findings[f"{SIDE} picture"].text)
    assert f"{TOP} picture" not in findings

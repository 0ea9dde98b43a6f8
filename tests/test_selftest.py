"""The self-test of DALI's decoder: on a CPU, where DALI decodes VP9, it has to pass, and it has to see what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from driver_data import FakeDriver, fake_driver
from loader_data import TOP

from dali_stream.cli import main
from dali_stream.demo import write_demo
from dali_stream.selftest import identity, run, soak, speed, step, videos
from dali_stream.video import dali

__all__ = ["fake_driver"]


def test_without_a_gpu_it_says_so_and_that_is_no_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selftest"]) == 0
    assert capsys.readouterr().out.startswith("not run: no GPU that torch can use was found")
    assert main(["selftest", "--json", "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "not run"
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "finds no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gpu_that_torch_cannot_use_is_a_failure(fake_driver: FakeDriver) -> None:
    command = [sys.executable, "-m", "dali_stream", "selftest", "--json"]
    done = subprocess.run(command, env=fake_driver("h100"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["status"] == "failed"
    assert "the driver has NVIDIA H100 80GB HBM3, and no GPU that torch can use was found" in report["problems"][0]


@pytest.mark.slow
def test_it_passes_where_dali_decodes_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selftest", "--device", "cpu", "--soak", "1", "--out", str(tmp_path / "report.json")]) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["status"], report["problems"]) == ("passed", [])
    assert {codec for codec, reason in report["codecs"].items() if not reason} == {"vp9"}
    tried = {(row["gop"], row["shape"]) for row in report["identity"]}
    assert tried == {(gop, shape) for gop in ("1", "2", "12", "30", "mixed sizes") for shape in videos.SHAPES}
    for row in report["identity"]:
        assert row["pictures"] >= 24
        assert row["wrong"] == 0
        assert 0 < row["mean_error"] < dali.COLOUR_TOLERANCE
    assert {row["decoder"] for row in report["speed"]} == {"dali", "torchcodec"}
    assert {tuple(row["size"]) for row in report["speed"]} == {(480, 640), (360, 640)}
    assert {row.get("per_clip") for row in report["speed"]} == {1, 4, 16, None}
    assert report["soak"]["wrong"] == 0
    assert report["soak"]["pictures"] > 1000
    assert "av1 was not tried: DALI decodes vp8, vp9, mjpeg on a CPU" in said
    assert "passed on the CPU" in said


def test_pictures_of_another_frame_or_colour_are_seen(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["wrong"] for row in identity.measure([str(vp9_demo)], None)["shapes"].values()] == [0, 0, 0, 0]
    decode = dali.decode

    def neighbours(clips: Any, *rest: Any) -> Any:
        return [np.roll(pictures, 1, axis=0) for pictures in decode(clips, *rest)]

    monkeypatch.setattr(dali, "decode", neighbours)
    shapes = identity.measure([str(vp9_demo)], None)["shapes"]
    assert shapes["one frame"]["wrong"] == 0
    for shape in videos.SHAPES[1:]:
        assert shapes[shape]["wrong"] > 0.9 * shapes[shape]["pictures"]

    monkeypatch.setattr(dali, "decode", lambda *given: [np.flip(pictures, -1) for pictures in decode(*given)])
    shapes = identity.measure([str(vp9_demo)], None)["shapes"]
    assert all(row["wrong"] == 0 and row["mean_error"] > dali.COLOUR_TOLERANCE for row in shapes.values())


def test_what_dali_cannot_decode_is_a_result(tmp_path: Path) -> None:
    folder = write_demo(tmp_path / "h264", episodes=2, size=(128, 160), codec="h264")
    found = identity.measure([str(folder)], None)
    assert found["refused"] == "DALI decodes vp8, vp9, mjpeg on a CPU, and this is h264"
    for row in found["shapes"].values():
        assert row["wrong"] == row["pictures"]
        assert "Failed to create video decoder" in row["failed"]


@pytest.mark.slow
def test_epochs_through_the_loader_are_checked_picture_by_picture(vp9_demo: Path, tmp_path: Path) -> None:
    found = soak.measure(str(vp9_demo), "cpu", "dali", 0)
    assert (found["epochs"], found["wrong"], set(found["routes"].values())) == (2, 0, {"dali"})
    mixed = tmp_path / "mixed"
    videos.mix(str(mixed), str(vp9_demo), str(write_demo(tmp_path / "av1", episodes=2, size=(128, 160))))
    found = soak.measure(str(mixed), "cpu", "torchcodec", 0)
    assert (found["wrong"], found["route_changes"]) == (0, 0)
    # The second episode is said to begin a frame earlier than it does: each of its pictures is the one before.
    [path] = (mixed / "meta" / "episodes").glob("*/*.parquet")
    rows, key = pq.read_table(path), f"videos/{TOP}/from_timestamp"
    begins = pa.array([rows[key][0].as_py(), rows[key][1].as_py() - 1 / 20])
    pq.write_table(rows.set_column(rows.schema.get_field_index(key), key, begins), path)
    found = soak.measure(str(mixed), "cpu", "torchcodec", 0)
    assert found["wrong"] == found["epochs"] * 3 * rows["length"][1].as_py()


def test_speed_is_measured_for_every_setting(vp9_demo: Path) -> None:
    rows = speed.measure(str(vp9_demo), None, [(1, 2, 1), (16, 2, 2)], 0)["rows"]
    assert [(row["per_clip"], row["threads"], row["prefetch"]) for row in rows] == [(1, 2, 1), (16, 2, 2)]
    assert all(row["frames_per_s"] > 0 for row in rows)
    assert speed.measure_torchcodec(str(vp9_demo), 2, 0)["frames_per_s"] > 0


def test_a_step_that_fails_crashes_or_hangs_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = step.run("write", time_limit_s=60, folder=str(tmp_path / "new"), codec="none", gop=2, size=(128, 160))["failed"]
    assert failed.startswith("ValueError: Invalid codec")
    shadow = tmp_path / "elsewhere"  # the folder that it is called in is none of its business
    shadow.mkdir()
    (shadow / "pyarrow.py").write_text("raise SystemExit('shadow')")
    monkeypatch.chdir(shadow)
    again = step.run("write", time_limit_s=60, folder=str(tmp_path / "new"), codec="none", gop=2, size=(128, 160))
    assert again["failed"] == failed
    package = tmp_path / "path" / "nvidia" / "dali"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    for code, said in (
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import os; os._exit(3)", "ended with 3"),
    ):
        (package / "__init__.py").write_text(code)
        assert said in step.run("identity", time_limit_s=60, folders=[], gpu=None)["failed"]
    (package / "__init__.py").write_text("import threading; threading.Event().wait()")
    assert step.run("identity", time_limit_s=5, folders=[], gpu=None)["failed"] == "it did not end within 5 s and was ended"


WRONG = {
    "identity": ({"wrong": 2}, "vp9, GOP 12, one frame: 2 of 24 pictures are of another frame"),
    "colour": ({"mean_error": 9.0}, "vp9, GOP 12, one frame: the pictures differ from FFmpeg's by 9.0 on average"),
    "crash": ({"failed": "ended by SIGSEGV"}, "vp9, GOP 12, one frame: ended by SIGSEGV"),
    "loader": ({"wrong": 1}, "vp9 through the Loader: 1 of 90 pictures"),
    "route": ({"routes": {"top": "dali", "side": "torchcodec"}}, "vp9 through the Loader: a camera is not on the DALI route"),
    "soak": ({"routes": {"top": "torchcodec", "side": "dali"}}, "soak: a camera is not on the DALI route"),
    "write": ({"failed": "no encoder"}, "vp9: its videos cannot be written: no encoder"),
    "memory": ({"memory": {"first": 1 << 30, "last": 2 << 30}}, "memory grew from 1073741824 to 2147483648 bytes in 9 epochs"),
    "gpu_memory": ({"gpu_memory": {"first": 1 << 30, "last": 2 << 30}}, "gpu_memory grew"),
    "speed": ({"failed": "ended by SIGSEGV"}, "speed of vp9: ended by SIGSEGV"),
}


@pytest.mark.parametrize("what", [None, *WRONG])
def test_whatever_is_wrong_fails_the_test(
    what: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = WRONG[what][0] if what else {}
    picture = {"pictures": 24, "wrong": 0, "mean_error": 1.0, "failed": ""}
    epochs = {
        "routes": {"top": "dali", "side": "dali"},
        "route_changes": 0,
        "epochs": 9,
        "pictures": 90,
        "wrong": 0,
        "frames_per_s": 1.0,
    }
    epochs |= {"memory": {"first": 1 << 30, "last": 1 << 30}, "gpu_memory": None}
    rows = [{"per_clip": 1, "threads": 2, "prefetch": 1, "frames_per_s": 1.0}]
    if what in ("identity", "colour", "crash"):
        picture |= change
    elif what == "speed":
        rows = [change]
    elif what != "write":
        epochs |= change
    answers = {
        "write": change if what == "write" else {}, "identity": {"refused": "", "shapes": {"one frame": picture}},
        "soak": epochs, "speed": {"rows": rows, "gpu_bytes": None}, "torchcodec": {"frames_per_s": 1.0},
    }  # fmt: skip
    monkeypatch.setattr(step, "run", lambda name, **_: answers[name])
    kept: list[tuple[str, list[str]]] = []
    report = run.selftest("cpu", gops=[12], keep=lambda report: kept.append((report["status"], [*report["problems"]])))
    assert [status for status, _ in kept] == ["unfinished"] * 3 + [report["status"]]  # whatever ends it, the rest is there
    assert kept[-1][1] == report["problems"]
    assert report["status"] == ("failed" if what else "passed")
    assert bool(report["problems"]) == bool(what)
    assert not what or any(WRONG[what][1] in problem for problem in report["problems"])
    assert main(["selftest", "--device", "cpu"]) == (1 if what else 0)
    assert not what or f"failed: {report['problems'][-1].split(',')[0]}" in capsys.readouterr().out

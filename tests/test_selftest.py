"""The self-test of DALI's decoder: on a CPU, where DALI decodes VP9, it has to pass, and it has to see what is wrong."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import steps
from support.datasets import TOP
from support.gpu_machine import GpuMachine
from support.slow import slow_after

import dali_stream
from dali_stream.cli import main
from dali_stream.decode.refusal import refusal_of_file
from dali_stream.demo import write_demo
from dali_stream.tools import isolated
from dali_stream.tools.selftest import identity, load, run, speed, videos

H264 = "h264 without IDR frames"  # a case
COLOUR_TOLERANCE = 4  # mean difference from FFmpeg's frames that is right, of 255, see docs/gpu.md


def test_without_a_gpu_it_says_so_and_that_is_no_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selftest"]) == 0
    assert capsys.readouterr().out.startswith("not run: no GPU that torch can use was found")
    assert main(["selftest", "--json", "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "not run"
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "finds no GPU" in capsys.readouterr().err


def test_a_gpu_that_torch_cannot_use_is_a_failure(
    gpu_machine: GpuMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_machine.has("h100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "failed"
    assert "the driver has NVIDIA H100 80GB HBM3, and no GPU that torch can use was found" in report["problems"][0]


@pytest.mark.slow
def test_it_passes_where_dali_decodes_on_a_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer videos of smaller frames than on a GPU, and in this process after the first step, since each imports torch.

    `test_each_case_is_what_the_loader_keeps_from_nvdec` has the other cases.
    """
    run_step, ran = run.run_step, list[run.Step]()

    def run_step_here(step: run.Step, *, time_limit_s: float, **arguments: Any) -> dict[str, Any]:
        ran.append(step)
        if len(ran) == 1:
            return run_step(step, time_limit_s=time_limit_s, **arguments)
        rows = step(**pickle.loads(pickle.dumps(arguments)))
        return json.loads(json.dumps({"rows": rows if isinstance(rows, list) else [rows or {}]}))

    monkeypatch.setattr(run, "run_step", run_step_here)
    small = {"vp9 of odd size": (121, 161), H264: (120, 160)}
    cases = {case: (codec, small[case], gop) for case, (codec, _, gop) in identity.CASES.items() if case in small}
    monkeypatch.setattr(identity, "CASES", cases)
    for name, count in {"_CLIPS": 12, "_CASE_CLIPS": 4, "_TIMED": 3}.items():
        monkeypatch.setattr(identity, name, count)
    monkeypatch.setattr(load, "_HELD", 2)
    monkeypatch.setattr(run, "GOPS", (2, 12))
    monkeypatch.setattr(run, "FAST", (128, 160))
    monkeypatch.setattr(run, "SIZES", ((128, 160), (120, 160)))
    monkeypatch.setattr(run, "PADDED", ((128, 160), (120, 160)))
    monkeypatch.setattr(run, "SIZE", (120, 160))
    monkeypatch.setattr(speed, "BATCHES", 3)
    shortly = ("--soak", "0.01", "--speed", "0.01", "--limit", "3600")
    assert main(["selftest", "--device", "cpu", *shortly, "--out", str(tmp_path / "report.json")]) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["status"], report["problems"]) == ("passed", [])
    assert {codec for codec, reason in report["codecs"].items() if not reason} == {"vp9"}
    assert report["left_out"] == []
    asked = [f"vp9, {kind}" for kind in ("GOP 2", "GOP 12", "sizes", "padded sizes")]
    trusted = [row for row in report["identity"] if row["test"] in asked]
    assert [(row["test"], row["shape"]) for row in trusted] == [(test, shape) for test in asked for shape in videos.SHAPES]
    for row in trusted:
        assert row["decoder"] == "dali"
        assert row["frames"] >= 12
        assert row["wrong"] == 0
        assert 0 < row["mean_error"] < COLOUR_TOLERANCE
    cases = {(row["test"], row["decoder"]): row for row in report["identity"] if row["test"] not in asked}
    assert set(cases) == {(case, decoder) for case in identity.CASES for decoder in identity.DECODERS}
    for (case, decoder), row in cases.items():
        assert (row["wrong"] == 0) == (decoder != "dali" or case.startswith("vp9"))
        assert row["wrong"] == 0 or "DALI decodes only vp8, vp9, mjpeg on a CPU" in row["refused"]
    assert [row["test"] for row in report["load"]] == [
        "vp9, recorded size", "vp9, two Loaders", "vp9, two Loaders", f"vp9, {run.MANY_THREADS} threads", "vp9, resized",
        "epochs",
    ]  # fmt: skip
    for row in report["load"]:
        assert (row["wrong"], row["route_changes"], set(row["routes"].values())) == (0, 0, {"dali"})
        assert row["frames"] > 500 if row["test"] == "epochs" else row["frames"] == 3 * 16 * 2 * 3
        assert row["wait_s"] < row["seconds"]
    sizes = {f"vp9, {size}, idle GPU" for size in ("128×160", "120×160")}
    idle = [row for row in report["speed"] if not row["busy"]]
    assert {(row["test"], row["decoder"]) for row in idle} == {(t, d) for t in sizes for d in ("dali", "torchcodec")}
    assert {row.get("per_clip") for row in idle} == {1, 4, 16, None}
    busy = [row for row in report["speed"] if row["busy"]]
    tried = [("torchcodec", len(os.sched_getaffinity(0))), ("dali", 4), ("dali", 8), ("dali", 16)]
    assert [(row["decoder"], row["threads"]) for row in busy] == tried
    cpu, *rates = [row["frames_per_s"] for row in busy]
    assert [row.get("ratio") for row in busy] == [None, *(rate / cpu for rate in rates)]
    assert f"vp9, 128×160, busy GPU: the fastest decoder reaches {max(rates) / cpu:.2f} of the CPU's speed" in said
    assert "av1 was not tested: DALI decodes vp8, vp9, mjpeg on a CPU" in said
    assert "passed on the CPU" in said


@pytest.mark.slow
def test_frames_of_another_frame_or_colour_are_seen(
    vp9_demo: Path, gpu_machine: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_CLIPS", 8)
    assert [row["wrong"] for row in identity.identity([str(vp9_demo)], 0)] == [0, 0, 0, 0]
    gpu_machine.change_frames = lambda frames: frames.roll(1, 0)
    single, *rows = identity.identity([str(vp9_demo)], 0)
    assert [row["shape"] for row in (single, *rows)] == list(videos.SHAPES)
    assert (single["shape"], single["wrong"]) == ("one frame", 0)
    for row in rows:
        assert row["wrong"] > 0.9 * row["frames"]

    gpu_machine.change_frames = lambda frames: frames.flip(-1)
    for row in identity.identity([str(vp9_demo)], 0):
        assert row["wrong"] == 0
        assert row["mean_error"] > COLOUR_TOLERANCE


def test_a_frame_without_a_readable_identity_is_wrong(vp9_demo: Path) -> None:
    [video, *_] = videos.read(str(vp9_demo))
    shown = [0, 1, 7, 8]
    decoded = video.frames(shown).copy()
    assert videos.count_wrong(decoded, video.identity[shown]) == 0
    decoded[1] = 0
    assert videos.count_wrong(decoded, video.identity[shown]) == 1
    assert videos.count_wrong(decoded, video.identity[[0, 1, 8, 7]]) == 3


def test_what_dali_cannot_decode_is_a_result(h264_demo: Path) -> None:
    for row in identity.identity([str(h264_demo)], None):
        assert row["refused"] == "DALI decodes only vp8, vp9, mjpeg on a CPU, and not h264"
        assert row["wrong"] == row["frames"]
        assert "Failed to create video decoder" in row["failed"]


@pytest.mark.slow
def test_epochs_through_the_loader_are_checked_frame_by_frame(vp9_demo: Path, tmp_path: Path) -> None:
    found = load.soak(str(vp9_demo), "cpu", "dali", 0)
    assert (found["epochs"], found["wrong"], set(found["routes"].values())) == (2, 0, {"dali"})
    mixed = tmp_path / "mixed"
    videos.mix(str(mixed), str(vp9_demo), str(write_demo(tmp_path / "av1", episodes=2, size=(128, 160))))
    found = load.soak(str(mixed), "cpu", "torchcodec", 0)
    assert (found["wrong"], found["route_changes"]) == (0, 0)
    # The metadata lets the first episode begin where the second one does: each of its frames is one of the second.
    [path] = (mixed / "meta" / "episodes").glob("*/*.parquet")
    rows, key = pq.read_table(path), f"videos/{TOP}/from_timestamp"
    begins = pa.array([rows[key][1].as_py()] * 2)
    pq.write_table(rows.set_column(rows.schema.get_field_index(key), key, begins), path)
    found = load.soak(str(mixed), "cpu", "torchcodec", 0)
    assert found["wrong"] == found["epochs"] * 3 * rows["length"][0].as_py()


@pytest.mark.slow
def test_speed_is_measured_for_every_setting(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside other work."""
    monkeypatch.setattr(speed, "BATCHES", 3)
    clips = [{"per_clip": 1, "threads": 2, "prefetch": 1}, {"per_clip": 16, "threads": 2, "prefetch": 2}]
    threads = [{"per_clip": 1, "threads": threads} for threads in (1, 2)]
    for decoder, settings, busy in (
        ("dali", clips, False),
        ("dali", threads, True),
        ("torchcodec", [{"threads": 2}], False),
        ("torchcodec-cuda", threads, True),
    ):
        rows = speed.speed(str(vp9_demo), decoder, None, settings, 0, busy=busy)
        assert [{key: row[key] for key in settings[0]} for row in rows] == settings
        assert all(row["decoder"] == decoder and row["frames_per_s"] > 0 for row in rows)


@pytest.mark.slow
def test_a_step_that_fails_crashes_or_hangs_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which it is called has no effect, even if it has modules of the same names."""
    (tmp_path / "pyarrow.py").write_text("raise SystemExit('shadow')")
    monkeypatch.chdir(tmp_path)
    found = run.run_step(videos.write, time_limit_s=60, folder="new", codec="none", gop=2, size=(128, 160))
    assert found["failed"].startswith("ValueError: codec must be one of")
    crashes = {"import os; os.abort()": "it crashed with SIGABRT", "import os; os._exit(3)": "it ended with exit code 3"}
    for code, what in crashes.items():
        assert what in run.run_step(steps.execute, time_limit_s=60, code=code)["failed"]
    # The step has failed by itself, and its process crashes afterwards.
    code = "import atexit, os; atexit.register(os.abort); raise ImportError('no such library')"
    found = run.run_step(steps.execute, time_limit_s=60, code=code)
    assert found["failed"] == "ImportError: no such library"
    assert found["exit"].startswith("after the step had returned, it crashed with SIGABRT")
    monkeypatch.setattr(run, "EXIT_S", 0)
    found = run.run_step(
        steps.execute, time_limit_s=60, code="import atexit, threading; atexit.register(threading.Event().wait)"
    )
    assert found["exit"].startswith("after the step had returned, it did not end within 0 s")
    found = run.run_step(steps.execute, time_limit_s=5, code="import threading; threading.Event().wait()")
    assert found == {"failed": "no answer within 5 s", "out_of_time": True}


def test_a_step_that_returned_in_time_may_end_after_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit passes while the process ends, which takes until the test writes to the pipe."""
    pipe, limits, wait = tmp_path / "pipe", list[threading.Timer](), isolated._wait
    os.mkfifo(pipe)
    monkeypatch.setattr(threading.Timer, "start", lambda limit: limits.append(limit))

    def at_the_limit(child: subprocess.Popen[bytes], limit_s: float) -> str:
        [limit] = limits
        if not limit.finished.is_set():
            limit.function()
        end = os.open(pipe, os.O_RDWR)
        os.write(end, b".")
        try:
            return wait(child, limit_s)
        finally:
            os.close(end)

    monkeypatch.setattr(isolated, "_wait", at_the_limit)
    step = functools.partial(exec, f"import atexit; atexit.register(lambda: open({str(pipe)!r}).read(1))")
    called = isolated.call([step], 60, 60)
    assert (called.answers[0].error, called.ended) == ("", "")


@pytest.mark.slow
def test_frames_that_change_while_they_are_held_are_seen(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is right when it arrives; the memory of a later one is the same."""
    batches = dali_stream.Loader.__iter__

    def overwritten(loader: dali_stream.Loader) -> Iterator[dict[str, Any]]:
        first = None
        for batch in batches(loader):
            if loader.routes[TOP].decoder == "dali" and first is not None:
                first[TOP][:, 0].copy_(batch[TOP][:, 0])
            first = first or batch
            yield batch

    monkeypatch.setattr(dali_stream.Loader, "__iter__", overwritten)
    found = load.lockstep(str(vp9_demo), "cpu", 0, (144, 224))
    assert found["frames"] == 7 * 16 * 2 * 3
    assert found["wrong"] == 16  # of one camera and one step of its window; all others are right
    assert (found["route_changes"], set(found["routes"].values())) == (0, {"dali"})


@pytest.mark.slow
def test_videos_that_are_kept_from_nvdec_are_decoded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by DALI's decoder on the CPU, which decodes VP9, and by torchcodec's."""
    monkeypatch.setattr(identity, "_TIMED", 3)
    for decoder in identity.DECODERS:
        rows = identity.case("vp9 of odd size", decoder, None)
        assert [(row["shape"], row["refused"], row["wrong"]) for row in rows] == [(shape, "", 0) for shape in videos.SHAPES]
        assert all(row["clip_ms"] > 0 and row["gpu_growth"] is None for row in rows)
    for row in identity.case(H264, "dali", None):
        assert row["refused"] == "DALI decodes only vp8, vp9, mjpeg on a CPU, and not h264"
        assert row["failed"]
        assert "clip_ms" not in row
    rows = identity.case(H264, "torchcodec-cuda", None)
    assert [row["wrong"] for row in rows] == [0, 0, 0, 0]


@pytest.mark.parametrize("case", slow_after(3, identity.CASES))
def test_each_case_is_what_the_loader_keeps_from_nvdec(case: str, gpu_machine: GpuMachine, tmp_path: Path) -> None:
    """Although a B200 decodes it."""
    gpu_machine.has("b200")
    video = identity._write(identity.CASES[case], tmp_path)
    assert refusal_of_file(0, video.format, video.table, video.store)


def test_what_there_is_no_time_for_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selftest", "--device", "cpu", "--limit", "0", "--out", str(tmp_path / "report.json")]) == 1
    said, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert (report["status"], report["identity"], report["load"]) == ("unfinished", [], [])
    assert "write of vp9, GOP 12, 240×320" in report["left_out"]
    assert "no time was left for: write of vp9, GOP 2, 240×320; " in said


def test_it_ends_in_time_whatever_hangs_and_every_stage_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only steps move: identity is slow, and most other steps hang until they are ended."""
    clock, ran = [1000.0], []

    def slow(step: run.Step, time_limit_s: float, busy: bool = False, **_: Any) -> dict[str, Any]:
        name = "busy" if busy else step.__name__
        took = min({"write": 1.0, "identity": 30.0, "case": 1.0, "speed": 10.0}.get(name, 1e9), time_limit_s)
        clock[0], late = clock[0] + took, took == time_limit_s
        ran.append(name)
        row = {"refused": "", "frames": 24, "wrong": 0, "mean_error": 1.0, "frames_per_s": 1.0}
        return {"failed": "it did not end", "out_of_time": True} if late else {"rows": [row]}

    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(run.cpu, "cores", lambda: 2)
    monkeypatch.setattr(run, "run_step", slow)
    kept: list[float] = []
    report = run.selftest("cpu", keep=lambda report: kept.append(report["seconds"]))
    assert kept[-1] <= 480
    assert kept == sorted(kept)
    assert list(dict.fromkeys(ran)) == ["write", "identity", "case", "lockstep", "two_loaders", "soak", "busy", "speed"]
    assert report["status"] == "failed"  # a step that hung for as long as it may is a failure, and not short of time
    assert "vp9, recorded size, dali: it did not end" in report["problems"]
    assert "lockstep of vp9, resized, dali" in report["left_out"]
    assert len(set(report["left_out"])) == len(report["left_out"])


def test_both_decoders_two_loaders_and_many_threads_come_first_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tests four codecs with two decoders, and its load has time for about five steps."""
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(run._Run, "_rows", lambda self, part, jobs: ran.extend((job.test, job.decoder) for job in jobs) or [])
    monkeypatch.setattr(run, "unavailable", lambda gpu: "")
    tested = run._Run(Path(), None, 1, 1, 1e9, lambda *_: None)
    tested._longest = {codec: (codec, 30, run.SIZE) for codec in ("h264", "hevc")}
    assert list(tested.check_load()) == []
    assert ran == [
        ("h264, recorded size", "dali"),
        ("h264, recorded size", "torchcodec-cuda"),
        ("h264, two Loaders", "dali"),
        (f"h264, {run.MANY_THREADS} threads", "dali"),
        ("hevc, recorded size", "dali"),
        ("hevc, recorded size", "torchcodec-cuda"),
        ("h264, resized", "dali"),
        ("hevc, resized", "dali"),
        ("epochs", "dali"),
    ]


WRONG = {
    "identity": ({"wrong": 2}, "vp9, GOP 12, dali, one frame: 2 of 24 frames are of another frame"),
    "colour": ({"mean_error": 9.0}, "vp9, GOP 12, dali, one frame: the frames differ from FFmpeg's by 9.0 on average"),
    "crash": ({"failed": "ended by SIGSEGV"}, "vp9, GOP 12, dali, one frame: ended by SIGSEGV"),
    "case": ({"wrong": 3}, "vp9 of odd size, torchcodec-cuda, one frame: 3 of 24 frames are of another frame"),
    "busy": ({"failed": "ended by SIGSEGV"}, "vp9, 480×640, busy GPU, torchcodec: ended by SIGSEGV"),
    "lockstep": ({"wrong": 1}, "vp9, recorded size, dali: 1 of 90 frames"),
    "route": (
        {"routes": {"top": "dali", "side": "torchcodec"}},
        "vp9, recorded size, dali: a camera is not on the requested route",
    ),
    "exit": ({"exit": "ended by SIGSEGV"}, "identity of vp9, GOP 12, dali: ended by SIGSEGV"),
    "soak": ({"routes": {"top": "torchcodec", "side": "dali"}}, "epochs, dali: a camera is not on the requested route"),
    "write": ({"failed": "no encoder"}, "vp9: its videos cannot be written: no encoder"),
    "memory": ({"memory": {"first": 1 << 30, "last": 2 << 30}}, "memory grew from 1073741824 to 2147483648 bytes in 9 epochs"),
    "gpu_memory": ({"gpu_memory": {"first": 1 << 30, "last": 2 << 30}}, "gpu_memory grew"),
    "speed": ({"failed": "ended by SIGSEGV"}, "vp9, 480×640, idle GPU, torchcodec: ended by SIGSEGV"),
}


@pytest.mark.parametrize("what", slow_after(5, [None, *WRONG]))
def test_whatever_is_wrong_fails_the_test(
    what: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = WRONG[what][0] if what else {}
    frame = {"shape": "one frame", "refused": "", "frames": 24, "wrong": 0, "mean_error": 1.0, "failed": ""}
    epochs = {
        "routes": {"top": "dali", "side": "dali"},
        "route_changes": 0,
        "epochs": 9,
        "frames": 90,
        "wrong": 0,
        "frames_per_s": 1.0,
        "memory": {"first": 1 << 30, "last": 1 << 30},
        "gpu_memory": None,
    }
    compared = {**epochs, "worst_mean": 1.0, "worst_block": 9.0}
    rate = {"decoder": "dali", "per_clip": 1, "threads": 2, "frames_per_s": 1.0}
    answers = {
        "write": {}, "identity": {"rows": [frame]}, "case": {"rows": [dict(frame)]}, "lockstep": {"rows": [compared]},
        "two_loaders": {"rows": [compared, compared]}, "busy": {"rows": [rate]}, "soak": {"rows": [epochs]},
        "speed": {"rows": [rate]},
    }  # fmt: skip
    if what in ("write", "busy", "speed"):
        answers[what] = change
    elif what == "exit":
        answers["identity"] |= change
    elif what == "case":
        answers["case"]["rows"][0] |= change
    elif what in ("identity", "colour", "crash"):
        frame |= change
    elif what:
        epochs |= change
        compared |= change
    monkeypatch.setattr(run, "run_step", lambda step, busy=False, **_: dict(answers["busy" if busy else step.__name__]))
    monkeypatch.setattr(run, "GOPS", (12,))
    kept: list[tuple[str, list[str]]] = []
    report = run.selftest("cpu", keep=lambda report: kept.append((report["status"], [*report["problems"]])))
    rows = sum(len(report[part]) for part in ("identity", "load", "speed"))
    # Partial reports survive whatever ends the test.
    assert [status for status, _ in kept] == ["unfinished"] * rows + [report["status"]]
    assert kept[-1][1] == report["problems"]
    assert report["status"] == ("failed" if what else "passed")
    assert bool(report["problems"]) == bool(what)
    assert not what or any(WRONG[what][1] in problem for problem in report["problems"])
    assert main(["selftest", "--device", "cpu"]) == (1 if what else 0)
    assert not what or f"failed: {report['problems'][-1].split(',')[0]}" in capsys.readouterr().out

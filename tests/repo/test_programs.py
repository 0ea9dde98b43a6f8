"""The programs beside the package run from the command line on a real dataset."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.batches import check_identities
from support.datasets import CAMERAS, read_lengths

import dali_stream
from dali_stream import Dataset, Loader
from dali_stream.decode import processes as decode_processes
from dali_stream.decode import torchcodec
from dali_stream.tools import environment

ROOT = Path(__file__).parents[2]
REPORTS = sorted(path for path in (ROOT / "benchmarks/results").rglob("*") if path.is_file())
# A path that begins at the root of a file system, in a home or outside the working folder. Addresses (https://...) do not.
FOLDER = re.compile(r"""(?:^|[\s"'(=:,\[])(?:file://)?(?:~\w*|\.\.)?/(?!/)\w""", re.MULTILINE)
OF_A_HOST = ("site-packages", ".venv/", "/tmp/", "/home/", "/root/", "/work/", str(Path.home()), str(ROOT))


def paths_of_the_machine(report: str) -> list[str]:
    """Parts of a report's text that reveal folders of the machine on which it was made."""
    return [*FOLDER.findall(report), *(name for name in OF_A_HOST if name.strip("/") and name in report)]


def run(*arguments: object) -> str:
    """Run a program, check that it succeeds, and return its output."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """As `run`, in this process, which has loaded already what such a program takes longest to load."""

    def run(*arguments: object) -> str:
        path, *rest = map(str, arguments)
        monkeypatch.syspath_prepend(str((ROOT / path).parent))
        monkeypatch.setattr(sys, "argv", [path, *rest])
        assert not importlib.import_module(Path(path).stem).main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_committed_reports_hold_no_path_of_the_machine(path: Path) -> None:
    assert paths_of_the_machine(path.read_text()) == []


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("/work/data/g1", "g1"),
        ("/home/ann lee/data/g1", "g1"),
        ("~/data/g1/", "g1"),
        ("~ann/data/g1", "g1"),
        ("../shared/data/g1", "g1"),
        ("../../g1", "g1"),
        ("file:///work/data/g1", "g1"),
        ('File "/work/ann lee/x.py", line 1, in f\nError: /tmp/a.mp4: gone', 'File "x.py", line 1, in f\nError: a.mp4: gone'),
        ("given --root=/work/x (not '/work/y z')", "given --root=x (not 'y z')"),
        ("PYTHONPATH=/a/b:/c/d", "PYTHONPATH=b:d"),
        *((same, same) for same in ("data/g1", "./g1", "owner/name", "frames/s", "1 / 2", "Linux-6.18-x86_64")),
        *(
            (same, same)
            for same in ("https://host.org/a/b", "s3://bucket/a", "hf://datasets/owner/name", "at https://a.b/c: d")
        ),
    ],
)
def test_a_report_keeps_names_and_no_folders(said: str, kept: str) -> None:
    report = {"root": said, said: [{"deep": [said, 1, None, 0.5]}]}
    assert json.loads(environment.report_json(report)) == {"root": kept, kept: [{"deep": [kept, 1, None, 0.5]}]}
    assert report["root"] == said


def test_a_report_that_is_not_finished_does_not_replace_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    environment.write_report(path, {"rows": [1], "root": str(tmp_path)})
    first = path.read_text()
    assert json.loads(first) == {"rows": [1], "root": tmp_path.name}
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda self, text: write(self, text[:9]) and sys.exit(9))  # it is killed
    with pytest.raises(SystemExit):
        environment.write_report(path, {"rows": [1, 2]})
    assert path.read_text() == first


def test_every_program_writes_its_report_without_paths() -> None:
    """All of them call the one function that removes paths. Messages between programs and rows of reports are exempt."""
    programs = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    inner = {
        "peers.py": "spec.json",
        "scale.py": "MEASUREMENTS",
        "scale_dataset.py": "info.json",
        "lerobot_gpu.py": "spec.json",
        "gpu_features.py": "info",
        "disk_frames.py": "json.dumps(",
        "drill.py": "DRILL_SETTINGS",
        "drill_rank.py": "log.write",
        "same_batches.py": "",  # writes no report
    }
    for name, text in programs.items():
        written = [line for line in text.splitlines() if "json.dump" in line and inner.get(name, "\n") not in line]
        assert written == [], name
    assert sum("program.run(" in text or "Rows(" in text for text in programs.values()) >= 8


def test_the_modules_and_tests_of_the_mutants_exist() -> None:
    tree = ast.parse((ROOT / "benchmarks/mutation.py").read_text())
    [parts] = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS"]
    for modules, tests in ast.literal_eval(parts).values():
        assert [name for name in modules if not (ROOT / "dali_stream" / name).exists()] == []
        assert [name for name in tests.split() if not (ROOT / f"tests/test_{name}.py").exists()] == []


def test_the_tests_of_the_newest_versions_exist() -> None:
    [names] = re.findall(r"^DECODING := (.*(?:\\\n.*)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for name in names.replace("\\", "").split() if not (ROOT / f"tests/test_{name}.py").exists()] == []


def test_windows_for_clip_are_the_frames_that_they_say(demo: Path) -> None:
    """The second program of docs/training.md with a graph, without resizing. The test converts its frames back to bytes."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/training.md").read_text(), re.MULTILINE | re.DOTALL)
    [program] = [block for block in blocks if "crop_mirror_normalize" in block]
    resized = "    image_size=(224, 224),\n"
    assert resized in program
    names: dict[str, Any] = {"dali_stream": dali_stream, "dataset": Dataset(demo)}
    exec(program.replace(resized, ""), names)
    batch, mean, std = names["batch"], *(torch.tensor(names[key])[:, None, None] * 255 for key in ("mean", "std"))
    assert batch["observation.state"].shape == (8, 8, 8)
    for camera in CAMERAS:
        assert (batch[camera].dtype, batch[f"{camera}_is_pad"].shape) == (torch.float16, (8, 8))
        # crop_mirror_normalize takes its mean in the frame's own unit, which is [0, 1] here.
        batch[camera] = (batch[camera].float() * std + mean).clamp(0, 255).round().byte()
        check_identities(batch, camera, [-20 * step for step in reversed(range(8))], read_lengths(demo))


def test_action_chunks_with_augmented_frames(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the Loader in the programs that train."""
    monkeypatch.syspath_prepend(str(ROOT / "pipelines"))
    dataset = Dataset(demo)
    options = importlib.import_module("plain_loop").loader_arguments(dataset, 16, (64, 80))
    with Loader(dataset, batch_size=4, device="cpu", **options) as loader:
        batch = next(iter(loader))
    for camera in CAMERAS:
        assert (batch[camera].shape, batch[camera].dtype) == ((4, 3, 64, 80), torch.float32)
        assert 0 <= batch[camera].min() < batch[camera].max() <= 1
    assert batch["action"].shape == (4, 16, 4)
    assert batch["action_is_pad"].shape == (4, 16)


@pytest.mark.slow
def test_decode_floor_ends_with_one_json_object(small: Path, run_here: Callable[..., str]) -> None:
    out = run_here("benchmarks/decode_floor.py", small, "--batch-size", 8, "--batches", 4, "--rounds", 1, "--json")
    result = json.loads(out.splitlines()[-1])
    assert result["ratio"] == result["loader_frames_per_s"] / result["floor_frames_per_s"] > 0
    assert result["frames_per_round"] == 8 * 4 * 2
    gather, files = result["gather"], result["files"]
    assert gather["ratio"] == files["second_epoch_frames_per_s"] / gather["floor_frames_per_s"] > 0
    assert files["decoded_per_frame"] == [pytest.approx(1, abs=0.1), 0]  # all frames fit in memory


@pytest.mark.slow
def test_overhead_beside_a_decoder_that_sleeps(run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that sleep 20 ms per frame deliver at most their ideal rate, and use much less CPU time than that."""
    # The program replaces them. They are restored after the test.
    monkeypatch.setattr(torchcodec, "_open", torchcodec._open)
    monkeypatch.setattr(decode_processes, "MAIN", decode_processes.MAIN)
    monkeypatch.setenv("DALI_STREAM_OVERHEAD_DECODE_S", "")
    short = "--decode-ms 20 --episodes 1 --seconds 2 --rounds 1 --batch-size 8 --memory-budget 16MiB --json"
    result = json.loads(run_here("benchmarks/overhead.py", "--threads", 1, 4, *short.split()).splitlines()[-1])
    one, four = result["results"]
    assert (one["threads"], four["threads"]) == (1, 4)
    assert 2 * one["frames_per_s"] < four["frames_per_s"]
    for each in (one, four):
        assert 0.3 < each["share"] < 1.2, "batches that were decoded before the time began count, too"
        assert 0 < each["cpu_us"] < 20_000 * each["stored_per_frame"]


# The program with one mode and one later epoch, in a process of its own, since it looks at the processes that it starts.
INTERFERENCE = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import interference

interference.MODES = ("single",)
interference.LATER = 1
sys.exit(interference.main())
"""


@pytest.mark.slow
def test_steps_beside_a_loader_and_its_process(small: Path, tmp_path: Path) -> None:
    """The program itself checks from which process the batches come."""
    report = tmp_path / "report.json"
    short = "--cases 2:8 --threads 2 --seconds 0.2 --rounds 1 --episodes 1"
    (program := tmp_path / "program.py").write_text(INTERFERENCE)
    run(program, *short.split(), "--uri", small, "--report", report)
    result = json.loads(report.read_text())
    assert [row["side"] for row in result["rows"]] == ["batch in memory", "in process", "own process", "DataLoader"]
    assert result["rows"][0]["ratio"] == 1
    # Two clocks: beside a batch in memory, a thread may have a little more CPU time than time, and a process less than it.
    assert all(row["step_ms"] > 0 and -0.05 < row["blocked"] < 1 and row["cpu_ms"] > -0.1 for row in result["rows"])
    assert result["rows"][1]["cpu_ms"] > 0
    [rates] = result["rates"]
    assert rates["mode"] == "single"
    assert all(ratio > 0 for ratio in rates["ratios"].values())
    assert 0 < result["memory"][0]["imported"] < result["memory"][0]["with_a_batch"]


def test_decode_floor_says_what_is_wrong_in_one_line(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    program = importlib.import_module("decode_floor")
    for root, said in ((tmp_path, "not a LeRobot dataset"), (odd, "must have a camera with video")):
        monkeypatch.setattr(sys, "argv", ["decode_floor.py", str(root)])
        assert program.main() == 1
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert said in errors


@pytest.mark.slow
def test_scale_measures_a_dataset_with_many_episodes(
    tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program starts a process for each measurement, and the test makes most of them in this process.

    A video file has 14,000 frames instead of 70,000, which take long to encode, so the episodes are in more files.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(importlib.import_module("scale_dataset"), "FRAMES", 14_000)
    command = ("benchmarks/scale.py", tmp_path, "--episodes", 1000, "--batches", 10)
    out = run_here(*command, "--only", "index", "--json")
    assert paths_of_the_machine(out) == []
    result = json.loads(out.splitlines()[-1])
    others = ("open", "pool", "resume")
    result |= {name: json.loads(run_here(*command, "--here", "--only", name)) for name in others}
    assert result["open"]["frames"] == pytest.approx(1000 * 266, rel=0.1)
    assert result["index"]["index_bytes_per_frame"] < 12
    assert len(result["pool"]["rss_bytes"]) == 5
    assert 0 < result["pool"]["opened_files_per_1000_frames"] < 50
    assert result["resume"]["resume_cpu_s"] > 0


@pytest.mark.slow
def test_remote_compares_the_network_with_the_disk(small: Path, run_here: Callable[..., str]) -> None:
    out = run_here("benchmarks/remote.py", small, "--latency-ms", 1, "--rounds", 1, "--batch-size", 16, "--json")
    medians = json.loads(out.splitlines()[-1])["medians"]
    assert medians["local"]["requests"] == medians["memory"]["requests"] == medians["cache"]["fetched_bytes"] // 10_000 == 0
    videos = sum(path.stat().st_size for path in small.rglob("*.mp4"))
    assert medians["cold"]["fetched_bytes"] > 0.9 * videos
    assert medians["cache"]["cached_bytes"] > 0.9 * videos


TRIP = ["bash", str(ROOT / "benchmarks/gpu_trip.sh")]
PARTS = [
    "-m dali_stream doctor", "gpu_features.py", "nvdec_decoders.py", "write_demo", "nvdec_loaders.py", "lerobot_gpu.py",
    "--threads 7 8 14 16 21 32 --batch-size 64 8", "--memory-budget 64MiB", "-m dali_stream selftest",
]  # fmt: skip


def fake_python(folder: Path, code: str) -> dict[str, str]:
    """The environment of a trip whose Python is a script, which records its arguments in `folder/calls` and runs `code`."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\necho "$@" >> {folder}/calls\n{code}\n')
    python.chmod(0o755)
    return {**os.environ, "PYTHON": str(python), "TMPDIR": str(folder)}


def test_a_part_that_crashes_costs_the_gpu_trip_no_other(tmp_path: Path) -> None:
    """The test replaces Python by a script that is killed at one part and fails at another."""
    out = tmp_path / "out"
    code = 'case "$*" in *nvdec_decoders.py*) kill -SEGV $$ ;; *selftest*) exit 3 ;; esac'
    environment = fake_python(tmp_path, code)
    done = subprocess.run([*TRIP, str(out)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "not ended well: decoders selftest" in done.stdout
    assert (out / "log.txt").read_text() == done.stdout
    calls = (tmp_path / "calls").read_text()
    assert [calls.index(name) for name in PARTS] == sorted(calls.index(name) for name in PARTS)
    done = subprocess.run([*TRIP, str(out)], env={**environment, "LIMIT": "0"}, cwd=tmp_path, capture_output=True, text=True)
    assert "selftest: no time was left" in done.stdout


def test_a_gpu_trip_that_is_ended_ends_its_part_and_keeps_its_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = 'case "$*" in *gpu_features.py*) echo {} > "${@: -1}" ;; *decoders.py*) echo runs as $$; exec sleep 600 ;; esac'
    environment = fake_python(tmp_path, code)
    with subprocess.Popen([*TRIP, str(out)], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as trip:
        assert trip.stdout is not None
        pid = next(line.split()[-1] for line in trip.stdout if line.startswith("runs as"))
        trip.terminate()
        said = trip.stdout.read()
    assert trip.returncode == 128 + signal.SIGTERM
    assert "== ended by a signal" in said
    assert (out / "features.json").read_text() == "{}\n"
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE, "it has ended, and its new parent has not noticed yet"
    assert "nvdec_loaders.py" not in (tmp_path / "calls").read_text()
    assert list(tmp_path.glob("tmp.*")) == []  # the datasets


@pytest.mark.slow
def test_features_beside_nvdec_are_compared_with_the_cpu(tmp_path: Path, run_here: Callable[..., str]) -> None:
    out = tmp_path / "report.json"
    run_here(
        "benchmarks/gpu_features.py", "--device", "cpu", "--size", "120x160", "--episodes", 1, "--seconds", 0.1, "--out", out
    )
    report = json.loads(out.read_text())
    parts = ["lockstep", "gpu cache", "upload", "two Loaders", "mixture", "frame cache", "depth", "in place", "to the CPU"]
    assert [row["part"] for row in report["rows"]] == parts
    for row in report["rows"]:
        assert row.get("failed") is None
        assert row["wrong"] == 0 < row["frames"]
    assert report["rows"][6]["routes"]["observation.images.side"] == "pyav"


@pytest.mark.slow
def test_loaders_are_measured_with_their_statistics(vp9_demo: Path, tmp_path: Path, run_here: Callable[..., str]) -> None:
    out, frames = tmp_path / "report.json", Dataset(vp9_demo).num_frames * len(CAMERAS)
    options = ("--threads", 1, 2, "--batch-size", 8, 16, "--memory-budget", "1GiB", "--rounds", 1, "--image-size", "48x64")
    run_here("benchmarks/nvdec_loaders.py", f"demo={vp9_demo}", "--device", "cpu", *options, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["batch_size"], row["num_threads"]) for row in rows] == [(8, 1), (8, 2), (16, 1), (16, 2)]
    for row in rows:
        first, second, again = (row[name] for name in ("first", "second", "first of a second Loader"))
        for epoch in (first, again):
            assert epoch["decoded_frames"] == pytest.approx(frames, rel=0.1)
            assert epoch["clips"] > 0
            assert all(epoch[key] > 0 for key in ("pack_s", "decode_s", "resize_s", "plan_s", "frames_per_s", "cores"))
        assert second["frames_per_s"] > 0
        assert second["decoded_frames"] < frames / 10  # those that the first epoch left out


@pytest.mark.slow
def test_frames_of_clips_with_one_keyframe_mark_and_with_all_are_right(
    tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"
    short = ("--codec", "vp9", "--size", "120x160", "--gop", 4, "--seconds", 0.01, "--device", "cpu")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(importlib.import_module("nvdec_decoders"), "CLIPS", 4)
    run_here("benchmarks/nvdec_decoders.py", *short, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert {(row["per_clip"], row["marks"]) for row in rows} >= {
        (count, marks) for count in (16, 64) for marks in ("one", "all")
    }
    assert all(row["wrong"] == 0 < row["frames_per_s"] for row in rows)

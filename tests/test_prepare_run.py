"""`dali-stream prepare`: runs that are cut short, damage, folders of somebody else, arguments, the program."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import pool_tasks
from support import videos as video_data
from support.batches import assert_same_stream
from support.datasets import SIDE, TOP, change_info, enrich, rename_camera, tree, videos
from support.programs import failed
from support.tools import FAST, SMALL, prepared

from dali_stream import DaliStreamError, Dataset, DatasetError
from dali_stream.cli import main
from dali_stream.tools import prepare
from dali_stream.tools.preparation.executors import Processes

OPTIONS = ["--file-mb", str(SMALL["file_mb"]), "--jobs", "1"]


@pytest.fixture(scope="module")
def whole(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepared(demo, out, **SMALL)
    return tree(out)


def interrupted(source: Path, out: Path, done: int = 3, **options: Any) -> None:
    """A run that ends when `done` files are written."""

    def progress(status: Any) -> None:
        if status.done >= done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(source, out, progress=progress, **(SMALL | options))
    assert not (out / "meta/info.json").exists()


# ---- cut short


def test_an_interrupted_run_continues(
    demo: Path, demo_copy: Path, tmp_path: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice, and the second time from another place. Files that were written stay."""
    out = tmp_path / "out"
    interrupted(demo, out)
    with pytest.raises(DatasetError):
        Dataset(out)
    kept = {path: path.stat().st_ino for kind in ("data", "videos") for path in out.glob(f"{kind}/**/*.*")}
    assert len(kept) == 3
    interrupted(demo_copy, out, 5)
    assert main(["prepare", "--status", str(out)]) == 0
    assert f"stopped: 5 of {len([n for n in whole if not n.startswith('meta')])} files done" in capsys.readouterr().out
    assert prepared(demo_copy, out, **SMALL).written > 1
    assert tree(out) == whole
    assert {path: path.stat().st_ino for path in kept} == kept
    assert main(["prepare", "--status", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


@pytest.mark.parametrize("state", ["running", "finishing"])
def test_a_run_that_writes_no_progress_has_stopped(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    """As after a kill, which leaves no other trace."""
    out = tmp_path / "out"
    interrupted(demo, out)
    path = out / "meta/prepare.json"
    for silent_s, expected in ((60, state), (601, "stopped")):
        stored = json.loads(path.read_text())
        status = stored["status"] | {"state": state, "at": time.time() - silent_s}
        path.write_text(json.dumps(stored | {"status": status}))
        assert main(["prepare", "--status", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == expected


def test_a_finished_run_does_nothing(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    first = prepared(demo, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert prepared(demo, out).as_dict() == first.as_dict() | {"written": 0}
    assert main(["prepare", str(demo), str(out)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert "another command, which differs in options" in failed(capsys, ["prepare", demo, out, "--file-mb", "3"], 2)


def test_a_file_that_was_cut_off_between_two_runs_is_written_again(demo: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    interrupted(demo, out)
    path = out / "data/chunk-000/file-000.parquet"
    os.truncate(path, path.stat().st_size - 100)
    prepared(demo, out, **SMALL)
    assert tree(out) == whole


def test_a_worker_that_dies_or_fails_costs_no_other_file(tmp_path: Path) -> None:
    """An error of a worker has its cause. Workers import no compiler, which takes as long as torch itself."""
    does = {"cause": "fails", "once": "ends once", "always": "ends always", "written": "imports"}
    tasks = [{"path": path, "does": what, "mark": str(tmp_path / path)} for path, what in does.items()]
    with contextlib.closing(Processes(2)) as processes:
        results = {result["path"]: result for result in processes.map(pool_tasks.run, tasks) if result is not None}
        twice = [result for _ in "ab" for result in processes.map(pool_tasks.run, tasks[-1:]) if result is not None]
    assert set(results) == set(does)
    errors = {path: result["error"] for path, result in results.items() if "error" in result}
    assert set(errors) == {"cause", "always"}
    assert "RuntimeError: text" in errors["cause"]
    assert "and the cause" in errors["cause"]
    modules = set(results["written"]["modules"])
    assert "torchcodec" in modules
    assert "torch._dynamo" not in modules
    assert twice[0]["process"] == twice[1]["process"]  # processes are kept, since each takes seconds to start


# ---- somebody else's folder


def test_what_is_there_is_left_alone(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_text("mine")
    before = tree(tmp_path)
    for out, why in (("file", "is a file"), ("folder", "not empty")):
        line = failed(capsys, ["prepare", demo, tmp_path / out], 2)
        assert why in line
        assert str(tmp_path / out) in line
    for inside in (demo, demo / "new", demo.parent):
        assert "is inside the other" in failed(capsys, ["prepare", demo, inside], 2)
    assert tree(tmp_path) == before


def test_an_unfinished_run_of_another_job_is_left_alone(
    demo: Path, vp9_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    interrupted(demo, out)
    before = tree(out)
    for source, options, why in (
        (vp9_demo, OPTIONS, "dataset"),
        (demo, ["--file-mb", "3"], "options"),
        (demo, [*OPTIONS, "--cameras", TOP], "cameras"),
        (demo, [*OPTIONS, "--clock", "frame_index"], "clock"),
    ):
        line = failed(capsys, ["prepare", source, out, *options], 2)
        assert "an unfinished run of another command, which differs in" in line
        assert why in line
    assert tree(out) == before


@pytest.mark.parametrize("kind", ["older state", "cut off", "not a state", "older plan", "no longer a dataset"])
def test_a_state_that_is_not_understood_is_refused(demo: Path, tmp_path: Path, kind: str) -> None:
    """A new run beside files of an earlier one could leave some of them in the new dataset."""
    out = tmp_path / "out"
    if kind == "no longer a dataset":
        prepared(demo, out, **SMALL)
        (out / "meta/info.json").unlink()
    else:
        interrupted(demo, out)
        state = out / "meta/prepare.json"
        text = state.read_text()
        if kind == "older state":
            state.rename(out / "meta/plan.jsonl")
        else:
            older = json.loads(text)
            older["plan"]["version"] -= 1
            state.write_text({"cut off": text[:-9], "not a state": '{"plan": {}}', "older plan": json.dumps(older)}[kind])
    before = tree(out)
    said = {"cut off": "Invalid", "not a state": "Invalid", "older plan": "differs in version"}.get(kind, "is not empty")
    with pytest.raises((ValueError, DatasetError), match=said):
        prepared(demo, out, **SMALL)
    assert tree(out) == before


@pytest.mark.slow
def test_one_command_at_a_time(demo: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", []

    def progress(status: Any) -> None:
        if not said:
            command = [sys.executable, "-m", "dali_stream", "prepare", demo, out, *OPTIONS]
            said.append(subprocess.run([*map(str, command)], capture_output=True, text=True, check=False))

    prepared(demo, out, **SMALL, progress=progress)
    assert said[0].returncode == 2
    assert "another process" in said[0].stderr


# ---- broken sources


def test_a_file_that_cannot_be_read_fails_alone(demo_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = videos(demo_copy)
    os.truncate(paths[0], 1000)
    os.truncate(demo_copy / "data/chunk-000/file-001.parquet", 5000)
    assert main(["prepare", str(demo_copy), str(tmp_path / "out"), *OPTIONS]) == 1
    said = capsys.readouterr()
    assert "could not be written" in said.err
    lines = "".join(said.out.split())  # long cells are folded anywhere
    assert paths[0].name in lines
    assert "file-001.parquet" in lines
    written = [path.relative_to(tmp_path / "out") for path in videos(tmp_path / "out")]
    assert len(written) >= 2
    report = prepared(demo_copy, tmp_path / "kept", drop_broken=True)
    assert report.episodes + len(report.dropped) == 6
    assert 0 < report.episodes < 6
    assert Dataset(tmp_path / "kept").num_episodes == report.episodes


def test_a_video_that_is_too_short_is_named(tmp_path: Path) -> None:
    parts = [video_data.draw((31,)), video_data.draw((30,), first=1)]
    path = video_data.encode_apart(parts, tmp_path / "a.mp4", video_data.h264(12))
    root = video_data.write_dataset(tmp_path / "data", [path])
    [why] = prepare(root, tmp_path / "out", jobs=1).failed.values()
    for word in (video_data.CAMERA, "episode 1", "frame 30"):
        assert word in why
    report = prepared(root, tmp_path / "kept", drop_broken=True)
    assert (report.episodes, list(report.dropped)) == (1, ["1"])


def test_rows_that_are_offset_against_the_video_are_refused(tmp_path: Path) -> None:
    """Elsewhere in the new files, the frame of another episode would be an unknown one."""
    video = video_data.encode(video_data.draw(), tmp_path / "video.mp4", video_data.mpeg4(12))
    root = video_data.shifted(video_data.write_dataset(tmp_path / "data", [video]), 1)
    with pytest.raises(DaliStreamError, match=r"episode 0, frame 30: .*outside its episode, which begins at 0\.0000 s"):
        prepared(root, tmp_path / "out")


def test_sound_is_not_dropped_in_silence(tmp_path: Path) -> None:
    silent = video_data.encode(video_data.draw(), tmp_path / "a.mp4", video_data.h264(12))
    sound = ("-f", "lavfi", "-i", "sine=duration=2", "-c:v", "copy", "-c:a", "aac")
    video_data.ffmpeg("-i", silent, *sound, tmp_path / "b.mp4")
    root = video_data.write_dataset(tmp_path / "data", [tmp_path / "b.mp4"])
    with pytest.raises(DaliStreamError, match="sound"):
        prepared(root, tmp_path / "out")


def test_a_feature_that_is_nowhere_is_named(demo_copy: Path, tmp_path: Path) -> None:
    enrich(demo_copy)
    features = json.loads((demo_copy / "meta/info.json").read_text())["features"]
    change_info(demo_copy, features=features | {"cloud": {"dtype": "pointcloud", "shape": [3]}})
    with pytest.raises(DaliStreamError, match=r"cloud.*pointcloud"):
        prepared(demo_copy, tmp_path / "out")


# ---- names that lead elsewhere


@pytest.mark.parametrize("name", ["../../escaped", "a/../../../escaped", "/tmp/escaped", "a\\b", "nul\0", "", ".", f"{SIDE}/."])
def test_a_camera_cannot_lead_out_of_the_folder(
    demo_copy: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rename_camera(demo_copy, name)
    before = tree(tmp_path)
    line = failed(capsys, ["prepare", demo_copy, tmp_path / "deep/er/out"], 1)
    assert "Nothing was written" in line
    assert tree(tmp_path) == before
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_paths_of_the_source_do_not_matter_for_the_new_one(demo_copy: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Its own templates are read with, and LeRobot's are written with."""
    (demo_copy / "videos").rename(demo_copy / "v")
    template = json.loads((demo_copy / "meta/info.json").read_text())["video_path"]
    change_info(demo_copy, video_path=template.replace("videos/", "v/"))
    prepared(demo_copy, tmp_path / "out", **SMALL)
    assert set(tree(tmp_path / "out")) == set(whole)
    assert_same_stream(demo_copy, tmp_path / "out")


@pytest.mark.parametrize("name", ["videos", f"videos/{TOP}/chunk-000", "meta/prepare"])
def test_links_are_not_followed(demo: Path, tmp_path: Path, name: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    interrupted(demo, out, 0)
    place = out / name
    if place.exists():
        place.rename(tmp_path / "kept")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(elsewhere)
    with pytest.raises((DaliStreamError, ValueError), match=r"is a link|not empty"):
        prepared(demo, out, **SMALL)
    assert not list(elsewhere.iterdir())


# ---- the program


@pytest.mark.slow
def test_the_report_and_the_table(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(small), str(tmp_path / "a"), *FAST, "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert all(line.startswith("running: ") for line in said.err.splitlines())  # where it takes some seconds
    assert (report["frames"], list(report["cameras"])) == (Dataset(small).num_frames, [TOP, SIDE])
    assert report["bytes"] == sum(
        path.stat().st_size for kind in ("data", "videos") for path in (tmp_path / "a" / kind).rglob("*.[mp][pa]*[4t]")
    )
    assert main(["prepare", str(tmp_path / "a"), str(tmp_path / "b"), *FAST]) == 0
    out = capsys.readouterr().out
    for word in (TOP, SIDE, "copied", "3 files written and verified"):
        assert word in out
    assert [p.read_bytes() for p in videos(tmp_path / "b")] == [p.read_bytes() for p in videos(tmp_path / "a")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--codec", "mpeg4"], "'hevc', 'h264', 'av1', 'vp9'"),
        (["--codec", "hevc", "--encoder", "gpu"], "'cpu', 'nvenc'"),
        (["--codec", "vp9", "--encoder", "nvenc"], "NVENC has no VP9"),
        (["--codec", "av1", "--gop", "1"], "SVT-AV1"),
        (["--codec", "hevc", "--gop", "0"], "'0'"),
        (["--codec", "hevc", "--gop", "20000"], "20000"),
        (["--codec", "hevc", "--crf", "52"], "crf must be 1 (best) to 51 for libx265, got 52"),
        (["--codec", "hevc", "--size", "123x161"], "must have even sides"),
        (["--for", "tpu"], "'cpu', 'nvdec', 'hub'"),
        (["--file-mb", "0"], "file_mb must be"),
        (["--jobs", "0"], "'0'"),
        (["--episodes", "9"], "Unknown episode 9"),
        (["--cameras", "behind"], "Unknown camera 'behind'"),
        (["--revision", "main"], "revision"),
        (["--status"], "holds no run"),
    ],
)
def test_wrong_arguments(
    small: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failed(capsys, ["prepare", small, tmp_path / "out", *options], 2)
    assert not (tmp_path / "out").exists()

"""`dali-stream reshard`: interrupted runs, folders that are somebody else's, damage, names that lead elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import videos as video_data
from support.batches import assert_same_stream
from support.datasets import SIDE, TOP, change_info, enrich, rename_camera, tree, videos
from support.programs import failed
from support.tools import SMALL
from support.tools import resharded as written

import dali_stream
from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError
from dali_stream.cli import main
from dali_stream.tools.rewriting import reshard

OPTIONS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def whole(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    written(demo, out, **SMALL)
    return tree(out)


class Interrupted(Exception):
    pass


def interrupted(source: Path, out: Path, stage: str, share: float, **options: Any) -> None:
    """A run that ends when a stage has come so far."""

    def progress(now: str, done: int, total: int) -> None:
        if now == stage and done >= share * total:
            raise Interrupted

    with pytest.raises(Interrupted):
        reshard(Dataset(source), out, progress=progress, **(SMALL | options))


# ---- cut short


_KILLED = """
import os, signal, sys
from dali_stream import Dataset
from dali_stream.tools.rewriting import reshard

def progress(stage, done, total):
    if stage == sys.argv[3] and done >= float(sys.argv[4]) * total:
        os.kill(os.getpid(), signal.SIGKILL)

options = {"data_file_size": %(data_file_size)d, "video_file_size": %(video_file_size)d}
reshard(Dataset(sys.argv[1]), sys.argv[2], **options, progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "share"), [("rows", 0.6), ("indices", 0.5), ("video", 0.3), ("video", 0.8), ("verifying", 0.5)]
)
def test_a_killed_run_goes_on_where_it_was(
    demo: Path, tmp_path: Path, whole: dict[str, bytes], stage: str, share: float
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", _KILLED % SMALL, demo, out, stage, share]
    assert subprocess.run([*map(str, command)], capture_output=True, check=False).returncode == -signal.SIGKILL
    with pytest.raises(DatasetError):
        Dataset(out)
    kept = {path: path.stat().st_ino for kind in ("data", "videos") for path in out.glob(f"{kind}/**/*.*")}
    assert len(kept) > 0 or stage == "rows"  # files are written beside each other, and may all be unfinished
    assert main(["reshard", str(demo), str(out), *OPTIONS, "--json"]) == 0
    assert tree(out) == whole
    assert {path: path.stat().st_ino for path in kept} == kept


def test_an_interrupted_program_says_so_and_goes_on(
    demo: Path, tmp_path: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, twice, at different times."""
    out = tmp_path / "out"
    for stage in ("video", "verifying"):

        def progress(now: str, done: int, total: int, stage: str = stage) -> None:
            if now == stage and done > total / 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            reshard(Dataset(demo), out, **SMALL, progress=progress)
        assert not (out / "meta").exists()
    assert main(["reshard", str(demo), str(out), *OPTIONS]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "all rows and encoded frames are verified" in said.out
    assert tree(out) == whole


def test_the_source_may_have_moved(demo: Path, demo_copy: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupted(demo, tmp_path / "out", "video", 0.5)
    written(demo_copy, tmp_path / "out", **SMALL)
    assert tree(tmp_path / "out") == whole


# ---- somebody else's folder


def test_what_is_there_is_left_alone(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_text("mine")
    done = tmp_path / "done"
    assert main(["reshard", str(demo), str(done)]) == 0
    capsys.readouterr()
    before = tree(tmp_path)
    for out, why in (("file", "is a file"), ("folder", "not empty"), ("done", "not empty")):
        line = failed(capsys, ["reshard", demo, tmp_path / out], 2)
        assert why in line
        assert str(tmp_path / out) in line
    assert "not empty" in failed(capsys, ["reshard", done, done], 2)
    assert tree(tmp_path) == before


def test_an_unfinished_run_of_another_job_is_left_alone(
    demo: Path, vp9_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    interrupted(demo, out, "video", 0.5)
    before = tree(out)
    for source, options, why in (
        (vp9_demo, OPTIONS, "dataset"),
        (demo, OPTIONS[:2], "video file size"),
        (demo, OPTIONS[2:], "data file size"),
    ):
        line = failed(capsys, ["reshard", source, out, *options], 2)
        assert f"another {why}" in line
    assert tree(out) == before
    (out / ".reshard/plan.json").unlink()
    assert "plan.json" in failed(capsys, ["reshard", demo, out, *OPTIONS], 2)


def test_one_process_at_a_time(demo: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "video" and not said:
            command = [sys.executable, "-m", "dali_stream", "reshard", demo, out, *OPTIONS]
            said.append(subprocess.run([*map(str, command)], capture_output=True, text=True, check=False))

    reshard(Dataset(demo), out, **SMALL, progress=progress)
    assert said[0].returncode == 2
    assert "another process" in said[0].stderr


@pytest.mark.parametrize("options", [{"episodes": [0, 1]}, {"episodes": [5]}])
def test_a_part_of_a_dataset_is_refused(demo: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="part of the dataset"):
        reshard(Dataset(demo, **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damaged_run(source: Path, out: Path, damage: Any) -> str:
    """What a run says when all is written and somebody damages a file before it is verified."""
    seen = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "verifying" and not seen:
            seen.append(damage())

    with pytest.raises(DaliStreamError) as caught:
        reshard(Dataset(source), out, **SMALL, progress=progress)
    assert not (out / "meta").exists()
    return str(caught.value)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.999])
def test_a_damaged_frame_is_found_and_written_anew(demo: Path, tmp_path: Path, whole: dict[str, bytes], share: float) -> None:
    out = tmp_path / "out"
    path = out / f"videos/{SIDE}/chunk-000/file-001.mp4"
    said = damaged_run(demo, out, lambda: flip(path, int(path.stat().st_size * share)))
    for word in (str(path), SIDE, "episode") if share < 0.9 else (str(path),):
        assert word in said
    assert not path.exists()
    written(demo, out, **SMALL)
    assert tree(out) == whole


def test_a_time_that_changed_is_found(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / f"out/videos/{TOP}/chunk-000/file-000.mp4"
    said = damaged_run(demo, tmp_path / "out", lambda: flip(path, path.read_bytes().index(b"stts") + 15))
    assert str(path) in said
    assert TOP in said


def test_a_changed_footer_is_found(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "out/data/chunk-000/file-001.parquet"
    said = damaged_run(demo, tmp_path / "out", lambda: flip(path, path.read_bytes().index(b"parquet-cpp-arrow")))
    assert str(path) in said


@pytest.mark.parametrize("row", [0, 20, 50])
def test_a_damaged_row_is_found(demo: Path, tmp_path: Path, whole: dict[str, bytes], row: int) -> None:
    """A Parquet file that is whole and has another value in it."""
    out = tmp_path / "out"
    path = out / "data/chunk-000/file-001.parquet"

    def damage() -> None:
        table = pq.read_table(path, use_threads=False)
        values = np.array(table["next.reward"].to_pylist(), np.float32)
        values[row] += 1
        at = table.column_names.index("next.reward")
        pq.write_table(table.set_column(at, table.schema.field(at), [values]), path)

    said = damaged_run(demo, out, damage)
    assert "episode 1: its rows differ" in said
    assert str(path) in said
    written(demo, out, **SMALL)
    assert tree(out) == whole


@pytest.mark.parametrize("name", ["data/chunk-000/file-000.parquet", f"videos/{TOP}/chunk-000/file-000.mp4"])
def test_a_cut_off_file_is_found(demo: Path, tmp_path: Path, whole: dict[str, bytes], name: str) -> None:
    out = tmp_path / "out"
    said = damaged_run(demo, out, lambda: os.truncate(out / name, 1000))
    assert str(out / name) in said
    written(demo, out, **SMALL)
    assert tree(out) == whole


def test_damage_between_two_runs_is_found(
    demo: Path, tmp_path: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    interrupted(demo, out, "video", 1.0)
    for path in (videos(out)[0], out / "data/chunk-000/file-000.parquet"):
        os.truncate(path, path.stat().st_size - 100)
        line = failed(capsys, ["reshard", demo, out, *OPTIONS], 1)
        assert str(path) in line
    assert main(["reshard", str(demo), str(out), *OPTIONS]) == 0
    assert tree(out) == whole


def test_a_video_that_is_too_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = video_data.encode(video_data.draw((31, 30)), tmp_path / "a.mp4", video_data.h264(12))
    root = video_data.write_dataset(tmp_path / "data", [path])
    line = failed(capsys, ["reshard", root, tmp_path / "out"], 1)
    for word in (video_data.CAMERA, "episode 1", "frame 30"):
        assert word in line
    with pytest.raises(DecodeError):
        written(root, tmp_path / "out")


def test_rows_that_are_offset_against_the_video_are_refused(tmp_path: Path) -> None:
    """Elsewhere in the new files, the frame of another episode would be an unknown one."""
    video = video_data.encode(video_data.draw(), tmp_path / "video.mp4", video_data.mpeg4(12))
    root = video_data.shifted(video_data.write_dataset(tmp_path / "data", [video]), 1)
    with pytest.raises(DecodeError, match=r"episode 0, frame 30: .*outside its episode, which begins at 0\.0000 s"):
        reshard(Dataset(root), tmp_path / "out")


def test_sound_is_not_dropped_in_silence(tmp_path: Path) -> None:
    silent = video_data.encode(video_data.draw(), tmp_path / "a.mp4", video_data.h264(12))
    sound = ("-f", "lavfi", "-i", "sine=duration=2", "-c:v", "copy", "-c:a", "aac")
    video_data.ffmpeg("-i", silent, *sound, tmp_path / "b.mp4")
    root = video_data.write_dataset(tmp_path / "data", [tmp_path / "b.mp4"])
    with pytest.raises(DecodeError, match="sound"):
        written(root, tmp_path / "out")


def test_a_feature_that_is_nowhere_is_named(demo_copy: Path, tmp_path: Path) -> None:
    enrich(demo_copy)
    features = json.loads((demo_copy / "meta/info.json").read_text())["features"]
    change_info(demo_copy, features=features | {"cloud": {"dtype": "pointcloud", "shape": [3]}})
    with pytest.raises(DatasetError, match=r"cloud.*pointcloud"):
        written(demo_copy, tmp_path / "out")


# ---- names that lead elsewhere


@pytest.mark.parametrize("name", ["../../escaped", "a/../../../escaped", "/tmp/escaped", "a\\b", "nul\0", "", ".", f"{SIDE}/."])
def test_a_camera_cannot_lead_out_of_the_folder(
    demo_copy: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rename_camera(demo_copy, name)
    before = tree(tmp_path)
    line = failed(capsys, ["reshard", demo_copy, tmp_path / "deep/er/out"], 1)
    assert "nothing was written" in line
    assert tree(tmp_path) == before
    assert not (tmp_path / "deep").exists()


def test_paths_of_the_source_do_not_matter_for_the_new_one(demo_copy: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Its own templates are read with, and LeRobot's are written with."""
    (demo_copy / "videos").rename(demo_copy / "v")
    template = json.loads((demo_copy / "meta/info.json").read_text())["video_path"]
    change_info(demo_copy, video_path=template.replace("videos/", "v/"))
    written(demo_copy, tmp_path / "out", **SMALL)
    assert set(tree(tmp_path / "out")) == set(whole)
    assert_same_stream(demo_copy, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["videos", f"videos/{TOP}", f"videos/{TOP}/chunk-000", "data/chunk-000/file-000.parquet", ".reshard"]
)
def test_links_are_not_followed(demo: Path, tmp_path: Path, name: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    interrupted(demo, out, "footers", 0.0)
    place = out / name
    if name == ".reshard":
        place.rename(tmp_path / "kept")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(elsewhere / "file" if place.suffix else elsewhere)
    with pytest.raises((DatasetError, ValueError)):
        written(demo, out, **SMALL)
    assert not list(elsewhere.iterdir())


# ---- the program


def test_the_report(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", str(demo), str(tmp_path / "out"), "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert said.err == ""
    assert report["frames"] == Dataset(demo).num_frames
    assert report["cameras"] == [TOP, SIDE]
    assert report["out"]["row_requests"] < report["source"]["row_requests"]
    assert set(report["source"]) == set(report["out"]) >= {"data_files", "video_files", "bytes", "index_requests", "row_bytes"}


@pytest.mark.parametrize(("option", "value"), [("--video-file-size", "much"), ("--data-file-size", "0")])
def test_sizes_that_are_none(demo: Path, tmp_path: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert option[2:].replace("-", "_") in failed(capsys, ["reshard", demo, tmp_path / "out", option, value], 2)
    assert not (tmp_path / "out").exists()


def test_a_revision_of_a_folder_is_refused(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "revision" in failed(capsys, ["reshard", demo, tmp_path / "out", "--revision", "main"], 2)


def test_the_new_dataset_can_be_resharded_too(demo: Path, tmp_path: Path) -> None:
    written(demo, tmp_path / "a", **SMALL)
    written(tmp_path / "a", tmp_path / "b", **SMALL)
    first, second = tree(tmp_path / "a"), tree(tmp_path / "b")
    assert {k: v for k, v in first.items() if k.endswith(".mp4")} == {k: v for k, v in second.items() if k.endswith(".mp4")}
    assert dali_stream.Dataset(tmp_path / "b").stats.keys() == Dataset(demo).stats.keys()

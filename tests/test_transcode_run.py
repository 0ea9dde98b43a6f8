"""`dali-stream transcode`: runs that are cut short, damage, arguments, folders of somebody else."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import videos as video_data
from support.datasets import SIDE, TOP, copied, tree
from support.programs import failed
from support.slow import slow
from support.tools import FAST, stub, transcoded

from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError
from dali_stream.cli import main
from dali_stream.tools.transcoding import transcode

pytestmark = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="the ffmpeg program is not installed")


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    transcoded(small, out, codec="h264")
    return tree(out)


# ---- cut short

_KILLED = """
import os, signal, sys
from dali_stream import Dataset
from dali_stream.tools.transcoding import transcode

def progress(stage, done, total):
    if stage == sys.argv[3] and done >= float(sys.argv[4]) * total and os.path.exists(sys.argv[5]):
        os.kill(os.getpid(), signal.SIGKILL)

transcode(Dataset(sys.argv[1]), sys.argv[2], codec="h264", encoder="cpu", jobs=int(sys.argv[6]), progress=progress)
"""
# A program for one file of the camera on the side that never ends, and says who it is; until there is a file `later`.
_WAITS = """
folder = {folder!r}
if encoding and "side" in arguments[-1] and not os.path.exists(folder + "/later"):
    import signal
    own = folder + "/pid." + str(os.getpid())  # the camera has two files, which are encoded at once
    open(own, "w").write(str(os.getpid()))
    os.rename(own, folder + "/pid")
    signal.pause()
"""


def killed(source: Path, out: Path, stage: str, share: float, when: Path, jobs: int) -> None:
    """A run that is killed when a stage has come so far and there is the file `when`."""
    command = [sys.executable, "-c", _KILLED, source, out, stage, share, when, jobs]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr


def ended(pid: int) -> bool:
    """Waits for a process to end, which need not be this one's child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 60)[0])
    finally:
        os.close(handle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "share"),
    [
        ("video", 0.0),
        ("video", 0.5),
        ("verifying", 0.5),
    ],
)
def test_a_killed_run_goes_on_where_it_was(
    small: Path, tmp_path: Path, whole: dict[str, bytes], stage: str, share: float
) -> None:
    out = tmp_path / "out"
    killed(small, out, stage, share, small, jobs=1)
    with pytest.raises(DatasetError):
        Dataset(out)
    kept = {path: path.stat().st_ino for kind in ("data", "videos") for path in out.glob(f"{kind}/**/*.*")}
    assert bool([path for path in kept if path.suffix == ".mp4"]) == (share > 0)
    assert main(["transcode", str(small), str(out), *FAST, "--json"]) == 0
    assert tree(out) == whole
    assert {path: path.stat().st_ino for path in kept} == kept


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end a program with who started it")
def test_a_killed_run_leaves_no_program_behind(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, _WAITS.format(folder=str(tmp_path)))
    killed(small, tmp_path / "out", "video", 0.01, tmp_path / "pid", jobs=3)
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_an_interrupted_run_ends_its_programs(
    small: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, _WAITS.format(folder=str(tmp_path)))

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "video" and done > 0 and (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transcode(Dataset(small), tmp_path / "out", codec="h264", encoder="cpu", jobs=3, progress=progress)
    assert ended(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "out/meta").exists()
    (tmp_path / "later").touch()
    transcoded(small, tmp_path / "out", codec="h264")
    assert tree(tmp_path / "out") == whole


def test_what_is_there_is_left_alone(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_text("mine")
    (tmp_path / "reshard/.reshard").mkdir(parents=True)
    before = tree(tmp_path)
    for out in ("folder", "reshard"):
        line = failed(capsys, ["transcode", small, tmp_path / out, *FAST], 2)
        assert "not empty" in line
        assert str(tmp_path / out) in line
    assert "not empty" in failed(capsys, ["transcode", small, small, *FAST], 2)
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_an_unfinished_run_of_other_options_is_left_alone(
    small: Path, vp9_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "verifying":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transcode(Dataset(small), tmp_path / "out", codec="h264", encoder="cpu", progress=progress)
    before = tree(tmp_path / "out")
    for source, options, what in (
        (vp9_demo, FAST, "dataset"),
        (small, ["--codec", "vp9", "--encoder", "cpu"], "codec"),
        (small, [*FAST, "--gop", "3"], "gop"),
        (small, [*FAST, "--crf", "30"], "crf"),
        (small, ["--codec", "h264"], "encoder"),
    ):
        assert f"another {what}" in failed(capsys, ["transcode", source, tmp_path / "out", *options], 2)
    assert tree(tmp_path / "out") == before
    assert main(["transcode", str(small), str(tmp_path / "out"), *FAST, "--jobs", "3"]) == 0


@pytest.mark.parametrize("selected", [{"episodes": [0]}])
def test_a_part_of_a_dataset_is_refused(small: Path, tmp_path: Path, selected: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="part of the dataset"):
        transcode(Dataset(small, **selected), tmp_path / "out", encoder="cpu")
    assert not (tmp_path / "out").exists()


# ---- broken sources, damage


def damage(path: Path, how: str) -> None:
    """Truncates a file, or puts other bytes into the middle of its frames."""
    data = bytearray(path.read_bytes())
    if how == "cut off":
        del data[len(data) // 2 :]
    else:
        middle = data.index(b"mdat") + 2000
        data[middle : middle + 700] = bytes(700) if how == "zeroed" else bytes(range(7, 107)) * 7
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["overwritten", *map(slow, ("cut off", "zeroed"))])
def test_a_broken_source_file_is_named(small: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = copied(small, tmp_path)
    path = sorted((root / "videos" / SIDE).rglob("*.mp4"))[0]
    damage(path, how)
    line = failed(capsys, ["transcode", root, tmp_path / "out", *FAST], 1)
    assert str(path) in line
    assert SIDE in line
    assert not (tmp_path / "out/meta").exists()
    shutil.copy(small / path.relative_to(root), path)
    assert main(["transcode", str(root), str(tmp_path / "out"), *FAST]) == 0


def test_a_video_that_is_too_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = video_data.encode(video_data.draw((31, 30)), tmp_path / "a.mp4", video_data.h264(12))
    root = video_data.write_dataset(tmp_path / "data", [path])
    line = failed(capsys, ["transcode", root, tmp_path / "out", *FAST], 1)
    for word in (video_data.CAMERA, "episode 1", "frame 30"):
        assert word in line
    with pytest.raises(DecodeError):
        transcoded(root, tmp_path / "out", codec="h264")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data/chunk-000/file-000.parquet", f"videos/{TOP}/chunk-000/file-000.mp4"])
def test_damage_before_the_end_is_found_and_mended(small: Path, tmp_path: Path, whole: dict[str, bytes], name: str) -> None:
    path, seen = tmp_path / "out" / name, list[int]()

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "verifying" and not seen:
            seen.append(os.truncate(path, path.stat().st_size - 1) or 1)

    with pytest.raises(DaliStreamError, match="has changed since it was written") as caught:
        transcode(Dataset(small), tmp_path / "out", codec="h264", encoder="cpu", progress=progress)
    assert str(path) in str(caught.value)
    assert not path.exists()
    assert not (tmp_path / "out/meta").exists()
    transcoded(small, tmp_path / "out", codec="h264")
    assert tree(tmp_path / "out") == whole


def test_rows_that_changed_between_two_runs_are_found(small: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "video":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transcode(Dataset(small), tmp_path / "out", codec="h264", encoder="cpu", progress=progress)
    os.truncate(tmp_path / "out/data/chunk-000/file-000.parquet", 5000)
    with pytest.raises(DaliStreamError, match=r"file-000\.parquet: has changed since it was written"):
        transcoded(small, tmp_path / "out", codec="h264")
    transcoded(small, tmp_path / "out", codec="h264")
    assert tree(tmp_path / "out") == whole


def test_a_broken_file_of_rows_is_named(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    path = root / "data/chunk-000/file-000.parquet"
    os.truncate(path, 5000)
    with pytest.raises(DatasetError, match=str(path)):
        transcoded(root, tmp_path / "out", codec="h264")


def test_paths_that_lead_elsewhere_are_refused(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    info = json.loads((root / "meta/info.json").read_text())
    for path in (
        "meta/{video_key}/{chunk_index}/{file_index}.mp4",
        ".transcode/{video_key}{chunk_index}{file_index}",
        "all.mp4",
    ):
        (root / "meta/info.json").write_text(json.dumps(info | {"video_path": path}))
        with pytest.raises(DatasetError, match="nothing was written"):
            transcoded(root, tmp_path / "out", codec="h264")
        assert not (tmp_path / "out").exists()


# ---- the program


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--codec"),
        (["--codec", "mpeg4"], "'hevc', 'h264', 'av1', 'vp9'"),
        (["--codec", "hevc", "--encoder", "gpu"], "'nvenc', 'cpu'"),
        (["--codec", "vp9", "--encoder", "nvenc"], "NVENC has no VP9"),
        (["--codec", "av1", "--gop", "1", "--encoder", "cpu"], "SVT-AV1"),
        (["--codec", "hevc", "--gop", "0"], "'0'"),
        (["--codec", "hevc", "--gop", "20000"], "20000"),
        (["--codec", "hevc", "--crf", "52", "--encoder", "cpu"], "Invalid crf 52"),
        (["--codec", "hevc", "--crf", "good"], "'good'"),
        (["--codec", "hevc", "--jobs", "0"], "'0'"),
        (["--codec", "hevc", "--revision", "main"], "revision"),
    ],
)
def test_wrong_arguments(
    small: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failed(capsys, ["transcode", small, tmp_path / "out", *options], 2)
    assert not (tmp_path / "out").exists()


def test_odd_sizes_are_for_codecs_that_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    video_data.encode(video_data.draw(size=(123, 161)), tmp_path / "a.mp4", video_data.vp9(12))
    video_data.write_dataset(source, [tmp_path / "a.mp4"], size=(123, 161))
    line = failed(capsys, ["transcode", source, tmp_path / "out", *FAST], 2)
    assert "frames of 123×161" in line
    assert "use vp9" in line
    assert main(["transcode", str(source), str(tmp_path / "out"), "--codec", "vp9", "--gop", "2"]) == 0


@pytest.mark.parametrize("out", ["new", "videos/new", ".."])
def test_one_dataset_in_another_is_refused(small: Path, tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(small, tmp_path / "around")
    for command in (["transcode", source, source / out, *FAST], ["reshard", source, source / out]):
        assert "lies in the other" in failed(capsys, command, 2)
    assert tree(source) == tree(small)


def test_the_table(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcode", str(small), str(tmp_path / "a"), *FAST]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for word in (TOP, SIDE, "av1 → h264", "libx264", " dB", "3 video files encoded"):
        assert word in said.out
    assert main(["transcode", str(tmp_path / "a"), str(tmp_path / "b"), *FAST]) == 0
    assert "3 video files already fit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dataset_in_two_places(small: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    for kind in ("data", "videos"):
        shutil.copytree(small / kind, tmp_path / "files" / kind)
    shutil.copytree(small / "meta", tmp_path / "root/meta")
    options = ["--data-files-root", str(tmp_path / "files")]
    assert main(["transcode", str(tmp_path / "root"), str(tmp_path / "out"), *FAST, *options]) == 0
    assert tree(tmp_path / "out") == whole

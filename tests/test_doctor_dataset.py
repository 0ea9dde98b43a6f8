"""`dali-stream doctor URI`: all ways of breaking a dataset, its files, rows, tasks and actions, and mixture files."""

from __future__ import annotations

import functools
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import broken
from support.datasets import ODD_CAMERA, ODD_SIZE, SIDE, TOP, VIDEO, Column, build, copied
from support.doctor import NO_DECODER, TORCHCODEC, bad, doctor, found, looked_at, shadows
from support.programs import failed
from support.servers import Server
from support.videos import CAMERA, draw, encode, h264, loader, write_dataset

import dali_stream
from dali_stream import Dataset
from dali_stream.lerobot.info import INFO
from dali_stream.tools.diagnosis import Finding
from dali_stream.tools.diagnosis.run import examine, open_dataset

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


def test_images_in_rows(tmp_path: Path, odd: Path) -> None:
    findings = looked_at(odd)
    assert {findings[key].status for key in ("rows", *Dataset(odd).images)} == {"ok"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Healthy datasets by codec, as `broken.healthy` writes them. Read only."""
    return functools.cache(lambda codec: broken.healthy(tmp_path_factory.mktemp(codec), codec))


def problems(root: Path, deep: bool) -> list[str]:
    """The problems that the doctor finds in a dataset, without the decoders of its one frame, which take processes."""
    opened = open_dataset(root)
    if isinstance(opened, Finding):
        return [opened.text]
    every = (lambda done, total: None) if deep else None
    return [f.text for f in examine(opened, NO_DECODER, 120, every) if f.status == "problem"]


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
    findings = examine(Dataset(root), NO_DECODER, 120, lambda *counts: done.append(counts))
    [finding] = [f for f in findings if f.name == "all frames"]
    assert finding.text.startswith(f"{CAMERA}: episode 1, frame 8: {root}/videos/")
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_deep_reads_what_follows_damage(sound: Callable[[str], Path], tmp_path: Path) -> None:
    """A packet that two of the three batches need: one at the end of the first batch, and one of a later GOP."""
    root = copied(sound("h264"), tmp_path)
    broken.WAYS["packet: a hole from 0.6"].apply(root)
    broken.WAYS["packet: zeros"].apply(root)
    finding = {f.name: f for f in examine(Dataset(root), NO_DECODER, 120, lambda done, total: None)}["all frames"]
    assert finding.text.startswith(f"{CAMERA}: episode 0, frame 24: {root}/videos/")
    assert finding.text.endswith(". 2 of 3 batches of successive frames have such errors")


def test_every_missing_file_is_counted_and_named(demo_copy: Path) -> None:
    gone = [*sorted(demo_copy.glob(f"videos/{SIDE}/**/*.mp4"))[1:], *demo_copy.glob("data/**/*.parquet")]
    for path in gone:
        path.unlink()
    finding = looked_at(demo_copy)["files"]
    assert finding.status == "problem"
    assert f"{len(gone)} of " in finding.text
    assert all(str(path.relative_to(demo_copy)) in finding.text for path in gone[:3])


def test_a_remote_dataset_takes_few_requests(tmp_path: Path) -> None:
    """HTTP has no listings: 32 of 100 files are looked for, and the missing one is among those that are read."""
    video = encode(draw((6,)), tmp_path / "a.mp4", h264(2))
    root = write_dataset(tmp_path / "many", [video] * 100, [(6,)] * 100)
    (root / VIDEO.format(CAMERA, 99)).unlink()
    with Server(root) as server:
        findings = {f.name: f for f in examine(Dataset(server.url), NO_DECODER, 120)}
        assert len(server.requests) < 250
    assert "file-099.mp4: no such file" in findings[f"{CAMERA} file 1"].text
    assert findings["rows"].text.endswith("in 32 checked episodes of 100")


@pytest.mark.usefixtures("doctor_here")
def test_rows_that_cannot_be_read(demo_copy: Path) -> None:
    for path in demo_copy.glob("data/**/*.parquet"):
        path.write_bytes(POINTER)
    findings = looked_at(demo_copy, TORCHCODEC)
    assert "a Git LFS pointer" in findings["rows"].text
    assert "git lfs pull" in findings["rows"].text
    assert findings[f"{TOP} frame, torchcodec"].status == "ok", "broken rows do not hide a decoder"
    assert findings[TOP].status == "ok"


def test_a_timestamp_that_falls(demo_copy: Path) -> None:
    """In the last episode, which is not the one whose rows are read whole."""
    path = max(demo_copy.glob("data/**/*.parquet"))
    table = pq.read_table(path)
    times = table["timestamp"].to_numpy().copy()
    times[-5] = 0.15
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", pa.array(times)), path)
    findings = looked_at(demo_copy)
    assert findings["rows"].status == "problem"
    message = rf"Invalid timestamp of row \d+ in {re.escape(str(path))}: episode 5: must be greater than .*, got 0\.1500 s"
    assert re.search(message, findings["rows"].text)


@pytest.mark.slow
def test_broken_metadata_is_a_finding(demo_copy: Path, tmp_path: Path) -> None:
    (demo_copy / INFO).write_text("{")
    report = doctor(demo_copy, libraries=shadows(tmp_path / "libraries"))
    assert (report["status"], found(report, "metadata")["status"]) == ("problem", "problem")
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


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Folder with the datasets `pick` of 9 rows, and `fold` of 50, without cameras."""
    for name, lengths in (("pick", (5, 4)), ("fold", (25, 25))):
        build(tmp_path / name, lengths, {"observation.state": Column("float32", [2], np.zeros((sum(lengths), 2)))})
    return tmp_path


def mixture(folder: Path, **content: Any) -> Path:
    (path := folder / "mixture.json").write_text(json.dumps({"datasets": {"pick": "pick", "fold": "fold"}, **content}))
    return path


@pytest.mark.usefixtures("doctor_here")
def test_the_datasets_of_a_mixture_file_are_examined_one_by_one(parts: Path) -> None:
    report = doctor(mixture(parts))
    names = [f["name"] for f in report["findings"] if f["area"] == "dataset"]
    checks = ("statistics", "files", "rows", "tasks")
    assert names == [*(f"{part}: {check}" for part in ("pick", "fold") for check in checks), "mixture"]
    assert found(report, "fold: rows")["text"] == "rows are whole in 2 checked episodes of 2"
    assert found(report, "mixture")["text"] == "2 datasets, 59 samples an epoch"
    report = doctor(mixture(parts), episodes=[1])  # in each dataset
    assert found(report, "mixture")["text"] == "2 datasets, 29 samples an epoch"

    # A dataset that cannot be opened hides nothing of the others.
    (parts / "pick" / INFO).write_text("{")
    [path] = parts.glob("fold/data/**/*.parquet")
    path.unlink()
    report = doctor(mixture(parts))
    problems = [name for status, name in bad(report) if status == "problem"]
    assert problems == ["pick: metadata", "fold: files", "fold: rows"]
    assert str(parts / "pick" / INFO) in found(report, "pick: metadata")["text"]
    assert "mixture" not in [f["name"] for f in report["findings"]]


@pytest.mark.usefixtures("doctor_here")
def test_datasets_that_cannot_be_mixed_are_a_problem(parts: Path) -> None:
    for content, said in (
        ({"weights": {"pick": 1}}, "weights must name each dataset, got none for 'fold'"),
        ({"keys": {"fold": {"observation.state": "state"}}}, "observation.state"),
    ):
        finding = found(doctor(mixture(parts, **content)), "mixture")
        assert finding["status"] == "problem"
        assert said in finding["text"]


def test_bad_arguments_of_a_mixture_file_are_told_in_a_line(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mixture(parts)
    assert "data_files_root belongs to one dataset" in failed(capsys, ["doctor", path, "--data-files-root", parts], 2)
    assert "Cannot read mixture file" in failed(capsys, ["doctor", parts / "no.yaml"], 2)
    said = failed(capsys, ["doctor", path, "--cameras", "top"], 2)
    assert "dataset 'pick': " in said
    assert "'top'" in said


def test_an_image_that_is_a_git_lfs_pointer(tmp_path: Path) -> None:
    images = Column("image", (*ODD_SIZE, 3), [{"bytes": POINTER, "path": None}] * 5)
    findings = looked_at(build(tmp_path, (5,), {ODD_CAMERA: images}))
    assert findings[ODD_CAMERA].status == "problem"
    assert "Git LFS pointer" in findings[ODD_CAMERA].text

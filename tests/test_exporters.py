"""Datasets whose metadata other exporters write otherwise: they open, every command reads them, and `prepare` mends them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import PartialState
from support.broken import edit_table, put
from support.datasets import EPISODE_TABLE, Column, build, change_info
from support.slow import slow
from support.tools import prepared
from support.videos import CAMERA, FPS, draw, encode, h264, identities, loader, one_file_each, samples, write_dataset

from dali_stream import Dataset, DecodeError
from dali_stream.cli import main

LENGTHS = (12, 1, 17)
START, STOP = (f"videos/{CAMERA}/{name}_timestamp" for name in ("from", "to"))
EVERY_FRAME = {(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)}


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """`bench` makes Accelerate's state, which must not outlive a test."""
    yield
    PartialState._reset_state()


@pytest.fixture(scope="module")
def early_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v3.0 with three episodes in a file, whose `to_timestamp` is the time of their last frame. Read only."""
    folder = tmp_path_factory.mktemp("early")
    root = write_dataset(folder / "data", [encode(draw(LENGTHS), folder / "a.mp4", h264(6))], [LENGTHS])
    edit_table(root, EPISODE_TABLE, lambda table: put(table, STOP, [*(table[STOP].to_numpy() - 1 / FPS)]))
    return root


@pytest.fixture(scope="module")
def plain_v21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v2.1 as LeRobot writes it, with statistics. Read only."""
    folder = tmp_path_factory.mktemp("v21")
    columns = {"action": Column("float32", [2], np.arange(2 * sum(LENGTHS)).reshape(-1, 2))}
    cameras = one_file_each(folder, (CAMERA,), LENGTHS, fps=FPS)
    return build(folder / "data", LENGTHS, columns, cameras=cameras, fps=FPS, version="v2.1", stats=True)


@pytest.fixture(scope="module")
def chunk_index(plain_v21: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v2.1 whose paths name the chunk `chunk_index`. Read only."""
    root = Path(shutil.copytree(plain_v21, tmp_path_factory.mktemp("chunk") / "data"))
    info = json.loads((root / "meta/info.json").read_text())
    change_info(root, **{name: info[name].replace("episode_chunk", "chunk_index") for name in ("data_path", "video_path")})
    return root


@pytest.fixture(scope="module")
def wall_clock(plain_v21: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v2.1 whose timestamps begin late and jitter by more than half a frame. Read only."""
    root = Path(shutil.copytree(plain_v21, tmp_path_factory.mktemp("wall") / "data"))
    rng = np.random.default_rng(0)
    for path in sorted(root.glob("data/**/*.parquet")):
        table = pq.read_table(path)
        times = 0.031 + (np.arange(len(table)) + rng.uniform(-0.45, 0.45, len(table))) / FPS
        pq.write_table(put(table, "timestamp", [*np.sort(times).astype(np.float32)]).cast(table.schema), path)
    return root


@pytest.fixture(params=["early_ends", "chunk_index", "wall_clock"])
def odd_dataset(request: pytest.FixtureRequest) -> tuple[Path, list[str]]:
    """Each of the three, with the options that its commands need. Read only."""
    options = ["--clock", "frame_index"] if request.param == "wall_clock" else []
    return request.getfixturevalue(request.param), options


def frames_of(dataset: Path | Dataset) -> list[tuple[int, int]]:
    """Episode and frame that each sample asked for, which its pixels must show."""
    shown = list(samples(loader(dataset)))
    asked = [(episode, frame) for episode, frame, _ in shown]
    assert identities(torch.stack([frame for *_, frame in shown])) == asked
    return asked


def test_every_frame_is_delivered_once(odd_dataset: tuple[Path, list[str]]) -> None:
    root, options = odd_dataset
    asked = frames_of(Dataset(root, clock="frame_index") if options else root)
    assert len(asked) == len(EVERY_FRAME)
    assert set(asked) == EVERY_FRAME


@pytest.mark.usefixtures("doctor_here")
@pytest.mark.parametrize(
    "arguments",
    [
        ["info"],
        slow(["doctor", "--json"], id="doctor"),
        ["preview", "--batch-size", "2"],
        ["bench", "--batch-size", "4", "--num-batches", "2", "--warmup", "1", "--device", "cpu", "--image-size", "32x32"],
        ["stats"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_each_command_reads_it(
    arguments: list[str], odd_dataset: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root, options = odd_dataset
    assert main([arguments[0], str(root), *arguments[1:], *options]) == 0


def test_prepare_mends_it(odd_dataset: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The copy needs no options, and nothing is wrong with it."""
    root, options = odd_dataset
    out = tmp_path / "out"
    assert main(["prepare", str(root), str(out), "--jobs", "1", *options]) == 0
    assert set(frames_of(out)) == EVERY_FRAME
    table = pq.read_table(out / EPISODE_TABLE)
    frames = (table[STOP].to_numpy() - table[START].to_numpy()) * FPS
    np.testing.assert_allclose(frames, LENGTHS, atol=1e-6)
    rows = pq.read_table(out / "data")
    regular = (rows["frame_index"].to_numpy() / FPS).astype(np.float32)
    np.testing.assert_array_equal(rows["timestamp"].to_numpy(), regular)


def test_prepare_renews_the_statistics_of_timestamps(wall_clock: Path, plain_v21: Path, tmp_path: Path) -> None:
    prepared(plain_v21, tmp_path / "expected")
    prepared(wall_clock, tmp_path / "out", clock="frame_index")
    expected, stats = (Dataset(tmp_path / name).stats for name in ("expected", "out"))
    assert stats.keys() == expected.keys()
    for key, of_key in expected.items():
        assert stats[key].keys() == of_key.keys()
        for name, value in of_key.items():
            np.testing.assert_allclose(stats[key][name], value, rtol=1e-6)
    columns = [pq.read_table(tmp_path / name / EPISODE_TABLE) for name in ("expected", "out")]
    for name in columns[0].column_names:
        if name.startswith("stats/timestamp/"):
            values = [np.array(table[name].to_pylist()) for table in columns]
            np.testing.assert_allclose(values[1], values[0], rtol=1e-6, atol=1e-7)


def test_a_wall_clock_is_named_with_the_command_that_helps(
    wall_clock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "`dali-stream prepare URI OUT --clock frame_index`"
    assert main(["stats", str(wall_clock)]) == 1
    assert command in " ".join(capsys.readouterr().err.split())
    assert main(["prepare", str(wall_clock), str(tmp_path / "out"), "--jobs", "1"]) == 1
    assert command in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("clock", ["timestamp", "frame_index"])
def test_frames_that_reach_into_the_next_episode_are_an_error(early_ends: Path, tmp_path: Path, clock: str) -> None:
    """The last episode begins two frames early in the metadata, in the middle of the first one."""
    root = Path(shutil.copytree(early_ends, tmp_path / "data"))
    edit_table(root, EPISODE_TABLE, lambda table: put(table, START, [0.0, 12 / FPS, 10 / FPS]))
    with pytest.raises(
        DecodeError, match=r"episode 0, frame 10: .* outside its episode, .* the next episode of the file begins"
    ):
        list(loader(Dataset(root, clock=clock), shuffle=False))
    with pytest.raises(DecodeError, match=r"episode 2, frame 0.*: .* by counting it is frame number 12"):
        list(loader(Dataset(root, clock=clock, episodes=[2]), shuffle=False))


def test_a_tolerance_holds_for_commands_too(plain_v21: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(shutil.copytree(plain_v21, tmp_path / "data"))
    for path in root.glob("data/**/*.parquet"):
        table = pq.read_table(path)
        late = table["timestamp"].to_numpy() + np.float32(0.4 / FPS)
        pq.write_table(put(table, "timestamp", [*late]).cast(table.schema), path)
    assert main(["stats", str(root)]) == 1
    assert main(["stats", str(root), "--tolerance-s", "0.016"]) == 0
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["prepare", str(root), str(out), "--tolerance-s", "0.016", "--jobs", "1"]) == 0
    assert set(frames_of(out)) == EVERY_FRAME
    assert main(["stats", str(out)]) == 0


def test_a_copy_of_late_video_needs_no_tolerance(early_ends: Path, tmp_path: Path) -> None:
    """The video is 0.4 frames late. In the copy, it begins at its first frame."""
    root = Path(shutil.copytree(early_ends, tmp_path / "data"))
    edit_table(root, EPISODE_TABLE, lambda table: put(table, START, [*(table[START].to_numpy() - 0.4 / FPS)]))
    with pytest.raises(DecodeError, match=r"s away, but at most 0.0083 s \(a quarter of a frame\) is allowed"):
        frames_of(root)
    prepared(root, tmp_path / "out", clock="frame_index", tolerance_s=0.016)
    assert set(frames_of(Dataset(tmp_path / "out", tolerance_s=1e-4))) == EVERY_FRAME


def test_train_takes_the_clock(wall_clock: Path, tmp_path: Path, program: Any) -> None:
    arguments = ["--max-steps", "2", "--batch-size", "4", "--device", "cpu", "--image-size", "32", "32"]
    with pytest.raises(SystemExit, match="is probably a wall-clock time"):
        program.main([str(wall_clock), "--out", str(tmp_path / "refused"), *arguments])
    program.main([str(wall_clock), "--out", str(tmp_path / "run"), *arguments, "--dataset", "clock=frame_index"])

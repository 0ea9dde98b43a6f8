"""Metadata that is missing, of another format, broken or at odds with the files: an error that says what and what to do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import videos as data
from support.broken import EPISODES, GARBAGE, INFO, INFOS, ROW_TABLES, ROWS, TABLES, TASKS, edit_info, edit_table, put

import dali_stream
from dali_stream.dataset import Dataset


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    video = data.encode(data.draw(), folder / "video.mp4", data.av1(2))
    return data.write_dataset(folder / "set", [video])


@pytest.fixture
def root(healthy: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(healthy, tmp_path / "set"))


def read_all(root: Path | str, **options: Any) -> None:
    """An epoch, after all metadata."""
    dataset = Dataset(root, **options)
    assert dataset.fingerprint
    with data.loader(dataset) as loader:
        for _ in loader:
            pass


# ------------------------------------------------------------------------------------------------ another format


def test_no_such_dataset(tmp_path: Path) -> None:
    for uri in (str(tmp_path / "nowhere"), f"file://{tmp_path}/nowhere"):
        with pytest.raises(dali_stream.DatasetError, match=r"no dataset at .*nowhere.*does not exist"):
            Dataset(uri)
    with pytest.raises(dali_stream.DatasetError, match=r"is not a LeRobot dataset, because meta/info\.json does not exist"):
        Dataset("memory://nowhere/at/all")
    (tmp_path / "file").write_text("x")
    with pytest.raises(dali_stream.DatasetError, match="is a file"):
        Dataset(tmp_path / "file")
    with pytest.raises(dali_stream.DatasetError, match=r"is not a LeRobot dataset, because meta/info\.json"):
        Dataset(tmp_path)


def test_a_dataset_of_version_1(root: Path) -> None:
    edit_info(root, codebase_version="v1.6")
    with pytest.raises(dali_stream.DatasetError, match=r"codebase_version .*: must be v2\.0, v2\.1 or v3\.0, got 'v1\.6'"):
        Dataset(root)


def test_v3_that_says_it_is_v2(root: Path) -> None:
    edit_info(root, codebase_version="v2.1")
    with pytest.raises(
        dali_stream.DatasetError, match=r"Invalid path template data_path .* Allowed fields: .*{episode_index:06d}"
    ):
        Dataset(root)


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_no_or_an_empty_info_json(text: str | None, root: Path) -> None:
    """It says so, and which version the other files look like."""
    said = {
        None: "meta/info.json does not exist. ",
        "": "info.json is empty. Copy",
        "{}": "info.json: the JSON object is empty. ",
    }

    def message() -> str:
        with pytest.raises(dali_stream.DatasetError) as caught:
            Dataset(root)
        return str(caught.value)

    (root / INFO).unlink()
    if text is not None:
        (root / INFO).write_text(text)
    assert said[text] in message()
    if text == "":
        return
    assert "It has meta/episodes/, so it looks like v3.0. Copy or fetch meta/info.json again" in message()
    shutil.rmtree(root / "meta/episodes")
    assert "neither meta/episodes/ (v3.0) nor meta/episodes.jsonl (v2.x)" in message()
    (root / "meta/episodes.jsonl").write_text("{}\n")
    assert "It has meta/episodes.jsonl, so it looks like v2.x. Copy" in message()


@pytest.mark.parametrize("version", ["v3.1", "v3.12", "v4.0", "v10.2"])
def test_a_version_that_is_not_known_yet_is_refused_by_its_name(version: str, root: Path) -> None:
    edit_info(root, codebase_version=version)
    with pytest.raises(
        dali_stream.DatasetError, match=rf"must be v2\.0, v2\.1 or v3\.0, got '{version}'\. A newer format needs"
    ):
        Dataset(root)


def test_a_lance_dataset(root: Path) -> None:
    edit_info(root, storage_format="lance")
    with pytest.raises(
        dali_stream.DatasetError, match=r'storage_format .*: must be Parquet with MP4, got "lance"\. LeRobot with'
    ):
        Dataset(root)


# ------------------------------------------------------------------------------------------------- files as such


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("path", [INFO, EPISODES, ROWS, TASKS])
def test_a_broken_file(path: str, kind: str, root: Path) -> None:
    (root / path).write_bytes(GARBAGE[kind]((root / path).read_bytes()))
    message = rf"Invalid {'JSON in' if path == INFO else 'Parquet file'} .*{path}: .*\. Fetch"
    if kind == "LFS pointer":
        message = rf"{path}: the file is a Git LFS pointer.*`git lfs pull`.*or read the dataset from the Hub \(hf://datasets/"
    elif kind == "empty" and path == INFO:
        message = f"{path} is empty. Copy or fetch it again"
    with pytest.raises(dali_stream.DatasetError, match=message):
        read_all(root)


def test_a_missing_file(root: Path) -> None:
    for path, said in (
        (ROWS, "no such file, but the dataset's metadata refers to it"),
        (EPISODES, "No Parquet files in .*meta/episodes"),
    ):
        (root / path).unlink()
        with pytest.raises(dali_stream.DatasetError, match=said):
            read_all(root)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "[" * 100_000, '{"fps": 1' + "0" * 5000 + "}"])
def test_json_of_another_shape(text: str, root: Path) -> None:
    (root / INFO).write_text(text)
    with pytest.raises(dali_stream.DatasetError, match=INFO):
        Dataset(root)


# --------------------------------------------------------------------------------------------------------- info.json


@pytest.mark.parametrize("name", INFOS)
def test_info_json(name: str, root: Path) -> None:
    entries, said = INFOS[name]
    edit_info(root, **entries)
    with pytest.raises(dali_stream.DatasetError, match=said):
        read_all(root)


def test_a_feature_of_an_unknown_kind_is_left_out(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_info(root, features__sound={"dtype": "audio", "shape": [1]})
    dataset = Dataset(root)
    assert "sound" not in dataset.features
    assert "sound" in caplog.text


# ----------------------------------------------------------------------------------------------------- episode table


@pytest.mark.parametrize("name", TABLES)
def test_the_episode_table(name: str, root: Path) -> None:
    change, said = TABLES[name]
    edit_table(root, EPISODES, change)
    with pytest.raises(dali_stream.DatasetError, match=said):
        read_all(root)


# ------------------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("name", ROW_TABLES)
def test_the_rows(name: str, root: Path) -> None:
    change, said = ROW_TABLES[name]
    edit_table(root, ROWS, change)
    with pytest.raises(dali_stream.DatasetError, match=said) as caught:
        read_all(root)
    assert ROWS in str(caught.value)


def test_zeroed_bytes_in_a_page_of_timestamps(root: Path) -> None:
    """Without checksums nothing in the file tells; without the check row 43's frame would be that of another row."""
    table = pq.read_table(root / ROWS)
    pq.write_table(table, root / ROWS, compression="none", use_dictionary=False)
    content = (root / ROWS).read_bytes()
    at = content.index(table["timestamp"].to_numpy().tobytes()) + 43 * 4
    (root / ROWS).write_bytes(content[:at] + bytes(16) + content[at + 16 :])
    with (
        data.loader(root) as loader,
        pytest.raises(dali_stream.DatasetError, match=f"Invalid timestamp of row 12 in .*{ROWS}: episode 1: "),
    ):
        list(loader)


def test_rows_that_do_not_lie_in_the_order_of_the_episodes_are_found(root: Path) -> None:
    def turn(table: pa.Table) -> pa.Table:
        return pa.concat_tables([table.slice(31), table.slice(0, 31)])

    table = turn(pq.read_table(root / ROWS))
    pq.write_table(table, root / ROWS, row_group_size=10)
    with data.loader(root, shuffle=False) as loader:
        found = [(episode, frame, data.identities(picture[None])[0]) for episode, frame, picture in data.samples(loader)]
    expected = [(episode, frame) for episode, length in enumerate(data.EPISODES) for frame in range(length)]
    assert found == [(*identity, identity) for identity in expected]


def test_a_task_that_has_no_name(root: Path) -> None:
    edit_table(root, ROWS, lambda t: put(t, "task_index", pa.array(np.r_[np.zeros(71, np.int64), 9])))
    with (
        data.loader(root) as loader,
        pytest.raises(dali_stream.DatasetError, match=f"{TASKS}: rows .* refer to task_index 9"),
    ):
        list(loader)


def test_task_names_that_are_none(root: Path) -> None:
    pq.write_table(pa.table({"task_index": [0]}), root / TASKS)
    with pytest.raises(
        dali_stream.DatasetError,
        match=f"Invalid columns in .*{TASKS}: must be task_index and a column of names, got .*task_index",
    ):
        read_all(root)
    pq.write_table(pa.table({"task_index": ["a"], "task": [3]}), root / TASKS)
    with pytest.raises(
        dali_stream.DatasetError, match=f"Invalid columns in .*{TASKS}: task_index must hold integers and task strings"
    ):
        read_all(root)
    name = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xf3"))
    pq.write_table(pa.table({"task_index": [0], "task": name}), root / TASKS)
    with pytest.raises(dali_stream.DatasetError, match=TASKS):
        read_all(root)


# ------------------------------------------------------------------------------------------------------- arguments


def test_an_unknown_camera_episode_or_key(healthy: Path) -> None:
    with pytest.raises(ValueError, match=f"Unknown camera 'wrist'. Available: {data.CAMERA}"):
        Dataset(healthy, cameras=["wrist"])
    with pytest.raises(ValueError, match=r"Unknown episode 7. Available: 2 episodes, from 0 to 1"):
        Dataset(healthy, episodes=[0, 7])
    with pytest.raises(ValueError, match=r"Unknown key 'wrist' in delta_timestamps. Available: "):
        data.loader(healthy, delta_timestamps={"wrist": [0]})


@pytest.mark.parametrize("deltas", [[0.01], [0, 1 / 30 + 2e-4], [], [float("nan")], ["x"], 3.0])
def test_deltas_that_are_no_frames(deltas: Any, healthy: Path) -> None:
    with pytest.raises(ValueError, match=r"delta_timestamps|could not convert"):
        data.loader(healthy, delta_timestamps={data.CAMERA: deltas})


def test_a_delta_within_the_tolerance_is_a_frame(healthy: Path) -> None:
    with data.loader(healthy, delta_timestamps={data.CAMERA: [1 / 30 + 5e-5]}, shuffle=False) as loader:
        batch = next(iter(loader))
    assert re.fullmatch(r"\(16, 3, 128, 160\)", str(tuple(batch[data.CAMERA].shape)))
    assert data.identities(batch[data.CAMERA]) == [(0, f + 1) for f in range(16)]

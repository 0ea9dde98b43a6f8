"""Metadata that is missing, of another format, broken or at odds with the files: an error that says what and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import videos as data

import dali_stream
from dali_stream.dataset import Dataset
from dali_stream.lerobot.rows import RowReader

EPISODES = "meta/episodes/chunk-000/file-000.parquet"
ROWS = "data/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
INFO = "meta/info.json"


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
    """Metadata and all rows."""
    dataset = Dataset(root, **options)
    try:
        assert dataset.fingerprint
        reader = RowReader(dataset)
        for episode in range(dataset.num_episodes):
            reader.read(episode)
    finally:
        dataset.close()


def edit_info(root: Path, **entries: Any) -> None:
    """Sets entries of info.json; `features__KEY` sets one feature, None removes."""
    info = json.loads((root / INFO).read_text())
    for name, value in entries.items():
        place, key = (info["features"], name.removeprefix("features__")) if name.startswith("features__") else (info, name)
        place[key] = value
        if value is None and name != "video_path":
            del place[key]
    (root / INFO).write_text(json.dumps(info))


def edit_table(root: Path, path: str, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(root / path)
    pq.write_table(change(table), root / path)


def put(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values) if isinstance(values, list) else values)


# ------------------------------------------------------------------------------------------------ another format


def test_no_such_dataset(tmp_path: Path) -> None:
    for uri in (str(tmp_path / "nowhere"), f"file://{tmp_path}/nowhere"):
        with pytest.raises(dali_stream.DatasetError, match=r"no dataset at .*nowhere.*does not exist"):
            Dataset(uri)
    with pytest.raises(dali_stream.DatasetError, match="there is no such folder"):
        Dataset("memory://nowhere/at/all")
    (tmp_path / "file").write_text("x")
    with pytest.raises(dali_stream.DatasetError, match="is a file"):
        Dataset(tmp_path / "file")
    with pytest.raises(dali_stream.DatasetError, match=r"not a LeRobot dataset: meta/info\.json"):
        Dataset(tmp_path)


def test_a_dataset_of_version_2(root: Path) -> None:
    edit_info(root, codebase_version="v2.1")
    with pytest.raises(dali_stream.DatasetError, match=r"'v2\.1', and v3\.0 is read.*convert_dataset_v21_to_v30 --repo-id"):
        Dataset(root)
    (root / INFO).unlink()
    (root / "meta/episodes.jsonl").write_text("{}\n")
    with pytest.raises(dali_stream.DatasetError, match=r"episodes\.jsonl, so it is v2\.x.*convert_dataset_v21_to_v30"):
        Dataset(root)


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_no_or_an_empty_info_json(text: str | None, root: Path) -> None:
    """It says so, and which version the other files look like."""
    said = {
        None: "meta/info.json does not exist. ",
        "": "info.json: it is empty; copy",
        "{}": "info.json: it is an empty object. ",
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
    assert "It has meta/episodes/, so it looks like v3.0: copy or fetch meta/info.json again" in message()
    shutil.rmtree(root / "meta/episodes")
    assert "neither meta/episodes/ (v3.0) nor meta/episodes.jsonl (v2.x)" in message()
    (root / "meta/episodes.jsonl").write_text("{}\n")
    assert "It has meta/episodes.jsonl, so it is v2.x." in message()


def test_a_lance_dataset(root: Path) -> None:
    edit_info(root, storage_format="lance")
    with pytest.raises(dali_stream.DatasetError, match=r'storage_format is "lance", and Parquet with MP4 is read.*export'):
        Dataset(root)


# ------------------------------------------------------------------------------------------------- files as such

GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": lambda good: good[: len(good) * 2 // 3],
    "other bytes": lambda good: np.random.default_rng(0).bytes(len(good)),
    "LFS pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("path", [INFO, EPISODES, ROWS, TASKS])
def test_a_broken_file(path: str, kind: str, root: Path) -> None:
    (root / path).write_bytes(GARBAGE[kind]((root / path).read_bytes()))
    what = rf"not {'JSON' if path == INFO else 'a whole Parquet file'}: .*; fetch"
    if kind == "LFS pointer":
        what = r"it is a Git LFS pointer.*`git lfs pull`.*or read the dataset from the Hub \(hf://datasets/"
    elif kind == "empty" and path == INFO:
        what = "it is empty; copy or fetch it again"
    with pytest.raises(dali_stream.DatasetError, match=rf"{path}: {what}"):
        read_all(root)


def test_a_missing_file(root: Path) -> None:
    for path, said in ((ROWS, "no such file, but the dataset's metadata refers to it"), (EPISODES, "no Parquet file in there")):
        (root / path).unlink()
        with pytest.raises(dali_stream.DatasetError, match=said):
            read_all(root)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "[" * 100_000, '{"fps": 1' + "0" * 5000 + "}"])
def test_json_of_another_shape(text: str, root: Path) -> None:
    (root / INFO).write_text(text)
    with pytest.raises(dali_stream.DatasetError, match=INFO):
        Dataset(root)


# --------------------------------------------------------------------------------------------------------- info.json

VIDEO_FEATURE = {"dtype": "video", "shape": [128, 160, 3], "names": None}
INFOS: dict[str, tuple[dict[str, Any], str]] = {
    "no version": ({"codebase_version": None}, r"info\.json: lacks codebase_version\. It has meta/episodes/.*like v3\.0"),
    "no fps": ({"fps": None}, "fps is None; it is a number above 0"),
    "fps of 0": ({"fps": 0}, "fps is 0"),
    "fps as text": ({"fps": "30"}, "fps is 30; it is a number"),
    "fps that no float holds": ({"fps": 10**400}, "fps is 1000"),
    "no features": ({"features": None}, "features is NoneType; it must be a JSON object"),
    "a feature that is none": ({"features__action": 3}, "feature 'action' is int; it must be a JSON object"),
    "a shape of text": ({"features__action": {"dtype": "float32", "shape": "2"}}, "'action' has shape 2"),
    "an empty shape": ({"features__action": {"dtype": "float32", "shape": []}}, r"'action' has shape \[\]"),
    "a shape of gigabytes": ({"features__action": {"dtype": "float32", "shape": [1 << 40]}}, "positive integers"),
    "a camera without channels": (
        {f"features__{data.CAMERA}": {**VIDEO_FEATURE, "shape": [128, 160]}},
        r"camera '.*' has shape \[128, 160\]; it is \(H, W, C\)",
    ),
    "no timestamp": ({"features__timestamp": None}, "lacks the feature 'timestamp'"),
    "a column that is not there": ({"features__force": {"dtype": "float32", "shape": [1]}}, f"{ROWS}: lacks the column force"),
    "no path of the videos": ({"video_path": None}, "has video features, and video_path is null"),
    "no path of the data": ({"data_path": None}, "data_path is not a path template"),
    "a path out of the dataset": ({"data_path": "../{chunk_index:03d}"}, "'../000', which leads out of the dataset"),
    "an absolute path": ({"data_path": "/etc/{file_index:03d}"}, "'/etc/000', which leads out of the dataset"),
    "a path of gigabytes": ({"data_path": "{file_index:09999999999d}"}, "data_path is not a path template"),
    "a path that looks into objects": ({"video_path": "{video_key.__class__}"}, "video_path is not a path template"),
    "a path with other fields": ({"data_path": "{episode_index}"}, "is not a path template.*allowed are {video_key}"),
    "episodes that are not there": ({"total_episodes": 3}, r"promises 3 episodes, and the tables in .*meta/episodes hold 2"),
    "frames that are not there": ({"total_frames": 100}, "promises 100 frames, and the tables .* hold 72"),
    "totals of another kind": ({"total_frames": "72"}, "total_frames is 72; it is an integer"),
}


@pytest.mark.parametrize("name", INFOS)
def test_info_json(name: str, root: Path) -> None:
    entries, said = INFOS[name]
    edit_info(root, **entries)
    with pytest.raises(dali_stream.DatasetError, match=said):
        read_all(root)


def test_a_feature_of_an_unknown_kind_is_left_out(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_info(root, features__language_events={"dtype": "language", "shape": [1]})
    dataset = Dataset(root)
    assert "language_events" not in dataset.features
    assert "language_events" in caplog.text


# ----------------------------------------------------------------------------------------------------- episode table

FROM = f"videos/{data.CAMERA}/from_timestamp"
TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "no episodes": (lambda t: t.slice(0, 0), "no episodes"),
    "a lost column": (lambda t: t.drop_columns(["length"]), "lacks the column length"),
    "a lost column of a camera": (lambda t: t.drop_columns([FROM]), f"lacks the column {FROM}"),
    "text for numbers": (lambda t: put(t, "length", ["31", "41"]), "column length must hold a number for each episode"),
    "a missing number": (lambda t: put(t, "length", [31, None]), "column length must hold a number for each episode"),
    "the same episode twice": (lambda t: put(t, "episode_index", [1, 1]), "episode 1: its index .* stands there twice"),
    "a negative episode": (lambda t: put(t, "episode_index", [-1, 1]), "episode -1: its index is negative"),
    "an empty episode": (lambda t: put(t, "length", [31, 0]), "episode 1: its length is not a positive number"),
    "lengths at odds": (lambda t: put(t, "length", [30, 42]), "episode 0: its length and .* differ"),
    "a negative file": (lambda t: put(t, "data/file_index", [0, -1]), "episode 1: data/file_index is not a number of a file"),
    "no time": (lambda t: put(t, FROM, [0.0, float("nan")]), "episode 1: .*from_timestamp is no time in seconds"),
    "an end before its start": (
        lambda t: put(t, f"videos/{data.CAMERA}/to_timestamp", [31 / 30, 1.0]),
        "episode 1: .*to_timestamp is not behind its from_timestamp",
    ),
    "another file": (lambda t: put(t, "data/file_index", [0, 7]), r"data/chunk-000/file-007\.parquet: no such file"),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_episode_table(name: str, root: Path) -> None:
    change, said = TABLES[name]
    edit_table(root, EPISODES, change)
    with pytest.raises(dali_stream.DatasetError, match=said):
        read_all(root)


# ------------------------------------------------------------------------------------------------------------ rows


def with_null(table: pa.Table, name: str) -> pa.Table:
    values = table[name].to_pylist()
    return put(table, name, pa.array([*values[:50], None, *values[51:]], table.schema.field(name).type))


def with_time(table: pa.Table, row: int, seconds: float) -> pa.Table:
    times = table["timestamp"].to_numpy().copy()
    times[row] = seconds
    return put(table, "timestamp", pa.array(times))


def fewer(table: pa.Table) -> pa.Table:
    return table.slice(0, 60)


def swapped(table: pa.Table) -> pa.Table:
    return table.take([0, 2, 1, *range(3, 72)])


ROW_TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "fewer rows than promised": (fewer, "episode 1: the metadata promises 41 rows, and the file holds 29"),
    "rows of another episode": (
        lambda t: put(t, "episode_index", pa.array(np.full(72, 5))),
        "episode 0: .*promises 31 rows, and the file holds 0",
    ),
    "rows out of order": (swapped, "episode 0: its frame_index does not count its rows"),
    "a timestamp that falls": (
        lambda t: with_time(t, 48, 0.15),
        r"episode 1: row 17: its timestamp is 0\.1500 s, and that of row 16 is 0\.5333 s\. Timestamps rise",
    ),
    "a timestamp that stays": (lambda t: with_time(t, 48, 16 / 30), r"episode 1: row 17: its timestamp is 0\.5333 s, and"),
    "a timestamp that is none": (lambda t: with_time(t, 31, float("nan")), "episode 1: row 0: its timestamp is nan s"),
    "a missing number": (lambda t: with_null(t, "timestamp"), "episode 1: timestamp: 1 of 41 values are missing"),
    "a missing vector": (lambda t: with_null(t, "action"), "episode 1: action: 1 of 41 values are missing"),
    "text for numbers": (
        lambda t: put(t, "timestamp", pc.cast(t["timestamp"], pa.string())),
        "timestamp: holds string, and meta/info.json says float32",
    ),
    "a scalar for a vector": (lambda t: put(t, "action", t["timestamp"]), r"action: holds float, and .*shape \[2\]"),
    "longer vectors": (
        lambda t: put(t, "action", pa.array([[1.0, 2.0, 3.0]] * 72)),
        r"action: a value has another shape than \[2\]",
    ),
    "a hole in a vector": (lambda t: put(t, "action", pa.array([[1.0, None]] * 72)), "action: .*numbers are missing"),
    "a lost column": (lambda t: t.drop_columns(["action"]), f"{ROWS}: lacks the column action"),
    "no episode index": (lambda t: t.drop_columns(["episode_index"]), f"{ROWS}: lacks the column episode_index"),
}


@pytest.mark.parametrize("name", ROW_TABLES)
def test_the_rows(name: str, root: Path) -> None:
    change, said = ROW_TABLES[name]
    edit_table(root, ROWS, change)
    with pytest.raises(dali_stream.DatasetError, match=said) as caught:
        read_all(root)
    assert ROWS in str(caught.value)
    with data.loader(root) as loader, pytest.raises(dali_stream.DatasetError, match=said):
        for _ in loader:
            pass


def test_zeroed_bytes_in_a_page_of_timestamps(root: Path) -> None:
    """Without checksums nothing in the file tells; without the check row 43's frame would be that of another row."""
    table = pq.read_table(root / ROWS)
    pq.write_table(table, root / ROWS, compression="none", use_dictionary=False)
    content = (root / ROWS).read_bytes()
    at = content.index(table["timestamp"].to_numpy().tobytes()) + 43 * 4
    (root / ROWS).write_bytes(content[:at] + bytes(16) + content[at + 16 :])
    with (
        data.loader(root) as loader,
        pytest.raises(dali_stream.DatasetError, match=f"{ROWS}: episode 1: row 12: its timestamp"),
    ):
        list(loader)


def test_rows_that_do_not_lie_in_the_order_of_the_episodes_are_found(root: Path) -> None:
    def turn(table: pa.Table) -> pa.Table:
        return pa.concat_tables([table.slice(31), table.slice(0, 31)])

    table = turn(pq.read_table(root / ROWS))
    pq.write_table(table, root / ROWS, row_group_size=10)
    dataset = Dataset(root)
    reader = RowReader(dataset)
    for episode, length in enumerate(data.EPISODES):
        rows = reader.read(episode)[episode]
        assert rows["episode_index"].tolist() == [episode] * length
        assert rows["frame_index"].tolist() == list(range(length))
    dataset.close()


def test_a_task_that_has_no_name(root: Path) -> None:
    edit_table(root, ROWS, lambda t: put(t, "task_index", pa.array(np.r_[np.zeros(71, np.int64), 9])))
    with data.loader(root) as loader, pytest.raises(dali_stream.DatasetError, match=f"{TASKS}: has no task_index 9"):
        list(loader)


def test_task_names_that_are_none(root: Path) -> None:
    pq.write_table(pa.table({"task_index": [0]}), root / TASKS)
    with pytest.raises(dali_stream.DatasetError, match=f"{TASKS}: columns .*a column of names are needed"):
        read_all(root)
    pq.write_table(pa.table({"task_index": ["a"], "task": [3]}), root / TASKS)
    with pytest.raises(dali_stream.DatasetError, match=f"{TASKS}: task_index must hold integers and task strings"):
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

"""Rows and metadata as other exporters write them: what LeRobot reads is read, and every frame is that of its row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.broken import edit_info
from support.datasets import ODD_CAMERA, ROWS, Column, build, copied, write_lines
from support.slow import examples
from support.videos import CAMERA, EPISODES, FPS, identities, loader
from support.wild import EVERY, FRAME, NUMBERINGS, change_rows, delivered, expected, with_index, with_times, without_rows

from dali_stream import Dataset, DatasetError, Loader, Mixture
from dali_stream.integrations.lerobot.script import frame_ranges
from dali_stream.lerobot.rows import row_order

# ------------------------------------------------------------------------------------------------------------ frame_index


@pytest.mark.parametrize("name", NUMBERINGS)
def test_frames_are_those_of_the_timestamps_whatever_frame_index_counts(root: Path, name: str) -> None:
    """And it is delivered as it is, also in a window."""
    change_rows(root, with_index(NUMBERINGS[name]))
    assert delivered(root) == EVERY
    window = {"frame_index": [-1 / FPS, 0.0]}
    with loader(root, delta_timestamps=window) as batches:
        for batch in batches:
            at = batch["index"].numpy()
            before = at - (FRAME[at] > 0)
            np.testing.assert_array_equal(batch["frame_index"], NUMBERINGS[name][np.stack([before, at], 1)])


@pytest.mark.parametrize("cut", [{0: [3, 4, 5], 1: [20, 21]}, {0: [0, 1, 2], 1: [0, 40]}], ids=["inside", "at the ends"])
def test_rows_that_were_cut_out_leave_each_other_row_its_frame(root: Path, cut: dict[int, list[int]]) -> None:
    stays = without_rows(root, cut)
    assert delivered(root) == expected(stays)
    with loader(root) as batches:
        numbers = [dict(zip(batch["index"].tolist(), batch["frame_index"].tolist(), strict=True)) for batch in batches]
    whole = {index: number for each in numbers for index, number in each.items()}
    assert [whole[i] for i in sorted(whole)] == [number for kept in stays.values() for number in kept]


@pytest.mark.parametrize("name", NUMBERINGS)
def test_a_clock_by_numbers_that_count_otherwise_is_refused(root: Path, name: str) -> None:
    """These numbers would select neighbouring frames. The default, which the message recommends, works."""
    change_rows(root, with_index(NUMBERINGS[name]))
    with pytest.raises(DatasetError, match=r'must be \d+ for clock="frame_index", .* Use the default, which locates frames by'):
        delivered(Dataset(root, clock="frame_index"))
    assert delivered(root) == EVERY


@pytest.mark.parametrize("where", ["file", "both"])
@pytest.mark.parametrize("clock", ["timestamp", "frame_index"])
def test_without_the_column_it_is_the_number_of_the_row(root: Path, clock: str, where: str) -> None:
    change_rows(root, lambda table: table.drop_columns(["frame_index"]))
    if where == "both":
        edit_info(root, features__frame_index=None)
    if clock == "frame_index":
        change_rows(root, with_times((FRAME + 0.31) / FPS))
    dataset = Dataset(root, clock=clock)
    assert delivered(dataset) == EVERY
    with loader(dataset, delta_timestamps={"frame_index": [0.0, 2 / FPS]}) as batches:
        for batch in batches:
            at, episode = batch["index"].numpy(), batch["episode_index"].numpy()
            last = np.array(EPISODES)[episode] - 1
            np.testing.assert_array_equal(batch["frame_index"], np.stack([FRAME[at], np.minimum(FRAME[at] + 2, last)], 1))


def test_a_mixture_numbers_rows_in_the_dataset_that_does_not(root: Path, plain: Path) -> None:
    change_rows(root, lambda table: table.drop_columns(["frame_index"]))
    edit_info(root, features__frame_index=None)
    with loader(Mixture({"a": plain, "b": root})) as batches:  # type: ignore[arg-type]
        seen = [tuple(batch[key].tolist()) for batch in batches for key in ("episode_index", "frame_index")]
    pairs = [pair for e, f in zip(seen[::2], seen[1::2], strict=True) for pair in zip(e, f, strict=True)]
    assert sorted(pairs) == sorted(2 * list(EVERY.values()))


# ------------------------------------------------------------------------------------------------------- order of the rows


def turned(start: int, stop: int) -> list[int]:
    return list(range(start, stop))[::-1]


BACKWARDS = {
    "each episode": [*turned(0, EPISODES[0]), *turned(EPISODES[0], len(FRAME))],
    "one episode": [*range(EPISODES[0]), *turned(EPISODES[0], len(FRAME))],
    "the dataset": turned(0, len(FRAME)),
    "no order": np.random.default_rng(0).permutation(len(FRAME)).tolist(),
}


@pytest.mark.parametrize("clock", ["timestamp", "frame_index"])
@pytest.mark.parametrize("name", BACKWARDS)
def test_rows_are_read_in_the_order_of_frame_index(root: Path, name: str, clock: str) -> None:
    """With windows, whose actions are those of the frames before and after."""
    change_rows(root, lambda table: table.take(BACKWARDS[name]))
    if clock == "frame_index":
        change_rows(root, lambda table: with_times([0.0] * len(table))(table))
    dataset = Dataset(root, clock=clock)
    assert delivered(dataset) == EVERY
    with loader(dataset, delta_timestamps={"action": [-1 / FPS, 0.0]}, shuffle=False) as batches:
        for batch in batches:
            at = batch["index"].numpy()
            before = at - (FRAME[at] > 0)
            np.testing.assert_array_equal(batch["action"][:, :, 0], 2.0 * np.stack([before, at], 1))


@examples(200)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(-5, 5)), max_size=8), st.sampled_from(["timestamp", "frame_index", ""])
)
def test_an_order_is_found_only_where_rows_have_none(rows: list[tuple[int, int]], locates: str) -> None:
    """Rows whose times or numbers increase are not moved. Others are sorted by numbers, and so must their times be."""
    times, numbers = np.array(rows, float).reshape(-1, 2).T
    order = row_order(times, numbers.astype(int), locates)
    if order is None:
        by_number = times[np.argsort(numbers)]
        no_use = locates == "timestamp" and not (np.diff(by_number) > 0).all()
        assert (np.diff(times) > 0).all() or (np.diff(numbers) > 0).all() or len({*numbers}) < len(numbers) or no_use
        return
    assert not (np.diff(times) > 0).all()
    assert (np.diff(numbers[order]) > 0).all()
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert locates != "timestamp" or (np.diff(times[order]) > 0).all()


@pytest.mark.parametrize("times", ["as they are", "zeros"])
def test_rows_without_video_are_read_in_the_order_of_frame_index(odd: Path, tmp_path: Path, times: str) -> None:
    root = copied(odd, tmp_path)
    with Loader(odd, batch_size=7, shuffle=False, delta_timestamps={"observation.state": [-0.1, 0.0]}) as whole:
        expected = list(whole)
    change_rows(root, lambda table: table.take(np.arange(len(table))[::-1]))
    if times == "zeros":
        change_rows(root, with_times([0.0] * 21))
    with Loader(root, batch_size=7, shuffle=False, delta_timestamps={"observation.state": [-0.1, 0.0]}) as changed:
        for plain_batch, batch in zip(expected, changed, strict=True):
            for key in ("observation.state", "frame_index", "index", ODD_CAMERA):
                assert torch.equal(batch[key], plain_batch[key])
            assert batch["note"] == plain_batch["note"]


@pytest.mark.parametrize("name", ["all 0", "rising", "no column"])
def test_rows_whose_order_nothing_tells_are_out_of_order(root: Path, name: str) -> None:
    """The file is not damaged, and the message does not say so. Sorting the rows by their time, as it says, helps."""
    change_rows(root, lambda table: table.take(BACKWARDS["each episode"]))
    if name == "no column":
        change_rows(root, lambda table: table.drop_columns(["frame_index"]))
    else:
        change_rows(root, with_index(NUMBERINGS["all 0"] if name == "all 0" else FRAME))
    with pytest.raises(DatasetError, match=r"Invalid timestamp of row 1 in .*episode \d: must be greater than") as caught:
        delivered(root)
    if name == "rising":  # which says that the rows are in order, and contradicts the timestamps
        assert "The file is damaged" in str(caught.value)
        return
    assert "The rows are out of order, and frame_index does not tell their order. Sort the rows" in str(caught.value)
    change_rows(root, lambda table: table.sort_by([("episode_index", "ascending"), ("timestamp", "ascending")]))
    assert delivered(root) == EVERY


# -------------------------------------------------------------------------------------------------------------- timestamps


ODD_TIMES: dict[str, tuple[list[float | None], str]] = {
    "zeros": ([0.0] * 21, "float32"),
    "Unix seconds": ([1.7e9 + i / 10 for i in range(21)], "float64"),
    "NaN": ([float("nan")] * 21, "float32"),
    "missing": ([None] * 21, "float32"),
    "of no type": ([None] * 21, "null"),
    "some missing": ([0.1, None, 0.3] * 7, "float64"),
    "falling": ([-i / 10 for i in range(21)], "float32"),
}


@pytest.mark.parametrize("name", ODD_TIMES)
def test_timestamps_on_which_no_frame_depends_are_delivered_as_they_are(odd: Path, tmp_path: Path, name: str) -> None:
    values, kind = ODD_TIMES[name]
    root = change_rows(copied(odd, tmp_path), with_times(values, kind))
    with Loader(odd, batch_size=7) as whole, Loader(root, batch_size=7) as changed:
        for plain_batch, batch in zip(whole, changed, strict=True):
            assert torch.equal(batch[ODD_CAMERA], plain_batch[ODD_CAMERA])
            shown = np.array([np.nan if values[i] is None else values[i] for i in batch["index"]], np.float32)
            np.testing.assert_array_equal(batch["timestamp"].numpy(), shown)
            assert batch["timestamp"].dtype == torch.float32


def test_a_deselected_camera_does_not_depend_on_timestamps(root: Path) -> None:
    change_rows(root, with_times([0.0] * len(FRAME)))
    with loader(Dataset(root, cameras=[])) as batches:
        assert sum(len(batch["index"]) for batch in batches) == len(FRAME)


def test_times_of_float64_are_compared_before_they_are_rounded(root: Path) -> None:
    """By the clock of the frame numbers, rising Unix seconds do no harm; by their own they have no frame, but rise."""
    change_rows(root, with_times(1.7e9 + FRAME / FPS, "float64"))
    edit_info(root, features__timestamp={"dtype": "float64", "shape": [1], "names": None})
    assert delivered(Dataset(root, clock="frame_index")) == EVERY
    with pytest.raises(Exception, match=r"asks for 1700000000.* s of the file") as raised:
        delivered(root)
    assert "must be greater than" not in str(raised.value)


def test_times_of_float64_that_fall_by_less_than_float32_shows_are_refused(root: Path) -> None:
    times = FRAME / FPS
    times[40] = times[39] - 1e-9
    change_rows(root, with_times(times, "float64"))
    with pytest.raises(DatasetError, match=r"Invalid timestamp of row 9 in .*episode 1"):
        delivered(root)


# -------------------------------------------------------------------------------------------------------- odd features


@pytest.mark.parametrize("shape", [[-1, 3], [None, 3], [0], [1] * 6, [2.5]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "string", "video"])
def test_a_feature_of_an_unusual_shape_is_left_out(
    root: Path, caplog: pytest.LogCaptureFixture, shape: list[Any], dtype: str
) -> None:
    edit_info(root, features__odd={"dtype": dtype, "shape": shape, "names": None})
    dataset = Dataset(root)
    assert "odd" not in dataset.features
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"feature 'odd' has shape {shape}, and only up to five positive integers are read. Batches will lack it" in said
    assert delivered(dataset) == EVERY


@pytest.mark.parametrize("key", ["timestamp", "index", "task_index", "episode_index"])
def test_a_required_feature_of_an_unusual_shape_is_an_error(root: Path, key: str) -> None:
    edit_info(root, **{f"features__{key}": {"dtype": "int64", "shape": [0], "names": None}})
    with pytest.raises(DatasetError, match=rf"Feature '{key}' in .*info.json has shape \[0\]"):
        Dataset(root)


@pytest.mark.parametrize("dtype", ["float32", "string", "image"])
def test_a_feature_without_a_column_is_left_out(root: Path, caplog: pytest.LogCaptureFixture, dtype: str) -> None:
    shape = [128, 160, 3] if dtype == "image" else [1]
    edit_info(root, features__force={"dtype": dtype, "shape": shape, "names": None})
    dataset = Dataset(root)
    assert "force" not in dataset.features
    assert dataset.cameras == (CAMERA,)
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"feature 'force' has no column in {ROWS}. Batches will lack it" in said
    assert delivered(dataset) == EVERY
    with loader(dataset) as batches:
        again = batches.batch_at(0, 0)
    assert identities(again[CAMERA]) == [EVERY[i] for i in again["index"].tolist()]
    if dtype == "image":
        with pytest.raises(ValueError, match=f"Camera 'force' has no column in {ROWS}. Available: {CAMERA}"):
            Dataset(root, cameras=["force"])


def test_a_required_feature_without_a_column_is_an_error(root: Path) -> None:
    change_rows(root, lambda table: table.drop_columns(["task_index"]))
    with pytest.raises(DatasetError, match=f"Missing column task_index in .*{ROWS}"):
        delivered(root)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (pa.array(np.arange(len(FRAME)), pa.int64()), [str(number) for number in range(len(FRAME))]),
        (pa.array(np.arange(len(FRAME)) % 2 == 0), ["true", "false"] * (len(FRAME) // 2)),
        (pa.array(np.arange(len(FRAME)) + 0.5), [f"{number}.5" for number in range(len(FRAME))]),
    ],
    ids=["int64", "bool", "double"],
)
def test_text_that_is_stored_as_numbers_is_text(root: Path, values: pa.Array, texts: list[str]) -> None:
    """As pyarrow casts it, and therefore LeRobot."""
    edit_info(root, features__note={"dtype": "string", "shape": [1], "names": None})
    change_rows(root, lambda table: table.append_column("note", values))
    with loader(root) as batches:
        found = {index: text for batch in batches for index, text in zip(batch["index"].tolist(), batch["note"], strict=True)}
    assert found == dict(enumerate(texts))


# ------------------------------------------------------------------------------------------------------------------- tasks


def test_v3_with_the_tasks_of_v2_has_tasks(root: Path) -> None:
    (root / "meta/tasks.parquet").unlink()
    write_lines(root / "meta/tasks.jsonl", [{"task_index": 0, "task": "look"}])
    dataset = Dataset(root)
    assert dataset.tasks == {0: "look"}
    with loader(dataset) as batches:
        assert {text for batch in batches for text in batch["task"]} == {"look"}


def test_tasks_of_v2_beside_those_of_v3_are_not_read(root: Path, plain: Path) -> None:
    write_lines(root / "meta/tasks.jsonl", [{"task_index": 0, "task": "another"}])
    assert Dataset(root).tasks == Dataset(plain).tasks


def test_without_a_file_of_tasks_the_message_says_so(root: Path) -> None:
    (root / "meta/tasks.parquet").unlink()
    with pytest.raises(DatasetError, match=r"No file .*meta/tasks.parquet, which must name task_index 0 of the rows. Copy"):
        delivered(root)


# ----------------------------------------------------------------------------------------------------------- info.json


@pytest.mark.parametrize("version", ["3.0", 3.0, "v3.0"])
def test_a_version_without_its_v(root: Path, version: object) -> None:
    edit_info(root, codebase_version=version)
    dataset = Dataset(root)
    assert dataset.version == "v3.0"
    assert delivered(dataset) == EVERY


@pytest.mark.parametrize("fps", ["30", "30.0", " 30 "])
def test_fps_as_text(root: Path, plain: Path, fps: str) -> None:
    edit_info(root, fps=fps)
    dataset = Dataset(root)
    assert dataset.fps == 30
    assert dataset.fingerprint == Dataset(plain).fingerprint
    assert delivered(dataset) == EVERY


def test_an_empty_dataset_of_v2_says_so(tmp_path: Path) -> None:
    root = build(tmp_path / "data", [3], {"action": Column("float32", [1], np.zeros((3, 1)))}, version="v2.1")
    (root / "meta/episodes.jsonl").unlink()
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 0, "total_frames": 0, "codebase_version": "2.1"}))
    with pytest.raises(DatasetError, match=r"No episodes in .*data: total_episodes is 0 in meta/info.json. Record an episode"):
        Dataset(root)


# ------------------------------------------------------------------------------------------------------------- LeRobot


def test_rows_of_lerobots_dataset_become_ranges_by_their_place() -> None:
    """Whatever their `frame_index` counts."""
    table = pa.table({"episode_index": [3] * 5 + [7] * 4, "frame_index": [0, 1, 2, 6, 7, 1, 2, 3, 4]})
    dataset = SimpleNamespace(hf_dataset=SimpleNamespace(data=table))
    assert frame_ranges(dataset, [8, 7, 1, 2, 3, 5]) == {3: [(1, 4)], 7: [(0, 1), (2, 4)]}

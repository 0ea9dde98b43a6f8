"""`prepare` mends rows and metadata as other exporters write them, and verifies what it has written as a Loader reads it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support import lerobot_reader
from support.broken import EPISODES as TABLE
from support.broken import edit_info, edit_table, put, trimmed
from support.datasets import ROWS, Camera, Column, build, video, write_lines
from support.slow import slow
from support.tools import prepared
from support.videos import CAMERA, EPISODES, FPS, SIZE, draw, encode, ffmpeg, h264, identities, loader, mpeg4, recorded
from support.wild import EVERY, FRAME, NUMBERINGS, change_rows, delivered, expected, with_index, with_times, without_rows

from dali_stream import DaliStreamError, Dataset
from dali_stream.tools.preparation.place import open_place


def assert_counts(out: Path) -> None:
    """The new dataset's `frame_index` counts the rows of each episode from 0."""
    rows = pq.read_table(out / "data").sort_by("index")
    episode, numbers = rows["episode_index"].to_numpy(), rows["frame_index"].to_numpy()
    for each in np.unique(episode):
        np.testing.assert_array_equal(numbers[episode == each], np.arange((episode == each).sum()))


ENCODED: dict[str, Any] = {"codec": "h264", "gop": 2}
DECIMALS = [pa.list_(pa.decimal128(20, 6)), pa.large_list(pa.decimal128(20, 6))]
CUTS = [{0: [3, 4, 5], 1: [20, 21]}, {0: [0, 1, 2], 1: [0, 1, 2, 3, 40]}]


@pytest.mark.parametrize(
    ("gop", "cut", "options"),
    [
        pytest.param(12, CUTS[0], {}, id="inside, copied"),
        pytest.param(2, CUTS[1], {}, id="at the ends, copied"),
        pytest.param(12, CUTS[1], ENCODED, id="at the ends, encoded"),
        slow(12, CUTS[0], ENCODED, id="inside, encoded"),
        slow(2, CUTS[0], {}, id="inside, copied from short GOPs"),
        slow(12, CUTS[1], {}, id="at the ends, copied from long GOPs"),
    ],
)
def test_rows_that_were_cut_out(tmp_path: Path, gop: int, cut: dict[int, list[int]], options: dict[str, Any]) -> None:
    root = recorded(tmp_path, h264(gop))
    stays = without_rows(root, cut)
    prepared(root, tmp_path / "out", **options)
    assert delivered(tmp_path / "out") == expected(stays)
    assert_counts(tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / TABLE)
    start, stop = (table[f"videos/{CAMERA}/{name}_timestamp"].to_numpy() for name in ("from", "to"))
    assert start[1] >= stop[0] - 1e-6
    last = np.array([numbers[-1] for numbers in stays.values()])
    np.testing.assert_allclose(stop - start, (last + 1) / FPS, atol=1e-6)


def test_videos_with_more_frames_than_rows_become_one(tmp_path: Path) -> None:
    """Each video ends with the frame of its last row."""
    lengths, step = [4, 3], 6
    drawn = [draw([step * (n - 1) + 1], first=episode) for episode, n in enumerate(lengths)]
    files = [encode(frames, tmp_path / f"{n}.mp4", mpeg4(12), fps=step * 10) for n, frames in enumerate(drawn)]
    camera = Camera(files, [[n] for n in lengths], SIZE)
    root = build(tmp_path / "data", lengths, {}, cameras={CAMERA: camera}, fps=10)
    prepared(root, tmp_path / "out")
    assert delivered(tmp_path / "out") == expected({e: list(range(0, step * n, step)) for e, n in enumerate(lengths)})


@pytest.mark.parametrize("name", ["all 0", *(slow(name) for name in NUMBERINGS if name != "all 0")])
def test_rows_are_counted_again(root: Path, tmp_path: Path, name: str) -> None:
    change_rows(root, with_index(NUMBERINGS[name]))
    prepared(root, tmp_path / "out")
    assert delivered(tmp_path / "out") == EVERY
    assert_counts(tmp_path / "out")


def test_rows_are_counted_where_nothing_counted_them(root: Path, tmp_path: Path) -> None:
    change_rows(root, lambda table: table.drop_columns(["frame_index"]))
    change_rows(root, with_times((FRAME + 0.31) / FPS))
    edit_info(root, features__frame_index=None)
    prepared(root, tmp_path / "out", clock="frame_index")
    assert delivered(tmp_path / "out") == EVERY
    assert_counts(tmp_path / "out")
    info = json.loads((tmp_path / "out/meta/info.json").read_text())
    assert info["features"]["frame_index"] == {"dtype": "int64", "shape": [1], "names": None}
    np.testing.assert_allclose(pq.read_table(tmp_path / "out/data")["timestamp"].to_numpy(), FRAME / FPS, atol=1e-6)


def test_a_tolerance_keeps_the_frames_of_rows_that_count_otherwise(root: Path, tmp_path: Path) -> None:
    change_rows(root, with_index(FRAME + 1))
    change_rows(root, with_times((FRAME + 0.4) / FPS))
    prepared(root, tmp_path / "out", tolerance_s=0.0166)
    assert delivered(tmp_path / "out") == EVERY
    assert_counts(tmp_path / "out")
    np.testing.assert_allclose(pq.read_table(tmp_path / "out/data")["timestamp"].to_numpy(), FRAME / FPS, atol=1e-6)


@pytest.mark.parametrize("options", [{}, slow(ENCODED)], ids=["copied", "encoded"])
def test_a_tolerance_keeps_the_frames_of_rows_whose_first_ones_were_cut_out(tmp_path: Path, options: dict[str, Any]) -> None:
    root = recorded(tmp_path, h264(2))
    stays = without_rows(root, CUTS[1])
    prepared(root, tmp_path / "out", tolerance_s=0.0166, **options)
    assert delivered(tmp_path / "out") == expected(stays)
    times = np.concatenate(list(stays.values())) / FPS
    np.testing.assert_allclose(pq.read_table(tmp_path / "out/data")["timestamp"].to_numpy(), times, atol=1e-6)


def test_a_clock_by_numbers_that_count_otherwise_is_refused(root: Path, tmp_path: Path) -> None:
    change_rows(root, with_index(FRAME + 1))
    with pytest.raises(DaliStreamError, match=r'Invalid frame_index of row 0 in .* must be 0 for clock="frame_index"'):
        prepared(root, tmp_path / "out", clock="frame_index")


def test_statistics_of_rows_that_are_counted_again(demo_copy: Path, tmp_path: Path) -> None:
    """They are those of a dataset that always counted so."""
    prepared(demo_copy, tmp_path / "expected")
    for path in demo_copy.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(put(table, "frame_index", pa.array(table["index"].to_numpy())), path)
    for path in demo_copy.glob("meta/episodes/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(put(table, "stats/frame_index/max", table["stats/index/max"]), path)
    stats = json.loads((demo_copy / "meta/stats.json").read_text())
    (demo_copy / "meta/stats.json").write_text(json.dumps(stats | {"frame_index": stats["index"]}))
    prepared(demo_copy, tmp_path / "out")
    found, right = (Dataset(tmp_path / name).stats["frame_index"] for name in ("out", "expected"))
    for name in ("min", "max", "mean", "std", "count"):  # quantiles are averaged, as LeRobot does
        np.testing.assert_allclose(found[name], right[name], rtol=1e-6)
    files = ((tmp_path / name).glob("meta/episodes/*/*") for name in ("out", "expected"))
    parts = [pa.concat_tables(map(pq.read_table, sorted(each))) for each in files]
    for column in parts[1].column_names:
        if column.startswith("stats/frame_index/"):
            np.testing.assert_allclose(*(np.array(part[column].to_pylist()) for part in parts))


def test_odd_metadata_are_written_as_lerobot_spells_them(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_info(root, codebase_version="3.0", fps="30", features__force={"dtype": "float32", "shape": [1], "names": None})
    edit_info(root, features__odd={"dtype": "float32", "shape": [-1, 3], "names": None})
    change_rows(root, lambda table: table.append_column("odd", pa.array([[1.0] * 3] * len(table))))
    prepared(root, tmp_path / "out")
    info = json.loads((tmp_path / "out/meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"]) == ("v3.0", 30)
    assert "force" not in info["features"]
    assert "feature 'force' has no column" in caplog.text
    assert pq.read_table(tmp_path / "out/data")["odd"].to_pylist() == [[1.0] * 3] * len(FRAME), "not read, but copied"
    assert delivered(tmp_path / "out") == EVERY


def test_images_whose_timestamps_are_zeros_become_videos_with_the_clock(tmp_path: Path) -> None:
    """As the message says; whatever `frame_index` counts, an image is that of its row."""
    files = [io.BytesIO() for _ in range(9)]
    for frame, file in zip(draw((5, 4)), files, strict=True):
        Image.fromarray(frame).save(file, "png")
    pictures = Column("image", [*SIZE, 3], [{"bytes": file.getvalue(), "path": None} for file in files])
    root = build(tmp_path / "data", (5, 4), {CAMERA: pictures}, fps=FPS)
    change_rows(root, with_times([0.0] * 9))
    change_rows(root, with_index(np.arange(9)))
    with pytest.raises(DaliStreamError, match=r"from 0 on, so its frames cannot be encoded .* Give --clock frame_index"):
        prepared(root, tmp_path / "refused", images_to_video=True)
    prepared(root, tmp_path / "out", images_to_video=True, clock="frame_index")
    assert_counts(tmp_path / "out")
    assert delivered(tmp_path / "out") == expected({0: list(range(5)), 1: list(range(4))})


# ---------------------------------------------------------------------------------------------- copies that LeRobot reads

FROM = f"videos/{CAMERA}/from_timestamp"


def starts_are_off(frames: list[float]) -> Callable[[Path], None]:
    """`from_timestamp` of each episode is off by this number of frames."""
    return lambda root: edit_table(root, TABLE, lambda t: put(t, FROM, pa.array(t[FROM].to_numpy() + np.array(frames) / FPS)))


def of_another_rate(root: Path) -> None:
    """The video has 29.7 frames per second, and drifts by 0.4 frames from the rows of an episode."""
    file = encode(draw(), root.parent / "drifting.mp4", h264(12), fps=297)  # type: ignore[arg-type]
    ffmpeg("-itsscale", "10", "-i", file, "-c", "copy", "-y", video(root))
    edit_table(root, TABLE, lambda t: put(t, FROM, [0.0, EPISODES[0] / 29.7]))


def in_milliseconds(root: Path) -> None:
    """Display times are rounded to milliseconds, as those of Matroska are."""
    ffmpeg("-i", video(root), "-c", "copy", "-video_track_timescale", "1000", root.parent / "rounded.mp4")
    (root.parent / "rounded.mp4").rename(video(root))


def as_double(root: Path) -> None:
    def doubled(table: pa.Table) -> pa.Table:
        for name in table.column_names:
            if pa.types.is_integer(table[name].type):
                table = put(table, name, table[name].cast(pa.float64()))
        return table

    edit_table(root, TABLE, doubled)


def with_another_column(root: Path) -> None:
    change_rows(root, lambda table: table.append_column("more", pa.array(np.arange(len(table)))))


def of_other_types(root: Path) -> None:
    """Numbers for texts, doubles for integers, and lists of one number."""
    edit_info(root, features__note={"dtype": "string", "shape": [1], "names": None})
    edit_info(root, features__force={"dtype": "float32", "shape": [1], "names": None})
    change_rows(root, lambda table: table.append_column("note", table["index"]))
    change_rows(root, lambda table: table.append_column("force", pa.array([[float(i)] for i in range(len(table))])))
    for name in ("task_index", "frame_index"):
        change_rows(root, lambda table, name=name: put(table, name, table[name].cast(pa.float64())))


def with_tasks(tasks: dict[int, str], path: str) -> Callable[[Path], None]:
    """Rows have the last of these tasks, in the file of v2.x, or without pandas' index."""

    def change(root: Path) -> None:
        (root / "meta/tasks.parquet").unlink()
        if path.endswith("jsonl"):
            write_lines(root / path, [{"task_index": number, "task": task} for number, task in tasks.items()])
        else:
            pq.write_table(pa.table({"task_index": list(tasks), "task": list(tasks.values())}), root / path)
        change_rows(root, lambda table: put(table, "task_index", [list(tasks)[-1]] * len(table)))

    return change


def hidden_frames(root: Path) -> None:
    """An edit list hides the first 5 frames, which belong to no row."""
    video(root).write_bytes(trimmed(video(root).read_bytes(), "head"))
    without_rows(root, {0: [0, 1, 2, 3, 4]})
    rows = with_times(pq.read_table(root / ROWS)["timestamp"].to_numpy() - np.where(np.arange(67) < 26, 5 / FPS, 0))
    change_rows(root, rows)
    edit_table(root, TABLE, lambda t: put(t, FROM, [0.0, 26 / FPS]))


def episodes_with_other_numbers(root: Path) -> None:
    """Episodes 3 and 7, of which the table has the second one first, and rows whose `index` starts at 0 in each."""
    edit_table(root, TABLE, lambda t: put(t, "episode_index", [3, 7]).take([1, 0]))
    change_rows(root, lambda t: put(t, "episode_index", pa.array(np.where(t["episode_index"].to_numpy() == 0, 3, 7))))
    change_rows(root, lambda t: put(t, "index", t["frame_index"]))


def reversed_rows(root: Path) -> None:
    change_rows(root, lambda table: table.take(np.arange(len(table))[::-1]))


TOLERANT: dict[str, Any] = {"tolerance_s": 0.0166}
HIDDEN = dict(enumerate([(0, frame) for frame in range(5, 31)] + [(1, frame) for frame in range(41)]))
IRREGULAR: dict[str, tuple[Callable[[Path], Any], dict[str, Any], Any]] = {
    "integers as double": (as_double, {}, EVERY),
    "a start that is late, with a tolerance": (starts_are_off([0.4, 0.4]), TOLERANT, EVERY),
    "a start that is early, with a tolerance": (starts_are_off([0.0, -0.45]), TOLERANT, EVERY),
    "a start that is late, with the clock": (starts_are_off([0.2, 0.2]), {"clock": "frame_index"}, EVERY),
    "a start that is late": (starts_are_off([0.2, 0.1]), {}, EVERY),
    "a drift": (of_another_rate, TOLERANT, EVERY),
    "times in milliseconds": (in_milliseconds, {}, EVERY),
    "times in milliseconds, with the clock": (in_milliseconds, {"clock": "frame_index"}, EVERY),
    "a column without a feature": (with_another_column, {}, EVERY),
    "columns of other types": (of_other_types, {}, EVERY),
    "tasks of v2": (with_tasks({0: "a", 1: "b"}, "meta/tasks.jsonl"), {}, EVERY),
    "tasks in another order": (with_tasks({1: "b", 0: "a"}, "meta/tasks.parquet"), {}, EVERY),
    "a number without a task": (with_tasks({0: "a", 2: "c"}, "meta/tasks.parquet"), {}, EVERY),
    "frames that are hidden": (hidden_frames, {}, HIDDEN),
    "episodes with other numbers": (episodes_with_other_numbers, {}, EVERY),
    "rows in descending order": (reversed_rows, {}, EVERY),
    "rows that were cut out inside": (lambda root: without_rows(root, CUTS[0]), {}, CUTS[0]),
    "rows that were cut out at the ends": (lambda root: without_rows(root, CUTS[1]), {}, CUTS[1]),
    "rows that were cut out inside, encoded": (lambda root: without_rows(root, CUTS[0]), ENCODED, CUTS[0]),
    "rows that were cut out at the ends, encoded": (lambda root: without_rows(root, CUTS[1]), ENCODED, CUTS[1]),
    "a start that is late, encoded": (starts_are_off([0.4, 0.4]), TOLERANT | ENCODED, EVERY),
    "one episode": (lambda root: None, {"episodes": [1]}, {0: list(range(31))}),
}


@pytest.mark.parametrize("name", [slow(name) if name.endswith("encoded") else name for name in IRREGULAR])
def test_lerobot_reads_a_copy(root: Path, tmp_path: Path, name: str) -> None:
    """And a Loader reads it with the same frames and tasks."""
    change, options, frames = IRREGULAR[name]
    change(root)
    if frames in (CUTS[0], CUTS[1], {0: list(range(31))}):
        frames = expected({e: [n for n in range(length) if n not in frames.get(e, [])] for e, length in enumerate(EPISODES)})
    prepared(root, tmp_path / "out", **options)
    assert delivered(tmp_path / "out") == frames
    read = lerobot_reader.read(tmp_path / "out")
    assert {index: identities(row[CAMERA][None])[0] for index, row in read.items()} == frames
    with loader(tmp_path / "out") as batches:
        tasks = {index: task for batch in batches for index, task in zip(batch["index"].tolist(), batch["task"], strict=True)}
    assert tasks == {index: row["task"] for index, row in read.items()}
    with loader(Dataset(root, **{key: value for key, value in options.items() if key not in ENCODED})) as batches:
        assert set(tasks.values()) == {task for batch in batches for task in batch["task"]}


def test_types_of_a_copy_are_those_of_its_features(root: Path, tmp_path: Path) -> None:
    of_other_types(root)
    as_double(root)
    prepared(root, tmp_path / "out")
    schema = pq.read_schema(tmp_path / "out" / ROWS)
    kinds = {"note": pa.string(), "force": pa.float64(), "task_index": pa.int64(), "frame_index": pa.int64()}
    assert {name: schema.field(name).type for name in kinds} == kinds
    assert pq.read_table(tmp_path / "out" / ROWS)["note"].to_pylist() == [str(index) for index in range(len(FRAME))]
    assert schema.equals(pq.read_table(tmp_path / "out" / ROWS).schema)
    table = pq.read_schema(tmp_path / "out" / TABLE)
    numbers = {field.name: field.type for field in table if not field.name.endswith(("tasks", "timestamp"))}
    assert set(numbers.values()) == {pa.int64()}, numbers


@pytest.mark.parametrize("items", [pa.large_list(pa.float32()), pa.large_list(pa.float64()), *DECIMALS], ids=str)
def test_lists_of_other_types_are_copied(root: Path, tmp_path: Path, items: pa.DataType) -> None:
    """Their values are equal, and LeRobot reads them. Decimals become numbers of the type of their feature."""
    values = [[n / 4, -n / 8] for n in range(len(FRAME))]
    stored = pa.array([[Decimal(value) for value in row] for row in values] if items in DECIMALS else values, items)
    change_rows(root, lambda table: table.append_column("force", stored))
    edit_info(root, features__force={"dtype": "float32", "shape": [2], "names": None})
    prepared(root, tmp_path / "out")
    for place in (root, tmp_path / "out"):
        with loader(place) as batches:
            assert sorted(row for batch in batches for row in batch["force"].tolist()) == sorted(values)
    assert [row["force"] for row in lerobot_reader.read(tmp_path / "out").values()] == values
    assert pa.types.is_floating(pq.read_schema(tmp_path / "out" / ROWS).field("force").type.value_type)


def test_a_column_that_a_copy_lacks_is_named(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the feature, as the message says, it is copied."""
    with_another_column(root)
    prepared(root, tmp_path / "out")
    assert "has no feature 'more' for this column of the rows, so LeRobot does not read the dataset" in caplog.text
    assert "more" not in pq.read_schema(tmp_path / "out" / ROWS).names
    edit_info(root, features__more={"dtype": "int64", "shape": [1], "names": None})
    prepared(root, tmp_path / "more")
    assert [row["more"] for row in lerobot_reader.read(tmp_path / "more").values()] == list(range(len(FRAME)))


def test_times_that_stay_irregular_are_a_warning(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without options, rows are not changed. With the clock, as the warning says, LeRobot reads the copy."""
    change_rows(root, with_times((FRAME + np.random.default_rng(0).uniform(0, 0.1, len(FRAME))) / FPS))
    prepared(root, tmp_path / "out")
    assert re.search(r"timestamps of rows are up to 0\.00\d+ s away from their frames, as in the source", caplog.text)
    assert delivered(tmp_path / "out") == EVERY
    with pytest.raises(AssertionError, match="s away"):
        lerobot_reader.read(tmp_path / "out")
    caplog.clear()
    prepared(root, tmp_path / "clock", clock="frame_index")
    assert lerobot_reader.delivered(tmp_path / "clock", CAMERA) == EVERY
    assert "away from their frames" not in caplog.text


def test_frames_that_cannot_get_regular_times_are_encoded(tmp_path: Path) -> None:
    """Three frames per row, at rounded times. The option that the message names writes a copy that LeRobot reads."""
    lengths, fps = [4, 3], 15
    files = []
    for episode, length in enumerate(lengths):
        drawn = encode(draw([3 * length], first=episode), tmp_path / f"{episode}-exact.mp4", h264(12), fps=3 * fps)
        files.append(tmp_path / f"{episode}.mp4")
        ffmpeg("-i", drawn, "-c", "copy", "-video_track_timescale", "1000", files[-1])
    camera = Camera(files, [[n] for n in lengths], SIZE)
    root = build(tmp_path / "data", lengths, {}, cameras={CAMERA: camera}, fps=fps)
    frames = expected({episode: list(range(0, 3 * length, 3)) for episode, length in enumerate(lengths)})
    prepared(root, tmp_path / "out")
    assert delivered(tmp_path / "out") == frames
    with pytest.raises(DaliStreamError, match=r"up to 0\.\d+ s away from multiples of 1/fps, and LeRobot .* Give --codec"):
        prepared(root, tmp_path / "clock", clock="frame_index")
    prepared(root, tmp_path / "encoded", clock="frame_index", **ENCODED)
    assert lerobot_reader.delivered(tmp_path / "encoded", CAMERA) == delivered(tmp_path / "encoded") == frames


# --------------------------------------------------------------------------------------------------------- verification


def test_values_that_a_loader_refuses_are_not_verified(root: Path, tmp_path: Path) -> None:
    """The other episode is kept with --drop-broken, as the report of the failed run says."""

    def damaged(table: pa.Table) -> pa.Table:
        return put(table, "action", pa.array([None if i == 40 else [1.0, 2.0] for i in range(len(table))]))

    change_rows(root, damaged)
    with pytest.raises(DaliStreamError, match=r"episode 1: action: 1 of 41 values are missing. Record or convert the dataset"):
        prepared(root, tmp_path / "out")
    report = prepared(root, tmp_path / "kept", drop_broken=True)
    assert list(report.dropped) == ["1"]
    assert delivered(tmp_path / "kept") == expected({0: list(range(EPISODES[0]))})


@pytest.mark.parametrize("fault", ["size", "task"])
def test_a_dataset_that_a_loader_refuses_is_not_finished(root: Path, tmp_path: Path, fault: str) -> None:
    if fault == "size":
        features = json.loads((root / "meta/info.json").read_text())["features"]
        edit_info(root, **{f"features__{CAMERA}": features[CAMERA] | {"shape": [96, 96, 3]}})
    else:
        change_rows(root, lambda table: put(table, "task_index", pa.array(np.full(len(table), 7))))
    for _ in range(2):  # a second run does not take it for finished
        with pytest.raises(DaliStreamError, match=r"a Loader does not read the new dataset: .*(96×96|refer to task_index 7)"):
            prepared(root, tmp_path / "out")


def test_the_size_of_a_file_needs_no_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    place: Any = open_place("memory://place/out", None)
    place.commit([("data/a", b"123")])

    def no_listing(*_: Any, **__: Any) -> None:
        raise AssertionError("lists a folder")

    monkeypatch.setattr(type(place), "sizes", no_listing)
    assert [place.size(path) for path in ("data/a", "data/b", "none/a")] == [3, None, None]

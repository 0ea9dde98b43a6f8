"""`prepare` mends rows and metadata as other exporters write them, and verifies what it has written as a Loader reads it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.broken import EPISODES as TABLE
from support.broken import edit_info, put
from support.datasets import Camera, Column, build
from support.slow import slow
from support.tools import prepared
from support.videos import CAMERA, EPISODES, FPS, SIZE, draw, encode, h264, mpeg4, recorded
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
        with pytest.raises(DaliStreamError, match=r"a Loader does not read the new dataset: .*(96×96|has no task_index 7)"):
            prepared(root, tmp_path / "out")


def test_the_size_of_a_file_needs_no_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    place: Any = open_place("memory://place/out", None)
    place.commit([("data/a", b"123")])

    def no_listing(*_: Any, **__: Any) -> None:
        raise AssertionError("lists a folder")

    monkeypatch.setattr(type(place), "sizes", no_listing)
    assert [place.size(path) for path in ("data/a", "data/b", "none/a")] == [3, None, None]

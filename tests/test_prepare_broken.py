"""`dali-stream prepare` with sources that are broken or change, and with other commands and workers: no wrong dataset."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support import faults
from support import videos as video_data
from support.broken import EPISODES as TABLE
from support.broken import edit_info, edit_table, put
from support.datasets import ODD_CAMERA, ROWS, TOP, Column, build, change_info, image_file, tree, video, videos, write_odd
from support.servers import Server
from support.tools import SMALL, prepared
from support.wild import change_rows

from dali_stream import DaliStreamError, Dataset
from dali_stream.tools.preparation import packets

Json = dict[str, Any]


# ---- rows


@pytest.mark.parametrize("group", [None, "of its own"])
def test_rows_beyond_the_length_of_an_episode_are_not_dropped(root: Path, tmp_path: Path, group: str | None) -> None:
    table = pq.read_table(root / ROWS)
    with pq.ParquetWriter(root / ROWS, table.schema) as writer:
        parts = [table, table.slice(len(table) - 2)] if group else [pa.concat_tables([table, table.slice(len(table) - 2)])]
        for part in parts:
            writer.write_table(part)
    with pytest.raises(DaliStreamError, match="episode 1 must have the 41 rows of the metadata, got 43"):
        prepared(root, tmp_path / "out")


def test_rows_whose_checksum_is_wrong_are_not_copied(demo: Path, tmp_path: Path) -> None:
    """Other episodes of the file are, with --drop-broken."""
    prepared(demo, tmp_path / "data", rows_per_group=1)
    [path] = (tmp_path / "data/data").rglob("*.parquet")
    footer, lengths = pq.ParquetFile(path).metadata, Dataset(demo).lengths
    group = footer.row_group(int(lengths[:3].sum()) + 1)  # a row of episode 3
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.startswith("action"))
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DaliStreamError, match=path.name):
        prepared(tmp_path / "data", tmp_path / "out")
    report = prepared(tmp_path / "data", tmp_path / "kept", drop_broken=True)
    assert list(report.dropped) == ["3"]


def test_a_camera_of_images_without_a_column_is_left_out(tmp_path: Path) -> None:
    root = write_odd(tmp_path / "data", [3, 4])
    features = json.loads((root / "meta/info.json").read_text())["features"]
    edit_info(root, features__lost=features[ODD_CAMERA])
    prepared(root, tmp_path / "out")
    assert "lost" not in json.loads((tmp_path / "out/meta/info.json").read_text())["features"]
    assert Dataset(tmp_path / "out").cameras == (ODD_CAMERA,)


def test_a_column_of_another_dtype_has_no_statistics(tmp_path: Path) -> None:
    """Such as binary data, which a Loader leaves out."""
    columns = {"blob": Column("binary", [1], pa.array([b"a", b"b"] * 4)), "action": Column("float32", [2], np.ones((8, 2)))}
    root = build(tmp_path / "data", [3, 5], columns)
    prepared(root, tmp_path / "out", episodes=[1])
    assert pq.read_table(tmp_path / "out/data")["blob"].to_pylist() == [b"b", b"a", b"b", b"a", b"b"]


def test_a_description_that_is_no_json_is_left_out(root: Path, tmp_path: Path) -> None:
    change_rows(root, lambda table: table.drop_columns(["frame_index"]).replace_schema_metadata({"huggingface": "no JSON"}))
    edit_info(root, features__frame_index=None)
    prepared(root, tmp_path / "out")
    assert b"huggingface" not in (pq.read_schema(tmp_path / "out" / ROWS).metadata or {})


# ---- metadata


def test_splits_have_the_new_numbers_of_their_episodes(demo_copy: Path, tmp_path: Path) -> None:
    change_info(demo_copy, splits={"train": "0:3", "val": "3:4", "test": "4:6", "odd": [0, 1]})
    prepared(demo_copy, tmp_path / "out", episodes=[1, 2, 4, 5])
    splits = json.loads((tmp_path / "out/meta/info.json").read_text())["splits"]
    assert splits == {"train": "0:2", "test": "2:4"}
    parts = Dataset(tmp_path / "out").split()
    assert {name: part.episodes.tolist() for name, part in parts.items()} == {"train": [0, 1], "test": [2, 3]}


def test_statistics_that_some_episodes_lack(tmp_path: Path) -> None:
    action = Column("float32", [1], np.arange(9))
    root = build(tmp_path / "data", [2, 3, 4], {"action": action}, version="v2.1", stats=True)
    path = root / "meta/episodes_stats.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[::2]))
    prepared(root, tmp_path / "out", episodes=[0, 1])
    assert Dataset(tmp_path / "out").stats["action"]["max"].tolist() == [1]
    path.write_text(lines[2])
    prepared(root, tmp_path / "none", episodes=[0, 1])
    assert "action" not in Dataset(tmp_path / "none").stats


def test_statistics_of_all_episodes_are_not_those_of_some(root: Path, tmp_path: Path) -> None:
    numbers = {name: [[[0.5]]] * 3 for name in ("min", "max", "mean", "std")} | {"count": [72]}
    (root / "meta/stats.json").write_text(json.dumps({video_data.CAMERA: numbers}))
    prepared(root, tmp_path / "out", episodes=[1])
    assert not (tmp_path / "out/meta/stats.json").exists()


def test_times_of_whole_seconds_become_fractions(tmp_path: Path) -> None:
    """An episode table may have integers. The second episode begins after 1 s of the old file, and 20 frames of the new one."""
    path = video_data.encode(video_data.draw(), tmp_path / "a.mp4", video_data.mpeg4(12))
    root = video_data.write_dataset(tmp_path / "data", [path], [[20, 40]])
    start = f"videos/{video_data.CAMERA}/from_timestamp"
    edit_table(root, TABLE, lambda t: put(t, start, pa.array([0, 1])))
    prepared(root, tmp_path / "out", codec="h264")
    assert pq.read_table(tmp_path / "out" / TABLE)[start].to_pylist() == pytest.approx([0, 20 / video_data.FPS])


def test_files_of_the_episode_table_without_episodes_are_not_written(demo_copy: Path, tmp_path: Path) -> None:
    path = demo_copy / TABLE
    whole = pq.read_table(path)
    for number in range(3):
        pq.write_table(whole.slice(2 * number, 2), path.with_name(f"file-{number:03d}.parquet"))
    prepared(demo_copy, tmp_path / "out", episodes=[2, 3], file_mb=1e-6)
    tables = [pq.read_table(each) for each in (tmp_path / "out/meta/episodes").rglob("*.parquet")]
    assert [len(table) for table in tables] == [2]


# ---- episodes that cannot be read


def test_an_episode_with_a_broken_image_is_dropped(tmp_path: Path) -> None:
    images = [{"bytes": image_file(Image.fromarray(frame)), "path": None} for frame in video_data.draw([3, 4, 2])]
    root = build(tmp_path / "data", [3, 4, 2], {ODD_CAMERA: Column("image", [*video_data.SIZE, 3], images)}, rows_per_group=9)

    def damaged(table: pa.Table) -> pa.Table:
        values = table[ODD_CAMERA].to_pylist()
        values[4]["bytes"] = values[4]["bytes"][:100]
        return put(table, ODD_CAMERA, pa.array(values, table.schema.field(ODD_CAMERA).type))

    edit_table(root, ROWS, damaged)
    for name, options in (("images", {}), ("video", {"images_to_video": True})):
        report = prepared(root, tmp_path / name, drop_broken=True, **options)
        assert list(report.dropped) == ["1"]
        assert ODD_CAMERA in report.dropped["1"]
        assert Dataset(tmp_path / name).lengths.tolist() == [3, 2]


def test_an_episode_that_cannot_be_reached_is_not_dropped(demo: Path, tmp_path: Path) -> None:
    path = next(path for path in videos(demo) if TOP in str(path)).relative_to(demo).as_posix()
    with Server(demo) as server:
        server.set_faults({path: [faults.status(403)] * 1000})
        with pytest.raises(DaliStreamError, match=path):
            prepared(server.url, tmp_path / "out", drop_broken=True)
    assert not (tmp_path / "out/meta/prepare.json").exists()


def test_episodes_of_a_file_are_checked_with_few_requests(root: Path, tmp_path: Path) -> None:
    def requests(**options: Any) -> int:
        with Server(root) as server:
            prepared(server.url, tmp_path / str(options), **options)
            return sum("/videos/" in r.path or "/data/" in r.path for r in server.requests)

    assert requests(drop_broken=True) <= 2 * requests()


# ---- a source that changes


def test_a_file_that_changes_while_it_is_copied_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = video_data.recorded(tmp_path, video_data.mpeg4(12))
    other = video_data.encode(video_data.draw()[::-1].copy(), tmp_path / "other.mp4", video_data.mpeg4(2))
    assert other.stat().st_size > video(root).stat().st_size
    write = packets.write

    def changing(*arguments: Any) -> Any:
        video(root).write_bytes(other.read_bytes())  # in place, as `cp` does
        return write(*arguments)

    monkeypatch.setattr(packets, "write", changing)
    with pytest.raises(DaliStreamError, match=r"\.mp4: .*has changed"):
        prepared(root, tmp_path / "out")
    assert not videos(tmp_path / "out")


# ---- other commands and workers


def test_a_local_address_with_a_scheme_is_a_local_folder(demo_copy: Path, tmp_path: Path) -> None:
    before = tree(demo_copy)
    with pytest.raises(ValueError, match="is inside the other"):
        prepared(demo_copy, f"file://{demo_copy}/new")
    assert tree(demo_copy) == before
    prepared(demo_copy, f"file://{tmp_path}/out")
    assert Dataset(tmp_path / "out").num_episodes == 6


def test_a_run_that_another_command_began_meanwhile_is_left_alone(small: Path) -> None:
    """While the second one makes its plan. A bucket has no locks."""
    out = "memory://meanwhile/out"

    def planning(function: Any, tasks: Sequence[Json]) -> Iterable[Json]:
        if not begun:
            begun.append(True)
            prepared(small, out, **SMALL, codec="h264")
        return map(function, tasks)

    begun: list[bool] = []
    with pytest.raises(ValueError, match="another process"):
        prepared(small, out, codec="h264", gop=4, map_tasks=planning)
    files = fsspec.filesystem("memory")
    state = json.loads(files.cat_file("/meanwhile/out/meta/prepare.json"))
    assert state["plan"]["options"] == {"codec": "h264", **SMALL}
    with contextlib.closing(Dataset(out)) as new:
        assert new.num_episodes == Dataset(small).num_episodes


def test_a_worker_of_another_version_is_refused(demo: Path, tmp_path: Path) -> None:
    def older(function: Any, tasks: Sequence[Json]) -> Iterator[Json]:
        [job] = function.args
        job["version"] -= 1  # as a newer worker sees it
        yield from map(function, tasks)

    with pytest.raises(DaliStreamError, match="version"):
        prepared(demo, tmp_path / "out", map_tasks=older)
    assert not videos(tmp_path / "out")


def test_an_executor_that_loses_a_result_is_named(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(DaliStreamError, match=r"no result for 1 file, such as data/chunk-000/file-000\.parquet"):
        prepared(demo, tmp_path / "out", map_tasks=lambda function, tasks: map(function, tasks[1:]))
    assert not (tmp_path / "out/meta/info.json").exists()

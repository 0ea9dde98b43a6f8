"""`dali-stream prepare` without encoding: the new dataset equals the source, and has the layout that was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from support import videos as video_data
from support.batches import assert_same_stream
from support.datasets import (
    DEPTH,
    ODD_CAMERA,
    SIDE,
    TOP,
    Column,
    build,
    copied,
    enrich,
    episode_table,
    image_file,
    read_rows,
    videos,
    write_wide,
)
from support.servers import Server
from support.slow import slow
from support.tools import SMALL, prepared
from support.videos import frames_by_ffmpeg, top_boxes

from dali_stream import Dataset, DatasetError, Loader
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore


@pytest.fixture(scope="module")
def rich(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with what a Loader does not read. Read only."""
    root = copied(demo, tmp_path_factory.mktemp("rich"))
    enrich(root)
    return root


@pytest.fixture(scope="module")
def rich_out(rich: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in several files of each kind. Read only."""
    out = tmp_path_factory.mktemp("rich") / "out"
    prepared(rich, out, **SMALL)
    return out


# ---- the same dataset


@pytest.mark.slow
@pytest.mark.parametrize("source", ["demo", "h264_demo", slow("vp9_demo")])
def test_the_same_batches_come_out_of_small_files(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(source)
    report = prepared(root, tmp_path / "out", **SMALL)
    assert assert_same_stream(root, tmp_path / "out") == report.frames == Dataset(root).num_frames
    assert sum(camera.files for camera in report.cameras.values()) == len(videos(tmp_path / "out")) > len(videos(root)) / 2
    assert len(list((tmp_path / "out").glob("data/*/*.parquet"))) == report.data_files > (0 if source == "vp9_demo" else 1)


@pytest.mark.slow
def test_the_same_batches_come_out_of_few_files(demo: Path, tmp_path: Path) -> None:
    report = prepared(demo, tmp_path / "out")
    assert (report.data_files, [camera.files for camera in report.cameras.values()]) == (1, [1, 1])
    assert_same_stream(demo, tmp_path / "out")
    table = episode_table(tmp_path / "out")
    assert table[f"videos/{TOP}/from_timestamp"][0] == 0
    assert table[f"videos/{TOP}/from_timestamp"][1:] == pytest.approx(table[f"videos/{TOP}/to_timestamp"][:-1], abs=1e-9)


def test_images_text_and_every_dtype_in_rows(odd: Path, tmp_path: Path) -> None:
    report = prepared(odd, tmp_path / "out", file_mb=0.4)
    assert 1 < report.data_files < report.episodes
    assert assert_same_stream(odd, tmp_path / "out") == 21


_CODECS = {
    "h264": video_data.h264(12),
    "h264 open": video_data.h264(12, open_gop=True),
    "hevc open": video_data.hevc(12, open_gop=True),
    "mpeg4": video_data.mpeg4(12),  # its description has bit rates in it, which differ from file to file
    "av1 hidden": video_data.av1(30),
}


_SLOW = ("h264", "h264 open", "mpeg4")


@pytest.fixture(scope="module", params=[slow(name) if name in _SLOW else name for name in _CODECS])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes in two files, their index at the end; in each, the second episode begins in the middle of a GOP."""
    folder = tmp_path_factory.mktemp("recorded")
    arguments = _CODECS[request.param]
    files = [video_data.encode(video_data.draw(first=n), folder / f"{n}.mp4", arguments) for n in (0, 2)]
    assert all(top_boxes(path).index(b"moov") > top_boxes(path).index(b"mdat") for path in files)
    return video_data.write_dataset(folder / "data", files, [video_data.EPISODES] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 200 << 20])
def test_episodes_that_begin_within_a_gop(recorded: Path, tmp_path: Path, size: int) -> None:
    prepared(recorded, tmp_path / "out", file_mb=size / (1 << 20))
    assert assert_same_stream(recorded, tmp_path / "out") == 2 * video_data.FRAMES
    frames = sum(map(frames_by_ffmpeg, videos(tmp_path / "out")))
    # In small files, frames of the GOP that two episodes share are in both.
    assert frames == 2 * video_data.FRAMES if size > 1 else frames >= 2 * video_data.FRAMES
    assert all(top_boxes(path) == [b"ftyp", b"moov", b"mdat"] for path in videos(tmp_path / "out"))


def test_several_sample_descriptions(tmp_path: Path) -> None:
    arguments = video_data.mpeg4(12), (*video_data.mpeg4(12), "-q:v", "9")
    parts = [video_data.encode(video_data.draw(first=2 * n), tmp_path / f"{n}.mp4", a) for n, a in enumerate(arguments)]
    (tmp_path / "joined.mp4").write_bytes(video_data.joined(*parts))
    root = video_data.write_dataset(tmp_path / "data", [tmp_path / "joined.mp4"], [video_data.EPISODES * 2])
    prepared(root, tmp_path / "out")
    (path,) = videos(tmp_path / "out")
    table = read_index(LocalStore(str(path.parent)), path.name)
    assert len(table.configs) == 2
    assert np.unique(table.config).tolist() == [0, 1]
    assert_same_stream(root, tmp_path / "out")


def test_copies_of_old_encoders_have_the_same_pixels(tmp_path: Path) -> None:
    """A copy that begins at a later keyframe names the encoder, and files of other encoders are not joined with it."""
    frames = [video_data.draw(first=2 * n) for n in range(3)]
    files = [video_data.encode(each, tmp_path / f"{n}.mp4", video_data.lossless(12)) for n, each in enumerate(frames)]
    for path, x264 in zip(files, (148, 164, 148), strict=True):
        video_data.of_x264(path, path, x264)
    root = video_data.write_dataset(tmp_path / "data", files, [video_data.EPISODES] * 3)
    truth = torch.cat([video_data.whole_file(path) for path in files])
    chosen = [1, 2, 3, 5]  # the first and the last of them begin in the middle of files of build 148
    prepared(root, tmp_path / "out", episodes=chosen)
    written = videos(tmp_path / "out")
    assert [path.read_bytes().count(b"x264 - core 1") for path in written] == [1, 1, 1]
    with video_data.loader(tmp_path / "out") as loader:
        shown = {(e, f): picture for e, f, picture in video_data.samples(loader)}
    starts = np.cumsum([0, *video_data.EPISODES * 3])
    expected = [truth[starts[episode] : starts[episode + 1]] for episode in chosen]
    assert len(shown) == sum(map(len, expected))
    assert [(e, f) for (e, f), picture in shown.items() if not picture.equal(expected[e][f])] == []
    # FFmpeg decodes the copies in the same way from their start.
    whole = torch.cat([video_data.whole_file(path) for path in written])
    assert all((whole == picture).all((1, 2, 3)).any() for picture in shown.values())


def test_mpeg4_of_several_sample_descriptions_is_not_joined(tmp_path: Path) -> None:
    """FFmpeg decodes MPEG-4 with the first sample description of a file, whatever the others say."""
    arguments = (*video_data.mpeg4(12), "-flags", "+qpel"), (*video_data.mpeg4(12), "-mpeg_quant", "1")
    files = [video_data.encode(video_data.draw(first=2 * n), tmp_path / f"{n}.mp4", a) for n, a in enumerate(arguments)]
    root = video_data.write_dataset(tmp_path / "data", files, [video_data.EPISODES] * 2)
    prepared(root, tmp_path / "out")
    assert_same_stream(root, tmp_path / "out")
    written = [video_data.whole_file(path) for path in videos(tmp_path / "out")]
    assert torch.equal(torch.cat(written), torch.cat([video_data.whole_file(path) for path in files]))


def test_an_edit_list_and_a_late_start_go(tmp_path: Path) -> None:
    path = video_data.encode(video_data.draw(), tmp_path / "a.mp4", (*video_data.h264(12), "-output_ts_offset", "0.5"))
    assert b"elst" in path.read_bytes()
    root = video_data.write_dataset(tmp_path / "data", [path], delay=0.5)
    prepared(root, tmp_path / "out")
    (new,) = videos(tmp_path / "out")
    assert b"elst" not in new.read_bytes()
    assert frames_by_ffmpeg(new) == video_data.FRAMES
    starts = [0, video_data.EPISODES[0] / video_data.FPS]
    assert episode_table(tmp_path / "out")[f"videos/{video_data.CAMERA}/from_timestamp"] == pytest.approx(starts, abs=1e-12)
    assert_same_stream(root, tmp_path / "out")


def test_whole_files_decode_to_the_same_frames(h264_demo: Path, tmp_path: Path) -> None:
    prepared(h264_demo, tmp_path / "out")
    for camera in (TOP, SIDE):
        old = [video_data.whole_file(path) for path in sorted((h264_demo / "videos" / camera).rglob("*.mp4"))]
        (new,) = (tmp_path / "out/videos" / camera).rglob("*.mp4")
        data = new.read_bytes()
        assert data[data.index(b"ctts") + 4] == 1  # the version in which frames may be shown before their turn
        assert torch.equal(video_data.whole_file(new), torch.cat(old))
        assert frames_by_ffmpeg(new) == sum(map(len, old))


@pytest.mark.slow
def test_what_a_loader_does_not_read_is_copied_too(rich: Path, rich_out: Path) -> None:
    assert_same_stream(rich, rich_out)
    assert len(list((rich_out / "videos" / DEPTH).rglob("*.mp4"))) > 1
    old, new = (pa.concat_tables([pq.read_table(p) for p in sorted(r.glob("data/*/*.parquet"))]) for r in (rich, rich_out))
    assert new.schema.equals(old.schema, check_metadata=True)
    assert b"huggingface" in new.schema.metadata
    assert b"Array2DExtensionType" in new.schema.field("matrix").metadata[b"ARROW:extension:name"]
    assert repr(new.to_pydict()) == repr(old.to_pydict())  # as text, since the rows contain NaNs
    for name in ("README.md", "LICENSE", "meta/stats.json", "meta/tasks.parquet", "meta/more/notes.bin"):
        assert (rich_out / name).read_bytes() == (rich / name).read_bytes()


# ---- as promised


def test_metadata_fits_the_files(rich: Path, rich_out: Path) -> None:
    old, new = (json.loads((root / "meta/info.json").read_text()) for root in (rich, rich_out))
    assert (new["data_files_size_in_mb"], new["video_files_size_in_mb"], new["mine"]) == (1, 1, {"kept": [1, None]})
    changed = ("data_files_size_in_mb", "video_files_size_in_mb")
    assert {k: v for k, v in new.items() if k not in changed} == {k: v for k, v in old.items() if k not in changed}
    table = episode_table(rich_out)
    assert table["dataset_from_index"] == [0, *table["dataset_to_index"][:-1]]
    assert table["dataset_to_index"][-1] == new["total_frames"]
    for episode in range(new["total_episodes"]):
        row = {key: values[episode] for key, values in table.items()}
        data = pq.read_table(rich_out / new["data_path"].format(**_place(row, "data/")))
        frames = data.filter(pa.compute.equal(data["episode_index"], episode))
        assert frames["index"].to_pylist() == list(range(row["dataset_from_index"], row["dataset_to_index"]))
        for camera in (TOP, SIDE, DEPTH):
            place = _place(row, f"videos/{camera}/")
            assert place["file_index"] < 2  # chunks_size of the source
            video = rich_out / new["video_path"].format(video_key=camera, **place)
            shown = read_index(LocalStore(str(rich_out)), str(video.relative_to(rich_out)))
            start, stop = row[f"videos/{camera}/from_timestamp"], row[f"videos/{camera}/to_timestamp"]
            assert stop - start == pytest.approx(row["length"] / new["fps"])
            assert shown.nearest(np.array([start, stop - 1 / new["fps"]]))[1] == pytest.approx([0, 0], abs=1e-4)
    old_table = episode_table(rich)
    kept = [key for key in table if "index" not in key and "timestamp" not in key]
    assert any(key.startswith("stats/") for key in kept)
    assert {key: table[key] for key in kept} == {key: old_table[key] for key in kept}


def _place(row: dict[str, int], prefix: str) -> dict[str, int]:
    return {name: row[f"{prefix}{name}"] for name in ("chunk_index", "file_index")}


@pytest.mark.slow
def test_several_files_of_the_episode_table(demo_copy: Path, tmp_path: Path) -> None:
    path = demo_copy / "meta/episodes/chunk-000/file-000.parquet"
    whole = pq.read_table(path)
    for number in range(3):
        part = whole.slice(2 * number, 2)
        at = part.column_names.index("meta/episodes/file_index")
        part = part.set_column(at, "meta/episodes/file_index", pa.array([number] * 2))
        pq.write_table(part, path.with_name(f"file-{number:03d}.parquet"))
    prepared(demo_copy, tmp_path / "one")
    prepared(demo_copy, tmp_path / "three", file_mb=1e-6)
    assert episode_table(tmp_path / "one")["meta/episodes/file_index"] == [0] * 6
    assert episode_table(tmp_path / "three")["meta/episodes/file_index"] == [0, 0, 1, 1, 2, 2]
    assert len(list((tmp_path / "three/meta/episodes").rglob("*.parquet"))) == 3
    assert_same_stream(demo_copy, tmp_path / "three")


@pytest.mark.slow
def test_row_groups_of_32_mb_hold_whole_episodes(tmp_path: Path) -> None:
    lengths = [400, 300, 500, 1100, 100]  # of 32 kB a row: 13, 10, 16, 36 and 3 MB
    root = write_wide(tmp_path / "wide", lengths, 8192)
    prepared(root, tmp_path / "out", file_mb=1024)
    (path,) = (tmp_path / "out").glob("data/*/*.parquet")
    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [700, 500, 550, 550, 100]
    assert all(group.column(i).has_offset_index for group in groups for i in range(group.num_columns))
    assert all(group.column(i).has_column_index for group in groups for i in range(1, group.num_columns))
    old, new = (pq.read_table(f, use_threads=False) for f in (next(root.glob("data/*/*.parquet")), path))
    assert new.equals(old)


@pytest.mark.slow
def test_a_remote_source_is_read_once_and_in_large_ranges(demo: Path, tmp_path: Path) -> None:
    with Server(demo) as server:
        prepared(server.url, tmp_path / "out")
        sent = sum(r.sent for r in server.requests if "/videos/" in r.path or "/data/" in r.path)
        asked = [r for r in server.requests if r.method == "GET" and "/videos/" in r.path]
    held = sum(path.stat().st_size for kind in ("data", "videos") for path in (demo / kind).rglob("*.*"))
    assert sent < 2 * held  # the source has small files: their indices are a good part of them, and are read for each use
    assert len(asked) < 12 * len(videos(demo))
    assert_same_stream(demo, tmp_path / "out")


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    """A finished folder holds a dataset and nothing else."""
    yield
    assert not list(tmp_path.glob("*/meta/prepare"))


def test_a_number_that_became_another_is_found(demo: Path, tmp_path: Path) -> None:
    """The pages of the rows have checksums, and the loader holds them against what it reads."""
    prepared(demo, tmp_path / "out")
    [path] = tmp_path.glob("out/data/*/*.parquet")
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.startswith("action"))
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with Loader(Dataset(tmp_path / "out", cameras=[]), batch_size=8) as loader, pytest.raises(DatasetError, match=path.name):
        list(loader)


# ---- a part of a dataset


def test_selected_episodes_are_numbered_from_0(demo: Path, tmp_path: Path) -> None:
    report = prepared(demo, tmp_path / "out", episodes=[1, 3, 4], cameras=[SIDE])
    new, old = Dataset(tmp_path / "out"), Dataset(demo, episodes=[1, 3, 4], cameras=[SIDE])
    assert (new.episodes.tolist(), new.cameras, report.frames) == ([0, 1, 2], (SIDE,), old.num_frames)
    assert {path.parts[-3] for path in videos(tmp_path / "out")} == {SIDE}
    rows, before = read_rows(tmp_path / "out"), read_rows(demo)
    kept = np.isin(before["episode_index"], [1, 3, 4])
    for key, values in before.items():
        if key not in ("index", "episode_index"):
            np.testing.assert_array_equal(rows[key], values[kept])
    assert rows["index"].tolist() == list(range(new.num_frames))
    assert rows["episode_index"].tolist() == np.repeat([0, 1, 2], new.lengths).tolist()
    with video_data.loader(tmp_path / "out", shuffle=False) as a, video_data.loader(old, shuffle=False) as b:
        for left, right in zip(a, b, strict=True):
            assert torch.equal(left[SIDE], right[SIDE])
    stats, expected = new.stats, Dataset(tmp_path / "out").compute_stats(["action", "index", "episode_index"])
    for key, found in expected.items():
        for name in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(stats[key][name], found[name], rtol=1e-5)
    assert TOP not in stats


def test_images_become_video(tmp_path: Path) -> None:
    frames = video_data.draw((12, 9))
    images = [{"bytes": image_file(Image.fromarray(frame)), "path": None} for frame in frames]
    root = build(tmp_path / "images", (12, 9), {ODD_CAMERA: Column("image", frames.shape[1:], images)})
    report = prepared(root, tmp_path / "out", images_to_video=True)
    camera = report.cameras[ODD_CAMERA]
    assert (camera.encoder, camera.files) == ("libx264", 1)
    new = Dataset(tmp_path / "out")
    assert new.features[ODD_CAMERA].is_video
    assert ODD_CAMERA not in pq.read_schema(next((tmp_path / "out/data").rglob("*.parquet"))).names
    with video_data.loader(tmp_path / "out", shuffle=False) as loader:
        for batch in loader:
            expected = list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
            assert video_data.identities(batch[ODD_CAMERA]) == expected
    with pytest.raises(ValueError, match=r"size must be None for .* Give --images-to-video too"):
        prepared(root, tmp_path / "small", size=(64, 64))

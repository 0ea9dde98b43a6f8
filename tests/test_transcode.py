"""`dali-stream transcode`: the same dataset comes out, in the encoding that was asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import videos as video_data
from support.batches import assert_same_but_for_frames
from support.datasets import DEPTH, SIDE, TOP, change_info, copied, enrich, tree, video, videos
from support.servers import Server
from support.slow import examples, slow
from support.tools import assert_rest_is_the_same, table_of, transcoded
from support.videos import colourful, difference, probe, recorded

from dali_stream import Dataset, DecodeError, Loader
from dali_stream.tools.transcoding.encoders import encoder
from dali_stream.tools.transcoding.job import renewed
from dali_stream.tools.transcoding.video import Share

pytestmark = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="the ffmpeg program is not installed")


@pytest.fixture(scope="module")
def h264(written: Callable[..., Path]) -> Path:
    """The same as H.264 with B-frames and GOP 12. Read only."""
    return written(episodes=2, size=(120, 128), codec="h264", gop=12)


@pytest.fixture(scope="module")
def hevc(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first one as HEVC with GOP 2. Read only."""
    out = tmp_path_factory.mktemp("hevc") / "out"
    transcoded(small, out, codec="hevc")
    return out


# ---- the same dataset in another encoding


_MORE = (("h264", 2), ("vp9", 2), ("hevc", 1), ("hevc", 12), ("vp9", 30), ("h264", 1), ("av1", 2))


@pytest.mark.parametrize(("codec", "gop"), [("av1", 12), *(slow(*kind) for kind in _MORE)])
def test_every_frame_in_every_codec(h264: Path, tmp_path: Path, codec: str, gop: int) -> None:
    out = tmp_path / "out"
    report = transcoded(h264, out, codec=codec, gop=gop)
    assert assert_same_but_for_frames(h264, out) == report.frames == Dataset(h264).num_frames
    assert_rest_is_the_same(h264, out)
    assert len(videos(out)) == len(videos(h264)) > 2
    for path in videos(out):
        table, found = table_of(path)
        before, _ = table_of(h264 / path.relative_to(out))
        assert (found.codec, found.pixel_format) == (codec, "yuv420p")
        assert (table.reordered, table.open_gops, table.longest_gop) == (False, False, min(gop, len(before)))
        np.testing.assert_array_equal(np.diff(table.keyframes), gop)
        assert table.timescale == before.timescale
        np.testing.assert_array_equal(table.pts[table.display_order], before.pts[before.display_order])
        said = probe(path)
        assert (said["pix_fmt"], said["color_range"], said["color_space"]) == ("yuv420p", "tv", "smpte170m")
        assert codec != "hevc" or said["codec_tag_string"] == "hvc1"


def test_the_default_encoding_of_lerobot(small: Path, hevc: Path) -> None:
    assert assert_same_but_for_frames(small, hevc) == Dataset(small).num_frames
    assert_rest_is_the_same(small, hevc)
    info = [json.loads((root / "meta/info.json").read_text()) for root in (small, hevc)]
    for camera in (TOP, SIDE):
        assert info[0]["features"][camera]["info"]["video.codec"] == "av1"
        info[0]["features"][camera]["info"]["video.codec"] = "hevc"
    assert info[0] == info[1]
    assert list(info[0]["features"]) == list(info[1]["features"])


def test_the_report(h264: Path, tmp_path: Path) -> None:
    report = transcoded(h264, tmp_path / "out", codec="h264", crf=30)
    assert list(report.cameras) == [TOP, SIDE]
    for name, camera in report.cameras.items():
        before, after = (sorted((root / "videos" / name).rglob("*.mp4")) for root in (h264, tmp_path / "out"))
        assert camera.files == len(before)
        assert camera.frames == Dataset(h264).num_frames
        assert camera.bytes_before == sum(path.stat().st_size for path in before)
        assert camera.bytes_after == sum(path.stat().st_size for path in after)
        assert (camera.codec_before, camera.codec_after, camera.encoder, camera.copied) == ("h264", "h264", "libx264", 0)
        assert sorted(camera.episodes) == [0, 1]
        assert camera.psnr_min == min(low for low, _ in camera.episodes.values())
        assert 28 < camera.psnr_min < camera.psnr_mean < 45
    finer = transcoded(h264, tmp_path / "finer", codec="h264", crf=10)
    assert finer.cameras[TOP].psnr_min > report.cameras[TOP].psnr_min + 5


@pytest.mark.parametrize(("codec", "gop"), [("hevc", 2), slow("hevc", 10)])
def test_what_is_as_asked_is_copied(hevc: Path, tmp_path: Path, codec: str, gop: int) -> None:
    report = transcoded(hevc, tmp_path / "out", codec=codec, gop=gop)
    assert [(c.copied, c.encoder, c.psnr_min) for c in report.cameras.values()] == [
        (c.files, "", None) for c in report.cameras.values()
    ]
    assert tree(tmp_path / "out") == tree(hevc)


def test_files_that_differ_get_what_each_needs(small: Path, hevc: Path, tmp_path: Path) -> None:
    mixed = copied(hevc, tmp_path)
    name = f"videos/{SIDE}/chunk-000/file-000.mp4"
    shutil.copy(small / name, mixed / name)
    report = transcoded(mixed, tmp_path / "new", codec="hevc")
    assert {name: camera.files - camera.copied for name, camera in report.cameras.items()} == {TOP: 0, SIDE: 1}
    assert report.cameras[SIDE].codec_before == "av1, hevc"
    assert len(report.cameras[SIDE].episodes) == 1
    assert_same_but_for_frames(small, tmp_path / "new")


# ---- sources of all kinds

_TO_709 = ("-vf", "scale=out_color_matrix=bt709", "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709")
_FULL = ("-vf", "scale=out_range=pc", "-color_range", "pc")
_SOURCES: dict[str, tuple[str, ...]] = {
    "BT.709": (*video_data.h264(2), "-bf", "0", *_TO_709),
    "full range": (*video_data.X264, "-bf", "0", "-g", "2", "-pix_fmt", "yuvj420p", *_FULL),
    "BT.709 10 bit": (*video_data.hevc(12, pixels="yuv420p10le"), *_TO_709),
    "4:4:4": video_data.h264(12, pixels="yuv444p"),
    "B-frames, open GOPs": video_data.hevc(12, open_gop=True),
    "MPEG-4": video_data.mpeg4(12),
    "hidden frames": video_data.vp9(30, hidden=True),
}


_FAST = ("full range", "BT.709 10 bit")


@pytest.mark.parametrize("kind", [k if k in _FAST else slow(k) for k in _SOURCES])
def test_colours_stay_and_become_what_dali_converts_right(kind: str, tmp_path: Path) -> None:
    root = recorded(tmp_path, _SOURCES[kind], frames=colourful())
    report = transcoded(root, tmp_path / "out", codec="h264", crf=8)
    new = video(tmp_path / "out")
    assert report.cameras[video_data.CAMERA].copied == 0
    said = probe(new)
    assert (said["pix_fmt"], said["color_range"], said["color_space"]) == ("yuv420p", "tv", "smpte170m")
    # Of 255: 4:4:4 loses half of its colours' resolution; a wrong matrix gives 5 on these frames.
    assert difference(video(root), new) < (4.0 if kind == "4:4:4" else 2.5)
    with Loader(
        tmp_path / "out", batch_size=8, shuffle=False, image_dtype="uint8", device="cpu", decode="torchcodec"
    ) as loader:
        for batch in loader:
            expected = list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
            assert video_data.identities(batch[video_data.CAMERA]) == expected


def test_frames_that_only_noise_tells_apart_are_no_mistake(tmp_path: Path) -> None:
    """As in recordings of a camera at half the rate, or of a robot that stands still."""
    noise = np.random.default_rng(0).normal(0, 2, (video_data.FRAMES, *video_data.SIZE, 3))
    still = (video_data.draw()[:1] + noise).clip(0, 255).astype(np.uint8)
    root = recorded(tmp_path, video_data.h264(2), frames=still)
    assert transcoded(root, tmp_path / "out", codec="hevc", gop=12, crf=32).cameras[video_data.CAMERA].copied == 0


def test_a_late_start_and_a_coarse_clock(tmp_path: Path) -> None:
    late = recorded(tmp_path / "late", (*video_data.h264(12), "-output_ts_offset", "0.5"), delay=0.5)
    coarse = recorded(tmp_path / "coarse", (*video_data.h264(12), "-video_track_timescale", "1000"))
    for root in (late, coarse):
        out = root.with_name("out")
        transcoded(root, out, codec="vp9")
        (before, _), (after, _) = table_of(video(root)), table_of(video(out))
        assert (
            np.abs(after.pts[after.display_order] / after.timescale - before.pts[before.display_order] / before.timescale).max()
            < 0.001
        )


def test_what_a_loader_does_not_read_is_kept(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    enrich(root)
    report = transcoded(root, tmp_path / "out", codec="vp9")
    assert_rest_is_the_same(root, tmp_path / "out")
    for path in (root / "videos" / DEPTH).rglob("*.mp4"):
        assert (tmp_path / "out" / path.relative_to(root)).read_bytes() == path.read_bytes()
    assert (report.cameras[DEPTH].copied, report.cameras[DEPTH].codec_after) == (report.cameras[DEPTH].files, "av1")
    old, new = (json.loads((folder / "meta/info.json").read_text()) for folder in (root, tmp_path / "out"))
    assert new["features"][DEPTH] == old["features"][DEPTH]
    assert (new["mine"], new["robot_type"], new["video_path"]) == ({"kept": [1, None]}, "a robot", old["video_path"])


def test_a_dataset_without_video_is_copied(odd: Path, tmp_path: Path) -> None:
    report = transcoded(odd, tmp_path / "out", codec="hevc")
    assert report.cameras == {}
    assert tree(tmp_path / "out").keys() == tree(odd).keys()
    assert_rest_is_the_same(odd, tmp_path / "out")


def test_a_remote_source_is_fetched_once_and_leaves_nothing_behind(small: Path, hevc: Path, tmp_path: Path) -> None:
    with Server(small) as server:
        transcoded(server.url, tmp_path / "out", codec="hevc")
        sent = sum(r.sent for r in server.requests if "/videos/" in r.path)
    assert sent < 1.2 * sum(path.stat().st_size for path in videos(small))
    assert tree(tmp_path / "out") == tree(hevc)


# ---- what info.json says, and how far it is


def test_info_says_nothing_that_is_no_longer_true() -> None:
    said: dict[str, Any] = {"video.codec": "av1", "video.pix_fmt": "yuv444p", "video.g": 2, "video.crf": 30, "video.preset": 12}
    more = {
        "video.fast_decode": 0,
        "video.video_backend": "pyav",
        "video.extra_options": {"tune": 1},
        "video.fps": 30,
        "mine": 1,
    }
    info = {
        "features": {"a": {"info": said | more}, "b": {"video_info": {"mine": 2}}, "c": {"info": said}, "d": {"shape": [1]}}
    }
    new = renewed(info, ["a", "b", "d"], encoder("h264", 4, 17, nvenc=False), 4)["features"]
    own = {"video.codec": "h264", "video.pix_fmt": "yuv420p"}
    assert new["a"]["info"] == own | {"video.g": 4, "video.crf": 17, "video.preset": "veryfast", "video.fps": 30, "mine": 1}
    assert new["b"] == {"video_info": own | {"mine": 2}}
    assert (new["c"], new["d"]) == ({"info": said}, {"shape": [1]})


@given(st.integers(0, 1 << 40), st.integers(1, 10_000), st.lists(st.floats(0, 1 << 30), max_size=30))
@examples(100)
def test_a_file_counts_for_its_share_whatever_its_parts(weight: int, frames: int, parts: list[float]) -> None:
    told: list[int] = []
    share = Share(told.append, weight)
    for part in parts:
        share(part)
    count = share.frames(frames)
    for _ in range(min(frames, 50)):
        count(1)
    share.finish()
    assert sum(told) == weight
    assert min(told, default=0) >= 0


def test_progress_moves_within_a_file(tmp_path: Path) -> None:
    root = recorded(tmp_path, video_data.h264(12))
    seen: dict[str, list[tuple[int, int]]] = {}
    transcoded(root, tmp_path / "out", codec="hevc", progress=lambda stage, *now: seen.setdefault(stage, []).append(now))
    assert list(dict.fromkeys(seen)) == ["sizes", "rows", "video", "verifying"]
    for stages in seen.values():
        assert stages == sorted(stages)
        assert stages[-1][0] == stages[-1][1]
    assert any(0 < done < total for done, total in seen["video"])


def test_a_run_goes_on_with_the_videos_encoded_anew(small: Path, hevc: Path) -> None:
    """The dataset is the same one, so a run that waits for its GPU may continue with what its GPU decodes."""
    options: dict[str, Any] = {"batch_size": 16, "consumers": 4}
    with Loader(small, **options) as loader:
        batches = iter(loader)
        next(batches)
        state, expected = loader.state_dict(), next(batches)["index"]
    with Loader(hevc, **options) as loader:
        loader.load_state_dict(state)
        assert torch.equal(next(iter(loader))["index"], expected)


def test_a_depth_map_is_known_by_any_of_its_marks(tmp_path: Path) -> None:
    root = recorded(tmp_path, video_data.h264(12))
    features = json.loads((root / "meta/info.json").read_text())["features"]
    for mark in ({"video.is_depth_map": True}, {"is_depth_map": True}, {"video.pix_fmt": "gray12le"}):
        changed = features | {video_data.CAMERA: features[video_data.CAMERA] | {"info": mark}}
        change_info(root, features=changed)
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        transcoded(root, out, codec="hevc")
        assert video(out).read_bytes() == video(root).read_bytes()
        assert not Dataset(root).cameras  # and a Loader leaves it out


def test_sound_is_not_dropped_in_silence(tmp_path: Path) -> None:
    silent = video_data.encode(video_data.draw(), tmp_path / "a.mp4", video_data.h264(12))
    sound = ("-f", "lavfi", "-i", "sine=duration=2", "-c:v", "copy", "-c:a", "aac")
    video_data.ffmpeg("-i", silent, *sound, tmp_path / "b.mp4")
    root = video_data.write_dataset(tmp_path / "data", [tmp_path / "b.mp4"])
    with pytest.raises(DecodeError, match="sound"):
        transcoded(root, tmp_path / "out", codec="hevc")

"""`dali-stream prepare` with another encoding: rows stay, and frames are those that a Loader would have made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support import videos as video_data
from support.batches import assert_same_but_for_frames
from support.datasets import DEPTH, SIDE, TOP, change_episodes, change_info, copied, enrich, episode_table, tree, video, videos
from support.programs import failed
from support.servers import Server
from support.slow import slow, slow_after
from support.tools import FAST, assert_same_rows, prepared, runs, stub, table_of
from support.videos import colourful, difference, probe, recorded

from dali_stream import DaliStreamError, Dataset, Loader
from dali_stream.demo import stamp
from dali_stream.tools import prepare

pytestmark = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="the ffmpeg program is not installed")


@pytest.fixture(scope="module")
def h264(written: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A camera of two episodes as H.264 with B-frames and GOP 12. Read only."""
    out = tmp_path_factory.mktemp("h264") / "out"
    prepared(written(episodes=2, size=(120, 128), codec="h264", gop=12), out, cameras=[TOP])
    return out


@pytest.fixture(scope="module")
def hevc(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A camera of `small` as HEVC with GOP 2. Read only."""
    out = tmp_path_factory.mktemp("hevc") / "out"
    prepared(small, out, codec="hevc", cameras=[TOP])
    return out


# ---- the same rows, and the frames that a Loader would have made


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "gop"), [("av1", 12), ("h264", 2), ("vp9", 2), ("hevc", 1), ("hevc", 12)])
def test_every_frame_in_every_codec(h264: Path, tmp_path: Path, codec: str, gop: int) -> None:
    out = tmp_path / "out"
    report = prepared(h264, out, codec=codec, gop=gop)
    assert assert_same_but_for_frames(h264, out) == report.frames == Dataset(h264).num_frames
    assert_same_rows(h264, out)
    assert len(videos(out)) == 1
    for path in videos(out):
        table, found = table_of(path)
        assert (found.codec, found.pixel_format) == (codec, "yuv420p")
        assert (table.reordered, table.open_gops, table.longest_gop) == (False, False, gop)
        starts = np.round(np.array(episode_table(out)[f"videos/{path.parts[-3]}/from_timestamp"]) * 20).astype(int)
        assert set(starts.tolist()) <= set(np.asarray(table.keyframes[:]).tolist())  # each episode begins with a keyframe
        said = probe(path)
        assert (said["pix_fmt"], said["color_range"], said["color_space"]) == ("yuv420p", "tv", "smpte170m")
        assert codec != "hevc" or said["codec_tag_string"] == "hvc1"


@pytest.mark.slow
def test_frames_are_resized_as_a_loader_does(small: Path, tmp_path: Path) -> None:
    """The report, the metadata and the statistics are those of the new frames."""
    report = prepared(small, tmp_path / "out", size=(64, 96), codec="h264", crf=12)
    out = Dataset(tmp_path / "out")
    info = json.loads((tmp_path / "out/meta/info.json").read_text())["features"][TOP]
    assert (info["shape"], info["info"]["video.height"], info["info"]["video.codec"]) == ([64, 96, 3], 64, "h264")
    errors = []
    with (
        video_data.loader(tmp_path / "out", shuffle=False) as a,
        video_data.loader(small, shuffle=False, image_size=(64, 96)) as b,
    ):
        for left, right in zip(a, b, strict=True):
            assert torch.equal(left["action"], right["action"])
            errors.append(((left[TOP].float() - right[TOP].float()) ** 2).mean((1, 2, 3)))
    psnr = 10 * torch.log10(255**2 / torch.cat(errors))
    camera = report.cameras[TOP]
    assert float(psnr.min()) - 0.01 <= camera.psnr_min <= camera.psnr_mean <= float(psnr.max()) + 0.01
    computed = out.compute_stats([TOP])[TOP]
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(out.stats[TOP][name], computed[name], atol=0.02)
    assert "video.g" not in json.loads((small / "meta/info.json").read_text())["features"][TOP]["info"]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "copied"), [({"codec": "hevc"}, True), ({"codec": "hevc", "crf": 25}, False)])
def test_a_camera_that_is_recorded_as_asked_is_copied(hevc: Path, tmp_path: Path, options: Any, copied: bool) -> None:
    report = prepared(hevc, tmp_path / "out", **options)
    assert {camera.encoder == "" for camera in report.cameras.values()} == {copied}
    same = [path.read_bytes() == (tmp_path / "out" / path.relative_to(hevc)).read_bytes() for path in videos(hevc)]
    assert same == [copied] * len(same)


@pytest.mark.slow
def test_a_finer_quality_is_finer(h264: Path, tmp_path: Path) -> None:
    coarse, fine = (prepared(h264, tmp_path / str(crf), codec="h264", crf=crf).cameras[TOP] for crf in (30, 10))
    assert fine.psnr_min > coarse.psnr_min + 5
    assert fine.bytes > coarse.bytes


@pytest.mark.slow
def test_what_a_loader_does_not_read_is_kept(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    enrich(root)
    report = prepared(root, tmp_path / "out", codec="vp9", gop=2)
    assert_same_rows(root, tmp_path / "out")
    assert (report.cameras[DEPTH].encoder, report.cameras[TOP].encoder) == ("", "libvpx-vp9")
    old, new = (json.loads((folder / "meta/info.json").read_text()) for folder in (root, tmp_path / "out"))
    assert new["features"][DEPTH] == old["features"][DEPTH]
    assert (new["mine"], new["robot_type"]) == ({"kept": [1, None]}, "a robot")


@pytest.mark.slow
def test_a_remote_source_leaves_nothing_behind(small: Path, hevc: Path, tmp_path: Path) -> None:
    with Server(small) as server:
        prepared(server.url, tmp_path / "out", codec="hevc", cameras=[TOP])
    assert tree(tmp_path / "out") == tree(hevc)


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", _SOURCES)
def test_colours_stay_and_become_what_dali_converts_right(kind: str, tmp_path: Path) -> None:
    root = recorded(tmp_path, _SOURCES[kind], frames=colourful())
    report = prepared(root, tmp_path / "out", codec="h264", crf=8)
    new = video(tmp_path / "out")
    assert report.cameras[video_data.CAMERA].encoder == "libx264"
    said = probe(new)
    assert (said["pix_fmt"], said["color_range"], said["color_space"]) == ("yuv420p", "tv", "smpte170m")
    # The unit is 1/255: 4:4:4 loses half of its colours' resolution; a wrong matrix gives 5 on these frames.
    assert difference(video(root), new) < (4.0 if kind == "4:4:4" else 2.5)
    with Loader(
        tmp_path / "out", batch_size=8, shuffle=False, image_dtype="uint8", device="cpu", decode="torchcodec"
    ) as loader:
        for batch in loader:
            expected = list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
            assert video_data.identities(batch[video_data.CAMERA]) == expected


@pytest.mark.slow
def test_frames_that_only_noise_tells_apart_are_no_mistake(tmp_path: Path) -> None:
    """Recordings of a camera at half the rate, or of a robot that does not move, contain such frames."""
    noise = np.random.default_rng(0).normal(0, 2, (video_data.FRAMES, *video_data.SIZE, 3))
    still = (video_data.draw()[:1] + noise).clip(0, 255).astype(np.uint8)
    root = recorded(tmp_path, video_data.h264(2), frames=still)
    assert prepared(root, tmp_path / "out", codec="hevc", gop=12, crf=32).cameras[video_data.CAMERA].encoder == "libx265"


def fine_colours(folder: Path) -> Path:
    """A dataset with a strong colour of its own in each 2×2 pixels, which become 1 pixel at half the size."""
    size, lengths = (2 * video_data.SIZE[0], 2 * video_data.SIZE[1]), (5, 4)
    frames = video_data.draw(lengths, size=size)
    colours = np.random.default_rng(0).integers(0, 256, (*video_data.SIZE, 3))
    texture = np.kron(colours, np.ones((2, 2, 1), np.int64)).astype(np.uint8)
    for frame, place in zip(
        frames, [(episode, number) for episode in (0, 1) for number in range(lengths[episode])], strict=True
    ):
        frame[:] = np.roll(texture, 4 * place[1], 1)
        stamp(frame, *place, 0)
    path = video_data.encode(frames, folder / "a.mp4", video_data.h264(12))
    return video_data.write_dataset(folder / "data", [path], [lengths], size=size)


def test_colours_that_encoders_get_at_half_the_resolution_are_no_fault(tmp_path: Path) -> None:
    """No quality restores them. Frames that are too coarse are refused, and a lower `crf`, as the message says, helps."""
    root = fine_colours(tmp_path)
    with pytest.raises(DaliStreamError, match=r"against the encoder's input is .* dB, and at least 25 .*Give a lower --crf"):
        prepared(root, tmp_path / "coarse", size=video_data.SIZE, codec="h264", crf=45)
    report = prepared(root, tmp_path / "out", size=video_data.SIZE, codec="h264")
    assert 19 < report.cameras[video_data.CAMERA].psnr_min < 22  # of 25
    with video_data.loader(tmp_path / "out") as loader:
        for episode, frame, pixels in video_data.samples(loader):
            assert video_data.identities(pixels[None]) == [(episode, frame)]


@pytest.mark.slow
def test_an_episode_that_begins_before_its_first_frame_is_encoded(tmp_path: Path) -> None:
    path = video_data.encode(video_data.draw(), tmp_path / "a.mp4", (*video_data.h264(12), "-output_ts_offset", "0.5"))
    late = video_data.write_dataset(tmp_path / "data", [path], [[video_data.FRAMES]], delay=0.5)
    prepared(late, tmp_path / "out", codec="h264")  # a late start is no matter
    video_data.shifted(late, 2)
    start = f"videos/{video_data.CAMERA}/from_timestamp"
    change_episodes(late, lambda t: t.set_column(t.column_names.index(start), start, pa.array([0.5 - 2 / video_data.FPS])))
    prepared(late, tmp_path / "shifted", codec="h264")
    for root in (late, tmp_path / "shifted"):
        with Loader(root, batch_size=video_data.FRAMES, shuffle=False, image_dtype="uint8") as loader:
            [batch] = loader
        assert batch["timestamp"][:2].tolist() == pytest.approx([2 / video_data.FPS, 3 / video_data.FPS])
        assert video_data.identities(batch[video_data.CAMERA]) == list(map(video_data.identity, range(video_data.FRAMES)))


def test_times_that_no_constant_rate_has_cannot_be_encoded(tmp_path: Path) -> None:
    root = video_data.recorded(tmp_path, video_data.h264(12))
    change_info(root, fps=video_data.FPS // 3)  # several rows are nearest to the same multiple of 1/fps
    with pytest.raises(DaliStreamError, match="its timestamps are not near multiples of 1/fps"):
        prepared(root, tmp_path / "out", codec="h264")


# ---- the program ffmpeg


_FILTER = "at = arguments.index('-vf') + 1; arguments[at]"
_LATER = ",trim=start_frame=1,tpad=stop=1:stop_mode=clone,setpts=PTS-1/30/TB"
_EARLIER = ",tpad=start=1:start_mode=clone"
_LENGTH = f"['-frames:v', '{video_data.EPISODES[0]}' if 'episode-0' in arguments[-1] else '{video_data.EPISODES[1]}']"
_BLURRED = r"episode \d+, frame \d+: PSNR .* dB, and at least 25 is required"
_WRONG = {
    "frames are lost": ("arguments[-1:-1] = ['-frames:v', '20']", "frames and wrote 20"),
    "frames are the next ones": (f"{_FILTER} += '{_LATER}'", _BLURRED),
    "frames are those before": (f"{_FILTER} += '{_EARLIER}'; arguments[-1:-1] = {_LENGTH}", _BLURRED),
    "frames are blurred": (f"{_FILTER} += ',boxblur=20'", _BLURRED),
    "GOPs are longer": ("arguments = ['9' if a == '2' else a for a in arguments]", "longest GOP has 9"),
    "frames are interlaced": ("arguments[-1:-1] = ['-flags', '+ildct+ilme', '-top', '1']", "its frames are interlaced"),
    "B-frames are written": ("arguments = [{'0': '2', '2': '12'}.get(a, a) for a in arguments]", "B-frames"),
    "it fails": ("sys.exit('out of order')", "ffmpeg cannot encode with libx264 .*out of order"),
}


@pytest.mark.parametrize("how", slow_after(3, _WRONG))
def test_nothing_else_comes_out_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    change, said = _WRONG[how]
    root = recorded(tmp_path, video_data.mpeg4(12))
    stub(tmp_path, monkeypatch, f"if encoding and {str(tmp_path / 'out')!r} in arguments[-1]:\n    {change}")
    with pytest.raises(DaliStreamError, match=said):
        prepared(root, tmp_path / "out", codec="h264")
    assert not (tmp_path / "out/meta/info.json").exists()
    assert not list((tmp_path / "out").rglob("*.mp4"))


@pytest.mark.slow
def test_a_missing_program_is_named(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(tmp_path, monkeypatch, "if 'libx264' in arguments: sys.exit(\"Unknown encoder 'libx264'\")")
    assert "Unknown encoder" in failed(capsys, ["prepare", small, tmp_path / "out", *FAST], 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install ffmpeg" in failed(capsys, ["prepare", small, tmp_path / "out", *FAST], 1)
    assert not (tmp_path / "out/meta/prepare.json").exists()


@pytest.mark.parametrize(("gop", "told"), [(2, "-g 2 "), slow(1, "-g 250 -force_key_frames expr:1 ")])
def test_nvenc_is_called_with_its_own_settings(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gop: int, told: str
) -> None:
    log = stub(tmp_path, monkeypatch, "if 'hevc_nvenc' in arguments: sys.exit('no encode device')")
    with pytest.raises(DaliStreamError, match=r"hevc_nvenc .*no encode device"):
        prepared(small, tmp_path / "out", codec="hevc", encoder="nvenc", crf=19, gop=gop)
    assert f"-c:v hevc_nvenc -bf 0 -tag:v hvc1 {told}-preset p5 -rc vbr -cq 19" in " ".join(runs(log)[0])


@pytest.mark.slow
def test_a_damaged_episode_is_named_and_can_be_dropped(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    path = sorted((root / "videos" / SIDE).rglob("*.mp4"))[0]
    data = bytearray(path.read_bytes())
    middle = data.index(b"mdat") + 2000
    data[middle : middle + 700] = bytes(range(7, 107)) * 7
    path.write_bytes(data)
    report = prepare(root, tmp_path / "out", codec="h264", jobs=1)
    [(name, why)] = report.failed.items()
    assert SIDE in name
    assert str(path) in why
    assert sorted(p.parts[-3] for p in videos(tmp_path / "out")) == [TOP]  # the other files are written
    assert not (tmp_path / "out/meta/info.json").exists()
    kept = prepared(root, tmp_path / "kept", codec="h264", drop_broken=True)
    assert (kept.episodes, list(kept.dropped)) == (1, ["0"])
    assert "damaged" in kept.dropped["0"]
    assert json.loads((tmp_path / "kept/meta/prepare.json").read_text())["plan"]["dropped"] == kept.dropped
    assert Dataset(tmp_path / "kept").num_frames == Dataset(small).lengths[1]
    shutil.copy(small / path.relative_to(root), path)
    assert prepared(root, tmp_path / "out", codec="h264").written == 1  # it continues

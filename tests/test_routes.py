"""The decoder that a camera gets, and what happens when a file in the middle of a run does not suit that decoder."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
import torch
from support import videos as video_data
from support.datasets import TOP, copied
from support.opened import open_all
from support.routes import DECODES, let_nvdec_answer
from support.slow import slow_after
from support.tools import table_of

import dali_stream
from dali_stream.cache.indices import IndexCache
from dali_stream.decode import capability as capability_module
from dali_stream.decode import dali, refusal, route
from dali_stream.decode.capability import Capability, DriverError
from dali_stream.decode.torchcodec import decode as decode_on_cpu
from dali_stream.decode.trial import trial
from dali_stream.mp4.boxes import box
from dali_stream.mp4.format import PROFILES, VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.observe.counters import Counters
from dali_stream.storage import Store, open_store

H264 = VideoFormat("h264", 100, "420", 8, 480, 640)
AV1 = VideoFormat("av1", 0, "420", 8, 480, 640)


@pytest.fixture(autouse=True)
def torchcodec_for_nvdec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed torchcodec one that may decode on NVDEC."""
    monkeypatch.setattr("dali_stream.decode.torchcodec_cuda.unavailable", lambda gpu: "")


def dali_refusal(video: VideoFormat, index: VideoIndex, store: Store) -> str:
    """Why `decode="dali"` does not decode a file on a GPU. Empty if it does."""
    try:
        found = route.choose("dali", 0, 8, video, index, store)
    except ValueError as error:
        return str(error)
    assert found.decoder == "dali"
    return ""


@pytest.fixture
def vp9_copy(written: Callable[..., Path], tmp_path: Path) -> Path:
    """Four episodes of VP9, which DALI decodes on a CPU, in a folder of the test's own."""
    return copied(written(episodes=4, size=(128, 160), codec="vp9", gop=12), tmp_path)


@pytest.fixture
def mixed(h264_demo: Path, vp9_copy: Path) -> Path:
    """A dataset of VP9 whose last file of the top camera is H.264. On a CPU, DALI decodes only VP9."""
    root = vp9_copy
    *_, last = sorted((root / "videos" / TOP).glob("*/*.mp4"))
    assert not last.name.endswith("-000.mp4")  # the first is still VP9
    last.write_bytes((h264_demo / last.relative_to(root)).read_bytes())
    return root


FIRST = f"videos/{TOP}/chunk-000/file-000.mp4"


@pytest.fixture
def store(h264_demo: Path) -> Store:
    return open_store(str(h264_demo))


@pytest.fixture
def closed(store: Store) -> VideoIndex:
    return read_index(store, FIRST)


def test_a_gpu_that_decodes_the_video_gets_it(monkeypatch: pytest.MonkeyPatch, closed: VideoIndex, store: Store) -> None:
    let_nvdec_answer(monkeypatch)
    found = route.choose("dali", 0, 8, H264, closed, store)
    assert found == route.Route("dali", "NVDEC decodes h264 420 8 bit of 480×640")


@pytest.mark.parametrize(
    ("engines", "height", "width", "worth"),
    [(7, 480, 640, 28), (1, 480, 640, 4), (7, 128, 160, 28), (7, 1080, 1920, 189), (2, 720, 1280, 24)],
)
def test_auto_takes_nvdec_unless_there_are_many_threads_per_engine(
    engines: int, height: int, width: int, worth: int, monkeypatch: pytest.MonkeyPatch, closed: VideoIndex, store: Store
) -> None:
    """Large frames are slower on the CPU. By facts alone, so that all ranks choose the same."""
    let_nvdec_answer(monkeypatch, dataclasses.replace(DECODES, engines=engines))
    video, name = dataclasses.replace(H264, height=height, width=width), f"h264 420 8 bit of {height}×{width}"
    with_engines = f"{name} with {engines} engine{'s' * (engines > 1)}, worth about {worth} threads, and num_threads is"
    for threads, expected in (
        (worth, route.Route("torchcodec-cuda", f"NVDEC decodes {with_engines} {worth}")),
        (worth + 1, route.Route("torchcodec", f"NVDEC would decode {with_engines} {worth + 1}")),
    ):
        assert route.choose("auto", 0, threads, video, closed, store) == expected
    assert route.choose("torchcodec-cuda", 0, worth + 1, video, closed, store).decoder == "torchcodec-cuda"


def test_auto_says_what_to_install_where_torchcodec_must_not_use_nvdec(
    monkeypatch: pytest.MonkeyPatch, closed: VideoIndex, store: Store
) -> None:
    """Only `decode="dali"` decodes on NVDEC then. Files that NVDEC does not decode have their own reason."""
    let_nvdec_answer(monkeypatch)
    why = "on NVDEC, torchcodec must be 0.17 or later"
    monkeypatch.setattr("dali_stream.decode.torchcodec_cuda.unavailable", lambda gpu: why)
    assert route.choose("auto", 0, 4, H264, closed, store) == route.Route("torchcodec", why)
    assert route.choose("dali", 0, 8, H264, closed, store).decoder == "dali"
    let_nvdec_answer(monkeypatch, Capability(False, "no decoder"))
    assert route.choose("auto", 0, 4, H264, closed, store) == route.Route("torchcodec", "no decoder")


def test_a_gpu_without_the_decoder_leaves_it_to_torchcodec(
    monkeypatch: pytest.MonkeyPatch, closed: VideoIndex, store: Store
) -> None:
    let_nvdec_answer(monkeypatch, Capability(False, "this GPU has no NVDEC decoder for av1 420 8 bit"))
    assert route.choose("auto", 0, 4, AV1, closed, store) == dali_stream.types.Route(
        "torchcodec", "this GPU has no NVDEC decoder for av1 420 8 bit"
    )
    with pytest.raises(ValueError, match="no NVDEC decoder for av1"):
        route.choose("dali", 0, 8, AV1, closed, store)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (((48, 48), (400, 4096), 65536), "480×640 is outside what NVDEC takes, 48×48 to 400×4096"),
        (((48, 48), (4096, 4096), 1000), "480×640 has 1200 macroblocks and NVDEC takes up to 1000"),
    ],
)
def test_sizes_that_nvdec_does_not_take(
    limits: tuple, reason: str, monkeypatch: pytest.MonkeyPatch, closed: VideoIndex, store: Store
) -> None:
    let_nvdec_answer(monkeypatch, Capability(True, "", 1, *limits))
    assert route.choose("auto", 0, 4, H264, closed, store).reason == reason


@pytest.mark.parametrize(
    ("video", "table", "reason"),
    [
        ({"matrix": 1}, {}, "BT.709"),
        ({"matrix": 7}, {}, "of matrix 7"),
        ({"profile": 244}, {}, "h264 of profile 244"),
        ({"codec": "hevc", "profile": 4}, {}, "hevc of profile 4"),
        ({"chroma": "422"}, {}, "h264 422 8 bit"),
        ({"depth": 10}, {}, "h264 420 10 bit"),
        ({"height": 360}, {}, "360×640 is coded as 368×640 in h264"),
        ({"width": 326}, {}, "480×326 is coded as 480×336 in h264"),
        ({"height": 1080, "width": 1920}, {}, "`dali-stream prepare URI OUT --codec hevc` re-encodes the dataset for NVDEC"),
        ({"codec": "mpeg4", "profile": None, "height": 360}, {}, "`dali-stream prepare URI OUT --codec hevc`"),
        ({"codec": "hevc", "profile": 1, "height": 362}, {}, "362×640 is coded as 368×640 in hevc"),
        ({}, {"open_gops": True}, "open GOPs"),
        ({}, {"configs": (b"a", b"b")}, "2 sample descriptions"),
        ({}, {"track_header": bytes(44)}, "rotated frames"),
    ],
)
def test_what_dali_would_get_wrong_on_a_gpu_is_refused(
    video: dict, table: dict, reason: str, monkeypatch: pytest.MonkeyPatch, closed: VideoIndex, store: Store
) -> None:
    let_nvdec_answer(monkeypatch)
    refused = dali_refusal(dataclasses.replace(H264, **video), dataclasses.replace(closed, **table), store)
    assert refused.startswith('decode="dali": ')
    assert reason in refused


@pytest.mark.parametrize(
    ("codec", "height", "width"), [("h264", 368, 640), ("hevc", 360, 640), ("hevc", 1080, 1920), ("av1", 242, 326)]
)
def test_sizes_that_are_coded_as_they_are_shown_go_to_nvdec(
    codec: str, height: int, width: int, monkeypatch: pytest.MonkeyPatch, closed: VideoIndex, store: Store
) -> None:
    let_nvdec_answer(monkeypatch)
    video = VideoFormat(codec, PROFILES[codec][-1], "420", 8, height, width)
    assert not refusal.refusal(0, video, closed)
    assert not refusal.refusal(None, dataclasses.replace(video, codec="vp9", height=362), closed)  # only NVDEC needs it


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "gop", "hides"), [("av1", 30, True), ("av1", 2, False), ("vp9", 12, False)])
def test_hidden_frames_are_kept_from_nvdec(
    codec: str, gop: int, hides: bool, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file's first frames at the start, and of each clip: where only later ones have some, the route changes."""
    let_nvdec_answer(monkeypatch)
    kind = {} if (codec, gop) == ("av1", 2) else {"codec": codec, "gop": gop}
    dataset = dali_stream.Dataset(written(episodes=2, size=(128, 160) if codec == "vp9" else (120, 128), **kind))
    table = read_index(dataset.data_store, FIRST)
    refused = dali_refusal(describe(table.configs[0]), table, dataset.data_store)
    assert (f"{codec} with hidden frames" in refused) == hides
    assert hides or not refused

    clips = packed(dataset, TOP, 0, np.array([0, 1, 0, 1]), np.array([[3], [20], [40], [29]]))
    if not hides:
        assert all(clip.frames.size == 1 for clip in clips.packed)
        return
    with pytest.raises(
        dali_stream.DecodeError,
        match=rf"{TOP}: episode \d, frame \d+: .*{FIRST}: av1 with hidden frames: .* packet at byte \d+ has hidden frames",
    ):
        next(task for task in clips.tasks if task.exception()).result()


def packed(dataset: dali_stream.Dataset, key: str, gpu: int | None, episode: np.ndarray, frame: np.ndarray) -> dali.Clips:
    """The clips of a batch: frames (B, T) of episodes (B,)."""
    camera = dali.DaliDecoder(dataset.source, key, Counters(), gpu, (128, 160), None, False)
    episodes, opened = open_all(dataset)
    packets = np.stack([opened[e].cameras[key].packet[f] for e, f in zip(episode.tolist(), frame, strict=True)])
    with ThreadPoolExecutor(2) as pool:
        step = SimpleNamespace(packets={key: packets}, shown_in_episode={key: frame}, samples=SimpleNamespace(episode=episode))
        return camera.start(pool, step, episodes, dataset.data_store)


MARKED_AS_709 = ("-bsf:v", "h264_metadata=matrix_coefficients=1")  # no colr box
X265 = (*video_data.X265, "-pix_fmt", "yuv420p", "-x265-params")
CLOSED = "keyint=2:open-gop=0:bframes=0:log-level=none:min-cu-size="
FILES: dict[str, tuple[tuple[int, int], tuple[str, ...], str]] = {  # size, encoder, why the route refuses it
    "h264": ((128, 160), video_data.h264(12), ""),
    "h264 without IDR frames": ((128, 160), video_data.h264_without_idr(), "h264 with keyframes that are not IDR frames: they"),
    "h264, interlaced": ((128, 160), (*video_data.h264(12), "-flags", "+ildct+ilme", "-top", "1"), "interlaced h264 right"),
    "h264, BT.709 in the VUI": ((128, 160), (*video_data.h264(12), *MARKED_AS_709), "the colours are those of BT.709"),
    "hevc, blocks of 8": ((360, 640), (*X265, f"{CLOSED}8"), ""),
    "hevc, blocks of 16": ((360, 640), (*X265, f"{CLOSED}16"), "360×640 is coded as 368×640 in hevc"),
    "hevc, blocks of 32": ((360, 640), (*X265, f"{CLOSED}32"), "360×640 is coded as 384×640 in hevc"),
    "hevc, blocks of 16, 720 lines": ((720, 320), (*X265, f"{CLOSED}16"), ""),
    "hevc, blocks of 32, 720 lines": ((720, 320), (*X265, f"{CLOSED}32"), "720×320 is coded as 736×320 in hevc"),
    "hevc with CRA frames": ((128, 160), (*X265, f"{CLOSED}8:open-gop=1"), "hevc with keyframes that are not IDR frames: they"),
    "av1": ((122, 150), video_data.av1(2), ""),
    "av1 of odd size": (
        (121, 151), ("-c:v", "libaom-av1", "-cpu-used", "8", "-g", "1", "-pix_fmt", "yuv420p"), "even sizes, and not of 121×"
    ),
    "vp9": ((122, 150), video_data.vp9(12), ""),
    "vp9 of odd size": ((122, 151), video_data.vp9(12), "even sizes, and not of 122×151"),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(4, FILES))
def test_the_route_goes_by_the_headers_of_a_file(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size, arguments, reason = FILES[name]
    let_nvdec_answer(monkeypatch)
    path = video_data.encode(video_data.draw((16,), size=size), tmp_path / "video.mp4", arguments)
    table, video = table_of(path)
    assert not table.open_gops
    refused = dali_refusal(video, table, open_store(str(tmp_path)))
    assert reason in refused
    assert bool(reason) == bool(refused)


def test_a_video_of_an_old_encoder_is_kept_from_nvdec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVDEC decodes it as if its encoder had no error."""
    let_nvdec_answer(monkeypatch)
    new, store = video_data.encode(video_data.draw(), tmp_path / "new.mp4", video_data.lossless(12)), open_store(str(tmp_path))
    table, video = table_of(video_data.of_x264(new, tmp_path / "old.mp4", 148))
    reason = "h264 of an encoder whose errors FFmpeg undoes, and NVDEC does not"
    assert refusal.refusal_of_torchcodec(0, video, table) == refusal.refusal(0, video, table) == reason
    assert route.choose("auto", 0, 4, video, table, store) == route.Route("torchcodec", reason)
    for decode in ("torchcodec-cuda", "dali"):
        with pytest.raises(ValueError, match=reason):
            route.choose(decode, 0, 8, video, table, store)
    assert not refusal.refusal_of_torchcodec(0, *table_of(new)[::-1])


def test_av1_that_declares_other_lines_than_it_codes_is_kept_from_nvdec(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As av1_nvenc does for 1080 lines: the sample description has 1088."""
    let_nvdec_answer(monkeypatch)
    path = video_data.encode(video_data.draw((2,), size=(1080, 1920)), tmp_path / "video.mp4", video_data.av1(2))
    store = open_store(str(tmp_path))
    for declared in (1080, 1088):
        content = path.read_bytes()
        at = content.index(struct.pack(">HH", 1920, 1080), content.index(b"av01", content.index(b"stsd")))
        path.write_bytes(content[:at] + struct.pack(">HH", 1920, declared) + content[at + 4 :])
        table, video = table_of(path)
        refused = dali_refusal(video, table, store)
        assert bool(refused) == (declared == 1088)
    assert "its bitstream must have frames of 1088×1920, as its sample description says, got 1080×1920" in refused


def test_a_later_file_without_idr_frames_moves_its_camera(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found in the clip itself, since nothing of a later file is looked at before it is needed."""
    let_nvdec_answer(monkeypatch)
    files = [
        video_data.encode(video_data.draw((40,), first=episode), tmp_path / f"{episode}.mp4", arguments)
        for episode, arguments in enumerate((video_data.h264(12), video_data.h264_without_idr()))
    ]
    dataset = dali_stream.Dataset(video_data.write_dataset(tmp_path / "set", files, [[40], [40]]))
    clips = packed(dataset, video_data.CAMERA, 0, np.array([0, 0, 1, 1]), np.array([[3, 20], [30, 30], [3, 5], [3, 20]]))
    *sound, error = [task.exception() for task in clips.tasks]
    assert sound == [None, None, None]  # the last of these is within the first GOP, which begins with an IDR frame
    assert isinstance(error, dali_stream.DecodeError)
    assert re.search(
        r"1\.mp4: h264 .* not IDR frames: they do not reset the decoder, .* \(the keyframe at byte \d+\)", str(error)
    )


def test_the_colours_that_a_file_names_are_read() -> None:
    colour = box(b"colr", b"nclx", bytes([0, 1, 0, 1, 0, 1, 0]))
    entry = bytes(24) + struct.pack(">HH", 640, 480) + bytes(50)
    assert describe(box(b"avc1", entry, colour)).matrix == 1
    assert describe(box(b"avc1", entry)).matrix is None


_COLR = ("-movflags", "write_colr", "-color_primaries", "bt709", "-color_trc", "bt709")  # without these, no box is written


@pytest.mark.parametrize(
    ("options", "boxes", "said"),
    [
        ((), (), ""),
        ((), ("-colorspace", "smpte170m", "-color_range", "tv"), ""),
        ((), ("-colorspace", "bt709"), "the colours are those of BT.709 according to the file"),
        ((), ("-colorspace", "bt470bg", "-color_range", "pc"), "the colours are those of the full range according to the file"),
        (("colormatrix=bt709",), ("-colorspace", "bt709"), ""),
        (("colormatrix=bt709", "fullrange=on"), ("-colorspace", "bt709", "-color_range", "pc"), ""),
        (("colormatrix=smpte240m",), (), "the colours are those of matrix 7, and torchcodec converts them as BT.601"),
    ],
)
def test_colours_that_nvdec_cannot_know_are_decoded_on_the_cpu(
    options: tuple[str, ...], boxes: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FFmpeg follows the boxes of a file, and NVDEC only gets the bitstream."""
    let_nvdec_answer(monkeypatch)
    plain = (
        "-c:v",
        "libx264",
        "-pix_fmt",
        "yuv420p",
        "-bf",
        "0",
        "-g",
        "2",
        "-x264-params",
        ":".join(("scenecut=0", *options)),
    )
    video_data.encode(video_data.draw(), tmp_path / "bitstream.mp4", plain)
    if boxes:
        video_data.ffmpeg("-i", tmp_path / "bitstream.mp4", "-c", "copy", *boxes, "-movflags", "write_colr", tmp_path / "v.mp4")
    else:
        (tmp_path / "bitstream.mp4").rename(tmp_path / "v.mp4")
    store = open_store(str(tmp_path))
    table = read_index(store, "v.mp4")
    found = refusal.refusal_of_torchcodec(0, table.format(), table, store)
    assert found.startswith(said) if said else found == ""
    if "file" in said:
        on_dali = refusal.refusal_of_file(0, table.format(), table, store)
        assert on_dali == found or "DALI converts all as BT.601" in on_dali


def test_the_boxes_of_a_file_change_the_colours_on_the_cpu(tmp_path: Path) -> None:
    """The reason for the refusals above."""
    video_data.encode(video_data.draw(), tmp_path / "bitstream.mp4", ("-c:v", "libx264", "-bf", "0", "-g", "2"))
    video_data.ffmpeg("-i", tmp_path / "bitstream.mp4", "-c", "copy", *_COLR, "-colorspace", "bt709", tmp_path / "boxes.mp4")
    store, frames = open_store(str(tmp_path)), []
    for name in ("bitstream.mp4", "boxes.mp4"):
        table = read_index(store, name)
        frames.append(decode_on_cpu(store, [table], [0], table.format())[0].astype(int))
    assert np.abs(frames[0] - frames[1]).mean() > 1


def test_torchcodec_is_taken_when_asked_for(closed: VideoIndex, store: Store) -> None:
    assert route.choose("torchcodec", 0, 8, H264, closed, store).decoder == "torchcodec"


def test_what_dali_delivers_is_held_against_ffmpeg_before_a_camera_gets_it(
    vp9_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = dali.decode
    wrong = {
        "first frames must differ from FFmpeg's by at most": lambda *given: [np.flip(frames, -1) for frames in decode(*given)],
        "frames must have shape": lambda *given: [frames[:, 1:] for frames in decode(*given)],
    }
    for said, delivers in wrong.items():
        monkeypatch.setattr(dali, "decode", delivers)
        with pytest.raises(ValueError, match=f'decode="dali": .*{said}.*Use decode="auto"'):
            dali_stream.Loader(vp9_demo, batch_size=8, decode="dali")


def test_a_gpu_decodes_what_passes_the_trial(h264_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial comes after all other conditions, and before the decoder is used."""
    let_nvdec_answer(monkeypatch)
    monkeypatch.setattr(route, "capabilities", lambda _: {})
    dataset, refused, tried = dali_stream.Dataset(h264_demo), "", []
    monkeypatch.setattr("dali_stream.decode.trial.trial", lambda decoder, *_: tried.append(decoder) or refused)

    def routes(decode: str, threads: int = 4) -> dict[str, str]:
        chosen = route.choose_routes(dataset.source, IndexCache(dataset.source), decode, 0, threads)
        return {found.decoder: found.reason for found in chosen.values()}

    reason = "NVDEC decodes h264 420 8 bit of 128×160"
    assert routes("dali") == {"dali": reason}
    threads = f"{reason} with 1 engine, worth about 4 threads, and num_threads is"
    assert routes("auto") == {"torchcodec-cuda": f"{threads} 4"}
    assert tried == ["dali"] * 2 + ["torchcodec-cuda"] * 2
    refused = "the first frames must differ"
    assert routes("auto") == {"torchcodec": refused}
    with pytest.raises(ValueError, match=f'^{TOP}: decode="dali": {refused}. Use decode="auto"'):
        routes("dali")
    tried.clear()
    assert list(routes("torchcodec")) == ["torchcodec"]
    assert list(routes("auto", 5)) == ["torchcodec"]
    let_nvdec_answer(monkeypatch, Capability(False, "no decoder"))
    assert routes("auto") == {"torchcodec": "no decoder"}
    assert tried == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("host")])
def test_auto_takes_the_cpu_if_nvdec_cannot_be_tried(
    error: Exception, h264_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise error

    let_nvdec_answer(monkeypatch)
    monkeypatch.setattr(route, "capabilities", lambda _: {})
    monkeypatch.setattr("dali_stream.decode.trial.trial", fail)
    dataset = dali_stream.Dataset(h264_demo)
    chosen = route.choose_routes(dataset.source, IndexCache(dataset.source), "auto", 0, 4)
    assert {found.decoder for found in chosen.values()} == {"torchcodec"}
    assert all(str(error) in found.reason for found in chosen.values())


def test_torchcodec_is_not_used_on_nvdec_for_keyframes_that_are_not_idr_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 of 192 frames of such a video were of another frame on an H100."""
    let_nvdec_answer(monkeypatch)
    path = video_data.encode(video_data.draw(), tmp_path / "video.mp4", video_data.h264_without_idr())
    table, video = table_of(path)
    with pytest.raises(ValueError, match=r'^decode="torchcodec-cuda": .*(IDR|open GOPs)'):
        route.choose("torchcodec-cuda", 0, 8, video, table, open_store(str(tmp_path)))


def test_the_trial_decodes_a_clip_that_begins_at_a_later_keyframe(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here DALI delivers that one wrong; in H.264 without IDR frames, NVDEC would deliver nothing."""
    dataset = dali_stream.Dataset(vp9_demo)
    table = read_index(dataset.data_store, FIRST)
    video, decode = describe(table.configs[0]), dali.decode
    assert trial("dali", dataset.data_store, table, video, None) == ""

    def wrong(clips: list, *options: object) -> list[np.ndarray]:
        first, later = decode(clips, *options)
        return [first, np.flip(later, -1)]

    monkeypatch.setattr(dali, "decode", wrong)
    assert "first frames must differ from FFmpeg's by at most" in trial("dali", dataset.data_store, table, video, None)
    monkeypatch.setattr(dali, "decode", lambda *arguments: [frames[:, 2:] for frames in decode(*arguments)])
    found = trial("dali", dataset.data_store, table, video, None)
    assert "first frames must have shape (128, 160, 3), got (126, 160, 3)" in found


def test_the_trial_names_keyframes_that_are_not_idr_frames(tmp_path: Path) -> None:
    path = video_data.encode(video_data.draw(), tmp_path / "video.mp4", video_data.h264_without_idr())
    table, video = table_of(path)
    assert trial("dali", open_store(str(tmp_path)), table, video, 0).startswith(
        "h264 with keyframes that are not IDR frames: they do not reset the decoder"
    )


def test_colours_that_only_the_frames_name_are_kept_from_nvdec(tmp_path: Path) -> None:
    marked = ("-bsf:v", "vp9_metadata=color_space=bt709")  # the headers in a sample description of VP9 are not read
    video_data.encode(video_data.draw(), tmp_path / "video.mp4", (*video_data.vp9(12), *marked))
    store = open_store(str(tmp_path))
    table = read_index(store, "video.mp4")
    found = describe(table.configs[0])
    assert found.matrix is None
    assert trial("dali", store, table, found, 0) == (
        "its frames say that their colours are bt709, and DALI converts all as BT.601 on a GPU"
    )
    assert trial("torchcodec-cuda", store, table, found, 0) == (
        "its frames say that their colours are bt709, and NVDEC may not know the colours of vp9"
    )


@pytest.mark.slow
def test_a_decoder_that_breaks_is_an_error_that_names_the_camera(vp9_copy: Path) -> None:
    """One keyframe that looks whole and that DALI's decoder fails at. DALI's error names no camera, and breaks the pipeline."""
    root = vp9_copy
    *_, last = sorted((root / "videos" / TOP).glob("*/*.mp4"))
    table = read_index(dali_stream.storage.open_store(str(root)), str(last.relative_to(root)))
    data, sync = bytearray(last.read_bytes()), int(table.keyframes[3])
    start = int(table.offset[sync]) + 12
    data[start : start + 28] = bytes(range(100, 128))
    last.write_bytes(data)
    arguments = {"batch_size": 8, "shuffle": False, "last_batch": "partial", "image_dtype": "uint8"}
    with (
        dali_stream.Loader(root, **arguments, decode="dali") as loader,
        pytest.raises(
            dali_stream.DecodeError,
            match=rf"{TOP}: episode \d+, frame \d+: .*: DALI's video decoder failed: .*\. Use decode=\"auto\"",
        ),
    ):
        list(loader)


@pytest.mark.slow
def test_dali_alone_refuses_such_a_file(mixed: Path) -> None:
    message = r"file-\d+\.mp4: DALI decodes only vp8, vp9, mjpeg on a CPU, and not h264"
    with (
        dali_stream.Loader(mixed, batch_size=8, shuffle=False, decode="dali") as loader,
        pytest.raises(dali_stream.DecodeError, match=message),
    ):
        list(loader)


def test_a_driver_that_does_not_tell_what_nvdec_decodes_is_a_warning_once(
    h264_demo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capabilities(gpu: int) -> NoReturn:
        raise DriverError("the driver answers 100 when asked what NVDEC decodes", "start the container with --gpus all", 100)

    for module in (capability_module, route):
        monkeypatch.setattr(module, "capabilities", capabilities)
    route._warn_without_nvdec.cache_clear()
    dataset = dali_stream.Dataset(h264_demo)
    for _ in range(2):
        routes = route.choose_routes(dataset.source, IndexCache(dataset.source), "auto", 0, 8)
        assert {found.decoder for found in routes.values()} == {"torchcodec"}
        assert all("--gpus all" in found.reason for found in routes.values())
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("The CPU decodes all videos, although GPU 0 is used: the driver answers 100")
    assert "--gpus all" in warning


@pytest.mark.parametrize(
    ("num_threads", "engines", "cameras", "expected"),
    [(192, 7, 3, 7), (192, 7, 1, 21), (4, 7, 1, 4), (16, 1, 1, 3), (16, 1, 4, 1)],
)
def test_nvdec_gets_a_few_sessions_per_engine(num_threads: int, engines: int, cameras: int, expected: int) -> None:
    """All cameras together, so that none has to be opened again."""
    assert dali.decode_threads(num_threads, engines, cameras) == expected
    assert cameras == 1 or expected == 1 or expected * cameras <= 3 * engines

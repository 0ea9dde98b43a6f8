"""The frame delivered is the frame asked for: every codec, GOP structure and file layout, bit for bit against a plain
sequential decode, and by the stamp in the frame."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import videos as data
from support.slow import slow, slow_after
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

from dali_stream import Dataset
from dali_stream.mp4.hidden import hidden_frames
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore
from dali_stream.tools.description import describe

STEPS = (-5, 0, 2, 2, -1, 0)  # out of order, with repeats, over the edges of GOPs and of the episode

CODECS = {
    "av1-2": data.av1(2),
    "av1-30-hidden": data.av1(30),
    **{f"h264-{gop}": data.h264(gop) for gop in (1, 2, 12, 30, 250)},
    **{f"h264-open-{gop}": data.h264(gop, open_gop=True) for gop in (2, 12, 30, 250)},
    **{f"hevc-{gop}": data.hevc(gop) for gop in (1, 2, 12, 30, 250)},
    **{f"hevc-open-{gop}": data.hevc(gop, open_gop=True) for gop in (2, 12, 30, 250)},
    "vp9-12": data.vp9(12),
    "vp9-12-hidden": data.vp9(12, hidden=True),
    "vp9-30-hidden": data.vp9(30, hidden=True),
    "h264-13-no-idr": data.h264_without_idr(),
    "h264-intra-refresh": (*data.h264(12), "-x264-params", "intra-refresh=1:keyint=12:bframes=0"),
    "mpeg4-12": data.mpeg4(12),
    "mpeg4-12-b": data.mpeg4(12, b_frames=2),
    "h264-10bit": data.h264(12, pixels="yuv420p10le"),
    "h264-422": data.h264(12, pixels="yuv422p"),
    "h264-444": data.h264(12, pixels="yuv444p"),
    "hevc-10bit-open": data.hevc(12, open_gop=True, pixels="yuv420p10le"),
    "hevc-444": data.hevc(12, pixels="yuv444p"),
    "av1-10bit": data.av1(12, pixels="yuv420p10le"),
    "vp9-10bit": data.vp9(12, pixels="yuv420p10le"),
    "vp9-444": data.vp9(12, pixels="yuv444p"),
    "mjpeg": ("-c:v", "mjpeg", "-q:v", "3", "-pix_fmt", "yuvj420p"),
    "png": ("-c:v", "png", "-pix_fmt", "rgb24"),
}


# Files whose first packet names an encoder whose errors FFmpeg undoes.
OLD_ENCODERS: dict[str, Callable[[Path], Path]] = {
    "x264": lambda folder: data.of_x264(
        data.encode(data.draw(), folder / "new.mp4", data.lossless(12)), folder / "video.mp4", 148
    ),
    "Xvid": lambda folder: data.with_packets(
        data.encode(data.draw(), folder / "new.mp4", (*data.mpeg4(12), "-flags", "+qpel")),
        folder / "video.mp4",
        lambda packets: [b"\0\0\1\xb2XviD0001" + packets[0], *packets[1:]],
    ),
}


@pytest.mark.parametrize("name", OLD_ENCODERS)
def test_every_frame_of_an_old_encoder_is_that_of_the_whole_file(name: str, tmp_path: Path) -> None:
    """The pixels of a frame do not depend on what shares its batch, its clip or its place in the frame cache."""
    video = OLD_ENCODERS[name](tmp_path)
    root = data.write_dataset(tmp_path / "set", [video])
    check_identity(root, [video])
    truth = data.whole_file(video)
    for batch_size in (16, 1):
        with data.loader(root, batch_size=batch_size, frame_cache=str(tmp_path / "frames"), seed=batch_size) as loader:
            shown = {(e, f): picture for e, f, picture in data.samples(loader)}
            assert (loader.stats()["decoded_frames"] == 0) == (batch_size == 1)
        assert [key for key, frame in zip(sorted(shown), truth, strict=True) if not shown[key].equal(frame)] == []


# The fast tests have GOPs of 1 and 12 frames, open GOPs, and one GOP for the whole file; each codec; 10 bit, 4:2:2 and 4:4:4.
_FAST = (
    "av1-2", "av1-30-hidden", "h264-1", "h264-12", "h264-open-12", "hevc-open-12", "hevc-250", "vp9-12-hidden", "mpeg4-12-b",
    "h264-422", "hevc-444", "av1-10bit",
)  # fmt: skip


@pytest.mark.parametrize("name", [n if n in _FAST else slow(n) for n in CODECS])
def test_every_frame_of_every_codec_is_the_frame_asked_for(name: str, tmp_path: Path) -> None:
    video = data.encode(data.draw(), tmp_path / "video.mp4", CODECS[name])
    if "hidden" in name:
        assert has_hidden_frames(video)
    check_identity(data.write_dataset(tmp_path / "set", [video]), [video])


def has_hidden_frames(video: Path) -> bool:
    """VP9 lists the frames of a packet at its end. AV1 displays a previously hidden frame with a packet of a few bytes."""
    table, encoded = read_index(LocalStore(str(video.parent)), video.name), video.read_bytes()
    last = [encoded[end - 1] & 0xE0 for end in table.end[:].tolist()]
    return 0xC0 in last if b"vp09" in encoded else int(table.size().min()) < 8


@pytest.mark.parametrize(
    ("arguments", "traits", "hides"),
    [
        slow(data.h264(12, open_gop=True), ("h264", True, True, 15), False),
        (data.hevc(12), ("hevc", False, True, 12), False),
        (data.av1(2), ("av1", False, False, 2), False),
        (data.av1(30), ("av1", False, False, 30), True),
        slow(data.vp9(12), ("vp9", False, False, 12), False),
    ],
    ids=["h264 open", "hevc", "av1 2", "av1 30", "vp9"],
)
def test_what_a_cameras_video_is(
    arguments: tuple[str, ...], traits: tuple[str, bool, bool, int], hides: bool, tmp_path: Path
) -> None:
    """Hidden frames against what is known of the encoders: SVT-AV1 has them at GOP 30 and not at 2."""
    video = data.encode(data.draw(), tmp_path / "video.mp4", arguments)
    camera = describe(Dataset(data.write_dataset(tmp_path / "set", [video]))).cameras[data.CAMERA]
    assert (camera.codec, camera.open_gops, camera.b_frames, camera.gop_max) == traits
    assert (hidden_frames_in(video)[0] > 0) == hides


def hidden_frames_in(video: Path) -> tuple[int, int]:
    store = LocalStore(str(video.parent))
    index = read_index(store, video.name)
    return hidden_frames(store, index, index.format().codec)


@pytest.mark.parametrize(
    ("split", "arguments"),
    [
        ("av1_frame_split", data.av1(30)),
        slow("vp9_superframe_split", data.vp9(60, hidden=True)),
        # Profile 3, whose header has a bit more.
        slow("vp9_superframe_split", data.vp9(60, pixels="yuv444p10le", hidden=True)),
    ],
    ids=["av1", "vp9", "vp9 profile 3"],
)
def test_hidden_frames_are_those_that_ffmpeg_counts(split: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    """A sample shows one frame, so what FFmpeg's filters split samples into, beyond one each, is hidden."""
    video = data.encode(data.draw(), tmp_path / "video.mp4", arguments)
    command = ["ffmpeg", "-v", "error", "-i", video, "-c", "copy", "-bsf:v", split, "-f", "framecrc", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    frames = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    hidden, examined = hidden_frames_in(video)
    assert examined == data.FRAMES
    assert hidden == len(frames) - data.FRAMES > 0


LAYOUTS: dict[str, tuple[str, ...]] = {
    "index in front": (*data.h264(12), "-movflags", "+faststart"),
    "index at the end": data.h264(12),
    "no edit list, negative shifts": (*data.h264(12), "-movflags", "+negative_cts_offsets", "-use_editlist", "0"),
    "no edit list, so it begins late": (*data.h264(12), "-use_editlist", "0"),
    "a clock of milliseconds": (*data.h264(12), "-video_track_timescale", "1000"),
    "a clock of milliseconds, AV1": (*data.av1(12), "-video_track_timescale", "1000"),
    "parameter sets in band": (*data.X265, *data.hevc(12)[len(data.X265) :], "-tag:v", "hev1"),
    "QuickTime": (*data.h264(12), "-f", "mov"),
}


@pytest.mark.parametrize("name", slow_after(4, LAYOUTS))
def test_every_layout_of_a_file_leads_to_the_frame_asked_for(name: str, tmp_path: Path) -> None:
    video = data.encode(data.draw(), tmp_path / "video.mp4", LAYOUTS[name])
    delay = float(VideoDecoder(video).metadata.begin_stream_seconds)
    assert (delay > 0) == (name == "no edit list, so it begins late")
    check_identity(data.write_dataset(tmp_path / "set", [video], delay=delay), [video])


def test_an_audio_track_beside_the_video_is_left_alone(tmp_path: Path) -> None:
    sine = ("-f", "lavfi", "-i", f"sine=duration={data.FRAMES / data.FPS}")
    arguments = (*data.h264(12), "-c:a", "aac", "-map", "1:a", "-map", "0:v")
    video = data.encode(data.draw(), tmp_path / "video.mp4", arguments, *sine)
    assert [kind for kind, _ in data.box(data.boxes(video.read_bytes()), b"moov")[1]].count(b"trak") == 2
    check_identity(data.write_dataset(tmp_path / "set", [video]), [video])


def test_offsets_of_64_bits(tmp_path: Path) -> None:
    video = data.encode(data.draw(), tmp_path / "video.mp4", data.av1(2))
    tree = data.boxes(video.read_bytes())
    stco = data.box(tree, *data.STBL, b"stco")
    offsets = np.frombuffer(stco[1], ">u4", offset=8)
    stco[:] = [b"co64", stco[1][:8] + offsets.astype(">u8").tobytes()]
    video.write_bytes(data.unboxed(tree))
    check_identity(data.write_dataset(tmp_path / "set", [video]), [video])


@pytest.mark.parametrize("codec", ["h264", *map(slow, ("hevc", "av1"))])
def test_a_file_with_two_sample_descriptions_in_the_middle_of_an_episode(codec: str, tmp_path: Path) -> None:
    """As a concatenation leaves them. The windows of the second episode cross from one description to the other."""
    first, second = {
        "h264": (data.h264(12), (*data.h264(12), "-coder", "0")),  # CABAC, then CAVLC: no decoder reads one as the other
        "hevc": (data.hevc(12), (*data.hevc(12), "-x265-params", "keyint=12:open-gop=0:ctu=16:sao=0:log-level=none")),
        "av1": (data.av1(2), data.av1(12)),
    }[codec]
    frames = data.draw()
    a = data.encode(frames[:36], tmp_path / "a.mp4", first)
    b = data.encode(frames[36:], tmp_path / "b.mp4", second)
    video = tmp_path / "video.mp4"
    video.write_bytes(data.joined(a, b))
    table = read_index(LocalStore(str(tmp_path)), "video.mp4")
    assert len(table.configs) == 2
    delay = float(VideoDecoder(video).metadata.begin_stream_seconds)
    check_identity(data.write_dataset(tmp_path / "set", [video], delay=delay), [video])


def test_gops_that_begin_with_no_idr_frame_and_have_no_b_frames(tmp_path: Path) -> None:
    """x265 for low delay: CRA frames whose order counts are not reset, with no leading frames to tell them by."""
    video = data.encode(data.draw(), tmp_path / "video.mp4", (*data.X265, "-g", "6", "-tune", "zerolatency"))
    check_identity(data.write_dataset(tmp_path / "set", [video]), [video])


@pytest.mark.parametrize("codec", ["av1-2", "h264-12", *map(slow, ("hevc-12", "vp9-12", "mpeg4-12"))])
def test_sizes_that_are_no_multiple_of_a_block(codec: str, tmp_path: Path) -> None:
    size = (122, 150)
    video = data.encode(data.draw((20,), size=size), tmp_path / "video.mp4", CODECS[codec])
    check_identity(data.write_dataset(tmp_path / "set", [video], [(20,)], size=size), [video], ((20,),))


def test_vp9_through_dali(tmp_path: Path) -> None:
    """DALI rounds colours in its own way, so its frames are known by their stamps."""
    video = data.encode(data.draw(), tmp_path / "video.mp4", data.vp9(12))
    deltas = {data.CAMERA: [step / data.FPS for step in STEPS]}
    with data.loader(data.write_dataset(tmp_path / "set", [video]), decode="dali", delta_timestamps=deltas) as loader:
        assert loader.routes[data.CAMERA].decoder == "dali"
        found = {(e, f): data.identities(window) for e, f, window in data.samples(loader)}
        assert loader.routes[data.CAMERA].decoder == "dali"
    lengths = data.EPISODES
    assert len(found) == data.FRAMES
    for (e, f), shown in found.items():
        assert shown == [(e, min(max(f + step, 0), lengths[e] - 1)) for step in STEPS]


def check_identity(root: Path, files: list[Path], episodes: tuple[tuple[int, ...], ...] = (data.EPISODES,)) -> None:
    """Single frames and windows of a whole epoch against sequential decodes of the files."""
    truth = torch.cat([data.whole_file(path) for path in files])
    lengths = [length for held in episodes for length in held]
    assert len(truth) == sum(lengths)
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    with data.loader(root) as loader:
        found = {(e, f): picture for e, f, picture in data.samples(loader)}
    assert found.keys() == {(e, f) for e, length in enumerate(lengths) for f in range(length)}
    assert data.identities(torch.stack(list(found.values()))) == list(found)
    assert [key for key, picture in found.items() if not picture.equal(truth[first[key[0]] + key[1]])] == []
    deltas = {data.CAMERA: [step / data.FPS for step in STEPS]}
    wrong = []
    with data.loader(root, delta_timestamps=deltas, batch_size=8, seed=1) as loader:
        for episode, frame, window in data.samples(loader):
            steps = [min(max(frame + step, 0), lengths[episode] - 1) for step in STEPS]
            expected = truth[[first[episode] + step for step in steps]]
            wrong += [(episode, frame)] if not window.equal(expected) else []
    assert wrong == []

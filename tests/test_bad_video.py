"""Videos that are missing, cut short, of another kind than promised, or damaged: each is an error that says where.

Never a hang, and never a frame that is not the one asked for.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import videos as data
from support.broken import WHOLE, WHOLE_FILES, damage, hole, lost_bytes, other_keyframe, other_size, trimmed
from support.slow import slow

import dali_stream
from dali_stream.decode import torchcodec as decode
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore

FILE = data.VIDEO.format(data.CAMERA, 0)
CODECS = {
    "av1": data.av1(2),
    "h264": data.h264(12),
    "hevc": data.hevc(12),
    "vp9": data.vp9(12),
    "vp9-hidden": data.vp9(12, hidden=True),
    "mpeg4": data.mpeg4(12),
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Healthy videos by codec, made when they are first asked for."""
    folder = tmp_path_factory.mktemp("videos")

    def get(codec: str) -> Path:
        path = folder / f"{codec}.mp4"
        return path if path.exists() else data.encode(data.draw(), path, CODECS[codec])

    return get


@pytest.fixture
def broken(videos: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Makes a dataset around a changed copy of a healthy video."""

    def make(change: Callable[[bytes], bytes], codec: str = "h264", **options: object) -> Path:
        video = tmp_path / "video.mp4"
        video.write_bytes(change(videos(codec).read_bytes()))
        return data.write_dataset(tmp_path / "set", [video], **options)  # type: ignore[arg-type]

    return make


def error_of(root: Path | dali_stream.Dataset, **options: object) -> str:
    """Error message of an epoch. The test fails if the epoch raises no error or leaves a thread running."""
    with data.loader(root, **options) as loader, pytest.raises(dali_stream.DaliStreamError) as caught:
        for _ in loader:
            pass
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- whole files


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_file_that_is_no_whole_mp4(name: str, videos: Callable[[str], Path], tmp_path: Path) -> None:
    change, said = WHOLE_FILES[name]
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(change(videos("h264").read_bytes()))
    root = data.write_dataset(tmp_path / "set", [videos("h264"), bad], [data.EPISODES] * 2)
    message = error_of(root)
    assert re.search(said, message), message
    assert re.search(rf"^{data.CAMERA}: episode [23], frame [\d, ]+: .*{data.VIDEO.format(data.CAMERA, 1)}", message)
    with data.loader(root, on_error="substitute", batch_size=48) as loader:
        shown = list(data.samples(loader))
        assert loader.stats()["substituted"] == data.FRAMES
    assert data.identities(torch.stack([frame for *_, frame in shown])) == [(e, f) for e, f, _ in shown]


def test_a_first_file_that_is_no_mp4(broken: Callable[..., Path]) -> None:
    """The loader reads the file to choose the camera's route, before it has an episode to name."""
    assert re.search(rf"{FILE}: no moov box", error_of(broken(lambda _: b"")))


def test_a_missing_file(broken: Callable[..., Path]) -> None:
    root = broken(lambda video: video)
    (root / FILE).unlink()
    assert re.search(rf"{FILE}: no such file, but the dataset's metadata refers to it", error_of(root))


def test_episodes_leaves_out_a_missing_file_as_its_error_says(videos: Callable[[str], Path], tmp_path: Path) -> None:
    root = data.write_dataset(tmp_path / "set", [videos("h264")] * 2, [data.EPISODES] * 2)
    (root / data.VIDEO.format(data.CAMERA, 1)).unlink()
    message = error_of(root)
    assert re.search(
        rf"^{data.CAMERA}: episode [23], frame \d+: .*no such file.* Copy or fetch it again, or leave its", message
    )
    assert "its episodes out with episodes= (`dali-stream doctor URI` shows the missing files)" in message
    missing = dali_stream.tools.describe(dali_stream.Dataset(root)).missing  # which is what the doctor shows
    assert missing == (data.VIDEO.format(data.CAMERA, 1),)
    with data.loader(dali_stream.Dataset(root, episodes=[0, 1])) as loader:
        assert len(list(data.samples(loader))) == data.FRAMES


def test_a_truncated_file_with_its_index_in_front(videos: Callable[[str], Path], tmp_path: Path) -> None:
    video = tmp_path / "video.mp4"
    data.ffmpeg("-i", videos("h264"), "-c", "copy", "-movflags", "+faststart", video)
    video.write_bytes(video.read_bytes()[: int(video.stat().st_size * 0.6)])
    message = error_of(data.write_dataset(tmp_path / "set", [video]))
    assert re.search(rf"{FILE}.*truncated", message)


def test_a_file_that_becomes_shorter_while_it_is_read(broken: Callable[..., Path]) -> None:
    root = broken(lambda video: video, episodes=[(36, 36)])
    # Few batches are read ahead, so not the whole file.
    with data.loader(root, shuffle=False, batch_size=1, num_threads=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        size = (root / FILE).stat().st_size
        (root / FILE).write_bytes((root / FILE).read_bytes()[: size // 3])
        with pytest.raises(
            dali_stream.DecodeError, match=rf"episode \d, frame \d+: .*{FILE}.*shorter since its index was read"
        ):
            list(batches)


# -------------------------------------------------------------------------------------- not what the metadata says


def test_metadata_that_promises_frames_the_video_lacks(videos: Callable[[str], Path], tmp_path: Path) -> None:
    root = data.write_dataset(tmp_path / "set", [videos("av1")], [(40, 40)])
    assert "the file has 72 frames, and its episodes have 80 rows" in error_of(root)
    trusting = dali_stream.Dataset(root, trust_timestamps=True)
    message = error_of(trusting)
    first = data.FRAMES - 40
    assert int(re.search(rf"{data.CAMERA}: episode 1, frame (\d+): .*{FILE}.*shorter than its episode", message)[1]) >= first
    with data.loader(trusting, on_error="substitute") as loader:
        shown = [(e, f, data.identities(frame[None])[0]) for e, f, frame in data.samples(loader)]
        assert loader.stats()["substituted"] == 80 - data.FRAMES
    assert len(shown) == 80
    real = {(e, f) for e, length in enumerate((40, first)) for f in range(length)}
    assert all((e, f) in real for e, f, _ in shown)
    # The stamps count episodes of 31 and 41 frames, this metadata 40 and 40.
    assert all(40 * e + f == data.EPISODES[0] * stamped[0] + stamped[1] for e, f, stamped in shown)


@pytest.mark.parametrize("decoder", ["torchcodec", "dali"])
@pytest.mark.parametrize("offset", [1, -1])
def test_a_frame_of_another_episode_is_not_delivered(offset: int, decoder: str, broken: Callable[..., Path]) -> None:
    """Only the rows at an episode's edge reveal the offset, and counting. The middle episode has others on both sides."""
    lengths = (20, 20, 32)
    root = data.shifted(broken(lambda video: video, "vp9", episodes=[lengths]), offset)
    inner = dali_stream.Dataset(root, episodes=[1], frames={1: [(5, 15)]})
    assert "by counting it is frame number 25" in error_of(inner, decode=decoder, batch_size=1, shuffle=False)
    middle = dali_stream.Dataset(root, episodes=[1], trust_timestamps=True)
    message = error_of(middle, decode=decoder)
    frame, number, at = (19, 40, 40) if offset > 0 else (0, 19, 19)
    place = f"number {number} of {data.FRAMES}, is at {at / data.FPS:.4f} s, 0.0000 s away"
    assert message.startswith(f"{data.CAMERA}: episode 1, frame {frame}: ")
    assert f"from_timestamp 0.6667 s asks for {at / data.FPS:.4f} s of the file. The nearest frame, {place}" in message
    assert "outside its episode, which begins at 0.6667 s, and the next episode of the file begins at 1.3333 s" in message
    with data.loader(middle, on_error="substitute", decode=decoder) as loader:
        assert frame not in {f for _, f, _ in data.samples(loader)}
        assert loader.stats()["substituted"] == 1


def test_a_timestamp_between_two_frames_names_the_nearest(broken: Callable[..., Path]) -> None:
    message = error_of(data.shifted(broken(lambda video: video), 0.4), shuffle=False, batch_size=1)
    assert f"{data.CAMERA}: episode 0, frame 0: " in message
    assert "asks for 0.0133 s of the file. The nearest frame, number 0 of 72, is at 0.0000 s, 0.0133 s away" in message
    assert "at most 0.0083 s (a quarter of a frame) is allowed" in message


def test_a_coarse_clock_is_no_fault(videos: Callable[[str], Path], tmp_path: Path) -> None:
    """Milliseconds in the file, and in the metadata; and float32 in the rows."""
    video = tmp_path / "video.mp4"
    data.ffmpeg("-i", videos("h264"), "-c", "copy", "-video_track_timescale", "1000", video)
    root = data.write_dataset(tmp_path / "set", [video])
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    for name in ("from_timestamp", "to_timestamp"):
        at = table.column_names.index(f"videos/{data.CAMERA}/{name}")
        table = table.set_column(at, table.column_names[at], pa.array(table[at].to_numpy().round(3)))
    pq.write_table(table, path)
    with data.loader(root) as loader:
        shown = list(data.samples(loader))
    assert len(shown) == data.FRAMES
    assert data.identities(torch.stack([frame for *_, frame in shown])) == [(e, f) for e, f, _ in shown]


def test_frames_of_another_size_than_promised(broken: Callable[..., Path]) -> None:
    message = error_of(broken(lambda video: video, size=(96, 160)))
    assert re.search(rf"{data.CAMERA}: episode \d.*{FILE}.*frames must be 96×160.*got 128×160", message)


def test_a_frame_size_that_the_bitstream_contradicts(broken: Callable[..., Path]) -> None:
    """The sample description and info.json agree, and the encoded frames are larger."""

    message = error_of(broken(other_size, size=(96, 96)))
    assert re.search(rf"{data.CAMERA}: episode \d, frame \d+: .*{FILE}.*encoded frames must be 96×96.*got 128×160", message)


def test_several_video_tracks(videos: Callable[[str], Path], tmp_path: Path) -> None:
    video = tmp_path / "video.mp4"
    data.ffmpeg("-i", videos("h264"), "-map", "0:v", "-map", "0:v", "-c", "copy", video)
    assert re.search(
        rf"{FILE}: the file must have exactly one video track, got 2.*-map 0:v:0",
        error_of(data.write_dataset(tmp_path / "set", [video])),
    )


def test_only_sound(tmp_path: Path) -> None:
    video = tmp_path / "video.mp4"
    data.ffmpeg("-f", "lavfi", "-i", "sine=duration=1", "-c:a", "aac", video)
    assert re.search(
        rf"{FILE}: the file must have exactly one video track, got 0", error_of(data.write_dataset(tmp_path / "set", [video]))
    )


@pytest.mark.parametrize("codec", ["h264", "av1"])
@pytest.mark.parametrize("part", ["head", "tail"])
def test_an_edit_list_that_trims(codec: str, part: str, broken: Callable[..., Path]) -> None:
    """Rows after the last displayed frame have no frame. `test_edit_lists` has rows that agree with the edit list."""
    root = broken(lambda video: trimmed(video, part), codec)
    message = error_of(dali_stream.Dataset(root, trust_timestamps=True))
    shown = data.FRAMES - 5 if part == "head" else data.FRAMES // 2
    assert re.search(rf"the file has {shown} frames( \(.*\))?, and its episodes have 72 rows", error_of(root))
    assert re.search(rf"{FILE}: timestamp .* The nearest frame, number {shown - 1} of {shown}, is at", message)


def test_a_fragmented_file(videos: Callable[[str], Path], tmp_path: Path) -> None:
    video = tmp_path / "video.mp4"
    data.ffmpeg("-i", videos("h264"), "-c", "copy", "-movflags", "frag_keyframe+empty_moov", video)
    assert re.search(rf"{FILE}: fragmented MP4.*-c copy", error_of(data.write_dataset(tmp_path / "set", [video])))


@pytest.mark.parametrize("codec", ["av1", "h264", "hevc", "vp9"])
def test_an_index_that_calls_another_frame_a_key_frame(codec: str, broken: Callable[..., Path]) -> None:
    """Behind the frames of another run in its clip, it would be decoded against those."""

    assert re.search(
        rf"^{data.CAMERA}: episode \d, frame \d+: .*{FILE}.*not a keyframe", error_of(broken(other_keyframe, codec))
    )


# ------------------------------------------------------------------------------------------------ damaged packets


IN_A_GOP = [slow(24, id="first of a GOP"), pytest.param(40, id="in a GOP")]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("sample", IN_A_GOP)
def test_a_packet_that_is_overwritten(codec: str, kind: str, sample: int, broken: Callable[..., Path]) -> None:
    root, _ = damaged(broken, codec, sample, lambda payload: WHOLE[kind](len(payload)))
    message = error_of(root)
    assert re.search(rf"^{data.CAMERA}: episode \d, frame \d+: .*{FILE}", message), message


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sample", IN_A_GOP)
@pytest.mark.parametrize("begin", [0.0, 0.3, 0.6], ids=["from the start", "inside", "to the end"])
def test_a_packet_with_a_hole_of_zeros(codec: str, sample: int, begin: float, broken: Callable[..., Path]) -> None:
    """Decoders conceal these, or read on in them. See `dali_stream.mp4.damage` for what cannot be found."""

    root, place = damaged(broken, codec, sample, lambda payload: hole(payload, begin))
    message = error_of(root)
    assert re.search(rf"^{data.CAMERA}: episode \d, frame \d+: .*{FILE}", message), message
    if begin == 0.3:
        check_substitutes(root, place)


def test_the_error_names_the_frames_that_need_the_packet(broken: Callable[..., Path]) -> None:
    root, _ = damaged(broken, "av1", 45, lambda payload: bytes(len(payload)))
    message = error_of(root, shuffle=False)
    assert f"{data.CAMERA}: episode 1, frame {45 - data.EPISODES[0]}: " in message


def test_vp9_through_dali_names_the_damage_too(broken: Callable[..., Path]) -> None:
    root, _ = damaged(broken, "vp9", 40, lambda payload: bytes(len(payload)))
    assert re.search(rf"^{data.CAMERA}: episode \d, frame \d+: .*{FILE}.*is damaged", error_of(root, decode="dali"))


def test_bytes_that_were_lost_shift_what_follows(broken: Callable[..., Path]) -> None:
    """The file keeps its length: a block is missing in the middle and the rest has moved up."""
    for codec in ("h264", "mpeg4"):
        assert re.search(rf"{FILE}", error_of(broken(lost_bytes, codec)))


def damaged(
    broken: Callable[..., Path], codec: str, sample: int, change: Callable[[bytes], bytes]
) -> tuple[Path, set[tuple[int, int]]]:
    """A dataset with one changed packet, and the (episode, frame) pairs of that packet's GOP."""
    root = broken(lambda video: video, codec)
    table = read_index(LocalStore(str(root)), FILE)
    damage(root, FILE, sample, change)
    same = np.flatnonzero(table.gop_start(np.arange(len(table))) == table.gop_start(sample))
    shown = np.argsort(table.display_order)[same].tolist()
    return root, {(0, n) if n < data.EPISODES[0] else (1, n - data.EPISODES[0]) for n in shown}


def check_substitutes(root: Path, gop: set[tuple[int, int]]) -> None:
    """With on_error="substitute", every frame belongs to its sample, and no frame outside the GOP is lost."""
    with data.loader(root, on_error="substitute") as loader:
        shown = list(data.samples(loader))
        substituted = loader.stats()["substituted"]
    assert len(shown) == data.FRAMES
    assert 0 < substituted <= len(gop)
    assert data.identities(torch.stack([frame for *_, frame in shown])) == [(e, f) for e, f, _ in shown]
    lost = {(e, f) for e, length in enumerate(data.EPISODES) for f in range(length)} - {(e, f) for e, f, _ in shown}
    assert lost <= gop


@pytest.mark.parametrize(
    ("arguments", "packet", "change"),
    [
        # Found before decoding, so all later packets fail.
        pytest.param(data.hevc(250), 60, lambda payload: bytes(len(payload)), id="hevc"),
        slow(data.av1(250), 45, lambda payload: hole(payload, 0.3), id="av1"),
        # A bit in the header says that the frame is hidden. Only the decoder finds it, when the next packet does not follow.
        pytest.param(data.vp9(250), 45, lambda payload: bytes([payload[0] ^ 2]) + payload[1:], id="vp9"),
    ],
)
def test_a_damaged_packet_costs_few_decodes(
    arguments: tuple[str, ...], packet: int, change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """All frames are in one GOP. Those that do not depend on the packet are decoded a few times, and not one by one."""
    video = data.encode(data.draw(), tmp_path / "video.mp4", arguments)
    root = data.write_dataset(tmp_path / "set", [video])
    damage(root, FILE, packet, change)
    with data.loader(root, on_error="substitute", batch_size=data.FRAMES, shuffle=False) as loader:
        shown = list(data.samples(loader))
        stats = loader.stats()
    assert data.identities(torch.stack([frame for *_, frame in shown])) == [(e, f) for e, f, _ in shown]
    right = len({(e, f) for e, f, _ in shown})
    assert data.FRAMES - right == stats["substituted"] > 0
    assert right >= packet - 3  # the order of decoding differs from that of display
    assert stats["clips"] <= stats["substituted"] + 12
    assert stats["decoded_frames"] <= 8 * data.FRAMES


@pytest.mark.parametrize("codec", CODECS)
def test_no_single_hole_of_zeros_passes(codec: str, videos: Callable[[str], Path], tmp_path: Path) -> None:
    """Holes of 144 bytes at every place of one GOP: an error for the frames that need them, or the right frame."""
    good = videos(codec)
    truth = data.whole_file(good).movedim(1, -1).numpy()
    store = LocalStore(str(tmp_path))
    (tmp_path / "v.mp4").write_bytes(good.read_bytes())
    table = read_index(store, "v.mp4")
    last = int(np.append(table.keyframes, len(table))[2]) - 1
    video, found = good.read_bytes(), 0
    begin, end = int(table.offset[table.keyframes[1]]), int(table.end[last])
    for at in range(begin, end - 144, 97):
        (tmp_path / "v.mp4").write_bytes(video[:at] + bytes(144) + video[at + 144 :])
        samples = list(range(int(table.keyframes[1]), last + 1))
        try:
            frames, _ = decode.decode(store, [table] * len(samples), samples, describe(table.configs[0]))
        except dali_stream.DecodeError:
            found += 1
        else:
            np.testing.assert_array_equal(frames, truth[np.argsort(table.display_order)][samples])
        store.close()
    assert found > 0


def test_a_missing_file_is_named_with_camera_episode_and_frame(broken: Callable[..., Path]) -> None:
    root = broken(bytes)
    next(root.glob("videos/*/*/*.mp4")).unlink()
    with (
        dali_stream.Loader(root, batch_size=4, shuffle=False) as loader,
        pytest.raises(dali_stream.DecodeError, match=rf"{data.CAMERA}: episode 0, frame 0: .*no such file"),
    ):
        next(iter(loader))


def test_one_short_traceback_that_ends_with_the_message(broken: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    """A loop sees its own line, the loader's, and one message: nothing of DALI, of threads, or of the errors below."""
    root, _ = damaged(broken, "h264", 40, lambda payload: bytes(len(payload)))
    with dali_stream.Loader(root, batch_size=8, device="cpu") as loader, pytest.raises(dali_stream.DecodeError) as caught:
        for _ in loader:
            pass
    shown = "".join(traceback.format_exception(caught.value))
    lines = shown.strip().splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith(f"dali_stream.errors.DecodeError: {data.CAMERA}: episode ")
    assert sum(line.startswith(("Traceback", "dali_stream.errors")) for line in lines) == 2
    assert "nvidia/dali" not in shown
    assert capfd.readouterr().err == ""

"""Packed clips: whatever is packed together, in whatever order and however often, each request shows its own frame."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import videos as data
from support.slow import examples, slow_after

from dali_stream.decode import torchcodec as decode
from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import UPRIGHT, box, full_box
from dali_stream.mp4.clip import Clip, UnsafeForNvdec, pack, packet_hashes, span
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.muxer import Track, head
from dali_stream.storage import LocalStore
from dali_stream.storage.store import StoreView

PROPERTY = examples(40)
FILES = {
    "av1-2": (data.av1(2), data.av1(2)),
    "h264-12": (data.h264(12), data.h264(12)),
    "h264-open-12": (data.h264(12, open_gop=True), data.h264(12, open_gop=True)),
    "hevc-30": (data.hevc(30), data.hevc(30)),
    "hevc-open-12": (data.hevc(12, open_gop=True), data.hevc(12, open_gop=True)),
    "vp9-12-hidden": (data.vp9(12, hidden=True), data.vp9(12, hidden=True)),
    "mpeg4-12-b": (data.mpeg4(12, b_frames=2), data.mpeg4(12, b_frames=2)),
    "h264-12 of two descriptions": (data.h264(12), (*data.h264(12), "-coder", "0")),
}


class Videos(NamedTuple):
    """Two files of a kind: their tables, and their frames by sample."""

    store: LocalStore
    tables: list[VideoIndex]
    pictures: list[np.ndarray]
    format: VideoFormat

    def truth(self, requests: list[tuple[int, int]]) -> np.ndarray:
        return np.stack([self.pictures[file][sample] for file, sample in requests])


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Videos]:
    """The two files of a kind, made when they are first asked for."""
    made: dict[str, Videos] = {}

    def get(name: str) -> Videos:
        if name not in made:
            folder = tmp_path_factory.mktemp("videos")
            paths = [data.encode(data.draw(first=2 * i), folder / f"{i}.mp4", FILES[name][i]) for i in range(2)]
            store = LocalStore(str(folder))
            tables = [read_index(store, path.name) for path in paths]
            pictures = []
            for path, table in zip(paths, tables, strict=True):
                shown = data.whole_file(path).movedim(1, -1).numpy()
                pictures.append(shown[np.argsort(table.display_order)])
            made[name] = Videos(store, tables, pictures, describe(tables[0].configs[0]))
        return made[name]

    return get


REQUESTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, data.FRAMES - 1)), min_size=1, max_size=20)


@pytest.mark.parametrize("name", slow_after(2, FILES))
@PROPERTY
@given(requests=REQUESTS)
def test_each_request_is_answered_with_its_own_frame(
    videos: Callable[[str], Videos], name: str, requests: list[tuple[int, int]]
) -> None:
    v = videos(name)
    frames, _ = decode.decode(v.store, [v.tables[f] for f, _ in requests], [s for _, s in requests], v.format)
    np.testing.assert_array_equal(frames, v.truth(requests))


@PROPERTY
@given(requests=REQUESTS)
def test_a_clip_costs_the_union_of_the_prefixes_and_no_more(
    videos: Callable[[str], Videos], requests: list[tuple[int, int]]
) -> None:
    v = videos("h264-12")
    clip = pack(v.store, [v.tables[f] for f, _ in requests], [s for _, s in requests])
    needed = {(f, n) for f, s in requests for n in range(v.tables[f].gop_start(s), s + 1)}
    assert clip.coded_frames == len(needed)
    assert len(clip.data) < sum(int(v.tables[f].size(n)) for f, n in needed) + 32 * len(needed) + 2000
    np.testing.assert_array_equal(decode.decode_clip(clip, v.format), v.truth(requests))


@pytest.mark.parametrize("name", FILES)
@examples(10)
@given(packets=st.lists(st.integers(0, data.FRAMES - 1), min_size=1, max_size=20))
def test_hashes_of_packets_do_not_depend_on_what_else_is_read(
    videos: Callable[[str], Videos], name: str, packets: list[int]
) -> None:
    v = videos(name)
    table = v.tables[0]
    every = packet_hashes(v.store, table, range(data.FRAMES))
    assert sorted(every) == list(range(data.FRAMES))
    assert len(set(every.values())) == data.FRAMES
    assert packet_hashes(v.store, table, packets).items() <= every.items()
    for packet in packets:
        for from_the_start in (False, True):
            clip = pack(v.store, [table], [packet], from_the_start=from_the_start, hashed=True)
            assert packet in clip.hashes[0]
            assert clip.hashes[0].items() <= every.items()
        if not table.open_gops:
            start = table.gop_start(packet)
            prefix = v.store.read(table.path, int(table.offset[start]), int(table.end[packet]))
            assert every[packet] == int.from_bytes(hashlib.blake2b(prefix, digest_size=8).digest(), "little")


class Reads(StoreView):
    """A store that notes the byte ranges that are read."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.ranges: list[tuple[str, int, int]] = []

    def read(self, path: str, start: int, stop: int) -> bytes:
        self.ranges.append((path, start, stop))
        return self.store.read(path, start, stop)


def test_what_lies_end_to_end_in_a_file_is_read_at_once(videos: Callable[[str], Videos]) -> None:
    v, reads = videos("av1-2"), Reads(videos("av1-2").store)
    first, second = v.tables
    packets = [4, 5, 6, 7, 8, 11, 20]  # 9 is not needed, and 10 is the keyframe of 11
    clip = pack(reads, [first] * len(packets) + [second] * 2, [*packets, 21, 22])
    bounds = [(first, 4, 8), (first, 10, 11), (first, 20, 20), (second, 20, 22)]
    assert reads.ranges == [(table.path, int(table.offset[a]), int(table.end[b])) for table, a, b in bounds]
    assert clip.coded_frames == 5 + 2 + 1 + 3
    requests = [(0, packet) for packet in packets] + [(1, 21), (1, 22)]
    np.testing.assert_array_equal(decode.decode_clip(clip, v.format), v.truth(requests))


def test_packets_with_sound_between_them_are_read_in_stretches(videos: Callable[[str], Videos], tmp_path: Path) -> None:
    v = videos("h264-12")
    sound = ("-f", "lavfi", "-i", "sine=frequency=440:duration=3", "-c:v", "copy", "-c:a", "aac", "-shortest")
    data.ffmpeg("-i", Path(v.store.address) / "0.mp4", *sound, tmp_path / "sound.mp4")
    reads = Reads(LocalStore(str(tmp_path)))
    table = read_index(reads, "sound.mp4")
    breaks = int((table.offset[1:36] != table.end[:35]).sum())
    assert breaks
    reads.ranges.clear()
    clip = pack(reads, [table] * 36, range(36), hashed=True)
    assert len(reads.ranges) == 1 + breaks
    assert sum(stop - start for _, start, stop in reads.ranges) == int(table.size()[:36].sum())
    np.testing.assert_array_equal(decode.decode_clip(clip, v.format), v.truth([(0, packet) for packet in range(36)]))
    assert clip.hashes == pack(v.store, v.tables[:1] * 36, range(36), hashed=True).hashes


@pytest.mark.parametrize("part", [1, 2, 3, 100])
def test_parts_of_a_decode_are_all_of_its_frames(videos: Callable[[str], Videos], part: int) -> None:
    v, packets = videos("h264-12"), [41, 5, 40, 3, 5, 60, 7]
    shown, decoded = np.zeros((len(packets), *data.SIZE, 3), np.uint8), []
    decode_parts = functools.partial(decode.decode_clip_in_parts, expected=v.format, part=part)
    for requests, frames, more, _ in decode.decode_in_parts(v.store, v.tables[:1] * len(packets), packets, decode_parts):
        assert len(requests) == len(frames) <= part
        shown[requests] = frames.numpy()
        decoded.append(more)
    np.testing.assert_array_equal(shown, v.truth([(0, packet) for packet in packets]))
    assert len(decoded) == -(-len(packets) // part)
    assert decoded[0] > len(packets)
    assert not any(decoded[1:])  # all frames of the clip were counted with its first part


@pytest.mark.parametrize("name", ["h264-open-12", "hevc-open-12", "mpeg4-12-b"])
def test_runs_of_open_gops_are_not_packed_together(videos: Callable[[str], Videos], name: str) -> None:
    v = videos(name)
    assert v.tables[0].open_gops
    apart = [0, len(v.tables[0]) - 1]
    assert span(v.tables[0], apart[0])[0] != span(v.tables[0], apart[1])[0]
    with pytest.raises(DecodeError, match="needs its own clip"):
        pack(v.store, [v.tables[0]] * 2, apart)


WITHOUT_IDR = {
    "h264": data.h264_without_idr(),
    "hevc": (*data.X265, "-pix_fmt", "yuv420p", "-x265-params", "keyint=13:min-keyint=13:bframes=1:b-adapt=0:log-level=none"),
}
WITH_IDR = {"h264": data.h264(12), "hevc": data.hevc(12)}


def decoded_without_times(clip: Clip, codec: str, folder: Path) -> list[tuple[int, int]]:
    """(episode, frame) of what FFmpeg decodes of a clip after the filter that DALI feeds to NVDEC, in the order of its output.

    DALI numbers NVDEC's frames in this order.
    """
    (folder / "clip.mp4").write_bytes(clip.data)
    stream = folder / f"clip.{codec}"
    data.ffmpeg("-i", folder / "clip.mp4", "-c", "copy", "-bsf:v", f"{codec}_mp4toannexb", "-f", codec, stream)
    command = [
        "ffmpeg",
        "-v",
        "quiet",
        "-f",
        codec,
        "-i",
        str(stream),
        "-vsync",
        "0",
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    ]
    raw = subprocess.run(command, capture_output=True, check=False).stdout
    frames = np.frombuffer(raw, np.uint8).reshape(-1, *data.SIZE, 3)
    return data.identities(torch.from_numpy(frames.copy()).movedim(-1, 1)) if len(frames) else []


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_keyframes_that_are_not_idr_frames_are_not_packed_for_nvdec(codec: str, tmp_path: Path) -> None:
    """The filter adds no parameter sets before recovery points of H.264, and neither these nor CRA frames reset the order."""
    lengths, store = (31, 170), LocalStore(str(tmp_path))
    stamps = [(episode, frame) for episode, length in enumerate(lengths) for frame in range(length)]
    for encoders, sound in ((WITH_IDR, True), (WITHOUT_IDR, False)):
        name = f"{sound}.mp4"
        data.encode(data.draw(lengths), tmp_path / name, encoders[codec])
        table = read_index(store, name)
        assert not table.open_gops
        place = np.argsort(table.display_order)
        shown = []
        for request in (samples := [3, 20, 45, 60, 195]):
            start, stop = span(table, request)
            shown += [stamps[i] for i in sorted(place[start : stop + 1].tolist())]
        clip = pack(store, [table] * len(samples), samples)
        assert (decoded_without_times(clip, codec, tmp_path) == shown) == sound
        alone = decoded_without_times(pack(store, [table], [20]), codec, tmp_path)
        assert bool(alone) == (sound or codec == "hevc")
        if sound:
            on_nvdec = pack(store, [table] * len(samples), samples, for_nvdec=True)
            assert decoded_without_times(on_nvdec, codec, tmp_path) == shown
            continue
        with pytest.raises(UnsafeForNvdec, match=rf"{codec} with keyframes that are not IDR frames: .* \(the keyframe at byte"):
            pack(store, [table], [20], for_nvdec=True)


def test_samples_of_different_descriptions_are_not_packed_together(videos: Callable[[str], Videos]) -> None:
    v = videos("h264-12 of two descriptions")
    with pytest.raises(DecodeError, match="different sample descriptions"):
        pack(v.store, v.tables, [0, 0])


def test_descriptions_of_one_file_are_not_packed_together(videos: Callable[[str], Videos], tmp_path: Path) -> None:
    """A file that was put together from others has two. Frames of each are packed."""
    v = videos("h264-12 of two descriptions")
    (tmp_path / "joined.mp4").write_bytes(data.joined(*(Path(v.store.address) / f"{i}.mp4" for i in range(2))))
    store = LocalStore(str(tmp_path))
    table = read_index(store, "joined.mp4")
    first, last = 0, len(table) - 1
    with pytest.raises(DecodeError, match="different sample descriptions"):
        pack(store, [table] * 2, [first, last])
    for packet in (first, last):
        assert len(pack(store, [table], [packet]).frames) == 1


def test_a_file_that_became_shorter_is_an_error(videos: Callable[[str], Videos], tmp_path: Path) -> None:
    v = videos("av1-2")
    path = tmp_path / "0.mp4"
    path.write_bytes((Path(v.store.address) / "0.mp4").read_bytes()[: int(v.tables[0].offset[40])])
    with pytest.raises(
        DecodeError, match=r"^bytes \d+ to \d+ are incomplete, because the file has become shorter since its index was read"
    ):
        pack(LocalStore(str(tmp_path)), v.tables[:1], [60])


def test_frames_before_a_file_that_was_cut_in_an_open_gop(tmp_path: Path) -> None:
    """They refer to what is not in the file any more; those after its first keyframe do not."""
    data.encode(data.draw(), tmp_path / "whole.mp4", data.hevc(12, open_gop=True))
    start = f"{18 / data.FPS}"  # FFmpeg goes back to the keyframe before it, whose leading frames stay
    data.ffmpeg("-ss", start, "-i", tmp_path / "whole.mp4", "-c", "copy", "-use_editlist", "0", tmp_path / "cut.mp4")
    store = LocalStore(str(tmp_path))
    table = read_index(store, "cut.mp4")
    leading = np.flatnonzero((table.gop_start(np.arange(len(table))) == 0) & (table.pts() < table.pts(0))).tolist()
    assert leading
    video = describe(table.configs[0])
    for samples in ([leading[0]], [leading[0], len(leading) + 1], [0, leading[-1]]):
        with pytest.raises(DecodeError, match="was cut in the middle of an open GOP"):
            decode.decode(store, [table] * len(samples), samples, video)
    assert decode.decode(store, [table], [len(leading) + 1], video)[0].shape[0] == 1


# ---- what FFmpeg keeps from the start of a stream


def frames_of(store: LocalStore, requests: list[tuple[VideoIndex, int]]) -> np.ndarray:
    """The frames of packets, decoded in as few clips as possible."""
    tables, packets = zip(*requests, strict=True)
    return decode.decode(store, tables, packets, describe(tables[0].configs[0]))[0]


def by_packet(path: Path, table: VideoIndex) -> np.ndarray:
    """The frames of a whole decode of a file, by packet."""
    shown: np.ndarray = data.whole_file(path).movedim(1, -1).numpy()
    return shown[np.argsort(table.display_order[:])]


def assert_clips_are_like_the_whole(path: Path) -> np.ndarray:
    """Each frame alone, and all of them together, equal those of a whole decode, which are returned by packet."""
    store = LocalStore(str(path.parent))
    table = read_index(store, path.name)
    whole = by_packet(path, table)
    last_first = range(len(table))[::-1]
    np.testing.assert_array_equal(frames_of(store, [(table, packet) for packet in last_first]), whole[::-1])
    for packet in range(0, len(table), 5):
        np.testing.assert_array_equal(frames_of(store, [(table, packet)])[0], whole[packet])
    return whole


def test_a_clip_of_an_old_x264_begins_late(tmp_path: Path) -> None:
    """4:4:4 of build 150, as that encoder wrote it. FFmpeg decodes its frames wrongly if it does not know the build."""
    path = data.of_build_150(tmp_path / "old.mp4")
    whole = assert_clips_are_like_the_whole(path)
    no_build = by_packet(data.of_x264(path, tmp_path / "no build.mp4", None), read_index(LocalStore(str(tmp_path)), "old.mp4"))
    assert np.abs(whole.astype(int) - no_build).max() > 100


@pytest.mark.parametrize("build", [148, None, 164])
def test_the_build_of_x264_in_the_first_packet_counts_for_all_clips(build: int | None, tmp_path: Path) -> None:
    new = data.encode(data.draw(), tmp_path / "new.mp4", data.lossless(12))
    whole = assert_clips_are_like_the_whole(data.of_x264(new, tmp_path / "patched.mp4", build))
    differs = (whole != by_packet(new, read_index(LocalStore(str(tmp_path)), "new.mp4"))).any((1, 2, 3))
    assert differs.all() if build == 148 else not differs.any()


@pytest.mark.parametrize("order", list(itertools.permutations([148, None, 164])), ids=str)
def test_files_of_several_builds_of_x264_with_equal_parameter_sets(order: tuple[int | None, ...], tmp_path: Path) -> None:
    new, store = data.encode(data.draw(), tmp_path / "new.mp4", data.lossless(12)), LocalStore(str(tmp_path))
    paths = [data.of_x264(new, tmp_path / f"{build}.mp4", build) for build in order]
    tables = [read_index(store, path.name) for path in paths]
    assert len({table.configs for table in tables}) == 1
    whole = [by_packet(*each) for each in zip(paths, tables, strict=True)]
    for packets in ([0, 30], [25, 0], [70, 40]):
        requests = [(file, packet) for packet in packets for file in range(3)]
        found = frames_of(store, [(tables[file], packet) for file, packet in requests])
        np.testing.assert_array_equal(found, [whole[file][packet] for file, packet in requests])
    old = order.index(148)
    assert pack(store, [tables[file] for file in range(3) if file != old], [30, 30]).coded_frames == 14
    with pytest.raises(DecodeError, match="or encoders cannot share a clip"):
        pack(store, tables[:2] if old < 2 else tables[1:], [30, 30])


PICTURE_SETS = {"x264": (b"avcC", 8, ("qp=20", "qp=30")), "x265": (b"hvcC", 34, ("signhide=0", "signhide=1"))}


@pytest.mark.parametrize("encoder", PICTURE_SETS)
def test_files_with_parameter_sets_in_the_bitstream(encoder: str, tmp_path: Path) -> None:
    """The sample descriptions are equal, but keyframes of one file have other parameter sets, which a decoder keeps."""
    box_name, kind, settings = PICTURE_SETS[encoder]
    store, files = LocalStore(str(tmp_path)), []
    for number, setting in enumerate(settings):
        params = f"{setting}:keyint=6:min-keyint=6:scenecut=0:bframes=0"
        options = ("-c:v", f"lib{encoder}", "-preset", "veryfast", "-pix_fmt", "yuv420p", f"-{encoder}-params", params)
        files.append(data.encode(data.draw(), tmp_path / f"{number}.mp4", options))
    first, other = (read_index(store, path.name).configs[0] for path in files)
    picture_set = next(
        unit for unit in parameter_sets(other, box_name) if (unit[0] & 31 if kind == 8 else unit[0] >> 1) == kind
    )
    assert picture_set not in first

    def with_sets(packets: list[bytes]) -> list[bytes]:
        unit = len(picture_set).to_bytes(4, "big") + picture_set
        return [unit + packet if number % 6 == 0 else packet for number, packet in enumerate(packets)]

    changed = data.with_packets(files[1], tmp_path / "changed.mp4", with_sets)
    mine, theirs = parameter_sets(first, box_name), parameter_sets(other, box_name)
    content = changed.read_bytes()
    for own, unit in zip(mine, theirs, strict=True):
        if box_name == b"hvcC" and unit[0] >> 1 == 39:  # text of the encoder
            continue
        assert len(own) == len(unit)
        content = content.replace(len(unit).to_bytes(2, "big") + unit, len(own).to_bytes(2, "big") + own, 1)
    changed.write_bytes(content)
    paths = [files[0], changed]
    tables = [read_index(store, path.name) for path in paths]
    tables[1] = dataclasses.replace(tables[1], configs=tables[0].configs)  # texts of the encoder may differ
    whole = [by_packet(*each) for each in zip(paths, tables, strict=True)]
    for order in ([(0, 14), (0, 20)], [(1, 14), (1, 20)]):  # frames of one file share a clip
        found = frames_of(store, [(tables[file], packet) for file, packet in order])
        np.testing.assert_array_equal(found, [whole[file][packet] for file, packet in order])
    for files_of_clip in ([0, 1], [1, 0]):
        with pytest.raises(DecodeError, match="different parameter sets"):
            pack(store, [tables[file] for file in files_of_clip], [14, 20])


def parameter_sets(config: bytes, box_name: bytes) -> list[bytes]:
    """The parameter sets in a sample description, found by their lengths of two bytes."""
    at, found = config.index(box_name) + 4, []
    at += 6 if box_name == b"avcC" else 23
    if box_name == b"avcC":
        for _ in range(2):
            size = int.from_bytes(config[at : at + 2], "big")
            found.append(config[at + 2 : at + 2 + size])
            at += 2 + size + 1
        return found
    for _ in range(config[at - 1]):
        at += 1
        count, at = int.from_bytes(config[at : at + 2], "big"), at + 2
        for _ in range(count):
            size = int.from_bytes(config[at : at + 2], "big")
            found.append(config[at + 2 : at + 2 + size])
            at += 2 + size
    return found


def test_a_file_that_was_joined_from_parts_of_several_builds_of_x264(tmp_path: Path) -> None:
    """Each part names its build, but its later keyframes do not."""
    new = data.encode(data.draw(), tmp_path / "encoded.mp4", data.lossless(12))
    store, text = LocalStore(str(tmp_path)), b"x264 - core 164"

    def joined(packets: list[bytes]) -> list[bytes]:
        sei = packets[0][: 4 + int.from_bytes(packets[0][:4], "big")]
        assert text in sei
        return [
            sei.replace(text, b"x264 - core 148") + packets[0][len(sei) :],
            *packets[1:36],
            sei + packets[36],
            *packets[37:],
        ]

    path = data.with_packets(new, tmp_path / "joined.mp4", joined)
    table = read_index(store, path.name)
    np.testing.assert_array_equal(frames_of(store, [(table, 30)])[0], by_packet(path, table)[30])
    with pytest.raises(
        DecodeError, match=r"is of another encoder than the first one, .* `ffmpeg -copyts -i IN .* OUT.mp4`"
    ) as caught:
        frames_of(store, [(table, 40)])
    mended = data.follow(data.command_in(caught.value), path)
    assert data.identities(data.whole_file(mended)) == [(e, f) for e, n in enumerate(data.EPISODES) for f in range(n)]
    mended_frames = assert_clips_are_like_the_whole(mended)[read_index(store, mended.name).display_order[:]]
    whole = data.whole_file(path).movedim(1, -1).numpy().astype(int)
    assert np.abs(mended_frames - whole).mean((1, 2, 3)).max() < 3


MPEG4 = (*data.mpeg4(12), "-flags", "+qpel")


def test_a_file_that_was_joined_from_parts_of_several_encoders_of_mpeg4(tmp_path: Path) -> None:
    plain = data.encode(data.draw(), tmp_path / "plain.mp4", MPEG4)
    path = data.with_packets(
        plain, tmp_path / "joined.mp4", lambda packets: [*packets[:36], b"\0\0\1\xb2XviD0001" + packets[36], *packets[37:]]
    )
    table = read_index(store := LocalStore(str(tmp_path)), path.name)
    np.testing.assert_array_equal(frames_of(store, [(table, 30)])[0], by_packet(path, table)[30])
    with pytest.raises(DecodeError, match="is of another encoder than the first one"):
        frames_of(store, [(table, 40)])


NOTES = {b"XviD0001": 40, b"XviD0064": 2, b"DivX503b1393": 40, b"FFmpeg0.4.9b4600": 1, b"Lavc59.37.100": 0}


@pytest.mark.parametrize("note", NOTES, ids=bytes.decode)
def test_user_data_of_the_first_packet_counts_for_all_clips(note: bytes, tmp_path: Path) -> None:
    """MPEG-4: FFmpeg selects its inverse transform by the encoder, and undoes errors of old builds."""
    plain = data.encode(data.draw(), tmp_path / "plain.mp4", MPEG4)
    path = data.with_packets(plain, tmp_path / "noted.mp4", lambda packets: [b"\0\0\1\xb2" + note + packets[0], *packets[1:]])
    whole = assert_clips_are_like_the_whole(path).astype(int)
    unnoted = by_packet(plain, read_index(LocalStore(str(tmp_path)), "plain.mp4"))
    assert np.abs(whole - unnoted).max() >= NOTES[note]
    assert NOTES[note] or (whole == unnoted).all()


def test_user_data_of_the_sample_description_counts_for_all_clips(tmp_path: Path) -> None:
    plain = data.encode(data.draw(), tmp_path / "plain.mp4", MPEG4).read_bytes()
    [version] = set(re.findall(rb"Lavc[\d.]+", plain[plain.index(b"esds") :]))
    (tmp_path / "xvid.mp4").write_bytes(plain.replace(version, b"XviD0001" + bytes(len(version) - 8)))
    whole = assert_clips_are_like_the_whole(tmp_path / "xvid.mp4").astype(int)
    assert np.abs(whole - by_packet(tmp_path / "plain.mp4", read_index(LocalStore(str(tmp_path)), "plain.mp4"))).max() >= 40


def test_clips_of_vp8(tmp_path: Path) -> None:
    """FFmpeg writes no MP4 with VP8, but reads it."""
    webm, path = tmp_path / "a.webm", tmp_path / "a.mp4"
    lengths = 9, 12
    data.encode(data.draw(lengths), webm, ("-c:v", "libvpx", "-b:v", "1M", "-deadline", "realtime", "-g", "5"))
    with av.open(str(webm)) as container:
        packets = [(bytes(packet), packet.is_keyframe) for packet in container.demux(video=0) if packet.size]
    n, (height, width) = len(packets), data.SIZE
    description = box(
        b"vp08", bytes(6), struct.pack(">H16xHHIIIH32sHh", 1, width, height, 72 << 16, 72 << 16, 0, 1, bytes(32), 24, -1),
        full_box(b"vpcC", 1, 0, bytes([0, 10, 0x82, 2, 2, 2, 0, 0])),
    )  # fmt: skip
    sync, size = np.array([key for _, key in packets]), np.array([len(packet) for packet, _ in packets])
    header = UPRIGHT + struct.pack(">II", width << 16, height << 16)
    track = Track(15360, header, (description,), size, 512 * np.arange(n), sync, np.zeros(n, np.int64), 512)
    path.write_bytes(head(track) + b"".join(packet for packet, _ in packets))
    assert_clips_are_like_the_whole(path)
    assert data.identities(data.whole_file(path)) == [(e, f) for e, length in enumerate(lengths) for f in range(length)]

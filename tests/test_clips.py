"""Packed clips: whatever is packed together, in whatever order and however often, each request shows its own frame."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import videos as data
from support.slow import examples, slow_after

from dali_stream.decode import torchcodec as decode
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import Clip, UnsafeForNvdec, pack, packet_hashes, span
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore

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


@pytest.mark.parametrize("part", [1, 2, 3, 100])
def test_parts_of_a_decode_are_all_of_its_frames(videos: Callable[[str], Videos], part: int) -> None:
    v, packets = videos("h264-12"), [41, 5, 40, 3, 5, 60, 7]
    shown, decoded = np.zeros((len(packets), *data.SIZE, 3), np.uint8), []
    for requests, frames, more, _ in decode.decode_in_parts(v.store, v.tables[:1] * len(packets), packets, v.format, part):
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
            assert pack(store, [table] * len(samples), samples, for_nvdec=True) == clip
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

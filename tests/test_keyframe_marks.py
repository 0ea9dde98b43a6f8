"""Clips for NVDEC, of which only the first packet is marked as a keyframe, decoded on the CPU without a flush between GOPs."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import videos as data
from support.slow import examples, slow, slow_after

import dali_stream
from dali_stream.decode import torchcodec as decode
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import Clip, UnsafeForNvdec, pack
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore

FILES = {
    "h264-2": data.h264(2, b_frames=0),
    "h264-12 with B-frames": data.h264(12),
    "av1-2": data.av1(2),
    "hevc-12 with B-frames": data.hevc(12),
    # x264 counts frames modulo 16 if it has one reference frame, so the count wraps within a GOP.
    "h264-30 of one reference frame": (*data.h264(30, b_frames=0), "-refs", "1"),
    "h264-30 with B-frames": data.h264(30),
    "h264-12 with CAVLC": (*data.h264(12, b_frames=0), "-coder", "0"),
    "hevc-30": data.hevc(30),
    "av1-30": data.av1(30),
    "vp9-12 with hidden frames": data.vp9(12, hidden=True),
    "vp9-30": data.vp9(30),
    "mpeg4-12": data.mpeg4(12),
}


class Videos(NamedTuple):
    """Two files of an encoder, and their frames by packet."""

    store: LocalStore
    indices: list[VideoIndex]
    frames: list[np.ndarray]
    format: VideoFormat

    def sharing(self, requests: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Requests of one file only if the files cannot share a clip, as in MPEG-4, whose description has a bit rate."""
        apart = self.indices[0].configs != self.indices[1].configs
        return [(0 if apart else file, packet) for file, packet in requests]

    def clip(self, requests: Sequence[tuple[int, int]], **options: Any) -> Clip:
        """Pack requests (file, packet)."""
        options = {"for_nvdec": True, "hidden_frames": True, **options}
        return pack(self.store, [self.indices[file] for file, _ in requests], [packet for _, packet in requests], **options)

    def check(self, requests: Sequence[tuple[int, int]]) -> Clip:
        """Compare the frames of a clip with those of a whole decode."""
        clip = self.clip(requests)
        assert marked(clip) == [0]
        expected = [self.frames[file][packet] for file, packet in requests]
        np.testing.assert_array_equal(decode.decode_clip(clip, self.format), expected)
        return clip


def marked(clip: Clip) -> list[int]:
    """Packets of a clip that its sync sample table marks as keyframes."""
    tables = dict(data.box(data.boxes(bytes(clip.data)), *data.STBL)[1])
    if b"stss" not in tables:
        return list(range(clip.coded_frames))
    return [number - 1 for (number,) in struct.iter_unpack(">I", tables[b"stss"][8:])]


def opened(paths: Sequence[Path]) -> Videos:
    store = LocalStore(str(paths[0].parent))
    indices = [read_index(store, path.name) for path in paths]
    frames = []
    for path, index in zip(paths, indices, strict=True):
        shown = data.whole_file(path).movedim(1, -1).numpy()
        frames.append(shown[np.argsort(index.display_order[:])])
    return Videos(store, indices, frames, describe(indices[0].configs[0]))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Videos]:
    """Two files of an encoder, made when they are first asked for. Their four episodes are different."""

    @functools.cache
    def get(name: str) -> Videos:
        folder = tmp_path_factory.mktemp("videos")
        found = opened([data.encode(data.draw(first=2 * i), folder / f"{i}.mp4", FILES[name]) for i in range(2)])
        for file, (index, frames) in enumerate(zip(found.indices, found.frames, strict=True)):
            shown = data.torch.from_numpy(frames[index.display_order[:]]).movedim(-1, 1)
            assert data.identities(shown) == [(2 * file + e, f) for e, n in enumerate(data.EPISODES) for f in range(n)]
        return found

    return get


REQUESTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, data.FRAMES - 1)), min_size=2, max_size=24)


@pytest.mark.parametrize("name", slow_after(4, FILES))
@examples(25)
@given(requests=REQUESTS)
def test_each_request_shows_its_own_frame(videos: Callable[[str], Videos], name: str, requests: list[tuple[int, int]]) -> None:
    v = videos(name)
    clip = v.check(requests := v.sharing(requests))
    runs = {(file, int(v.indices[file].gop_start(packet))) for file, packet in requests}
    assert len(clip.keyframes) == len(runs) - 1
    usual = v.clip(requests, for_nvdec=False)
    assert (usual.keyframes, usual.frames) == ([], clip.frames)
    assert len(marked(usual)) == len(runs)


@pytest.mark.parametrize("name", slow_after(4, FILES))
def test_keyframes_in_a_row_and_after_one_packet(videos: Callable[[str], Videos], name: str) -> None:
    v = videos(name)
    keys = v.sharing([(file, packet) for file in range(2) for packet in v.indices[file].keyframes[:].tolist()])
    v.check(keys)
    for step in (2, 3):
        v.check(keys[::step])
    v.check(v.sharing([keys[0], (0, keys[1][1] + 1), keys[2], (1, data.FRAMES - 1)]))
    v.check(v.sharing([(1, 1), (0, data.FRAMES - 1), (1, keys[1][1] - 1)]))


def headers(clip: Clip, folder: Path) -> dict[str, list[int]]:
    """The values of the fields in the headers of a clip's packets, as FFmpeg reads them."""
    (folder / "clip.mp4").write_bytes(clip.data)
    command = ["ffmpeg", "-i", folder / "clip.mp4", "-c", "copy", "-bsf:v", "trace_headers", "-f", "null", "-"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    fields: dict[str, list[int]] = {}
    for name, value in re.findall(r"\] \d+ +(\w+) .*= (-?\d+)$", said, re.MULTILINE):
        fields.setdefault(name, []).append(int(value))
    return fields


def test_idr_frames_of_equal_number_in_a_row(videos: Callable[[str], Videos], tmp_path: Path) -> None:
    """x264 numbers IDR frames 0 and 1 by turns, so that a decoder tells two in a row apart."""
    v = videos("h264-12 with B-frames")
    for requests in ([(0, 0), (0, 24), (0, 48)], [(0, 3), (0, 24), (1, 0), (1, 30), (1, 48)]):
        numbers = headers(v.check(requests), tmp_path)["idr_pic_id"]
        assert len(numbers) == len(requests)
        assert len(set(numbers)) == 1


@pytest.mark.parametrize(
    ("name", "poc_type", "wraps"), [("h264-12 with B-frames", 0, False), slow("h264-30 of one reference frame", 2, True)]
)
def test_frame_numbers_with_gaps_and_wraps(
    videos: Callable[[str], Videos], name: str, poc_type: int, wraps: bool, tmp_path: Path
) -> None:
    v = videos(name)
    first, second = v.indices[0].keyframes[:2].tolist()
    clip = v.check([(0, second - 1), (0, second), (1, first), (1, second + 9), (0, second + 20)])
    found = headers(clip, tmp_path)
    assert set(found["pic_order_cnt_type"]) == {poc_type}
    numbers = found["frame_num"]
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    assert any(before > 1 and after == 0 for before, after in itertools.pairwise(numbers))  # a GOP is cut short
    assert (-15 in steps and max(numbers) == 15) == wraps


def test_frames_of_open_gops_and_of_other_keyframes_have_no_such_clip(tmp_path: Path) -> None:
    for name, arguments in {"h264": data.h264(12, open_gop=True), "hevc": data.hevc(12, open_gop=True)}.items():
        v = opened([data.encode(data.draw(), tmp_path / f"{name}.mp4", arguments)])
        assert v.indices[0].open_gops
        with pytest.raises(DecodeError, match="needs its own clip"):
            v.clip([(0, 0), (0, data.FRAMES - 1)])
        with pytest.raises(UnsafeForNvdec, match="keyframes that are not IDR frames"):
            v.clip([(0, data.FRAMES - 1)])
        assert v.clip([(0, 5)]).keyframes == []


@pytest.mark.parametrize("arguments", [data.h264_without_idr(), slow((*data.X265, "-g", "6", "-tune", "zerolatency"))])
def test_keyframes_that_do_not_reset_the_decoder_are_marked(arguments: tuple[str, ...], tmp_path: Path) -> None:
    v = opened([data.encode(data.draw(), tmp_path / "video.mp4", arguments)])
    assert not v.indices[0].open_gops
    keys = v.indices[0].keyframes[:].tolist()
    requests = [(0, keys[1] + 1), (0, keys[3]), (0, keys[4] + 2)]
    clip = v.clip(requests, for_nvdec=False)
    places = [0, keys[1] + 2 - keys[1], keys[1] + 2 - keys[1] + 1]
    assert (marked(clip), clip.keyframes) == (places, [])
    np.testing.assert_array_equal(decode.decode_clip(clip, v.format), [v.frames[0][packet] for _, packet in requests])
    with pytest.raises(UnsafeForNvdec, match="keyframes that are not IDR frames"):
        v.clip(requests)


def test_x264_of_one_build_in_files_with_equal_parameter_sets(tmp_path: Path) -> None:
    """The build is in front of the first packet, and counts for the whole clip."""
    new = data.encode(data.draw(), tmp_path / "new.mp4", data.lossless(12))
    v = opened([data.of_x264(new, tmp_path / f"{i}.mp4", 148) for i in range(2)])
    v.check([(0, 30), (1, 30), (0, 50), (1, 0), (1, 71)])


@pytest.mark.parametrize("part", [1, 2, 5, 100])
def test_parts_hold_the_requests_only(videos: Callable[[str], Videos], part: int) -> None:
    v = videos("av1-2")
    requests = [(0, 41), (1, 5), (0, 40), (0, 3), (1, 5), (1, 60), (0, 7)]
    clip, shown, decoded = v.clip(requests), {}, 0
    assert set(clip.keyframes) - set(clip.frames)
    for some, frames, more in decode.decode_clip_in_parts(clip, v.format, part):
        assert 0 < len(some) == len(frames) <= part
        shown |= dict(zip(some, frames.numpy(), strict=True))
        decoded += more
    assert decoded == clip.coded_frames
    np.testing.assert_array_equal([shown[i] for i in range(len(requests))], [v.frames[f][p] for f, p in requests])


# ---- damage


def with_bit(path: Path, target: Path, at: int, bit: int) -> Path:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1 << bit
    target.write_bytes(damaged)
    return target


def outcome(v: Videos, requests: Sequence[tuple[int, int]]) -> np.ndarray | None:
    """Decoded frames, or None for an error."""
    try:
        return decode.decode_clip(v.clip(requests), v.format)
    except DecodeError:
        return None


@pytest.mark.parametrize("name", ["av1-2", *map(slow, ("h264-2", "hevc-12 with B-frames", "vp9-30", "mpeg4-12"))])
def test_a_lost_keyframe_is_an_error_also_if_only_later_frames_are_requested(
    videos: Callable[[str], Videos], name: str, tmp_path: Path
) -> None:
    """Each bit at the beginning of a keyframe is changed. Without the keyframe, later frames would refer to another GOP."""
    v = videos(name)
    index = v.indices[0]
    key, end = index.keyframes[[-2, -1]].tolist()
    requests = [(0, 1), (0, end - 1)]
    expected = [v.frames[0][packet] for _, packet in requests]
    start, errors = int(index.offset[key]), 0
    for at, bit in itertools.product(range(start, start + 24), range(8)):
        path = with_bit(Path(v.store.address, index.path), tmp_path / "video.mp4", at, bit)
        store = LocalStore(str(tmp_path))
        damaged = v._replace(store=store, indices=[read_index(store, path.name)])
        found = outcome(damaged, requests)
        if any(outcome(damaged, [request]) is None for request in ((0, key), requests[1])):
            errors += 1
            assert found is None or (found == expected).all(), (at - start, bit)
        elif found is not None:
            np.testing.assert_array_equal(found[0], expected[0])
        store.close()
    assert errors


def zeros(packets: list[bytes], at: int) -> bytes:
    return bytes(len(packets[at]))


def half(packets: list[bytes], at: int) -> bytes:
    return packets[at][: len(packets[at]) // 2]


def later(packets: list[bytes], at: int) -> bytes:
    return packets[at + 1]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("av1-2", zeros),
        ("h264-12 with B-frames", later),
        *itertools.starmap(slow, [("av1-2", half), ("h264-12 with B-frames", half), ("hevc-12 with B-frames", zeros)]),
        *itertools.starmap(slow, [("hevc-12 with B-frames", half), ("vp9-12 with hidden frames", later)]),
    ],
)
def test_a_loader_names_the_damaged_frames_and_shows_all_others(
    videos: Callable[[str], Videos], change: Callable[[list[bytes], int], bytes], name: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    v = videos(name)
    path = Path(v.store.address, v.indices[0].path)
    key = int(v.indices[0].keyframes[-2])
    bad = data.with_packets(path, tmp_path / "bad.mp4", lambda p: [*p[:key], change(p, key), *p[key + 1 :]])
    root = data.write_dataset(tmp_path / "set", [bad])
    packed: list[Clip] = []

    def packs(*arguments: Any, **options: Any) -> Clip:
        packed.append(clip := pack(*arguments, **{**options, "for_nvdec": not options["from_the_start"]}))
        return clip

    monkeypatch.setattr(decode, "pack", packs)
    stop = int(v.indices[0].keyframes[-1])
    needing = {data.identity(frame) for frame in range(key, stop)}
    with data.loader(root, in_process=True, batch_size=36) as loader, pytest.raises(dali_stream.DecodeError) as caught:
        list(loader)
    named = re.match(rf"{data.CAMERA}: episode (\d+), frame (\d+): ", str(caught.value))
    assert named is not None
    assert (int(named[1]), int(named[2])) in needing
    with data.loader(root, in_process=True, batch_size=36, on_error="substitute") as loader:
        shown = list(data.samples(loader))
        substituted = loader.stats()["substituted"]
    assert substituted == len(needing)
    assert needing.isdisjoint((e, f) for e, f, _ in shown)
    assert len({(e, f) for e, f, _ in shown}) == data.FRAMES - len(needing)
    for episode, frame, pixels in shown:
        packet = int(v.indices[0].display_order[frame + sum(data.EPISODES[:episode])])
        np.testing.assert_array_equal(pixels.movedim(0, -1).numpy(), v.frames[0][packet])
    assert any(clip.keyframes for clip in packed)


# ---- seeks

COUNT = """
import ctypes, json, sys
from dali_stream.system.torchcodec_import import compile_nothing

compile_nothing()  # so torch's compiler is not imported
from dali_stream.decode import torchcodec
from dali_stream.mp4.clip import pack
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore

shim, found = ctypes.CDLL(None), []
for folder, name, packets in json.loads(sys.argv[1]):
    store = LocalStore(folder)
    index = read_index(store, name)
    found.append([])
    for for_nvdec, part in ((False, 100), (True, 100), (True, 3)):
        counts = [ctypes.c_long.in_dll(shim, name) for name in ("seeks", "flushes")]
        for count in counts:
            count.value = 0
        clip = pack(store, [index] * len(packets), packets, for_nvdec=for_nvdec, hidden_frames=True)
        list(torchcodec.decode_clip_in_parts(clip, describe(index.configs[0]), part))
        found[-1].append([count.value for count in counts])
print(json.dumps(found))
"""


@pytest.mark.parametrize("names", [[next(iter(FILES))], slow([*FILES][1:])], ids=["one codec", "all others"])
def test_a_clip_is_decoded_with_one_seek(videos: Callable[[str], Videos], names: list[str], tmp_path: Path) -> None:
    """The seek to its beginning. FFmpeg's functions are counted by a library that is loaded before it."""
    if shutil.which("gcc") is None:
        pytest.skip("needs the program gcc")
    shim = tmp_path / "flushes.so"
    source = Path(data.__file__).with_name("flushes.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    files = []
    for v in map(videos, names):
        index = v.indices[0]
        files.append((v.store.address, index.path, (index.keyframes[:] + 1).tolist()[:-1]))
    command = [sys.executable, "-c", COUNT, json.dumps(files)]
    done = subprocess.run(command, env={**data.os.environ, "LD_PRELOAD": str(shim)}, capture_output=True, text=True, check=True)
    for name, (_, _, packets), counts in zip(names, files, json.loads(done.stdout), strict=True):
        usual, one, in_parts = counts
        assert usual == [len(packets), len(packets)], name
        assert one == in_parts == [1, 1], name

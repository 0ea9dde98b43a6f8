"""Videos as phones write them, which FFmpeg reads without a message: zeros after NAL units, start codes in them, QuickTime.

Each frame must equal the same frame of a whole decode by torchcodec. Damage must be an error in these files, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import videos as data
from support.broken import damage
from support.datasets import video, videos
from support.doctor import looked_at
from support.servers import Server
from support.slow import slow
from support.tools import prepared

from dali_stream import DecodeError
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore

PHONES = Path(__file__).resolve().parents[2] / "shared/data/phones"
RECORDINGS = ("f1_quicktime_terminator", "f2_trailing_zeros_15", "f4_startcode_in_nal")
CODECS = {
    "h264": data.h264(12),
    "CAVLC": (*data.h264(12), "-coder", "0"),
    "h264, GOPs of 1": data.h264(1, b_frames=0),
    "hevc": data.hevc(12),
    "mpeg4": data.mpeg4(12),
}
FILE = data.VIDEO.format(data.CAMERA, 0)


def check(root: Path | str, file: Path) -> None:
    """Check that each row has its frame, which equals that of a whole decode of a file."""
    with data.loader(root, shuffle=False) as loader:
        (camera,) = loader.routes
        frames = torch.cat([batch[camera] for batch in loader])
    assert torch.equal(frames, data.whole_file(file))


def units_of(packet: bytes) -> list[bytes]:
    """The NAL units of a packet."""
    units = []
    while packet:
        size = int.from_bytes(packet[:4], "big")
        units.append(packet[4 : 4 + size])
        packet = packet[4 + size :]
    return units


def with_lengths(*units: bytes) -> bytes:
    return b"".join(len(unit).to_bytes(4, "big") + unit for unit in units)


def padded(zeros: int, codec: str) -> Callable[[bytes], bytes]:
    """Puts zeros after each NAL unit, or after each packet of MPEG-4."""
    if codec == "mpeg4":
        return lambda packet: packet + bytes(zeros)
    return lambda packet: with_lengths(*(unit + bytes(zeros) for unit in units_of(packet)))


def recorded(folder: Path, codec: str, change: Callable[[bytes], bytes]) -> Path:
    """A dataset whose video has changed packets."""
    whole = data.encode(data.draw(), folder / "whole.mp4", CODECS[codec])
    return data.write_dataset(folder / "set", [data.repacked(whole, folder / "video.mp4", change)])


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings(name: str, tmp_path: Path) -> None:
    root = PHONES / name
    if not root.is_dir():
        pytest.skip(f"no recording in {root}")
    check(root, *videos(root))
    prepared(root, tmp_path / "copy")
    check(tmp_path / "copy", *videos(root))
    assert [finding for finding in looked_at(root).values() if finding.status == "problem"] == []


@pytest.mark.parametrize("zeros", [15, slow(1), slow(8), slow(9), slow(63), slow(64), 1000])
@pytest.mark.parametrize("codec", CODECS)
def test_zeros_after_each_unit(codec: str, zeros: int, tmp_path: Path) -> None:
    root = recorded(tmp_path, codec, padded(zeros, codec))
    check(root, video(root))
    prepared(root, tmp_path / "copy")
    check(tmp_path / "copy", video(root))


@pytest.mark.parametrize("codec", ["h264", slow("mpeg4")])
def test_zeros_after_each_unit_of_a_remote_file(codec: str, tmp_path: Path) -> None:
    root = recorded(tmp_path, codec, padded(15, codec))
    with Server(root) as server:
        check(server.url, video(root))


@pytest.mark.parametrize("zeros", [9, slow(40), slow(200)])
@pytest.mark.parametrize("codec", CODECS)
def test_zeros_at_the_end_of_one_frame_are_damage(codec: str, zeros: int, tmp_path: Path) -> None:
    root = recorded(tmp_path, codec, lambda packet: packet)
    damage(root, FILE, 40, lambda packet: packet[:-zeros] + bytes(zeros))
    with data.loader(root) as loader, pytest.raises(DecodeError, match="is damaged: "):
        list(loader)


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_inside_a_padded_frame_are_damage(codec: str, tmp_path: Path) -> None:
    root = recorded(tmp_path, codec, padded(20, codec))

    def hole(packet: bytes) -> bytes:
        middle = len(packet) // 2
        return packet[:middle] + bytes(4) + packet[middle + 4 :]

    damage(root, FILE, 40, hole)
    with data.loader(root) as loader, pytest.raises(DecodeError, match=r"is damaged: (invalid bytes 00 00 00|24 zero bits)"):
        list(loader)


# A prefix NAL unit of H.264, or an access unit delimiter of HEVC
FIRST = {"h264": b"\x6e\x80\x00\x40", "h264, GOPs of 1": b"\x6e\x80\x00\x40", "hevc": b"\x46\x01\x50"}


@pytest.mark.parametrize("code", [b"\0\0\0\1", slow(b"\0\0\1")])
@pytest.mark.parametrize("codec", FIRST)
def test_start_codes_within_one_length(codec: str, code: bytes, tmp_path: Path) -> None:
    root = recorded(tmp_path, codec, lambda packet: with_lengths(code.join([FIRST[codec], *units_of(packet)])))
    index = read_index(LocalStore(str(root)), FILE)
    assert len(index.keyframes) == -(-data.FRAMES // (1 if "1" in codec else 12))
    check(root, video(root))
    damage(root, FILE, 40, lambda packet: packet[:-30] + b"\0\0\1" + packet[-27:])  # in a slice, it is damage
    with data.loader(root) as loader, pytest.raises(DecodeError, match="is damaged: invalid bytes 00 00 01"):
        list(loader)


@pytest.mark.parametrize("zeros", [4, slow(8), slow(12)])
@pytest.mark.parametrize("codec", ["h264", *map(slow, ("hevc", "mpeg4"))])
def test_zeros_that_end_a_sample_description(codec: str, zeros: int, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", CODECS[codec])
    tree = data.boxes(whole.read_bytes())
    stsd = data.box(tree, *data.STBL, b"stsd")
    size = int.from_bytes(stsd[1][8:12], "big") + zeros
    stsd[1] = stsd[1][:8] + size.to_bytes(4, "big") + stsd[1][12:] + bytes(zeros)
    whole.write_bytes(data.unboxed(tree))
    root = data.write_dataset(tmp_path / "set", [whole])
    check(root, whole)
    prepared(root, tmp_path / "copy")
    check(tmp_path / "copy", whole)

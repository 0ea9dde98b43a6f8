"""Checks of encoded frames on a few bytes of each codec. `test_bad_video.py` has damaged files."""

from __future__ import annotations

import pytest

from dali_stream.mp4.boxes import box
from dali_stream.mp4.damage import checker, is_intra_refresh, leb128

IDR, PREDICTED = b"\x65\x88\x84", b"\x41\x9a\x02"  # the beginnings of two H.264 slices


def entry(codec: bytes, *boxes: bytes) -> bytes:
    """A sample description."""
    return box(codec, bytes(78), *boxes)


def avc(width: int) -> bytes:
    """A sample description of H.264 where the length of a NAL unit takes `width` bytes."""
    return entry(b"avc1", box(b"avcC", bytes([1, 66, 0, 30, 0xFC | width - 1, 0xE0, 0])))


def units(width: int, *nal_units: bytes) -> bytes:
    return b"".join(len(unit).to_bytes(width, "big") + unit for unit in nal_units)


def wrong(config: bytes, data: bytes, key: bool = True) -> str:
    """Return what the check finds wrong with a frame. The buffer has other bytes before and after it."""
    check = checker(config)
    assert check is not None
    return check(b"\xaa" * 5 + data + b"\xaa" * 5, 5, 5 + len(data), key)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_nal_units_have_lengths_of_the_size_that_avcc_says(width: int) -> None:
    frame = units(width, b"\x09\x10", IDR)
    assert wrong(avc(width), frame) == ""
    assert wrong(avc(width), frame[:-1]) == "its NAL units do not add up to its size"
    assert wrong(avc(width), units(width, b"\x09\x10")) == "it has no slice of a frame"
    other = 4 if width < 4 else 2
    assert wrong(avc(other), frame) != ""


@pytest.mark.parametrize("width", [2, 4])
def test_a_predicted_slice_marks_an_intra_refresh(width: int) -> None:
    assert is_intra_refresh(avc(width), units(width, b"\x09\x10", PREDICTED))
    for whole in (IDR, b"\x41\x88\x84", b"\x41\xb2\x02", b"\x41\x94\x02", b"\x41\x8a\x02"):  # IDR, I of two kinds, SI of two
        assert not is_intra_refresh(avc(width), units(width, b"\x09\x10", whole))
        assert wrong(avc(width), units(width, whole)) == ""
    assert "no keyframe" in wrong(avc(width), units(width, PREDICTED))
    assert wrong(avc(width), units(width, PREDICTED), key=False) == ""


def vp8(partition: int, predicted: bool = False) -> bytes:
    tag = (partition << 5 | 0x10 | predicted).to_bytes(3, "little")
    return tag + (b"" if predicted else b"\x9d\x01\x2a" + bytes(4)) + b"\x55" * 20


def test_frames_of_vp8() -> None:
    config = entry(b"vp08")
    assert wrong(config, vp8(20)) == ""
    assert wrong(config, vp8(21)) == "its first partition is larger than it is"
    assert wrong(config, vp8(20, predicted=True), key=False) == ""
    assert wrong(config, vp8(21, predicted=True), key=False) == "its first partition is larger than it is"
    assert "no keyframe" in wrong(config, vp8(20, predicted=True))
    assert wrong(config, vp8(20).replace(b"\x9d\x01\x2a", b"\x9d\x01\x2b")) == "a keyframe lacks its start code"


def test_images_of_mjpeg() -> None:
    config = entry(b"mp4v", box(b"esds", bytes(4), b"\x04\x0d\x6c\x11"))
    assert wrong(config, b"\xff\xd8\xff\xdb") == ""
    assert wrong(config, b"\xff\xd9\xff\xdb") == "it does not begin as a JPEG image"


def test_numbers_of_av1_have_seven_bits_a_byte() -> None:
    assert leb128(b"\xaa\x7f", 1) == (127, 2)
    assert leb128(b"\xe5\x8e\x26\xaa", 0) == (624485, 3)
    assert leb128(b"\x80" * 9, 0) == (1 << 62, 0)

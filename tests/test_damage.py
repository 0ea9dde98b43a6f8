"""Checks of encoded frames on a few bytes of each codec. `test_bad_video.py` has damaged files."""

from __future__ import annotations

import pytest

from dali_stream.mp4.boxes import box
from dali_stream.mp4.damage import checker, is_intra_refresh, leb128

TOO_LONG = "it has 64 equal bytes in a row, which arithmetic coding does not write"
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


def obu(kind: int, payload: bytes) -> bytes:
    return bytes([kind << 3 | 2, len(payload)]) + payload


def test_frames_of_av1() -> None:
    config, sequence = entry(b"av01"), obu(1, b"\x00\x00\x00")
    key, predicted = obu(6, b"\x10\x55\x66"), obu(6, b"\x30\x55\x66")
    assert wrong(config, sequence + key) == ""
    assert wrong(config, predicted, key=False) == ""
    assert "no keyframe" in wrong(config, sequence + predicted)
    assert wrong(config, obu(1, b"\x08\x00\x00") + predicted) == ""  # a still, whose frame header has no such bits
    assert wrong(config, obu(2, b"")) == "it has no frame"
    assert wrong(config, sequence + key[:-1]) == "its OBUs do not add up to its size"
    for header in (0xB2, 0x33, 9 << 3 | 2):
        assert wrong(config, bytes([header]) + key[1:]) == f"an OBU has the header {header:02x}, which is not allowed"
    for byte in (b"\x00", b"\xff"):
        assert wrong(config, sequence + obu(6, b"\x10" + 64 * byte)) == TOO_LONG
        assert wrong(config, sequence + obu(6, b"\x10" + 55 * byte)) == ""


def vp9(frames: list[bytes], width: int = 1) -> bytes:
    """Frames with a superframe index."""
    marker = bytes([0xC0 | (width - 1) << 3 | len(frames) - 1])
    return b"".join(frames) + marker + b"".join(len(frame).to_bytes(width, "little") for frame in frames) + marker


def test_frames_of_vp9() -> None:
    config = entry(b"vp09", box(b"vpcC", bytes([1, 0, 0, 0, 0, 10, 0x82])))
    key, predicted = b"\x82\x49\x83\x42\x55\x66", b"\x86\x55\x66"
    assert wrong(config, key) == ""
    assert wrong(config, predicted, key=False) == ""
    assert "no keyframe" in wrong(config, predicted)
    for width in (1, 2):
        assert wrong(config, vp9([key, predicted], width)) == ""
        assert "no keyframe" in wrong(config, vp9([predicted, key], width))
    longer = vp9([key, predicted]).replace(b"\x06\x03", b"\x06\x0d")
    assert wrong(config, longer) == "the sizes in its superframe index do not add up"
    assert wrong(config, b"\x42" + key[1:]) == "a frame begins with 42, which is not allowed"
    assert wrong(config, b"\xa2" + key[1:]) == "a frame begins with a2, which is not allowed"  # of another profile
    assert wrong(config, key.replace(b"\x42", b"\x43")) == "a keyframe lacks its sync code"
    assert wrong(config, key + bytes(80)) == TOO_LONG


def test_frames_of_mpeg_4() -> None:
    config = entry(b"mp4v", box(b"esds", bytes(4), b"\x04\x0d\x20\x11"))
    frame = b"\0\0\1\xb6\x55\x66"
    assert wrong(config, frame) == ""
    assert wrong(config, b"\0\0\1\xb0\x01" + frame + bytes(8)) == ""
    assert wrong(config, frame[1:]) == "it does not begin with a start code"
    assert wrong(config, b"\0\0\1\xb0\x01") == "it has no frame (VOP)"
    assert wrong(config, frame + bytes(3) + b"\x55") == "it has 24 zero bits in a row, which no encoder writes"
    assert wrong(config, frame + b"\0\0\1\xc6") == "invalid MPEG-4 start code c6"
    assert wrong(config, frame + b"\0\0\1\xc5") == ""


def test_bytes_that_an_encoder_protects_are_damage() -> None:
    """Inside a NAL unit of H.264, and not at its end."""
    for code in (b"\0\0\0", b"\0\0\1", b"\0\0\2"):
        assert "inside a NAL unit, where they are not allowed" in wrong(avc(4), units(4, IDR + code + b"\x55"))
    assert wrong(avc(4), units(4, IDR + b"\0\0\3\x55")) == ""
    assert wrong(avc(4), units(4, IDR + bytes(8))) == ""
    assert wrong(avc(4), units(4, b"\xe5" + IDR[1:])) == "a NAL unit has the header e5, which is not allowed"

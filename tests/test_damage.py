"""Checks of encoded frames on a few bytes of each codec. `test_bad_video.py` has damaged files."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import box
from dali_stream.mp4.damage import ZEROS, checker
from dali_stream.mp4.hidden import hidden
from dali_stream.mp4.sequence_header import leb128
from dali_stream.mp4.slices import is_idr, is_intra_refresh

TOO_LONG = "64 equal bytes in a row, which arithmetic coding does not write"
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
    assert wrong(avc(width), units(width, b"\x09\x10")) == "no slice of a frame"
    other = 4 if width < 4 else 2
    assert wrong(avc(other), frame) != ""


@pytest.mark.parametrize("width", [2, 4])
def test_a_predicted_slice_marks_an_intra_refresh(width: int) -> None:
    assert is_intra_refresh(avc(width), units(width, b"\x09\x10", PREDICTED))
    for whole in (IDR, b"\x41\x88\x84", b"\x41\xb2\x02", b"\x41\x94\x02", b"\x41\x8a\x02"):  # IDR, I of two kinds, SI of two
        assert not is_intra_refresh(avc(width), units(width, b"\x09\x10", whole))
        assert wrong(avc(width), units(width, whole)) == ""
    assert "not a keyframe" in wrong(avc(width), units(width, PREDICTED))
    assert wrong(avc(width), units(width, PREDICTED), key=False) == ""


def vp8(partition: int, predicted: bool = False) -> bytes:
    tag = (partition << 5 | 0x10 | predicted).to_bytes(3, "little")
    return tag + (b"" if predicted else b"\x9d\x01\x2a" + bytes(4)) + b"\x55" * 20


def test_frames_of_vp8() -> None:
    config = entry(b"vp08")
    assert wrong(config, vp8(20)) == ""
    assert wrong(config, vp8(21)) == "its first partition is larger than the packet"
    assert wrong(config, vp8(20, predicted=True), key=False) == ""
    assert wrong(config, vp8(21, predicted=True), key=False) == "its first partition is larger than the packet"
    assert "not a keyframe" in wrong(config, vp8(20, predicted=True))
    assert wrong(config, vp8(20).replace(b"\x9d\x01\x2a", b"\x9d\x01\x2b")) == "missing start code of a keyframe"


def test_images_of_mjpeg() -> None:
    config = entry(b"mp4v", box(b"esds", bytes(4), b"\x04\x0d\x6c\x11"))
    assert wrong(config, b"\xff\xd8\xff\xdb") == ""
    assert wrong(config, b"\xff\xd9\xff\xdb") == "missing start of a JPEG image"


def test_numbers_of_av1_have_seven_bits_a_byte() -> None:
    assert leb128(b"\xaa\x7f", 1) == (127, 2)
    assert leb128(b"\xe5\x8e\x26\xaa", 0) == (624485, 3)
    assert leb128(b"\x80" * 9, 0) == leb128(b"\x80" * 8 + b"\1", 0) == (1 << 62, 0)
    assert leb128(b"\x80" * 7 + b"\1", 0) == (1 << 49, 8)


def obu(kind: int, payload: bytes) -> bytes:
    return bytes([kind << 3 | 2, len(payload)]) + payload


def test_frames_of_av1() -> None:
    config, sequence = entry(b"av01"), obu(1, b"\x00\x00\x00")
    key, predicted = obu(6, b"\x10\x55\x66"), obu(6, b"\x30\x55\x66")
    assert wrong(config, sequence + key) == ""
    assert wrong(config, predicted, key=False) == ""
    assert "not a keyframe" in wrong(config, sequence + predicted)
    assert wrong(config, obu(1, b"\x08\x00\x00") + predicted) == ""  # a still, whose frame header has no such bits
    assert wrong(config, obu(2, b"")) == "no frame"
    assert wrong(config, sequence + key[:-1]) == "its OBUs do not add up to its size"
    for header in (0xB2, 0x33, 9 << 3 | 2):
        assert wrong(config, bytes([header]) + key[1:]) == f"invalid OBU header {header:02x}"
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
    assert "not a keyframe" in wrong(config, predicted)
    for width in (1, 2):
        assert wrong(config, vp9([key, predicted], width)) == ""
        assert "not a keyframe" in wrong(config, vp9([predicted, key], width))
    longer = vp9([key, predicted]).replace(b"\x06\x03", b"\x06\x0d")
    assert wrong(config, longer) == "the sizes in its superframe index do not add up"
    assert wrong(config, b"\x42" + key[1:]) == "invalid frame header 42"
    assert wrong(config, b"\xa2" + key[1:]) == "invalid frame header a2"  # of another profile
    assert wrong(config, key.replace(b"\x42", b"\x43")) == "missing sync code of a keyframe"
    assert wrong(config, key + bytes(80)) == TOO_LONG


@pytest.mark.parametrize("profile", range(4))
def test_profiles_of_vp9(profile: int) -> None:
    """Profile 3 has a bit more in front of the frame's type, and its sync code is not at the beginning of a byte."""
    own, bits = entry(b"vp09", box(b"vpcC", bytes([1, 0, 0, 0, profile]))), (profile & 1) << 5 | (profile & 2) << 3
    shift = profile < 3
    for config in (own, entry(b"vp09")):
        for repeats, predicted, shown in itertools.product((0, 1), repeat=3):
            header = 0x80 | bits | (repeats << 2 | predicted << 1 | shown) << shift
            frame = bytes([header]) + b"\x49\x83\x42\x55"
            is_key = not repeats and not predicted
            assert wrong(config, frame, key=False) == ""
            assert ("not a keyframe" in wrong(config, frame)) != is_key
            assert hidden("vp9", frame) == (not repeats and not shown)
            without = wrong(config, frame.replace(b"\x49", b"\x48"), key=False)
            assert without == ("missing sync code of a keyframe" if is_key and profile < 3 else "")
    for other in {0x80, 0xA0, 0x90, 0xB0} - {0x80 | bits}:
        assert "invalid frame header" in wrong(own, bytes([other | 4]) + b"\x49\x83\x42", key=False)
        assert wrong(entry(b"vp09"), bytes([other | 4]) + b"\x49\x83\x42", key=False) == ""


@pytest.mark.parametrize("width", range(1, 5))
def test_superframes_of_vp9(width: int) -> None:
    """Up to eight frames, each with a length of one to four bytes. Empty ones are not counted."""
    config, key, predicted = entry(b"vp09"), b"\x80\x49\x83\x42\x55\x66", b"\x84\x55\x66"
    for count in range(1, 9):
        frames = [key, *[predicted] * (count - 1)]
        data = vp9(frames, width)
        assert wrong(config, data) == ""
        assert hidden("vp9", data) == count
        assert hidden("vp9", vp9([*frames[:-1], b"", frames[-1]][:8], width)) == min(count, 7)
        for last in (data[-1] ^ 0x80, data[-1] ^ 0x20):  # no marker of an index, so these are one frame
            assert hidden("vp9", data[:-1] + bytes([last])) == 1
        damaged = data.replace(bytes([data[-1]]) + b"\x06", bytes([data[-1]]) + b"\xf0")
        assert wrong(config, damaged) == "the sizes in its superframe index do not add up"
    too_short = bytes([0xC0 | (width - 1) << 3 | 7])
    assert hidden("vp9", b"\x84" + too_short * 2) == 1


def test_frames_of_mpeg_4() -> None:
    config = entry(b"mp4v", box(b"esds", bytes(4), b"\x04\x0d\x20\x11"))
    frame = b"\0\0\1\xb6\x55\x66"
    assert wrong(config, frame) == ""
    assert wrong(config, b"\0\0\1\xb0\x01" + frame + bytes(8)) == ""
    assert wrong(config, frame[1:]) == "missing start code at its beginning"
    assert wrong(config, b"\0\0\1\xb0\x01") == "no frame (VOP)"
    assert wrong(config, frame + bytes(3) + b"\x55") == "24 zero bits in a row, which no encoder writes"
    for code in range(256):
        assert wrong(config, frame + bytes([0, 0, 1, code])) == ""
    assert wrong(config, frame + b"\0\0\1") == ""
    check = checker(config)
    assert check
    assert check(frame, 0, len(frame), True) == ""
    assert wrong(config, frame + bytes(9)) == ZEROS


def test_bytes_that_an_encoder_protects_are_damage() -> None:
    """Inside a NAL unit of H.264, and not at its end."""
    for code in (b"\0\0\0", b"\0\0\1", b"\0\0\2"):
        error = f"invalid bytes {code.hex(' ')} inside a NAL unit"
        assert wrong(avc(4), units(4, IDR + code + b"\x55")) == error
    assert wrong(avc(4), units(4, IDR + b"\0\0\3\x55")) == ""
    assert wrong(avc(4), units(4, IDR + bytes(8))) == ""
    assert wrong(avc(4), units(4, IDR + bytes(9))) == ZEROS
    assert wrong(avc(4), units(4, b"\x06\5" + bytes(9), IDR)) == ZEROS
    assert wrong(avc(4), units(4, b"\xe5" + IDR[1:])) == "invalid NAL unit header e5"


@given(st.integers(1, 4), st.binary(max_size=40), st.integers(0, 300), st.integers(0, 60), st.binary(min_size=1, max_size=9))
def test_zeros_at_the_end_of_a_unit_are_padding_and_zeros_in_it_are_damage(
    width: int, body: bytes, zeros: int, place: int, rest: bytes
) -> None:
    slice_ = IDR + body.replace(b"\0", b"\x55") + b"\x80"
    padded = slice_ + bytes(zeros)
    assume(len(padded) < 1 << 8 * width)
    assert wrong(avc(width), units(width, padded)) == (ZEROS if zeros > 8 else "")
    hole = padded[: min(place, len(slice_))] + bytes(3) + rest.rstrip(b"\0") + b"\x80"
    assume(place >= len(IDR) and len(hole) < 1 << 8 * width)
    assert "inside a NAL unit" in wrong(avc(width), units(width, hole))


def test_units_before_a_slice_may_have_start_codes_between_them() -> None:
    prefix, code = b"\x6e\x80\x00\x40", b"\0\0\0\1"
    for config, front, key in ((avc(4), prefix, IDR), (hevc(4), b"\x46\x01\x50", b"\x26\x01\xaa")):
        frame = units(4, front + code + key)
        assert wrong(config, frame) == wrong(config, units(4, front, key)) == ""
        assert is_idr(config, frame) is True
        assert is_idr(config, frame[:-1]) is True  # the beginning of a frame is enough
        assert wrong(config, units(4, front + code + front + b"\0\0\1" + key)) == ""
        assert wrong(config, units(4, front + code + key) + units(4, key)) == ""
        for inside in (front + code + key + code + key, key + code + key, front + code + key + b"\0\0\0\x55"):
            assert "inside a NAL unit" in wrong(config, units(4, inside))
        assert wrong(config, frame[:-1]) == "its NAL units do not add up to its size"
        assert wrong(config, units(4, front + code)) != ""
        assert wrong(config, units(4, front + code + front)) == "no slice of a frame"
    assert "not a keyframe" in wrong(avc(4), units(4, prefix + code + PREDICTED))
    assert is_intra_refresh(avc(4), units(4, prefix + code + PREDICTED))
    assert wrong(avc(4), units(4, prefix + code + b"\xe5" + IDR[1:])) == "invalid NAL unit header e5"


def hevc(width: int) -> bytes:
    """A sample description of HEVC where the length of a NAL unit takes `width` bytes, after another box."""
    return entry(b"hvc1", box(b"pasp", bytes(8)), box(b"hvcC", bytes(21) + bytes([0xFC | width - 1, 0])))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_kinds_of_nal_units_of_hevc(width: int) -> None:
    config = hevc(width)
    for kind, layer in itertools.product(range(64), (0, 1)):
        frame = units(width, b"\x46\x01\x10", bytes([kind << 1 | layer, 1, 0xAA]))
        assert wrong(config, frame, key=False) == ("" if kind < 32 else "no slice of a frame")
        assert ("not a keyframe" in wrong(config, frame)) == (kind < 16 or 24 <= kind < 32)
        assert is_idr(config, frame) == (kind in (19, 20) if kind < 32 else None)
    key = b"\x26\x01\xaa"
    assert wrong(config, units(width, b"\xa6\x01\xaa")) == "invalid NAL unit header a601"
    for temporal in range(8):
        error = "" if temporal else "invalid NAL unit header 2608"
        assert wrong(config, units(width, bytes([0x26, 8 | temporal, 0xAA]))) == error
    assert wrong(config, units(width, b"\x48\x01", key)) == ""
    assert wrong(config, units(width, b"\x48", key)) == "its NAL units do not add up to its size"
    assert wrong(config, units(width, b"", key)) == "its NAL units do not add up to its size"
    assert wrong(config, units(width, key, b"\x02\x01\xaa")) == ""  # a key frame's first slice decides
    assert is_idr(config, units(width, key)[: width + 1])
    assert is_idr(config, units(width, key)[:width]) is None


@pytest.mark.parametrize("width", [1, 2, 4])
def test_kinds_of_nal_units_of_h264(width: int) -> None:
    config = avc(width)
    for kind, reference in itertools.product(range(32), (0, 0x60)):
        for intra, slice_head in ((True, b"\x88"), (False, b"\x9a")):
            frame = units(width, b"\x0b", bytes([kind | reference]) + slice_head + b"\x55")
            is_slice = 1 <= kind <= 5
            assert wrong(config, frame, key=False) == ("" if is_slice else "no slice of a frame")
            assert ("not a keyframe" in wrong(config, frame)) == (is_slice and not (intra or kind == 5))
            assert is_intra_refresh(config, frame) == (is_slice and not (intra or kind == 5))
            assert is_idr(config, frame) == (kind == 5 if is_slice else None)
    assert wrong(config, units(width, b"", IDR)) == "its NAL units do not add up to its size"
    assert wrong(config, units(width, IDR, PREDICTED)) == ""


def golomb(number: int) -> str:
    return f"{number + 1:b}".zfill(2 * (number + 1).bit_length() - 1)


def test_slices_of_h264_that_decoding_can_start_at() -> None:
    """I and SI slices, by themselves (2, 4) or because all slices of the frame are (7, 9)."""
    for kind in range(10):
        bits = golomb(0) + golomb(kind)
        for rest in range(1 << 8 - len(bits)) if len(bits) < 8 else (0,):
            head = int(bits + (f"{rest:b}".zfill(8 - len(bits)) if len(bits) < 8 else ""), 2)
            frame = units(4, bytes([0x41, head, 0x55]))
            assert wrong(avc(4), frame) == ("" if kind in (2, 4, 7, 9) else "decoding starts at it, but it is not a keyframe")
    assert "not a keyframe" in wrong(avc(4), units(4, b"\x41"))
    assert "not a keyframe" in wrong(avc(4), units(4, b"\x41\x4b"))  # its first macroblock is not 0


def picture_set(number: int, sequence: int, cabac: int, size: int = 0) -> bytes:
    """A picture parameter set with its length in front."""
    bits = golomb(number) + golomb(sequence) + str(cabac) + "1"
    body = b"\x68" + int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big") + bytes(size)
    return len(body).to_bytes(2, "big") + body


@pytest.mark.parametrize("sequence_sets", [[], [b"\x67\x64\0"], [b"\x67" * 3, b"\x67" * 260]], ids=len)
def test_runs_of_ones_are_damage_where_all_frames_have_arithmetic_coding(sequence_sets: list[bytes]) -> None:
    front = bytes([1, 100, 0, 30, 0xFF, 0xE0 | len(sequence_sets)])
    front += b"".join(len(each).to_bytes(2, "big") + each for each in sequence_sets)
    frame = units(4, IDR + b"\xff" * 80)
    assert wrong(entry(b"avc1", box(b"avcC", front)), frame) == ""
    assert wrong(entry(b"avc1", box(b"avcC", front + b"\0")), frame) == ""
    for number, sequence in itertools.product((0, 1, 6, 255), (0, 1, 31)):
        for flags in ((0,), (1,), (1, 1), (1, 0), (0, 1)):
            sets = [picture_set(number, sequence, flag, 12 * place) for place, flag in enumerate(flags)]
            body = front + bytes([len(sets)]) + b"".join(sets)
            config = entry(b"avc1", box(b"pasp", bytes(8)), box(b"avcC", body))
            assert wrong(config, frame) == (TOO_LONG if all(flags) else "")


def test_runs_are_found_wherever_they_begin() -> None:
    for begin, byte in itertools.product(range(9), (b"\0", b"\xff")):
        for length, error in ((63, ""), (64, TOO_LONG)):
            assert wrong(entry(b"av01"), obu(6, b"\x10" + b"\x55" * begin + byte * length + b"\x55")) == error
        assert wrong(hevc(4), units(4, b"\x26\x01" + b"\x55" * begin + byte * 64 + b"\x55")) == TOO_LONG


def test_units_of_av1() -> None:
    config, frame = entry(b"av01"), b"\x10\x55\x66"
    for kind, extended in itertools.product(range(16), (0, 4)):
        extension = b"\x40" if extended else b""
        for sized in (0, 2):
            data = bytes([kind << 3 | extended | sized]) + extension + (bytes([len(frame)]) if sized else b"") + frame
            if kind in (0, *range(9, 15)):
                assert wrong(config, data) == f"invalid OBU header {data[0]:02x}"
            else:
                assert wrong(config, data) == ("" if kind in (3, 6) else "no frame")
            if sized:
                assert wrong(config, data[:-1], key=False)
            for bit in (0x80, 1):
                assert "invalid OBU header" in wrong(config, bytes([data[0] | bit]) + data[1:])
    for head in range(256):
        expected = "decoding starts at it, but it is not a keyframe" if head & 0xE0 else ""
        assert wrong(config, obu(6, bytes([head, 0x55]))) == expected
        assert wrong(config, obu(6, frame) + obu(6, bytes([head, 0x55]))) == ""  # only a sample's first frame is the keyframe
    assert wrong(config, obu(4, b"\x55") + obu(3, frame), key=False) == ""
    assert "not a keyframe" in wrong(config, obu(3, b""))
    assert wrong(config, b"\x34", key=False) == "its OBUs do not add up to its size"
    assert wrong(config, obu(1, b"") + obu(6, frame)) == ""


def test_hidden_frames_of_av1() -> None:
    """Frames that show none before, and have the flag to be shown at bit 4. A still has no such flags."""
    for head in range(256):
        is_hidden = not head & 0x80 and not head & 0x10
        for kind in (3, 6):
            assert hidden("av1", obu(2, b"") + obu(kind, bytes([head, 0x55]))) == is_hidden
            assert hidden("av1", obu(1, b"\x00") + obu(kind, bytes([head])) + obu(kind, b"\x00")) == is_hidden + 1
            assert hidden("av1", obu(1, b"\x08") + obu(kind, bytes([head, 0x55]))) == 0
            extended = bytes([kind << 3 | 6, 0x40, 2, head, 0x55])
            assert hidden("av1", extended + bytes([kind << 3, head, 0x55])) == 2 * is_hidden
        for kind in (1, 2, 4, 5, 7, 8, 15):
            assert hidden("av1", obu(kind, bytes([head & 0xF7]))) == 0
    assert hidden("av1", b"") == 0
    assert hidden("av1", obu(3, b"") + obu(6, b"\x00")) == 1


def test_hidden_frames_of_vp8() -> None:
    assert hidden("vp8", vp8(20)) == 0
    for head in range(256):
        assert hidden("vp8", bytes([head]) + bytes(9)) == (not head & 0x10)


def test_frames_of_vp8_fit_their_first_partition() -> None:
    config = entry(b"vp08")
    for partition in (0, 1, 7, 19):
        for predicted in (False, True):
            whole = vp8(partition, predicted)[: (3 if predicted else 10) + partition]
            assert wrong(config, whole, key=not predicted) == ""
            assert wrong(config, whole[:-1], key=not predicted) != ""


def test_the_checks_need_the_box_of_their_codec() -> None:
    for codec, kind, place in ((b"avc1", b"avcC", 4), (b"hvc1", b"hvcC", 21)):
        for boxes in ([], [box(kind, bytes(place))]):
            with pytest.raises(DecodeError, match=r"decoder configuration .* is missing or truncated"):
                checker(entry(codec, *boxes))
    assert checker(entry(b"hvc1", box(b"hvcC", bytes(22)))) is not None
    assert not is_intra_refresh(entry(b"avc1"), units(4, b"\x09\x10", IDR))
    assert is_intra_refresh(entry(b"avc1"), units(4, b"\x09\x10", PREDICTED))
    assert is_intra_refresh(avc(2), units(2, b"\x09\x10", PREDICTED)[:-1] + b"\x02\x55")
    assert not is_intra_refresh(avc(2), units(2, b"\x09\x10"))
    assert not is_intra_refresh(avc(2), units(2, b"\x65\x9a\x02", PREDICTED))
    behind = entry(b"avc1", box(b"pasp", bytes(8)), box(b"avcC", bytes([1, 66, 0, 30, 0xFD, 0xE0, 0])))
    assert is_intra_refresh(behind, units(2, b"\x09\x10", PREDICTED))
    assert checker(entry(b"abcd")) is None

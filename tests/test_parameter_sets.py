"""Headers of H.264, HEVC and AV1: the parser agrees with FFmpeg's on real files, and survives any bytes."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import videos as data
from support.slow import examples, slow, slow_after
from support.tools import table_of

from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import box
from dali_stream.mp4.format import VideoFormat, codec_of, describe
from dali_stream.mp4.parameter_sets import Sequence, h264_sequences, hevc_sequences
from dali_stream.mp4.sequence_header import av1_sequences

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def x264(params: str = "", pixels: str = "yuv420p") -> tuple[str, ...]:
    return (*data.X264, "-pix_fmt", pixels, "-x264-params", params or "keyint=2")


def x265(params: str, pixels: str = "yuv420p") -> tuple[str, ...]:
    return (*data.X265, "-pix_fmt", pixels, "-x265-params", f"{params}:log-level=none")


INTERLACED = (*x264(), "-flags", "+ildct+ilme", "-top", "1")
BT709_IN_THE_VUI = (*x264(), "-bsf:v", "h264_metadata=matrix_coefficients=1")
Kind = tuple[tuple[int, int], tuple[str, ...], dict[str, Any]]  # size, encoder, what the headers say
KINDS: dict[str, Kind] = {
    "h264 of 360 lines": ((360, 640), x264(), {"coded": (368, 640)}),
    "h264, interlaced": ((360, 640), INTERLACED, {"coded": (384, 640), "interlaced": True}),
    "h264, BT.709 in the VUI": ((128, 160), BT709_IN_THE_VUI, {"matrix": 1}),
    "h264, scaling lists": ((128, 160), x264("cqm=jvt", "yuv422p10le"), {"chroma": "422", "depth": 10}),
    "h264, full range": ((128, 160), (*x264("range=pc"), "-color_range", "pc"), {"full_range": True}),
    "h264, gray": ((128, 160), x264("", "gray"), {"chroma": "gray"}),
    "h264, lossless 4:4:4": ((122, 150), (*x264("", "yuv444p"), "-qp", "0"), {"chroma": "444", "coded": (128, 160)}),
    "hevc, blocks of 8": ((360, 640), x265("min-cu-size=8"), {"coded": (360, 640)}),
    "hevc, blocks of 16": ((360, 640), x265("min-cu-size=16"), {"coded": (368, 640)}),
    "hevc, blocks of 32": ((360, 640), x265("min-cu-size=32"), {"coded": (384, 640)}),
    "hevc, blocks of 8, 720 lines": ((720, 320), x265("min-cu-size=8"), {"coded": (720, 320)}),
    "hevc, blocks of 16, 720 lines": ((720, 320), x265("min-cu-size=16"), {"coded": (720, 320)}),
    "hevc, blocks of 32, 720 lines": ((720, 320), x265("min-cu-size=32"), {"coded": (736, 320)}),
    "hevc, scaling lists, layers, VUI": (
        (128, 160),
        x265("scaling-list=default:temporal-layers=2:colormatrix=bt709:range=full:sar=3", "yuv420p10le"),
        {"depth": 10, "matrix": 1, "full_range": True},
    ),
    "hevc, fields": ((128, 160), x265("interlace=tff"), {"interlaced": True, "coded": (128, 160)}),
    "hevc, 4:4:4": ((128, 160), x265("colormatrix=smpte170m", "yuv444p"), {"chroma": "444", "matrix": 6}),
    "av1": ((122, 150), data.av1(2), {"coded": (122, 150)}),
    "av1, 10 bit": ((128, 160), (*data.av1(2, "yuv420p10le"), "-colorspace", "bt709"), {"depth": 10, "matrix": 1}),
    "av1 of odd size": ((121, 151), ("-c:v", "libaom-av1", "-cpu-used", "8", "-pix_fmt", "yuv420p"), {"coded": (121, 151)}),
    "av1, 4:4:4": ((128, 160), ("-c:v", "libaom-av1", "-cpu-used", "8", "-pix_fmt", "yuv444p"), {"chroma": "444"}),
    "av1, a still": (
        (128, 160),
        ("-c:v", "libaom-av1", "-cpu-used", "8", "-pix_fmt", "yuv420p", "-still-picture", "1", "-frames:v", "1"),
        {},
    ),
}


@pytest.mark.parametrize("name", slow_after(6, KINDS))
def test_the_headers_say_what_ffmpeg_reads_in_them(name: str, tmp_path: Path) -> None:
    size, arguments, expected = KINDS[name]
    path = data.encode(data.draw((2,), size=size), tmp_path / "a.mp4", arguments)
    _, video = table_of(path)
    assert video.header_error == ""
    assert {key: getattr(video, key) for key in expected} == expected
    check_against_ffmpeg(path, video)


@pytest.mark.parametrize("path", sorted(SHARED_DATA.rglob("file-000.mp4")) or [None], ids=str)
def test_the_headers_of_recordings(path: Path | None) -> None:
    if path is None:
        pytest.skip("needs the recordings in shared/data, beside the project")
    _, video = table_of(path)
    assert video.header_error == ""
    check_against_ffmpeg(path, video)


def check_against_ffmpeg(path: Path, video: VideoFormat) -> None:
    """Compares with ffprobe, which opens the decoder, and with the fields that FFmpeg's bitstream filter lists."""
    shown = "stream=pix_fmt,width,height,coded_width,coded_height,color_space,color_range"
    command = ["ffprobe", "-v", "error", "-select_streams", "v", "-show_entries", shown, "-of", "json", str(path)]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["streams"][0]
    assert (said["height"], said["width"]) == (video.height, video.width)
    if video.chroma != "gray":  # FFmpeg decodes gray H.264 to 4:2:0
        assert video.pixel_format == said["pix_fmt"].replace("yuvj", "yuv")
    assert said.get("color_space", "unknown") == {None: "unknown", 1: "bt709", 6: "smpte170m"}[video.matrix]
    assert (said.get("color_range", "tv") == "pc") == video.full_range
    fields = header_fields(path)
    if video.codec == "h264":
        lines = 16 * (fields["pic_height_in_map_units_minus1"] + 1) * (2 - fields["frame_mbs_only_flag"])
        assert video.coded == (lines, 16 * (fields["pic_width_in_mbs_minus1"] + 1))
        assert video.interlaced == (not fields["frame_mbs_only_flag"])
    elif video.codec == "hevc":
        assert video.coded == (said["coded_height"], said["coded_width"])
        assert video.coded == (fields["pic_height_in_luma_samples"], fields["pic_width_in_luma_samples"])
        assert video.interlaced == bool(fields.get("field_seq_flag"))
    else:
        assert video.coded == (fields["max_frame_height_minus_1"] + 1, fields["max_frame_width_minus_1"] + 1)


def header_fields(path: Path) -> dict[str, int]:
    """The first value of each field in a file's headers, by FFmpeg's filter trace_headers."""
    command = [
        "ffmpeg",
        "-hide_banner",
        "-i",
        str(path),
        "-map",
        "0:v",
        "-c",
        "copy",
        "-bsf:v",
        "trace_headers",
        "-f",
        "null",
        "-",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"\] \d+ +(\w+) +[01]+ = (-?\d+)$", said, re.MULTILINE)
    return {name: int(value) for name, value in reversed(found)}


# ---- headers that do not fit


def failure(read: Any, body: bytes) -> str:
    """The error that a parser raises, or an empty string."""
    try:
        read(body)
    except DecodeError as error:
        return str(error)
    return ""


def changed(path: Path, kind: bytes, old: bytes, new: bytes) -> Path:
    """Replaces bytes within a box of a file, at the same length."""
    content = path.read_bytes()
    at = content.index(old, content.index(kind))
    path.write_bytes(content[:at] + new + content[at + len(old) :])
    return path


def test_av1_that_declares_other_lines_than_it_codes(tmp_path: Path) -> None:
    """As av1_nvenc does for 1080 lines."""
    path = data.encode(data.draw((2,), size=(120, 160)), tmp_path / "a.mp4", data.av1(2))
    changed(path, b"av01", struct.pack(">HH", 160, 120), struct.pack(">HH", 160, 128))
    _, video = table_of(path)
    assert (video.height, video.coded) == (128, (120, 160))
    assert video.header_error == "its bitstream must have frames of 128×160, as its sample description says, got 120×160"


def test_the_level_of_av1_has_no_tier_up_to_number_7(tmp_path: Path) -> None:
    _, body = parts(data.encode(data.draw((2,)), tmp_path / "a.mp4", data.av1(2)))
    at = 4 + 2 + 3  # after av1C's own bytes and the header of the OBU: 24 bits in front of the level
    highest = body[:at] + bytes([7 << 3 | body[at] & 7]) + body[at + 1 :]
    assert highest != body
    assert av1_sequences(highest) == av1_sequences(body)


def entry(codec: bytes, *boxes: bytes) -> bytes:
    """A sample description of 160×128."""
    return box(codec, bytes(24), struct.pack(">HH", 160, 128), bytes(50), *boxes)


def parts(path: Path) -> tuple[bytes, bytes]:
    """(kind, body) of the decoder configuration in a file's sample description."""
    stsd = data.box(data.boxes(path.read_bytes()), *data.STBL, b"stsd")[1]
    kind, body = data.boxes(stsd[8 + 86 :])[0]
    return kind, body


def golomb(*numbers: int) -> str:
    """Numbers in exponential Golomb code."""
    return "".join(f"{number + 1:b}".zfill(2 * (number + 1).bit_length() - 1) for number in numbers)


def avcc_of(macroblocks: tuple[int, int], profile: int = 66, fields: str = "") -> bytes:
    """An avcC with an SPS of this (height, width) in macroblocks. `fields` are bits that some profiles have after the id."""
    height, width = macroblocks
    bits = f"{profile:08b}{30:016b}" + golomb(0) + fields + golomb(0, 2, 1) + "0" + golomb(width - 1, height - 1) + "10001"
    sps = b"\x67" + int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    return bytes([1, 66, 0, 30, 0xFF, 0xE1]) + struct.pack(">H", len(sps)) + sps + b"\0"


def test_frames_may_have_the_largest_size_of_a_sample_description() -> None:
    for size in (8, 10), (4096, 10), (10, 4096):
        [sequence] = h264_sequences(avcc_of(size))
        assert sequence.coded == sequence.size == (16 * size[0], 16 * size[1])
        assert (sequence.chroma, sequence.depth, sequence.matrix, sequence.full_range) == ("420", 8, None, False)
    for size in (4097, 10), (10, 4097):
        assert "must be at most 4095, got 4096" in failure(h264_sequences, avcc_of(size))


@pytest.mark.parametrize(("chroma", "lists"), [("420", 8), ("444", 12)])
def test_scaling_lists_of_h264_are_skipped(chroma: str, lists: int) -> None:
    formats = golomb(1) if chroma == "420" else golomb(3) + "0"
    for last in (lists - 1, 5, 6):
        flags = "".join("1" + golomb(*([0] * 15 + [16])[:16]) * (last < 6) + golomb(16) * (last >= 6) if number == last else "0"
                        for number in range(lists))  # fmt: skip
        [sequence] = h264_sequences(avcc_of((8, 10), 244, formats + golomb(0, 0) + "0" + "1" + flags))
        assert (sequence.chroma, sequence.coded) == (chroma, (128, 160))


PPS = b"\0\3\x68\xce\x3c"


@pytest.mark.parametrize(
    ("codec", "kind", "body", "profile", "chroma", "depth"),
    [
        (b"av01", b"av1C", bytes([0x81, 0x00, 0x0C, 0]), 0, "420", 8),
        (b"av01", b"av1C", bytes([0x81, 0x20, 0x40, 0]), 1, "444", 10),
        (b"av01", b"av1C", bytes([0x81, 0x40, 0x68, 0]), 2, "422", 12),
        (b"av01", b"av1C", bytes([0x81, 0x00, 0x1C, 0]), 0, "gray", 8),
        (b"hvc1", b"hvcC", bytes([1, 0x61, *bytes(14), 0xFD, 0xF8, *bytes(5)]), 1, "420", 8),
        (b"hvc1", b"hvcC", bytes([1, 0x64, *bytes(14), 0xFE, 0xFA, *bytes(5)]), 4, "422", 10),
        (b"avc1", b"avcC", bytes([1, 122, 0, 30, 0xFF, 0xE0, 1]) + PPS + bytes([0xFE, 0xFA, 0xFA, 0]), 122, "422", 10),
        (b"avc1", b"avcC", bytes([1, 66, 0, 30, 0xFF, 0xE0, 1]) + PPS + bytes([0xFE, 0xFA, 0xFA, 0]), 66, "420", 8),
        (b"avc1", b"avcC", bytes([1, 100, 0, 30, 0xFF, 0xE0, 1]) + PPS, 100, "420", 8),
        (
            b"avc1",
            b"avcC",
            bytes([1, 122, 0, 30, 0xFF, 0xE2]) + 2 * PPS + b"\2" + 2 * PPS + bytes([0xFD, 0xF9, 0xFA]),
            122,
            "420",
            9,
        ),
        (b"avc1", b"avcC", bytes([1, 77, 0, 30, 0xFF, 0xE0, 1]) + PPS + bytes([0xFE, 0xFA, 0xFA, 0]), 77, "420", 8),
        (b"avc1", b"avcC", bytes([1, 88, 0, 30, 0xFF, 0xE0, 1]) + PPS + bytes([0xFE, 0xFA, 0xFA, 0]), 88, "420", 8),
        (b"vp09", b"vpcC", bytes([1, 0, 0, 0, 3, 10, 0xA4]), 3, "422", 10),
        (b"vp09", b"vpcC", bytes([1, 0, 0, 0, 0, 10, 0x80]), 0, "420", 8),
        (b"vp09", b"vpcC", bytes([1, 0, 0, 0, 0, 10, 0x83]), 0, "420", 8),
        (b"vp09", b"vpcC", bytes([1, 0, 0, 0, 1, 10, 0xC7]), 1, "444", 12),
    ],
)
def test_the_box_says_chroma_and_depth_where_headers_are_missing(
    codec: bytes, kind: bytes, body: bytes, profile: int, chroma: str, depth: int
) -> None:
    video = describe(entry(codec, box(kind, body)))
    assert (video.profile, video.chroma, video.depth) == (profile, chroma, depth)
    assert (video.header_error != "") == (codec != b"vp09")


def test_a_sample_description_has_a_size() -> None:
    for width, height in ((0, 128), (160, 0)):
        with pytest.raises(
            DecodeError, match=f"the frame size of the sample description must be positive, got {width}×{height}"
        ):
            describe(box(b"avc1", bytes(24), struct.pack(">HH", width, height), bytes(50)))


def test_all_forms_of_the_box_of_av1() -> None:
    """Without a sequence header: profile and level, then tier, high bit depth, 12 bit, gray, and two of subsampling."""
    for byte in range(256):
        high, twelve, gray, wide, low = (bool(byte & 1 << bit) for bit in (6, 5, 4, 3, 2))
        video = describe(entry(b"av01", box(b"av1C", bytes([0x81, 0x5F, byte, 0]))))
        chroma = "gray" if gray else "420" if (wide and low) or low else "422" if wide else "444"
        assert (video.profile, video.chroma, video.depth) == (2, chroma, 12 if high and twelve else 10 if high else 8)


@pytest.mark.parametrize(
    ("colour", "matrix"),
    [
        (b"nclx" + bytes([0, 9, 0, 16, 0, 9, 0]), 9),
        (b"nclc" + bytes([0, 1, 0, 1, 0, 5]), 5),
        (b"nclc" + bytes([0, 1, 0, 1, 0]), None),
        (b"prof" + bytes([0, 1, 0, 1, 0, 5]), None),
    ],
)
def test_the_colours_of_a_sample_description(colour: bytes, matrix: int | None) -> None:
    assert describe(entry(b"vp09", box(b"colr", colour))).matrix == matrix


@pytest.mark.parametrize(
    ("video", "pixels", "matrix", "like_bt601"),
    [
        (VideoFormat("h264", 100, "420", 8, 8, 8), "yuv420p", "not specified", True),
        (VideoFormat("h264", 100, "422", 9, 8, 8, 2), "yuv422p9le", "not specified", True),
        (VideoFormat("av1", 0, "gray", 8, 8, 8, 6), "gray", "BT.601", True),
        (VideoFormat("av1", 0, "gray", 10, 8, 8, 5), "gray10le", "BT.601", True),
        (VideoFormat("png", None, "420", 8, 8, 8, 0), "rgb24", "RGB", False),
        (VideoFormat("hevc", 1, "444", 12, 8, 8, 1), "yuv444p12le", "BT.709", False),
        (VideoFormat("hevc", 1, "444", 8, 8, 8, 9), "yuv444p", "BT.2020", False),
        (VideoFormat("hevc", 1, "444", 8, 8, 8, 10), "yuv444p", "BT.2020", False),
        (VideoFormat("hevc", 1, "444", 8, 8, 8, 7), "yuv444p", "matrix 7", False),
    ],
)
def test_a_format_has_names(video: VideoFormat, pixels: str, matrix: str, like_bt601: bool) -> None:
    assert (video.pixel_format, video.matrix_name, video.like_bt601) == (pixels, matrix, like_bt601)


def test_the_bitstream_counts_where_its_box_differs() -> None:
    """But a matrix that only the sample description has stays."""
    colour = box(b"colr", b"nclx" + bytes([0, 1, 0, 1, 0, 9, 0]))
    video = describe(entry(b"avc1", box(b"avcC", avcc_of((8, 10))), colour))
    assert (video.header_error, video.coded, video.matrix) == ("", (128, 160), 9)
    for seed in range(40):
        avcc, expected = h264_header(seed)
        video = describe(entry(b"avc1", box(b"avcC", in_avcc(avcc)), colour))
        assert (video.chroma, video.depth, video.coded) == (expected.chroma, expected.depth, expected.coded)
        assert (video.interlaced, video.full_range) == (expected.interlaced, expected.full_range)
        assert video.matrix == (9 if expected.matrix is None else expected.matrix)
        assert (video.height, video.width) == (128, 160)
        assert "must have frames of 128×160, as its sample description says, got" in video.header_error


@pytest.mark.parametrize(
    ("number", "codec"), [(0x20, "mpeg4"), (0x6C, "mjpeg"), (0x6D, "png"), (0xB1, "vp9"), (0x61, "mp4v-61")]
)
def test_an_entry_of_mpeg_4_names_its_codec_by_a_number(number: int, codec: str) -> None:
    assert codec_of(entry(b"mp4v", box(b"esds", bytes(4), b"\x04\x0d", bytes([number]), b"\x11"))) == codec


@pytest.mark.parametrize(
    ("codec", "kind", "what"), [(b"avc1", "avcC", "SPS"), (b"hvc1", "hvcC", "SPS"), (b"av01", "av1C", "sequence header")]
)
def test_missing_headers_are_named(codec: bytes, kind: str, what: str) -> None:
    assert describe(entry(codec)).header_error == f"missing {what} in {kind}"


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_headers_that_are_cut_short_are_named(codec: str, tmp_path: Path) -> None:
    encoder = {"h264": x264(), "hevc": x265("keyint=2"), "av1": data.av1(2)}[codec]
    _, body = parts(data.encode(data.draw((2,)), tmp_path / "a.mp4", encoder))
    read = {"h264": h264_sequences, "hevc": hevc_sequences, "av1": av1_sequences}[codec]
    assert len(read(body)) == 1
    errors = [error for end in range(1, len(body)) if (error := failure(read, body[:end]))]
    assert len(errors) > 5
    assert all("truncated" in error for error in errors)


def test_parameter_sets_that_differ_are_named(tmp_path: Path) -> None:
    sps = []
    for size in (128, 160), (144, 160):
        _, avcc = parts(data.encode(data.draw((2,), size=size), tmp_path / f"{size[0]}.mp4", x264()))
        sps.append(avcc[6 : 8 + int.from_bytes(avcc[6:8], "big")])
    both = avcc[:5] + b"\xe2" + b"".join(sps) + avcc[6 + len(sps[1]) :]
    assert describe(entry(b"avc1", box(b"avcC", both))).header_error == "avcC must have one SPS, got 2 that differ"


@pytest.mark.parametrize("read", [h264_sequences, hevc_sequences, av1_sequences])
@given(body=st.binary(max_size=400), unit=st.binary(max_size=300))
@examples(400)
def test_any_bytes_are_read_or_refused(read: Any, body: bytes, unit: bytes) -> None:
    """As a whole box, and as one header in a box of the right form."""
    sized = struct.pack(">H", len(unit) + 2)
    forms = {
        h264_sequences: bytes([1, 100, 0, 30, 255, 225]) + struct.pack(">H", len(unit) + 1) + b"\x67" + unit,
        hevc_sequences: bytes(22) + b"\x01\x21\0\x01" + sized + b"\x42\x01" + unit,
        av1_sequences: bytes(4) + b"\x08" + unit,
    }
    for given_bytes in (body, forms[read]):
        assert len(failure(read, given_bytes)) < 200


@pytest.mark.parametrize("codec", ["h264", "hevc", slow("av1")])
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
@examples(400)
def test_changed_bytes_of_a_real_header_are_read_or_refused(
    codec: str, flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    encoder = {"h264": x264(), "hevc": x265("temporal-layers=2:keyint=2"), "av1": data.av1(2)}[codec]
    path = tmp_path_factory.getbasetemp() / f"{codec}.mp4"
    if not path.exists():
        data.encode(data.draw((2,)), path, encoder)
    kind, body = parts(path)
    broken = bytearray(body)
    for place, value in flips:
        broken[place % len(broken)] = value
    config = entry({"h264": b"avc1", "hevc": b"hvc1", "av1": b"av01"}[codec], box(kind, bytes(broken)))
    if failure(describe, config):
        return
    video = describe(config)
    assert video.header_error or video.coded
    assert max(video.coded or (0,)) <= 1 << 17


# ---- headers in all forms that the standards allow


class Invalid(Exception):
    """A number exceeds its limit: the end of the parser's error, and the header up to this number."""


class Header:
    """Writes a header bit by bit, with contents by a seed.

    Args:
        seed: Chooses what the header contains.
        wrong: Index of the number that exceeds its limit by one, for which `Invalid` is raised. Default: none.
    """

    def __init__(self, seed: int, wrong: int = -1) -> None:
        self.random, self.wrong, self.numbers, self.bits = random.Random(seed), wrong, 0, ""

    def put(self, value: int, count: int) -> int:
        self.bits += f"{value:0{count}b}"
        return value

    def skip(self, count: int) -> None:
        """Bits that mean nothing here."""
        self.bits += "".join(self.random.choices("01", k=count))

    def flag(self) -> bool:
        return bool(self.put(self.random.getrandbits(1), 1))

    def number(self, most: int = (1 << 32) - 2, value: int | None = None) -> int:
        """A number in exponential Golomb code: 0, the largest one that is allowed, or any between."""
        if self.numbers == self.wrong:
            self.bits += golomb(most + 1)
            raise Invalid(f"must be at most {most}, got {most + 1}", self.data())
        self.numbers += 1
        value = self.random.choice((0, most, self.random.randint(0, min(most, 40)))) if value is None else value
        self.bits += golomb(value)
        return value

    def data(self) -> bytes:
        bits = self.bits + "1"
        return int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")


def escaped(unit: bytes) -> bytes:
    """A NAL unit with emulation prevention bytes."""
    return re.sub(rb"\0\0(?=[\0-\3])", b"\0\0\3", unit)


def cropping(header: Header, coded: tuple[int, int], unit: tuple[int, int]) -> tuple[int, int]:
    """Writes a cropping rectangle, and returns the size that it leaves."""
    sides = []
    for pixels, step in zip(coded[::-1], unit[::-1], strict=True):
        most = (pixels - 1) // step
        sides.append(header.number(65535, header.random.randint(0, most)))
        sides.append(header.number(65535, header.random.randint(0, most - sides[-1])))
    left, right, top, bottom = sides
    return coded[0] - unit[0] * (top + bottom), coded[1] - unit[1] * (left + right)


def colours(header: Header) -> tuple[int | None, bool]:
    """Writes the beginning of a VUI, and returns its matrix, and whether values use the full range."""
    matrix, full_range = None, False
    if header.flag() and header.put(header.random.choice((1, 16, 255)), 8) == 255:
        header.skip(32)
    if header.flag():
        header.skip(1)
    if header.flag():
        header.skip(3)
        full_range = header.flag()
        if header.flag():
            header.skip(16)
            matrix = header.put(header.random.choice((1, 2, 6, 9)), 8)
    return None if matrix == 2 else matrix, full_range


UNITS = {"gray": (1, 1), "420": (2, 2), "422": (1, 2), "444": (1, 1)}  # rows and columns that cropping counts in


def h264_header(seed: int, wrong: int = -1) -> tuple[bytes, Sequence]:
    """An SPS of H.264 (7.3.2.1.1), and what it says."""
    header, chroma, depth = Header(seed, wrong), "420", 8
    profile = header.put(header.random.choice((66, 77, 88, 100, 110, 122, 244, 44, 83, 86, 118, 128)), 8)
    header.skip(16)
    header.number(31)
    if profile not in (66, 77, 88):
        chroma = [*UNITS][header.number(3)]
        header.skip(chroma == "444")
        depth = 8 + max(header.number(8), header.number(8))
        header.skip(1)
        if header.flag():
            for count in [16] * 6 + [64] * (6 if chroma == "444" else 2):
                if header.flag():
                    scaling_list(header, count)
    header.number(12)
    order = header.number(2)
    if order == 0:
        header.number(12)
    elif order == 1:
        header.skip(1)
        for _ in range(2):
            header.number()
        for _ in range(header.number(255)):
            header.number()
    header.number()
    header.skip(1)
    width, height = header.number(4095) + 1, header.number(4095) + 1
    progressive = header.flag()
    header.skip(1 if progressive else 2)
    coded = 16 * height * (2 - progressive), 16 * width
    size = cropping(header, coded, (UNITS[chroma][0] * (2 - progressive), UNITS[chroma][1])) if header.flag() else coded
    matrix, full_range = colours(header) if header.flag() else (None, False)
    return header.data(), Sequence(chroma, depth, coded, size, not progressive, matrix, full_range)


def scaling_list(header: Header, count: int) -> None:
    """Writes differences between values, modulo 256, of which a value of 0 is the last."""
    value = 8
    for _ in range(count):
        following = header.random.choice((0, *header.random.sample(range(1, 256), 15)))
        difference = (following - value + 128) % 256 - 128
        header.number(value=2 * difference - 1 if difference > 0 else -2 * difference)
        value = following
        if not value:
            return


def hevc_header(seed: int, wrong: int = -1) -> tuple[bytes, Sequence]:
    """An SPS of HEVC (7.3.2.2.1), and what it says."""
    header = Header(seed, wrong)
    header.skip(4)
    layers = header.put(header.random.randint(0, 6), 3)
    header.skip(1 + 96)
    present = [(header.flag(), header.flag()) for _ in range(layers)]
    header.skip(2 * (8 - layers) if layers else 0)
    for profile, level in present:
        header.skip(88 * profile + 8 * level)
    header.number(15)
    chroma = [*UNITS][header.number(3)]
    header.skip(chroma == "444")
    width, height = (header.number(65535, header.random.choice((1, 65535, header.random.randint(1, 999)))) for _ in "wh")
    size = coded = height, width
    if header.flag():
        size = cropping(header, coded, UNITS[chroma])
    depth = 8 + max(header.number(8), header.number(8))
    order_bits = 4 + header.number(12)
    for _ in range(3 * (layers + 1 if header.flag() else 1) + 6):
        header.number()
    if header.flag() and header.flag():
        for numbers in [16] * 6 + [64] * 6 + [65] * 8:  # the larger blocks also have a DC coefficient
            for _ in range(numbers if header.flag() else 1):
                header.number()
    header.skip(2)
    if header.flag():  # PCM
        header.skip(8)
        header.number()
        header.number()
        header.skip(1)
    frames = 0
    for number in range(header.number(64, header.random.choice((0, 1, 2, 3, 4, 8, 8, 64)))):
        if number and header.flag():
            header.skip(1)
            header.number()
            kept = header.random.randint(0, min(frames + 1, 32))
            for _ in range(kept):
                header.bits += header.random.choice(("1", "01"))
            header.bits += "00" * (frames + 1 - kept)
            frames = kept
        else:
            frames = header.number(16) + header.number(16, header.random.choice((0, 1, 2, 16)))
            for _ in range(frames):
                header.number()
                header.skip(1)
    if header.flag():
        for _ in range(header.number(32)):
            header.skip(order_bits + 1)
    header.skip(2)
    matrix, full_range, interlaced = None, False, False
    if header.flag():
        matrix, full_range = colours(header)
        if header.flag():
            header.number()
            header.number()
        header.skip(1)
        interlaced = header.flag()
    return header.data(), Sequence(chroma, depth, coded, size, interlaced, matrix, full_range)


def av1_header(seed: int, wrong: int = -1) -> tuple[bytes, Sequence]:
    """A sequence header of AV1 (5.5.1), and what it says."""
    header = Header(seed, wrong)
    profile = header.put(header.random.randint(0, 2), 3)
    header.skip(1)
    reduced = header.flag()
    if reduced:
        header.skip(5)
    else:
        operating_points(header)
    bits = [header.put(header.random.randint(0, 15), 4) + 1 for _ in "wh"]
    width, height = (header.put(header.random.getrandbits(count), count) + 1 for count in bits)
    if not reduced and header.flag():
        header.skip(7)
    header.skip(3)
    if not reduced:
        header.skip(4)
        ordered = header.flag()
        header.skip(2 * ordered)
        if header.flag() or header.flag():  # tools for screen content are chosen per frame, or always used
            header.skip(not header.flag())
        header.skip(3 * ordered)
    header.skip(3)
    high = header.flag()
    depth = 12 if profile == 2 and high and header.flag() else 10 if high else 8
    gray = profile != 1 and header.flag()
    colours = (2, 2, 2)
    if header.flag():
        colours = header.random.choice(((1, 13, 0), (1, 13, 1), (1, 1, 1), (9, 16, 9), (2, 2, 2), (1, 13, 2)))
        for value in colours:
            header.put(value, 8)
    matrix, size = None if colours[2] == 2 else colours[2], (height, width)
    if colours == (1, 13, 0) and not gray:
        return header.data(), Sequence("444", depth, size, size, False, matrix, True)
    full_range, chroma = header.flag(), "gray" if gray else {0: "420", 1: "444", 2: "422"}[profile]
    if chroma == "422" and depth == 12:
        chroma = "444" if not header.flag() else "420" if header.flag() else "422"
    return header.data(), Sequence(chroma, depth, size, size, False, matrix, full_range)


def operating_points(header: Header) -> None:
    """Writes timing, decoder model and operating points (5.5.1 to 5.5.5)."""
    delay_bits = 0
    if header.flag():
        header.skip(64)
        if header.flag():
            header.number()
        if header.flag():
            delay_bits = header.put(header.random.getrandbits(5), 5) + 1
            header.skip(42)
    initial_delay = header.flag()
    for _ in range(header.put(header.random.randint(0, 3), 5) + 1):
        header.skip(12)
        header.skip(header.put(header.random.randint(5, 10), 5) > 7)
        if delay_bits and header.flag():
            header.skip(2 * delay_bits + 1)
        if initial_delay and header.flag():
            header.skip(4)


def in_avcc(sps: bytes) -> bytes:
    unit = b"\x67" + escaped(sps)
    return bytes([1, 100, 0, 30, 255, 0xE1]) + struct.pack(">H", len(unit)) + unit + b"\1" + PPS


def in_hvcc(sps: bytes) -> bytes:
    """An `hvcC` box with parameter sets of other kinds, and an SPS of another layer."""
    units = {0x20: [b"\x40\x01\xaa"], 0xA1: [b"\x42\x09\xaa", b"\x42\x01" + escaped(sps)], 0x22: [b"\x44\x01\xaa"]}
    arrays = [
        struct.pack(">BH", kind, len(found)) + b"".join(struct.pack(">H", len(unit)) + unit for unit in found)
        for kind, found in units.items()
    ]
    return bytes(22) + bytes([len(units)]) + b"".join(arrays)


def in_av1c(sequence: bytes) -> bytes:
    """An `av1C` box with metadata before the sequence header, which has an extension and a size."""
    size = bytes([len(sequence) & 127 | 128, len(sequence) >> 7])
    return bytes([0x81, 0, 0, 0, 5 << 3 | 2, 1, 0xAA, 1 << 3 | 6, 0x40]) + size + sequence


@pytest.mark.parametrize(
    ("write", "read", "boxed", "count"),
    [
        (h264_header, h264_sequences, in_avcc, 200),
        (hevc_header, hevc_sequences, in_hvcc, 150),
        (av1_header, av1_sequences, in_av1c, 400),
    ],
    ids=["h264", "hevc", "av1"],
)
def test_headers_of_all_forms_say_what_was_written(write: Any, read: Any, boxed: Any, count: int) -> None:
    """And a number above its limit is named."""
    for seed in range(count):
        header, expected = write(seed)
        assert read(boxed(header)) == [expected], seed
        try:
            write(seed, seed % 30)
        except Invalid as invalid:
            message, header = invalid.args
            assert failure(read, boxed(header)).endswith(message), seed


def test_numbers_of_more_than_32_bits_are_refused() -> None:
    for bits, error in (
        (golomb((1 << 32) - 2), ""),
        (golomb((1 << 32) - 1), "must be at most 4294967294"),
        (golomb((1 << 33) - 2), "must be at most 4294967294"),
        (golomb((1 << 33) - 1), "more than 32 zero bits"),
    ):
        header = Header(0)
        header.bits = f"{66:08b}{30:016b}" + golomb(0, 0, 2) + bits + "0" + golomb(7, 7) + "1" * 90
        found = failure(h264_sequences, in_avcc(header.data()))
        assert error in found
        assert bool(error) == bool(found)


@pytest.mark.parametrize(("left", "error"), [(79, ""), (80, "invalid SPS: crops frames of 128×160 to 128×0")])
def test_something_is_left_of_a_cropped_frame(left: int, error: str) -> None:
    header = Header(0)
    header.bits = f"{66:08b}{30:016b}" + golomb(0, 0, 2, 0) + "0" + golomb(9, 7) + "1" + "0" + "1" + golomb(left, 0, 0, 0)
    assert failure(h264_sequences, in_avcc(header.data() + bytes(2))) == error

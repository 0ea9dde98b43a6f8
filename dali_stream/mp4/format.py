"""Format of a video according to its sample description: codec, profile, chroma, bit depth, size and colours.

Sources: ISO/IEC 14496-15 (avcC, hvcC), the AV1 and VP9 bindings for ISO media files (av1C, vpcC). For H.264, HEVC and AV1,
these boxes also contain headers of the bitstream, which take precedence.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import COPY, children
from dali_stream.mp4.parameter_sets import CHROMA, UNSPECIFIED, Sequence, avc_sets, h264_sequences, hevc_sequences
from dali_stream.mp4.sequence_header import av1_sequences

CODECS = {
    b"av01": "av1", b"avc1": "h264", b"avc3": "h264", b"hvc1": "hevc", b"hev1": "hevc",
    b"vp08": "vp8", b"vp09": "vp9", b"mp4v": "mpeg4", b"jpeg": "mjpeg", b"mjpg": "mjpeg", b"png ": "png",
}  # fmt: skip
# Profiles with 8-bit 4:2:0 that NVDEC decodes according to NVIDIA's documentation.
PROFILES = {"h264": (66, 77, 100), "hevc": (1,), "av1": (0,), "vp9": (0,)}
_MATRICES = {0: "RGB", 1: "BT.709", 2: "not specified", 5: "BT.601", 6: "BT.601", 9: "BT.2020", 10: "BT.2020"}
_SEQUENCES = {"h264": (b"avcC", h264_sequences), "hevc": (b"hvcC", hevc_sequences), "av1": (b"av1C", av1_sequences)}


@dataclass(frozen=True)
class VideoFormat:
    """Format of a video.

    Attributes:
        codec: "av1", "h264", "hevc", "vp8", "vp9", "mpeg4", "mjpeg", "png", or the four characters of an unknown one.
        profile: Number of the codec's profile, or None if the file does not specify it.
        chroma: "gray", "420", "422" or "444".
        depth: Number of bits per value.
        height, width: Size of the frames in pixels. `describe` returns the size in the sample description, and
            `VideoIndex.format` the size at which the frames are displayed.
        matrix: Colour matrix (ISO/IEC 23091-2: 1 is BT.709, 6 BT.601), or None if it is not specified.
        coded: Size (height, width) of the coded frames before cropping, in pixels, or None if no header was read.
        interlaced: Whether frames may be coded as two fields.
        full_range: Whether values use the full range, according to the bitstream.
        rotation: Angle by which decoded frames are turned counterclockwise for display: 0, 90, -90 or 180 degrees. torchcodec
            turns frames and does not mirror them, so only the angle of a matrix that mirrors them is used.
        colours_in_file_only: Whether the boxes of the file specify the full range or a matrix other than BT.601, and the
            bitstream does not. FFmpeg converts the frames as these boxes say, and NVDEC does not know them.
        header_error: Reason not to trust the headers in the sample description, such as a missing or broken header, or one that
            contradicts the sample description. Empty for valid headers, and for codecs whose headers are not read.
    """

    codec: str
    profile: int | None
    chroma: str
    depth: int
    height: int
    width: int
    matrix: int | None = None
    coded: tuple[int, int] | None = None
    interlaced: bool = False
    full_range: bool = False
    rotation: int = 0
    colours_in_file_only: bool = False
    header_error: str = ""

    @property
    def pixel_format(self) -> str:
        """FFmpeg's name for the pixel format, such as yuv420p or yuv420p10le."""
        if self.codec == "png":
            return "rgb24"
        deep = f"{self.depth}le" if self.depth > 8 else ""
        return f"gray{deep}" if self.chroma == "gray" else f"yuv{self.chroma}p{deep}"

    @property
    def matrix_name(self) -> str:
        """Name of the colour matrix."""
        return "not specified" if self.matrix is None else _MATRICES.get(self.matrix, f"matrix {self.matrix}")

    @property
    def like_bt601(self) -> bool:
        """Whether decoders convert the colours as BT.601. They also do so if no matrix is specified."""
        return self.matrix in (None, UNSPECIFIED, 5, 6)


def with_size(config: bytes) -> bytes:
    """Return a sample description with the frame size of its headers if it has none itself. See `describe` for the argument.

    The description is returned unchanged if its headers are missing or broken, or if the codec's headers are not read.
    """
    if 0 not in struct.unpack_from(">HH", config, 32):
        return config
    try:
        sequence = _read_sequence(codec_of(config), {k: config[a:b] for k, a, b in children(config, 86, len(config))})
    except DecodeError:
        return config
    return config if sequence is None else config[:32] + struct.pack(">HH", *sequence.size[::-1]) + config[36:]


def describe(config: bytes) -> VideoFormat:
    """Return the format of a sample description (a whole `stsd` entry).

    Raises:
        DecodeError: If the sample description is truncated, or its size is 0.
    """
    width, height = struct.unpack_from(">HH", config, 32)
    codec = codec_of(config)
    if not width or not height:
        raise DecodeError(
            f"the frame size of the sample description must be positive, got {width}×{height}. Write it into the file: {COPY}"
        )
    parts = {k: config[a:b] for k, a, b in children(config, 86, len(config))}
    try:
        profile, chroma, depth = _details(codec, parts)
    except IndexError as error:
        raise DecodeError(f"{codec} decoder configuration is truncated") from error
    colour = parts.get(b"colr", b"")
    matrix = struct.unpack_from(">H", colour, 8)[0] if colour[:4] in (b"nclx", b"nclc") and len(colour) >= 10 else None
    is_full = colour[:4] == b"nclx" and len(colour) >= 11 and colour[10] >= 0x80
    video = VideoFormat(codec, profile, chroma, depth, height, width, matrix)
    video = replace(video, colours_in_file_only=is_full or not video.like_bt601)
    try:
        return _completed(video, _read_sequence(codec, parts), is_full)
    except DecodeError as error:  # FFmpeg may still decode the file, and NVDEC is not used for it
        return replace(video, header_error=str(error))


def as_displayed(video: VideoFormat, track_header: bytes) -> VideoFormat:
    """Return the format of a video whose frames are turned as its track asks. Frames turned by 90° have their sides swapped.

    Args:
        video: Format according to the sample description.
        track_header: Matrix and display size of the track. See `VideoIndex`.
    """
    a, b, _, c, d = struct.unpack_from(">5i", track_header)
    if not (a or c) or not (b or d):  # not invertible: FFmpeg then does not turn frames
        return video
    # The angle of `av_display_rotation_get`, rounded to a multiple of 90° as torchcodec does.
    degrees = -math.degrees(math.atan2(b / math.hypot(b, d), a / math.hypot(a, c)))
    rotation = int(math.copysign(math.floor(abs(degrees) / 90 + 0.5) * 90, degrees))
    if abs(rotation) == 90:
        video = replace(video, height=video.width, width=video.height)
    return replace(video, rotation=abs(rotation) if abs(rotation) == 180 else rotation)


def _read_sequence(codec: str, parts: Mapping[bytes, bytes]) -> Sequence | None:
    """Return the parameters in the headers of a sample description, or None for a codec whose headers are not read.

    Raises:
        DecodeError: If the headers are missing or broken, or differ from each other.
    """
    if codec not in _SEQUENCES:
        return None
    kind, read = _SEQUENCES[codec]
    sequences = read(parts.get(kind, b""))
    unit = "sequence header" if codec == "av1" else "SPS"
    if not sequences:
        raise DecodeError(f"missing {unit} in {kind.decode()}")
    if any(sequence != sequences[0] for sequence in sequences):
        raise DecodeError(f"{kind.decode()} must have one {unit}, got {len(sequences)} that differ")
    return sequences[0]


def _completed(video: VideoFormat, sequence: Sequence | None, is_full: bool) -> VideoFormat:
    """Replace the parameters of a format by those of the bitstream, which decoders use.

    Args:
        video: Format according to the boxes of the file.
        sequence: Parameters in the bitstream, or None if they are not read.
        is_full: Whether values use the full range according to the boxes of the file.
    """
    if sequence is None:
        return video
    (height, width), error = sequence.size, ""
    if sequence.size != (video.height, video.width):
        error = f"its bitstream must have frames of {video.height}×{video.width}, as its sample description says, "
        error += f"got {height}×{width}"
    return replace(
        video,
        chroma=sequence.chroma,
        depth=sequence.depth,
        matrix=video.matrix if sequence.matrix is None else sequence.matrix,
        coded=sequence.coded,
        interlaced=sequence.interlaced,
        full_range=sequence.full_range,
        colours_in_file_only=(sequence.matrix is None and not video.like_bt601) or (is_full and not sequence.full_range),
        header_error=error,
    )


def config_box(config: bytes, kind: bytes) -> bytes:
    """Return the body of a box in a sample description, or no bytes if it is missing."""
    return next((config[start:end] for child, start, end in children(config, 86, len(config)) if child == kind), b"")


@functools.lru_cache(maxsize=256)
def length_bytes(config: bytes) -> int:
    """Return the number of bytes of the length before each NAL unit of H.264 or HEVC.

    Raises:
        DecodeError: If the box with this number is missing or truncated.
    """
    codec = codec_of(config)
    kind, place = (b"avcC", 4) if codec == "h264" else (b"hvcC", 21)
    body = config_box(config, kind)
    if len(body) <= place:
        raise DecodeError(f"{codec} decoder configuration ({kind.decode()}) is missing or truncated")
    return (body[place] & 3) + 1


def codec_of(config: bytes) -> str:
    """Return the codec of a sample description, or the four characters of its type if the codec is unknown."""
    kind = config[4:8]
    if kind != b"mp4v":
        return CODECS.get(kind, kind.decode("latin-1").strip())
    # An `mp4v` entry may contain any codec that has an object type in ISO/IEC 14496-1. FFmpeg uses it for JPEG, for instance.
    descriptor = _DECODER_CONFIG.search(config_box(config, b"esds"))
    number = descriptor[1][0] if descriptor else 0x20
    return _OBJECT_TYPES.get(number, f"mp4v-{number:02x}")


_OBJECT_TYPES = {0x20: "mpeg4", 0x6C: "mjpeg", 0x6D: "png", 0xB1: "vp9"}
# A DecoderConfigDescriptor: its tag, its length in one to four bytes, the object type, and the bits "visual stream".
_DECODER_CONFIG = re.compile(rb"\x04(?:[\x80-\xff]{0,3}[\0-\x7f])(.)[\x10-\x13]", re.DOTALL)


def _details(codec: str, parts: dict[bytes, bytes]) -> tuple[int | None, str, int]:
    """Return (profile, chroma, bit depth) from the configuration box of a codec, or (None, "420", 8) without such a box."""
    if codec == "av1" and (av1c := parts.get(b"av1C")):
        high, twelve, gray = av1c[2] >> 6 & 1, av1c[2] >> 5 & 1, av1c[2] >> 4 & 1
        chroma = "gray" if gray else {(1, 1): "420", (1, 0): "422", (0, 0): "444"}.get((av1c[2] >> 3 & 1, av1c[2] >> 2 & 1))
        return av1c[1] >> 5, chroma or "420", 12 if high and twelve else 10 if high else 8
    if codec == "hevc" and (hvcc := parts.get(b"hvcC")):
        return hvcc[1] & 31, CHROMA[hvcc[16] & 3], (hvcc[17] & 7) + 8
    if codec == "vp9" and (vpcc := parts.get(b"vpcC")):
        return vpcc[4], {0: "420", 1: "420", 2: "422", 3: "444"}.get(vpcc[6] >> 1 & 7, "420"), vpcc[6] >> 4
    if codec == "h264" and (avcc := parts.get(b"avcC")):
        chroma, depth = _avc_chroma(avcc)
        return avcc[1], chroma, depth
    return None, "420", 8


def _avc_chroma(avcc: bytes) -> tuple[str, int]:
    """Return (chroma, bit depth) from avcC. High and later profiles store them after the parameter sets."""
    _, _, rest = avc_sets(avcc)
    if avcc[1] not in (66, 77, 88) and len(rest) >= 3:
        return CHROMA[rest[0] & 3], (rest[1] & 7) + 8
    return "420", 8

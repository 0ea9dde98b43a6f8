"""Sequence parameter sets (SPS) of H.264 and HEVC, which contain the parameters of all frames.

The boxes of a sample description only repeat some of these parameters, and not every encoder repeats them correctly. Decoders
use the SPS.

Sources: ITU-T H.264, 7.3.2.1.1 (SPS) and E.1.1 (VUI); ITU-T H.265, 7.3.2.2 (SPS), 7.3.3 (profile), 7.3.4 (scaling lists),
7.3.7 (reference picture sets) and E.2.1 (VUI); ISO/IEC 14496-15 (avcC, hvcC).
"""

from __future__ import annotations

from dataclasses import dataclass

from dali_stream.errors import DecodeError
from dali_stream.mp4.bits import Bits

CHROMA = {0: "gray", 1: "420", 2: "422", 3: "444"}
_SUBSAMPLING = {"gray": (1, 1), "420": (2, 2), "422": (1, 2), "444": (1, 1)}  # luma rows and columns per chroma sample
# H.264 profiles whose SPS contains chroma and bit depth. The others have 4:2:0 and 8 bits.
_WITH_CHROMA = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)
_MOST_SETS = 32  # maximum number of parameter sets of one kind; the formats allow 32 (H.264) and 16 (HEVC)
_LARGEST = 65535  # pixels per side, the most that a sample description can hold
UNSPECIFIED = 2  # colour matrix, ISO/IEC 23091-2


@dataclass(frozen=True)
class Sequence:
    """Parameters of all frames of a video, according to its bitstream.

    Attributes:
        chroma: "gray", "420", "422" or "444".
        depth: Number of bits per value, the larger of luma and chroma.
        coded: Size (height, width) of the coded frames before cropping, in pixels.
        size: Size (height, width) of the frames after cropping, in pixels.
        interlaced: Whether frames may be coded as two fields.
        matrix: Colour matrix (ISO/IEC 23091-2: 1 is BT.709, 6 BT.601), or None if it is not specified.
        full_range: Whether values use the full range, 0 to 255 for 8 bits.
    """

    chroma: str
    depth: int
    coded: tuple[int, int]
    size: tuple[int, int]
    interlaced: bool
    matrix: int | None
    full_range: bool


def h264_sequences(avcc: bytes) -> list[Sequence]:
    """Return the content of each SPS in an `avcC` box.

    Raises:
        DecodeError: If the box or an SPS is truncated or invalid.
    """
    units, _, _ = avc_sets(avcc) if avcc else ([], [], b"")
    return [_h264(unescaped(unit[1:])) for unit in units if unit and unit[0] & 31 == 7]


def avc_sets(avcc: bytes) -> tuple[list[bytes], list[bytes], bytes]:
    """Return the SPS and the picture parameter sets (PPS) in an `avcC` box as NAL units, and the bytes after them.

    Raises:
        DecodeError: If the box is truncated.
    """
    bits = Bits(avcc[5:], "avcC")
    sequence_sets = [bits.data(bits.take(16)) for _ in range(bits.take(8) & 31)]
    picture_sets = [bits.data(bits.take(16)) for _ in range(bits.take(8))]
    return sequence_sets, picture_sets, bits.rest()


def hevc_sequences(hvcc: bytes) -> list[Sequence]:
    """Return the content of each SPS in an `hvcC` box.

    Raises:
        DecodeError: If the box or an SPS is truncated or invalid.
    """
    bits, units = Bits(hvcc[22:], "hvcC"), list[bytes]()
    for _ in range(bits.take(8) if hvcc else 0):
        kind, count = bits.take(8) & 63, bits.take(16)
        if count > _MOST_SETS:
            raise DecodeError(f"invalid hvcC: must have at most {_MOST_SETS} parameter sets of type {kind}, got {count}")
        sets = [bits.data(bits.take(16)) for _ in range(count)]
        units += sets if kind == 33 else []
    # The SPS of further layers (nuh_layer_id, 6 bits) has another layout. A decoder of one layer ignores it.
    return [_hevc(unescaped(unit[2:])) for unit in units if len(unit) > 1 and not unit[0] & 1 and not unit[1] >> 3]


def unescaped(unit: bytes) -> bytes:
    """Return a NAL unit without its emulation prevention bytes: 00 00 03 becomes 00 00 (H.264, 7.3.1)."""
    return unit.replace(b"\0\0\3", b"\0\0")


def _h264(sps: bytes) -> Sequence:
    """Read an SPS of H.264 without its header and emulation prevention (7.3.2.1.1)."""
    bits = Bits(sps, "SPS")
    profile = bits.take(8)
    bits.take(16)  # constraints, level
    bits.number("id", 31)
    chroma, depth = _h264_chroma(bits) if profile in _WITH_CHROMA else ("420", 8)
    bits.number("log2_max_frame_num", 12)
    order = bits.number("pic_order_cnt_type", 2)
    if order == 0:
        bits.number("log2_max_pic_order_cnt_lsb", 12)
    elif order == 1:
        bits.take(1)
        bits.skip_numbers(2)
        bits.skip_numbers(bits.number("num_ref_frames_in_pic_order_cnt_cycle", 255))
    bits.skip_numbers(1)  # reference frames
    bits.take(1)
    columns, rows = bits.number("width", _LARGEST >> 4) + 1, bits.number("height", _LARGEST >> 4) + 1
    progressive = bits.flag()
    fields = 1 if progressive else 2
    bits.take(1 if progressive else 2)
    coded = 16 * rows * fields, 16 * columns
    size = _cropped(bits, coded, chroma, fields) if bits.flag() else coded
    matrix, full_range = _colour(bits) if bits.flag() else (None, False)
    return Sequence(chroma, depth, coded, size, not progressive, matrix, full_range)


def _h264_chroma(bits: Bits) -> tuple[str, int]:
    """Read chroma and bit depth, and skip the scaling lists (7.3.2.1.1.1)."""
    chroma, depth = _chroma_and_planes(bits), _depth(bits)
    bits.take(1)  # lossless
    if bits.flag():
        for number in range(12 if chroma == "444" else 8):
            if bits.flag():
                _skip_scaling_list(bits, 16 if number < 6 else 64)
    return chroma, depth


def _skip_scaling_list(bits: Bits, count: int) -> None:
    """Skip a list of differences, which ends early if a value becomes 0."""
    value = 8
    for _ in range(count):
        code = bits.number("scaling list")
        value = (value + ((code + 1) // 2 if code & 1 else -(code // 2))) & 255
        if not value:
            return


def _chroma_and_planes(bits: Bits) -> str:
    chroma = CHROMA[bits.number("chroma_format_idc", 3)]
    if chroma == "444":
        bits.take(1)  # separate planes
    return chroma


def _depth(bits: Bits) -> int:
    return 8 + max(bits.number("bit_depth_luma_minus8", 8), bits.number("bit_depth_chroma_minus8", 8))


def _cropped(bits: Bits, coded: tuple[int, int], chroma: str, fields: int) -> tuple[int, int]:
    """Read the cropping rectangle, and return (height, width) within it."""
    left, right, top, bottom = (bits.number("cropping", _LARGEST) for _ in range(4))
    rows, columns = _SUBSAMPLING[chroma]
    height, width = coded[0] - rows * fields * (top + bottom), coded[1] - columns * (left + right)
    if height <= 0 or width <= 0:
        raise DecodeError(f"invalid SPS: crops frames of {coded[0]}×{coded[1]} to {height}×{width}")
    return height, width


def _colour(bits: Bits) -> tuple[int | None, bool]:
    """Read (matrix, full range) from the beginning of the VUI, which H.264 (E.1.1) and HEVC (E.2.1) have in common."""
    if bits.flag() and bits.take(8) == 255:  # sample aspect ratio; 255 means that two 16-bit numbers follow
        bits.take(32)
    if bits.flag():  # overscan
        bits.take(1)
    matrix, full_range = None, False
    if bits.flag():
        bits.take(3)  # analogue video format
        full_range = bits.flag()
        if bits.flag():
            bits.take(16)  # primaries, transfer characteristics
            matrix = bits.take(8)
    return None if matrix == UNSPECIFIED else matrix, full_range


def _hevc(sps: bytes) -> Sequence:
    """Read an SPS of HEVC without its header and emulation prevention (7.3.2.2.1)."""
    bits = Bits(sps, "SPS")
    bits.take(4)
    layers = bits.take(3)  # temporal layers above the lowest
    bits.take(1)
    _skip_profiles(bits, layers)
    bits.number("id", 15)
    chroma = _chroma_and_planes(bits)
    width, height = bits.number("width", _LARGEST), bits.number("height", _LARGEST)
    if not (width and height):
        raise DecodeError(f"invalid SPS: frame size must be positive, got {height}×{width}")
    coded = height, width
    size = _cropped(bits, coded, chroma, 1) if bits.flag() else coded
    depth = _depth(bits)
    order_bits = bits.number("log2_max_pic_order_cnt_lsb", 12) + 4
    bits.skip_numbers(3 * (layers + 1 if bits.flag() else 1))  # sizes of the decoded picture buffer
    bits.skip_numbers(6)  # sizes and depths of coding and transform blocks
    if bits.flag() and bits.flag():
        _skip_hevc_scaling_lists(bits)
    bits.take(2)  # asymmetric partitions, sample adaptive offset
    if bits.flag():  # PCM
        bits.take(8)
        bits.skip_numbers(2)
        bits.take(1)
    _skip_reference_sets(bits)
    if bits.flag():  # long-term references
        for _ in range(bits.number("num_long_term_ref_pics_sps", 32)):
            bits.take(order_bits + 1)
    bits.take(2)  # temporal prediction of vectors, smoothing
    matrix, full_range, interlaced = None, False, False
    if bits.flag():
        matrix, full_range = _colour(bits)
        if bits.flag():  # place of chroma samples
            bits.skip_numbers(2)
        bits.take(1)  # neutral chroma
        interlaced = bits.flag()
    return Sequence(chroma, depth, coded, size, interlaced, matrix, full_range)


def _skip_profiles(bits: Bits, layers: int) -> None:
    """Skip profile and level of the video, and of its temporal layers (7.3.3)."""
    bits.take(96)
    present = [(bits.flag(), bits.flag()) for _ in range(layers)]
    if layers:
        bits.take(2 * (8 - layers))
    for profile, level in present:
        bits.take(88 * profile + 8 * level)


def _skip_hevc_scaling_lists(bits: Bits) -> None:
    """Skip scaling list data (7.3.4)."""
    for size in range(4):
        for _ in range(2 if size == 3 else 6):
            if not bits.flag():
                bits.skip_numbers(1)
            else:
                bits.skip_numbers(min(64, 16 << 2 * size) + (size > 1))


def _skip_reference_sets(bits: Bits) -> None:
    """Skip the short-term reference picture sets (7.3.7). Each may be coded as a difference from the previous set."""
    frames = 0  # in the previous set
    for number in range(bits.number("num_short_term_ref_pic_sets", 64)):
        if number and bits.flag():
            bits.take(1)
            bits.skip_numbers(1)
            # A frame of the previous set is also in this one if used_by_curr_pic_flag or use_delta_flag is 1. The second flag
            # exists only if the first one is 0, and `or` reads it only then.
            frames = sum(bits.flag() or bits.flag() for _ in range(frames + 1))
            if frames > 32:
                raise DecodeError(f"invalid SPS: a reference picture set must have at most 32 frames, got {frames}")
        else:
            counts = bits.number("num_negative_pics", 16), bits.number("num_positive_pics", 16)
            frames = sum(counts)
            for _ in range(frames):
                bits.skip_numbers(1)
                bits.take(1)

"""Sequence header of AV1, which contains the parameters of all frames.

Sources: the AV1 bitstream, 5.3 (OBU header), 5.5 (sequence header) and 6.4.2 (colours); the AV1 binding for ISO media files
(av1C).
"""

from __future__ import annotations

from dali_stream.mp4.bits import Bits
from dali_stream.mp4.parameter_sets import UNSPECIFIED, Sequence

_MOST_OBUS = 32  # maximum number of OBUs that are read from `av1C`; encoders write one


def av1_sequences(av1c: bytes) -> list[Sequence]:
    """Return the content of each sequence header in an `av1C` box.

    Raises:
        DecodeError: If the box or a sequence header is truncated or invalid.
    """
    bits, headers = Bits(av1c[4:], "av1C"), list[bytes]()
    for _ in range(_MOST_OBUS):
        if not bits.left:
            break
        kind, extended, sized = bits.take(5) & 15, bits.flag(), bits.flag()
        bits.take(9 if extended else 1)
        body = bits.data(bits.leb128() if sized else None)
        headers += [body] if kind == 1 else []
    return [_sequence(header) for header in headers]


def _sequence(header: bytes) -> Sequence:
    """Read a sequence header of AV1 (5.5.1)."""
    bits = Bits(header, "sequence header")
    profile, _, reduced = bits.take(3), bits.flag(), bits.flag()
    if reduced:
        bits.take(5)
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.take(4) + 1, bits.take(4) + 1
    width, height = bits.take(width_bits) + 1, bits.take(height_bits) + 1
    if not reduced and bits.flag():  # frame ids
        bits.take(7)
    bits.take(3)  # superblocks of 128, filters
    if not reduced:
        _skip_tools(bits)
    bits.take(3)  # superresolution, CDEF, restoration
    chroma, depth, matrix, full_range = _colour(bits, profile)
    return Sequence(chroma, depth, (height, width), (height, width), False, matrix, full_range)


def _skip_operating_points(bits: Bits) -> None:
    """Skip timing, decoder model and operating points (5.5.1 to 5.5.5)."""
    delay_bits = 0
    if bits.flag():
        bits.take(64)
        if bits.flag():
            bits.number("num_ticks_per_picture")
        if bits.flag():
            delay_bits = bits.take(5) + 1
            bits.take(42)
    initial_delay = bits.flag()
    for _ in range(bits.take(5) + 1):
        bits.take(12)
        if bits.take(5) > 7:
            bits.take(1)
        if delay_bits and bits.flag():
            bits.take(2 * delay_bits + 1)
        if initial_delay and bits.flag():
            bits.take(4)


def _skip_tools(bits: Bits) -> None:
    """Skip the coding tools, which a reduced header does not contain."""
    bits.take(4)
    ordered = bits.flag()
    bits.take(2 if ordered else 0)
    screen = True if bits.flag() else bits.flag()
    if screen and not bits.flag():
        bits.take(1)
    bits.take(3 if ordered else 0)


def _colour(bits: Bits, profile: int) -> tuple[str, int, int | None, bool]:
    """Read (chroma, depth, matrix, full range) (5.5.2)."""
    high = bits.flag()
    depth = 10 if high else 8
    if profile == 2 and high and bits.flag():
        depth = 12
    gray = profile != 1 and bits.flag()
    primaries, transfer, matrix = (bits.take(8), bits.take(8), bits.take(8)) if bits.flag() else (UNSPECIFIED,) * 3
    if not gray and (primaries, transfer, matrix) == (1, 13, 0):  # sRGB
        return "444", depth, matrix, True
    full_range = bits.flag()
    chroma = "gray" if gray else {0: "420", 1: "444"}.get(profile) or _chroma(bits, depth)
    return chroma, depth, None if matrix == UNSPECIFIED else matrix, full_range


def _chroma(bits: Bits, depth: int) -> str:
    """Read the chroma format of the Professional profile."""
    if depth < 12:
        return "422"
    if not bits.flag():
        return "444"
    return "420" if bits.flag() else "422"

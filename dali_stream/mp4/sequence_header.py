"""Sequence header of AV1, which contains the parameters of all frames.

Sources: the AV1 bitstream, 5.3 (OBU header), 5.5 (sequence header) and 6.4.2 (colours); the AV1 binding for ISO media files
(av1C).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dali_stream.errors import DecodeError
from dali_stream.mp4.bits import Bits
from dali_stream.mp4.parameter_sets import UNSPECIFIED, Sequence

_MOST_OBUS = 32  # maximum number of OBUs that are read from `av1C`; encoders write one


def av1_sequences(av1c: bytes) -> list[Sequence]:
    """Return the content of each sequence header in an `av1C` box.

    Raises:
        DecodeError: If the box or a sequence header is truncated or invalid.
    """
    headers = []
    for kind, start, stop in itertools.islice(obus(av1c, 4, len(av1c)), _MOST_OBUS):
        if max(start, stop) > len(av1c):
            raise DecodeError("invalid av1C: truncated")
        if kind >> 3 & 15 == 1:
            headers.append(av1c[start:stop])
    return [_sequence(header) for header in headers]


def obus(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte of the header, start, end) for the body of each OBU in `data[start:end]`.

    The first byte has a forbidden bit, the type (4 bits), the extension flag, the size flag and a reserved bit. If the sizes do
    not add up, the start or the end of the last body exceeds `end`.
    """
    while start < end:
        header, start, stop = data[start], start + 1 + (data[start] >> 2 & 1), end
        if header & 2:
            size, start = leb128(data, start)
            stop = start + size
        yield header, start, stop
        start = max(start, stop)


def leb128(data: bytes, start: int) -> tuple[int, int]:
    """Parse a number of up to eight bytes in LEB128.

    Returns:
        Value of the number and position after it. If the number is truncated, the value is 2^62, which exceeds any size.
    """
    value = 0
    for i, byte in enumerate(data[start : start + 8]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, start + i + 1
    return 1 << 62, start


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

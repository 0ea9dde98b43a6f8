"""Muxer of MP4 files with one video track. It writes all bytes before the first packet, including `moov`.

The packets follow these bytes, end to end. The first frame is displayed at time 0 without an edit list. This requires signed
shifts between decode and display times (`ctts` of version 1), because B-frames, for example, are displayed before their
nominal decode time. `tkhd`, `mdhd` and `mvhd` are of version 1, which has 64-bit times.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import UPRIGHT, box, full_box

CHUNK = 1 << 20  # approximate size of a chunk in bytes; `stco` has one offset per chunk
_U32 = (1 << 32) - 1
Integers = Sequence[int] | Int64
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Track:
    """Video track of n packets in decode order.

    Attributes:
        timescale: Number of ticks per second.
        header: Matrix and display size, the end of `tkhd`.
        configs: Sample descriptions (`stsd` entries).
        size: Size of each packet in bytes, n numbers.
        pts: Presentation time of each packet in ticks, n numbers. The lowest is 0.
        sync: Whether decoding can start at each packet, shape (n,).
        config: Index of each packet's sample description in `configs`, n numbers.
        last: Duration of the frame that is displayed last, in ticks.
    """

    timescale: int
    header: bytes
    configs: tuple[bytes, ...]
    size: Integers
    pts: Integers
    sync: npt.NDArray[np.bool_]
    config: Integers
    last: int


def head(track: Track) -> bytes:
    """Return all bytes of a file before its first packet.

    Raises:
        DecodeError: If two consecutive frames are too far apart in time for the 32 bits of the tables.
    """
    # Most clips have a few dozen packets, for which lists are faster than NumPy.
    size, pts, config = (_listed(column) for column in (track.size, track.pts, track.config))
    # The nominal decode time of the i-th packet is the i-th display time. This keeps the shifts small, and makes all of them 0
    # without B-frames, so that `ctts` is omitted.
    shown = sorted(pts)
    durations = [*map(operator.sub, shown[1:], shown), track.last]
    shifts = [] if shown == pts else list(map(operator.sub, pts, shown))
    if max(durations) > _U32 or max(map(abs, shifts), default=0) > _U32 // 2:
        raise DecodeError("consecutive frames must be at most 2^32 ticks apart. Record or convert the file again")
    # A chunk starts about every `CHUNK` bytes. It has only one sample description, so a new chunk starts where that changes.
    begins = list(itertools.accumulate(size, initial=0))
    nbytes = begins.pop()
    chunks = _runs([(begin // CHUNK, number + 1) for begin, number in zip(begins, config, strict=True)])
    offsets = [begins[at] for at in itertools.accumulate((count for count, _ in chunks[:-1]), initial=0)]
    # `stsc` lists only the chunks whose packet count or sample description differs from the chunk before.
    alike = _runs([(count, description) for count, (_, description) in chunks])
    first = itertools.accumulate((count for count, _ in alike), initial=1)
    tables = [
        full_box(b"stsd", 0, 0, struct.pack(">I", len(track.configs)), *track.configs),
        _table(b"stts", "I", _runs(durations)),
        _table(b"stsc", "I", [(number, *chunk) for number, (_, chunk) in zip(first, alike, strict=False)]),
        full_box(b"stsz", 0, 0, struct.pack(f">II{len(size)}I", 0, len(size), *size)),
    ]
    if shifts:
        tables.append(_table(b"ctts", "i", _runs(shifts), version=1))  # in which the shifts are signed
    if not track.sync.all():
        tables.append(_table(b"stss", "I", [(packet + 1,) for packet in np.flatnonzero(track.sync).tolist()]))
    # The AV1 binding for ISO media files requires the brand `av01`.
    ftyp = _FTYP_AV1 if b"av01" in [config[4:8] for config in track.configs] else _FTYP
    before = len(ftyp) + _REST + sum(map(len, tables))
    # The offsets depend on the size of their own table, so an upper limit of the file size decides between 32 and 64 bits.
    wide = before + 12 * len(offsets) + nbytes + 4096 > _U32
    # `mdat` gets its final size here, so nothing has to be corrected after the packets are written.
    mdat = struct.pack(">I4s", nbytes + 8, b"mdat") if nbytes + 8 <= _U32 else struct.pack(">I4sQ", 1, b"mdat", nbytes + 16)
    # `before` still lacks the table of offsets, with a header of 16 bytes and one entry per chunk, and the header of `mdat`.
    before += 16 + len(offsets) * (8 if wide else 4) + len(mdat)
    places = [(before + offset,) for offset in offsets]
    tables.append(_table(b"co64", "Q", places) if wide else _table(b"stco", "I", places))
    return b"".join((ftyp, _moov(track.timescale, shown[-1] + track.last, track.header, tables), mdat))


def _listed(values: Integers) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _runs(values: Sequence[Value]) -> list[tuple[int, Value]]:
    """Return the length and the value of each run of equal consecutive values."""
    return [(len(list(equal)), value) for value, equal in itertools.groupby(values)]


def _table(kind: bytes, form: str, rows: Sequence[tuple[int, ...]], version: int = 0) -> bytes:
    numbers = list(itertools.chain.from_iterable(rows))
    return full_box(kind, version, 0, struct.pack(f">I{len(numbers)}{form}", len(rows), *numbers))


def _moov(timescale: int, duration: int, track_header: bytes, tables: Sequence[bytes]) -> bytes:
    # The movie has the timescale of the track, so that its duration is exact. The flags 3 of `tkhd` enable the track and
    # include it in the movie, and 0x55C4 in `mdhd` is the language code "und".
    mvhd = full_box(b"mvhd", 1, 0, struct.pack(">QQIQ", 0, 0, timescale, duration), _MVHD_REST)
    tkhd = full_box(b"tkhd", 1, 3, struct.pack(">QQIIQ", 0, 0, 1, 0, duration), bytes(16), track_header)
    mdhd = full_box(b"mdhd", 1, 0, struct.pack(">QQIQHH", 0, 0, timescale, duration, 0x55C4, 0))
    minf = box(b"minf", _VMHD_AND_DINF, box(b"stbl", *tables))
    return box(b"moov", mvhd, box(b"trak", tkhd, box(b"mdia", mdhd, _HDLR, minf)))


_BRANDS = b"isom" + struct.pack(">I", 512) + b"isomiso2iso4mp41"
_FTYP, _FTYP_AV1 = box(b"ftyp", _BRANDS), box(b"ftyp", _BRANDS, b"av01")
_MVHD_REST = struct.pack(">IH", 0x10000, 0x100) + bytes(10) + UPRIGHT + bytes(24) + struct.pack(">I", 2)
_HDLR = full_box(b"hdlr", 0, 0, bytes(4), b"vide", bytes(12), b"VideoHandler\0")
_VMHD_AND_DINF = full_box(b"vmhd", 0, 1, bytes(8)) + box(
    b"dinf", full_box(b"dref", 0, 0, struct.pack(">I", 1), full_box(b"url ", 0, 1))
)
# Size of `moov` without its tables. The offsets in `stco` are absolute, so they depend on the size of all boxes before `mdat`.
_REST = len(_moov(1, 0, bytes(44), ()))

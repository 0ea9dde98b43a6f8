"""Muxer of MP4 files with one video track. It writes all bytes before the first packet, including `moov`.

The packets follow these bytes, end to end. The first frame is displayed at time 0 without an edit list. This requires signed
shifts between decode and display times (`ctts` of version 1), because B-frames, for example, are displayed before their
nominal decode time. `tkhd`, `mdhd` and `mvhd` are of version 1, which has 64-bit times.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import UPRIGHT, box, full_box

CHUNK = 1 << 20  # approximate size of a chunk in bytes; `stco` has one offset per chunk
_U32 = (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class Track:
    """Video track of n packets in decode order.

    Attributes:
        timescale: Number of ticks per second.
        header: Matrix and display size, the end of `tkhd`.
        configs: Sample descriptions (`stsd` entries).
        size: Size of each packet in bytes, shape (n,).
        pts: Presentation time of each packet in ticks, shape (n,). The lowest is 0.
        sync: Whether decoding can start at each packet, shape (n,).
        config: Index of each packet's sample description in `configs`, shape (n,).
        last: Duration of the frame that is displayed last, in ticks.
    """

    timescale: int
    header: bytes
    configs: tuple[bytes, ...]
    size: Int64
    pts: Int64
    sync: npt.NDArray[np.bool_]
    config: Int64
    last: int


def head(track: Track) -> bytes:
    """Return all bytes of a file before its first packet.

    Raises:
        DecodeError: If two consecutive frames are too far apart in time for the 32 bits of the tables.
    """
    # The nominal decode time of the i-th packet is the i-th display time. This keeps the shifts small, and makes all of them 0
    # without B-frames, so that `ctts` is omitted.
    shown, durations = np.sort(track.pts), np.full(len(track.pts), track.last, np.int64)
    durations[:-1] = shown[1:] - shown[:-1]
    shifts = track.pts - shown
    if durations.max() > _U32 or np.abs(shifts).max() > _U32 // 2:
        raise DecodeError("consecutive frames must be at most 2^32 ticks apart. Record or convert the file again")
    begin = np.cumsum(track.size) - track.size
    # A chunk starts about every `CHUNK` bytes. It has only one sample description, so a new chunk starts where that changes.
    first, count = _runs(begin // CHUNK, track.config)
    description = track.config[first] + 1
    # `stsc` lists only the chunks whose packet count or sample description differs from the chunk before.
    entry, _ = _runs(count, description)
    duration, duration_count = _runs(durations)
    tables = [
        full_box(b"stsd", 0, 0, struct.pack(">I", len(track.configs)), *track.configs),
        _table(b"stts", ">u4", duration_count, durations[duration]),
        _table(b"stsc", ">u4", entry + 1, count[entry], description[entry]),
        full_box(b"stsz", 0, 0, struct.pack(">II", 0, len(track.size)), track.size.astype(">u4").tobytes()),
    ]
    if shifts.any():
        shift, shift_count = _runs(shifts)
        tables.append(_table(b"ctts", ">i4", shift_count, shifts[shift]))
    if not track.sync.all():
        tables.append(_table(b"stss", ">u4", np.flatnonzero(track.sync) + 1))
    # The AV1 binding for ISO media files requires the brand `av01`.
    ftyp = _FTYP_AV1 if b"av01" in [config[4:8] for config in track.configs] else _FTYP
    before, nbytes = len(ftyp) + _REST + sum(map(len, tables)), int(track.size.sum())
    # The offsets depend on the size of their own table, so an upper limit of the file size decides between 32 and 64 bits.
    wide = before + 12 * len(first) + nbytes + 4096 > _U32
    # `mdat` gets its final size here, so nothing has to be corrected after the packets are written.
    mdat = struct.pack(">I4s", nbytes + 8, b"mdat") if nbytes + 8 <= _U32 else struct.pack(">I4sQ", 1, b"mdat", nbytes + 16)
    # `before` still lacks the table of offsets, with a header of 16 bytes and one entry per chunk, and the header of `mdat`.
    places = begin[first] + before + 16 + len(first) * (8 if wide else 4) + len(mdat)
    tables.append(_table(b"co64", ">u8", places) if wide else _table(b"stco", ">u4", places))
    return b"".join((ftyp, _moov(track.timescale, int(track.pts.max()) + track.last, track.header, tables), mdat))


def _runs(values: Int64, *others: Int64) -> tuple[Int64, Int64]:
    """Return the first place and the length of each run of equal consecutive values in all columns."""
    is_first = np.ones(len(values) + 1, np.bool_)  # and the end of the columns
    np.not_equal(values[1:], values[:-1], out=is_first[1:-1])
    for other in others:
        is_first[1:-1] |= other[1:] != other[:-1]
    [bounds] = is_first.nonzero()
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _table(kind: bytes, dtype: str, *columns: Int64) -> bytes:
    entries = np.array(columns, dtype).T.tobytes()
    version = 1 if dtype == ">i4" else 0  # in which the shifts of `ctts` are signed
    return full_box(kind, version, 0, struct.pack(">I", len(columns[0])), entries)


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

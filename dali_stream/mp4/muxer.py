"""Muxer of MP4 files with one video track. It writes all bytes before the first packet, including `moov`.

The packets follow these bytes, end to end. The first frame is displayed at time 0 without an edit list. This requires signed
shifts between decode and display times (`ctts` of version 1), because B-frames, for example, are displayed before their
nominal decode time. `tkhd`, `mdhd` and `mvhd` are of version 1, which has 64-bit times.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import UPRIGHT, box, full_box

Int64 = npt.NDArray[np.int64]
Column = Sequence[int] | Int64
_DTYPES = {"I": ">u4", "i": ">i4", "Q": ">u8"}
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
    shown = np.sort(track.pts)
    durations, shifts = np.append(np.diff(shown), track.last), track.pts - shown
    if durations.max() > _U32 or np.abs(shifts).max() > _U32 // 2:
        raise DecodeError("consecutive frames must be at most 2^32 ticks apart. Record or convert the file again")
    begin = np.cumsum(track.size) - track.size
    # A chunk starts about every `CHUNK` bytes. It has only one sample description, so a new chunk starts where that changes.
    first = np.flatnonzero(np.append(True, (np.diff(begin // CHUNK) != 0) | (np.diff(track.config) != 0)))
    count, description = np.diff(np.append(first, len(begin))), track.config[first] + 1
    # `stsc` lists only the chunks whose packet count or sample description differs from the chunk before.
    entry = np.flatnonzero(np.append(True, (np.diff(count) != 0) | (np.diff(description) != 0)))
    return file_head(
        track.timescale, int(track.pts.max()) + track.last, track.header, track.configs, track.size,
        nbytes=int(track.size.sum()),
        durations=_runs(durations),
        shifts=_runs(shifts) if shifts.any() else None,
        keyframes=None if track.sync.all() else np.flatnonzero(track.sync) + 1,
        chunks=(entry + 1, count[entry], description[entry]),
        offsets=begin[first],
    )  # fmt: skip


def file_head(
    timescale: int,
    duration: int,
    track_header: bytes,
    configs: Sequence[bytes],
    sizes: npt.NDArray[Any],
    nbytes: int,
    *,
    durations: tuple[Column, Column],
    shifts: tuple[Column, Column] | None,
    keyframes: Column | None,
    chunks: tuple[Column, Column, Column],
    offsets: Column,
) -> bytes:
    """Return all bytes of a file before its first packet, made from the columns of its tables.

    Args:
        timescale: Number of ticks per second.
        duration: Duration of the track in ticks.
        track_header: Matrix and display size, the end of `tkhd`.
        configs: Sample descriptions (`stsd` entries).
        sizes: Size of each packet in bytes, shape (n,).
        nbytes: Size of all packets in bytes.
        durations: Counts and values of runs of equal durations in ticks (`stts`).
        shifts: Counts and values of runs of equal shifts in ticks (`ctts`), or None if frames are displayed in decode order.
        keyframes: Numbers of the packets at which decoding can start (`stss`), counted from 1, or None for all packets.
        chunks: First chunk, packets per chunk and sample description of each run of equal chunks (`stsc`). Chunks and sample
            descriptions are counted from 1.
        offsets: Position of each chunk in bytes, relative to the first packet.
    """
    tables = [
        full_box(b"stsd", 0, 0, struct.pack(">I", len(configs)), *configs),
        _table(b"stts", "I", *durations),
        _table(b"stsc", "I", *chunks),
        full_box(b"stsz", 0, 0, struct.pack(">II", 0, len(sizes)), np.asarray(sizes, ">u4").tobytes()),
    ]
    if shifts is not None:
        tables.append(_table(b"ctts", "i", *shifts))
    if keyframes is not None:
        tables.append(_table(b"stss", "I", keyframes))
    # The AV1 binding for ISO media files requires the brand `av01`.
    ftyp = _FTYP_AV1 if b"av01" in [config[4:8] for config in configs] else _FTYP
    before = len(ftyp) + _REST + sum(map(len, tables))
    # The offsets depend on the size of their own table, so an upper limit of the file size decides between 32 and 64 bits.
    wide = before + 12 * len(offsets) + nbytes + 4096 > _U32
    # `mdat` gets its final size here, so nothing has to be corrected after the packets are written.
    mdat = struct.pack(">I4s", nbytes + 8, b"mdat") if nbytes + 8 <= _U32 else struct.pack(">I4sQ", 1, b"mdat", nbytes + 16)
    # `before` still lacks the table of offsets, with a header of 16 bytes and one entry per chunk, and the header of `mdat`.
    before += 16 + len(offsets) * (8 if wide else 4) + len(mdat)
    places = [before + offset for offset in offsets]
    tables.append(_table(b"co64", "Q", places) if wide else _table(b"stco", "I", places))
    return b"".join((ftyp, _moov(timescale, duration, track_header, tables), mdat))


def _runs(values: Int64) -> tuple[Int64, Int64]:
    """Return the counts and the values of runs of equal consecutive values."""
    first = np.flatnonzero(np.append(True, np.diff(values) != 0))
    return np.diff(np.append(first, len(values))), values[first]


def _table(kind: bytes, form: str, *columns: Column) -> bytes:
    count, version = len(columns[0]), 1 if form == "i" else 0
    if isinstance(columns[0], np.ndarray):
        entries = np.stack(columns, 1).astype(_DTYPES[form]).tobytes()
        return full_box(kind, version, 0, struct.pack(">I", count), entries)
    # The tables of packed clips are short lists, for which NumPy is slower. `zip` turns columns into rows.
    values = columns[0] if len(columns) == 1 else [*itertools.chain.from_iterable(zip(*columns, strict=True))]
    size = 16 + len(values) * (8 if form == "Q" else 4)
    return struct.pack(f">I4sII{len(values)}{form}", size, kind, version << 24, count, *values)


def _moov(timescale: int, duration: int, track_header: bytes, tables: Sequence[bytes]) -> bytes:
    mvhd, tkhd, mdhd = _headers(timescale, duration, track_header)
    minf = box(b"minf", _VMHD_AND_DINF, box(b"stbl", *tables))
    return box(b"moov", mvhd, box(b"trak", tkhd, box(b"mdia", mdhd, _HDLR, minf)))


@functools.lru_cache(1024)  # packed clips have few different durations
def _headers(timescale: int, duration: int, track_header: bytes) -> tuple[bytes, bytes, bytes]:
    return (
        # The movie has the timescale of the track, so that its duration is exact. The flags 3 of `tkhd` enable the track and
        # include it in the movie, and 0x55C4 in `mdhd` is the language code "und".
        full_box(b"mvhd", 1, 0, struct.pack(">QQIQ", 0, 0, timescale, duration), _MVHD_REST),
        full_box(b"tkhd", 1, 3, struct.pack(">QQIIQ", 0, 0, 1, 0, duration), bytes(16), track_header),
        full_box(b"mdhd", 1, 0, struct.pack(">QQIQHH", 0, 0, timescale, duration, 0x55C4, 0)),
    )


_BRANDS = b"isom" + struct.pack(">I", 512) + b"isomiso2iso4mp41"
_FTYP, _FTYP_AV1 = box(b"ftyp", _BRANDS), box(b"ftyp", _BRANDS, b"av01")
_MVHD_REST = struct.pack(">IH", 0x10000, 0x100) + bytes(10) + UPRIGHT + bytes(24) + struct.pack(">I", 2)
_HDLR = full_box(b"hdlr", 0, 0, bytes(4), b"vide", bytes(12), b"VideoHandler\0")
_VMHD_AND_DINF = full_box(b"vmhd", 0, 1, bytes(8)) + box(
    b"dinf", full_box(b"dref", 0, 0, struct.pack(">I", 1), full_box(b"url ", 0, 1))
)
# Size of `moov` without its tables. The offsets in `stco` are absolute, so they depend on the size of all boxes before `mdat`.
_REST = len(_moov(1, 0, bytes(44), ()))

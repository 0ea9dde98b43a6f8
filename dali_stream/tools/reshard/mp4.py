"""The head of an MP4 with one video track: all that stands before its samples, `moov` included.

Times are in the track's own ticks, and the first frame is shown at 0 without an edit list: frames that are decoded
before their turn have a negative `ctts` (version 1), as in a packed clip.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import UPRIGHT, box, full_box

Int64 = npt.NDArray[np.int64]
CHUNK = 1 << 20  # bytes of samples that `stco` has one offset for
_U32 = (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class Track:
    """Samples in decode order; n of them, which will lie end to end behind the head.

    Attributes:
        timescale: ticks per second.
        header: matrix and display size, the end of `tkhd`.
        configs: sample descriptions.
        size, pts: (n,) bytes, and presentation time in ticks, the lowest 0.
        sync: (n,) whether decoding can start at it.
        config: (n,) which of `configs`.
        last: ticks that the frame shown last stays.
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
    """All bytes of the file before the first sample."""
    total = int(track.size.sum())
    brands = b"isomiso2iso4mp41" + (b"av01" if any(entry[4:8] == b"av01" for entry in track.configs) else b"")
    ftyp = box(b"ftyp", b"isom", struct.pack(">I", 512), brands)
    mdat = struct.pack(">I4s", total + 8, b"mdat") if total + 8 <= _U32 else struct.pack(">I4sQ", 1, b"mdat", total + 16)
    tables, offsets = _tables(track)
    wide = total + len(ftyp) + sum(map(len, tables)) + 12 * len(offsets) + 4096 > _U32
    before = len(ftyp) + len(_moov(track, tables, offsets, wide)) + len(mdat)
    return ftyp + _moov(track, tables, offsets + before, wide) + mdat


def _tables(track: Track) -> tuple[list[bytes], Int64]:
    """The boxes of `stbl` but for the chunk offsets; and those, counted from the first sample."""
    n = len(track.size)
    shown = np.sort(track.pts)
    stay, late = np.append(np.diff(shown), track.last), track.pts - shown
    if stay.max() > _U32 or np.abs(late).max() > _U32 // 2:
        raise DecodeError("its times cannot be written: two frames are more than 2^32 ticks apart")
    begin = np.cumsum(track.size) - track.size
    first, per_chunk = _chunks(begin, track.config)
    tables = [
        full_box(b"stsd", 0, 0, struct.pack(">I", len(track.configs)), *track.configs),
        _table(b"stts", 0, *_runs(stay)),
        _table(b"stsc", 0, *per_chunk),
        full_box(b"stsz", 0, 0, struct.pack(">II", 0, n), track.size.astype(">u4").tobytes()),
    ]
    if late.any():
        tables.append(_table(b"ctts", 1, *_runs(late)))
    if not track.sync.all():
        tables.append(_table(b"stss", 0, np.flatnonzero(track.sync) + 1))
    return tables, begin[first]


def _chunks(begin: Int64, config: Int64) -> tuple[Int64, tuple[Int64, ...]]:
    """(first sample of each chunk, the columns of `stsc`)."""
    number = begin // CHUNK
    new = np.append(True, (np.diff(number) != 0) | (np.diff(config) != 0))
    first = np.flatnonzero(new)
    count, description = np.diff(np.append(first, len(begin))), config[first] + 1
    entry = np.flatnonzero(np.append(True, (np.diff(count) != 0) | (np.diff(description) != 0)))
    return first, (entry + 1, count[entry], description[entry])


def _runs(values: Int64) -> tuple[Int64, Int64]:
    """(how often, value) of equal neighbours."""
    first = np.flatnonzero(np.append(True, np.diff(values) != 0))
    return np.diff(np.append(first, len(values))), values[first]


def _table(kind: bytes, version: int, *columns: npt.NDArray[Any]) -> bytes:
    entries = np.stack(columns, 1).astype(">i8" if kind == b"co64" else ">i4" if version else ">u4")
    return full_box(kind, version, 0, struct.pack(">I", len(entries)), entries.tobytes())


def _moov(track: Track, tables: list[bytes], offsets: Int64, wide: bool) -> bytes:
    duration = int(track.pts.max()) + track.last
    stbl = box(b"stbl", *tables, _table(b"co64" if wide else b"stco", 0, offsets))
    dinf = box(b"dinf", full_box(b"dref", 0, 0, struct.pack(">I", 1), full_box(b"url ", 0, 1)))
    minf = box(b"minf", full_box(b"vmhd", 0, 1, bytes(8)), dinf, stbl)
    hdlr = full_box(b"hdlr", 0, 0, bytes(4), b"vide", bytes(12), b"VideoHandler\0")
    # Version 1 of these boxes has 64 bits for times. The movie's clock is the track's, so that nothing is rounded.
    mdhd = full_box(b"mdhd", 1, 0, struct.pack(">QQIQHH", 0, 0, track.timescale, duration, 0x55C4, 0))
    tkhd = full_box(b"tkhd", 1, 3, struct.pack(">QQIIQ", 0, 0, 1, 0, duration), bytes(16), track.header)
    rest = struct.pack(">IH", 0x10000, 0x100) + bytes(10) + UPRIGHT + bytes(24) + struct.pack(">I", 2)
    mvhd = full_box(b"mvhd", 1, 0, struct.pack(">QQIQ", 0, 0, track.timescale, duration), rest)
    return box(b"moov", mvhd, box(b"trak", tkhd, box(b"mdia", mdhd, hdlr, minf)))

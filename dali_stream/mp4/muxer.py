"""Writing MP4 files with one video track: everything before the first packet, `moov` included.

Packets follow end to end. The first frame is shown at 0 without an edit list: frames that are decoded ahead of their
display time have a negative `ctts` shift (version 1). `tkhd`, `mdhd` and `mvhd` are of version 1, with 64 bits for times.
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
CHUNK = 1 << 20  # bytes of packets per offset in `stco`
_U32 = (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class Track:
    """Packets in decode order, n of them.

    Attributes:
        timescale: ticks per second.
        header: matrix and display size, the end of `tkhd`.
        configs: sample descriptions (`stsd` entries).
        size, pts: (n,) bytes, and presentation time in ticks, the lowest 0.
        sync: (n,) whether decoding can start at the packet.
        config: (n,) index in `configs`.
        last: duration in ticks of the frame displayed last.
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
    """All bytes of a file before its first packet.

    Raises:
        DecodeError: the times do not fit into the tables.
    """
    shown = np.sort(track.pts)
    durations, shifts = np.append(np.diff(shown), track.last), track.pts - shown
    if durations.max() > _U32 or np.abs(shifts).max() > _U32 // 2:
        raise DecodeError("its times cannot be written: two frames are more than 2^32 ticks apart; record or convert it again")
    begin = np.cumsum(track.size) - track.size
    first = np.flatnonzero(np.append(True, (np.diff(begin // CHUNK) != 0) | (np.diff(track.config) != 0)))
    count, description = np.diff(np.append(first, len(begin))), track.config[first] + 1
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
    """All bytes of a file before its first packet, from the columns of its tables.

    Args:
        timescale: ticks per second.
        duration: of the track in ticks.
        track_header: matrix and display size.
        configs: sample descriptions.
        sizes, nbytes: (n,) bytes of each packet, and of all.
        durations, shifts: (count, ticks) of runs of equal values (`stts`, `ctts`); shifts None: display in decode order.
        keyframes: packets that decoding can start at, counted from 1; None: all.
        chunks: (first chunk, packets per chunk, description), counted from 1 (`stsc`).
        offsets: first byte of each chunk, counted from the first packet.
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
    ftyp = _FTYP_AV1 if b"av01" in [config[4:8] for config in configs] else _FTYP
    before = len(ftyp) + _REST + sum(map(len, tables))
    wide = before + 12 * len(offsets) + nbytes + 4096 > _U32
    mdat = struct.pack(">I4s", nbytes + 8, b"mdat") if nbytes + 8 <= _U32 else struct.pack(">I4sQ", 1, b"mdat", nbytes + 16)
    before += 16 + len(offsets) * (8 if wide else 4) + len(mdat)
    places = [before + offset for offset in offsets]
    tables.append(_table(b"co64", "Q", places) if wide else _table(b"stco", "I", places))
    return b"".join((ftyp, _moov(timescale, duration, track_header, tables), mdat))


def _runs(values: Int64) -> tuple[Int64, Int64]:
    """(count, value) of runs of equal neighbours."""
    first = np.flatnonzero(np.append(True, np.diff(values) != 0))
    return np.diff(np.append(first, len(values))), values[first]


def _table(kind: bytes, form: str, *columns: Column) -> bytes:
    count, version = len(columns[0]), 1 if form == "i" else 0
    if isinstance(columns[0], np.ndarray):
        entries = np.stack(columns, 1).astype(_DTYPES[form]).tobytes()
        return full_box(kind, version, 0, struct.pack(">I", count), entries)
    # Short lists of packed clips, where NumPy is slower. `zip` turns columns into rows.
    values = columns[0] if len(columns) == 1 else [*itertools.chain.from_iterable(zip(*columns, strict=True))]
    size = 16 + len(values) * (8 if form == "Q" else 4)
    return struct.pack(f">I4sII{len(values)}{form}", size, kind, version << 24, count, *values)


def _moov(timescale: int, duration: int, track_header: bytes, tables: Sequence[bytes]) -> bytes:
    mvhd, tkhd, mdhd = _headers(timescale, duration, track_header)
    minf = box(b"minf", _VMHD_AND_DINF, box(b"stbl", *tables))
    return box(b"moov", mvhd, box(b"trak", tkhd, box(b"mdia", mdhd, _HDLR, minf)))


@functools.lru_cache(1024)  # packed clips differ in few durations
def _headers(timescale: int, duration: int, track_header: bytes) -> tuple[bytes, bytes, bytes]:
    return (
        # The movie has the track's timescale, so that nothing is rounded.
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
_REST = len(_moov(1, 0, bytes(44), ()))  # bytes of `moov` without its tables; `stco` needs it, since its offsets are absolute

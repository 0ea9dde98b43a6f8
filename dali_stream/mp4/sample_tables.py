"""Sample tables of an MP4's video track (ISO/IEC 14496-12, 8.5 to 8.7): size, position, description and times of each packet.

Files may be damaged or malicious, so each count is checked against the size of its table before memory is allocated.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import COPY, box, children, encode_again, find


def video_track(moov: bytes) -> tuple[int, int]:
    """Return the range of the body of the only video track in a `moov` box.

    Raises:
        DecodeError: If the file does not have exactly one video track.
    """
    tracks = []
    for kind, start, end in children(moov, 0, len(moov)):
        if kind == b"trak":
            handler = find(moov, start, end, b"mdia", b"hdlr")
            if handler and moov[handler[0] + 8 : handler[0] + 12] == b"vide":
                tracks.append((start, end))
    if len(tracks) != 1:
        raise DecodeError(f"the file must have exactly one video track, got {len(tracks)}. Keep one with {COPY}")
    return tracks[0]


def track_tables(moov: bytes, track: tuple[int, int]) -> dict[bytes, bytes]:
    """Return the bodies of the sample tables of a track (the boxes in `stbl`) by kind."""
    stbl = find(moov, *track, b"mdia", b"minf", b"stbl")
    if stbl is None:
        raise DecodeError("the video track must have a sample table (stbl)")
    return {kind: moov[start:end] for kind, start, end in children(moov, *stbl)}


def packet_sizes(boxes: dict[bytes, bytes]) -> Int64:
    """Return the size of each packet in bytes (`stsz`), shape (n,)."""
    stsz = boxes.get(b"stsz")
    if stsz is None:
        raise DecodeError("the video track must have sample sizes (stsz)")
    fixed, n = struct.unpack_from(">II", stsz, 4)
    # A table of n sizes has 4 n bytes, which limits n. A single size for all packets takes no table, so n has a fixed limit:
    # packets of equal size are rare, and a box that claims millions of them is broken.
    if n > (len(stsz) - 12) // 4 and not (fixed and n <= 65536):
        raise DecodeError(f"invalid stsz table: must have the sizes of {n} samples, got {(len(stsz) - 12) // 4}")
    return np.full(n, fixed, np.int64) if fixed else np.frombuffer(stsz, ">u4", n, 12).astype(np.int64)


def entries(boxes: dict[bytes, bytes], kind: bytes, columns: str) -> npt.NDArray[Any]:
    """Return the entries of a table box as a structured array.

    Args:
        boxes: Bodies of the boxes by kind.
        kind: Kind of the table box.
        columns: Names and types of the columns, such as "count:u4 delta:u4".
    """
    body = boxes[kind]
    count = struct.unpack_from(">I", body, 4)[0]
    dtype = np.dtype([(name, ">" + form) for name, form in (c.split(":") for c in columns.split())])
    if count > (len(body) - 8) // dtype.itemsize:
        raise DecodeError(f"invalid {kind.decode()} table: must have {count} entries, got {len(body)} bytes")
    return np.frombuffer(body, dtype, count, 8)


def _expand(values: npt.NDArray[Any], counts: npt.NDArray[Any], n: int, kind: str) -> Int64:
    counts = counts.astype(np.int64)
    if counts.sum() != n:
        raise DecodeError(f"invalid {kind} table: must describe {n} samples, got {counts.sum()}")
    return np.repeat(values.astype(np.int64), counts)


def presentation_times(boxes: dict[bytes, bytes], n: int) -> Int64:
    """Return the presentation time of each packet in ticks, without the edit list, shape (n,)."""
    if b"stts" not in boxes:
        raise DecodeError("the video track must have sample times (stts)")
    stts = entries(boxes, b"stts", "count:u4 delta:u4")
    deltas = _expand(stts["delta"], stts["count"], n, "stts")
    pts = np.cumsum(deltas) - deltas
    if b"ctts" in boxes:
        ctts = entries(boxes, b"ctts", "count:u4 shift:i4")  # signed in version 0 too, as FFmpeg reads and writes it
        pts = pts + _expand(ctts["shift"], ctts["count"], n, "ctts")
    return pts


def sync_packets(boxes: dict[bytes, bytes], n: int, codec: str) -> Int64:
    """Return the packets that the file marks as keyframes, of which the first packet must be one.

    Args:
        boxes: Bodies of the boxes by kind.
        n: Number of packets.
        codec: Codec of the file, for the message.
    """
    if b"stss" not in boxes:
        return np.arange(n)  # without the table, decoding can start at every packet
    number = entries(boxes, b"stss", "sample:u4")["sample"].astype(np.int64)
    sync = number - np.minimum(number[:1], 1)  # they count from 1 or, in files of some encoders, which FFmpeg reads, from 0
    if not len(sync) or sync[0] != 0 or sync[-1] >= n or (np.diff(sync) <= 0).any():
        first = ", ".join(map(str, number[:3].tolist())) or "none"
        raise DecodeError(
            f"invalid stss table (keyframes): must be 1, ... up to {n} in increasing order, got {first}. Encode the displayed "
            f"frames again: {encode_again(codec)}, or fetch the file again"
        )
    return sync


def packet_places(boxes: dict[bytes, bytes], size: Int64) -> tuple[tuple[bytes, ...], Int64, npt.NDArray[np.int8]]:
    """Return the sample descriptions, and the offset and the description of each packet, both of shape (n,).

    A track is stored in chunks. `stco` or `co64` has the offset of each chunk, and `stsc` has the number of packets and the
    sample description for runs of chunks. The packets of a chunk are stored end to end.
    """
    configs = _descriptions(boxes)
    if b"stsc" not in boxes or not (b"stco" in boxes or b"co64" in boxes):
        raise DecodeError("the video track must have a chunk table (stsc with stco or co64)")
    kind, form = (b"stco", "u4") if b"stco" in boxes else (b"co64", "u8")
    chunk = entries(boxes, kind, f"offset:{form}")["offset"].astype(np.int64)
    stsc = entries(boxes, b"stsc", "first:u4 samples:u4 description:u4")
    first = stsc["first"].astype(np.int64) - 1
    if not len(first) or first[0] != 0 or (np.diff(first) <= 0).any() or first[-1] >= len(chunk):
        raise DecodeError(f"invalid stsc table: must cover {len(chunk)} chunks")
    description = stsc["description"].astype(np.int64) - 1
    if (description < 0).any() or (description >= len(configs)).any():
        raise DecodeError(f"invalid stsc table: must refer to the {len(configs)} sample descriptions of the file")
    chunks = np.diff(np.append(first, len(chunk)))
    per_chunk = np.repeat(stsc["samples"].astype(np.int64), chunks)
    if per_chunk.sum() != len(size):
        raise DecodeError(f"invalid stsc table: must place {len(size)} samples, got {per_chunk.sum()}")
    before = np.cumsum(size) - size  # total size of all packets before each packet
    # The offset of a packet is the offset of its chunk, plus the sizes of the packets before it in the chunk.
    chunk_first = np.cumsum(per_chunk) - per_chunk
    chunk_before = before[np.minimum(chunk_first, len(size) - 1)]
    offset = before + np.repeat(chunk - chunk_before, per_chunk)
    return configs, offset, np.repeat(np.repeat(description, chunks), per_chunk).astype(np.int8)


def _descriptions(boxes: dict[bytes, bytes]) -> tuple[bytes, ...]:
    """Return the sample descriptions without their bit rates."""
    stsd = boxes.get(b"stsd", b"")
    descriptions = []
    for kind, start, end in children(stsd, 8, len(stsd)) if len(stsd) > 8 else ():
        entry = stsd[start:end]
        if len(entry) < 78:
            raise DecodeError(f"sample description {kind!r} must have at least 78 bytes, got {len(entry)}")
        # The bit rate differs between files and is irrelevant for decoding. Without it, files can share clips.
        parts = [box(k, entry[a:b]) for k, a, b in children(entry, 78, len(entry)) if k != b"btrt"]
        descriptions.append(box(kind, entry[:78], *parts))
    if not 0 < len(descriptions) <= 127:  # `packet_places` stores their numbers as int8
        raise DecodeError(f"the file must have 1 to 127 sample descriptions (stsd), got {len(descriptions)}")
    return tuple(descriptions)


def required(moov: bytes, start: int, end: int, *path: bytes) -> tuple[int, int]:
    """Return the range of a box that a file must have. See `boxes.find`."""
    body = find(moov, start, end, *path)
    if body is None:
        raise DecodeError(f"the file must have a box {path[-1].decode()!r}")
    return body


def ticks_per_second(moov: bytes, header: tuple[int, int]) -> int:
    """Return the timescale of the movie or of a track, from the range of its `mvhd` or `mdhd` box."""
    start = header[0]
    timescale: int = struct.unpack_from(">I", moov, start + (20 if moov[start] == 1 else 12))[0]
    return timescale

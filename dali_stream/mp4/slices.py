"""First slices of H.264 and HEVC frames, which say what kind of keyframe a frame is.

Sources: ISO/IEC 14496-10, 7.3.3 (slice header) and 7.4.1 (NAL units); ISO/IEC 23008-2, 7.4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from dali_stream.errors import DecodeError
from dali_stream.mp4.format import codec_of, length_bytes

SLICE_HEAD = 4096  # bytes of a packet that contain the header of its first slice


def is_idr(config: bytes, data: bytes) -> bool | None:
    """Return whether a keyframe is an IDR frame, or None if no slice begins in `data`.

    Args:
        config: Sample description of the frame, H.264 or HEVC.
        data: The encoded frame, or its beginning.
    """
    hevc = codec_of(config) == "hevc"
    unit = _first_slice(config, data, hevc)
    if unit is None:
        return None
    return data[unit] >> 1 & 63 in (19, 20) if hevc else data[unit] & 31 == 5


def own_sets(config: bytes, data: bytes) -> tuple[bytes, ...]:
    """Return the parameter sets before the first slice of a frame that its sample description does not contain.

    Args:
        config: Sample description of the frame, H.264 or HEVC.
        data: The encoded frame.
    """
    hevc, sets = codec_of(config) == "hevc", list[bytes]()
    for unit, stop in nal_units(data, 0, len(data), length_bytes(config), hevc):
        if unit >= len(data) or is_slice(data[unit], hevc):
            break
        kinds = (32, 33, 34) if hevc else (7, 8)
        if (data[unit] >> 1 & 63 if hevc else data[unit] & 31) in kinds and data[unit:stop].rstrip(b"\0") not in config:
            sets.append(data[unit:stop])
    return tuple(sets)


def is_intra(data: bytes, unit: int) -> bool:
    """Return whether the first slice of an H.264 frame is an IDR, I or SI slice.

    A slice header starts with two numbers in exponential Golomb code. The first macroblock is 0, which is coded as 1. The slice
    types 2, 4, 7 and 9 (I and SI) are coded as 011, 00101, 0001000 and 0001010.

    Args:
        data: Buffer with the frame.
        unit: Position of the NAL unit that contains the slice.
    """
    head = data[unit + 1 : unit + 2]
    return data[unit] & 31 == 5 or head in (b"\x88", b"\x8a") or (head != b"" and (head[0] >> 4 == 11 or head[0] >> 2 == 37))


def is_intra_refresh(config: bytes, data: bytes) -> bool:
    """Return whether the first slice of an H.264 keyframe is not intra-coded, so that decoding cannot start at it.

    With periodic intra refresh, x264 marks each frame at which a refresh begins as a keyframe, although only the first one in
    the file is intra-coded as a whole.

    Args:
        config: Sample description of the frame.
        data: The encoded frame, or its beginning.
    """
    unit = _first_slice(config, data, hevc=False)
    return unit is not None and unit + 2 < len(data) and not is_intra(data, unit)


def nal_units(data: bytes, start: int, end: int, width: int, hevc: bool) -> Iterator[tuple[int, int]]:
    """Yield the range (start, stop) of each NAL unit of a packet. `stop` is above `end` if the lengths do not add up.

    Some recorders write one length for all units of a frame, and start codes between them. FFmpeg reads them as separate units.
    Therefore, the data before the first slice of a length is split at start codes. In a slice, start codes are damage.

    Args:
        data: Buffer with the packet, or with its beginning.
        start, end: Range of the packet in the buffer.
        width: Number of bytes of a length.
        hevc: Whether the codec is HEVC, and not H.264.
    """
    while start < end:
        unit = start + width
        start = unit + int.from_bytes(data[start:unit], "big")
        stop = min(start, end)
        while unit < stop and not is_slice(data[unit], hevc) and (code := data.find(b"\0\0\1", unit, stop)) >= 0:
            yield unit, code
            unit = code + 3
        yield unit, start


def is_slice(header: int, hevc: bool) -> bool:
    """Return whether a NAL unit is a slice, from the first byte of its header."""
    return header & 0x40 == 0 if hevc else 1 <= header & 31 <= 5  # types 0 to 31 of 64 in HEVC


def _first_slice(config: bytes, data: bytes, hevc: bool) -> int | None:
    """Return the position of the first NAL unit of a frame that is a slice, or None if no slice begins in `data`."""
    try:
        width = length_bytes(config)
    except DecodeError:  # the check of the packet reports it
        width = 4
    units = (unit for unit, _ in nal_units(data, 0, len(data), width, hevc) if unit < len(data))
    return next((unit for unit in units if is_slice(data[unit], hevc)), None)

"""Kinds of keyframes of H.264 and HEVC.

An IDR frame resets the decoder. A keyframe of another kind, such as a recovery point or CRA frame at the start of an open GOP,
continues the display order of the frames before it.

Sources: ISO/IEC 14496-10, 7.3.3 (slice header) and 7.4.1 (NAL units); ISO/IEC 23008-2, 7.4.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dali_stream.errors import DecodeError
from dali_stream.mp4.format import codec_of, length_bytes
from dali_stream.storage import Store

if TYPE_CHECKING:
    from dali_stream.mp4.index import VideoIndex

CODECS = ("h264", "hevc")  # in the other codecs, every keyframe resets the decoder
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


def _first_slice(config: bytes, data: bytes, hevc: bool) -> int | None:
    """Return the position of the first NAL unit of a frame that is a slice, or None if no slice begins in `data`."""
    try:
        width = length_bytes(config)
    except DecodeError:  # the check of the packet reports it
        width = 4
    start = 0
    while start + width < len(data):
        unit = start + width
        if data[unit] & 0x40 == 0 if hevc else 1 <= data[unit] & 31 <= 5:  # types 0 to 31 of 64 in HEVC
            return unit
        start = unit + int.from_bytes(data[start:unit], "big")
    return None


def has_other_keyframes(store: Store, index: VideoIndex, codec: str) -> bool:
    """Return whether the first or second keyframe of a file is not an IDR frame, after reading the beginning of both.

    The first one alone is not enough, because files with open GOPs also begin with an IDR frame unless they were cut.
    """
    if codec not in CODECS:
        return False
    for keyframe in index.keyframes[:2].tolist():
        start, size = int(index.offset[keyframe]), int(index.size(keyframe))
        data = store.read(index.path, start, start + min(size, SLICE_HEAD))
        # None is no evidence, because the first slice may begin after `SLICE_HEAD` bytes.
        if is_idr(index.configs[index.config[keyframe]], data) is False:
            return True
    return False


def other_keyframes_refusal(codec: str) -> str:
    """Return why a video with keyframes that are not IDR frames is not decoded with NVDEC."""
    effect = "they do not reset the display order, so NVDEC would show other frames"
    if codec == "h264":
        effect = "DALI adds the parameter sets only before IDR frames, and NVDEC would decode nothing"
    return f"{codec} with keyframes that are not IDR frames: {effect}"

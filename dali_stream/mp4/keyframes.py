"""Kinds of keyframes of H.264 and HEVC.

An IDR frame resets the decoder. A keyframe of another kind, such as a recovery point or CRA frame at the start of an open GOP,
continues the display order of the frames before it.

Sources: ISO/IEC 14496-10, 7.3.3 (slice header) and 7.4.1 (NAL units); ISO/IEC 23008-2, 7.4.2.2.
"""

from __future__ import annotations

import functools

from dali_stream.mp4.boxes import children
from dali_stream.mp4.format import codec_of
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

CODECS = ("h264", "hevc")  # in the other codecs, every keyframe resets the decoder
_HEAD = 4096  # bytes of a keyframe that contain the header of its first slice


def is_idr(config: bytes, data: bytes) -> bool | None:
    """Return whether a keyframe is an IDR frame, or None if no slice begins in `data`.

    Args:
        config: Sample description of the frame, H.264 or HEVC.
        data: The encoded frame, or its beginning.
    """
    hevc = codec_of(config) == "hevc"
    width, start = _length_bytes(config), 0
    while start + width < len(data):
        unit = start + width
        kind = data[unit] >> 1 & 63 if hevc else data[unit] & 31
        if kind < 32 if hevc else 1 <= kind <= 5:
            return kind in (19, 20) if hevc else kind == 5
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
        data = store.read(index.path, start, start + min(size, _HEAD))
        # None is no evidence, because the first slice may begin after `_HEAD` bytes.
        if is_idr(index.configs[index.config[keyframe]], data) is False:
            return True
    return False


def other_keyframes_refusal(codec: str) -> str:
    """Return why a video with keyframes that are not IDR frames is not decoded with NVDEC."""
    effect = "they do not reset the display order, so NVDEC would show other frames"
    if codec == "h264":
        effect = "DALI adds the parameter sets only before IDR frames, and NVDEC would decode nothing"
    return f"{codec} with keyframes that are not IDR frames: {effect}"


@functools.lru_cache(maxsize=256)
def _length_bytes(config: bytes) -> int:
    """Return the number of bytes of the length before each NAL unit."""
    for kind, start, end in children(config, 86, len(config)):
        place = start + {b"avcC": 4, b"hvcC": 21}.get(kind, end)
        if place < end:
            return (config[place] & 3) + 1
    return 4

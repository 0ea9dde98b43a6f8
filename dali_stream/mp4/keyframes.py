"""Kinds of keyframes of H.264 and HEVC.

An IDR frame resets the decoder. A keyframe of another kind, such as a recovery point or CRA frame at the start of an open GOP,
continues the display order of the frames before it.
"""

from __future__ import annotations

from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.slices import SLICE_HEAD, is_idr
from dali_stream.storage import Store

CODECS = ("h264", "hevc")  # in the other codecs, every keyframe resets the decoder


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
    return f"{codec} with keyframes that are not IDR frames: they do not reset the decoder, so NVDEC would show other frames"

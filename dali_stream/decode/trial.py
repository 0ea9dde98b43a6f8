"""Trial of a decoder on some frames of a file, before it decodes the camera.

Some frames from the start of the file and from its second GOP are compared with FFmpeg's. A trial detects properties that an
index does not contain, such as a colour matrix that only the frames specify.
"""

from __future__ import annotations

import functools

import numpy as np

from dali_stream.decode import dali
from dali_stream.decode.torchcodec import colour_space, decode_clip
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import Clip, UnsafeForNvdec, pack
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

_SHOWN = (0, 1, 5, 13)  # places of the requested frames in display order, with gaps between them
_LIKE_BT601 = (None, "unknown", "unspecified", "reserved", "smpte170m", "bt470bg")  # FFmpeg's names


def trial(store: Store, index: VideoIndex, video: VideoFormat, gpu: int | None) -> str:
    """Return why DALI must not decode a file. The text is empty if its frames agree with FFmpeg's within the tolerance.

    Args:
        store: Store of the file.
        index: Index of the file.
        video: Format of the file.
        gpu: CUDA device, or None for the CPU.

    Raises:
        DecodeError: If FFmpeg cannot decode the frames.
    """
    try:
        clips = [_pack(store, index, frames, gpu) for frames in _frames(index)]
    except UnsafeForNvdec as error:
        return str(error)
    expected = [decode_clip(clip, video) for clip in clips]
    if gpu is not None and (named := colour_space(clips[0])) not in _LIKE_BT601:
        return f"its frames say that their colours are {named}, and DALI converts all as BT.601 on a GPU"
    try:
        decoded = dali.decode([dali.encoded(clip) for clip in clips], gpu, 1)
    except DecodeError as error:
        return f"{error}, tried on its first frames"
    return _differences("DALI", decoded, expected)


def trial_of_torchcodec(store: Store, index: VideoIndex, video: VideoFormat, device: str) -> str:
    """Return why torchcodec must not decode a file on a device. See `trial` for the arguments and errors."""
    clips = [_pack(store, index, frames, None) for frames in _frames(index)]
    expected = [decode_clip(clip, video) for clip in clips]
    try:
        decoded = [decode_clip(clip, video, device) for clip in clips]
    except DecodeError as error:
        return f"{error}, tried on its first frames"
    return _differences("torchcodec", decoded, expected)


def _frames(index: VideoIndex) -> list[list[int]]:
    """Return the packets of a clip of the first displayed frames and, if the file has a second GOP, of a clip from that GOP."""
    order = index.displayed_packets
    orders = [order, *(order[index.gop_start(order) == keyframe] for keyframe in index.keyframes[1:2])]
    return [frames[[place for place in _SHOWN if place < len(frames)]].tolist() for frames in orders if len(frames)]


def _pack(store: Store, index: VideoIndex, packets: list[int], gpu: int | None) -> Clip:
    return pack(store, [index] * len(packets), packets, for_nvdec=gpu is not None)


def _differences(decoder: str, decoded: list[dali.Frames], expected: list[dali.Frames]) -> str:
    """Return how a decoder's frames differ from FFmpeg's. The text is empty if they agree within the tolerance."""
    return next(filter(None, map(functools.partial(_difference, decoder), decoded, expected)), "")


def _difference(decoder: str, decoded: dali.Frames, expected: dali.Frames) -> str:
    if decoded.shape != expected.shape:
        return f"{decoder}'s first frames must have shape {expected.shape[1:]}, got {decoded.shape[1:]}"
    errors = np.abs(decoded.astype(np.int16) - expected).mean((1, 2, 3))
    if errors.max() > dali.COLOUR_TOLERANCE:
        return (
            f"{decoder}'s first frames must differ from FFmpeg's by at most {dali.COLOUR_TOLERANCE:g} of 255 on average, got "
            f"{errors.max():.1f}"
        )
    return ""

"""Trial of a decoder on some frames of a file, before it decodes the camera.

Some frames from the start of the file and from its second GOP are compared with FFmpeg's. A trial detects properties that an
index does not contain, such as a colour matrix that only the frames specify.
"""

from __future__ import annotations

from dali_stream.decode import dali
from dali_stream.decode.audit import difference
from dali_stream.decode.torchcodec import colour_space, decode_clip
from dali_stream.decode.torchcodec_cuda import device_name
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import UnsafeForNvdec, pack
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

_SHOWN = (0, 1, 5, 13)  # places of the requested frames in display order, with gaps between them
_NOT_READ = ("vp8", "vp9", "mpeg4")  # codecs whose colours are not read from the index; the difference may be too small to see
_LIKE_BT601 = (None, "unknown", "unspecified", "reserved", "smpte170m", "bt470bg")  # FFmpeg's names


def trial(decoder: str, store: Store, index: VideoIndex, video: VideoFormat, gpu: int | None) -> str:
    """Return why a decoder must not decode a file. The text is empty if its frames agree with FFmpeg's.

    Args:
        decoder: "dali" or "torchcodec-cuda".
        store: Store of the file.
        index: Index of the file.
        video: Format of the file.
        gpu: CUDA device, or None for the CPU.

    Raises:
        DecodeError: If FFmpeg cannot decode the frames.
    """
    by_dali = decoder == "dali"
    try:
        clips = [
            pack(store, [index] * len(packets), packets, for_nvdec=gpu is not None, hidden_frames=not by_dali)
            for packets in _frames(index)
        ]
    except UnsafeForNvdec as error:
        return str(error)
    expected = [decode_clip(clip, video) for clip in clips]
    if gpu is not None and (by_dali or video.codec in _NOT_READ) and (named := colour_space(clips[0])) not in _LIKE_BT601:
        otherwise = "DALI converts all as BT.601 on a GPU" if by_dali else f"NVDEC may not know the colours of {video.codec}"
        return f"its frames say that their colours are {named}, and {otherwise}"
    try:
        if by_dali:
            decoded = dali.decode([dali.encoded(clip) for clip in clips], gpu, 1)
        else:
            decoded = [decode_clip(clip, video, device_name(gpu)) for clip in clips]
    except DecodeError as error:
        return f"{error}, tried on its first frames"
    name = "DALI" if by_dali else "torchcodec"
    texts = [difference(*pair)[1] for pair in zip(decoded, expected, strict=True)]
    return next((f"{name}'s first frames {text}" for text in texts if text), "")


def _frames(index: VideoIndex) -> list[list[int]]:
    """Return the packets of a clip of the first displayed frames and, if the file has a second GOP, of a clip from that GOP."""
    order = index.displayed_packets
    orders = [order, *(order[index.gop_start(order) == keyframe] for keyframe in index.keyframes[1:2])]
    return [frames[[place for place in _SHOWN if place < len(frames)]].tolist() for frames in orders if len(frames)]

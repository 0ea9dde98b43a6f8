"""Whether DALI delivers what FFmpeg does, tried on a file's first frames before a camera is given to it.

Profiles, interlacing, colours that only the bitstream names: what an index does not tell, frames do.
"""

from __future__ import annotations

import numpy as np

from dali_stream.decode import dali
from dali_stream.decode.torchcodec import colour_space, decode_clip
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import pack
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

_SHOWN = (0, 1, 5, 13)  # frames of the first and of later GOPs, with frames left out between them
_LIKE_BT601 = (None, "unknown", "unspecified", "reserved", "smpte170m", "bt470bg")  # FFmpeg's names


def trial(store: Store, index: VideoIndex, video: VideoFormat, gpu: int | None) -> str:
    """Why DALI must not decode a file; empty where its first frames come out as FFmpeg's do. `gpu` None: the CPU.

    Raises:
        DecodeError: FFmpeg cannot decode them either.
    """
    packets = index.display_order[[place for place in _SHOWN if place < len(index)]].tolist()
    clip = pack(store, [index] * len(packets), packets)
    expected = decode_clip(clip, video)
    if gpu is not None and (named := colour_space(clip)) not in _LIKE_BT601:
        return f"its frames say that their colours are {named}, and DALI converts all as BT.601 on a GPU"
    try:
        [found] = dali.decode([dali.encoded(clip)], gpu, 1)
    except DecodeError as error:
        return f"{error}, tried on its first frames"
    if found.shape != expected.shape:
        return f"DALI delivered frames of shape {found.shape[1:]} for its first ones, which are {expected.shape[1:]}"
    errors = np.abs(found.astype(np.int16) - expected).mean((1, 2, 3))
    if errors.max() > dali.COLOUR_TOLERANCE:
        return (
            f"DALI's frames differ from FFmpeg's by up to {errors.max():.1f} of 255 on average, and "
            f"{dali.COLOUR_TOLERANCE:g} is tolerated; tried on its first ones"
        )
    return ""

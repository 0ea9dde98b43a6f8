"""Blocks of encoded video: the byte ranges of a file that are fetched for an episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.clip import is_avc
from dali_stream.mp4.index import LACKING, VideoIndex

Int64 = npt.NDArray[np.int64]
_HELD_BACK = 8  # packets after one of an open GOP of H.264 that decoding it may need, see `clip.span`


@dataclass(frozen=True)
class Blocks:
    """The encoded video of an episode as K blocks, which are fetched whole.

    Attributes:
        start, stop: Bytes of each block in the file, shape (K,).
        first, last: Blocks that decoding the GOP of each frame needs, shape (L,). `LACKING` where a frame has no packet.
    """

    start: Int64
    stop: Int64
    first: Int64
    last: Int64


def cut(index: VideoIndex, packet: Int64, keyframe: Int64, size: int) -> Blocks:
    """Cut what an episode needs of a file into blocks: whole GOPs, of about `size` bytes."""
    first = np.full(len(packet), LACKING, np.int64)
    last = first.copy()
    exists = packet >= 0
    if not exists.any():
        return Blocks(np.empty(0, np.int64), np.empty(0, np.int64), first, last)
    reach = _HELD_BACK if index.open_gops and is_avc(index) else 0
    final = np.minimum(packet[exists] + reach, len(index) - 1)
    begin, group = np.unique(np.searchsorted(index.keyframes, keyframe[exists], side="right") - 1, return_inverse=True)
    end = begin.copy()  # per GOP that frames begin with, the last one that decoding them takes
    np.maximum.at(end, group, np.searchsorted(index.keyframes, final, side="right") - 1)
    origin, stop = int(begin[0]), int(end.max()) + 1
    packets = slice(int(index.keyframes[origin]), int(index.keyframes[stop]) if stop < len(index.keyframes) else len(index))
    keyframes = index.keyframes[origin:stop] - packets.start
    offset, sizes = index.offset[packets], index.size[packets]
    before = np.cumsum(sizes)[keyframes] - sizes[keyframes]
    blocks = begin - origin  # each begins with a GOP that frames begin with, so blocks are at most as many as frames
    blocks = blocks[np.append(True, np.diff(before[blocks] // size) > 0)]

    def block(gop: Int64) -> Int64:
        return np.searchsorted(blocks, gop - origin, side="right") - 1

    first[exists], last[exists] = block(begin)[group], block(end)[group]
    return Blocks(
        np.minimum.reduceat(np.minimum.reduceat(offset, keyframes), blocks),
        np.maximum.reduceat(np.maximum.reduceat(offset + sizes, keyframes), blocks),
        first,
        last,
    )

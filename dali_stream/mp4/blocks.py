"""Blocks of encoded video: the byte ranges of a file that are fetched for an episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dali_stream.checks.arrays import NONE, Int64
from dali_stream.mp4.clip import is_avc
from dali_stream.mp4.index import VideoIndex

_REACH = 8  # packets after the requested one that a clip from an open GOP of H.264 usually needs, see `clip.span`


@dataclass(frozen=True)
class Blocks:
    """Encoded video of an episode of L frames, divided into K blocks. Each block is fetched as a whole.

    Attributes:
        start, stop: Byte range [start, stop) of each block in the file, shape (K,).
        first, last: First and last block that decoding the GOP of each frame requires, shape (L,). `NONE` for a frame
            without a packet.
    """

    start: Int64
    stop: Int64
    first: Int64
    last: Int64


def cut(index: VideoIndex, packet: Int64, keyframe: Int64, size: int) -> Blocks:
    """Divide the part of a file that an episode requires into blocks of whole GOPs.

    Args:
        index: Index of the file.
        packet: Packet of each frame of the episode, shape (L,). `NONE` for a frame without a packet.
        keyframe: Keyframe at which decoding each frame starts, shape (L,).
        size: Approximate size of a block in bytes. A GOP of more bytes makes its block larger.
    """
    first = np.full(len(packet), NONE, np.int64)
    last = first.copy()
    exists = packet >= 0
    if not exists.any():
        return Blocks(np.empty(0, np.int64), np.empty(0, np.int64), first, last)
    reach = _REACH if index.open_gops and is_avc(index) else 0
    final = np.minimum(packet[exists] + reach, len(index) - 1)
    # GOPs are numbered over the whole file. `begin` has those at which decoding starts, and `group` assigns the frames to them.
    begin, group = np.unique(index.gop(keyframe[exists]), return_inverse=True)
    end = begin.copy()  # for each GOP at which decoding starts, the last GOP that decoding its frames requires
    np.maximum.at(end, group, index.gop(final))
    origin, stop = int(begin[0]), int(end.max()) + 1
    packets = slice(int(index.keyframes[origin]), int(index.keyframes[stop]) if stop < len(index.keyframes) else len(index))
    keyframes = index.keyframes[origin:stop].astype(np.int64) - packets.start
    offset, sizes = index.offset[packets].astype(np.int64), index.size(packets)
    before = np.cumsum(sizes)[keyframes] - sizes[keyframes]
    blocks = begin - origin
    # Each block begins with a GOP at which decoding starts, so K is at most L. The first block begins with the first such GOP,
    # and each later block with the first one after a multiple of `size` bytes.
    blocks = blocks[np.append(True, np.diff(before[blocks] // size) > 0)]

    def block(gop: Int64) -> Int64:
        return np.searchsorted(blocks, gop - origin, side="right") - 1

    first[exists], last[exists] = block(begin)[group], block(end)[group]
    # A byte range extends from the lowest start to the highest end of its packets, because packets need not be stored in decode
    # order.
    return Blocks(
        np.minimum.reduceat(np.minimum.reduceat(offset, keyframes), blocks),
        np.maximum.reduceat(np.maximum.reduceat(offset + sizes, keyframes), blocks),
        first,
        last,
    )

"""Locates the frames of an episode in its video files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dali_stream.lerobot.source import Source
from dali_stream.mp4.clip import is_avc
from dali_stream.mp4.index import LACKING, VideoIndex
from dali_stream.mp4.timing import find_packets
from dali_stream.schedule.episodes import NONE, Blocks, Located

Int64 = npt.NDArray[np.int64]
_HELD_BACK = 8  # packets after one of an open GOP of H.264 that decoding it may need, see `clip.span`


def locate(
    source: Source,
    camera: str,
    episode: int,
    rows: Mapping[str, npt.NDArray[np.generic]],
    index: VideoIndex | None,
    block: int | None = None,
) -> Located:
    """Return where the frames of an episode are.

    Args:
        source: Episodes.
        camera: Camera.
        episode: Number of the episode.
        rows: {key: values of the episode's rows}, with the keys `CLOCKS`.
        index: Index of the episode's video file. None if it has none: its frames are images, or zeros if its dataset lacks the
            camera, or an error when one is asked for if the file is broken.
        block: Bytes of a block of encoded video. None if it is read in place.
    """
    length = int(source.lengths[episode])
    nothing = np.full(length, NONE, np.int64)
    if index is None:
        feature = source.feature(camera, episode)
        if feature is not None and feature.is_image:
            return Located(np.arange(length), np.arange(length))  # each image is a GOP of its own
        return Located(nothing, nothing)
    packet = find_packets(index, source.interval(camera, episode), source.seconds(episode, rows), *source.timing(episode))
    keyframe, exists = nothing, packet != LACKING
    keyframe[exists] = index.decode_starts(packet[exists])
    return Located(packet, keyframe, None if block is None else cut(index, packet, keyframe, block))


def cut(index: VideoIndex, packet: Int64, keyframe: Int64, size: int) -> Blocks:
    """Cut what an episode needs of a file into blocks: whole GOPs, of about `size` bytes."""
    first = np.full(len(packet), NONE, np.int64)
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

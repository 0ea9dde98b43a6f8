"""Damage that makes FFmpeg skip a frame: the stream decodes without an error, and the next frame takes the place of a frame."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

from dali_stream.mp4.damage import checker
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore
from support import videos as data

HEADER = 12  # damaged bytes of a packet: every codec begins a packet with the fields that say how its frame is displayed


def skip_frame(root: Path, path: str) -> int:
    """Flip one bit of a video file, in place, so that FFmpeg skips a frame that no other frame refers to.

    The bit that causes this depends on codec and encoder, so the function tries header bits of the second GOP. It decodes the
    file with torchcodec alone.

    Returns:
        The number of the skipped frame in the file, in display order.
    """
    index, video = read_index(LocalStore(str(root)), path), (root / path).read_bytes()
    for at, bit in _header_bits(index, video):
        changed = bytearray(video)
        changed[at] ^= 1 << bit
        if not _has_visible_damage(index, changed, at) and (skipped := _skipped_frame(index, changed)) is not None:
            (root / path).write_bytes(changed)
            return skipped
    pytest.skip("no single bit makes this FFmpeg skip a frame")


def _header_bits(index: VideoIndex, video: bytes) -> Iterator[tuple[int, int]]:
    """(byte of the file, bit) of packet headers: first the keyframe's, then from the last packet to the first.

    Fewer frames refer to a late frame.
    """
    first, stop = _second_gop(index)
    for packet in [first, *range(stop - 1, first, -1)]:
        start = int(index.offset[packet])
        yield from itertools.product(range(start, start + min(HEADER, int(index.size(packet)))), range(8))


def _second_gop(index: VideoIndex) -> tuple[int, int]:
    """Its first packet, and the first packet after it."""
    return int(index.keyframes[1]), int(index.keyframes[2])


def _has_visible_damage(index: VideoIndex, video: bytearray, at: int) -> bool:
    """Whether the changed packet is refused before it is decoded, which is not what is tested with it."""
    check = checker(index.configs[0])
    packet = int(np.flatnonzero(index.offset <= at)[-1])
    start = int(index.offset[packet])
    size = int(index.size(packet))
    return check is not None and bool(check(bytes(video[start : start + size]), 0, size, packet in index.keyframes))


def _skipped_frame(index: VideoIndex, video: bytearray) -> int | None:
    """The only frame of the second GOP that FFmpeg skips. None if it skips none, or if another frame suffers as well."""
    first, stop = _second_gop(index)
    expected = range(first, stop + 1)
    try:
        decoder = VideoDecoder(torch.frombuffer(video, dtype=torch.uint8), num_ffmpeg_threads=1)
        frames = decoder.get_frames_at(list(expected))
        displayed = (frames.pts_seconds * data.FPS).round().int().tolist()
        identities = data.identities(frames.data)
    except (RuntimeError, ValueError):  # ValueError: no readable identity
        return None
    skipped = sorted(set(expected) - set(displayed))
    return skipped[0] if len(skipped) == 1 and identities == [data.identity(number) for number in displayed] else None

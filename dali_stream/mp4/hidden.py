"""Frames that are decoded and not shown when they are: encoders hide them to have something to predict from.

Sources: the AV1 bitstream, 5.3.2 (OBU header) and 5.9.2 (uncompressed header); the VP9 bitstream, 6.2 and annex B
(superframes); RFC 6386, 9.1 (VP8's frame tag).
"""

from __future__ import annotations

import contextlib

import numpy as np

from dali_stream.mp4.damage import leb128, vp9_frames
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

CODECS = ("av1", "vp9", "vp8")  # of the others, every frame that is decoded is shown, if perhaps later

_FRAMES, _BYTES, _READS = 128, 8 << 20, 16  # of a file's beginning: some mini-GOPs of any encoder


def hidden(codec: str, data: bytes) -> int:
    """How many of a sample's frames are not shown with it.

    Args:
        codec: one of `CODECS`.
        data: the whole sample, which has been found undamaged (`damage.checker`).
    """
    if not data:  # which the decoder refuses
        return 0
    if codec == "av1":
        return _av1(data)
    if codec == "vp9":
        return sum(map(_is_hidden_vp9, (data[start] for start, _ in vp9_frames(data, 0, len(data)))))
    return int(not data[0] & 0x10)


def hidden_frames(store: Store, table: VideoIndex, codec: str) -> tuple[int, int]:
    """(frames that are decoded and not shown, frames looked into), of the first frames of a file."""
    if codec not in CODECS:
        return 0, 0
    count = seen = 0
    first = np.arange(min(len(table), _FRAMES))
    first = first[np.cumsum(table.size[first]) <= _BYTES]
    apart = table.offset[first][1:] != (table.offset[first] + table.size[first])[:-1]
    stretches = np.split(first, np.flatnonzero(apart) + 1)
    for samples in stretches[:_READS]:
        if not len(samples):
            continue
        begin, last = int(table.offset[samples[0]]), int(samples[-1])
        data = store.read(table.path, begin, int(table.offset[last] + table.size[last]))
        for sample in samples.tolist():
            at = int(table.offset[sample]) - begin
            with contextlib.suppress(IndexError):  # damaged: the frame that is decoded shows whether it matters
                count += hidden(codec, data[at : at + int(table.size[sample])])
                seen += 1
    return count, seen


def hidden_frames_refusal(codec: str) -> str:
    """Why NVDEC does not get a video with hidden frames."""
    return f"{codec} with hidden frames: DALI pairs times with decoded frames on a GPU, and would deliver others than asked for"


def _av1(data: bytes) -> int:
    at = count = reduced = 0
    while at < len(data):
        kind, extended, sized = data[at] >> 3 & 15, data[at] >> 2 & 1, data[at] & 2
        at += 1 + extended
        size, at = leb128(data, at) if sized else (len(data) - at, at)
        if not size:
            continue
        if kind == 1:  # sequence header: profile (3 bits), still frame (1), reduced still frame header (1)
            reduced = data[at] & 0x08
        elif kind in (3, 6) and not reduced:  # frame header, frame: show_existing_frame, frame_type (2 bits), show_frame
            count += not data[at] & 0x90
        at += size
    return count


def _is_hidden_vp9(header: int) -> bool:
    """Marker (2 bits), profile (2), in profile 3 a reserved bit, show_existing_frame, frame_type, show_frame."""
    shift = 0 if header & 0x30 == 0x30 else 1
    return not header >> shift & 0b101

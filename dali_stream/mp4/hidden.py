"""Hidden frames: frames that are decoded but not displayed at once. Encoders use them as references for other frames.

Sources: the AV1 bitstream, 5.3.2 (OBU header) and 5.9.2 (uncompressed header); the VP9 bitstream, 6.2 and annex B
(superframes); RFC 6386, 9.1 (VP8's frame tag).
"""

from __future__ import annotations

import contextlib

import numpy as np

from dali_stream.mp4.damage import vp9_frames
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.sequence_header import obus
from dali_stream.storage import Store

CODECS = ("av1", "vp9", "vp8")  # other codecs display every decoded frame, at once or later

# Limits of `hidden_frames`: packets, bytes and reads. The first 128 packets contain several mini-GOPs of any encoder.
_FRAMES, _BYTES, _READS = 128, 8 << 20, 16


def hidden(codec: str, data: bytes) -> int:
    """Return the number of hidden frames in a packet.

    Args:
        codec: One of `CODECS`.
        data: The whole packet, which has passed the check of `damage.checker`.
    """
    if not data:  # the decoder refuses an empty packet
        return 0
    if codec == "av1":
        return _av1(data)
    if codec == "vp9":
        return sum(map(_is_hidden_vp9, (data[start] for start, _ in vp9_frames(data, 0, len(data)))))
    return int(not data[0] & 0x10)


def hidden_frames(store: Store, index: VideoIndex, codec: str) -> tuple[int, int]:
    """Return the number of hidden frames and the number of examined packets, at the beginning of a file.

    Args:
        store: Store of the file.
        index: Index of the file.
        codec: Codec of the file. Both numbers are 0 if it is not in `CODECS`.
    """
    if codec not in CODECS:
        return 0, 0
    count = seen = 0
    first = np.arange(min(len(index), _FRAMES))
    first = first[np.cumsum(index.size(first)) <= _BYTES]
    apart = index.offset[first][1:] != index.end[first][:-1]
    stretches = np.split(first, np.flatnonzero(apart) + 1)
    for packets in stretches[:_READS]:
        if not len(packets):
            continue
        begin, last = int(index.offset[packets[0]]), int(packets[-1])
        data = store.read(index.path, begin, int(index.end[last]))
        for packet in packets.tolist():
            at = int(index.offset[packet]) - begin
            with contextlib.suppress(IndexError):  # the packet is damaged, which decoding it may report
                count += hidden(codec, data[at : at + int(index.size(packet))])
                seen += 1
    return count, seen


def hidden_frames_refusal(codec: str) -> str:
    """Return why a video with hidden frames is not decoded with NVDEC."""
    return f"{codec} with hidden frames: DALI would deliver other frames on a GPU, because it pairs times with decoded frames"


def _av1(data: bytes) -> int:
    count = reduced = 0
    for header, at, stop in obus(data, 0, len(data)):
        kind = header >> 3 & 15
        if at == stop:
            continue
        if kind == 1:  # sequence header: profile (3 bits), still frame (1), reduced still frame header (1)
            reduced = data[at] & 0x08
        elif kind in (3, 6) and not reduced:  # frame header, frame: show_existing_frame, frame_type (2 bits), show_frame
            count += not data[at] & 0x90
    return count


def _is_hidden_vp9(header: int) -> bool:
    """Return whether a frame is hidden, from the first byte of its header.

    The byte contains the marker (2 bits), the profile (2 bits), a reserved bit in profile 3, show_existing_frame, frame_type
    and show_frame. A frame is hidden if both show_existing_frame and show_frame are 0.
    """
    shift = 0 if header & 0x30 == 0x30 else 1
    return not header >> shift & 0b101

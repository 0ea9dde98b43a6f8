"""Headers of an MP4's movie and video track that say when and how frames are displayed: edit list, timescale and matrix.

Sources: ISO/IEC 14496-12, 6.2.2 (matrix), 8.2.2 (mvhd), 8.3.2 (tkhd), 8.4.2 (mdhd) and 8.6.6 (elst). A file that may be
read in several ways is read as in FFmpeg.
"""

from __future__ import annotations

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.errors import DecodeError, counted
from dali_stream.mp4.boxes import UPRIGHT, encode_again, find
from dali_stream.mp4.sample_tables import entries, required, ticks_per_second


def apply_edit_list(moov: bytes, track: tuple[int, int], pts: Int64, timescale: int, codec: str) -> tuple[Int64, range]:
    """Apply the edit list, which may have one part at rate 1 after an optional delay, as FFmpeg does.

    A frame is displayed if its presentation time is in the part. The first displayed frame has the time of the delay, also if
    the part begins inside the frame before it. All other frames keep their distance from it.

    Args:
        moov: Body of the `moov` box.
        track: Range of the video track in `moov`.
        pts: Presentation times without the edit list in ticks, in decode order, shape (n,).
        timescale: Number of ticks per second.
        codec: Codec of the file, for the message.

    Returns:
        Presentation times in ticks, shape (n,), and the places of the displayed frames in display order.

    Raises:
        DecodeError: If the edit list has more than one part, changes the rate, or hides all frames.
    """
    elst = find(moov, *track, b"edts", b"elst")
    if elst is None:
        return pts, range(len(pts))
    body = moov[elst[0] : elst[1]]
    form = "duration:u8 media:i8" if body[0] == 1 else "duration:u4 media:i4"
    edits = entries({b"elst": body}, b"elst", f"{form} rate:i2 fraction:i2")
    movie = ticks_per_second(moov, required(moov, 0, len(moov), b"mvhd"))
    delays = edits["media"] == -1
    parts = edits[~delays]
    if len(parts) == 0:
        return pts, range(len(pts))
    if len(parts) > 1 or delays[-1] or parts["rate"][0] != 1 or not movie:
        raise DecodeError(
            f"the edit list must be one part at rate 1, perhaps delayed, got {counted(len(parts), 'part')}. "
            f"Encode its displayed frames again: {encode_again(codec)}, or record it again"
        )
    # Durations are in ticks of the movie. They are rounded to the nearest tick of the track, as FFmpeg rounds them.
    *waits, length = [(int(ticks) * timescale + movie // 2) // movie for ticks in edits["duration"]]
    start = int(parts["media"][0])
    before = int((pts < start).sum())
    after = int((pts >= start + length).sum()) if length else 0  # without a length, the part ends with the track
    displayed = range(before, len(pts) - after)
    if not displayed:
        raise DecodeError(f"the edit list must display a frame, got {counted(len(pts), 'hidden frame')}. Record the file again")
    return pts - int(pts[pts >= start].min()) + sum(waits), displayed


def track_header(moov: bytes, track: tuple[int, int]) -> bytes:
    """Return the matrix and the display size of the video track (the end of `tkhd`), with the matrix of the movie applied."""
    tkhd = required(moov, *track, b"tkhd")
    header = moov[tkhd[1] - 44 : tkhd[1]]
    mvhd = find(moov, 0, len(moov), b"mvhd") or (0, 0)
    movie = moov[mvhd[0] : mvhd[1]]
    movie = movie[48:84] if movie[:1] == b"\1" else movie[36:72]
    if movie == UPRIGHT:
        return header
    if not any(movie):  # FFmpeg then turns no frames, whatever the matrix of the track
        return UPRIGHT + header[36:]
    own, whole = (np.frombuffer(part, ">i4", 9).astype(np.int64).reshape(3, 3) for part in (header, movie))
    # The entries of the first two columns are fixed-point numbers with 16 bits after the point, and those of the third with 30.
    product = ((own[:, :, None] * whole) >> np.array([16, 16, 30])[:, None]).sum(1)
    return product.astype(">i4").tobytes() + header[36:]

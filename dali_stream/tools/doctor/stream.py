"""The edit list of a video file."""

from __future__ import annotations

import struct

from dali_stream.mp4.boxes import children, find, read_moov
from dali_stream.storage import Store


def edit_list(store: Store, path: str) -> str:
    """Describes the video track's edit list (ISO/IEC 14496-12, 8.6.6); empty if it has no effect.

    `read_index` refuses files whose edit list hides frames.
    """
    moov = read_moov(store, path)
    for kind, start, end in children(moov, 0, len(moov)):
        handler = find(moov, start, end, b"mdia", b"hdlr") if kind == b"trak" else None
        if handler and moov[handler[0] + 8 : handler[0] + 12] == b"vide":
            found = find(moov, start, end, b"edts", b"elst")
            return _edits(moov[found[0] : found[1]]) if found else ""
    return ""


def _edits(body: bytes) -> str:
    count = min(struct.unpack_from(">I", body, 4)[0], 8)
    form, width = (">Qqhh", 20) if body[0] == 1 else (">Iihh", 12)
    edits = [struct.unpack_from(form, body, 8 + i * width) for i in range(min(count, (len(body) - 8) // width))]
    found = [
        f"a delay of {duration} ticks" if media == -1 else f"begins at tick {media} of the media"
        for duration, media, *_ in edits
        if media != 0  # the whole media unchanged: FFmpeg writes such a list into every file
    ]
    return ", ".join(found)

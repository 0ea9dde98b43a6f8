"""ISO base media boxes (ISO/IEC 14496-12, section 4.2): a reader that is safe for untrusted files, and a writer."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from dali_stream.errors import DecodeError
from dali_stream.storage import Store, lfs

MOST_CHILDREN = 10_000
LARGEST_MOOV = 256 << 20
UPRIGHT = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)  # the matrix of unrotated frames
HEAD = 1 << 13  # bytes of the first read, which contain `moov` for up to about 300 frames; a second read fetches the rest
BEGINNING = 200  # bytes of a file that tell what it is; two packets of an MPEG transport stream begin in them
TAIL = 1 << 22  # bytes of a read after the media data, where files rarely have more than `moov`
# Command for messages. Without -copyts, FFmpeg would move the first frame to time 0, and rows have the times of the file.
COPY = "`ffmpeg -copyts -i IN -map 0:v:0 -c copy OUT.mp4` (-copyts keeps the times of its frames)"
_ENCODED = "-map 0:v:0 -fps_mode passthrough -enc_time_base -1 -c:v libx264 -crf 18"


def children(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) for the body of each box in `data[start:end]`, up to zeros that fill the rest.

    QuickTime ends lists of boxes with four zero bytes.

    Raises:
        DecodeError: If a box does not fit into its parent, or the parent has more than `MOST_CHILDREN` boxes.
    """
    for _ in range(MOST_CHILDREN):
        if not any(data[start : min(start + 4, end)]) and not any(data[start:end]):
            return
        try:
            kind, head, size = _header(data[start : start + 16], start, end)
        except DecodeError as error:
            raise DecodeError(
                f"{error}: the file's index is broken. Copy or fetch the file again, or record it again"
            ) from None
        yield kind, start + head, start + size
        start += size
    raise DecodeError(
        f"a box must contain at most {MOST_CHILDREN} boxes: the file's index is broken. Copy or fetch the file again, or "
        "record it again"
    )


def find(data: bytes, start: int, end: int, *path: bytes) -> tuple[int, int] | None:
    """Return (start, end) of the body of the first box at a path of kinds in `data[start:end]`, or None if it is missing."""
    for kind in path:
        for child, first, last in children(data, start, end):
            if child == kind:
                start, end = first, last
                break
        else:
            return None
    return start, end


def read_moov(store: Store, path: str) -> bytes:
    """Return the body of a file's `moov` box. This takes up to two reads, or three if the box is stored after the media data.

    Raises:
        DecodeError: If the file is not an MP4, is truncated, or has a `moov` box of more than `LARGEST_MOOV` bytes.
    """
    at = base = 0
    window = store.read(path, 0, HEAD)
    size = store.size(path)  # after the read, which also returns the size of a remote file
    for _ in range(MOST_CHILDREN):
        if at == size:
            state = _looks_like(store.read(path, 0, BEGINNING)) or _UNFINISHED
            raise DecodeError(f"no moov box (the index of an MP4){state}")
        if not base <= at <= base + len(window) - 16:
            base, window = at, store.read(path, at, min(at + TAIL, size))
        try:
            kind, head, length = _header(window[at - base : at - base + 16], at, size)
        except DecodeError as error:
            raise DecodeError(f"{error}{_looks_like(store.read(path, 0, BEGINNING)) or _TRUNCATED}") from None
        if kind == b"moov":
            if length > LARGEST_MOOV:
                raise DecodeError(f"box 'moov' must have at most {LARGEST_MOOV} bytes, got {length}")
            first, last = at + head - base, at + length - base
            rest = store.read(path, base + len(window), base + last) if last > len(window) else b""
            return window[first:last] + rest
        at += length
    raise DecodeError(f"not an MP4, because it has more than {MOST_CHILDREN} boxes")


def other_container(first: bytes) -> tuple[str, str]:
    """Return the name of the container of a video that is not an MP4, and the command that writes an MP4.

    Both are empty for an MP4, and for an unknown container.

    Args:
        first: First bytes of the file, at least `BEGINNING` unless it is shorter.
    """
    if first.startswith(b"RIFF") and first[8:12] == b"AVI ":
        # AVI has no display times. Copied B-frames would be displayed in decode order. The times of decoded frames
        # begin with the delay of the decoder, and end between two frames. Gaps stay.
        times = "setpts=round((PTS-STARTPTS)*TB*FRAME_RATE)/FRAME_RATE/TB"
        return "AVI", f"Encode it again, with its first frame at time 0: `ffmpeg -i IN -vf '{times}' {_ENCODED} OUT.mp4`"
    # Each packet of a transport stream begins with this byte. Packets have 188 bytes, or 192 with a time before each.
    is_stream = any(first[at : at + 1] == first[at + size : at + size + 1] == b"\x47" for at, size in ((0, 188), (4, 192)))
    beginnings = {"Matroska or WebM": b"\x1a\x45\xdf\xa3", "Flash Video": b"FLV\x01"}
    name = "MPEG-TS" if is_stream else next((n for n, begin in beginnings.items() if first.startswith(begin)), "")
    return name, f"Copy its video into an MP4: {COPY}" if name else ""


def encode_again(codec: str) -> str:
    """Return the command that encodes the displayed frames of a file again, with their times."""
    # FFmpeg 5.1 displays hidden frames of AV1 if it decodes with libdav1d, its default.
    decoder = "-c:v libaom-av1 " if codec == "av1" else ""
    return f"`ffmpeg {decoder}-copyts -i IN {_ENCODED} OUT.mp4`"


def has_fragments(store: Store, path: str) -> bool:
    """Return whether a file has movie fragments (`moof`), after reading the headers of its boxes up to the first one."""
    at, size = 0, store.size(path)
    for _ in range(MOST_CHILDREN):
        try:
            kind, _, length = _header(store.read(path, at, at + 16), at, size)
        except DecodeError:  # the end of the file, or something that is no box
            return False
        if kind == b"moof":
            return True
        at += length
    return False


def box(kind: bytes, *parts: bytes) -> bytes:
    """Return a box whose body consists of `parts`."""
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def full_box(kind: bytes, version: int, flags: int, *parts: bytes) -> bytes:
    """Return a box whose body consists of version, flags and `parts`."""
    body = b"".join(parts)
    return struct.pack(">I4sI", 12 + len(body), kind, version << 24 | flags) + body


def _header(head: bytes, start: int, end: int) -> tuple[bytes, int, int]:
    """Parse the header of a box.

    Args:
        head: First 16 bytes of the box, or fewer if its parent ends earlier.
        start: Start of the box.
        end: End of its parent.

    Returns:
        Kind, size of the header and size of the box, in bytes.

    Raises:
        DecodeError: If the header is truncated, or the size of the box is invalid.
    """
    if len(head) < 8:
        raise DecodeError(f"the file ends in the middle of a box header at byte {start}")
    size, kind = struct.unpack_from(">I4s", head)
    name, length = repr(kind.decode("latin-1")), 8
    if size == 1 and len(head) >= 16:
        size, length = struct.unpack_from(">Q", head, 8)[0], 16
    elif size == 0:
        size = end - start  # to the end of the file
    if size < length:
        raise DecodeError(f"box {name} at byte {start} must have at least {length} bytes for its header, got {size}")
    if size > end - start:
        raise DecodeError(f"box {name} at byte {start} must have {size} bytes, got {end - start}")
    return kind, length, size


_TRUNCATED = ": the file is truncated or damaged. Copy or fetch it again"
_UNFINISHED = ": the file is truncated, or its recording was not finished. Copy or fetch it again, or record it again"


def _looks_like(first: bytes) -> str:
    """Return what a file is if it is not an MP4, and what to do. The text is empty for an MP4."""
    if pointer := lfs.pointer(first):
        return f": {pointer}"
    if first.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return ": the file is an HTML page, because its download failed. Fetch it again"
    if not first:
        return ": the file is empty. Copy or fetch it again"
    container, remedy = other_container(first)
    if container:
        return f": the file is {container}, and not MP4. {remedy}"
    return (
        "" if first[4:8] == b"ftyp" else f": the file begins with {first[:16]!r}, so it is not an MP4. Copy or fetch it again"
    )

"""One file of the cache on disk: a byte range of a remote file, checked page by page.

The header identifies the bytes (a hash of the remote file, start, stop) and has a CRC-32 for each page, so that a small
part of a large entry is checked without reading the rest. A CRC detects damage, not forgery.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
import zlib
from contextlib import suppress

PAGE = 1 << 16
_MAGIC = b"dsrange1"
_FIXED = struct.Struct("<8s16sQQ")  # magic, hash of the remote file, start, stop
_CRC = struct.Struct("<I")
_NAME = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
# The modification time records the last use, for eviction; it is updated no more often than this.
_NOTE_USE_S = 60.0


Span = tuple[int, int]  # [start, stop) of the remote file


class DamagedError(Exception):
    """An entry whose content does not match its name."""


def name_of(span: Span) -> str:
    """The file name of the entry for these bytes."""
    return f"{span[0]}-{span[1]}"


def span_of(name: str) -> Span | None:
    """The bytes of the entry with this name; None if it is not an entry's name."""
    found = _NAME.fullmatch(name)
    span = (int(found[1]), int(found[2])) if found else (0, 0)
    return span if span[0] < span[1] and name_of(span) == name else None


def header(digest: bytes, start: int, data: bytes) -> bytes:
    """The header of an entry.

    Args:
        digest: 16 bytes that identify the remote file.
        start: offset of `data` in it.
    """
    view = memoryview(data)
    pages = [zlib.crc32(view[at : at + PAGE]) for at in range(0, len(data), PAGE)]
    head = _FIXED.pack(_MAGIC, digest, start, start + len(data)) + struct.pack(f"<{len(pages)}I", *pages)
    return head + _CRC.pack(zlib.crc32(head))


def header_size(length: int) -> int:
    """Bytes of the header of an entry that holds `length` bytes."""
    return _FIXED.size + _CRC.size * (-(-length // PAGE) + 1)


def read(path: str, digest: bytes, span: Span, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of the remote file, from the entry of `span`, which includes them.

    Raises:
        DamagedError: the entry is damaged.
        OSError: it cannot be read, or was evicted.
    """
    handle = _opened(path)
    try:
        found = os.fstat(handle)
        checks = _checks(handle, found, digest, span)
        data = _checked(handle, checks, header_size(span[1] - span[0]), start - span[0], stop - span[0])
        if abs(time.time() - found.st_mtime) > _NOTE_USE_S:
            with suppress(OSError):  # another user's entry: readable, but its time cannot be set
                os.utime(handle)
        return data
    finally:
        os.close(handle)


def _opened(path: str) -> int:
    try:
        # Non-blocking: opening a pipe of this name would wait for a writer.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError("it is a symbolic link") from None
        raise


def _checks(handle: int, found: os.stat_result, digest: bytes, span: Span) -> tuple[int, ...]:
    """The CRC of each page, from a header that is undamaged and of this range."""
    length = span[1] - span[0]
    size = header_size(length)
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError("it is not a regular file")
    if found.st_size != size + length:
        raise DamagedError(f"it has {found.st_size} bytes instead of {size + length}")
    head = os.pread(handle, size, 0)
    if len(head) != size or _CRC.unpack(head[-_CRC.size :])[0] != zlib.crc32(head[: -_CRC.size]):
        raise DamagedError("its header is damaged")
    if _FIXED.unpack_from(head) != (_MAGIC, digest, *span):
        raise DamagedError("its header is of another range")
    return struct.unpack_from(f"<{(size - _FIXED.size) // _CRC.size - 1}I", head, _FIXED.size)


def _checked(handle: int, checks: tuple[int, ...], size: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop) after a header of `size` bytes, if the CRCs of their pages match."""
    first, last = start // PAGE, -(-stop // PAGE)
    data = os.pread(handle, (last - first) * PAGE, size + first * PAGE)
    view = memoryview(data)
    for number in range(first, last):
        at = (number - first) * PAGE
        if zlib.crc32(view[at : at + PAGE]) != checks[number]:
            raise DamagedError(f"{PAGE >> 10} KiB from byte {number * PAGE} are damaged")
    return data[start - first * PAGE : stop - first * PAGE]

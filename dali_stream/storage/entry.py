"""One file of the cache on disk: a byte range of a remote file, checked page by page.

The header names what the bytes are (a hash of the remote file, start, stop) and holds a CRC-32 for each page, so that a
small part of a large entry is checked without reading the rest. A CRC finds damage; it is no seal against forgery.
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
# Use is noted in the time of modification, which eviction goes by, and no more often than this.
_NOTE_USE_S = 60.0


Span = tuple[int, int]  # [start, stop) of the remote file


class DamagedError(Exception):
    """An entry that is not what its name says."""


def name_of(span: Span) -> str:
    """The file name of the entry that holds these bytes."""
    return f"{span[0]}-{span[1]}"


def span_of(name: str) -> Span | None:
    """The bytes that the entry of a name holds; None where it is no name of an entry."""
    found = _NAME.fullmatch(name)
    span = (int(found[1]), int(found[2])) if found else (0, 0)
    return span if span[0] < span[1] and name_of(span) == name else None


def header(digest: bytes, start: int, data: bytes) -> bytes:
    """What precedes the bytes in an entry.

    Args:
        digest: 16 bytes that stand for the remote file.
        start: place of `data` in it.
    """
    view = memoryview(data)
    pages = [zlib.crc32(view[at : at + PAGE]) for at in range(0, len(data), PAGE)]
    head = _FIXED.pack(_MAGIC, digest, start, start + len(data)) + struct.pack(f"<{len(pages)}I", *pages)
    return head + _CRC.pack(zlib.crc32(head))


def header_size(length: int) -> int:
    """Bytes of the header of an entry that holds `length` bytes."""
    return _FIXED.size + _CRC.size * (-(-length // PAGE) + 1)


def read(path: str, digest: bytes, span: Span, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of the remote file out of the entry of `span`, a range around them.

    Raises:
        DamagedError: the entry does not hold what it should.
        OSError: it cannot be read, or is not there any more.
    """
    handle = _opened(path)
    try:
        found = os.fstat(handle)
        checks = _checks(handle, found, digest, span)
        data = _checked(handle, checks, header_size(span[1] - span[0]), start - span[0], stop - span[0])
        if abs(time.time() - found.st_mtime) > _NOTE_USE_S:
            with suppress(OSError):  # of someone else's entry: it is read, and not kept alive by us
                os.utime(handle)
        return data
    finally:
        os.close(handle)


def _opened(path: str) -> int:
    try:
        # Not blocking: a pipe of this name would wait for someone to write to it.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError("it is a symbolic link") from None
        raise


def _checks(handle: int, found: os.stat_result, digest: bytes, span: Span) -> tuple[int, ...]:
    """The CRC of each page, out of a header that is whole and of this range."""
    length = span[1] - span[0]
    size = header_size(length)
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError("it is not a regular file")
    if found.st_size != size + length:
        raise DamagedError(f"it has {found.st_size} bytes, and {size + length} are right")
    head = os.pread(handle, size, 0)
    if len(head) != size or _CRC.unpack(head[-_CRC.size :])[0] != zlib.crc32(head[: -_CRC.size]):
        raise DamagedError("its header is damaged")
    if _FIXED.unpack_from(head) != (_MAGIC, digest, *span):
        raise DamagedError("it holds something else than its name says")
    return struct.unpack_from(f"<{(size - _FIXED.size) // _CRC.size - 1}I", head, _FIXED.size)


def _checked(handle: int, checks: tuple[int, ...], size: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop) behind a header of `size` bytes, once the pages that they lie in are right."""
    first, last = start // PAGE, -(-stop // PAGE)
    data = os.pread(handle, (last - first) * PAGE, size + first * PAGE)
    view = memoryview(data)
    for number in range(first, last):
        at = (number - first) * PAGE
        if zlib.crc32(view[at : at + PAGE]) != checks[number]:
            raise DamagedError(f"its bytes are damaged, {PAGE >> 10} KiB from byte {number * PAGE} on")
    return data[start - first * PAGE : stop - first * PAGE]

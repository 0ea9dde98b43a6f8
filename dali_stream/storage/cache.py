"""Fetched blocks of remote files on disk, shared by the processes of a host and by later runs.

    <folder>/blocks/4f/4fc1…-12   a segment: 4 MiB of a remote file, which a hash names, as far as they were fetched
    <folder>/usage                with a limit: bytes of all segments in decimal digits, never too few; locked by who writes
    <folder>/locks                locked by who fetches, a byte for each block

A segment is a sparse file: a header with the length and the CRC-32 of each block, then the blocks in their places. A CRC
detects damage, not forgery. The kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial

BLOCK = 1 << 14
_PER_SEGMENT = 256
_FIXED = struct.Struct("<8s16sQ16sQ")  # magic, hash of the remote file, number of the segment, hash of its version, its size
_CRC = struct.Struct("<I")  # of these
_MAGIC = b"dsblock1"
_ENTRY = struct.Struct("<II")  # length, 0 for a block that is not there, and CRC
_ENTRIES, _BLOCKS = 64, 4096  # where they begin in a segment
_SEGMENT = re.compile(r"[0-9a-f]{32}-[0-9]{1,12}")
_LOCK = struct.Struct("hhqqi")  # struct flock: kind, whence, start, length, process
_PAGE = 4096  # bytes that a file system takes for a byte
_FULL = 0.9  # of the limit remains after eviction, which looks at all segments and should be rare
# The modification time records the last use, for eviction; it is updated no more often than this.
_NOTE_USE_S = 60.0
_NO_FOLLOW = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe of the name would wait

_logger = logging.getLogger("dali_stream")


class DiskCache:
    """Blocks of remote files in a folder, within a limit: the least recently used segments are evicted.

    Safe to use from several threads and processes. A damaged block is a miss. If the folder can no longer be written to
    (full, read-only, gone), one warning is logged and reading continues. Whoever can write to the folder is trusted.
    `file` identifies a remote file, `version` its content; of one file there is one version. Blocks are numbered from 0; all
    but a file's last are full.

    Args:
        folder: created if it does not exist.
        limit_bytes: of all segments on disk, the same for all who use the folder at a time. None: no limit.

    Raises:
        ValueError: the folder is a file or cannot be created, or the limit is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"cache_bytes is {limit_bytes}; give a number of bytes of 1 or more, or None for no limit")
        self.__setstate__((_made(folder), limit_bytes))
        if limit_bytes is not None:  # the folder may have been filled under another limit
            self._guarded(lambda: self._reserve(0, None))

    def __getstate__(self) -> tuple[str, int | None]:
        return self._folder, self._limit

    def __setstate__(self, state: tuple[str, int | None]) -> None:
        self._folder, self._limit = state
        self._writing, self._lock = True, threading.Lock()

    def read(self, file: str, version: str, first: int, last: int) -> list[bytes | None]:
        """Blocks [first, last) of a file; None for each that is not there, and for all if the version is unknown (empty)."""
        if not version:
            return [None] * (last - first)
        found: list[bytes | None] = []
        for number, a, b in _pieces(first, last):
            path = self._path(file, number)
            try:
                found += _read(path, _hash(file), number, _hash(version), a, b)
            except OSError as error:  # most likely there is none
                found += [None] * (b - a)
                if isinstance(error, _DamagedError):
                    _logger.warning(
                        "%s: a cached block is damaged: %s. It is removed, and its bytes are fetched again", path, error
                    )
                    with suppress(OSError):
                        os.unlink(path)
        return found

    def size(self, file: str) -> int | None:
        """The size of a file of which something is there, in any version."""
        with suppress(OSError), _opened(self._path(file, 0), os.O_RDONLY) as handle:
            return _header(handle, _hash(file), 0)[1]
        return None

    def write(self, file: str, version: str, first: int, data: bytes, size: int) -> None:
        """Caches blocks from `first` on, and the file's size, in place of another version. Never raises if the disk refuses."""
        view, pieces = memoryview(data), list(_pieces(first, first + -(-len(data) // BLOCK)))
        if first >= _PER_SEGMENT and not os.path.exists(self._path(file, 0)):
            pieces.insert(0, (0, first, first))  # none of its blocks, but the size
        for number, a, b in pieces:
            at = (number * _PER_SEGMENT + a - first) * BLOCK if number else 0
            part, path = view[at : at + (b - a) * BLOCK], self._path(file, number)
            write = partial(_write, path, _fixed(_hash(file), number, _hash(version), size), a, part)
            taken = _BLOCKS + len(part) + _PAGE
            self._guarded(write if self._limit is None else partial(self._reserve, taken, write))

    @contextmanager
    def fetching(self, file: str, first: int, last: int) -> Iterator[None]:
        """A lock on blocks [first, last): one thread of one process fetches a block at a time.

        After 30 s, or if the folder cannot hold a lock file, the block runs without the lock: fetching twice costs bytes and
        no more.
        """
        handle = -1
        with suppress(OSError, AttributeError):  # only Linux has locks of open files
            handle = os.open(os.path.join(self._folder, "locks"), os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o666)
            start = (int.from_bytes(_hash(file)[:5], "little") << 22) + first % (1 << 22)
            lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, last - first, 0)
            _locked(lambda: fcntl.fcntl(handle, fcntl.F_OFD_SETLK, lock), 30.0)
        try:
            yield
        finally:
            if handle >= 0:
                os.close(handle)

    def _path(self, file: str, number: int) -> str:
        name = _hash(file).hex()
        return f"{self._folder}/blocks/{name[:2]}/{name}-{number}"

    def _guarded(self, write: Callable[[], None]) -> None:
        """Writes, unless the disk has refused it before."""
        try:
            if self._writing:
                write()
        except OSError as error:
            with self._lock:
                first, self._writing = self._writing, False
            if first:
                _logger.warning(
                    "cannot write to cache_dir %s: %s. Fetched bytes are no longer cached; existing ones are still read",
                    self._folder,
                    error.strerror or error,
                )

    def _reserve(self, size: int, write: Callable[[], None] | None) -> None:
        """Counts bytes, evicts others for them and writes, one thread of one process at a time. None: counts them all again.

        A writer that dies leaves the count too high, never too low. Where the disk is too slow for all writers, bytes are
        not cached, rather than waited for.
        """
        limit = self._limit or 0
        if size > limit:
            return
        with _opened(os.path.join(self._folder, "usage"), os.O_RDWR | os.O_CREAT) as handle:
            if not _locked(lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB), 5.0):
                return
            noted = os.pread(handle, 21, 0)
            usage = int(noted) if re.fullmatch(rb"\d{20}\n", noted) and write is not None else limit + 1
            if usage + size > limit:
                usage = self._evicted(size, limit)
            os.pwrite(handle, b"%020d\n" % (usage + size), 0)
            if write is not None:
                write()

    def _evicted(self, size: int, limit: int) -> int:
        """Looks at all segments and evicts the least recently used if the limit requires it. Returns the bytes that remain."""
        found = sorted(self._segments())
        usage = sum(taken for _, taken, _ in found)
        if usage + size > limit:
            keep = max(int(limit * _FULL) - size, 0)
            for _, taken, path in found:
                if usage > keep:
                    with suppress(FileNotFoundError):  # removed by a reader that found it damaged
                        os.unlink(path)
                    usage -= taken
        return usage

    def _segments(self) -> Iterator[tuple[int, int, str]]:
        """Last use, bytes on disk and path of each."""
        root = os.path.join(self._folder, "blocks")
        for group, _, names in os.walk(root):
            for name in filter(_SEGMENT.fullmatch, names):
                with suppress(FileNotFoundError):
                    found = os.lstat(path := os.path.join(group, name))
                    yield found.st_mtime_ns, found.st_blocks * 512, path


class _DamagedError(OSError):
    """A segment whose content does not match its name."""


def _pieces(first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """The segments of blocks [first, last), each with the range of blocks in it."""
    for number in range(first // _PER_SEGMENT, -(-last // _PER_SEGMENT)):
        start = number * _PER_SEGMENT
        yield number, max(first - start, 0), min(last - start, _PER_SEGMENT)


def _read(path: str, digest: bytes, number: int, version: bytes, first: int, last: int) -> list[bytes | None]:
    """Blocks of a segment. Raises _DamagedError, or OSError where there is none."""
    with _opened(path, os.O_RDONLY) as handle:
        found, (written, _, header) = os.fstat(handle), _header(handle, digest, number)
        if written != version:
            return [None] * (last - first)
        view = memoryview(os.pread(handle, (last - first) * BLOCK, _BLOCKS + first * BLOCK))
        blocks: list[bytes | None] = []
        for at in range(first, last):
            length, crc = _ENTRY.unpack_from(header, _ENTRIES + at * _ENTRY.size)
            block = view[(at - first) * BLOCK :][:length]
            if length > BLOCK or len(block) != length or (length and zlib.crc32(block) != crc):
                raise _DamagedError(f"block {at} has another content")
            blocks.append(bytes(block) if length else None)
        if abs(time.time() - found.st_mtime) > _NOTE_USE_S:
            with suppress(OSError):  # another user's: readable, but its time cannot be set
                os.utime(handle)
        return blocks


def _write(path: str, header: bytes, first: int, data: memoryview) -> None:
    """Writes blocks of a segment, and only then what tells that they are there."""
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    entries = b"".join(_ENTRY.pack(len(block), zlib.crc32(block)) for block in blocks)
    with suppress(FileNotFoundError), _opened(path, os.O_RDWR) as handle:
        if os.pread(handle, len(header), 0) == header:
            return _put(handle, (data, _BLOCKS + first * BLOCK), (entries, _ENTRIES + first * _ENTRY.size))
        os.unlink(path)  # a file has one version from its beginning to its end, whoever still writes to it
    folder = os.path.dirname(path)
    for missing in () if os.path.isdir(folder) else (os.path.dirname(folder), folder):  # but not the cache's, if it is gone
        with suppress(FileExistsError):
            os.mkdir(missing)
    with suppress(FileExistsError), _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as handle:  # or another process was first
        _put(handle, (data, _BLOCKS + first * BLOCK), (header.ljust(_ENTRIES + first * _ENTRY.size, b"\0") + entries, 0))
    return None


def _put(handle: int, *parts: tuple[bytes | memoryview, int]) -> None:
    for part, at in parts:
        if os.pwrite(handle, part, at) != len(part):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fixed(digest: bytes, number: int, version: bytes, size: int) -> bytes:
    """The beginning of a segment's header."""
    head = _FIXED.pack(_MAGIC, digest, number, version, size)
    return head + _CRC.pack(zlib.crc32(head))


def _header(handle: int, digest: bytes, number: int) -> tuple[bytes, int, bytes]:
    """The version and the size of the remote file, and the segment's header.

    Raises _DamagedError if that is of another one, and FileNotFoundError if it is not there yet.
    """
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise _DamagedError("it is not a regular file")
    header = os.pread(handle, _BLOCKS, 0).ljust(_BLOCKS, b"\0")
    if not any(header[: _FIXED.size]):  # which a segment's first writer writes last
        raise FileNotFoundError
    version, size = _FIXED.unpack_from(header)[3:]
    if not header.startswith(_fixed(digest, number, version, size)):
        raise _DamagedError("its header is damaged, or of another segment")
    return version, size, header


@contextmanager
def _opened(path: str, how: int) -> Iterator[int]:
    try:
        handle = os.open(path, how | _NO_FOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _DamagedError("it is a symbolic link") from None
        raise
    try:
        yield handle
    finally:
        os.close(handle)


def _locked(lock: Callable[[], object], seconds: float) -> bool:
    """Whether a lock could be taken in time."""
    until = time.monotonic() + seconds
    while True:
        try:
            lock()
            return True
        except BlockingIOError:  # another error means that there are no locks
            if time.monotonic() > until:
                return False
            time.sleep(0.005)


def _made(folder: str | os.PathLike[str]) -> str:
    """The cache's folder, created if it does not exist."""
    path = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    try:
        os.makedirs(path, exist_ok=True)
        return path
    except (FileExistsError, NotADirectoryError):
        wrong = "is a file or below one; give a folder, or a path for a new one"
    except OSError as error:
        wrong = f"cannot be created: {error.strerror}; give a folder that you can write to"
    raise ValueError(f"cache_dir is {path}, which {wrong}")


@lru_cache(1024)  # several times for each read
def _hash(file: str) -> bytes:
    return hashlib.blake2b(file.encode(errors="surrogatepass"), digest_size=16).digest()

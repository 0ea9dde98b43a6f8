"""Disk cache of remote files, shared by the processes of a host and by later runs.

    <folder>/blocks/4f/4fc1…-12   segment: the fetched blocks in one part of 4 MiB of a remote file, named by a hash of its name
    <folder>/usage                total size of all segments in bytes, as decimal digits, if the cache has a limit
    <folder>/locks                lock file, with one byte per block

A segment is a sparse file. Its header has the length and the CRC-32 of each block. The blocks follow, each at a fixed offset. A
CRC detects damage, but not forgery.

A process locks a block's byte of `locks` while it fetches the block, so that the other processes of the host do not fetch it
too. If the cache has a limit, it also locks `usage` while it writes. Without this shared number, each process would have to
count all segments before each write, or several processes would exceed the limit. The number may exceed the actual size, but
never falls below it. The kernel releases the locks of a process that dies.
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
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial

from dali_stream.storage.local_files import NO_FOLLOW, lock_range, write_at

CACHE_BLOCK = 1 << 14  # bytes per block
_PER_SEGMENT = 256  # blocks per segment
_FIXED = struct.Struct("<8s16sQ16sQ")  # magic, hash of the file's name, number of the segment, hash of its version, file size
_CRC = struct.Struct("<I")  # CRC-32 of _FIXED
_MAGIC = b"dsblock1"
_ENTRY = struct.Struct("<II")  # length of a block and its CRC-32; the length of a missing block is 0
_ENTRIES, _BLOCKS = 64, 4096  # offsets of the entries and of the blocks in a segment
_SEGMENT = re.compile(r"[0-9a-f]{32}-[0-9]{1,12}")
_PAGE = 4096  # smallest allocation of a file system, in bytes
_FULL = 0.9  # fraction of the limit that remains after an eviction; evictions scan all segments, so they should be rare
# The modification time of a segment records its last use, for eviction. It is updated at most once in this time, in seconds:
_NOTE_USE_S = 60.0

_logger = logging.getLogger("dali_stream")


class DiskCache:
    """Cache of blocks of remote files in a folder. Least recently used segments are evicted first.

    The cache is safe to use from several threads and processes. A damaged block is a miss. If the folder can no longer be
    written (full, read-only or removed), the cache logs one warning, and reading continues. Users who can write to the folder
    are trusted.

    In all methods, `file` identifies a remote file, and `version` identifies its content. A segment contains blocks of one
    version. Blocks are numbered from 0 and have `CACHE_BLOCK` bytes. Only the last block of a file may be shorter.

    Args:
        folder: Path to the cache's folder, which is created if it does not exist.
        limit_bytes: Maximum total size of the segments on disk, in bytes, or None for no limit. Processes that use the folder
            at the same time must use the same limit.

    Raises:
        ValueError: If the folder is a file or cannot be created, if its folder `blocks` is a symbolic link, or if the limit is
            less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"cache_bytes must be a positive number of bytes, or None for no limit, got {limit_bytes}")
        self.__setstate__((_made(folder), limit_bytes))
        if limit_bytes is not None:  # the folder may have been filled under another limit
            self._guarded(lambda: self._reserve(0, None))

    def __getstate__(self) -> tuple[str, int | None]:
        return self._folder, self._limit

    def __setstate__(self, state: tuple[str, int | None]) -> None:
        self._folder, self._limit = state
        self._writing, self._lock = True, threading.Lock()

    def read(
        self, file: str, version: str, first: int, last: int, damaged: Callable[[], object] = lambda: None
    ) -> list[bytes | None]:
        """Return blocks [first, last) of a file, with None for each miss.

        If `version` is empty, the version is unknown, and all blocks are misses. `damaged` is called for each damaged segment.
        """
        if not version:
            return [None] * (last - first)
        blocks: list[bytes | None] = []
        for number, a, b in _pieces(first, last):
            path = self._path(file, number)
            try:
                blocks += _read(path, _hash(file), number, _hash(version), a, b)
            except OSError as error:  # usually because the segment does not exist
                blocks += [None] * (b - a)
                if isinstance(error, _DamagedError):
                    damaged()
                    _logger.warning(
                        "%s: damaged cache segment: %s. It is removed, and its bytes are fetched again", path, error
                    )
                    with suppress(OSError):
                        os.unlink(path)
        return blocks

    def size(self, file: str) -> int | None:
        """Return the size of the cached version of a file in bytes, or None if no version is cached."""
        with suppress(OSError), _opened_segment(self._path(file, 0), os.O_RDONLY) as handle:
            return _header(handle, _hash(file), 0)[1]
        return None

    def write(self, file: str, version: str, first: int, data: bytes, size: int) -> None:
        """Cache consecutive blocks of a file, and its size. Segments that have another version are replaced.

        An error of the disk is logged and not raised.

        Args:
            file: Name of the remote file.
            version: Version of the remote file.
            first: Number of the first block.
            data: Bytes of the blocks.
            size: Size of the remote file in bytes.
        """
        view, pieces = memoryview(data), list(_pieces(first, first + -(-len(data) // CACHE_BLOCK)))
        if first >= _PER_SEGMENT and not os.path.exists(self._path(file, 0)):
            pieces.insert(0, (0, first, first))  # `size` reads segment 0, so it is created without blocks
        for number, a, b in pieces:
            at = (number * _PER_SEGMENT + a - first) * CACHE_BLOCK if number else 0  # segment 0 is always the first piece
            part, path = view[at : at + (b - a) * CACHE_BLOCK], self._path(file, number)
            write = partial(_write, path, _fixed(_hash(file), number, _hash(version), size), a, part)
            size_on_disk = _BLOCKS + len(part) + _PAGE  # an upper bound, since the disk allocates whole pages
            self._guarded(write if self._limit is None else partial(self._reserve, size_on_disk, write))

    @contextmanager
    def fetching(self, file: str, first: int, last: int) -> Iterator[None]:
        """Lock blocks [first, last) in the `with` block, so that only one thread of one process fetches them at a time.

        If the lock is not acquired within 30 s, or locks are not supported, the body runs without the lock. The blocks may then
        be fetched twice, which is correct but wastes bandwidth.
        """
        handle = -1
        with suppress(OSError):  # some network file systems have no locks
            handle = os.open(os.path.join(self._folder, "locks"), os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
            # A file has 2**22 bytes of `locks`, at a position that depends on its hash. If the positions of two files overlap,
            # their fetches wait for each other, which is harmless.
            start = (int.from_bytes(_hash(file)[:5], "little") << 22) + first % (1 << 22)
            _locked(lambda: lock_range(handle, fcntl.F_WRLCK, start, last - first), 30.0)
        try:
            yield
        finally:
            if handle >= 0:
                with suppress(OSError):  # a child of a fork keeps its copy of the handle open, and with it the lock
                    lock_range(handle, fcntl.F_UNLCK, start, last - first)
                os.close(handle)

    def _path(self, file: str, number: int) -> str:
        name = _hash(file).hex()
        return f"{self._folder}/blocks/{name[:2]}/{name}-{number}"

    def _guarded(self, write: Callable[[], None]) -> None:
        """Call `write`, unless an earlier write has failed. Log a warning for the first failure."""
        try:
            if self._writing:
                write()
        except OSError as error:
            with self._lock:
                first, self._writing = self._writing, False
            if first:
                _logger.warning(
                    "cannot write to cache_dir %s: %s. Fetched bytes are no longer cached, and existing ones are still read",
                    self._folder,
                    error.strerror or error,
                )

    def _reserve(self, size: int, write: Callable[[], None] | None) -> None:
        """Reserve space, evict segments if necessary, and write, in only one thread of one process at a time.

        The number in `usage` is increased before the write. If the writer then dies, the number is too high, but never too low.
        A writer that does not get the lock within 5 s does not cache its bytes.

        Args:
            size: Number of bytes to reserve.
            write: Function that writes them, or None to write nothing and recount all segments.
        """
        limit = self._limit or 0
        if size > limit:
            return
        with _opened(os.path.join(self._folder, "usage"), os.O_RDWR | os.O_CREAT) as handle:
            if not _locked(lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB), 5.0):
                return
            try:
                noted = os.pread(handle, 21, 0)
                # If the number is missing or damaged, a value above the limit causes a recount.
                usage = int(noted) if re.fullmatch(rb"\d{20}\n", noted) and write is not None else limit + 1
                if usage + size > limit:
                    usage = self._evicted(size, limit)
                os.pwrite(handle, b"%020d\n" % (usage + size), 0)
                if write is not None:
                    write()
            finally:
                with suppress(OSError):  # closing would not suffice, see `fetching`
                    fcntl.flock(handle, fcntl.LOCK_UN)

    def _evicted(self, size: int, limit: int) -> int:
        """Recount all segments, and evict the least recently used ones if `size` more bytes would exceed the limit.

        Returns:
            Size of the remaining segments in bytes.
        """
        segments = sorted(self._segments())
        usage = sum(size_on_disk for _, size_on_disk, _ in segments)
        if usage + size > limit:
            keep = max(int(limit * _FULL) - size, 0)
            for _, size_on_disk, path in segments:
                if usage > keep:
                    with suppress(FileNotFoundError):  # removed by a reader that found it damaged
                        os.unlink(path)
                    usage -= size_on_disk
        return usage

    def _segments(self) -> Iterator[tuple[int, int, str]]:
        """Yield (time of the last use, bytes on disk, path) of each segment."""
        root = os.path.join(self._folder, "blocks")
        if os.path.islink(root):
            return
        for group, _, names in os.walk(root):
            for name in filter(_SEGMENT.fullmatch, names):
                with suppress(FileNotFoundError):
                    status = os.lstat(path := os.path.join(group, name))
                    yield status.st_mtime_ns, status.st_blocks * 512, path


class _DamagedError(OSError):
    """Segment that is damaged, or whose content does not match its name."""


def _pieces(first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (segment, a, b) for each part [a, b) of blocks [first, last). `a` and `b` count from the start of the segment."""
    for number in range(first // _PER_SEGMENT, -(-last // _PER_SEGMENT)):
        start = number * _PER_SEGMENT
        yield number, max(first - start, 0), min(last - start, _PER_SEGMENT)


def _read(path: str, digest: bytes, number: int, version: bytes, first: int, last: int) -> list[bytes | None]:
    """Return blocks [first, last) of a segment, with None for each miss.

    Raises:
        _DamagedError: If a block or the header is damaged.
        OSError: If the segment does not exist or cannot be read.
    """
    with _opened_segment(path, os.O_RDONLY) as handle:
        status, (written, _, header) = os.fstat(handle), _header(handle, digest, number)
        if written != version:
            return [None] * (last - first)
        view = memoryview(os.pread(handle, (last - first) * CACHE_BLOCK, _BLOCKS + first * CACHE_BLOCK))
        blocks: list[bytes | None] = []
        for at in range(first, last):
            length, crc = _ENTRY.unpack_from(header, _ENTRIES + at * _ENTRY.size)
            block = view[(at - first) * CACHE_BLOCK :][:length]
            if length > CACHE_BLOCK or len(block) != length or (length and zlib.crc32(block) != crc):
                raise _DamagedError(f"block {at} has another length or checksum")
            blocks.append(bytes(block) if length else None)
        if abs(time.time() - status.st_mtime) > _NOTE_USE_S:
            with suppress(OSError):  # a segment of another user may be readable although its time cannot be set
                os.utime(handle)
        return blocks


def _write(path: str, header: bytes, first: int, data: memoryview) -> None:
    """Write blocks of a segment, and then their entries, so that readers never see an entry without its block."""
    blocks = [data[at : at + CACHE_BLOCK] for at in range(0, len(data), CACHE_BLOCK)]
    entries = b"".join(_ENTRY.pack(len(block), zlib.crc32(block)) for block in blocks)
    with suppress(FileNotFoundError), _opened_segment(path, os.O_RDWR) as handle:
        if os.pread(handle, len(header), 0) == header:
            write_at(handle, data, _BLOCKS + first * CACHE_BLOCK)
            write_at(handle, entries, _ENTRIES + first * _ENTRY.size)
            return
        # The segment has another version. It is replaced and not overwritten, because other processes may still write to it.
        os.unlink(path)
    folder = os.path.dirname(path)
    # Call `mkdir` and not `makedirs`, so that a removed cache folder is not created again.
    for missing in () if os.path.isdir(folder) else (os.path.dirname(folder), folder):
        with suppress(FileExistsError):
            os.mkdir(missing)
    # FileExistsError: another process has just created the segment. These blocks are then not cached.
    with suppress(FileExistsError), _opened_segment(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as handle:
        write_at(handle, data, _BLOCKS + first * CACHE_BLOCK)
        write_at(handle, header.ljust(_ENTRIES + first * _ENTRY.size, b"\0") + entries, 0)


def _fixed(digest: bytes, number: int, version: bytes, size: int) -> bytes:
    """Return the fixed part of a segment's header, which identifies the file, the segment and the version."""
    head = _FIXED.pack(_MAGIC, digest, number, version, size)
    return head + _CRC.pack(zlib.crc32(head))


def _header(handle: int, digest: bytes, number: int) -> tuple[bytes, int, bytes]:
    """Read the header of a segment.

    Returns:
        Hash of the remote file's version, size of the remote file in bytes, and the whole header.

    Raises:
        _DamagedError: If the header is damaged, or belongs to another segment.
        FileNotFoundError: If the header is not yet written.
    """
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise _DamagedError("the segment is not a regular file")
    header = os.pread(handle, _BLOCKS, 0).ljust(_BLOCKS, b"\0")
    if not any(header[: _FIXED.size]):  # the first writer of a segment writes the header last
        raise FileNotFoundError
    version, size = _FIXED.unpack_from(header)[3:]
    if not header.startswith(_fixed(digest, number, version, size)):
        raise _DamagedError("the header is damaged, or belongs to another segment")
    return version, size, header


@contextmanager
def _opened(path: str, how: int) -> Iterator[int]:
    try:
        handle = os.open(path, how | NO_FOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _DamagedError("the segment is a symbolic link") from None
        raise
    try:
        yield handle
    finally:
        os.close(handle)


def _opened_segment(path: str, how: int) -> AbstractContextManager[int]:
    """Open a segment. Raises OSError if one of the two folders above it is a symbolic link, which may lead anywhere."""
    group = os.path.dirname(path)
    for folder in (os.path.dirname(group), group):
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, f"the folder {folder} is a symbolic link, which is not followed")
    return _opened(path, how)


def _locked(lock: Callable[[], object], seconds: float) -> bool:
    """Return whether `lock` succeeds within `seconds`. It is called until it no longer raises BlockingIOError."""
    until = time.monotonic() + seconds
    while True:
        try:
            lock()
            return True
        except BlockingIOError:  # any other error means that the file system does not support locks
            if time.monotonic() > until:
                return False
            time.sleep(0.005)


def _made(folder: str | os.PathLike[str]) -> str:
    """Return the absolute path of the cache's folder, which is created if it does not exist."""
    path = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    try:
        os.makedirs(path, exist_ok=True)
        if not os.path.islink(blocks := os.path.join(path, "blocks")):
            return path
        problem = f"whose folder blocks is a symbolic link. Give the folder to which it leads, {os.path.realpath(blocks)}"
    except (FileExistsError, NotADirectoryError):
        problem = "which is a file or below one"
    except OSError as error:
        problem = f"which cannot be created ({error.strerror})"
    raise ValueError(f"cache_dir must be a folder that you can write to, or a path for a new one, got {path}, {problem}")


@lru_cache(1024)  # each read needs the hash of the same name several times
def _hash(file: str) -> bytes:
    return hashlib.blake2b(file.encode(errors="surrogatepass"), digest_size=16).digest()

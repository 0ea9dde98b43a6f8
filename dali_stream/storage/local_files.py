"""Files on local disks: those that stores keep open, with one limit for all stores of a process, and complete writes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import resource
import struct
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_log = logging.getLogger("dali_stream")
_MOST = 8192  # maximum number of descriptors; a training run needs fewer
_SAMPLES, _SAMPLE = 8, 8 << 10  # samples of a file in its identity, and bytes of each


def allowed_descriptors(needed: int) -> int:
    """Return the maximum number of descriptors of this process. The soft limit is raised first if `needed` exceeds it.

    The soft limit is usually 1024, and a process may raise it up to the hard limit. A pool of 256 episodes with three cameras
    reads about 500 files.

    Args:
        needed: Number of descriptors that the process needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < min(needed, most):
        with suppress(OSError, ValueError):  # macOS has additional limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            _log.info("raised the soft limit of open files of this process from %d to %d for a dataset's files", soft, most)
            soft = most
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)


def _to_keep(files: int, newest: int, allowed: int) -> int:
    """Return how many of `files` open files may stay open.

    The files use at most half of the allowed descriptors. A new descriptor gets the lowest free number, so `newest` is about
    the number of descriptors of the whole process. If it exceeds three quarters of the limit, files are closed until it no
    longer does.

    Args:
        files: Number of open files.
        newest: Descriptor of the file that was opened last.
        allowed: Maximum number of descriptors of this process.
    """
    return max(min(allowed // 2, files - max(newest - allowed * 3 // 4, 0)), 1)


NO_FOLLOW = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK, because opening a named pipe would block


def lock_range(handle: int, kind: int, start: int, count: int) -> None:
    """Set or release a lock on bytes of an open file, without waiting. It belongs to the handle and to all copies of it.

    Forked processes have copies, so a lock must be released explicitly and not only by closing the handle. The file need not
    have the bytes. Source of the format of `struct flock` on 64-bit Linux: fcntl(2).

    Args:
        handle: Descriptor of the file.
        kind: `fcntl.F_WRLCK` to set a lock, or `fcntl.F_UNLCK` to release it.
        start: First byte.
        count: Number of bytes.

    Raises:
        BlockingIOError, PermissionError: If somebody else has locked one of the bytes.
        OSError: If the file system has no locks.
    """
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, start, count, 0))


class OpenFile:
    """Open file. It is closed with its last reference, so another thread can finish reading a file that is evicted.

    Attributes:
        number: Descriptor of the file.
        used: Value of a counter at the last use, for eviction.
    """

    __slots__ = ("_sampled", "number", "used")

    def __init__(self, path: Path, flags: int) -> None:
        self.number = os.open(path, flags, 0o666)
        self.used = 0
        self._sampled: tuple[tuple[int, ...], str] | None = None  # result of `identity`, and the numbers for which it holds

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return not os.fstat(self.number).st_nlink

    def identity(self) -> str:
        """Return a text that changes with the content of the file, and that no other file has. See `LocalStore.identity`.

        Some bytes of the file are read and hashed at the first call, and again only if the size, the inode or a time of the
        file has changed.

        Raises:
            OSError: If the file cannot be read.
        """
        status = os.fstat(self.number)
        numbers = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        if (sampled := self._sampled) is None or sampled[0] != numbers:
            digest = hashlib.blake2b(digest_size=16)
            for number in range(_SAMPLES):
                at = max(status.st_size - _SAMPLE, 0) * number // (_SAMPLES - 1)
                digest.update(os.pread(self.number, _SAMPLE, at))
            # Several threads may do this at the same time.
            sampled = self._sampled = numbers, f"{' '.join(map(str, numbers))} {digest.hexdigest()}"
        return sampled[1]

    def __reduce__(self) -> NoReturn:
        # A copy would close the descriptor of the original.
        raise TypeError("an open file cannot be copied. Copy its LocalStore, which opens the file again")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at shutdown, `os` may be None
        if hasattr(self, "number"):
            close(self.number)


class OpenFiles:
    """Files that one store keeps open. Safe to use from several threads.

    All stores of a process share one limit, because a mixture has many stores. When a store opens a file and the limit is
    reached, the least recently used file of all stores is closed.

    Args:
        root: Folder of the files.
        flags: Flags of `os.open`. Default: those to read a file.
    """

    def __init__(self, root: Path, flags: int = os.O_RDONLY | os.O_CLOEXEC) -> None:
        self._root, self._flags = root, flags
        self._files: OrderedDict[str, OpenFile] = OrderedDict()  # least recently used first
        with _lock:
            _all.add(self)

    def get(self, path: str) -> OpenFile:
        """Return an open file by its path below the root.

        Raises:
            OSError: If the file cannot be opened.
        """
        with _lock:
            if (file := self._files.get(path)) is not None:
                self._files.move_to_end(path)
                file.used = next(_clock)
                return file
        file = self._opened(path)
        with _lock:
            file.used = next(_clock)
            replaced = self._files.pop(path, None)  # another thread may have opened it
            self._files[path] = file
            files = sum(len(store._files) for store in _all)
            # The files may use half of the descriptors, so the process needs twice as many.
            evicted = _evict(_to_keep(files, file.number, allowed_descriptors(2 * max(files, file.number))))
        del evicted, replaced  # closes the files, without holding the lock
        return file

    def any_removed(self) -> bool:
        """Return whether an open file was removed."""
        with _lock:
            files = list(self._files.values())
        return any(file.is_removed for file in files)

    def close(self) -> None:
        """Close all files of this store. A file that another thread is reading is closed after that read."""
        with _lock:
            files, self._files = self._files, OrderedDict()
        del files

    def _opened(self, path: str) -> OpenFile:
        try:
            return OpenFile(self._root / path, self._flags)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        # Other parts of the process have used up the descriptors. Close all files, and try once more.
        with _lock:
            evicted = _evict(0)
        del evicted
        return OpenFile(self._root / path, self._flags)


_lock = threading.Lock()
_all: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
_clock = itertools.count(1)


def _evict(most: int) -> list[OpenFile]:
    """Remove the least recently used files of all stores until `most` remain, and return them. The caller holds the lock."""
    stores = [store._files for store in _all if store._files]
    excess = sum(map(len, stores)) - most
    evicted = []
    for _ in range(excess):
        # Each store orders its own files, and `used` orders the oldest files of different stores.
        oldest = min(filter(None, stores), key=lambda files: next(iter(files.values())).used)
        evicted.append(oldest.popitem(last=False)[1])
    return evicted


def _renew_lock() -> None:
    """Replace the lock in a forked process, because the thread that held it exists only in the parent."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def replace_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a text to a file. An existing file is replaced atomically.

    A process that is killed at any moment leaves either the previous file or the new one. The temporary file has a unique name,
    `.<name>.<32 hexadecimal digits>`, so several processes may write to the same path. It may stay if the process is killed.

    Args:
        path: File to write.
        text: Content of the file.
        sync: Whether the file also survives a power failure. Default: False.

    Raises:
        OSError: If the file cannot be written. An existing file is unchanged.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_text(text)
        if sync:
            _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        with suppress(OSError):  # some systems cannot sync a folder
            _sync(path.parent)


def write_at(handle: int, data: Any, at: int) -> None:
    """Write all bytes of a buffer at a position of a file. Raises OSError if the disk takes only some of them."""
    if os.pwrite(handle, data, at) != memoryview(data).nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _sync(path: Path) -> None:
    """Write the content of a file, or the entries of a folder, from memory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

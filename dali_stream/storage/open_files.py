"""Open files of local stores, under one limit for the whole process."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_MOST = 8192  # descriptors that are used at most; more save nothing, since a training run uses fewer files at a time


def _allowed(needed: int) -> int:
    """Return how many descriptors this process may have.

    Args:
        needed: Number of descriptors that would be enough. For more than the soft limit, that is raised, as far as the system
            lets a process do that by itself: usually from 1024. A pool of 256 episodes with three cameras reads 500 files.
    """
    if resource is None:
        return 512  # of the C library
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < min(needed, most):
        with suppress(OSError, ValueError):  # macOS has further limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)


def _to_keep(files: int, newest: int, allowed: int) -> int:
    """Return how many of `files` open files may stay open.

    At most half of the allowed descriptors are used. A new descriptor gets the lowest free number, so `newest` tells how many
    the whole process uses: above three quarters, files are closed until the process is back there.
    """
    return max(min(allowed // 2, files - max(newest - allowed * 3 // 4, 0)), 1)


class OpenFile:
    """An open file. It is closed after its last user, since another thread may still read a file that was evicted."""

    __slots__ = ("number", "used")

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.used = 0

    def __reduce__(self) -> NoReturn:
        # A copy would close the original's file.
        raise TypeError("an open file cannot be copied; copy its LocalStore, which opens the file again")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # modules are empty at interpreter shutdown
        if hasattr(self, "number"):
            close(self.number)


class OpenFiles:
    """Files that one store keeps open. Safe to use from several threads.

    All stores of a process share one limit, because a mixture has many. Whichever store opens a file, the least recently used
    file of all is closed for it.

    Args:
        root: Folder of the files.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: OrderedDict[str, OpenFile] = OrderedDict()  # least recently used first
        with _lock:
            _all.add(self)

    def get(self, path: str) -> OpenFile:
        """Return an open file by its path below the root. Raises OSError."""
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
            evicted = _evict(_to_keep(files, file.number, _allowed(2 * max(files, file.number))))
        del evicted, replaced  # closes the files without the lock
        return file

    def close(self) -> None:
        """Close all files of this store that nobody reads."""
        with _lock:
            files, self._files = self._files, OrderedDict()
        del files

    def _opened(self, path: str) -> OpenFile:
        try:
            return OpenFile(self._root / path)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        with _lock:
            evicted = _evict(0)
        del evicted
        return OpenFile(self._root / path)


_lock = threading.Lock()
_all: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
_clock = itertools.count(1)


def _evict(most: int) -> list[OpenFile]:
    """Take least recently used files out of all stores until `most` are left, and return them. The caller holds the lock."""
    stores = [store._files for store in _all if store._files]
    excess = sum(map(len, stores)) - most
    evicted = []
    for _ in range(excess):
        oldest = min(filter(None, stores), key=lambda files: next(iter(files.values())).used)
        evicted.append(oldest.popitem(last=False)[1])
    return evicted


def _renew_lock() -> None:
    """Replace the lock in a forked process, where the thread that held it does not exist."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

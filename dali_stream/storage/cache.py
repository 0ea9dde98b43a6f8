"""Fetched byte ranges on disk, shared by the processes of a host and by later runs.

    <folder>/ranges/4f/4fc1…/<start>-<stop>   an entry (see entry.py); its folder is named by a hash of the remote file
    <folder>/incoming                         the entry that is being written
    <folder>/usage                            bytes of all entries in decimal digits, never too few
    <folder>/locks/write, 000 … fff           for `flock`, which the kernel releases when a process dies

One writer at a time holds the lock, so a file `incoming` that it finds was left by a writer that died.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import filelock
import numpy as np

from dali_stream.storage import entry
from dali_stream.storage.entry import Span

_logger = logging.getLogger("dali_stream")
_HASH = re.compile(r"[0-9a-f]+")
_STRIPES = 4096
_LISTINGS = 1024  # remote files whose entries are remembered
_FULL = 0.9  # of the limit remains after eviction, which scans all entries and should be rare

Listing = dict[str, Span]  # by name; never changed, so that it is read without a lock


class RangeCache:
    """Byte ranges of remote files in a folder, within a limit: the least recently used are evicted.

    Safe to use from several threads and processes. A damaged entry is a miss. If the folder can no longer be written to
    (full, read-only, gone), one warning is logged and reading continues. Whoever can write to the folder is trusted.

    Args:
        folder: created if it does not exist.
        limit_bytes: of all entries on disk. None: no limit.

    Raises:
        ValueError: the folder is a file or cannot be created, or the limit is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"cache_bytes is {limit_bytes}; give a number of bytes of 1 or more, or None for no limit")
        self._folder, self._limit = _made(folder), limit_bytes
        self._begin()
        self._put(None)  # evicts from a folder that was filled under a higher limit

    def _begin(self) -> None:
        self._writing = True
        self._listings: dict[str, Listing] = {}
        self._listings_lock = threading.Lock()
        self._queue = threading.Lock()  # one thread of a process polls for the file lock

    def __getstate__(self) -> tuple[str, int | None]:
        return self._folder, self._limit

    def __setstate__(self, state: tuple[str, int | None]) -> None:
        self._folder, self._limit = state
        self._begin()

    def parts(self, file: str, start: int, stop: int) -> list[tuple[int, int, bytes | None]]:
        """[start, stop) of a file as consecutive parts, each with its bytes on a hit and None on a miss.

        Args:
            file: identifies the remote file, including its version.
        """
        home = self._home(file)
        listing = self._listings.get(home)
        fresh = listing is None
        entries = self._listed(home) if listing is None else listing
        while True:
            cut = _cut(entries, start, stop)
            if not fresh and any(span is None for _, _, span in cut):
                entries, fresh = self._listed(home), True  # another process may have written since
                continue
            found = [(a, b, span, None if span is None else self._read(home, span, a, b)) for a, b, span in cut]
            lost = {span for _, _, span, data in found if span is not None and data is None}
            if not lost:
                return [(a, b, data) for a, b, _, data in found]
            entries = {name: span for name, span in entries.items() if span not in lost}
            self._remember(home, entries)

    def write(self, file: str, start: int, data: bytes) -> None:
        """Caches bytes of a file. Never raises if the disk refuses them; what is over the limit is not cached."""
        if data and self._writing:
            home, span = self._home(file), (start, start + len(data))
            if self._put(os.path.join(home, entry.name_of(span)), entry.header(_digest(home), start, data), data):
                self._remember(home, {**self._listings.get(home, {}), entry.name_of(span): span})

    @contextmanager
    def fetching(self, file: str, start: int, stop: int) -> Iterator[None]:
        """A lock for fetching a range: one thread of one process at a time. It is released when its process dies.

        Ranges share locks, so a thread must not take a second one. After 30 s, or if the folder cannot hold a lock file,
        the block runs without the lock: fetching twice costs bytes and no more.
        """
        stripe = int.from_bytes(_hash(f"{start}-{stop} {file}")[:8], "little") % _STRIPES
        with ExitStack() as held:
            with suppress(OSError):  # filelock.Timeout is one
                held.enter_context(self._lock(f"{stripe:03x}", timeout=30, poll_interval=0.02))
            yield

    def _home(self, file: str) -> str:
        """The folder of a remote file's entries."""
        name = _hash(file).hex()
        return os.path.join(self._folder, "ranges", name[:2], name)

    def _listed(self, home: str) -> Listing:
        """The current entries."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(home)
        known = self._listings.get(home, {})
        listing = {name: span for name in names if (span := known.get(name) or entry.span_of(name))}
        self._remember(home, listing)
        return listing

    def _remember(self, home: str, listing: Listing) -> None:
        with self._listings_lock:
            if len(self._listings) >= _LISTINGS and home not in self._listings:
                del self._listings[next(iter(self._listings))]
            self._listings[home] = listing

    def _read(self, home: str, span: Span, start: int, stop: int) -> bytes | None:
        path = os.path.join(home, entry.name_of(span))
        try:
            return entry.read(path, _digest(home), span, start, stop)
        except OSError:
            return None  # most likely evicted
        except entry.DamagedError as error:
            _logger.warning("%s: a cache entry is damaged: %s. It is removed, and its bytes are fetched again", path, error)
            with suppress(OSError):
                os.unlink(path)
            return None

    def _put(self, path: str | None, *blocks: bytes) -> bool:
        """Writes an entry if it fits, and evicts others for it. Without an entry, enforces the limit."""
        size = sum(map(len, blocks))
        if not self._writing or (self._limit is not None and size > self._limit):
            return False
        try:
            with self._alone():
                if not self._reserve(size):
                    return False
                if path is not None:
                    self._write_file(path, blocks)
                return True
        except filelock.Timeout:
            return False  # the disk is too slow for all writers: not cached, rather than waited for
        except OSError as error:
            self._stop_writing(error)
            return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One writer at a time."""
        lock = self._lock("write", timeout=5, poll_interval=0.002)
        if not self._queue.acquire(timeout=5):
            raise filelock.Timeout(lock.lock_file)
        try:
            with lock:
                yield
        finally:
            self._queue.release()

    def _lock(self, name: str, *, timeout: float, poll_interval: float) -> filelock.BaseFileLock:
        if not os.path.isdir(self._folder):
            raise FileNotFoundError("the folder is gone")  # filelock would create it
        path = os.path.join(self._folder, "locks", name)
        # Without the fallback, a lock that outlives its process.
        return filelock.FileLock(path, timeout=timeout, poll_interval=poll_interval, fallback_to_soft=False)

    def _write_file(self, path: str, blocks: tuple[bytes, ...]) -> None:
        incoming = os.path.join(self._folder, "incoming")
        try:
            with suppress(FileNotFoundError):
                os.unlink(incoming)
            with open(incoming, "xb") as out:
                out.writelines(blocks)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(incoming, path)
        except OSError:
            with suppress(OSError):
                os.unlink(incoming)
            raise

    def _stop_writing(self, error: OSError) -> None:
        with self._listings_lock:
            first, self._writing = self._writing, False
        if first:
            _logger.warning(
                "cannot write to cache_dir %s: %s. Fetched bytes are no longer cached; existing entries are still read",
                self._folder,
                error.strerror or error,
            )

    # -- the limit; called only with the lock of `_alone`

    def _reserve(self, size: int) -> bool:
        """Counts bytes before they are written, so that a writer that dies leaves the count too high, never too low."""
        handle = os.open(os.path.join(self._folder, "usage"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            count = os.pread(handle, 21, 0)
            usage = int(count) if re.fullmatch(rb"\d{20}\n", count) else None
            if usage is None or (self._limit is not None and usage + size > self._limit):
                usage = self._make_room(size)
            if self._limit is not None and usage + size > self._limit:
                return False
            os.pwrite(handle, b"%020d\n" % (usage + size), 0)
            return True
        finally:
            os.close(handle)

    def _make_room(self, size: int) -> int:
        """Scans all entries and evicts the least recently used if the limit requires it. Returns the bytes that remain."""
        # Two walks keep this at 16 bytes for each of perhaps a million entries.
        there = np.fromiter(
            ((status.st_mtime_ns, status.st_size) for home in self._homes() for _, status in _entries(home)),
            dtype=[("used", np.int64), ("size", np.int64)],
        )
        usage = int(there["size"].sum())
        if self._limit is None or usage + size <= self._limit:
            return usage
        there.sort(order="used")
        keep = max(int(self._limit * _FULL) - size, 0)
        latest = there["used"][np.searchsorted(np.cumsum(there["size"]), usage - keep)]
        for home in self._homes():
            for path, status in _entries(home):
                if status.st_mtime_ns <= latest and usage > keep:
                    with suppress(FileNotFoundError):  # removed by a reader that found it damaged
                        os.unlink(path)
                    usage -= status.st_size
            with suppress(OSError):  # usually not empty
                os.rmdir(home)
        return usage

    def _homes(self) -> Iterator[str]:
        for group in _folders(os.path.join(self._folder, "ranges")):
            yield from _folders(group)


def _made(folder: str | os.PathLike[str]) -> str:
    """The cache's folder, created if it does not exist."""
    path = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"cache_dir is {path}, which is a file or below one; give a folder, or a path for a new one") from None
    except OSError as error:
        raise ValueError(
            f"cache_dir is {path}, which cannot be created: {error.strerror}; give a folder that you can write to"
        ) from None
    return path


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _digest(home: str) -> bytes:
    return bytes.fromhex(os.path.basename(home))


def _cut(entries: Listing, start: int, stop: int) -> list[tuple[int, int, Span | None]]:
    """[start, stop) as consecutive parts, each with the entry to read it from, or None."""
    if start >= stop:
        return []
    if entry.name_of((start, stop)) in entries:
        return [(start, stop, (start, stop))]
    near = sorted(
        (span for span in entries.values() if span[0] < stop and span[1] > start), key=lambda span: (span[0], -span[1])
    )
    around = [span for span in near if span[0] <= start and span[1] >= stop]
    cut: list[tuple[int, int, Span | None]] = []
    for span in around[:1] or near:
        if span[1] > start:
            if span[0] > start:
                cut.append((start, span[0], None))
            at = max(start, span[0])
            start = min(span[1], stop)
            cut.append((at, start, span))
    return cut if start >= stop else [*cut, (start, stop, None)]


def _folders(parent: str) -> list[str]:
    """Folders in `parent` with names that the cache gives."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(parent) as found:
        return [item.path for item in found if _HASH.fullmatch(item.name) and item.is_dir(follow_symlinks=False)]
    return []


def _entries(home: str) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(FileNotFoundError), os.scandir(home) as found:
        for item in found:
            if entry.span_of(item.name):
                with suppress(FileNotFoundError):
                    yield item.path, item.stat(follow_symlinks=False)

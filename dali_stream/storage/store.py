"""The interface of every kind of storage: sizes, byte ranges, listings."""

from __future__ import annotations

import abc
import functools
import io
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from dali_stream.errors import DatasetError

SMALL = 1 << 20  # bytes of a file that is read whole, to save round trips


@dataclass
class Traffic:
    """What reading has cost so far. All zero for files that are read in place.

    Attributes:
        requests: answered with bytes.
        fetched_bytes: of the responses' bodies, those of failed attempts too.
        retries: attempts after the first.
        cached_bytes: hits in `cache_dir`.
        fetch_s: seconds that reads waited for the network, summed over the threads.
    """

    requests: int = 0
    fetched_bytes: int = 0
    retries: int = 0
    cached_bytes: int = 0
    fetch_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: float) -> None:
        """Adds to attributes; safe from several threads."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class Store(abc.ABC):
    """Read access to the files below one root. Safe to use from several threads.

    A copy (`copy`, `pickle`) of those that `open_store` returns reads the same files with handles and connections of its own.

    Paths are relative, with forward slashes. Each method raises `DatasetError` if a file is missing, and `StorageError` if its
    bytes cannot be read.

    Attributes:
        address: the root, without credentials; for messages.
        remote: whether a read takes a request over a network.
        listings: whether `files` is one listing; else it looks for each name that a file may have.
        revision: the commit that is read, if the source has commits.
        traffic: what reading has cost.
    """

    address: str
    remote: bool = False
    listings: bool = True
    revision: str | None = None

    @property
    def traffic(self) -> Traffic:
        """All zero, for files that are read in place."""
        return Traffic()

    @abc.abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file."""

    @abc.abstractmethod
    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file; fewer if the file ends before `stop`."""

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file of this name."""

    @abc.abstractmethod
    def files(self, folder: str) -> list[str]:
        """The files below a folder at any depth, sorted; empty if there is no such folder."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes every handle. The next read opens them again."""

    def session(self) -> Store:
        """The same files for one of several users. Its `close` ends its own remote reads only."""
        return self

    def read_all(self, path: str) -> bytes:
        """A whole file: of a small one in one read, which brings the size as well."""
        head = self.read(path, 0, SMALL)
        return head if len(head) < SMALL else head + self.read(path, SMALL, self.size(path))

    def open(self, path: str, size: int | None = None) -> Ranges:
        """A seekable file object for libraries that need one. Each of its reads is one `read`. It holds no handle.

        Args:
            path: the file.
            size: its bytes, if known.
        """
        return Ranges(self, path, self.size(path) if size is None else size)

    def where(self, path: str) -> str:
        """The name of a file for messages."""
        return f"{self.address.rstrip('/')}/{path}"


@functools.lru_cache(maxsize=1 << 14)
def checked(path: str) -> str:
    """The path itself, unless it leads out of the root: paths come from metadata that others wrote."""
    with suppress(UnicodeEncodeError):  # JSON can spell half a surrogate pair, which has no bytes
        parts = os.fsdecode(os.fsencode(path)).split("/")
        named = any(part not in ("", ".") for part in parts)
        if named and not path.startswith("/") and ".." not in parts and "\0" not in path and "\\" not in path:
            return path
    raise DatasetError(
        f"the metadata names the file {path!r}, which leads out of the dataset or is no file name; correct the path in the "
        "metadata"
    )


class Ranges(io.RawIOBase):
    """A file as `Store.open` gives it. `bytes_read` counts."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self._at, self._size = store, path, 0, size
        self._held: list[tuple[int, bytes]] = []
        self.bytes_read = 0

    def hold(self, start: int, stop: int) -> None:
        """Reads bytes [start, stop) ahead of time. Later reads within them are served from memory."""
        self.seek(start)
        self._held.append((start, self.read(stop - start)))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(f"{self._store.where(self._path)}: seek to {at}, before the file's start")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        for start, held in self._held:
            if start <= self._at < stop <= start + len(held):
                data = held[self._at - start : stop - start]
                self._at = stop
                return data
        data = self._store.read(self._path, self._at, stop) if stop > self._at else b""
        self._at += len(data)
        self.bytes_read += len(data)
        return data


def missing_file(where: str, path: str, words: str = "") -> DatasetError:
    """Return the error for a file that the metadata refers to and the storage does not have.

    Args:
        where: Address of the file.
        path: Path of the file in the dataset. Without the files in `meta/`, no episode can be read.
        words: Answer of the server.
    """
    remedy = "Copy or fetch it again"
    if not path.startswith("meta/"):
        remedy += ", or leave its episodes out with episodes= (`dali-stream doctor URI` shows the missing files)"
    answer = f" ({words})" if words else ""
    return DatasetError(f"{where}: no such file, but the dataset's metadata refers to it{answer}. {remedy}")

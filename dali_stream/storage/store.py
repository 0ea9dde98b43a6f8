"""Interface of all stores: sizes, byte ranges and listings of files."""

from __future__ import annotations

import abc
import functools
import io
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from dali_stream.errors import DatasetError

TRAFFIC = ("requests", "retries", "fetched_bytes", "cached_bytes", "failed_checksums", "fetch_s")  # attributes of `Traffic`
SMALL = 1 << 20  # files of up to this number of bytes are read in one request


@dataclass
class Traffic:
    """Requests, bytes and time of all reads so far. All values are zero for local files.

    Attributes:
        requests: Number of requests whose responses contained bytes of a file.
        fetched_bytes: Number of bytes in these responses, including those of attempts that ended early.
        retries: Number of attempts that were made after a failed one.
        cached_bytes: Number of bytes that were read from `cache_dir`.
        failed_checksums: Number of damaged segments that were found in `cache_dir`.
        fetch_s: Time that reads waited for the network, in seconds, summed over the threads.
        lock: Lock that `add` holds while it changes the other attributes.
    """

    requests: int = 0
    fetched_bytes: int = 0
    retries: int = 0
    cached_bytes: int = 0
    failed_checksums: int = 0
    fetch_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def counts(self) -> dict[str, float]:
        """Return the attributes that `add` changes, by name."""
        return {name: getattr(self, name) for name in TRAFFIC}

    def add(self, **counts: float) -> None:
        """Add a number to each named attribute. Safe to call from several threads."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class Store(abc.ABC):
    """Read access to the files below one root. Safe to use from several threads.

    A store from `open_store` can be copied with `copy` and `pickle`. The copy reads the same files with its own handles and
    connections.

    Paths are relative, with forward slashes. Each method raises `DatasetError` if a file is missing, and `StorageError` if its
    bytes cannot be read.

    Attributes:
        address: Root without credentials, for messages.
        remote: Whether reads send requests over a network.
        in_memory: Whether the files are in the memory of this process, so that no other process can read them.
        listings: Whether the storage can list folders. If it cannot, `files` returns what `guess` finds. See `open_store`.
        revision: Commit that is read, or None if the storage has no commits.
        traffic: Requests, bytes and time of all reads so far.
    """

    address: str
    remote: bool = False
    in_memory: bool = False
    listings: bool = True
    revision: str | None = None

    @property
    def traffic(self) -> Traffic:
        """Requests, bytes and time of all reads so far, which are zero for local files."""
        return Traffic()

    @abc.abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    @abc.abstractmethod
    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file, or fewer if the file ends before `stop`."""

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether a file exists."""

    @abc.abstractmethod
    def files(self, folder: str) -> list[str]:
        """Return the sorted paths of the files below a folder at any depth. Empty if the folder does not exist."""

    def version(self, path: str) -> str:
        """Return a text that identifies the content of a file that was read, or an empty string if it is unknown."""
        return ""

    def identity(self, path: str) -> str:
        """Return a text that identifies a version of a file at its place. Empty if this store cannot tell versions apart.

        If two texts are equal, the file system or the server says that the file and its content are the same. Copies of a file
        have different texts. The text contains no credentials.

        Args:
            path: Path of a file that was read.
        """
        return ""

    @abc.abstractmethod
    def close(self) -> None:
        """Close all handles. The next read opens them again."""

    def release(self) -> None:
        """Close what no read is using, such as idle connections. The next read opens them again."""
        self.close()

    def session(self) -> Store:
        """Return a view of this store for one of several users.

        If the store is remote, `close` ends the view's reads, also those that begin later, and no others.
        """
        return self

    def joined(self, other: Store) -> Store | None:
        """Return a store that has in memory what this one and another one have. None if they are of different files."""
        return self if other is self else None

    def read_all(self, path: str) -> bytes:
        """Return all bytes of a file. A small file takes one read, and no request for its size."""
        head = self.read(path, 0, SMALL)
        return head if len(head) < SMALL else head + self.read(path, SMALL, self.size(path))

    def open(self, path: str, size: int | None = None) -> RangeFile:
        """Return a seekable file object for libraries that need one. It has no handle of its own: its reads call `read`.

        Args:
            path: Path of the file.
            size: Size of the file in bytes. Default: `self.size(path)`.
        """
        return RangeFile(self, path, self.size(path) if size is None else size)

    def where(self, path: str) -> str:
        """Return the full name of a file for messages."""
        return f"{self.address.rstrip('/')}/{path}"


class StoreView(Store):
    """Base class of stores that read some bytes from memory. Another store, `store`, has all files."""

    def __init__(self, store: Store) -> None:
        self.store, self.address, self.remote, self.revision = store, store.address, store.remote, store.revision

    def size(self, path: str) -> int:
        return self.store.size(path)

    def identity(self, path: str) -> str:
        return self.store.identity(path)

    def exists(self, path: str) -> bool:
        return self.store.exists(path)

    def files(self, folder: str) -> list[str]:
        return self.store.files(folder)

    def close(self) -> None:
        """Do nothing, since the view does not own the store."""


@functools.lru_cache(maxsize=1 << 14)
def checked(path: str) -> str:
    """Check a path, and return it unchanged. Paths in metadata are not trusted.

    Raises:
        DatasetError: If the path leads out of the root, or is not the name of a file.
    """
    with suppress(UnicodeEncodeError):  # JSON can contain half a surrogate pair, which cannot be encoded
        parts = os.fsdecode(os.fsencode(path)).split("/")
        named = any(part not in ("", ".") for part in parts)
        if named and not path.startswith("/") and ".." not in parts and "\0" not in path and "\\" not in path:
            return path
    raise DatasetError(
        f"Invalid file name {path!r} in the metadata: must be a path within the dataset. Correct it in the metadata"
    )


class RangeFile(io.RawIOBase):
    """File object that `Store.open` returns. `bytes_read` is the number of bytes that were read from the store."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self._at, self._size = store, path, 0, size
        self._held: list[tuple[int, bytes]] = []
        self.bytes_read = 0

    def hold(self, start: int, stop: int) -> None:
        """Read bytes [start, stop), and keep them in memory for later reads within this range."""
        self.seek(start)
        self._held.append((start, self.read(stop - start)))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(f"{self._store.where(self._path)}: position of seek must not be negative, got {at}")
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
    """Return the error for a missing file to which the metadata refers.

    Args:
        where: Address of the file.
        path: Path of the file in the dataset. For files outside `meta/`, the message suggests leaving their episodes out.
        words: Response of the server. Default: none.
    """
    remedy = "Copy or fetch it again"
    if not path.startswith("meta/"):
        remedy += (
            ", or leave its episodes out with episodes= (`dali-stream doctor URI` shows the missing files), or with cameras= a "
            "camera that has no file"
        )
    answer = f" ({words})" if words else ""
    return DatasetError(f"{where}: no such file, but the dataset's metadata refers to it{answer}. {remedy}")

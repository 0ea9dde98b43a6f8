"""What every kind of storage offers: sizes, byte ranges, listings."""

from __future__ import annotations

import abc
import io
from pathlib import PurePosixPath
from typing import BinaryIO

from dali_stream.errors import DatasetError


class Store(abc.ABC):
    """Read access to the files below one root. Safe to use from several threads.

    Paths are relative, with forward slashes. Where a file is missing, each method raises `DatasetError`; where it is
    there but its bytes do not come, `StorageError`.
    """

    address: str

    @abc.abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file."""

    @abc.abstractmethod
    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file; fewer where the file ends before `stop`."""

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file of this name."""

    @abc.abstractmethod
    def files(self, folder: str) -> list[str]:
        """The files below a folder at any depth, sorted; empty where there is no such folder."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back every handle. Reading again opens them anew."""

    def read_all(self, path: str) -> bytes:
        """A whole file."""
        return self.read(path, 0, self.size(path))

    def open(self, path: str) -> BinaryIO:
        """A seekable file object over `read`, for libraries that want one. It holds no handle of its own."""
        return io.BufferedReader(_Ranges(self, path), buffer_size=1 << 16)

    def where(self, path: str) -> str:
        """The name of a file for messages."""
        return f"{self.address.rstrip('/')}/{path}"


def checked(path: str) -> str:
    """The path itself, unless it leads out of the root: such names come out of metadata that others wrote."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise DatasetError(f"the metadata names the file {path!r}, which leads out of the dataset; it is not read")
    return path


class _Ranges(io.RawIOBase):
    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path, self._at, self._size = store, path, 0, store.size(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(f"{self._store.where(self._path)}: seek to {at}, before the file's start")
        self._at = at
        return at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # io's own type is private
        data = self._store.read(self._path, self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

"""Files on this machine, read in place with positional reads."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.store import Store, checked


class LocalStore(Store):
    """A local folder. Keeps up to `HANDLES` files open, least recently used first to close."""

    HANDLES = 64

    def __init__(self, folder: str) -> None:
        self._root = Path(folder).expanduser().absolute()
        self.address = str(self._root)
        if not self._root.is_dir():
            found = "is a file" if self._root.exists() else "does not exist"
            raise DatasetError(f"no dataset at {folder}: the folder {self._root} {found}")
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._handles)

    def size(self, path: str) -> int:
        try:
            return os.stat(self._root / checked(path)).st_size
        except OSError as error:
            raise self._failed(path, error) from error

    def read(self, path: str, start: int, stop: int) -> bytes:
        # A duplicate of the descriptor, since another thread may close the cached one at any time.
        handle = self._duplicate(path)
        try:
            parts = []
            while start < stop and (part := os.pread(handle, stop - start, start)):
                parts.append(part)
                start += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except OSError as error:
            raise self._failed(path, error) from error
        finally:
            os.close(handle)

    def exists(self, path: str) -> bool:
        return (self._root / checked(path)).is_file()

    def files(self, folder: str) -> list[str]:
        return sorted(
            Path(root, name).relative_to(self._root).as_posix()
            for root, _, names in os.walk(self._root / checked(folder))
            for name in names
        )

    def close(self) -> None:
        with self._lock:
            _close_all(self._handles)

    def _duplicate(self, path: str) -> int:
        with self._lock:
            try:
                if path not in self._handles:
                    self._handles[path] = os.open(self._root / checked(path), os.O_RDONLY | os.O_CLOEXEC)
                self._handles.move_to_end(path)
                handle = os.dup(self._handles[path])
            except OSError as error:
                raise self._failed(path, error) from error
            while len(self._handles) > self.HANDLES:
                os.close(self._handles.popitem(last=False)[1])
            return handle

    def _failed(self, path: str, error: OSError) -> DatasetError | StorageError:
        if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            return DatasetError(f"{self.where(path)}: no such file, and the dataset's metadata asks for it")
        return StorageError(f"{self.where(path)}: cannot be read: {error}")


def _close_all(handles: OrderedDict[str, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])

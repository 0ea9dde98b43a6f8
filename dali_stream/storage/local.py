"""Files on this machine, read in place with positional reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.store import Store, checked


class LocalStore(Store):
    """A local folder. Keeps up to `HANDLES` files open, least recently used first to close. A copy opens its own."""

    HANDLES = 64

    def __init__(self, folder: str) -> None:
        self._root = Path(folder).expanduser().absolute()
        self.address = str(self._root)
        if not self._root.is_dir():
            found = "is a file" if self._root.exists() else "does not exist"
            raise DatasetError(f"no dataset at {folder}: the folder {self._root} {found}")
        self._open_nothing()

    def _open_nothing(self) -> None:
        root = self._root  # without `self`, which would be in a cycle with its files
        self._opened = lru_cache(self.HANDLES)(lambda path: _Handle(root / path))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open_nothing()

    def size(self, path: str) -> int:
        try:
            return os.stat(self._root / checked(path)).st_size
        except OSError as error:
            raise self._failed(path, error) from None

    def read(self, path: str, start: int, stop: int) -> bytes:
        handle, parts = None, []
        try:
            handle = self._opened(checked(path))
            while start < stop and (part := os.pread(handle.number, stop - start, start)):
                parts.append(part)
                start += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except OSError as error:
            handle = None  # the traceback of a kept error would keep the file open
            raise self._failed(path, error) from None

    def exists(self, path: str) -> bool:
        return (self._root / checked(path)).is_file()

    def files(self, folder: str) -> list[str]:
        return sorted(
            Path(root, name).relative_to(self._root).as_posix()
            for root, _, names in os.walk(self._root / checked(folder))
            for name in names
        )

    def close(self) -> None:
        self._opened.cache_clear()

    def _failed(self, path: str, error: OSError) -> DatasetError | StorageError:
        if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            return DatasetError(f"{self.where(path)}: no such file, but the dataset's metadata refers to it")
        return StorageError(f"{self.where(path)}: cannot be read: {error}")


class _Handle:
    """An open file, closed after its last user: another thread may still read a file that is no longer kept."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __reduce__(self) -> NoReturn:
        # A copy would close the original's file.
        raise TypeError("an open file cannot be copied; copy its LocalStore, which opens the file again")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # modules are empty at interpreter shutdown
        if hasattr(self, "number"):
            close(self.number)

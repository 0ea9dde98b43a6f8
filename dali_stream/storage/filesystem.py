"""Files of an fsspec filesystem in this process, such as memory://. See `objects` for those on a network."""

from __future__ import annotations

from typing import Any

import fsspec

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.store import Store, checked


class FilesystemStore(Store):
    """A folder of any fsspec filesystem, read by byte ranges."""

    def __init__(self, address: str, storage_options: dict[str, Any] | None = None) -> None:
        self.address = address
        self._fs, self._root = fsspec.core.url_to_fs(address, **(storage_options or {}))
        if not self._fs.isdir(self._root):
            raise DatasetError(f"no dataset at {address}: there is no such folder")

    def size(self, path: str) -> int:
        return int(self._call("info", path)["size"])

    def read(self, path: str, start: int, stop: int) -> bytes:
        data: bytes = self._call("cat_file", path, start=start, end=stop) if stop > start else b""
        return data

    def exists(self, path: str) -> bool:
        return bool(self._fs.isfile(self._path(path)))

    def files(self, folder: str) -> list[str]:
        prefix = self._root.rstrip("/") + "/"
        return sorted(str(name).removeprefix(prefix) for name in self._fs.find(self._path(folder)))

    def close(self) -> None:
        pass  # fsspec shares its filesystem objects; nothing is opened here

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{checked(path)}"

    def _call(self, method: str, path: str, **arguments: int) -> Any:
        try:
            return getattr(self._fs, method)(self._path(path), **arguments)
        except FileNotFoundError as error:
            raise DatasetError(f"{self.where(path)}: no such file, but the dataset's metadata refers to it") from error
        except OSError as error:
            raise StorageError(f"{self.where(path)}: cannot be read: {error}") from error

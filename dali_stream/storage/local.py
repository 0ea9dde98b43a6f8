"""Store for local folders, with positional reads."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

from dali_stream.errors import DatasetError, StorageError
from dali_stream.observe.waiting import working
from dali_stream.storage.local_files import OpenFiles
from dali_stream.storage.store import Store, checked, missing_file

_SAMPLES, _SAMPLE = 8, 8 << 10  # samples of a file in its identity, and bytes of each


class LocalStore(Store):
    """Store of a local folder. It keeps files open. See `OpenFiles`. A copy opens its own files.

    Args:
        folder: Path of the folder. A leading `~` is expanded.

    Raises:
        DatasetError: If the folder does not exist or is a file.
    """

    def __init__(self, folder: str) -> None:
        self._root = Path(folder).expanduser().absolute()
        self.address = str(self._root)
        if not self._root.is_dir():
            problem = "is a file" if self._root.exists() else "does not exist"
            raise DatasetError(f"no dataset at {folder}: the folder {self._root} {problem}")
        self._open_files = OpenFiles(self._root)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_open_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open_files = OpenFiles(self._root)

    def size(self, path: str) -> int:
        try:
            return os.stat(self._root / checked(path)).st_size
        except OSError as error:
            raise self._failed(path, error) from None

    def read(self, path: str, start: int, stop: int) -> bytes:
        handle, parts = None, []
        try:
            with working("reads {}/{}, bytes {} to {}", self._root, path, start, stop):
                handle = self._open_files.get(checked(path))
                while start < stop and (part := os.pread(handle.number, stop - start, start)):
                    parts.append(part)
                    start += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except OSError as error:
            handle = None  # otherwise the traceback of the error would keep the file open
            raise self._failed(path, error) from None

    def exists(self, path: str) -> bool:
        return (self._root / checked(path)).is_file()

    def files(self, folder: str) -> list[str]:
        return sorted(
            Path(root, name).relative_to(self._root).as_posix()
            for root, _, names in os.walk(self._root / checked(folder))
            for name in names
        )

    def version(self, path: str) -> str:
        """Return a hash of the content, which is the same for all copies of a file. Empty if the file cannot be read."""
        try:
            return hashlib.blake2b(self.read_all(path), digest_size=8).hexdigest()
        except (DatasetError, StorageError):
            return ""

    def identity(self, path: str) -> str:
        """See `Store.identity`. Tools can set the modification time of a file, but neither its inode nor its change time.

        In file systems that are written as a whole, such as container images, different files may have the same numbers and
        times, so the text also contains a hash of some bytes of the file.
        """
        try:
            handle = self._open_files.get(checked(path)).number  # the file that is read, even if another one has replaced it
            status, digest = os.fstat(handle), hashlib.blake2b(digest_size=16)
            for number in range(_SAMPLES):
                digest.update(os.pread(handle, _SAMPLE, max(status.st_size - _SAMPLE, 0) * number // (_SAMPLES - 1)))
        except OSError:
            return ""
        numbers = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return f"{' '.join(map(str, numbers))} {digest.hexdigest()}"

    def close(self) -> None:
        self._open_files.close()

    def _failed(self, path: str, error: OSError) -> DatasetError | StorageError:
        if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            return missing_file(self.where(path), path)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return StorageError(
                f"{self.where(path)}: cannot be opened, because this process or machine has reached its limit of open "
                f"files ({error.strerror}). Allow more with `ulimit -n 4096`, or close files in your program"
            )
        return StorageError(f"{self.where(path)}: cannot be read: {error}")

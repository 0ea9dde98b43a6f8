"""OUT: a local folder, a bucket, or a repository on the Hub. A file gets its name only when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import filelock
import fsspec
import obstore

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage import OBJECTS
from dali_stream.storage.filesystem import check_scheme
from dali_stream.storage.object_options import parsed
from dali_stream.storage.retry import Patience
from dali_stream.storage.store import checked

Json = dict[str, Any]
T = TypeVar("T")
_ATTEMPTS = 6  # maximum number of attempts of a call, with random pauses of up to 0.5, 1, 2, 4 and 8 s between them


class Place(Protocol):
    """Place in which a new dataset is written. It is called OUT, as on the command line.

    Attributes:
        address: Address of OUT.
        remote: Whether calls send requests over a network.
    """

    address: str
    remote: bool = False

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that keeps other commands from writing OUT. Raises ValueError if another one does."""
        return contextlib.nullcontext()

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """Return a context manager of an empty folder on this machine, which is removed at the end."""

    def put(self, path: str, file: Path) -> None:
        """Move a complete file from a scratch folder to its path in OUT."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return {path: size in bytes} of the files below a folder. Default: all files."""

    def remove(self, folder: str) -> None:
        """Remove a folder, if it exists."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file."""
        with self.scratch() as folder:
            (folder / "file").write_bytes(data)
            self.put(path, folder / "file")


class LocalPlace(Place):
    """A local folder. Files are not written through symbolic links inside this folder."""

    def __init__(self, folder: str) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(folder)))
        self.address = str(self.root)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._new("meta/prepare/scratch/x").parent) as folder:
            yield Path(folder)

    def put(self, path: str, file: Path) -> None:
        with open(file, "rb") as written:
            os.fsync(written.fileno())
        os.replace(file, self._new(path))

    def read(self, path: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._place(path).read_bytes()
        return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        sizes = {}
        for root, _, names in os.walk(self.root / folder):
            for path in (Path(root, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # a worker has removed its scratch file
                    sizes[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return sizes

    def size(self, path: str) -> int | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._place(path).stat().st_size
        return None

    def remove(self, folder: str) -> None:
        shutil.rmtree(self._place(folder), ignore_errors=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """See `Place.lock`. Also raises ValueError if the folder contains something else than an unfinished run."""
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"OUT must be a folder that is empty or new, got {self.root}, which is a file")
        if self.root.is_dir() and os.listdir(self.root) and not (self.root / "meta/prepare").is_dir():
            raise ValueError(
                f"OUT must be a folder that is empty or new, got {self.root}, which is not empty, and holds no unfinished run"
            )
        lock = filelock.FileLock(self._new("meta/prepare/lock"), timeout=0, fallback_to_soft=False)
        try:
            acquired = lock.acquire()
        except filelock.Timeout:
            raise ValueError(f"{self.root} is being written by another process. Wait for it, or give another folder") from None
        with acquired:
            self.remove("meta/prepare/scratch")  # workers that were killed may have left files
            yield

    def _new(self, path: str) -> Path:
        """Return the path of a new file. Create its parent folder if it does not exist."""
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _place(self, path: str) -> Path:
        place = self.root
        for part in Path(checked(path)).parts:
            place = place / part
            if place.is_symlink():
                raise DatasetError(f"{place} is a link, and files are not written through links. Remove it")
        return place


class RemotePlace(Place):
    """A bucket, a repository, or a folder of another fsspec filesystem. Calls are retried."""

    remote = True

    def __init__(self, address: str, options: dict[str, Any] | None) -> None:
        self.address = address.rstrip("/")
        if address.partition("://")[0] not in OBJECTS:
            check_scheme(address)
        calls = _Objects if address.partition("://")[0] in OBJECTS else _Files
        self._calls: _Objects | _Files = calls(self.address, options or {})

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="dali_stream-prepare-") as folder:
            yield Path(folder)

    def put(self, path: str, file: Path) -> None:
        size = file.stat().st_size
        self._retried(path, lambda: self._calls.upload(checked(path), file))
        if (arrived := self.size(path)) != size:
            raise StorageError(
                f"{self.address}/{path}: {size} bytes were uploaded, and {arrived} arrived. Run the command again"
            )

    def read(self, path: str) -> bytes | None:
        return self._retried(path, lambda: self._calls.read(checked(path)))

    def sizes(self, folder: str = "") -> dict[str, int]:
        return self._retried(folder, lambda: self._calls.sizes(folder))

    def size(self, path: str) -> int | None:
        return self._retried(path, lambda: self._calls.size(checked(path)))

    def remove(self, folder: str) -> None:
        if paths := list(self.sizes(folder)):
            self._retried(folder, lambda: self._calls.remove(folder, paths))

    def _retried(self, path: str, call: Callable[[], T]) -> T:
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except (StorageError, ValueError):
                raise
            except FileNotFoundError:
                raise StorageError(f"{self.address}: does not exist. Create the bucket or repository first") from None
            except Exception as error:  # each library has its own types of errors
                status = getattr(getattr(error, "response", None), "status_code", None)  # huggingface_hub's errors have it
                if attempt == _ATTEMPTS - 1 or isinstance(error, PermissionError) or status in (401, 403):
                    reason = type(error).__name__ + (f", HTTP {status}" if status else "")  # the text may contain credentials
                    raise StorageError(f"{self.address}/{path}: cannot be written ({reason}). Run the command again") from None
            time.sleep(random.random() * 0.5 * 2**attempt)
        raise AssertionError


class _Objects:
    """Calls of an object store, with obstore."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self._store = parsed(address, options, Patience()).open()

    def upload(self, path: str, file: Path) -> None:
        obstore.put(self._store, path, file)

    def read(self, path: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return bytes(obstore.get(self._store, path).bytes())
        return None

    def size(self, path: str) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return int(obstore.head(self._store, path)["size"])
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        return {each["path"]: each["size"] for page in obstore.list(self._store, folder or None) for each in page}

    def remove(self, folder: str, paths: list[str]) -> None:
        obstore.delete(self._store, paths)


class _Files:
    """Calls of an fsspec filesystem, such as that of huggingface_hub for hf://."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self._files, self._root = fsspec.core.url_to_fs(address, **options)

    def upload(self, path: str, file: Path) -> None:
        self._files.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
        with _without_bars():
            self._files.put_file(str(file), f"{self._root}/{path}")

    def read(self, path: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._files.cat_file(f"{self._root}/{path}"))
        return None

    def size(self, path: str) -> int | None:
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):  # huggingface_hub lists the file's folder, of at most 1000 files
            return int(self._files.info(f"{self._root}/{path}")["size"])
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        self._files.invalidate_cache()
        root = self._root.rstrip("/")
        files = self._files.find(f"{root}/{folder}".rstrip("/"), detail=True)
        return {name.removeprefix(root).lstrip("/"): each["size"] for name, each in files.items()}

    def remove(self, folder: str, paths: list[str]) -> None:
        self._files.rm(f"{self._root}/{folder}", recursive=True)  # huggingface_hub does not accept a list of paths


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep huggingface_hub from drawing a progress bar for each file."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported at run time
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()


def open_place(address: str, options: dict[str, Any] | None) -> Place:
    """Return the place with an address.

    Args:
        address: Local folder, or an address such as s3://bucket/folder.
        options: Credentials and other storage options of a remote place.
    """
    return RemotePlace(address, options) if "://" in address else LocalPlace(address)


def content_hash(data: bytes | memoryview) -> str:
    """Return a digest of some data, as 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()

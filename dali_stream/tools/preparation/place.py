"""OUT: a local folder, a bucket, or a repository on the Hub. All bytes of a new dataset are written here.

A file gets its name only when it is complete.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import filelock
import fsspec
import obstore

from dali_stream.errors import DatasetError, StorageError, counted
from dali_stream.storage import OBJECTS, local_folder
from dali_stream.storage.filesystem import check_scheme
from dali_stream.storage.object_options import parsed
from dali_stream.storage.retry import Patience
from dali_stream.storage.store import checked
from dali_stream.system.cached import cached_property

Json = dict[str, Any]
T = TypeVar("T")
_ATTEMPTS = 6  # maximum number of attempts of a call, with random pauses of up to 0.5, 1, 2, 4 and 8 s between them
_WORK = "meta/prepare"  # folder for the lock and the unfinished files of a run on local disk


class Place(Protocol):
    """Place in which a new dataset is written. It is called OUT, as on the command line.

    Workers call `scratch` and `put`. The command itself calls the other methods.

    Attributes:
        address: Address of OUT.
        counts_commits: Whether `commit` makes a commit of a repository, whose number per hour is limited.
        interval_s: Minimum time between two commits while a run writes files, in seconds.
    """

    address: str
    counts_commits: bool = False
    interval_s: float = 5.0

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that keeps other commands from writing OUT. Raises ValueError if another one does."""
        return contextlib.nullcontext()

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """Return a context manager of an empty folder on this machine, which is removed at the end."""

    def put(self, path: str, file: Path) -> Any:
        """Move or upload a complete file from a scratch folder to its path in OUT. Return a value for `commit`."""

    def commit(self, files: Iterable[tuple[str, bytes]], uploads: Sequence[Any] = ()) -> None:
        """Write small files in this order, and complete uploads.

        Args:
            files: Path and content of each file.
            uploads: Results of `put`. In a repository, their files appear with this commit.
        """
        for path, data in files:
            with self.scratch() as folder:
                (folder / "file").write_bytes(data)
                self.put(path, folder / "file")

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""

    def sizes(self) -> dict[str, int]:
        """Return {path: size in bytes} of all files of the dataset."""


class LocalPlace(Place):
    """A local folder. Files are not written through symbolic links inside this folder."""

    def __init__(self, folder: str) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(folder)))
        self.address = str(self.root)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """See `Place.lock`. At the end, the lock and unfinished files are removed."""
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"OUT must be a folder that is empty or new, got {self.root}, which is a file")
        lock = filelock.FileLock(self._new(f"{_WORK}/lock"), timeout=0, fallback_to_soft=False)
        try:
            acquired = lock.acquire()
        except filelock.Timeout:
            raise occupied(self.address) from None
        with acquired:
            try:
                shutil.rmtree(self._place(f"{_WORK}/scratch"), ignore_errors=True)  # of workers that were killed
                yield
            finally:
                shutil.rmtree(self._place(_WORK), ignore_errors=True)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._new(f"{_WORK}/scratch/x").parent) as folder:
            yield Path(folder)

    def put(self, path: str, file: Path) -> None:
        with open(file, "rb") as written:
            os.fsync(written.fileno())
        os.replace(file, self._new(path))

    def read(self, path: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._place(path).read_bytes()
        return None

    def sizes(self) -> dict[str, int]:
        sizes = {}
        for root, _, names in os.walk(self.root):
            for path in (Path(root, name) for name in names):
                name = path.relative_to(self.root).as_posix()
                if name != f"{_WORK}/lock" and not name.startswith(f"{_WORK}/scratch/"):
                    sizes[name] = path.lstat().st_size
        return sizes

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
    """Base class of places to which files are uploaded. Calls are retried."""

    interval_s = 10.0

    def __init__(self, address: str) -> None:
        self.address = address

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="dali_stream-prepare-") as folder:
            yield Path(folder)

    def put(self, path: str, file: Path) -> Any:
        size = file.stat().st_size
        self._retried(path, lambda: self._upload(path, file))
        if (arrived := self.size(path)) != size:
            raise StorageError(
                f"{self.address}/{path}: {size} bytes were uploaded, and {arrived} arrived. Run the command again"
            )

    @abc.abstractmethod
    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    @abc.abstractmethod
    def _upload(self, path: str, file: Path) -> None:
        """Upload a file."""

    def _optional(self, path: str, call: Callable[[], T]) -> T | None:
        """Return `call()`, or None if the file does not exist. See `_retried`."""

        def optional() -> T | None:
            with contextlib.suppress(FileNotFoundError):
                return call()
            return None

        return self._retried(checked(path), optional)

    def _retried(self, path: str, call: Callable[[], T]) -> T:
        """Return `call()`, which is repeated if it fails."""
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
                    where = f"{self.address}/{path}".rstrip("/")
                    raise StorageError(f"{where}: cannot be read or written ({reason}). Run the command again") from None
            time.sleep(random.random() * 0.5 * 2**attempt)
        raise AssertionError


class ObjectPlace(RemotePlace):
    """A folder of an object store, with obstore."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        super().__init__(address)
        self._store = parsed(address, options, Patience()).open()

    def _upload(self, path: str, file: Path) -> None:
        obstore.put(self._store, checked(path), file)

    def read(self, path: str) -> bytes | None:
        return self._optional(path, lambda: bytes(obstore.get(self._store, path).bytes()))

    def size(self, path: str) -> int | None:
        return self._optional(path, lambda: int(obstore.head(self._store, path)["size"]))

    def sizes(self) -> dict[str, int]:
        return self._retried("", lambda: {each["path"]: each["size"] for page in obstore.list(self._store) for each in page})


class FilesystemPlace(RemotePlace):
    """A folder of an fsspec filesystem, such as a bucket of the Hub."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        check_scheme(address)
        super().__init__(address)
        self._files, self._root = fsspec.core.url_to_fs(address, **options)

    def _upload(self, path: str, file: Path) -> None:
        self._files.makedirs(f"{self._root}/{checked(path)}".rpartition("/")[0], exist_ok=True)
        with _without_bars():
            self._files.put_file(str(file), f"{self._root}/{path}")

    def read(self, path: str) -> bytes | None:
        return self._optional(path, lambda: bytes(self._files.cat_file(f"{self._root}/{path}")))

    def size(self, path: str) -> int | None:
        self._files.invalidate_cache()
        # huggingface_hub lists the file's folder, of at most 1000 files.
        return self._optional(path, lambda: int(self._files.info(f"{self._root}/{path}")["size"]))

    def sizes(self) -> dict[str, int]:
        self._files.invalidate_cache()
        root = self._root.rstrip("/")
        files = self._retried("", lambda: self._files.find(root, detail=True))
        return {name.removeprefix(root).lstrip("/"): each["size"] for name, each in files.items()}


class RepositoryPlace(FilesystemPlace):
    """A folder of a repository on the Hub. `put` uploads the content of a file, and `commit` adds all such files at once.

    The Hub checks the size and the digest of the content.
    """

    counts_commits = True
    interval_s = 60.0  # the Hub allows 128 commits per hour

    def put(self, path: str, file: Path) -> Any:
        from huggingface_hub import CommitOperationAdd

        added = CommitOperationAdd(self._inside(path), str(file))
        self._retried(path, lambda: self._call("preupload_lfs_files", additions=[added]))
        if added.path_or_fileobj == str(file):  # the Hub wants the content of this small file in the commit
            added.path_or_fileobj = file.read_bytes()
        return added

    def commit(self, files: Iterable[tuple[str, bytes]], uploads: Sequence[Any] = ()) -> None:
        from huggingface_hub import CommitOperationAdd

        added = [*uploads, *(CommitOperationAdd(self._inside(path), data) for path, data in files)]
        message = f"Add {counted(len(added), 'file')} that dali_stream has prepared"
        self._retried("", lambda: self._call("create_commit", operations=added, commit_message=message))

    def _call(self, name: str, **arguments: Any) -> None:
        """Call a function of huggingface_hub's API for this repository."""
        from huggingface_hub import HfApi

        api, place = HfApi(self._files.endpoint, token=self._files.token), self._resolved
        with _without_bars():
            getattr(api, name)(place.repo_id, repo_type=place.repo_type, revision=place.revision, **arguments)

    @cached_property
    def _resolved(self) -> Any:
        return self._files.resolve_path(self._root)

    def _inside(self, path: str) -> str:
        """Return the path of a file in the repository."""
        folder = self._retried(path, lambda: self._resolved).path_in_repo
        return f"{folder}/{checked(path)}".lstrip("/")


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
    if (folder := local_folder(address)) is not None:
        return LocalPlace(folder)
    scheme, _, rest = address.rstrip("/").partition("://")
    kind = ObjectPlace if scheme in OBJECTS else FilesystemPlace
    if scheme == "hf" and not rest.startswith("buckets/"):
        kind = RepositoryPlace
    return kind(address.rstrip("/"), options or {})


def occupied(address: str) -> ValueError:
    """Return the error for an OUT that another command writes."""
    return ValueError(f"{address} is being written by another process. Wait for it, or give another folder")


def content_hash(data: bytes | memoryview) -> str:
    """Return a digest of some data, as 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()

"""The folder that is written: which job it is of, which of its files are finished, and that nothing lands outside.

    OUT/<stage>/plan.json     which dataset with which options this is the unfinished copy of
    OUT/<stage>/incoming/     files that are being written
    OUT/<stage>/done/<path>   what is known of a finished file: digests of its source, as JSON
    OUT/<stage>/meta/         the metadata, until all is verified; then it becomes OUT/meta, and the stage goes

So OUT is no dataset before it is a verified one. The stage has a name of each command's own, such as `.reshard`, so that
none continues with what another has begun.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

import filelock

from dali_stream.errors import DaliStreamError, DatasetError
from dali_stream.storage.store import checked

AGAIN = "run the same command again to write it anew, and look at the disk if that does not help"


class Folder:
    """OUT, for one process at a time; to be closed.

    Args:
        out: made if it is not there.
        stage: the name of a folder in it, which is there until all is done.
        job: what an unfinished copy has to be of in order to be gone on with.

    Raises:
        ValueError: something else is there, or another process is at it.
    """

    def __init__(self, out: str | os.PathLike[str], stage: str, job: dict[str, Any]) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(os.fspath(out))))
        self.stage = self.root / stage
        self._check_ours()
        self.stage.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self.stage / "lock", timeout=0, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise ValueError(f"{self.root} is being written by another process; wait for it, or name another folder") from None
        try:
            self._begin(job)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process continue with it."""
        self._lock.release()

    def finished(self, path: str) -> Any:
        """What `writing` was told of a file that is finished; None where it is not."""
        note = self._place(f"{self.stage.name}/done/{path}")
        if not note.is_file() or not self._place(path).is_file():
            return None
        return json.loads(note.read_bytes())

    @contextmanager
    def writing(self, path: str, note: dict[str, Any] | None = None) -> Iterator[Written]:
        """A new file, which is there under its name when all of it is. `note` may be filled until then; it gets `bytes`,
        a digest of the whole file."""
        incoming = self._place(f"{self.stage.name}/incoming/{path}")
        with self._opened(incoming) as file:
            yield file
        if note is not None:
            note["bytes"] = file.digest.hexdigest()
        self._put(path, incoming, note)

    def incoming(self, path: str) -> Path:
        """Where another program may write a file, for `adopt`."""
        place = self._place(f"{self.stage.name}/incoming/{path}")
        place.unlink(missing_ok=True)
        return place

    def adopt(self, path: str, note: dict[str, Any]) -> None:
        """Takes what another program has written at `incoming(path)` for that file, as `writing` does at its end."""
        incoming = self._place(f"{self.stage.name}/incoming/{path}")
        with open(incoming, "rb") as file:
            note["bytes"] = digest(file)
            os.fsync(file.fileno())
        self._put(path, incoming, note)

    def discard(self, path: str) -> None:
        """Has a file rewritten by the next run."""
        for name in (path, f"{self.stage.name}/done/{path}"):
            self._place(name).unlink(missing_ok=True)

    def refuse(self, path: str, how: str) -> NoReturn:
        """Has a file rewritten by the next run, and says so."""
        self.discard(path)
        raise DaliStreamError(f"{self.root / path}: {how}. The file is removed; {AGAIN}")

    @contextmanager
    def blaming(self, path: str, what: str) -> Iterator[None]:
        """What goes wrong in the block is what is wrong with that file."""
        try:
            yield
        except DaliStreamError as error:
            self.refuse(path, f"{what}{error}")

    def check(self, path: str, how: str, advance: Callable[[int], None] = lambda _: None) -> None:
        """Reads a finished file, and refuses it, saying `how`, where it is not what was written. `advance` is told of bytes."""
        note = self.finished(path)
        if note is None:
            self.refuse(path, "is gone")
        with open(self._place(path), "rb") as file:
            if digest(file, advance) != note["bytes"]:
                self.refuse(path, how)

    def finish(self) -> None:
        """Makes it a dataset."""
        if (self.stage / "meta").is_dir():
            os.rename(self.stage / "meta", self.root / "meta")
        _sync(self.root)
        self.close()
        shutil.rmtree(self.stage)

    def fresh_meta(self) -> None:
        """Removes metadata that an earlier run has left unfinished."""
        shutil.rmtree(self.stage / "meta", ignore_errors=True)

    def _put(self, path: str, incoming: Path, note: dict[str, Any] | None) -> None:
        if note is not None:
            with self.writing(f"{self.stage.name}/done/{path}") as file:
                file.write(json.dumps(note).encode())
        os.replace(incoming, self._place(path))

    def _check_ours(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"{self.root} is a file; name a folder that is empty or not there yet")
        there = os.listdir(self.root) if self.root.is_dir() else []
        if self.stage.is_symlink() or (there and not self.stage.is_dir()):
            raise ValueError(
                f"{self.root} is not empty, and what is in it was not begun by this command; it is left as it is. Name a "
                "folder that is empty or not there yet"
            )

    def _begin(self, job: dict[str, Any]) -> None:
        plan = self.stage / "plan.json"
        if plan.is_file():
            try:
                found = json.loads(plan.read_bytes())
            except ValueError:
                found = None
            if found != job:
                differs = [name for name in job if not isinstance(found, dict) or found.get(name) != job[name]]
                raise ValueError(
                    f"{self.root} holds an unfinished copy that was begun with another {' and another '.join(differs)}; "
                    "give the same as then to continue with it, remove it, or name another folder"
                )
        elif set(os.listdir(self.root)) != {self.stage.name}:
            raise ValueError(f"{self.root} holds files, and {plan}, which would say of what, is gone; name another folder")
        else:
            with self.writing(f"{self.stage.name}/plan.json") as file:
                file.write(json.dumps(job).encode())

    def _place(self, path: str) -> Path:
        """Where a file goes, with its folders made. No link is followed on the way there."""
        place = self.root
        for part in PurePosixPath(checked(path)).parts:
            if place != self.root:
                place.mkdir(exist_ok=True)
            place = place / part
            if place.is_symlink():
                raise DatasetError(f"{place} is a link, and nothing is written through links; remove it")
        return place

    @contextmanager
    def _opened(self, place: Path) -> Iterator[Written]:
        place.unlink(missing_ok=True)
        try:
            with open(place, "xb") as file:
                yield Written(file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            place.unlink(missing_ok=True)
            raise


class Written(io.BufferedIOBase):
    """A file that is written from its beginning to its end. `digest` is of all its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]  # io's own type is private
        self.digest.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()


def digest(file: BinaryIO, advance: Callable[[int], None] = lambda _: None) -> str:
    """Of all bytes of a file, as `Written` has it. `advance` is told of bytes as they are read."""
    found = hashlib.blake2b(digest_size=16)
    while data := file.read(8 << 20):
        found.update(data)
        advance(len(data))
    return found.hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

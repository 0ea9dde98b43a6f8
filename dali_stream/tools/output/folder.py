"""The output folder: which job it belongs to, which of its files are finished, and writing nothing outside it.

    OUT/<stage>/plan.json     the dataset and options of the unfinished copy
    OUT/<stage>/incoming/     files being written
    OUT/<stage>/done/<path>   notes on a finished file, such as digests of its source, as JSON
    OUT/<stage>/meta/         the metadata until verification; then it becomes OUT/meta, and the stage is removed

OUT becomes a dataset only after verification. Each command has its own stage, such as `.reshard`, so none resumes the work of
another.
"""

from __future__ import annotations

import hashlib
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

AGAIN = "run the same command again to rewrite it; if that does not help, check the disk"


class Folder:
    """OUT, locked for this process until `close`.

    Args:
        out: created if it does not exist.
        stage: name of a folder in it, which exists until `finish`.
        job: identity of the job; an unfinished copy is resumed only if it has the same one.

    Raises:
        ValueError: the folder holds something else, or another process is writing it.
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
            raise ValueError(f"{self.root} is being written by another process; wait for it, or give another folder") from None
        try:
            self._begin(job)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock."""
        self._lock.release()

    def finished(self, path: str) -> Any:
        """The note of a finished file; None if the file is not finished."""
        note = self._place(f"{self.stage.name}/done/{path}")
        if not note.is_file() or not self._place(path).is_file():
            return None
        return json.loads(note.read_bytes())

    @contextmanager
    def writing(self, path: str, note: dict[str, Any] | None = None) -> Iterator[BinaryIO]:
        """A new file, which gets its name when it is complete. `note` may be filled until then, see `adopt`."""
        incoming = self.incoming(path)
        try:
            with open(incoming, "xb") as file:
                yield file
            self.adopt(path, note)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise

    def incoming(self, path: str) -> Path:
        """A path where another program may write a file, for `adopt`."""
        place = self._place(f"{self.stage.name}/incoming/{path}")
        place.unlink(missing_ok=True)
        return place

    def adopt(self, path: str, note: dict[str, Any] | None) -> None:
        """Finishes a file that was written at `incoming(path)`. `bytes`, a digest of the whole file, is added to its note."""
        incoming = self._place(f"{self.stage.name}/incoming/{path}")
        with open(incoming, "rb") as file:
            if note is not None:
                note["bytes"] = digest(file)
            os.fsync(file.fileno())
        if note is not None:
            with self.writing(f"{self.stage.name}/done/{path}") as done:
                done.write(json.dumps(note).encode())
        os.replace(incoming, self._place(path))

    def discard(self, path: str) -> None:
        """Removes a file, so that the next run rewrites it."""
        for name in (path, f"{self.stage.name}/done/{path}"):
            self._place(name).unlink(missing_ok=True)

    def refuse(self, path: str, how: str) -> NoReturn:
        """Removes a file, so that the next run rewrites it, and raises DaliStreamError."""
        self.discard(path)
        raise DaliStreamError(f"{self.root / path}: {how}. The file was removed; {AGAIN}")

    @contextmanager
    def blaming(self, path: str, what: str) -> Iterator[None]:
        """Refuses the file if the block raises a DaliStreamError."""
        try:
            yield
        except DaliStreamError as error:
            self.refuse(path, f"{what}{error}")

    def check(self, path: str, how: str, advance: Callable[[int], None] = lambda _: None) -> None:
        """Refuses a finished file with `how` if it has changed. `advance` is called with the bytes of each part."""
        note = self.finished(path)
        if note is None:
            self.refuse(path, "is missing")
        with open(self._place(path), "rb") as file:
            if digest(file, advance) != note["bytes"]:
                self.refuse(path, how)

    def finish(self) -> None:
        """Turns the folder into a dataset."""
        if (self.stage / "meta").is_dir():
            os.rename(self.stage / "meta", self.root / "meta")
        _sync(self.root)
        self.close()
        shutil.rmtree(self.stage)

    def _check_ours(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"{self.root} is a file; give a folder that is empty or new")
        there = os.listdir(self.root) if self.root.is_dir() else []
        if self.stage.is_symlink() or (there and not self.stage.is_dir()):
            raise ValueError(
                f"{self.root} is not empty, and holds no unfinished copy of this command; nothing was changed. Give a folder "
                "that is empty or new"
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
                    f"{self.root} holds an unfinished copy with another {' and another '.join(differs)}; repeat the earlier "
                    "command to resume it, remove it, or give another folder"
                )
        elif set(os.listdir(self.root)) != {self.stage.name}:
            raise ValueError(
                f"{self.root} holds an unfinished copy, and its {plan} is missing; remove it or give another folder"
            )
        else:
            with self.writing(f"{self.stage.name}/plan.json") as file:
                file.write(json.dumps(job).encode())

    def _place(self, path: str) -> Path:
        """The place of a file, with its folders created. Links are not followed."""
        place = self.root
        for part in PurePosixPath(checked(path)).parts:
            if place != self.root:
                place.mkdir(exist_ok=True)
            place = place / part
            if place.is_symlink():
                raise DatasetError(f"{place} is a link, and files are not written through links; remove it")
        return place


def digest(file: BinaryIO, advance: Callable[[int], None] = lambda _: None) -> str:
    """Digest of a file. `advance` is called with the bytes of each part."""
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

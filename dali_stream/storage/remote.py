"""Reading over an unreliable network: retries, one version of each file, a cache."""

from __future__ import annotations

import abc
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.cache import BLOCK, DiskCache
from dali_stream.storage.file_names import guessed_files
from dali_stream.storage.retry import Deadline, Patience, TransientError, end_idle_threads, retried
from dali_stream.storage.store import Store, Traffic, checked

_R = TypeVar("_R")
_T = TypeVar("_T")


class Version(NamedTuple):
    """Identifies one state of a file.

    Attributes:
        size: bytes.
        tag: an ETag, generation or the like; empty if the source gives none.
    """

    size: int
    tag: str = ""


class Answer(NamedTuple):
    """The result of one request.

    Attributes:
        version: of the file.
        data: bytes from the start of the range; fewer than requested if the file or the connection ended.
        cut: what ended the answer early, if anything.
    """

    version: Version
    data: bytes
    cut: str | None = None


class Transport(abc.ABC):
    """One attempt of one request of one protocol; may block. Safe to use from several threads.

    A retryable failure is a `TransientError`; neither its message nor its chain of causes has credentials. A missing file
    is a `DatasetError`, any other failure a `StorageError`.

    Attributes:
        address: the root, without credentials; for messages.
        host: whose connection slots the requests take.
        revision: the commit that is read, if the source has commits.
        frozen: whether a file of this revision never changes, so that its name identifies its content.
        listings: whether `files` lists a folder.
        source: names the root in a cache, without credentials.
        traffic: what the attempts have cost.
    """

    address: str
    host: str
    revision: str | None = None
    frozen: bool = False
    listings: bool = True
    source: str
    traffic: Traffic

    @abc.abstractmethod
    def read(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """Bytes [start, stop) of a file; `version` is the expected one, if one was seen before."""

    @abc.abstractmethod
    def stat(self, path: str, deadline: Deadline) -> Version:
        """The current version."""

    @abc.abstractmethod
    def files(self, folder: str, deadline: Deadline) -> dict[str, int] | None:
        """The files below a folder at any depth, with sizes; None if the protocol has no listings."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes connections. The next request opens new ones."""

    def where(self, path: str) -> str:
        """The name of a file for messages."""
        return f"{self.address.rstrip('/')}/{path}"


class RemoteStore(Store):
    """Files behind a `Transport`. Each file is read in the version seen first; a change is an error.

    Args:
        transport: sends the requests.
        cache: where fetched ranges are kept.
        patience: for how long a request is retried.
    """

    remote = True

    def __init__(self, transport: Transport, *, cache: DiskCache | None = None, patience: Patience | None = None) -> None:
        self.address, self.revision = transport.address, transport.revision
        self.listings = transport.listings
        self._transport, self._cache, self._patience = transport, cache, patience or Patience()
        self._stop = threading.Event()
        # Filled with setdefault, which needs no lock: the first value stays.
        self._sizes: dict[str, int] = {}
        self._tags: dict[str, str] = {}

    @property
    def traffic(self) -> Traffic:
        """What reading has cost so far."""
        return self._transport.traffic

    def size(self, path: str) -> int:
        """Bytes of a file. Costs a request only if no read and no listing has returned it before."""
        size = self._known_size(checked(path))
        return self._stat(path).size if size is None else size

    def exists(self, path: str) -> bool:
        """Whether there is a file of this name. Raises `StorageError` if that cannot be determined."""
        checked(path)
        try:
            self.size(path)
        except DatasetError:
            return False
        return True

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file; fewer if the file ends before `stop`."""
        size = self._known_size(checked(path))
        stop = stop if size is None else min(stop, size)
        if stop <= start:
            return b""
        if self._cache is None:
            return self._fetch(path, start, stop)
        return self._read_cached(self._cache, path, start, stop)

    def files(self, folder: str) -> list[str]:
        """The files below a folder. If the protocol has no listings (HTTP), those with names that LeRobot gives."""
        checked(folder)
        found = self._retried(self.where(folder), lambda deadline: self._transport.files(folder, deadline), lambda found: found)
        if found is None:
            return guessed_files(folder, self.exists)
        for path, size in found.items():
            self._pin_size(path, size)
        return sorted(found)

    def session(self) -> RemoteStore:
        """The same files, versions, connections and counts for one user, whose `close` ends its own reads only."""
        session = object.__new__(type(self))
        vars(session).update(vars(self))
        session._stop = threading.Event()
        return session

    def __getstate__(self) -> dict[str, Any]:
        # Snapshots: other threads may add to these dicts.
        state = {**vars(self), "_sizes": dict(self._sizes), "_tags": dict(self._tags)}
        del state["_stop"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._stop = threading.Event()

    def close(self) -> None:
        """Closes connections. Reads in progress through this object end with a `StorageError`."""
        stop, self._stop = self._stop, threading.Event()
        stop.set()
        self._transport.close()
        end_idle_threads()

    def _stat(self, path: str) -> Version:
        def accept(version: Version) -> Version:
            self._pin(path, version)
            return version

        return self._retried(self.where(path), lambda deadline: self._transport.stat(path, deadline), accept)

    def _pin(self, path: str, version: Version) -> None:
        """Pins a file to the version seen first. A source may give a tag only at times; it is compared then."""
        self._pin_size(path, version.size)
        tag = self._tags.setdefault(path, version.tag)
        if version.tag and not tag:
            self._tags[path] = version.tag
        if tag and version.tag and tag != version.tag:
            self._changed(path, f"it still has {version.size} bytes, but another tag (ETag, generation or time)")

    def _pin_size(self, path: str, found: int) -> None:
        size = self._sizes.setdefault(path, found)
        if size != found:
            self._changed(path, f"it had {size} bytes and now has {found}")

    def _changed(self, path: str, how: str) -> NoReturn:
        raise StorageError(
            f"{self.where(path)} changed during the run: {how}. Bytes of two versions are never mixed; start again when "
            "nothing writes to the dataset, or read a fixed copy of it"
        )

    # -- retries

    def _fetch(self, path: str, start: int, stop: int) -> bytes:
        """Bytes over the network. What arrived before a failure is kept, and only the rest is requested again."""
        parts: list[bytes] = []
        at = start

        def request(deadline: Deadline) -> Answer:
            return self._transport.read(path, at, stop, self._version(path), deadline)

        def accept(answer: Answer) -> None:
            nonlocal at
            self._pin(path, answer.version)
            parts.append(answer.data)
            at += len(answer.data)
            if at < min(stop, answer.version.size):
                raise TransientError(answer.cut or f"the response ended at byte {at}")

        began = time.perf_counter()
        try:
            self._retried(f"{self.where(path)}, bytes {start} to {stop}", request, accept)
        finally:
            self.traffic.add(fetch_s=time.perf_counter() - began)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _version(self, path: str) -> Version | None:
        return Version(self._sizes[path], self._tags.get(path, "")) if path in self._sizes else None

    def _retried(self, what: str, request: Callable[[Deadline], _R], accept: Callable[[_R], _T]) -> _T:
        """Repeats a request until its answer is accepted or the time is over."""
        host, traffic = self._transport.host, self._transport.traffic
        return retried(request, accept, what, host=host, patience=self._patience, traffic=traffic, stop=self._stop)

    # -- the cache

    def _name(self, path: str) -> str:
        """The file's name in the cache, whatever its version."""
        return f"{self._transport.source} {path}"

    def _known_size(self, path: str) -> int | None:
        """The size from a request, of this run or of the run that filled the cache."""
        if path not in self._sizes and self._cache is not None and self._transport.frozen:
            size = self._cache.size(self._name(path))
            if size is not None:
                self._sizes.setdefault(path, size)
        return self._sizes.get(path)

    def _tag(self, path: str) -> str:
        """What tells the file's version in the cache; empty if it is unknown or there is nothing to tell it."""
        return "frozen" if self._transport.frozen else self._tags.get(path, "")

    def _cached(self, cache: DiskCache, path: str, first: int, last: int) -> list[bytes | None]:
        """Blocks of the file's version. Asks for it where something of the file is cached, and it is not known yet."""
        if not self._tag(path) and path not in self._tags and cache.size(self._name(path)) is not None:
            self._stat(path)
        tag = self._tag(path)
        return cache.read(self._name(path), tag, first, last) if tag else [None] * (last - first)

    def _read_cached(self, cache: DiskCache, path: str, start: int, stop: int) -> bytes:
        """Bytes of a file: whole blocks from the cache, and those that are not there over the network."""
        first, last, fetched = start // BLOCK, -(-stop // BLOCK), 0
        blocks = self._cached(cache, path, first, last)
        if lost := _missing(blocks, first):
            with cache.fetching(self._name(path), lost[0][0], lost[-1][1]):
                # Another process may have fetched them while this one waited.
                blocks = self._cached(cache, path, first, last)
                for a, b in _missing(blocks, first):
                    end = min(b * BLOCK, self._sizes.get(path, b * BLOCK))
                    if a * BLOCK >= end:
                        break  # of the file, whose size was unknown before
                    data = self._fetch(path, a * BLOCK, end)
                    if tag := self._tag(path):
                        cache.write(self._name(path), tag, a, data, self._sizes[path])
                    blocks[a - first : b - first] = [data[at : at + BLOCK] for at in range(0, (b - a) * BLOCK, BLOCK)]
                    fetched += max(min(a * BLOCK + len(data), stop) - max(a * BLOCK, start), 0)
        found = b"".join(block for block in blocks if block)[start - first * BLOCK : stop - first * BLOCK]
        self.traffic.add(cached_bytes=len(found) - fetched)
        return found


def _missing(blocks: list[bytes | None], first: int) -> list[tuple[int, int]]:
    """Ranges of blocks that are None, where `first` is the number of the first block."""
    runs = itertools.groupby(enumerate(blocks, start=first), key=lambda item: item[1] is None)
    ranges = [[number for number, _ in run] for missing, run in runs if missing]
    return [(numbers[0], numbers[-1] + 1) for numbers in ranges]

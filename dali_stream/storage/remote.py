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
from dali_stream.storage.retry import AGAIN, Deadline, Patience, TransientError, bounded, end_idle, given_up, pause_s, slot
from dali_stream.storage.store import Store, Traffic, checked, missing_file

_T = TypeVar("_T")
Guess = Callable[[str, Callable[[str], bool]], list[str]]


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


class RemoteStore(Store):
    """Files on a network. Each file is read in the version seen first; a change is an error.

    A subclass reads over one protocol: `_get`, `_head` and `_list` are one attempt of one request. They may block, run in
    several threads at a time, and raise a `TransientError` for a retryable failure, a `DatasetError` for a missing file and a
    `StorageError` for any other. None of these has credentials, neither in its message nor in its chain of causes.

    Args:
        address: the root, without credentials; for messages.
        host: whose connection slots the requests take.
        patience: for how long a request is retried.
        cache: where fetched ranges are kept.
        guess: lists a folder where the protocol cannot: (folder, whether there is a file of a name) to names.
        source: names the root in a cache, without credentials; the address by default.

    Attributes:
        frozen: whether a file of this revision never changes, so that its name identifies its content.
        hint: how to give credentials.
    """

    remote = True
    frozen = False
    hint = "give credentials in storage_options"

    def __init__(
        self,
        address: str,
        host: str,
        patience: Patience | None = None,
        cache: DiskCache | None = None,
        guess: Guess | None = None,
        source: str = "",
    ) -> None:
        self.address, self._source, self._host, self._guess = address, source or address, host, guess
        self._patience, self._cache = patience or Patience(), cache
        # Filled with setdefault, which needs no lock: the first value stays.
        self._sizes: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._traffic, self._stop = Traffic(), threading.Event()

    @abc.abstractmethod
    def _get(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """Bytes [start, stop) of a file; `version` is the expected one, if one was seen before."""

    @abc.abstractmethod
    def _head(self, path: str, deadline: Deadline) -> Version:
        """The current version."""

    @abc.abstractmethod
    def _list(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """The files below a folder at any depth, with sizes."""

    @property
    def traffic(self) -> Traffic:
        """What reading has cost so far."""
        return self._traffic

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
        """The files below a folder at any depth, sorted; those that can be guessed if the protocol has no listings (HTTP)."""
        checked(folder)
        if self._guess is not None and not self.listings:
            return self._guess(folder, self.exists)
        found = self._retried(self.where(folder), lambda deadline: self._list(folder, deadline))
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
        # Snapshots of what other threads may add to.
        state = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        return {**state, "_stop": None, "_traffic": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._traffic, self._stop = Traffic(), threading.Event()

    def close(self) -> None:
        """Reads in progress through this object end with a `StorageError`. Subclasses close connections."""
        stop, self._stop = self._stop, threading.Event()
        stop.set()
        end_idle()

    # -- versions

    def _stat(self, path: str) -> Version:
        version = self._retried(self.where(path), lambda deadline: self._head(path, deadline))
        self._pin(path, version)
        return version

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

    # -- requests

    def _fetch(self, path: str, start: int, stop: int) -> bytes:
        """Bytes over the network. What arrived before a failure is kept, and only the rest is requested again."""
        parts: list[bytes] = []

        def request(deadline: Deadline) -> None:
            at = start + sum(map(len, parts))
            known = Version(self._sizes[path], self._tags.get(path, "")) if path in self._sizes else None
            answer = self._get(path, at, stop, known, deadline)
            self._pin(path, answer.version)
            parts.append(answer.data)
            at += len(answer.data)
            if at < min(stop, answer.version.size):
                raise TransientError(answer.cut or f"the response ended at byte {at}")

        began = time.perf_counter()
        try:
            self._retried(f"{self.where(path)}, bytes {start} to {stop}", request)
        finally:
            self._traffic.add(fetch_s=time.perf_counter() - began)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _retried(self, what: str, request: Callable[[Deadline], _T]) -> _T:
        """Repeats `request(deadline)`, with pauses, until it returns or raises anything but a `TransientError`.

        Raises:
            StorageError: the time is over. It counts from the first attempt.
        """
        failures: list[str] = []
        stop = self._stop  # another thread that closes the store replaces it
        with slot(self._host, stop):
            deadline = Deadline(self._patience, stop)
            while True:
                if stop.is_set():
                    raise given_up(what, failures, deadline, 0)
                try:
                    found = bounded(request, deadline)
                    self._patience.reached = True
                    return found
                except TransientError as error:
                    failure = error.with_traceback(None)  # which would refer to this frame
                failures.append(str(failure))
                pause = pause_s(len(failures), failure.after_s, deadline)
                if deadline.left(failure.unreachable) <= pause:
                    raise given_up(what, failures, deadline, deadline.allowed_s(failure.unreachable))
                self._traffic.add(retries=1)
                deadline.sleep(pause)

    def _refusal(self, path: str, status: int, words: str = "", after_s: float | None = None) -> Exception:
        """The exception for an HTTP status, which `words` says in messages. The server asks for a pause of `after_s` s."""
        where, words = self.where(path), words or f"HTTP {status}"
        if status in (404, 410):
            return missing_file(where, path, words)
        if status in (401, 403):
            return StorageError(f"{where}: access denied ({words}); {self.hint}")
        if status in AGAIN or status < 300:
            return TransientError(words, after_s)
        return StorageError(f"{where}: cannot be read ({words}); check the address and storage_options")

    # -- the cache

    def _name(self, path: str) -> str:
        """The file's name in the cache, whatever its version."""
        return f"{self._source} {path}"

    def _known_size(self, path: str) -> int | None:
        """The size from a request, of this run or of the run that filled the cache."""
        if path not in self._sizes and self._cache is not None and self.frozen:
            size = self._cache.size(self._name(path))
            if size is not None:
                self._sizes.setdefault(path, size)
        return self._sizes.get(path)

    def _tag(self, cache: DiskCache, path: str) -> str:
        """The file's version in the cache; empty if it is unknown. Asks for it if something of the file is cached."""
        if self.frozen:
            return "frozen"
        if path not in self._tags and cache.size(self._name(path)) is not None:
            self._stat(path)
        return self._tags.get(path, "")

    def _read_cached(self, cache: DiskCache, path: str, start: int, stop: int) -> bytes:
        """Bytes of a file: whole blocks from the cache, and those that are not there over the network."""
        first, last, fetched = start // BLOCK, -(-stop // BLOCK), 0
        name = self._name(path)
        blocks = cache.read(name, self._tag(cache, path), first, last)
        if None in blocks:
            with cache.fetching(name, first, last):
                # Another process may have fetched them while this one waited.
                blocks = cache.read(name, self._tag(cache, path), first, last)
                for there, run in itertools.groupby(range(first, last), lambda number: blocks[number - first] is not None):
                    numbers = list(run)
                    begin, end = numbers[0] * BLOCK, (numbers[-1] + 1) * BLOCK
                    known_end = min(end, self._sizes.get(path, end))
                    if there or begin >= known_end:  # beyond the end of a file whose size was unknown before
                        continue
                    data = self._fetch(path, begin, known_end)
                    if tag := self._tag(cache, path):
                        cache.write(name, tag, numbers[0], data, self._sizes[path])
                    for number in numbers:
                        at = number * BLOCK - begin
                        blocks[number - first] = data[at : at + BLOCK]
                    fetched += max(min(begin + len(data), stop) - max(begin, start), 0)
        found = b"".join(block for block in blocks if block)[start - first * BLOCK : stop - first * BLOCK]
        self._traffic.add(cached_bytes=len(found) - fetched)
        return found

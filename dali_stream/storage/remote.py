"""Base class of stores on a network, with retries, a version check of each file, and a cache."""

from __future__ import annotations

import abc
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from dali_stream.errors import DaliStreamError, DatasetError, StorageError
from dali_stream.observe.waiting import working
from dali_stream.storage.cache import CACHE_BLOCK, DiskCache
from dali_stream.storage.retry import (
    AGAIN,
    TIMED_OUT,
    Deadline,
    Patience,
    TransientError,
    bounded,
    end_idle,
    given_up,
    pause_s,
    reading,
    slot,
    tell_end,
    tell_retry,
)
from dali_stream.storage.store import Store, Traffic, checked, missing_file

_T = TypeVar("_T")
Guess = Callable[[str, Callable[[str], bool]], list[str]]


class Version(NamedTuple):
    """Identifier of one state of a file.

    Attributes:
        size: Size in bytes.
        tag: ETag, generation or modification time. Empty if the storage reports none.
    """

    size: int
    tag: str = ""


class Answer(NamedTuple):
    """Result of one request.

    Attributes:
        version: Version of the file.
        data: Bytes from the start of the range. They are fewer than requested if the file or the connection ended.
        cut: Reason why the response ended early, or None.
    """

    version: Version
    data: bytes
    cut: str | None = None


class RemoteStore(Store):
    """Store on a network. All reads of a file must return the same version. If a file changes, `StorageError` is raised.

    A subclass implements one protocol. Each call of its methods `_get`, `_head` and `_list` is one attempt of one request. The
    methods may block, and several threads call them at the same time. They raise a `TransientError` for a retryable failure, a
    `DatasetError` for a missing file, and a `StorageError` for any other failure. Neither the messages of these errors nor
    their chains of causes may contain credentials.

    Args:
        address: Root without credentials, for messages.
        host: Host whose connection slots the requests use.
        patience: Time limits of requests. Default: see `Patience`.
        cache: Disk cache of fetched blocks. Default: none.
        guess: Function that returns the files in a folder, for a protocol without listings. See `open_store`. Default: none.
        source: Name of the root in the cache, without credentials. Default: `address`.

    Attributes:
        frozen: Whether files never change, so that the name of a file identifies its content.
        hint: Instructions for the user on how to provide credentials.
    """

    remote = True
    frozen = False
    hint = "Give credentials in storage_options"

    _is_session = False
    _new: list[str] | None = None  # files whose version was recorded since the last call of `take_versions`

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
        # Threads fill these dicts with setdefault, which is atomic and keeps the first value, so the dicts need no lock.
        self._sizes: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._traffic, self._stop = Traffic(), threading.Event()

    @abc.abstractmethod
    def _get(self, path: str, start: int, stop: int, version: Version | None, deadline: Deadline) -> Answer:
        """Request bytes [start, stop) of a file.

        Args:
            path: Path of the file.
            start: First byte.
            stop: End of the range. It may exceed the size of the file.
            version: Version of earlier requests, or None.
            deadline: Time limit of the request with all its attempts.

        Returns:
            Bytes of the range, and the current version. If that differs from `version`, the bytes may be missing.
        """

    @abc.abstractmethod
    def _head(self, path: str, deadline: Deadline) -> Version:
        """Return the current version of a file."""

    @abc.abstractmethod
    def _list(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Return the sizes of the files below a folder at any depth, by path."""

    @property
    def traffic(self) -> Traffic:
        """Requests, bytes and time of all reads so far."""
        return self._traffic

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. This sends a request only if no read or listing has returned the size before."""
        size = self._known_size(checked(path))
        return self._stat(path).size if size is None else size

    def exists(self, path: str) -> bool:
        """Return whether a file exists.

        Raises:
            StorageError: If the storage does not respond or denies access.
        """
        checked(path)
        try:
            self.size(path)
        except DatasetError:
            return False
        return True

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file, or fewer if the file ends before `stop`."""
        size = self._known_size(checked(path))
        stop = stop if size is None else min(stop, size)
        if stop <= start:
            return b""
        if self._cache is None:
            return self._fetch(path, start, stop)
        return self._read_cached(self._cache, path, start, stop)

    def files(self, folder: str) -> list[str]:
        """Return the sorted paths of the files below a folder at any depth.

        Without listings (HTTP), these are the files that `guess` returns.
        """
        checked(folder)
        if self._guess is not None and not self.listings:
            return self._guess(folder, self.exists)
        sizes = self._retried(self.where(folder), lambda deadline: self._list(folder, deadline))
        for path, size in sizes.items():
            self._pin_size(path, size)
        return sorted(sizes)

    def version(self, path: str) -> str:
        """Return the tag of a file that was read, or an empty string if it is unknown."""
        return self._tags.get(path, "")

    def identity(self, path: str) -> str:
        """See `Store.identity`. The name of a frozen file identifies its content, also if no request has returned its tag."""
        if self.frozen:
            return self._name(path)
        tag = self.version(path)
        return f"{self._name(path)} {self.size(path)} {tag}" if tag else ""

    def session(self) -> RemoteStore:
        """Return a view of this store for one of several users. It shares versions, connections and counts with the store.

        Its `close` ends the reads that are made through the view, also those that begin later, and no others.
        """
        session = object.__new__(type(self))
        vars(session).update(vars(self))
        session._stop, session._is_session = threading.Event(), True
        return session

    def __getstate__(self) -> dict[str, Any]:
        # Dicts are copied, because other threads may add to them during pickling.
        state = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        return {**state, "_stop": None, "_traffic": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._traffic, self._stop = Traffic(), threading.Event()

    def close(self) -> None:
        """End reads in progress, which raise `StorageError`, and close connections. A session ends later reads as well."""
        stop = self._stop
        if not self._is_session:
            self._stop = threading.Event()
        stop.set()
        self.release()

    def release(self) -> None:
        """Close idle connections, and end idle threads. Subclasses close their own connections as well."""
        end_idle()

    # -- versions

    def note_versions(self) -> None:
        """Note from now on which files are read for the first time, for `take_versions`."""
        self._new = []

    def take_versions(self) -> dict[str, tuple[int, str]]:
        """Return the versions, {path: (size, tag)}, that were noted since the last call."""
        paths = {self._new.pop() for _ in range(len(self._new))} if self._new else ()
        return {path: (self._sizes[path], self._tags.get(path, "")) for path in paths if path in self._sizes}

    def pin(self, versions: Mapping[str, tuple[int, str]]) -> None:
        """Take over versions that another process has read. Raises StorageError if a file has another version here."""
        for path, version in versions.items():
            self._pin(path, Version(*version))

    def _stat(self, path: str) -> Version:
        version = self._retried(self.where(path), lambda deadline: self._head(path, deadline))
        self._pin(path, version)
        return version

    def _pin(self, path: str, version: Version) -> None:
        """Record the first version of a file, or compare a later one with it.

        Some servers send a tag in only some of their responses, so tags are compared only if both responses have one.

        Raises:
            StorageError: If the file has changed.
        """
        self._pin_size(path, version.size)
        is_new = self._new is not None and version.tag and not self._tags.get(path)
        tag = self._tags.setdefault(path, version.tag)
        if version.tag and not tag:
            self._tags[path] = version.tag
        if is_new and self._new is not None:
            self._new.append(path)
        if tag and version.tag and tag != version.tag:
            self._changed(path, f"it still has {version.size} bytes, but another tag (ETag, generation or time)")

    def _pin_size(self, path: str, size: int) -> None:
        if self._new is not None and path not in self._sizes:
            self._new.append(path)
        first_size = self._sizes.setdefault(path, size)
        if first_size != size:
            self._changed(path, f"it had {first_size} bytes and now has {size}")

    def _changed(self, path: str, how: str) -> NoReturn:
        raise StorageError(
            f"{self.where(path)} changed during the run: {how}. Bytes of two versions are never mixed. Start again when "
            "nothing writes to the dataset, or read a fixed copy of it"
        )

    # -- requests

    def _fetch(self, path: str, start: int, stop: int) -> bytes:
        """Read a range over the network. After a failure, only the bytes that are still missing are requested again."""
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
            self._retried(self.where(path), request, f", bytes {start} to {stop}")
        finally:
            self._traffic.add(fetch_s=time.perf_counter() - began)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _retried(self, where: str, request: Callable[[Deadline], _T], part: str = "") -> _T:
        """Return `request(deadline)`. After each `TransientError`, pause and call it again.

        Args:
            where: Name of the file or folder. Failures of all its reads count together, see `Outage`.
            request: Function that makes one attempt.
            part: Part of the file, for messages. Default: none.

        Raises:
            StorageError: If the time limit is exceeded, or the store is closed. The time starts with the first attempt and does
                not include waiting for a connection slot.
        """
        failures: list[str] = []
        stop = self._stop  # a local variable, because `close` replaces the attribute
        with reading(self._host, where) as (host, file), working("requests {}{}", where, part):
            deadline = Deadline(self._patience, stop, (host, file))
            while True:
                with slot(self._host, deadline):  # not held during pauses, so that other reads can use it
                    if stop.is_set() or (not failures and deadline.is_given_up()):
                        raise given_up(where + part, failures, deadline, deadline.allowed_s())
                    began = deadline.elapsed()
                    try:
                        answer = bounded(request, deadline)
                    except TransientError as error:
                        failure = error.with_traceback(None)  # the traceback would refer to this frame
                    except DaliStreamError:  # the host answers, e.g. that the file does not exist
                        tell_end(host, file, self._patience)
                        raise
                    else:
                        tell_end(host, file, self._patience)
                        self._patience.reached = True
                        return answer
                deadline.failed = True
                failures.append(str(failure))
                took_s = deadline.elapsed() - began if TIMED_OUT in failures[-1] else 0.0
                if not stop.is_set():
                    host.failed(failures[-1], took_s)
                    file.failed(failures[-1], took_s)
                pause = pause_s(len(failures), failure.after_s, deadline)
                if deadline.left(failure.unreachable) <= pause:
                    raise given_up(where + part, failures, deadline, deadline.allowed_s(failure.unreachable))
                self._traffic.add(retries=1)
                tell_retry(self._host, where + part, str(failure))
                deadline.sleep(pause)

    def _refusal(self, path: str, status: int, words: str = "", after_s: float | None = None) -> Exception:
        """Return the exception for an HTTP status.

        Args:
            path: Path of the file.
            status: HTTP status, or 0 if it is unknown.
            words: Description of the failure for messages. Default: the HTTP status.
            after_s: Pause that the server requests, in seconds.
        """
        where, words = self.where(path), words or f"HTTP {status}"
        if status in (404, 410):
            return missing_file(where, path, words)
        if status in (401, 403):
            return StorageError(f"{where}: access denied ({words}). {self.hint}")
        if status in AGAIN or status < 300:
            return TransientError(words, after_s)
        return StorageError(f"{where}: cannot be read ({words}). Check the address and storage_options")

    # -- the cache

    def _name(self, path: str) -> str:
        """Return the name of a file in the cache. The name does not depend on the version of the file."""
        return f"{self._source} {path}"

    def _known_size(self, path: str) -> int | None:
        """Return the size of a file, or None if no request has returned it. A frozen store also looks it up in the cache."""
        if path not in self._sizes and self._cache is not None and self.frozen:
            size = self._cache.size(self._name(path))
            if size is not None:
                self._sizes.setdefault(path, size)
        return self._sizes.get(path)

    def _tag(self, cache: DiskCache, path: str) -> str:
        """Return the current version of a file, as a name for the cache, or an empty string if it is unknown.

        An unknown version is requested only if a part of the file is cached. Otherwise, all blocks are misses anyway.
        """
        if self.frozen:
            return "frozen"
        if path not in self._tags and cache.size(self._name(path)) is not None:
            self._stat(path)
        return self._tags.get(path, "")

    def _read_cached(self, cache: DiskCache, path: str, start: int, stop: int) -> bytes:
        """Read a range in whole blocks from the cache. Missing blocks are fetched and cached."""
        first, last, fetched = start // CACHE_BLOCK, -(-stop // CACHE_BLOCK), 0
        name = self._name(path)

        def read() -> list[bytes | None]:
            damaged = partial(self._traffic.add, failed_checksums=1)
            return cache.read(name, self._tag(cache, path), first, last, damaged)

        blocks = read()
        if None in blocks:
            with cache.fetching(name, first, last):
                # Another process may have fetched the blocks while this one waited for the lock.
                blocks = read()
                for is_cached, run in itertools.groupby(range(first, last), lambda number: blocks[number - first] is not None):
                    numbers = list(run)
                    begin, end = numbers[0] * CACHE_BLOCK, (numbers[-1] + 1) * CACHE_BLOCK
                    known_end = min(end, self._sizes.get(path, end))
                    if is_cached or begin >= known_end:  # cached, or beyond the end of the file, whose size is known by now
                        continue
                    data = self._fetch(path, begin, known_end)
                    if tag := self._tag(cache, path):
                        cache.write(name, tag, numbers[0], data, self._sizes[path])
                    for number in numbers:
                        at = number * CACHE_BLOCK - begin
                        blocks[number - first] = data[at : at + CACHE_BLOCK]
                    # Only the requested bytes count, since the blocks at both ends may have more.
                    fetched += max(min(begin + len(data), stop) - max(begin, start), 0)
        data = b"".join(block for block in blocks if block)[start - first * CACHE_BLOCK : stop - first * CACHE_BLOCK]
        self._traffic.add(cached_bytes=len(data) - fetched)
        return data

"""Reads, keeps and evicts rows, indices and encoded video as the schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.cache.indices import IndexCache
from dali_stream.cache.rows import RowCache, size_of
from dali_stream.cache.video import BlockCache, InPlace, Video
from dali_stream.counters import Counters
from dali_stream.errors import DecodeError
from dali_stream.lerobot.combined import row_reader
from dali_stream.lerobot.dataset import CLOCKS
from dali_stream.lerobot.rows import Found
from dali_stream.lerobot.source import Source
from dali_stream.mp4.index import LACKING, VideoIndex
from dali_stream.mp4.timing import find_packets
from dali_stream.schedule.byte_cache import Drop
from dali_stream.schedule.reads import Read
from dali_stream.storage.retry import PER_HOST
from dali_stream.workers import Priority, Workers

Int64 = npt.NDArray[np.int64]
# Threads. While the pools fill, a batch misses blocks all over them, and waits for as many round trips as these do not do at
# once: at 50 ms 16 threads bring 21 MB/s, however fast the network is.
FETCHERS = PER_HOST


class Pool(Protocol):
    """What reads: fetch threads, or the caller itself."""

    def submit(self, call: Callable[..., Any], /, *args: Any, priority: Priority = ()) -> Future[Any]:
        """Schedules a call."""
        ...

    def stop(self) -> None:
        """Cancels reads that have not begun."""
        ...

    def join(self) -> None:
        """Waits for the end, after `stop`."""
        ...


class AtOnce:
    """A pool without threads: it runs calls in `submit`, for files on the disk."""

    def submit(self, call: Callable[..., Any], /, *args: Any, priority: Priority = ()) -> Future[Any]:
        """Runs a call."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        """There is nothing to cancel."""

    def join(self) -> None:
        """There is nothing to wait for."""


class Memory:
    """Rows, indices and encoded video. Used by the planner thread only, except the views of `video`, which any thread may read.

    Args:
        source: the episodes.
        indices: which outlive this.
        at_once: bytes of row groups that are read at the same time.
        counters: what to add to.

    Attributes:
        video: the encoded video.
    """

    def __init__(self, source: Source, indices: IndexCache, at_once: int, counters: Counters) -> None:
        self._source, self._indices, self._counters = source, indices, counters
        self._store = source.data_store.session()
        self._reader = row_reader(source, self._store, at_once)
        self._rows = RowCache(len(source.lengths))
        self._coming: dict[tuple[str, int], Future[Any]] = {}
        self._pool: Pool
        self.video: Video
        if self._store.remote:
            fetchers = Workers("dali_stream fetch", FETCHERS)
            self._pool, self.video = fetchers, BlockCache(self._store, fetchers, self._path)
        else:
            self._pool, self.video = AtOnce(), InPlace(self._store, source.videos)

    def begin(self, reads: Iterable[Read]) -> None:
        """Begins to read rows and indices."""
        for read in reads:
            call = self._read_index if read.camera else self._read_rows
            self._coming[read.camera, read.number] = self._pool.submit(call, read, priority=(read.step, 0))

    def names(self) -> Future[dict[str, list[dict[int, str]]]]:
        """Begins to read `Source.names`. Errors as of `finish`."""
        return self._pool.submit(self._source.names)

    def finish(self, read: Read) -> tuple[int, Found]:
        """Waits for rows or an index: the bytes that they take, and the rows that came along.

        Raises:
            DatasetError: rows are missing or broken.
            StorageError: it cannot be read.
            CancelledError: `stop` was called.
        """
        found = self._coming.pop((read.camera, read.number)).result()
        if read.camera:
            return found, Found()
        self._rows.put(read.number, found[read.number])
        return size_of(found[read.number]), found

    def load(self, episodes: Iterable[int]) -> None:
        """Reads rows that are not there, for programs without a schedule. Errors as of `finish`."""
        for episode in episodes:
            if episode not in self._rows:
                read = Read(0, 0, "", episode, again=False)
                self.begin([read])
                self.finish(read)

    def keep(self, found: Found, episodes: Iterable[int]) -> None:
        """Caches rows of these episodes, which came along with others."""
        for episode in episodes:
            self._rows.put(episode, found[episode])

    def drop(self, drop: Drop) -> None:
        """Evicts rows, indices and blocks."""
        for episode in drop.rows:
            if self._coming.pop(("", episode), None) is None:
                self._rows.drop(episode)
        for camera, file in drop.indices:
            if (coming := self._coming.pop((camera, file), None)) is None:
                self._indices.drop(camera, file)
            else:  # it arrives later, or not at all
                coming.add_done_callback(partial(self._drop_index, camera, file))
        self.video.drop(drop.blocks)

    def gather(self, key: str, episode: Int64, frame: Int64) -> npt.NDArray[Any]:
        """Values of a feature: `episode` is (B,), `frame` (B,) or (B, T); the result has the shape of `frame` in front."""
        return self._rows.gather(key, episode, frame)

    def index(self, camera: str, episode: int) -> VideoIndex:
        """The index of the file that holds an episode. Raises DecodeError where it has none."""
        return self._indices.of(camera, episode, self._store)

    def packets(self, camera: str, episode: int) -> Int64:
        """Per frame of an episode, its packet; `LACKING` where the video has none."""
        seconds = self._source.seconds(episode, {key: self._rows.rows(key, episode) for key in CLOCKS})
        try:
            index = self.index(camera, episode)
        except DecodeError:  # reported when a frame of it is asked for
            return np.full(len(seconds), LACKING, np.int64)
        return find_packets(index, self._source.interval(camera, episode), seconds, *self._source.timing(episode))

    def stop(self) -> None:
        """Cancels all reads: waiting threads get an error. Returns at once."""
        self._pool.stop()
        if self._store.remote:
            self._store.close()

    def join(self) -> None:
        """Waits for the threads to end, after `stop`."""
        self._pool.join()

    def _read_rows(self, read: Read) -> Found:
        found = self._reader.read(read.number)
        if self._store.remote and not read.again:
            self._counters.add(needed_bytes=found.take_bytes())
        return found

    def _drop_index(self, camera: str, file: int, _: Future[Any]) -> None:
        self._indices.drop(camera, file)

    def _read_index(self, read: Read) -> int:
        try:
            return self._indices.read(read.camera, read.number, self._store).nbytes
        except DecodeError:  # reported when a frame of it is asked for
            return 0

    def _path(self, camera: str, episode: int) -> str:
        return self._source.path(camera, self._indices.file(camera, episode))

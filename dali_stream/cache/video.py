"""Cache of blocks of encoded video, which are fetched before decode tasks read them."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from dali_stream.observe.tracing import span
from dali_stream.schedule.episodes import BlockName
from dali_stream.schedule.video import Fetch
from dali_stream.storage import Store
from dali_stream.storage.store import StoreView
from dali_stream.system.workers import Workers


class _Block:
    """Byte range of a file. `planned` is the batch that requested it last, perhaps ahead of the first batch that needs it."""

    __slots__ = ("_lock", "data", "done", "planned", "start", "stop")

    def __init__(self, planned: int, start: int, stop: int) -> None:
        self.planned, self.start, self.stop = planned, start, stop
        self.data = b""
        self.done: Future[None]
        self._lock = threading.Lock()  # held by the decode task that repeats the request

    def wait(self, batch: int, read: Callable[[_Block], None]) -> bytes:
        """Return the bytes. Wait for them if necessary.

        A request that was made ahead for an earlier batch may have failed for a reason that has passed. The first decode task
        of a batch that finds this repeats it, once for all tasks of the batch.

        Args:
            batch: Batch that needs the block.
            read: Function that requests a block and sets its `data`.

        Raises:
            DaliStreamError: If the request has failed, and was repeated for this batch or made for it in the first place.
            CancelledError: If the threads that fetch were stopped.
        """
        if self.planned < batch and self.done.exception():
            with self._lock:
                if self.planned < batch:
                    self.planned = batch
                    read(self)
                    self.done = Future()
                    self.done.set_result(None)
        self.done.result()
        return self.data


class BlockCache:
    """Cache of blocks of remote video files. Only the planner's thread may use it, but any thread may use its views.

    Args:
        store: Store of the files.
        pool: Threads that fetch.
        path: Function from a camera and an episode to the path of the file that contains the episode.
    """

    def __init__(self, store: Store, pool: Workers, path: Callable[[str, int], str]) -> None:
        self._store, self._pool, self._path = store, pool, path
        self._blocks: dict[BlockName, _Block] = {}

    def fetch(self, batch: int, ranges: Iterable[Fetch]) -> list[Future[None]]:
        """Begin the requests in the plan of a batch.

        Args:
            batch: Number of the batch.
            ranges: Requests of its plan.

        Returns:
            Future of each request. Its result is None, or it raises the error of the request.
        """
        return [self._fetch(batch, fetch) for fetch in ranges]

    def drop(self, blocks: Iterable[BlockName]) -> None:
        """Evict blocks. Views that contain them remain valid, and keep their bytes in memory."""
        for name in blocks:
            del self._blocks[name]

    def view(self, batch: int, needed: Iterable[BlockName]) -> Mapping[str, Store]:
        """Return the stores from which a batch reads its encoded video.

        Args:
            batch: Number of the batch.
            needed: Blocks that the batch needs.

        Returns:
            {camera with blocks: store that reads these blocks from memory}. The store waits for blocks that are being fetched.
        """
        blocks = dict[str, list[tuple[str, _Block]]]()
        for name in needed:
            blocks.setdefault(name[0], []).append((self._path(*name[:2]), self._blocks[name]))
        return {camera: _View(self._store, batch, needed_blocks) for camera, needed_blocks in blocks.items()}

    def _fetch(self, planned: int, fetch: Fetch) -> Future[None]:
        blocks = [_Block(planned, *ends) for ends in fetch.ranges]
        path = self._path(fetch.camera, fetch.episode)
        done = self._pool.submit(_read, self._store, fetch.batch, path, blocks, priority=(fetch.batch, 1))
        for number, block in enumerate(blocks, start=fetch.first):
            block.done = done
            self._blocks[fetch.camera, fetch.episode, number] = block
        return done


def _read(store: Store, batch: int, path: str, blocks: list[_Block]) -> None:
    """Read adjacent blocks for a batch with one request."""
    begin = blocks[0].start
    with span("fetch video", batch):
        data = store.read(path, begin, blocks[-1].stop)
    for block in blocks:
        block.data = data[block.start - begin : block.stop - begin]


class _View(StoreView):
    """Store that reads some blocks from memory. It waits for those that are being fetched. `store` reads all other bytes."""

    def __init__(self, store: Store, batch: int, blocks: list[tuple[str, _Block]]) -> None:
        super().__init__(store)
        self._batch = batch
        self._files: dict[str, list[_Block]] = {}
        for path, block in sorted(blocks, key=lambda each: (each[0], each[1].start, each[1].stop)):
            kept = self._files.setdefault(path, [])
            # Blocks of episodes that share a GOP overlap, and one may contain another. Contained blocks are left out, so that
            # both starts and ends increase: `read` then finds the right block with a binary search for the start.
            if not kept or kept[-1].stop < block.stop:
                kept.append(block)

    def read(self, path: str, start: int, stop: int) -> bytes:
        blocks = self._files.get(path, [])
        place = bisect.bisect_right(blocks, start, key=lambda block: block.start) - 1
        parts, at = [], start
        while 0 <= place < len(blocks) and at < stop and blocks[place].start <= at < blocks[place].stop:
            block = blocks[place]
            data = block.wait(self._batch, lambda block: _read(self.store, self._batch, path, [block]))
            part = data[at - block.start : stop - block.start]
            parts.append(part)
            at += len(part)
            if at < min(stop, block.stop):  # the fetch returned less: the file has become shorter
                return b"".join(parts)
            place += 1
        if at < stop:
            parts.append(self.store.read(path, at, stop))
        return parts[0] if len(parts) == 1 else b"".join(parts)

"""Encoded video of remote files in memory: which blocks are fetched for each batch and ahead of it, and which are evicted.

The blocks of the first batch are fetched alone, so that it is delivered soon. After that, blocks of later batches are fetched
ahead, in the order of the batches and up to a limit. If the memory is full, the blocks whose next uses are farthest away are
evicted.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from dali_stream.checks.arguments import budget_text
from dali_stream.checks.arrays import NONE, Int64, Mask
from dali_stream.errors import MemoryBudgetError
from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import span
from dali_stream.schedule.budget import GROWTH
from dali_stream.schedule.plan import Schedule
from dali_stream.schedule.samples import NEVER, Samples, nearest
from dali_stream.storage import Store
from dali_stream.storage.store import StoreView
from dali_stream.system.workers import Workers

RANGE = 4 << 20  # maximum bytes of a request: large enough to be efficient, small enough to delay other requests only briefly
# A full cache evicts 1/32 of its bytes more than necessary. Each search for blocks to evict computes the next uses of all
# frames of open episodes, so it should not be repeated for every batch.
_SLACK = 32
_FINISHED_EVERY = 16  # number of batches after which the blocks whose frames are all cached are evicted


class _Block:
    """Byte range of a file. `requested_by` is the batch that was planned when it was requested, perhaps for a later one."""

    __slots__ = ("_lock", "data", "done", "requested_by", "start", "stop")

    def __init__(self, requested_by: int, start: int, stop: int) -> None:
        self.requested_by, self.start, self.stop = requested_by, start, stop
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
        if self.done.exception():
            with self._lock:
                if self.requested_by < batch and self.done.exception():
                    try:
                        read(self)
                        self.done = Future()
                        self.done.set_result(None)
                    finally:
                        self.requested_by = batch
        self.done.result()
        return self.data


class BlockCache:
    """Cache of the blocks of remote video files. Only the planner's thread may use it, but any thread may use its views.

    For each batch, `request` is called once.

    Args:
        schedule: Schedule of the batches, with the table of open episodes, the windows, and the caches of decoded frames.
        block: Bytes of a block.
        look_ahead: Maximum number of batches to fetch ahead.
        store: Store of the files.
        fetchers: Threads that fetch.
        path: Function from a camera and an episode to the path of the file that contains the episode.
        counters: Counters to add to.

    Attributes:
        room: Bytes that encoded video may take.
        others: Bytes that rows and indices take.
        bytes: Bytes of the blocks that are in the table or being fetched. A batch in progress that uses an evicted block keeps
            it until its tasks have ended.
        evicted_early: Number of blocks that were evicted although a later batch was known to need them.
        requests: Requests that the last call of `request` has begun.
    """

    def __init__(
        self,
        schedule: Schedule,
        block: int,
        look_ahead: int,
        store: Store,
        fetchers: Workers,
        path: Callable[[str, int], str],
        counters: Counters,
    ) -> None:
        self._table, self._frames, self._block, self._look_ahead = schedule.table, schedule.frames, block, look_ahead
        self._windows = {camera: schedule.windows[camera] for camera in self._table.blocks.cameras}
        self._store, self._fetchers, self._path, self._counters = store, fetchers, path, counters
        self.room = self.others = self.bytes = self.evicted_early = 0
        self.requests: list[Future[None]] = []
        self._now = NONE  # batch of the last call of `request`
        self._fetched = NONE  # last batch whose blocks were requested ahead
        # First batch whose call may fetch ahead. If the memory is full of blocks that are needed sooner, this is set to a later
        # batch, since the next batches would find the memory full as well.
        self._retry_at = 0
        # Number of batches from the last eviction to the first use of a block that it evicted. The memory holds about the
        # blocks that are needed within this time, so an additional block is fetched only if it is needed sooner.
        self._soonest_evicted = NEVER

    def close(self, episode: int) -> None:
        """Evict the blocks of an episode before it is closed. Blocks that a later batch needs will be fetched again."""
        for camera in self._windows:
            blocks = self._table.blocks.entries(camera, episode)
            held = blocks[self._table.blocks.held(blocks)]
            used, _ = self._uses(camera, self._table.rows_of(episode))
            self.evicted_early += int(np.isin(held, used).sum())
            self._evict(held)

    def request(self, samples: Samples, decoded: Mapping[str, Int64], ahead: Iterable[Samples]) -> Mapping[str, Store]:
        """Begin to fetch the blocks that a batch and those after it need. Evict others if memory is short.

        Args:
            samples: Samples of the batch.
            decoded: {camera: rows of the frames that the batch decodes}.
            ahead: Batches after it.

        Returns:
            {camera with blocks: store from which the batch reads its encoded video}. The store waits for blocks that are being
            fetched. It remains valid if blocks are evicted.

        Raises:
            MemoryBudgetError: If the blocks of the batch alone do not fit into the memory.
        """
        if not self._windows:  # all files are read in place
            return {}
        self._now, self.requests, blocks = samples.number, [], self._table.blocks
        needed = self._needed(decoded)
        # Failed reads ahead are requested again here, by many threads at a time, and not by the few that decode.
        self._evict(np.array([block for block in needed.tolist() if _has_failed(blocks.data[block])], np.int64))
        fresh = needed[blocks.epoch[needed] != samples.epoch]
        self._counters.add(needed_bytes=int(blocks.sizes(fresh).sum()))
        # Needed blocks are marked before room is made, so that they are not evicted for missing ones.
        blocks.epoch[fresh], blocks.touched[needed] = samples.epoch, self._now
        missing = needed[~blocks.held(needed)]
        if not self._make_room(missing, self._now):
            larger = 2 * (self.others + int(blocks.sizes(needed).sum()))  # rows, indices and encoded video get up to half
            raise MemoryBudgetError(
                f"memory_budget leaves {self.room} bytes for encoded video, of which {self.bytes} are in use, but a batch "
                f"needs {blocks.sizes(missing).sum()} more. Use a larger memory_budget, such as "
                f'"{budget_text(larger)}", or a smaller batch_size'
            )
        self._submit(self._now, missing)
        views: dict[str, list[tuple[str, _Block]]] = {}
        for block in needed.tolist():
            camera, episode = blocks.owner(block)
            views.setdefault(camera, []).append((self._path(camera, episode), blocks.data[block]))
        self._fetch_ahead(ahead)
        if self._now % _FINISHED_EVERY == _FINISHED_EVERY - 1:
            self._evict_finished()
        return {camera: _View(self._store, self._now, its_blocks) for camera, its_blocks in views.items()}

    def _fetch_ahead(self, ahead: Iterable[Samples]) -> None:
        """Fetch blocks for later batches, up to the first one with an episode that is not open, or until the memory is full."""
        if self._now < self._retry_at:
            return
        for samples in itertools.islice(ahead, min(GROWTH * self._now, self._look_ahead)):
            batch = samples.number
            if batch <= self._fetched:
                continue
            if not self._table.is_open(samples.episode).all():
                break
            # Frames that are cached now may be evicted before this batch is planned. Its own plan then fetches their blocks.
            frames = {camera: np.unique(window.shown(samples).frames) for camera, window in self._windows.items()}
            rows = {camera: self._table.rows(each[~self._is_cached(camera, each)]) for camera, each in frames.items()}
            needed = self._needed(rows)
            missing = needed[~self._table.blocks.held(needed)]
            if not self._make_room(missing, batch):
                # Memory is freed when batches before this one are planned. Trying again only after a quarter of them avoids
                # attempts that would fail.
                self._retry_at = self._now + 1 + (batch - self._now) // 4
                break
            self._submit(batch, missing)
            self._fetched = batch

    def _make_room(self, missing: Int64, later_than: int) -> bool:
        """Make room for missing blocks. Evict only blocks whose next use is after batch `later_than`.

        Args:
            missing: Blocks that need room.
            later_than: Batch that needs the missing blocks.

        Returns:
            Whether the missing blocks fit. If not, nothing is evicted.
        """
        blocks = self._table.blocks
        short = self.bytes + int(blocks.sizes(missing).sum()) - self.room
        if short <= 0:
            return True
        # All cameras share the memory, and their blocks are ranked together. With a fixed share per camera, one camera could
        # lack memory while another has some left, since bitrates and windows differ.
        next_use = np.full(len(blocks), NEVER, np.int64)
        for camera in self._windows:
            np.minimum.at(next_use, *self._uses(camera, self._table.rows_with_blocks(camera)))
        candidates = np.flatnonzero(self._is_idle() & (next_use > later_than))
        total = int(blocks.sizes(candidates).sum())
        if total < short:
            return False
        # If blocks have the same next use, such as `NEVER`, `nearest` keeps those that precede the others in the array. After
        # this sort, these are the most recently used ones.
        candidates = candidates[np.argsort(-blocks.touched[candidates], kind="stable")]
        keep = nearest(next_use[candidates], total - short - self.room // _SLACK, blocks.sizes(candidates))
        evicted = candidates[~keep]
        self._soonest_evicted = int(next_use[evicted].min()) - self._now
        self.evicted_early += int((next_use[evicted] < NEVER).sum())
        self._evict(evicted)
        return True

    def _submit(self, batch: int, missing: Int64) -> None:
        """Request the missing blocks of a batch. `_make_room` has made room for them.

        Args:
            batch: Batch that needs the blocks.
            missing: Blocks in increasing order.
        """
        blocks = self._table.blocks
        # All missing blocks are counted first, so that additional blocks cannot take their room.
        self._hold(missing)
        largest = max(min(RANGE, self.room // 128), self._block)
        # A request for a later batch may take longer, so it also fetches blocks that follow in the file. Its size doubles with
        # each batch of distance: fewer and larger requests are more efficient.
        wanted = min(largest, self._block << min(batch - self._now, 16))
        for group in blocks.groups(missing):
            if batch > self._now:
                room = min(wanted - int(blocks.sizes(group).sum()), self.room - self.bytes)
                following = self._following(int(group[-1]), room)
                self._hold(following)
                group = np.concatenate([group, following])
            path = self._path(*blocks.owner(int(group[0])))
            ends = np.cumsum(blocks.sizes(group))  # split into requests of at most about `largest` bytes
            for part in np.split(group, np.flatnonzero(np.diff((ends - 1) // largest)) + 1):
                held: list[_Block] = blocks.data[part].tolist()
                request = self._fetchers.submit(_read, self._store, batch, path, held, priority=(batch, 1))
                self.requests.append(request)
                for block in held:
                    block.done = request

    def _following(self, block: int, room: int) -> Int64:
        """Return the adjacent blocks after a block that are worth fetching in the same request.

        Args:
            block: Block that is fetched.
            room: Maximum number of bytes of the returned blocks together.
        """
        blocks = self._table.blocks
        camera, episode = blocks.owner(block)
        following = np.arange(block + 1, int(blocks.entries(camera, episode)[-1]) + 1)
        good = ~blocks.held(following) & (blocks.start[following] == blocks.stop[following - 1])
        good &= np.cumsum(blocks.sizes(following)) <= room
        following = following[np.logical_and.accumulate(good)]
        if not len(following):
            return following
        # If a block is needed later than the blocks that were just evicted, it would soon be evicted, too.
        before = self._now + min(self._soonest_evicted, NEVER - self._now)
        table, rows = self._table.cameras[camera], self._table.rows_of(episode)
        first = table.first_block[rows]
        rows = rows[(first + table.block_count[rows] - 1 > block) & (first <= following[-1])]
        used, next_use = self._uses(camera, rows)
        return following[np.logical_and.accumulate(np.isin(following, used[next_use < before]))]

    def _hold(self, blocks: Int64) -> None:
        table = self._table.blocks
        for block, start, stop in zip(blocks.tolist(), table.start[blocks].tolist(), table.stop[blocks].tolist(), strict=True):
            table.data[block] = _Block(self._now, start, stop)
        table.touched[blocks] = self._now
        self.bytes += int(table.sizes(blocks).sum())

    def _evict(self, blocks: Int64) -> None:
        self._table.blocks.data[blocks] = None
        self.bytes -= int(self._table.blocks.sizes(blocks).sum())

    def _evict_finished(self) -> None:
        """Evict the blocks whose frames are all cached. Do nothing if cached frames may be evicted, and decoded again."""
        if not self._frames or not all(cache.keeps_all for cache in self._frames.values()):
            return
        rows = {camera: self._table.rows_with_blocks(camera) for camera in self._windows}
        missing = {camera: each[~self._is_cached(camera, self._table.frames(each))] for camera, each in rows.items()}
        finished = self._is_idle()
        finished[self._needed(missing)] = False
        self._evict(np.flatnonzero(finished))

    def _needed(self, rows: Mapping[str, Int64]) -> Int64:
        """Return the blocks that decoding frames needs, in increasing order.

        Args:
            rows: {camera: rows of the frames}. Cameras whose video is not fetched are ignored.
        """
        blocks = [self._table.cameras[camera].blocks_of(rows[camera])[0] for camera in self._windows]
        return np.unique(np.concatenate([np.empty(0, np.int64), *blocks]))

    def _uses(self, camera: str, rows: Int64) -> tuple[Int64, Int64]:
        """Return the blocks that decoding some frames needs, with their next uses.

        Args:
            camera: Name of the camera.
            rows: Rows of the frames. Frames that are cached, or that no batch ahead shows, are ignored.

        Returns:
            Blocks, and for each the next batch that shows one of its frames, both of shape (n,). A block is repeated for each
            of its frames.
        """
        frames = self._table.frames(rows)
        next_use = self._windows[camera].uses.next(frames, self._now)
        used = next_use < NEVER
        used[used] = ~self._is_cached(camera, frames[used])
        blocks, index = self._table.cameras[camera].blocks_of(rows[used])
        return blocks, next_use[used][index]

    def _is_cached(self, camera: str, frames: Int64) -> Mask:
        """Return which frames need no encoded video, because they are decoded already (also on disk) or never shown."""
        cache = self._frames.get(camera)
        if cache is None:
            return np.zeros(len(frames), np.bool_)
        stored = self._table.cameras[camera].stored[self._table.rows(frames)]
        return (cache.slots_of(frames) != NONE) | stored | ~cache.needs(frames)

    def _is_idle(self) -> Mask:
        """Return a mask of the held blocks that the planned batch neither needs nor fetches. Only these may be evicted."""
        blocks = self._table.blocks
        every = np.arange(len(blocks))
        return blocks.held(every) & (blocks.touched[every] != self._now)


def _has_failed(block: _Block | None) -> bool:
    return block is not None and block.done.done() and not block.done.cancelled() and block.done.exception() is not None


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

    def joined(self, other: Store) -> Store | None:
        """See `Store.joined`."""
        if not isinstance(other, _View) or other.store is not self.store:
            return None
        blocks = [(path, block) for view in (self, other) for path, kept in view._files.items() for block in kept]
        return _View(self.store, max(self._batch, other._batch), blocks)

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

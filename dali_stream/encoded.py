"""Encoded video of a remote dataset in memory: fetched before it is needed, kept while it is.

A file is cut into blocks: whole GOPs, 64 KiB or a little more. The order of an epoch tells how often each block will be
needed (`expect`), so what is used up goes first when room is wanted, and nothing is fetched twice while there is room.

    expect   an episode comes up: its blocks are fetched as a few large ranges, by threads that have nothing urgent to do
    hold     a batch is made now: its blocks stay until it is decoded; what is not there yet is fetched at once
    read     a clip is packed: served out of the blocks, waiting for those that are on their way
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from dali_stream.blocks import BLOCK, BlockedFile, decoded
from dali_stream.counters import Counters
from dali_stream.errors import MemoryBudgetError
from dali_stream.storage import Store
from dali_stream.video.table import SampleTable
from dali_stream.workers import Priority, Workers

Int64 = npt.NDArray[np.int64]
Cuts = Callable[[], Int64]
RANGE = 4 << 20  # bytes of one request for what is fetched ahead: large for the server, small for who waits behind it
_log = logging.getLogger("dali_stream")


_Block = tuple[BlockedFile, int]


class Encoded(Store):
    """A store over a remote one that serves video from memory.

    Args:
        store: where the bytes are.
        fetchers: the threads that get them.
        room: tells how many bytes may be held now.
        counters: what to add to.
        block: bytes of a block, if `BLOCK` is too much for the room.
    """

    remote = True

    def __init__(
        self, store: Store, fetchers: Workers, room: Callable[[], int], counters: Counters, block: int = BLOCK
    ) -> None:
        self.address = store.address
        self._store, self._fetchers, self._room, self._counters = store, fetchers, room, counters
        self._block = min(block, BLOCK)
        self._range = max(min(RANGE, room() // 128), self._block)  # what is on its way comes on top of what is held
        self._files: dict[str, BlockedFile] = {}
        self._idle: OrderedDict[_Block, None] = OrderedDict()  # held, and nobody is going to ask; least recently used first
        self._waiting: OrderedDict[_Block, None] = OrderedDict()  # held, and a later batch asks
        self._postponed: list[tuple[Priority, int, BlockedFile, list[int]]] = []  # a heap, the soonest first
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._under_way = self._pinned = 0  # requests, batches
        self._begun = self._stopping = self._warned = False
        self._first: Priority | None = None  # the first batch, and how many cameras of it are not done
        self._first_left = 0
        self.nbytes = 0

    # ---- the planner

    def expect(self, priority: Priority, epoch: int, table: SampleTable, cuts: Cuts, samples: Int64) -> None:
        """An episode comes up of which these samples will be asked for in an epoch, each as often as it stands there.

        `cuts` gives the samples of the file at which episodes begin.
        """
        with self._changed:
            file = self._file(table, cuts)
            blocks, count = np.unique(file.blocks(decoded(table, samples)), return_counts=True)
            np.add.at(file.left.setdefault(epoch, np.zeros(len(file.first), np.int64)), blocks, count)
            for block in blocks.tolist():
                if (file, block) in self._idle:
                    del self._idle[file, block]
                    self._waiting[file, block] = None
            self._fetch_ahead(priority, file, blocks.tolist())

    def turn(self, epoch: int) -> None:
        """All epochs before this one are over: nobody asks for their samples any more, also not for those left out."""
        with self._changed:
            for file in self._files.values():
                for old in [e for e in file.left if e < epoch]:
                    del file.left[old]
                file.used = {e: used for e, used in file.used.items() if e >= epoch}
            for file, block in [key for key in self._waiting if not key[0].wanted(key[1])]:
                del self._waiting[file, block]
                self._idle[file, block] = None
            self._changed.notify_all()

    def hold(self, priority: Priority, epoch: int, uses: Iterable[tuple[SampleTable, Cuts, Int64]]) -> Callable[[], None]:
        """Has the blocks of these (table, cuts, samples) stay until the returned function is called, once.

        Waits for room that batches before this one take.

        Raises:
            MemoryBudgetError: the budget has no room for these alone.
        """
        with self._changed:
            self._first = priority if self._first is None else self._first
            first = priority == self._first
            self._first_left += first
            held = self._pin(epoch, uses)
            try:
                missing = self._wait_for_room(held)
            except BaseException:
                self._unpin(held)
                raise
            for file, blocks in _by_file(missing).items():
                for group in file.ranges(sorted(blocks), self._range):
                    self._fetch(priority, file, group)
        return lambda: self._release(held, first)

    def shrink(self) -> None:
        """Lets go of what does not fit any more, since `room` has become less."""
        with self._changed:
            self._make_room(0, early=True)

    def stop(self) -> None:
        """Wakes those who wait in `hold`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # ---- any thread

    def read(self, path: str, start: int, stop: int) -> bytes:
        file = self._files.get(path)
        if file is not None and stop > start:
            first, last = (np.searchsorted(file.start, [start, stop - 1], side="right") - 1).clip(0).tolist()
            begin = int(file.start[first])
            parts = [self._bytes(file, block) for block in file.end_to_end(first, last)]
            whole = b"".join(part for part in parts if part is not None) if len(parts) > 1 else parts[0]
            if whole is not None and None not in parts and begin <= start and stop <= begin + len(whole):
                return whole[start - begin : stop - begin]
        return self._store.read(path, start, stop)

    def size(self, path: str) -> int:
        return self._store.size(path)

    def exists(self, path: str) -> bool:
        return self._store.exists(path)

    def files(self, folder: str) -> list[str]:
        return self._store.files(folder)

    def close(self) -> None:
        self._store.close()

    # ---- inside; all but `_bytes`, `_get` and `_get_ahead` with the lock held

    def _file(self, table: SampleTable, cuts: Cuts) -> BlockedFile:
        if table.path not in self._files:
            self._files[table.path] = BlockedFile(table, cuts(), self._block)
        return self._files[table.path]

    def _pin(self, epoch: int, uses: Iterable[tuple[SampleTable, Cuts, Int64]]) -> list[_Block]:
        held: dict[_Block, None] = {}
        for table, cuts, samples in uses:
            file = self._file(table, cuts)
            blocks, count = np.unique(file.blocks(decoded(table, samples)), return_counts=True)
            used = file.used.setdefault(epoch, np.zeros(len(file.first), np.bool_))
            fresh = blocks[~used[blocks]]
            used[fresh] = True
            self._counters.add(needed_bytes=int((file.stop[fresh] - file.start[fresh]).sum()))
            np.subtract.at(file.left.setdefault(epoch, np.zeros(len(file.first), np.int64)), blocks, count)
            held |= {(file, block): None for block in blocks.tolist()}
        self._pinned += 1
        for key in held:
            key[0].pins[key[1]] += 1
            self._idle.pop(key, None)
            self._waiting.pop(key, None)
        return list(held)

    def _wait_for_room(self, held: list[_Block]) -> list[_Block]:
        """Those of the blocks that are neither there nor on their way, with room reserved for them."""
        while True:
            missing = [key for key in held if key[1] not in key[0].held]
            need = sum(file.size(block) for file, block in missing)
            if self._make_room(need, early=True):
                self.nbytes += need
                return missing
            if self._stopping or (self._pinned == 1 and not self._under_way):
                raise self._too_small(held)
            self._changed.wait()

    def _unpin(self, held: list[_Block]) -> None:
        self._pinned -= 1
        for file, block in held:
            file.pins[block] -= 1
            if not file.pins[block] and isinstance(file.held.get(block), bytes):
                (self._waiting if file.wanted(block) else self._idle)[file, block] = None
        self._changed.notify_all()

    def _release(self, held: list[_Block], first: bool) -> None:
        with self._changed:
            self._unpin(held)
            self._first_left -= first
            if self._first_left:
                return
            # What is fetched ahead waits for the first batch, so that this has all of the network for itself.
            again = len(self._postponed) if not self._begun else 1
            self._begun = True
            for _ in range(min(again, len(self._postponed))):
                self._fetchers.submit(self._get_ahead, ahead=True)

    def _make_room(self, need: int, early: bool) -> bool:
        """Whether `need` bytes fit, after letting go of what nobody asks for; `early`, also of what a later batch will."""
        room = self._room()
        while self.nbytes + need > room and (self._idle or (early and self._waiting)):
            if not self._idle:
                self._counters.add(evicted_early=1)
                self._warn()
            (file, block), _ = (self._idle or self._waiting).popitem(last=False)
            del file.held[block]
            self.nbytes -= file.size(block)
            if not file.held and not file.pins.any() and not any(left.any() for left in file.left.values()):
                del self._files[file.path]
        return self.nbytes + need <= room

    def _fetch(self, priority: Priority, file: BlockedFile, blocks: list[int]) -> None:
        self._under_way += 1
        done: Future[None] = Future()
        file.held |= dict.fromkeys(blocks, done)
        job = self._fetchers.submit(self._get, file, blocks, done, priority=priority)
        job.add_done_callback(lambda job: done.cancel() if job.cancelled() else None)

    def _get(self, file: BlockedFile, blocks: list[int], done: Future[None]) -> None:
        """Fetchers: one range, whose bytes have been reserved."""
        begin = int(file.start[blocks[0]])
        try:
            data = self._store.read(file.path, begin, int(file.stop[blocks[-1]]))
        except BaseException as error:
            self._arrived(file, blocks, None)
            done.set_exception(error)
            return
        parts = {b: data[int(file.start[b]) - begin : int(file.stop[b]) - begin] for b in blocks}
        self._arrived(file, blocks, parts)
        done.set_result(None)

    def _arrived(self, file: BlockedFile, blocks: list[int], parts: dict[int, bytes] | None) -> None:
        with self._changed:
            self._under_way -= 1
            for block in blocks:
                if parts is None:
                    del file.held[block]
                    self.nbytes -= file.size(block)
                    continue
                file.held[block] = parts[block]
                if not file.pins[block]:
                    (self._waiting if file.wanted(block) else self._idle)[file, block] = None
            self._changed.notify_all()

    def _fetch_ahead(self, priority: Priority, file: BlockedFile, blocks: list[int]) -> None:
        heapq.heappush(self._postponed, (priority, next(self._number), file, blocks))
        if self._begun:
            self._fetchers.submit(self._get_ahead, ahead=True)

    def _get_ahead(self) -> None:
        """Fetchers: the next range of what is needed soonest, as far as there is room; then what is left, in its turn."""
        with self._changed:
            missing: list[int] = []
            while not missing:
                if not self._postponed or self._stopping:
                    return
                priority, _, file, blocks = heapq.heappop(self._postponed)
                missing = [block for block in blocks if block not in file.held and file.wanted(block)]
            group = file.grown(file.ranges(missing, self._range)[0], self._range)
            while not self._make_room(need := int(file.stop[group[-1]] - file.start[group[0]]), early=False):
                if len(group) == 1:
                    heapq.heappush(self._postponed, (priority, next(self._number), file, missing))
                    return
                group = group[: len(group) // 2]
            self.nbytes += need
            self._under_way += 1
            done: Future[None] = Future()
            file.held |= dict.fromkeys(group, done)
            if left := [block for block in missing if block not in file.held]:
                self._fetch_ahead(priority, file, left)
        self._get(file, group, done)

    def _bytes(self, file: BlockedFile, block: int) -> bytes | None:
        held = file.held.get(block)
        if isinstance(held, Future):
            held.result()
            held = file.held.get(block)
        return held if isinstance(held, bytes) else None

    def _too_small(self, held: list[_Block]) -> MemoryBudgetError:
        need = sum(file.size(block) for file, block in held)
        return MemoryBudgetError(
            f"memory_budget leaves {self._room()} bytes for encoded video, and one batch needs {need}; give a larger "
            "memory_budget, or a smaller batch_size"
        )

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "memory_budget leaves %d bytes for encoded video, which is less than the episodes in use take: bytes are "
                "fetched more than once. The order stays the same. Give a larger memory_budget, a smaller "
                "episode_pool_size or a cache_dir", self._room(),
            )  # fmt: skip


def _by_file(blocks: list[_Block]) -> dict[BlockedFile, list[int]]:
    found: dict[BlockedFile, list[int]] = {}
    for file, block in blocks:
        found.setdefault(file, []).append(block)
    return found

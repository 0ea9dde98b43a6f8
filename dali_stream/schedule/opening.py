"""Schedule of reading rows and indices, so that episodes are open before the batches that use them are planned.

These methods of `Opening` are called in turn for each batch:

request    returns the reads to begin, and decides which rows and indices to evict for them
due        returns the reads that must be complete before the next batch is planned
observe    takes the result of a read
ready      returns the episodes that can be opened
advance    moves on to the next batch

Rows and indices share one `Room`. The batches of the look-ahead pin the entries that they use. Other entries are evicted, least
recently used first.

The look-ahead grows with the number n of batches that were planned. Batch n waits for the reads of batches up to
n + min(GROWTH · n, look_ahead). By then, reads may have begun for batches up to n + min(2 · GROWTH · n, 5/4 · look_ahead).
The reads for the first batch run alone, so that training starts soon.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.room import Key, Room
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.video import GROWTH

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Storage:
    """Rows and indices of a dataset, with the memory that they need and may take.

    Attributes:
        files: {camera with video files: number of each episode's file, shape (E,)}. -1 if the episode has none.
        lengths: Number of frames of each episode, shape (E,).
        row_bytes: Approximate memory of a row of each episode in bytes, shape (E,) or ().
        table_bytes: Memory of a row's entries in the tables that locate frames, in bytes.
        index_bytes: {camera: approximate memory of the index of a file, in bytes}.
        room: Bytes that rows, tables and indices may take together.
        more: Bytes that they may take in addition if one batch needs it.
        index_share: Bytes of `room` for indices. See `Room`.
        look_ahead: Maximum number of batches to read ahead.
    """

    files: Mapping[str, npt.NDArray[np.integer]]
    lengths: Int64
    row_bytes: int | Int64
    table_bytes: int
    index_bytes: Mapping[str, int]
    room: int
    more: int = 0
    index_share: int = 0
    look_ahead: int = 0

    def keys(self, episodes: list[int]) -> list[Key]:
        """Return the keys of the rows of some episodes, and of the indices of their files."""
        keys: list[Key] = [("", episode) for episode in episodes]
        for camera, files in self.files.items():
            own = files[episodes]
            keys += [(camera, file) for file in np.unique(own[own >= 0]).tolist()]
        return keys

    def with_table(self, episode: int, row_bytes: int) -> int:
        """Return the memory of an episode's rows, `row_bytes`, plus that of the tables that locate its frames, in bytes."""
        return row_bytes + int(self.lengths[episode]) * self.table_bytes


class Read(NamedTuple):
    """Rows or an index to read.

    Attributes:
        batch: First batch that needs it.
        step: Batch before whose planning the read must be complete.
        camera: Camera of the index. Empty for rows.
        number: Number of the episode for rows, and of the file for an index.
        again: Whether the same was read before: rows in this epoch, an index at any time.
    """

    batch: int
    step: int
    camera: str
    number: int
    again: bool

    @property
    def key(self) -> Key:
        """Key of the rows or of the index."""
        return self.camera, self.number


class _Pinned(NamedTuple):
    """Batch of the look-ahead whose reads have begun, with the keys of the rows and indices that it uses."""

    number: int
    epoch: int
    episodes: list[int]
    keys: list[Key]


class Opening:
    """Schedule of the reads and evictions of rows and indices. The same calls always give the same decisions.

    Args:
        storage: Rows and indices of the dataset.

    Attributes:
        room: Rows and indices that are in memory or being read.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self.room = storage, Room(storage.room, storage.index_share)
        self._row_bytes = np.broadcast_to(storage.row_bytes + storage.table_bytes, len(storage.lengths))
        self._index_bytes = dict(storage.index_bytes)
        self._pinned: deque[_Pinned] = deque()
        self._due = self._requested = -1  # last batch whose reads are complete, and last batch whose reads have begun
        self._retry = 0  # after the room was full: next batch at which to try to read ahead
        self._read_in = np.full(len(storage.lengths), -1, np.int32)  # last epoch that read the rows of each episode
        self._seen: set[Key] = set()  # keys of the indices that were read
        self._read_again = 0  # number of indices that were read again since the last `take_indices_read_again`

    def horizon(self, now: int) -> int:
        """Return the number of batches after batch `now`, the next one, whose reads may begin."""
        # This is farther than `_last_due`, so that reads have begun some batches before they are waited for.
        return min(2 * GROWTH * now, self._storage.look_ahead * 5 // 4)

    def request(self, ahead: Iterable[Samples]) -> list[Read]:
        """Return the reads to begin before the next batch is planned. The evictions for them are recorded in `room`.

        Args:
            ahead: Next batch, and `horizon` batches after it.
        """
        reads: list[Read] = []
        now = -1
        for samples in ahead:
            now = samples.number if now < 0 else now
            if samples.number > now and (samples.number <= self._requested or now < self._retry):
                continue
            # The next batch is checked even if its reads have begun, since a failed read is repeated for it.
            batch = self._pinned[0] if samples.number <= self._requested else self._pin(samples)
            missing = [key for key in batch.keys if key not in self.room]
            need = sum(map(self._estimate, missing))
            if not self.room.make(need):
                if batch.number == now:
                    self._make_room_for_now(need)  # `need` is an estimate, so only `ready` raises an error
                else:
                    self._unpin_last()
                    # Memory is freed when batches before this one are planned. Waiting for a quarter of them saves attempts.
                    self._retry = now + 1 + (samples.number - now) // 4
                    break
            reads += [self._read(key, batch, now) for key in missing]
        return reads

    def due(self) -> list[Read]:
        """Return the reads whose results must be passed to `observe` before the next batch is planned, most urgent first."""
        due: dict[Key, Read] = {}
        for batch in self._newly_due():
            for key in batch.keys:
                if key in self.room.coming:
                    due.setdefault(key, Read(batch.number, self._pinned[0].number, *key, again=False))
        return list(due.values())

    def observe(self, key: Key, size: int | None, others: Mapping[int, int] | None = None) -> list[int]:
        """Take the result of a read.

        Args:
            key: Key of the rows or of the index that was read.
            size: Size in bytes. None if the read failed. `request` then repeats it for the batch that needs it.
            others: {other episode whose rows were read with it: their size in bytes}, most urgent first.

        Returns:
            Episodes of `others` to keep, as many as fit.
        """
        self.room.coming.discard(key)
        if size is None:
            self.room.drop(key)
            return []
        camera, number = key
        if camera:
            # The last index is the estimate for those of other files. The size of a broken index is 0, which says nothing.
            self._index_bytes[camera] = size or self._index_bytes.get(camera, 0)
            self._seen.add(key)
        self.room.hold(key, size if camera else self._storage.with_table(number, size))
        while not self.room.make(0) and len(self._pinned) > 1:  # the size exceeds the estimate: read less far ahead
            self._unpin_last()
        kept: list[int] = []
        for episode, more in (others or {}).items():
            more = self._storage.with_table(episode, more)
            is_new = ("", episode) not in self.room and ("", episode) not in self.room.evicted
            if is_new and more <= self.room.free:
                kept.append(episode)
                self.room.hold(("", episode), more, used=False)
        return kept

    def ready(self) -> list[int]:
        """Return the episodes whose rows and indices are in memory, among those of the batches that `due` covers.

        Raises:
            MemoryBudgetError: If the rows and indices of the next batch alone exceed the memory.
        """
        self._make_room_for_now(0)
        if self.room.free + self._storage.more < 0:
            raise MemoryBudgetError(
                f"memory_budget leaves {self._storage.room + self._storage.more} bytes for rows, indices and encoded video, "
                f"and the rows and indices of one batch take {sum(self.room.bytes_by_kind)}; give a larger memory_budget, or a "
                "smaller batch_size"
            )
        ready: dict[int, None] = {}
        for batch in self._newly_due():
            missing = {key for key in batch.keys if key in self.room.coming or key not in self.room}
            ready |= dict.fromkeys(e for e in batch.episodes if not missing or missing.isdisjoint(self._storage.keys([e])))
        return list(ready)

    def advance(self) -> None:
        """Unpin the next batch, which was planned. The batch after it becomes the next one."""
        self._due = max(self._due, self._last_due())
        self.room.unpin(self._pinned.popleft().keys)

    def take_indices_read_again(self) -> int:
        """Return the number of indices that were read again after an eviction, since the last call."""
        count, self._read_again = self._read_again, 0
        return count

    def _last_due(self) -> int:
        """Return the last batch whose reads must be complete before the next batch is planned."""
        now = self._pinned[0].number
        return min(now + min(GROWTH * now, self._storage.look_ahead), self._requested)

    def _newly_due(self) -> list[_Pinned]:
        """Return the next batch, and the batches that became due when it became the next one."""
        last = self._last_due()
        later = itertools.takewhile(lambda batch: batch.number <= last, itertools.islice(self._pinned, 1, None))
        return [self._pinned[0], *(batch for batch in later if batch.number > self._due)]

    def _pin(self, samples: Samples) -> _Pinned:
        """Add a batch to the look-ahead, and pin its rows and indices."""
        episodes = np.unique(samples.episode).tolist()
        batch = _Pinned(samples.number, samples.epoch, episodes, self._storage.keys(episodes))
        self.room.pin(batch.keys)
        self._pinned.append(batch)
        self._requested = batch.number
        return batch

    def _make_room_for_now(self, need: int) -> None:
        """Make room for the next batch. Evict rows and indices of later batches if necessary.

        If even that is not enough, the room is exceeded at the cost of encoded video.
        """
        while not self.room.make(need) and len(self._pinned) > 1:
            self._unpin_last()
        self.room.make(need, as_far_as_possible=True)

    def _unpin_last(self) -> None:
        """Remove the last batch of the look-ahead. It is requested again later."""
        batch = self._pinned.pop()
        self.room.unpin(batch.keys)
        self._requested = batch.number - 1

    def _read(self, key: Key, batch: _Pinned, now: int) -> Read:
        """Begin a read: count it in the room, and return it."""
        camera, number = key
        again = key in self._seen if camera else bool(self._read_in[number] == batch.epoch)
        if camera:
            self._read_again += again
            self._seen.add(key)
        else:
            self._read_in[number] = batch.epoch
        self.room.hold(key, self._estimate(key))
        self.room.coming.add(key)
        # The first n from `now` on with batch.number <= n + min(GROWTH * n, look_ahead), see `_last_due`.
        step = max(now, batch.number - self._storage.look_ahead, -(-batch.number // (1 + GROWTH)))
        return Read(batch.number, step, camera, number, again)

    def _estimate(self, key: Key) -> int:
        """Return the approximate size of rows, with their tables, or of an index, in bytes."""
        camera, number = key
        if camera:
            return self._index_bytes.get(camera, 0)
        return int(self._storage.lengths[number] * self._row_bytes[number])

"""Which rows and indices are read when, so that episodes are open before the batches that use them are planned.

request    what to begin to read, and which episodes and indices to evict for it
due        what must be read before the next batch is planned
observe    what was read, or could not be read
advance    the next batch was planned

Rows and indices share a room. The batches of the look-ahead pin what they use. Of all else, the least recently used is evicted.
Reads for the first batch run alone. After that, reads for later batches begin ahead, up to a limit.
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
    """What there is to read.

    Attributes:
        files: {camera with video files: number of each episode's file, shape (E,)}. -1 if the episode has none.
        lengths: Number of frames of each episode, shape (E,).
        row_bytes: Memory of a row of each episode, about, shape (E,) or ().
        table_bytes: Memory of a row in the tables that say where its frames are.
        index_bytes: {camera: memory of the index of a file, about}.
        room: Bytes that rows, tables and indices may take together.
        more: Bytes that they may take beyond that if one batch needs it.
        index_share: Bytes of that for indices, see `Room`.
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
        """Return the rows of episodes, and the indices of their files."""
        keys: list[Key] = [("", episode) for episode in episodes]
        for camera, files in self.files.items():
            own = files[episodes]
            keys += [(camera, file) for file in np.unique(own[own >= 0]).tolist()]
        return keys

    def with_table(self, episode: int, row_bytes: int) -> int:
        """Return the memory of an episode's rows and of the tables that say where its frames are."""
        return row_bytes + int(self.lengths[episode]) * self.table_bytes


class Read(NamedTuple):
    """Rows or an index to read.

    Attributes:
        batch: Batch that needs it first.
        step: Batch before whose planning it must be read.
        camera: Camera of the index. Empty for rows.
        number: Number of the episode, or of the file.
        again: Whether it was read before: rows in this epoch, an index at any time.
    """

    batch: int
    step: int
    camera: str
    number: int
    again: bool

    @property
    def key(self) -> Key:
        """Key of what it reads."""
        return self.camera, self.number


class _Pinned(NamedTuple):
    """A batch of the look-ahead whose reads have begun, with what it uses."""

    number: int
    epoch: int
    episodes: list[int]
    keys: list[Key]


class Opening:
    """Decides what is read and evicted. Pure: the same calls give the same decisions.

    Args:
        storage: What there is to read.

    Attributes:
        room: What is in memory or on its way.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self.room = storage, Room(storage.room, storage.index_share)
        self._row_bytes = np.broadcast_to(storage.row_bytes + storage.table_bytes, len(storage.lengths))
        self._index_bytes = dict(storage.index_bytes)
        self._pinned: deque[_Pinned] = deque()
        self._due = self._requested = -1  # batches whose reads are done, and have begun
        self._retry = 0  # batch from which on to try to read ahead again, after there was no room
        self._read_in = np.full(len(storage.lengths), -1, np.int32)  # the last epoch that read the rows of each episode
        self._seen: set[Key] = set()  # indices
        self._read_again = 0  # indices, since they were counted last

    def horizon(self, now: int) -> int:
        """Number of batches after the next one whose reads may begin."""
        return min(2 * GROWTH * now, self._storage.look_ahead * 5 // 4)

    def request(self, ahead: Iterable[Samples]) -> list[Read]:
        """Return what to begin to read before the next batch is planned.

        Args:
            ahead: The next batch, and `horizon` batches after it.

        """
        reads: list[Read] = []
        now = -1
        for samples in ahead:
            now = samples.number if now < 0 else now
            if samples.number > now and (samples.number <= self._requested or now < self._retry):
                continue
            batch = self._pinned[0] if samples.number <= self._requested else self._pin(samples)
            missing = [key for key in batch.keys if key not in self.room]
            need = sum(map(self._estimate, missing))
            if not self.room.make(need):
                if batch.number == now:
                    self._make_room_for_now(need)  # an estimate: `ready` raises an error if it is right
                else:
                    self._unpin_last()
                    self._retry = now + 1 + (samples.number - now) // 4
                    break
            reads += [self._read(key, batch, now) for key in missing]
        return reads

    def due(self) -> list[Read]:
        """Return what must be passed to `observe` before the next batch is planned, the soonest need first."""
        due: dict[Key, Read] = {}
        for batch in self._newly_due():
            for key in batch.keys:
                if key in self.room.coming:
                    due.setdefault(key, Read(batch.number, self._pinned[0].number, *key, again=False))
        return list(due.values())

    def observe(self, key: Key, size: int | None, others: Mapping[int, int] | None = None) -> list[int]:
        """Take note of what was read.

        Args:
            key: What was read.
            size: Bytes that it takes. None if it could not be read, which `request` repeats for the batch that needs it.
            others: {episode whose rows came along: bytes that they take}, the soonest need first.

        Returns:
            Which of the others to keep: as many as there is room for.
        """
        self.room.coming.discard(key)
        if size is None:
            self.room.drop(key)
            return []
        camera, number = key
        if camera:
            self._index_bytes[camera] = size or self._index_bytes.get(camera, 0)  # a broken index takes nothing
            self._seen.add(key)
        self.room.hold(key, size if camera else self._storage.with_table(number, size))
        while not self.room.make(0) and len(self._pinned) > 1:  # it is larger than expected: read less far ahead
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
        """Return the episodes, of the batches that `due` covers, whose rows and indices are in memory.

        Raises:
            MemoryBudgetError: If the next batch alone needs too much.
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
        """Take note that the next batch was planned."""
        self._due = max(self._due, self._last_due())
        self.room.unpin(self._pinned.popleft().keys)

    def take_indices_read_again(self) -> int:
        """Return how many indices that had been evicted were read since the last call."""
        count, self._read_again = self._read_again, 0
        return count

    def _last_due(self) -> int:
        now = self._pinned[0].number
        return min(now + min(GROWTH * now, self._storage.look_ahead), self._requested)

    def _newly_due(self) -> list[_Pinned]:
        """Return the next batch, and those that are due since it became the next one."""
        last = self._last_due()
        later = itertools.takewhile(lambda batch: batch.number <= last, itertools.islice(self._pinned, 1, None))
        return [self._pinned[0], *(batch for batch in later if batch.number > self._due)]

    def _pin(self, samples: Samples) -> _Pinned:
        episodes = np.unique(samples.episode).tolist()
        batch = _Pinned(samples.number, samples.epoch, episodes, self._storage.keys(episodes))
        self.room.pin(batch.keys)
        self._pinned.append(batch)
        self._requested = batch.number
        return batch

    def _make_room_for_now(self, need: int) -> None:
        """Make room for the next batch, at the cost of later ones and of encoded video."""
        while not self.room.make(need) and len(self._pinned) > 1:
            self._unpin_last()
        self.room.make(need, as_far_as_possible=True)

    def _unpin_last(self) -> None:
        batch = self._pinned.pop()
        self.room.unpin(batch.keys)
        self._requested = batch.number - 1

    def _read(self, key: Key, batch: _Pinned, now: int) -> Read:
        camera, number = key
        again = key in self._seen if camera else bool(self._read_in[number] == batch.epoch)
        if camera:
            self._read_again += again
            self._seen.add(key)
        else:
            self._read_in[number] = batch.epoch
        self.room.hold(key, self._estimate(key))
        self.room.coming.add(key)
        step = max(now, batch.number - self._storage.look_ahead, -(-batch.number // (1 + GROWTH)))
        return Read(batch.number, step, camera, number, again)

    def _estimate(self, key: Key) -> int:
        camera, number = key
        if camera:
            return self._index_bytes.get(camera, 0)
        return int(self._storage.lengths[number] * self._row_bytes[number])

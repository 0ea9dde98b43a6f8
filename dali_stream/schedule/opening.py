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
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.video import GROWTH

Int64 = npt.NDArray[np.int64]
Key = tuple[str, int]
"""("", episode) for the rows of an episode, (camera, file) for the index of a video file."""


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
        look_ahead: Maximum number of batches to read ahead.
    """

    files: Mapping[str, npt.NDArray[np.integer]]
    lengths: Int64
    row_bytes: int | Int64
    table_bytes: int
    index_bytes: Mapping[str, int]
    room: int
    look_ahead: int = 0


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
        """The rows or the index that it reads."""
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
        indices_read_again: Number of indices that were evicted and read another time.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._row_bytes = np.broadcast_to(storage.row_bytes + storage.table_bytes, len(storage.lengths))
        self._index_bytes = dict(storage.index_bytes)
        self._size: OrderedDict[Key, int] = OrderedDict()  # what is in memory or on its way, least recently used first
        self._taken = 0  # the sum of that
        self._coming: set[Key] = set()
        self._pinned: deque[_Pinned] = deque()
        self._pins: Counter[Key] = Counter()
        self._evicted: list[Key] = []
        self._due = self._requested = -1  # batches whose reads are done, and have begun
        self._retry = 0  # batch from which on to try to read ahead again, after there was no room
        self._read_in = np.full(len(storage.lengths), -1, np.int32)  # the last epoch that read the rows of each episode
        self._seen: set[Key] = set()  # indices
        self.indices_read_again = 0

    def horizon(self, now: int) -> int:
        """Number of batches after the next one whose reads may begin."""
        return min(2 * GROWTH * now, self._storage.look_ahead * 5 // 4)

    def bytes_by_kind(self) -> tuple[int, int]:
        """Bytes of rows with their tables, and of indices."""
        sizes = list(self._size.items())
        rows = sum(size for (camera, _), size in sizes if not camera)
        return rows, sum(size for _, size in sizes) - rows

    def is_held(self, key: Key) -> bool:
        """Whether something is in memory or on its way."""
        return key in self._size

    def request(self, ahead: Iterable[Samples]) -> list[Read]:
        """Return what to begin to read before the next batch is planned.

        Args:
            ahead: The next batch, and `horizon` batches after it.

        Raises:
            MemoryBudgetError: If the next batch alone needs too much.
        """
        reads: list[Read] = []
        now = -1
        for samples in ahead:
            now = samples.number if now < 0 else now
            if samples.number > now and (samples.number <= self._requested or now < self._retry):
                continue
            batch = self._pinned[0] if samples.number <= self._requested else self._pin(samples)
            missing = [key for key in batch.keys if key not in self._size]
            need = sum(map(self._estimate, missing))
            if not self._make_room(need):
                if batch.number == now:
                    raise self._too_small(need)
                self._unpin(self._pinned.pop())
                self._retry = now + 1 + (samples.number - now) // 4
                break
            self._requested = max(self._requested, batch.number)
            reads += [self._read(key, batch, now) for key in missing]
        return reads

    def due(self) -> list[Read]:
        """Return what must be passed to `observe` before the next batch is planned, the soonest need first."""
        due: dict[Key, Read] = {}
        for batch in self._newly_due():
            for key in batch.keys:
                if key in self._coming:
                    due.setdefault(key, Read(batch.number, self._pinned[0].number, *key, again=False))
        return list(due.values())

    def observe(self, key: Key, size: int | None, others: Mapping[int, int] | None = None) -> list[int]:
        """Take note of what was read.

        Args:
            key: What was read.
            size: Bytes that it takes. None if it could not be read, which `request` repeats for the batch that needs it.
            others: {episode whose rows came along: bytes that they take}.

        Returns:
            Which of the others to keep: as many as there is room for.
        """
        self._coming.discard(key)
        if size is None:
            self._taken -= self._size.pop(key, 0)
            return []
        camera, number = key
        if camera:
            self._index_bytes[camera] = size
            self._seen.add(key)
        else:
            size = self._with_table(number, size)
        self._hold(key, size)
        while not self._make_room(0) and len(self._pinned) > 1:  # it is larger than expected: read less far ahead
            self._requested = self._pinned[-1].number - 1
            self._unpin(self._pinned.pop())
        kept: list[int] = []
        for episode, more in sorted((others or {}).items(), key=lambda item: (item[0] < number, item[0])):
            more = self._with_table(episode, more)
            if ("", episode) not in self._size and self._taken + more <= self._storage.room:
                kept.append(episode)
                self._hold(("", episode), more)
                self._size.move_to_end(("", episode), last=False)  # it was not used yet
        return kept

    def ready(self) -> list[int]:
        """Return the episodes, of the batches that `due` covers, whose rows and indices are in memory.

        Raises:
            MemoryBudgetError: If the next batch alone needs too much.
        """
        if self._taken > self._storage.room:
            raise self._too_small(0)
        ready: dict[int, None] = {}
        for batch in self._newly_due():
            ready |= dict.fromkeys(
                e for e in batch.episodes if all(k in self._size and k not in self._coming for k in self._keys([e]))
            )
        return list(ready)

    def advance(self) -> None:
        """Take note that the next batch was planned."""
        self._due = max(self._due, self._last_due())
        batch = self._pinned.popleft()
        self._unpin(batch)
        for key in batch.keys:
            if key in self._size:
                self._size.move_to_end(key)

    def take_evicted(self) -> list[Key]:
        """Return what was evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _last_due(self) -> int:
        now = self._pinned[0].number
        return min(now + min(GROWTH * now, self._storage.look_ahead), self._requested)

    def _newly_due(self) -> list[_Pinned]:
        """Return the next batch, and those that are due since it became the next one."""
        last = self._last_due()
        later = itertools.takewhile(lambda batch: batch.number <= last, itertools.islice(self._pinned, 1, None))
        return [self._pinned[0], *(batch for batch in later if batch.number > self._due)]

    def _keys(self, episodes: list[int]) -> list[Key]:
        keys: list[Key] = [("", episode) for episode in episodes]
        for camera, files in self._storage.files.items():
            own = files[episodes]
            keys += [(camera, file) for file in np.unique(own[own >= 0]).tolist()]
        return keys

    def _pin(self, samples: Samples) -> _Pinned:
        episodes = np.unique(samples.episode).tolist()
        batch = _Pinned(samples.number, samples.epoch, episodes, self._keys(episodes))
        self._pins.update(batch.keys)
        self._pinned.append(batch)
        return batch

    def _unpin(self, batch: _Pinned) -> None:
        self._pins.subtract(batch.keys)
        for key in batch.keys:
            if not self._pins[key]:
                del self._pins[key]

    def _make_room(self, need: int) -> bool:
        """Evict what is not pinned, the least recently used first, if that makes enough room."""
        short = self._taken + need - self._storage.room
        if short <= 0:
            return True
        evicted: list[Key] = []
        for key, size in self._size.items():
            if key not in self._pins and key not in self._coming:
                evicted.append(key)
                short -= size
                if short <= 0:
                    break
        if short > 0:
            return False
        for key in evicted:
            self._taken -= self._size.pop(key)
        self._evicted += evicted
        return True

    def _too_small(self, need: int) -> MemoryBudgetError:
        return MemoryBudgetError(
            f"memory_budget leaves {self._storage.room} bytes for rows and indices, and a batch needs {need} beside "
            f"{self._taken} in use; give a larger memory_budget, or a smaller batch_size"
        )

    def _hold(self, key: Key, size: int) -> None:
        self._taken += size - self._size.get(key, 0)
        self._size[key] = size

    def _read(self, key: Key, batch: _Pinned, now: int) -> Read:
        camera, number = key
        again = key in self._seen if camera else bool(self._read_in[number] == batch.epoch)
        if camera:
            self.indices_read_again += again
            self._seen.add(key)
        else:
            self._read_in[number] = batch.epoch
        self._hold(key, self._estimate(key))
        self._coming.add(key)
        step = max(now, batch.number - self._storage.look_ahead, -(-batch.number // (1 + GROWTH)))
        return Read(batch.number, step, camera, number, again)

    def _estimate(self, key: Key) -> int:
        camera, number = key
        if camera:
            return self._index_bytes.get(camera, 0)
        return int(self._storage.lengths[number] * self._row_bytes[number])

    def _with_table(self, episode: int, size: int) -> int:
        return size + int(self._storage.lengths[episode]) * self._storage.table_bytes

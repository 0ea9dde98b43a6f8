"""Schedule of reading rows and indices, so that episodes are open before the batches that use them are planned.

These methods of `Opening` are called in turn for each batch:

request    returns the reads to begin, and decides which rows and indices to evict for them
due        returns the reads that must be complete before the next batch is planned
observe    records the result of a read
ready      returns the episodes that can be opened
advance    unpins the batch that was planned, so that the one after it becomes the next batch

Rows and indices share a limit of bytes. The batches of the look-ahead pin the rows and indices that they use. Rows and indices
that are not pinned are evicted, least recently used first.

The look-ahead grows with the number n of batches that were planned, so that the first batches do not wait for the reads of many
others. Batch n waits for the reads of batches up to n + min(GROWTH · n, look_ahead). By then, reads may have begun for batches
up to n + min(2 · GROWTH · n, 5/4 · look_ahead). The second batch is planned only after the encoded video of the first one has
been fetched.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import budget_text
from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.episodes import NONE
from dali_stream.schedule.items import ABSENT, COMING, OPEN, READ, Items, Key
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.video import GROWTH

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Storage:
    """Sizes of the rows and indices of a dataset, and limits of their memory.

    Attributes:
        files: {camera with video files: number of each episode's file, shape (E,)}. -1 if the episode has none.
        lengths: Number of frames of each episode, shape (E,).
        row_bytes: Approximate memory of one row of each episode in bytes, shape (E,) or ().
        table_bytes: Memory of a row's entries in the tables that locate frames, in bytes.
        index_bytes: {camera: approximate memory of the index of a file, in bytes}.
        room: Bytes that rows, tables and indices may take together.
        more: Bytes that they may take beyond `room` if a single batch needs them, at the cost of encoded video.
        index_share: Bytes of `room` for indices. Indices are evicted first if they take more, and rows otherwise.
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


class Read(NamedTuple):
    """Rows or an index to read.

    Attributes:
        batch: First batch that needs it.
        step: Batch before which the read must complete. The batch is planned only then.
        camera: Camera of the index. Empty for rows.
        number: Number of the episode for rows, and of the file for an index.
        again: Whether these rows were read before in the same epoch, or this index at any time.
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
    """Batch of the look-ahead whose reads have begun, with its episodes and the items that it pins."""

    number: int
    epoch: int
    episodes: Int64
    items: Int64


class Opening:
    """Schedule of the reads and evictions of rows and indices. The same calls always give the same decisions.

    Args:
        storage: Rows and indices of the dataset.

    Attributes:
        items: Rows and indices that are in memory or being read.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.items = Items(len(storage.lengths), storage.files, storage.room, storage.index_share)
        self._estimate = np.zeros(len(self.items), np.int64)  # approximate bytes of each item
        self._estimate[self.items.of[""]] = storage.lengths * (storage.row_bytes + storage.table_bytes)
        for camera, size in storage.index_bytes.items():
            self._estimate[self.items.of[camera]] = size
        self._read_in = np.full(len(self.items), NONE, np.int32)  # last epoch whose batches have read each item
        self._pinned: deque[_Pinned] = deque()
        self._due = self._requested = NONE  # last batch that `due` has covered, and last batch whose reads have begun
        self._retry = 0  # first batch for which reading ahead is tried again, after the memory was full

    def horizon(self, now: int) -> int:
        """Return the number of batches after the next batch, `now`, whose reads may begin."""
        # This is farther than `_last_due`, so that reads begin some batches before the planner waits for them.
        return min(2 * GROWTH * now, self._storage.look_ahead * 5 // 4)

    def request(self, ahead: Iterable[Samples]) -> list[Read]:
        """Return the reads to begin before the next batch is planned. The evictions for them are recorded in `items`.

        Args:
            ahead: Next batch, and `horizon` batches after it.

        Returns:
            Reads, most urgent first.
        """
        reads: list[Read] = []
        now = NONE
        for samples in ahead:
            now = samples.number if now < 0 else now
            if samples.number > now and (samples.number <= self._requested or now < self._retry):
                continue
            # The next batch is checked even if its reads have begun, since a failed read is repeated for it. Other batches are
            # pinned before room is made, so that none of their own rows and indices are evicted for missing ones.
            batch = self._pinned[0] if samples.number <= self._requested else self._pin(samples)
            missing = batch.items[self.items.state[batch.items] == ABSENT]
            need = int(self._estimate[missing].sum())
            if not self.items.make_room(need):
                if batch.number == now:
                    self._make_room_for_now(need)  # `need` is an estimate, so only `ready` raises an error
                else:
                    self._unpin_last()
                    # Memory is freed when batches before this one are planned. Trying again only after a quarter of them avoids
                    # attempts that would fail.
                    self._retry = now + 1 + (samples.number - now) // 4
                    break
            reads += self._read(missing, batch, now)
        return reads

    def due(self) -> list[Read]:
        """Return the reads whose results must be passed to `observe` before the next batch is planned, most urgent first."""
        due: dict[int, Read] = {}
        for batch in self._newly_due():
            for item in batch.items[self.items.state[batch.items] == COMING].tolist():
                due.setdefault(item, Read(batch.number, self._pinned[0].number, *self.items.key(item), again=False))
        return list(due.values())

    def observe(self, key: Key, size: int | None, others: Mapping[int, int] | None = None) -> list[int]:
        """Record the result of a read, or an index that is in memory already.

        Args:
            key: Key of the rows or of the index that was read.
            size: Size in bytes. None if the read failed. `request` then repeats it for the batch that needs it.
            others: {other episode whose rows the same read returned: their size in bytes}, most urgent first. Default: none.

        Returns:
            Episodes of `others` to keep. Nothing is evicted for them.
        """
        camera, number = key
        item = np.array([self.items.of[camera].start + number])
        if size is None:
            self.items.set(item, 0, ABSENT)
            self._read_in[item] = NONE  # so that repeating a failed read does not count as reading again
            return []
        if camera:
            # The size of the last index is the estimate for other files. A broken index has size 0, which is no estimate.
            self._estimate[self.items.of[camera]] = size or self._estimate[item]
            # An index that is in memory already was read before this object was made. Reading it once more counts as `again`.
            self._read_in[item] = np.maximum(self._read_in[item], 0)
        self.items.set(item, size if camera else self._with_table(number, size), READ)
        while not self.items.make_room(0) and len(self._pinned) > 1:  # the estimate was too small: read less far ahead
            self._unpin_last()
        kept: list[int] = []
        for episode, more in (others or {}).items():
            more = self._with_table(episode, more)
            if self.items.state[episode] == ABSENT and more <= self.items.free:
                kept.append(episode)
                self.items.set(np.array([episode]), more, READ, is_used=False)
        return kept

    def ready(self) -> list[int]:
        """Return the episodes to open now: those of the batches that `due` covers, if their rows and indices were read.

        Raises:
            MemoryBudgetError: If the rows and indices of the next batch alone exceed the memory.
        """
        self._make_room_for_now(0)
        if self.items.free + self._storage.more < 0:
            taken = sum(self.items.bytes_by_kind)
            larger = 2 * (taken + self._storage.more)  # rows and indices get up to half of the budget, beside encoded video
            raise MemoryBudgetError(
                f"memory_budget leaves {self._storage.room + self._storage.more} bytes for rows, indices and encoded video, "
                f"but the rows and indices of one batch take {taken}. Use a larger memory_budget, such as "
                f'"{budget_text(larger)}", or a smaller batch_size'
            )
        ready: list[int] = []
        for batch in self._newly_due():
            episodes = batch.episodes[self.items.state[batch.episodes] == READ]
            files = self.items.files[:, episodes]
            episodes = episodes[((files == NONE) | (self.items.state[files] == READ)).all(axis=0)]
            self.items.state[episodes] = OPEN
            ready += episodes.tolist()
        return ready

    def advance(self) -> None:
        """Unpin the next batch, which has been planned. The batch after it becomes the next one."""
        # `_last_due` depends on which batch is the next one, so its result is stored before that changes.
        self._due = max(self._due, self._last_due())
        self.items.unpin(self._pinned.popleft().items)

    def _last_due(self) -> int:
        """Return the last batch whose reads must be complete before the next batch is planned."""
        now = self._pinned[0].number
        return min(now + min(GROWTH * now, self._storage.look_ahead), self._requested)

    def _newly_due(self) -> list[_Pinned]:
        """Return the next batch, and the batches that became due when it became the next one."""
        # Batches up to `_due` were returned before. The next batch is returned again, since its reads may have failed, or it
        # may have been removed from the look-ahead and added again. In both cases `request` has repeated the reads.
        last = self._last_due()
        later = itertools.takewhile(lambda batch: batch.number <= last, itertools.islice(self._pinned, 1, None))
        return [self._pinned[0], *(batch for batch in later if batch.number > self._due)]

    def _pin(self, samples: Samples) -> _Pinned:
        """Add a batch to the look-ahead, and pin its rows and indices."""
        episodes = np.unique(samples.episode)
        files = np.unique(self.items.files[:, episodes])
        batch = _Pinned(samples.number, samples.epoch, episodes, np.concatenate([episodes, files[files != NONE]]))
        self.items.pin(batch.items)
        self._pinned.append(batch)
        self._requested = batch.number
        return batch

    def _unpin_last(self) -> None:
        """Remove the last batch from the look-ahead. `request` adds it again later."""
        batch = self._pinned.pop()
        self.items.unpin(batch.items)
        self._requested = batch.number - 1

    def _make_room_for_now(self, need: int) -> None:
        """Make room for the next batch. Evict rows and indices of later batches if necessary.

        If even that is not enough, rows and indices exceed their memory at the cost of encoded video.
        """
        while not self.items.make_room(need) and len(self._pinned) > 1:
            self._unpin_last()
        self.items.make_room(need, as_far_as_possible=True)

    def _read(self, items: Int64, batch: _Pinned, now: int) -> list[Read]:
        """Mark items as being read, and return their reads."""
        last = self._read_in[items]
        again = np.where(self.items.is_index(items), last != NONE, last == batch.epoch)
        self._read_in[items] = batch.epoch
        self.items.set(items, self._estimate[items], COMING)
        # Smallest n >= `now` with batch.number <= n + min(GROWTH * n, look_ahead), see `_last_due`.
        step = max(now, batch.number - self._storage.look_ahead, -(-batch.number // (1 + GROWTH)))
        return [
            Read(batch.number, step, *self.items.key(i), was) for i, was in zip(items.tolist(), again.tolist(), strict=True)
        ]

    def _with_table(self, episode: int, row_bytes: int) -> int:
        """Return the memory of an episode's rows, `row_bytes`, plus that of the tables that locate its frames, in bytes."""
        return row_bytes + int(self._storage.lengths[episode]) * self._storage.table_bytes

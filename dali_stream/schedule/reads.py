"""What is read from storage for each batch, when, and how long it is cached: rows, indices and blocks of encoded video.

request   which rows and indices to begin to read
due       which of them have to be there before the next batch is planned
step      which blocks a batch needs, and which ranges to fetch for it and for batches ahead of it

Reads for the first batch run alone. After that, reads for later batches begin ahead, up to a limit, the earliest need first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.blocks import BLOCK, BlockTable
from dali_stream.schedule.byte_cache import ByteCache, Drop, Items
from dali_stream.schedule.frame_table import FrameTable
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.uses import NEVER, Uses

Int64 = npt.NDArray[np.int64]
_GROWTH = 2  # batches that are read ahead more, for each that has been planned
RANGE = 4 << 20  # bytes of a request at most: large for the server, small for requests that wait behind it


@dataclass(frozen=True)
class Storage:
    """What storage has to offer, and how much of it may be in memory.

    Attributes:
        files: per camera with video files, (E,) the number of each episode's file; -1 where it has none.
        row_bytes: about what a row takes in memory; or (E,) of each episode.
        index_bytes: per camera, about what the index of a file takes in memory.
        fetched: cameras whose video is fetched into memory; that of others is read in place.
        room: bytes that rows, indices and encoded video may take together.
        block: bytes of a block.
        look_ahead: batches that are read ahead, at most.
    """

    files: Mapping[str, npt.NDArray[np.integer]]
    row_bytes: int | Int64
    index_bytes: Mapping[str, int]
    fetched: tuple[str, ...]
    room: int
    block: int = BLOCK
    look_ahead: int = 0


class Read(NamedTuple):
    """Rows or an index to read.

    Attributes:
        batch: that needs it first.
        step: the batch before whose planning it has to be there.
        camera: of the index; empty for rows.
        number: the episode, or the file.
        again: whether it was read before: rows in this epoch, an index at any time.
    """

    batch: int
    step: int
    camera: str
    number: int
    again: bool


class Fetch(NamedTuple):
    """Blocks that lie end to end in a file, to fetch with one request.

    Attributes:
        batch: that needs the first of them.
        camera, episode: whose video it is.
        first: the number of the first block.
        ranges: (start, stop) in the file, of each block.
    """

    batch: int
    camera: str
    episode: int
    first: int
    ranges: list[tuple[int, int]]


@dataclass
class ReadStep:
    """What to fetch and evict for a batch.

    Attributes:
        needed: per camera whose video is fetched, (episode, number) of the blocks that the batch decodes.
        needed_bytes: bytes of those that no earlier batch of the epoch has needed.
        fetch: ranges to fetch, those of the soonest need first.
        drop: what to evict.
    """

    needed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    needed_bytes: int = 0
    fetch: list[Fetch] = field(default_factory=list)
    drop: Drop = field(default_factory=Drop)


class _Episodes:
    """Columns with an entry per episode."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.columns: dict[str, npt.NDArray[Any]] = {}

    def add_column(self, name: str, dtype: npt.DTypeLike, empty: int) -> None:
        self.columns[name] = np.full(self._count, empty, dtype)

    def hold(self, rows: Int64) -> None:
        """Episodes are always there."""


class ReadSchedule:
    """Plans what is read, batch after batch. Pure: the same calls give the same plan.

    Args:
        storage: what there is.
        table: the frames of open episodes.
        uses: per camera, when its frames are shown.
        slots: per camera whose frames are cached, the column of `table` that tells which are.

    Attributes:
        cache: what is held.
        indices_read_again: indices that were dropped and read another time.
    """

    def __init__(
        self, storage: Storage, table: FrameTable, uses: Mapping[str, Uses], slots: Mapping[str, str], keeps_frames: bool
    ) -> None:
        self._storage, self._table, self._keeps_frames = storage, table, keeps_frames
        self._row_bytes = np.broadcast_to(storage.row_bytes, len(table.lengths))
        self._uses = Uses(_Episodes(len(table.lengths)), "rows")
        self._rows = Items(self._uses.next)
        self._indices = {camera: Items(partial(self._files_next, camera)) for camera in storage.files}
        self._blocks = {camera: BlockTable(table, camera, uses[camera], slots.get(camera)) for camera in storage.fetched}
        self.cache = ByteCache(storage.room, self._rows, self._indices, self._blocks)
        self._batches: deque[tuple[int, list[int], dict[str, list[int]]]] = deque()  # epoch, episodes, files
        self._now = 0  # the batch that is planned next
        self._requested = self._due = self._fetched = -1  # batches whose rows were asked for, are there, whose blocks are
        self._try_rows = self._try_blocks = 0  # batches, when there was no room for more
        self._epoch_read = np.full(len(table.lengths), -1, np.int32)
        self._seen = {camera: np.zeros(int(files.max()) + 1, np.bool_) for camera, files in storage.files.items()}
        self._index_bytes = dict(storage.index_bytes)
        self.indices_read_again = 0

    @property
    def horizon(self) -> int:
        """Batches behind the next one whose samples have to be known for `request`."""
        return min(2 * _GROWTH * self._now, self._storage.look_ahead * 5 // 4)

    def bytes_by_kind(self) -> tuple[int, int, int]:
        """Bytes of rows, of indices and of encoded video that are held or on their way."""
        rows = sum(list(self._rows.size.values()))
        indices = sum(sum(list(items.size.values())) for items in self._indices.values())
        return rows, indices, self.cache.taken - rows - indices

    def add(self, found: Samples) -> None:
        """Adds the next batch of the order."""
        episodes = np.unique(found.episode)
        self._uses.add(found.number, episodes)
        files = {camera: _unique(numbers[episodes]) for camera, numbers in self._storage.files.items()}
        self._batches.append((found.epoch, episodes.tolist(), files))

    def there(self, camera: str, number: int, size: int) -> None:
        """Notes that the index of a file is in memory since before the run."""
        self._indices[camera].size[number] = size
        self._seen[camera][number] = True
        self.cache.taken += size

    # ---- rows and indices

    def request(self) -> tuple[list[Read], Drop]:
        """What to begin to read before the next batch is planned, and what to evict for it.

        Raises:
            MemoryBudgetError: the next batch alone is too much.
        """
        reads: list[Read] = []
        ahead = range(max(self._requested, self._now) + 1, self._now + self.horizon + 1) if self._now >= self._try_rows else ()
        for batch in (self._now, *ahead):
            missing = self._missing(batch)
            need = sum(self._estimate(read) for read in missing)
            if not self.cache.make_room(need, self._now, batch):
                if batch == self._now:
                    raise self._too_small(need)
                self._try_rows = self._now + 1 + (batch - self._now) // 4
                break
            for read in missing:
                self._take(read)
            reads += missing
            self._requested = max(self._requested, batch)
        return reads, self.cache.take_dropped()

    def due(self) -> list[Read]:
        """What the caller must report as `arrived` or `failed` before the next batch is planned, the soonest need first."""
        found: dict[tuple[str, int], Read] = {}
        for batch in self._newly_due():
            _, episodes, files = self._batches[batch - self._now]
            for camera, items, numbers in self._kinds(episodes, files):
                for number in numbers:
                    if number in items.coming:
                        found.setdefault((camera, number), Read(batch, self._now, camera, number, again=False))
        return list(found.values())

    def arrived(self, read: Read, size: int, others: Mapping[int, int] | None = None) -> list[int]:
        """Takes note of what has been read.

        Args:
            read: one of `due`.
            size: bytes that it takes.
            others: of rows, bytes of other episodes that came along.

        Returns:
            Which of the others to keep.
        """
        items = self._items(read.camera)
        if read.number not in items.size:  # evicted while it was on its way
            return []
        self.cache.taken += size - items.size[read.number]
        items.size[read.number] = size
        items.coming.discard(read.number)
        if read.camera:
            self._index_bytes[read.camera] = size
        self.cache.make_room(0, self._now, self._now)
        return self._keep(others) if others else []

    def failed(self, read: Read) -> None:
        """Notes that it could not be read ahead of time. `request` names it again for the batch that needs it."""
        items = self._items(read.camera)
        self.cache.taken -= items.size.pop(read.number, 0)
        items.coming.discard(read.number)

    def ready(self) -> list[int]:
        """Episodes, of the batches that `due` covers, whose rows and indices are in memory."""
        found: dict[int, None] = {}
        for batch in self._newly_due():
            _, episodes, _ = self._batches[batch - self._now]
            found |= dict.fromkeys(e for e in episodes if self._is_there(e))
        return list(found)

    def learn(self, camera: str, episode: int, blocks: Any) -> None:
        """Takes the blocks of an open episode, a `Cut`."""
        self._blocks[camera].learn(episode, blocks)

    # ---- a batch

    def step(self, frames: Mapping[str, Int64], shown: Callable[[str, int], Int64]) -> ReadStep:
        """Plans what the next batch needs, and what is fetched ahead.

        Args:
            frames: per camera whose video is fetched, rows of the frames that the batch decodes.
            shown: a function (camera, n) -> rows of the frames that the n-th batch after this one shows.

        Raises:
            MemoryBudgetError: the batch alone is too much.
        """
        now, found = self._now, ReadStep()
        epoch, episodes, files = self._batches.popleft()
        self._uses.advance()
        for _, items, numbers in self._kinds(episodes, files):
            items.touch(numbers, now)
        missing = {}
        for camera, table in self._blocks.items():
            blocks = table.of(frames[camera])
            table.touch(blocks, now)
            found.needed[camera] = table.names(blocks)
            found.needed_bytes += table.count(blocks, epoch)
            missing[camera] = blocks[~table.held(blocks)]
        need = self._bytes(missing)
        if not self.cache.make_room(need, now, now):
            raise self._too_small(need)
        self._fetch(found, now, missing)
        self._look_ahead(found, shown)
        if self._keeps_frames and now % 16 == 15:
            for camera, table in self._blocks.items():
                self.cache.drop_blocks(camera, table.finished(now))
        found.drop = self.cache.take_dropped()
        self._due = max(self._due, self._last_due())
        self._now += 1
        return found

    def _look_ahead(self, found: ReadStep, shown: Callable[[str, int], Int64]) -> None:
        now = self._now
        last = self._last_due()
        for batch in range(max(self._fetched, now) + 1, last + 1) if now >= self._try_blocks else ():
            missing = {camera: table.missing(shown(camera, batch - now)) for camera, table in self._blocks.items()}
            if not self.cache.make_room(self._bytes(missing), now, batch):
                self._try_blocks = now + 1 + (batch - now) // 4
                break
            self._fetch(found, batch, missing)
            self._fetched = batch

    def _fetch(self, found: ReadStep, batch: int, missing: Mapping[str, Int64]) -> None:
        """Adds ranges for blocks that there is room for."""
        for camera, blocks in missing.items():
            self.cache.taken += int(self._blocks[camera].sizes(blocks).sum())
            self._blocks[camera].hold(blocks)
            self._blocks[camera].touch(blocks, self._now)
        for camera, blocks in missing.items():
            found.fetch += self._ranges(camera, blocks, batch)

    def _ranges(self, camera: str, blocks: Int64, batch: int) -> list[Fetch]:
        table, distance = self._blocks[camera], batch - self._now
        largest = max(min(RANGE, self._storage.room // 128), self._storage.block)
        # The farther ahead, the more comes with one request.
        wanted = min(largest, self._storage.block << min(distance, 16))
        fetches = []
        for group in table.groups(blocks):
            if distance:
                group = self._grown(camera, group, wanted)
            sizes = np.cumsum(table.sizes(group))
            for part in np.split(group, np.flatnonzero(np.diff((sizes - 1) // largest)) + 1):
                [(episode, first), *_] = table.names(part[:1])
                fetches.append(Fetch(batch, camera, episode, first, table.ranges(part)))
        return fetches

    def _grown(self, camera: str, group: Int64, wanted: int) -> Int64:
        """The group, and the blocks directly behind it that are needed sooner than what was evicted last."""
        table, cache = self._blocks[camera], self.cache
        room = min(wanted - int(table.sizes(group).sum()), cache.room - cache.taken)
        if room <= 0:
            return group
        behind = table.behind(int(group[-1]), self._now + min(cache.nearest, NEVER - self._now))
        behind = behind[np.cumsum(table.sizes(behind)) <= room]
        cache.taken += int(table.sizes(behind).sum())
        table.hold(behind)
        table.touch(behind, self._now)
        return np.concatenate([group, behind])

    # ---- inside

    def _last_due(self) -> int:
        return min(self._now + min(_GROWTH * self._now, self._storage.look_ahead), max(self._requested, self._now))

    def _newly_due(self) -> list[int]:
        return [self._now, *range(max(self._due, self._now) + 1, self._last_due() + 1)]

    def _items(self, camera: str) -> Items:
        return self._indices[camera] if camera else self._rows

    def _kinds(self, episodes: list[int], files: dict[str, list[int]]) -> list[tuple[str, Items, list[int]]]:
        return [("", self._rows, episodes), *((camera, self._indices[camera], numbers) for camera, numbers in files.items())]

    def _missing(self, batch: int) -> list[Read]:
        epoch, episodes, files = self._batches[batch - self._now]
        step = max(self._now, batch - self._storage.look_ahead, -(-batch // (1 + _GROWTH)))
        return [
            Read(batch, step, camera, number, bool(self._seen[camera][number] if camera else self._epoch_read[number] == epoch))
            for camera, items, numbers in self._kinds(episodes, files)
            for number in numbers
            if number not in items.size
        ]

    def _estimate(self, read: Read) -> int:
        if read.camera:
            return self._index_bytes.get(read.camera, 0)
        return int(self._table.lengths[read.number] * self._row_bytes[read.number])

    def _take(self, read: Read) -> None:
        items, size = self._items(read.camera), self._estimate(read)
        items.size[read.number] = size
        items.coming.add(read.number)
        self.cache.taken += size
        if read.camera:
            self.indices_read_again += bool(self._seen[read.camera][read.number])
            self._seen[read.camera][read.number] = True
        else:
            self._epoch_read[read.number] = self._batches[read.batch - self._now][0]

    def _keep(self, others: Mapping[int, int]) -> list[int]:
        """Chooses which rows that came along to cache: those with the nearest next uses, as far as there is room."""
        numbers = np.array([e for e in others if e not in self._rows.size], np.int64)
        after = self._uses.next(numbers)
        kept = []
        for place in np.argsort(after, kind="stable").tolist():
            episode = int(numbers[place])
            if after[place] == NEVER or self.cache.taken + others[episode] > self.cache.room:
                break
            self._rows.size[episode] = others[episode]
            self.cache.taken += others[episode]
            kept.append(episode)
        return kept

    def _is_there(self, episode: int) -> bool:
        found = self._kinds(
            [episode], {camera: [int(files[episode])] for camera, files in self._storage.files.items() if files[episode] >= 0}
        )
        return all(number in items.size and number not in items.coming for _, items, numbers in found for number in numbers)

    def _files_next(self, camera: str, files: Int64) -> Int64:
        """Per file, the next batch that shows an episode of it."""
        after = self._uses.next(np.arange(len(self._table.lengths)))
        episodes = np.flatnonzero(after < NEVER)
        found = np.full(len(self._seen[camera]), NEVER, np.int64)
        numbers = self._storage.files[camera][episodes]
        np.minimum.at(found, numbers[numbers >= 0], after[episodes][numbers >= 0])
        return found[files]

    def _bytes(self, blocks: Mapping[str, Int64]) -> int:
        return sum(int(self._blocks[camera].sizes(rows).sum()) for camera, rows in blocks.items())

    def _too_small(self, need: int) -> MemoryBudgetError:
        return MemoryBudgetError(
            f"memory_budget leaves {self._storage.room} bytes for rows, indices and encoded video, and a batch needs {need} "
            f"beside {self.cache.taken} in use; give a larger memory_budget, or a smaller batch_size"
        )


def _unique(files: npt.NDArray[np.integer]) -> list[int]:
    """The files of some episodes, without those that have none."""
    return np.unique(files[files >= 0]).tolist()

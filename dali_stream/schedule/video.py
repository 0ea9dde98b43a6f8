"""Which blocks of encoded video are fetched for each batch and for batches ahead of it, and which are evicted.

The blocks of the first batch are fetched alone. After that, blocks of later batches are fetched ahead, up to a limit, those of
the earliest need first. If the room is full, the block whose next use is farthest away is evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.belady import nearest
from dali_stream.schedule.episodes import NONE, EpisodeTable
from dali_stream.schedule.frames import FrameCache
from dali_stream.schedule.look_ahead import NEVER, Window
from dali_stream.schedule.samples import Samples

Int64 = npt.NDArray[np.int64]
BLOCK = 64 << 10  # bytes of a block, or a GOP if that is more: what a round trip of 50 ms carries at some MB/s
RANGE = 4 << 20  # bytes of a request at most: large for the server, small for requests that wait behind it
GROWTH = 2  # batches that are read ahead more, for each that has been planned
_SLACK = 32  # a full cache gives up one byte in so many at once, so that the farthest uses are looked for rarely
_FINISHED_EVERY = 16  # batches


class Fetch(NamedTuple):
    """Blocks that lie end to end in a file, to fetch with one request.

    Attributes:
        batch: Batch that needs the first of them.
        camera, episode: Whose video it is.
        first: Number of the first block in its episode.
        ranges: (start, stop) of each block in the file.
    """

    batch: int
    camera: str
    episode: int
    first: int
    ranges: list[tuple[int, int]]


@dataclass
class VideoPlan:
    """What to fetch and evict for a batch.

    Attributes:
        needed: {camera: (episode, number) of the blocks that the batch decodes}.
        needed_bytes: Bytes of those that no earlier batch of the epoch has needed.
        fetch: Ranges to fetch, those of the soonest need first.
        evict: (camera, episode, number) of the blocks to evict, before anything is fetched.
        evicted_early: Number of blocks that were evicted although a later batch was known to need them.
    """

    needed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    needed_bytes: int = 0
    fetch: list[Fetch] = field(default_factory=list)
    evict: list[tuple[str, int, int]] = field(default_factory=list)
    evicted_early: int = 0


class VideoPlanner:
    """Plans what is fetched and evicted, batch after batch.

    Args:
        table: Open episodes.
        windows: {camera whose video is fetched: its window}.
        frames: {camera: its decoded frames}. Cameras whose frames are not cached are missing.
        block: Bytes of a block.
        look_ahead: Maximum number of batches to fetch ahead.

    Attributes:
        room: Bytes that encoded video may take.
        bytes: Bytes of the blocks that are in memory or on their way.
    """

    def __init__(
        self,
        table: EpisodeTable,
        windows: Mapping[str, Window],
        frames: Mapping[str, FrameCache],
        block: int = BLOCK,
        look_ahead: int = 0,
    ) -> None:
        self._table, self._block, self._look_ahead = table, block, look_ahead
        self._cameras = {camera: _CameraBlocks(table, camera, windows[camera], frames.get(camera)) for camera in windows}
        self.room = self.bytes = 0
        self._keeps_frames = bool(frames) and all(cache.keeps_all for cache in frames.values())
        self._fetched, self._retry = NONE, 0  # the last batch whose blocks are fetched; when to try to fetch more
        self._horizon = NEVER  # of the blocks that were evicted last, the soonest next use, in batches from then on
        self._plan = VideoPlan()  # what was decided since the last plan

    def close(self, episode: int) -> None:
        """Evict the blocks of an episode that will be closed."""
        for camera, blocks in self._cameras.items():
            self._evict(camera, blocks.forget(episode))

    def plan(self, samples: Samples, decoded: Mapping[str, Int64], ahead: Iterable[Samples]) -> VideoPlan:
        """Plan a batch.

        Args:
            samples: Samples of the batch.
            decoded: {camera: rows of the frames that the batch decodes}.
            ahead: Batches after it.

        Raises:
            MemoryBudgetError: If the batch alone needs too much.
        """
        now, plan, missing = samples.number, self._plan, {}
        for camera, blocks in self._cameras.items():
            needed = blocks.of(decoded[camera])
            blocks.touched[needed] = now
            plan.needed[camera] = blocks.names(needed)
            plan.needed_bytes += blocks.count(needed, samples.epoch)
            missing[camera] = needed[~blocks.held[needed]]
        if not self._make_room(missing, now, now):
            raise MemoryBudgetError(
                f"memory_budget leaves {self.room} bytes for encoded video, and a batch needs {self._bytes(missing)} beside "
                f"{self.bytes} in use; give a larger memory_budget, or a smaller batch_size"
            )
        self._fetch(now, now, missing)
        self._fetch_ahead(now, ahead)
        if self._keeps_frames and now % _FINISHED_EVERY == _FINISHED_EVERY - 1:
            for camera, blocks in self._cameras.items():
                self._evict(camera, blocks.finished(now))
        self._plan = VideoPlan()
        return plan

    def _fetch_ahead(self, now: int, ahead: Iterable[Samples]) -> None:
        """Fetch blocks for later batches whose episodes are open, as far as there is room."""
        if now < self._retry:
            return
        for samples in itertools.islice(ahead, min(GROWTH * now, self._look_ahead)):
            batch = samples.number
            if batch <= self._fetched:
                continue
            if not self._table.is_open(samples.episode).all():
                break
            missing = {camera: blocks.missing(samples) for camera, blocks in self._cameras.items()}
            if not self._make_room(missing, now, batch):
                self._retry = now + 1 + (batch - now) // 4
                break
            self._fetch(now, batch, missing)
            self._fetched = batch

    def _bytes(self, blocks: Mapping[str, Int64]) -> int:
        return sum(int(self._cameras[camera].sizes(rows).sum()) for camera, rows in blocks.items())

    def _make_room(self, missing: Mapping[str, Int64], now: int, later_than: int) -> bool:
        """Evict blocks whose next use is after batch `later_than`, if that makes enough room for others."""
        short = self.bytes + self._bytes(missing) - self.room
        if short <= 0:
            return True
        candidates = {camera: blocks.evictable(now, later_than) for camera, blocks in self._cameras.items()}
        rows, next_use, touched = (np.concatenate(column) for column in zip(*candidates.values(), strict=True))
        sizes = np.concatenate([self._cameras[camera].sizes(found) for camera, (found, *_) in candidates.items()])
        if sizes.sum() < short:
            return False
        order = np.argsort(-touched, kind="stable")  # of blocks without a known use, the least recently used ones are evicted
        keep = np.zeros(len(order), np.bool_)
        keep[order] = nearest(next_use[order], int(sizes.sum()) - short - self.room // _SLACK, sizes[order])
        self._horizon = int(next_use[~keep].min()) - now
        self._plan.evicted_early += int((next_use[~keep] < NEVER).sum())
        ends = np.cumsum([len(found) for found, *_ in candidates.values()])
        for camera, end in zip(candidates, ends.tolist(), strict=True):
            own = slice(end - len(candidates[camera][0]), end)
            self._evict(camera, rows[own][~keep[own]])
        return True

    def _evict(self, camera: str, rows: Int64) -> None:
        blocks = self._cameras[camera]
        blocks.held[rows] = False
        self.bytes -= int(blocks.sizes(rows).sum())
        self._plan.evict += [(camera, *name) for name in blocks.names(rows)]

    def _fetch(self, now: int, batch: int, missing: Mapping[str, Int64]) -> None:
        """Fetch blocks that a batch needs and that there is room for."""
        for camera, rows in missing.items():
            self._hold(camera, rows, now)
        largest = max(min(RANGE, self.room // 128), self._block)
        # The farther ahead, the more comes with one request.
        wanted = min(largest, self._block << min(batch - now, 16))
        for camera, rows in missing.items():
            blocks = self._cameras[camera]
            for group in blocks.groups(rows):
                if batch > now:
                    room = min(wanted - int(blocks.sizes(group).sum()), self.room - self.bytes)
                    behind = blocks.behind(int(group[-1]), now, now + min(self._horizon, NEVER - now), room)
                    self._hold(camera, behind, now)
                    group = np.concatenate([group, behind])
                ends = np.cumsum(blocks.sizes(group))
                for part in np.split(group, np.flatnonzero(np.diff((ends - 1) // largest)) + 1):
                    [(episode, first)] = blocks.names(part[:1])
                    self._plan.fetch.append(Fetch(batch, camera, episode, first, blocks.ranges(part)))

    def _hold(self, camera: str, rows: Int64, now: int) -> None:
        blocks = self._cameras[camera]
        blocks.held[rows], blocks.touched[rows] = True, now
        self.bytes += int(blocks.sizes(rows).sum())


class _CameraBlocks:
    """The blocks of one camera's open episodes, by their rows in the camera's `BlockTable`.

    Attributes:
        held: Whether each block is in memory, or on its way.
        touched: Last batch that needed each block, or for which it was fetched.
    """

    def __init__(self, table: EpisodeTable, camera: str, window: Window, frames: FrameCache | None) -> None:
        blocks = table.cameras[camera].blocks
        assert blocks is not None
        self._table, self._camera, self._blocks = table, table.cameras[camera], blocks
        self._window, self._frames = window, frames
        self.held = np.empty(0, np.bool_)
        self.touched, self._epoch = np.empty(0, np.int32), np.empty(0, np.int32)

    def of(self, rows: Int64) -> Int64:
        """Return the blocks that decoding these frames needs, increasing."""
        self._grow()
        first = self._camera.first_block[rows].astype(np.int64)
        more = (self._camera.last_block[rows] - first)[first >= 0]
        first = first[first >= 0]
        return np.unique(np.concatenate([first, *(first[more >= i] + i for i in range(1, int(more.max(initial=0)) + 1))]))

    def missing(self, samples: Samples) -> Int64:
        """Return the blocks that a batch needs for frames that are not cached, and that are not in memory."""
        blocks = self.of(self._table.rows(self._not_cached(np.unique(self._window.frames(samples)))))
        return blocks[~self.held[blocks]]

    def sizes(self, blocks: Int64) -> Int64:
        """Return the bytes of each block."""
        return self._blocks.stop[blocks] - self._blocks.start[blocks]

    def ranges(self, blocks: Int64) -> list[tuple[int, int]]:
        """Return (start, stop) of each block in its file."""
        return list(zip(self._blocks.start[blocks].tolist(), self._blocks.stop[blocks].tolist(), strict=True))

    def names(self, blocks: Int64) -> list[tuple[int, int]]:
        """Return (episode, number in the episode) of each block."""
        first = self._blocks.first
        return [(e, b - first[e]) for e, b in zip(self._blocks.episode[blocks].tolist(), blocks.tolist(), strict=True)]

    def count(self, blocks: Int64, epoch: int) -> int:
        """Return the bytes of those blocks that the epoch needs for the first time."""
        fresh = blocks[self._epoch[blocks] != epoch]
        self._epoch[fresh] = epoch
        return int(self.sizes(fresh).sum())

    def groups(self, blocks: Int64) -> list[Int64]:
        """Return increasing blocks in groups that lie end to end in a file."""
        apart = np.diff(blocks) > 1
        apart |= self._blocks.episode[blocks[1:]] != self._blocks.episode[blocks[:-1]]
        apart |= self._blocks.start[blocks[1:]] != self._blocks.stop[blocks[:-1]]
        return np.split(blocks, np.flatnonzero(apart) + 1) if len(blocks) else []

    def behind(self, block: int, now: int, before: int, room: int) -> Int64:
        """Return blocks directly behind one, of at most `room` bytes, that are not in memory and are needed before a batch."""
        episode = int(self._blocks.episode[block])
        blocks = np.arange(block + 1, self._blocks.first[episode] + self._blocks.count[episode])
        good = ~self.held[blocks] & (self._blocks.start[blocks] == self._blocks.stop[blocks - 1])
        good &= np.cumsum(self.sizes(blocks)) <= room
        blocks = blocks if good.all() else blocks[: int(np.argmin(good))]
        if not len(blocks):
            return blocks
        first = int(self._table.first_row[episode])
        rows = np.arange(first, first + int(self._table.lengths[episode]))
        rows = rows[(self._camera.last_block[rows] > block) & (self._camera.first_block[rows] <= blocks[-1])]
        soon = self.next_uses(rows, now)[blocks] < before
        return blocks if soon.all() else blocks[: int(np.argmin(soon))]

    def evictable(self, now: int, later_than: int) -> tuple[Int64, Int64, Int64]:
        """Return the blocks that batch `now` does not need, and none up to `later_than`: rows, next use, last use."""
        held = np.flatnonzero(self.held & (self.touched != now))
        next_use = self.next_uses(np.flatnonzero(self._camera.first_block != NONE), now)[held]
        late = next_use > later_than
        return held[late], next_use[late], self.touched[held[late]].astype(np.int64)

    def finished(self, now: int) -> Int64:
        """Return the blocks in memory all of whose frames are cached, except for those that batch `now` needs."""
        needed = np.zeros(len(self.held), np.bool_)
        rows = np.flatnonzero(self._camera.first_block != NONE)
        needed[self.of(self._table.rows(self._not_cached(self._table.frames(rows))))] = True
        return np.flatnonzero(self.held & ~needed & (self.touched != now))

    def forget(self, episode: int) -> Int64:
        """Return the blocks of an episode that are in memory. What is known of all its blocks is forgotten."""
        self._grow()
        first = self._blocks.first[episode]
        own = slice(first, first + self._blocks.count[episode])
        self.touched[own] = self._epoch[own] = NONE
        return first + np.flatnonzero(self.held[own])

    def next_uses(self, rows: Int64, now: int) -> Int64:
        """Return the batch after `now` that needs each block of the camera for one of these frames, or `NEVER`."""
        found = np.full(len(self.held), NEVER, np.int64)
        frames = self._table.frames(rows)
        after = self._window.uses.next(frames, now)
        used = after < NEVER
        if self._frames is not None:
            used[used] = self._frames.slots_of(frames[used]) == NONE
        rows, after = rows[used], after[used]
        first = self._camera.first_block[rows].astype(np.int64)
        rows, after, first = rows[first >= 0], after[first >= 0], first[first >= 0]
        more = self._camera.last_block[rows] - first
        for i in range(int(more.max(initial=0)) + 1):
            np.minimum.at(found, first[more >= i] + i, after[more >= i])
        return found

    def _not_cached(self, frames: Int64) -> Int64:
        return frames if self._frames is None else frames[self._frames.slots_of(frames) == NONE]

    def _grow(self) -> None:
        """Make room for the blocks of episodes that were opened."""
        if more := len(self._blocks.start) - len(self.held):
            self.held = np.append(self.held, np.zeros(more, np.bool_))
            self.touched = np.append(self.touched, np.full(more, NONE, np.int32))
            self._epoch = np.append(self._epoch, np.full(more, NONE, np.int32))

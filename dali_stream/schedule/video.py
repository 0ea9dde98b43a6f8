"""Schedule of encoded video: which blocks are fetched for each batch and ahead of it, and which are evicted.

The blocks of the first batch are fetched alone, so that it is delivered soon. After that, blocks of later batches are fetched
ahead, in the order of the batches and up to a limit. If the memory is full, the blocks whose next uses are farthest away are
evicted.
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
BLOCK = 64 << 10  # bytes of a block, unless a GOP has more: about what 1.3 MB/s transfer in a round trip of 50 ms
RANGE = 4 << 20  # maximum bytes of a request: enough for the server to be efficient, and other requests wait only briefly
GROWTH = 2  # number of batches by which the look-ahead grows per planned batch
_SLACK = 32  # a full cache evicts 1/32 of its bytes more than necessary, so that the search for blocks to evict is rare
_FINISHED_EVERY = 16  # number of batches after which blocks are dropped whose frames are all cached


class Fetch(NamedTuple):
    """Adjacent blocks of a file, to fetch with one request.

    Attributes:
        batch: Batch for which the blocks are fetched.
        camera, episode: Camera and episode of the blocks.
        first: Number of the first block within the episode.
        ranges: (start, stop) of each block in the file.
    """

    batch: int
    camera: str
    episode: int
    first: int
    ranges: list[tuple[int, int]]


@dataclass
class VideoPlan:
    """Blocks of encoded video to fetch and evict for a batch.

    Attributes:
        needed: {camera: (episode, number) of each block that the batch decodes}.
        needed_bytes: Bytes of the needed blocks that no earlier batch of the epoch has needed.
        fetch: Requests to make, most urgent first.
        evict: (camera, episode, number) of each block to evict before blocks are fetched.
        evicted_early: Number of blocks that were evicted although a later batch was known to need them.
    """

    needed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    needed_bytes: int = 0
    fetch: list[Fetch] = field(default_factory=list)
    evict: list[tuple[str, int, int]] = field(default_factory=list)
    evicted_early: int = 0


class VideoPlanner:
    """Planner of the blocks to fetch and evict, one batch after another.

    Args:
        table: Table of the open episodes.
        windows: {camera whose video is fetched: its window}.
        frames: {camera: cache of its decoded frames}. Cameras whose frames are not cached are missing.
        block: Bytes of a block.
        look_ahead: Maximum number of batches to fetch ahead.

    Attributes:
        room: Bytes that encoded video may take.
        bytes: Bytes of the blocks that are in memory or being fetched.
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
        # Last batch whose blocks have been requested. After the memory was full: next batch at which to try to fetch ahead.
        self._fetched, self._retry = NONE, 0
        self._horizon = NEVER  # number of batches from the last eviction to the soonest next use of the blocks it evicted
        self._plan = VideoPlan()  # decisions since the last plan was returned

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
            MemoryBudgetError: If the blocks of the batch alone do not fit into the memory.
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
                f"memory_budget leaves {self.room} bytes for encoded video, of which {self.bytes} are in use, but a batch "
                f"needs {self._bytes(missing)} more. Use a larger memory_budget or a smaller batch_size"
            )
        self._fetch(now, now, missing)
        self._fetch_ahead(now, ahead)
        if self._keeps_frames and now % _FINISHED_EVERY == _FINISHED_EVERY - 1:
            for camera, blocks in self._cameras.items():
                self._evict(camera, blocks.finished(now))
        self._plan = VideoPlan()
        return plan

    def _fetch_ahead(self, now: int, ahead: Iterable[Samples]) -> None:
        """Fetch blocks for later batches, until one has an episode that is not open, or the memory is full."""
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
                # Memory is freed when batches before this one are planned. Waiting for a quarter of them saves attempts.
                self._retry = now + 1 + (batch - now) // 4
                break
            self._fetch(now, batch, missing)
            self._fetched = batch

    def _bytes(self, blocks: Mapping[str, Int64]) -> int:
        return sum(int(self._cameras[camera].sizes(rows).sum()) for camera, rows in blocks.items())

    def _make_room(self, missing: Mapping[str, Int64], now: int, later_than: int) -> bool:
        """Make room for missing blocks by evicting others whose next use is after batch `later_than`.

        Args:
            missing: {camera: blocks that need room}.
            now: Batch that is planned.
            later_than: Batch that needs the missing blocks.

        Returns:
            Whether the missing blocks fit. If not, nothing is evicted.
        """
        short = self.bytes + self._bytes(missing) - self.room
        if short <= 0:
            return True
        candidates = {camera: blocks.evictable(now, later_than) for camera, blocks in self._cameras.items()}
        rows, next_use, touched = (np.concatenate(column) for column in zip(*candidates.values(), strict=True))
        sizes = np.concatenate([self._cameras[camera].sizes(found) for camera, (found, *_) in candidates.items()])
        if sizes.sum() < short:
            return False
        # Among blocks with the same next use, such as `NEVER`, the least recently used ones are evicted: `nearest` keeps the
        # first ones of equal rank.
        order = np.argsort(-touched, kind="stable")
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
        """Request the missing blocks of a batch, for which the memory has room.

        Args:
            now: Batch that is planned.
            batch: Batch that needs the blocks.
            missing: {camera: blocks in increasing order}.
        """
        # All missing blocks are counted first, so that blocks that are fetched in addition do not take their room.
        for camera, rows in missing.items():
            self._hold(camera, rows, now)
        largest = max(min(RANGE, self.room // 128), self._block)
        # A request for a later batch may take longer, so it is extended by blocks that follow in the file.
        wanted = min(largest, self._block << min(batch - now, 16))
        for camera, rows in missing.items():
            blocks = self._cameras[camera]
            for group in blocks.groups(rows):
                if batch > now:
                    room = min(wanted - int(blocks.sizes(group).sum()), self.room - self.bytes)
                    # A block whose next use is later than those of blocks just evicted would soon be evicted itself.
                    behind = blocks.behind(int(group[-1]), now, now + min(self._horizon, NEVER - now), room)
                    self._hold(camera, behind, now)
                    group = np.concatenate([group, behind])
                ends = np.cumsum(blocks.sizes(group))  # split into requests of at most about `largest` bytes
                for part in np.split(group, np.flatnonzero(np.diff((ends - 1) // largest)) + 1):
                    [(episode, first)] = blocks.names(part[:1])
                    self._plan.fetch.append(Fetch(batch, camera, episode, first, blocks.ranges(part)))

    def _hold(self, camera: str, rows: Int64, now: int) -> None:
        blocks = self._cameras[camera]
        blocks.held[rows], blocks.touched[rows] = True, now
        self.bytes += int(blocks.sizes(rows).sum())


class _CameraBlocks:
    """Blocks of one camera's open episodes. The number of a block is its entry in the camera's `BlockTable`.

    Attributes:
        held: Whether each block is in memory or being fetched.
        touched: Last batch that needed each block, or during whose planning the block was fetched.
    """

    def __init__(self, table: EpisodeTable, camera: str, window: Window, frames: FrameCache | None) -> None:
        blocks = table.cameras[camera].blocks
        assert blocks is not None
        self._table, self._camera, self._blocks = table, table.cameras[camera], blocks
        self._window, self._frames = window, frames
        self.held = np.empty(0, np.bool_)
        self.touched, self._epoch = np.empty(0, np.int32), np.empty(0, np.int32)

    def of(self, rows: Int64) -> Int64:
        """Return the blocks that decoding the frames of these rows needs, in increasing order."""
        self._grow()
        # The first block of each frame, and for frames with several blocks the second one, the third one and so on.
        first = self._camera.first_block[rows].astype(np.int64)
        more = (self._camera.last_block[rows] - first)[first >= 0]
        first = first[first >= 0]
        return np.unique(np.concatenate([first, *(first[more >= i] + i for i in range(1, int(more.max(initial=0)) + 1))]))

    def missing(self, samples: Samples) -> Int64:
        """Return the blocks that a batch needs for frames that are not cached, without those that are held."""
        blocks = self.of(self._table.rows(self._not_cached(np.unique(self._window.frames(samples)))))
        return blocks[~self.held[blocks]]

    def sizes(self, blocks: Int64) -> Int64:
        """Return the size of each block in bytes."""
        return self._blocks.stop[blocks] - self._blocks.start[blocks]

    def ranges(self, blocks: Int64) -> list[tuple[int, int]]:
        """Return the byte range (start, stop) of each block in its file."""
        return list(zip(self._blocks.start[blocks].tolist(), self._blocks.stop[blocks].tolist(), strict=True))

    def names(self, blocks: Int64) -> list[tuple[int, int]]:
        """Return (episode, number within the episode) of each block."""
        first = self._blocks.first
        return [(e, b - first[e]) for e, b in zip(self._blocks.episode[blocks].tolist(), blocks.tolist(), strict=True)]

    def count(self, blocks: Int64, epoch: int) -> int:
        """Mark blocks as needed by an epoch. Return the bytes of those that it had not needed before."""
        fresh = blocks[self._epoch[blocks] != epoch]
        self._epoch[fresh] = epoch
        return int(self.sizes(fresh).sum())

    def groups(self, blocks: Int64) -> list[Int64]:
        """Split blocks, given in increasing order, into groups that are adjacent in a file."""
        apart = np.diff(blocks) > 1
        apart |= self._blocks.episode[blocks[1:]] != self._blocks.episode[blocks[:-1]]
        apart |= self._blocks.start[blocks[1:]] != self._blocks.stop[blocks[:-1]]
        return np.split(blocks, np.flatnonzero(apart) + 1) if len(blocks) else []

    def behind(self, block: int, now: int, before: int, room: int) -> Int64:
        """Return the adjacent blocks that follow a block and are worth fetching with it.

        Args:
            block: Block that is fetched.
            now: Batch that is planned.
            before: Batch before which the returned blocks must be needed.
            room: Maximum number of bytes of the returned blocks together.
        """
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
        """Return the held blocks that may be evicted.

        These are the blocks that were not touched by batch `now`, and whose next use is after batch `later_than`.

        Returns:
            Blocks, batch of their next use, and batch of their last use, each of shape (n,).
        """
        held = np.flatnonzero(self.held & (self.touched != now))
        next_use = self.next_uses(np.flatnonzero(self._camera.first_block != NONE), now)[held]
        late = next_use > later_than
        return held[late], next_use[late], self.touched[held[late]].astype(np.int64)

    def finished(self, now: int) -> Int64:
        """Return the held blocks whose frames are all cached, without those that batch `now` has touched."""
        needed = np.zeros(len(self.held), np.bool_)
        rows = np.flatnonzero(self._camera.first_block != NONE)
        needed[self.of(self._table.rows(self._not_cached(self._table.frames(rows))))] = True
        return np.flatnonzero(self.held & ~needed & (self.touched != now))

    def forget(self, episode: int) -> Int64:
        """Return the held blocks of an episode, and reset the state of all its blocks. The caller resets `held`."""
        self._grow()
        first = self._blocks.first[episode]
        own = slice(first, first + self._blocks.count[episode])
        self.touched[own] = self._epoch[own] = NONE
        return first + np.flatnonzero(self.held[own])

    def next_uses(self, rows: Int64, now: int) -> Int64:
        """Return the first batch after `now` that needs each block of the camera for frames that are not cached.

        Args:
            rows: Rows of the frames to consider.
            now: Batch that is planned.

        Returns:
            Batch of each block, in the order of `held`. `NEVER` if none is known.
        """
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
        """Extend the arrays for the blocks of episodes that were opened."""
        if more := len(self._blocks.start) - len(self.held):
            self.held = np.append(self.held, np.zeros(more, np.bool_))
            self.touched = np.append(self.touched, np.full(more, NONE, np.int32))
            self._epoch = np.append(self._epoch, np.full(more, NONE, np.int32))

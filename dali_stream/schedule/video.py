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
from dali_stream.schedule.episodes import NONE, BlockName, EpisodeTable
from dali_stream.schedule.frames import FrameCache
from dali_stream.schedule.look_ahead import NEVER, Window
from dali_stream.schedule.samples import Samples

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
BLOCK = 64 << 10  # bytes of a block, unless a GOP is larger. At 1.3 MB/s, a block takes as long as a round trip of 50 ms
RANGE = 4 << 20  # maximum bytes of a request: large enough to be efficient, small enough to delay other requests only briefly
GROWTH = 2  # number of batches by which the look-ahead grows per planned batch
# A full cache evicts 1/32 of its bytes more than necessary. Each search for blocks to evict computes the next uses of all
# frames of open episodes, so it should not be repeated for every batch.
_SLACK = 32
_FINISHED_EVERY = 16  # number of batches after which the planner evicts the blocks whose frames are all cached


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
        needed: Name of each block that the batch decodes.
        needed_bytes: Bytes of the needed blocks, without those that an earlier batch of the epoch has needed since their
            episode was opened.
        fetch: Requests to make, most urgent first.
        evict: Name of each block to evict before blocks are fetched.
        evicted_early: Number of blocks that were evicted although a later batch was known to need them.
    """

    needed: list[BlockName] = field(default_factory=list)
    needed_bytes: int = 0
    fetch: list[Fetch] = field(default_factory=list)
    evict: list[BlockName] = field(default_factory=list)
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
        self._table, self._windows, self._frames = table, windows, frames
        self._block, self._look_ahead = block, look_ahead
        self.room = self.bytes = 0
        self._now = NONE  # batch that is being planned, or that was planned last
        self._fetched = NONE  # last batch whose blocks were requested ahead
        # First batch whose plan may fetch ahead. If the memory is full of blocks that are needed sooner, this is set to a later
        # batch, since the next batches would find the memory full as well.
        self._retry_at = 0
        # Number of batches from the last eviction to the first use of a block that it evicted. The memory holds about the
        # blocks that are needed within this time, so an additional block is fetched only if it is needed sooner.
        self._soonest_evicted = NEVER
        self._plan = VideoPlan()  # decisions since the last plan was returned

    def close(self, episode: int) -> None:
        """Evict the blocks of an episode before it is closed. Blocks that a later batch needs will be fetched again."""
        for camera in self._windows:
            blocks = self._table.blocks.entries(camera, episode)
            held = blocks[self._table.blocks.held[blocks]]
            used, _ = self._uses(camera, self._table.rows_of(episode))
            self._plan.evicted_early += int(np.isin(held, used).sum())
            self._evict(held)

    def plan(self, samples: Samples, decoded: Mapping[str, Int64], ahead: Iterable[Samples]) -> VideoPlan:
        """Plan a batch.

        Args:
            samples: Samples of the batch.
            decoded: {camera: rows of the frames that the batch decodes}.
            ahead: Batches after it.

        Raises:
            MemoryBudgetError: If the blocks of the batch alone do not fit into the memory.
        """
        self._now, plan, blocks = samples.number, self._plan, self._table.blocks
        needed = self._needed(decoded)
        plan.needed = blocks.names(needed)
        fresh = needed[blocks.epoch[needed] != samples.epoch]
        plan.needed_bytes = int(blocks.sizes(fresh).sum())
        # Needed blocks are marked before room is made, so that they are not evicted for missing ones.
        blocks.epoch[fresh], blocks.touched[needed] = samples.epoch, self._now
        missing = needed[~blocks.held[needed]]
        if not self._make_room(missing, self._now):
            raise MemoryBudgetError(
                f"memory_budget leaves {self.room} bytes for encoded video, of which {self.bytes} are in use, but a batch "
                f"needs {blocks.sizes(missing).sum()} more. Use a larger memory_budget or a smaller batch_size"
            )
        self._fetch(self._now, missing)
        self._fetch_ahead(ahead)
        if self._now % _FINISHED_EVERY == _FINISHED_EVERY - 1:
            self._evict_finished()
        self._plan = VideoPlan()
        return plan

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
            frames = {camera: np.unique(window.frames(samples)) for camera, window in self._windows.items()}
            rows = {camera: self._table.rows(each[~self._is_cached(camera, each)]) for camera, each in frames.items()}
            needed = self._needed(rows)
            missing = needed[~self._table.blocks.held[needed]]
            if not self._make_room(missing, batch):
                # Memory is freed when batches before this one are planned. Trying again only after a quarter of them avoids
                # attempts that would fail.
                self._retry_at = self._now + 1 + (batch - self._now) // 4
                break
            self._fetch(batch, missing)
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
        self._plan.evicted_early += int((next_use[evicted] < NEVER).sum())
        self._evict(evicted)
        return True

    def _fetch(self, batch: int, missing: Int64) -> None:
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
            ends = np.cumsum(blocks.sizes(group))  # split into requests of at most about `largest` bytes
            for part in np.split(group, np.flatnonzero(np.diff((ends - 1) // largest)) + 1):
                ranges = list(zip(blocks.start[part].tolist(), blocks.stop[part].tolist(), strict=True))
                self._plan.fetch.append(Fetch(batch, *blocks.names(part[:1])[0], ranges))

    def _following(self, block: int, room: int) -> Int64:
        """Return the adjacent blocks after a block that are worth fetching in the same request.

        Args:
            block: Block that is fetched.
            room: Maximum number of bytes of the returned blocks together.
        """
        blocks = self._table.blocks
        [(camera, episode, _)] = blocks.names(np.array([block]))
        following = np.arange(block + 1, int(blocks.entries(camera, episode)[-1]) + 1)
        good = ~blocks.held[following] & (blocks.start[following] == blocks.stop[following - 1])
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
        table.held[blocks], table.touched[blocks] = True, self._now
        self.bytes += int(table.sizes(blocks).sum())

    def _evict(self, blocks: Int64) -> None:
        table = self._table.blocks
        table.held[blocks] = False
        self.bytes -= int(table.sizes(blocks).sum())
        self._plan.evict += table.names(blocks)

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
        cache = self._frames.get(camera)
        return np.zeros(len(frames), np.bool_) if cache is None else cache.slots_of(frames) != NONE

    def _is_idle(self) -> Mask:
        """Return a mask of the held blocks that the planned batch neither needs nor fetches. Only these may be evicted."""
        blocks = self._table.blocks
        return blocks.held[: len(blocks)] & (blocks.touched[: len(blocks)] != self._now)

"""Encoded video as blocks: whole GOPs of an episode, of a size that is worth a request; and which of them are in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.clip import is_avc
from dali_stream.mp4.index import VideoIndex
from dali_stream.schedule.frame_table import FrameTable
from dali_stream.schedule.uses import NEVER, Uses

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
BLOCK = 64 << 10  # bytes of a block, or a GOP if that is more: what a round trip of 50 ms carries at some MB/s
_HELD_BACK = 8  # packets after one of an open GOP of H.264 that decoding it may need, see `clip.span`


class Cut(NamedTuple):
    """An episode's part of a video file, K blocks of it.

    Attributes:
        start, stop: (K,) int64, bytes of the file.
        first, last: (L,) int64 per frame, the blocks that decoding all frames of its GOP takes; -1 where it has no packet.
    """

    start: Int64
    stop: Int64
    first: Int64
    last: Int64


def cut(index: VideoIndex, packet: Int64, keyframe: Int64, size: int = BLOCK) -> Cut:
    """Cuts what an episode needs of a file into blocks of about `size` bytes. `packet` and `keyframe` are as in `learn`."""
    first = np.full(len(packet), -1, np.int64)
    last = first.copy()
    there = packet >= 0
    if not there.any():
        return Cut(np.empty(0, np.int64), np.empty(0, np.int64), first, last)
    reach = _HELD_BACK if index.open_gops and is_avc(index) else 0
    final = np.minimum(packet[there] + reach, len(index) - 1)
    begin, group = np.unique(np.searchsorted(index.keyframes, keyframe[there], side="right") - 1, return_inverse=True)
    end = begin.copy()  # per GOP that frames begin with, the last one that decoding them takes
    np.maximum.at(end, group, np.searchsorted(index.keyframes, final, side="right") - 1)
    origin, stop = int(begin[0]), int(end.max()) + 1
    packets = slice(int(index.keyframes[origin]), int(index.keyframes[stop]) if stop < len(index.keyframes) else len(index))
    keyframes = index.keyframes[origin:stop] - packets.start
    offset, sizes = index.offset[packets], index.size[packets]
    before = np.cumsum(sizes)[keyframes] - sizes[keyframes]
    blocks = begin - origin  # each begins with a GOP that frames begin with: so there are no more blocks than frames
    blocks = blocks[np.append(True, np.diff(before[blocks] // size) > 0)]

    def block(gop: Int64) -> Int64:
        return np.searchsorted(blocks, gop - origin, side="right") - 1

    first[there], last[there] = block(begin)[group], block(end)[group]
    return Cut(
        np.minimum.reduceat(np.minimum.reduceat(offset, keyframes), blocks),
        np.maximum.reduceat(np.maximum.reduceat(offset + sizes, keyframes), blocks),
        first,
        last,
    )


class BlockTable:
    """The blocks of one camera's open episodes. Block k of an episode has the row of the episode's frame k.

    Args:
        table: the frames; gets the columns of this camera.
        camera: its name.
        uses: when its frames are shown.
        slot: the column that tells which of its frames are cached, if any are.
    """

    def __init__(self, table: FrameTable, camera: str, uses: Uses, slot: str | None) -> None:
        self._table, self._uses, self._slot = table, uses, slot
        names = ("first", "last", "start", "stop", "touched", "counted")
        self._first, self._last, self._start, self._stop, self._touched, self._counted = (f"{n} {camera}" for n in names)
        self._held = f"held {camera}"
        for name in (self._first, self._last):
            table.add_column(name, np.int64, -1)
        for name in (self._start, self._stop):
            table.add_column(name, np.int64, 0)
        for name in (self._touched, self._counted):
            table.add_column(name, np.int32, -1)
        table.add_column(self._held, np.bool_, 0)

    def learn(self, episode: int, blocks: Cut) -> None:
        """Takes the blocks of an open episode."""
        row, columns = int(self._table.first_row[episode]), self._table.columns
        columns[self._start][row : row + len(blocks.start)] = blocks.start
        columns[self._stop][row : row + len(blocks.start)] = blocks.stop
        frames = slice(row, row + len(blocks.first))
        columns[self._first][frames] = np.where(blocks.first >= 0, row + blocks.first, -1)
        columns[self._last][frames] = np.where(blocks.last >= 0, row + blocks.last, -1)

    def of(self, frames: Int64) -> Int64:
        """The blocks that decoding these frames takes, rising."""
        columns = self._table.columns
        first = columns[self._first][frames]
        first, more = first[first >= 0], (columns[self._last][frames] - first)[first >= 0]
        return np.unique(np.concatenate([first, *(first[more >= i] + i for i in range(1, int(more.max(initial=0)) + 1))]))

    def missing(self, frames: Int64) -> Int64:
        """Blocks to fetch for these frames: needed by those that are not cached, and not in memory."""
        if self._slot is not None:
            frames = frames[self._table.columns[self._slot][frames] < 0]
        blocks = self.of(np.unique(frames))
        return blocks[~self.held(blocks)]

    def held(self, blocks: Int64) -> Mask:
        """Whether each is in memory, or on its way."""
        return self._table.columns[self._held][blocks]

    def sizes(self, blocks: Int64) -> Int64:
        """Bytes of each."""
        return self._table.columns[self._stop][blocks] - self._table.columns[self._start][blocks]

    def ranges(self, blocks: Int64) -> list[tuple[int, int]]:
        """(start, stop) in the file, of each."""
        columns = self._table.columns
        return list(zip(columns[self._start][blocks].tolist(), columns[self._stop][blocks].tolist(), strict=True))

    def touch(self, blocks: Int64, batch: int) -> None:
        """A batch needs these blocks."""
        self._table.columns[self._touched][blocks] = batch

    def count(self, blocks: Int64, epoch: int) -> int:
        """Bytes of the blocks that this epoch needs for the first time."""
        counted = self._table.columns[self._counted]
        fresh = blocks[counted[blocks] != epoch]
        counted[fresh] = epoch
        return int(self.sizes(fresh).sum())

    def hold(self, blocks: Int64) -> None:
        """Marks blocks as fetched."""
        self._table.columns[self._held][blocks] = True
        self._table.hold(blocks)

    def names(self, blocks: Int64) -> list[tuple[int, int]]:
        """(episode, number in it) of each."""
        episode = self._table.columns["episode"][blocks]
        return list(zip(episode.tolist(), (blocks - self._table.first_row[episode]).tolist(), strict=True))

    def groups(self, blocks: Int64) -> list[Int64]:
        """Rising blocks, grouped into runs that lie end to end in a file."""
        columns = self._table.columns
        apart = (np.diff(blocks) > 1) | (columns["episode"][blocks[1:]] != columns["episode"][blocks[:-1]])
        apart |= columns[self._start][blocks[1:]] != columns[self._stop][blocks[:-1]]
        return np.split(blocks, np.flatnonzero(apart) + 1) if len(blocks) else []

    def behind(self, block: int, before: int) -> Int64:
        """The run of blocks directly behind this one that are not in memory and that are needed before batch `before`."""
        columns = self._table.columns
        episode = int(columns["episode"][block])
        frames = slice(int(self._table.first_row[episode]), block + 1)
        frames = slice(frames.start, frames.start + int(self._table.lengths[episode]))
        after = self._next(np.arange(frames.start, frames.stop))[block + 1 - frames.start :]
        start, stop = columns[self._start][block + 1 : frames.stop], columns[self._stop][block : frames.stop - 1]
        good = (start == stop) & ~columns[self._held][block + 1 : frames.stop] & (after < before)
        return block + 1 + np.arange(len(good) if good.all() else int(np.argmin(good)))

    def candidates(self) -> tuple[Int64, Int64, Int64, Int64]:
        """Of all blocks in memory: rows, bytes, the next batch that needs each, and the last one that did."""
        columns = self._table.columns
        held = np.flatnonzero(columns[self._held])
        return held, self.sizes(held), self._next(None)[held], columns[self._touched][held].astype(np.int64)

    def drop(self, blocks: Int64) -> None:
        """Evicts blocks."""
        self._table.columns[self._held][blocks] = False
        self._table.release(blocks)

    def finished(self, batch: int) -> Int64:
        """Blocks in memory all of whose frames are cached as decoded frames, but for those that this batch needs."""
        columns = self._table.columns
        left = np.zeros(len(columns[self._held]), np.bool_)
        if self._slot is not None:
            open_ = (columns[self._first] >= 0) & (columns[self._slot] < 0)
            first, more = columns[self._first][open_], columns[self._last][open_] - columns[self._first][open_]
            left[first] = True
            for i in range(1, int(more.max(initial=0)) + 1):
                left[first[more >= i] + i] = True
        return np.flatnonzero(columns[self._held] & ~left & (columns[self._touched] != batch))

    def _next(self, frames: Int64 | None) -> Int64:
        """Per block with a row among those of these frames (None: of all), the next batch that needs it."""
        columns = self._table.columns
        first = columns[self._first] if frames is None else columns[self._first][frames]
        known = np.flatnonzero(first >= 0)
        found = np.full(len(first), NEVER, np.int64)
        if not len(known):
            return found
        rows = known if frames is None else frames[known]
        after = self._uses.next(rows)
        if self._slot is not None:
            after = np.where(columns[self._slot][rows] >= 0, NEVER, after)
        origin = 0 if frames is None else int(frames[0])
        block, more = first[known] - origin, columns[self._last][rows] - first[known]
        runs = np.flatnonzero(np.diff(block, prepend=-1))
        np.minimum.at(found, block[runs], np.minimum.reduceat(after, runs))
        for i in range(1, int(more.max()) + 1):
            np.minimum.at(found, block[more >= i] + i, after[more >= i])
        return found

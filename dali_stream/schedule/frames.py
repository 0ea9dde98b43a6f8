"""Which frames of a camera are decoded for each batch, and which decoded frames stay in memory until when.

Each GOP that a batch needs is decoded from its keyframe. Frames that come out beside those asked for are kept for later
batches, and a GOP is decoded further than the batch needs where that brings frames worth keeping. Where the cache is full, the
frame whose next use is farthest away goes (Belady 1966, "A study of replacement algorithms for a virtual-storage computer").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.schedule.frame_table import FrameTable
from dali_stream.schedule.uses import NEVER, Uses

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NONE = -1  # no slot, no packet
_SLACK = 256  # a full cache gives up one frame in so many at once, so that the farthest uses are looked for rarely


@dataclass(frozen=True)
class FrameStep:
    """What one camera does for one batch.

    Attributes:
        show: (B, T) int64, the slot of each frame of the batch; `NONE` where the video has no packet for it.
        episode, frame, packet, slot: (n,) int64, what to decode: frame `frame` of episode `episode`, which is packet `packet`
            of its file, into slot `slot`. Frames of one GOP stand together, in decode order.
        gop: (n,) int64, the same number for frames of one GOP.
        hits: how many of the B · T frames an earlier batch has decoded.
    """

    show: Int64
    episode: Int64
    frame: Int64
    packet: Int64
    slot: Int64
    gop: Int64
    hits: int


class FrameCache:
    """The schedule of one camera's decoded frames.

    A slot is a place for one decoded frame. The first `kept` hold frames that later batches show. The others hold what only one
    batch shows, a part of them for each of the `in_flight` batches that may be planned and not delivered yet.

    Args:
        table: the frames; gets the columns of this camera.
        camera: its name.
        uses: when its frames are shown.
        kept: slots for frames that later batches show.
        batch_frames: frames of a batch at most, B · T.
        in_flight: batch n is planned when batch n - in_flight has been delivered: then its slots may be written again.
        keep_all: `kept` is enough for every frame of the dataset, so none ever goes.

    Attributes:
        slots: how many there are.
        cached: frames in the cache.
        evicted_before_use: frames that went although a later batch was known to show them.
    """

    def __init__(
        self, table: FrameTable, camera: str, uses: Uses, *, kept: int, batch_frames: int, in_flight: int, keep_all: bool
    ) -> None:
        self._table, self._uses = table, uses
        self._slot, self._packet, self._gop, self._gop_frames = (
            f"{name} {camera}" for name in ("slot", "packet", "gop", "gop frames")
        )
        for name in (self._slot, self._packet, self._gop):
            table.add_column(name, np.int64, NONE)
        table.add_column(self._gop_frames, np.int32, 0)
        self._kept, self._batch_frames, self._in_flight, self._keep_all = kept, batch_frames, in_flight, keep_all
        self.slots = kept + in_flight * batch_frames
        self._row = np.full(kept, NONE, np.int64)  # per slot, the frame in it
        self._touched = np.full(kept, -in_flight, np.int64)  # per slot, the last batch that writes or shows it
        self._free = np.arange(kept, dtype=np.int64)[::-1].copy()  # a stack: memory that was never used is used last
        self._free_count = kept
        self._cooling: dict[int, list[Int64]] = {}  # slots that are free from a batch on
        self._limit, self._limit_batch = NEVER - 1, 0  # frames with a later next use were not kept at that batch
        self.cached = self.evicted_before_use = 0

    def unknown(self, episodes: Int64) -> Int64:
        """Those of these open episodes that `learn` has to be called for."""
        return episodes[self._table.columns[self._gop][self._table.first_row[episodes]] == NONE]

    def learn(self, episode: int, packet: npt.NDArray[np.integer], keyframe: npt.NDArray[np.integer]) -> None:
        """Says where an open episode's frames are in its video file.

        Args:
            episode: the episode.
            packet: (L,) per frame, its packet, in decode order of the file; `NONE` where the video has none.
            keyframe: (L,) per frame, the packet that decoding it begins with; frames of one GOP stand together.
        """
        first, columns = int(self._table.first_row[episode]), self._table.columns
        starts = np.flatnonzero(np.append(True, keyframe[1:] != keyframe[:-1]))
        frames = np.diff(np.append(starts, len(packet)))
        columns[self._packet][first : first + len(packet)] = packet
        columns[self._gop][first : first + len(packet)] = first + np.repeat(starts, frames)
        columns[self._gop_frames][first + starts] = frames

    def step(self, batch: int, rows: Int64) -> FrameStep:
        """Plans a batch.

        Args:
            batch: its number; `uses` has just passed it.
            rows: (B, T) its frames, of episodes that `learn` has been called for.
        """
        columns = self._table.columns
        for slots in self._cooling.pop(batch, ()):
            self._release(slots)
        shown, place = np.unique(rows, return_inverse=True)
        slot = columns[self._slot][shown]
        hit = slot >= 0
        self._touched[slot[hit]] = batch
        wanted = shown[~hit]
        wanted = wanted[columns[self._packet][wanted] >= 0]
        decode = np.concatenate([wanted, self._beside(wanted)])
        kept = self._worth_keeping(batch, decode, shown[hit])
        self._keep(batch, decode[kept])
        kept[: len(wanted)] = True
        decode = decode[kept]
        into = columns[self._slot][decode]
        own = np.flatnonzero(into == NONE)  # frames that only this batch shows
        into[own] = self._kept + batch % self._in_flight * self._batch_frames + np.arange(len(own))
        slot[np.searchsorted(shown, wanted)] = into[: len(wanted)]
        self._forget(batch, shown[hit][self._uses.next(shown[hit]) > self._limit_at(batch)])
        order = np.lexsort((columns[self._packet][decode], columns[self._gop][decode]))
        decode = decode[order]
        episode = columns["episode"][decode].astype(np.int64)
        return FrameStep(
            show=slot[place].reshape(rows.shape),
            episode=episode,
            frame=decode - self._table.first_row[episode],
            packet=columns[self._packet][decode],
            slot=into[order],
            gop=columns[self._gop][decode],
            hits=int(hit[place].sum()),
        )

    def _beside(self, wanted: Int64) -> Int64:
        """The other frames of these frames' GOPs that are not cached."""
        columns = self._table.columns
        gops = np.unique(columns[self._gop][wanted])
        frames = columns[self._gop_frames][gops].astype(np.int64)
        before = np.cumsum(frames) - frames
        members = np.repeat(gops - before, frames) + np.arange(int(frames.sum()))
        others = (columns[self._slot][members] == NONE) & (columns[self._packet][members] >= 0)
        others[np.searchsorted(members, wanted)] = False
        return members[others]

    def _worth_keeping(self, batch: int, frames: Int64, hits: Int64) -> Mask:
        """Which of these frames, about to be decoded, get a slot of the cache. Makes room for them."""
        after = self._uses.next(frames)
        kept = after <= self._limit_at(batch)
        if kept.sum() > self._free_count:
            self._make_room(batch, np.concatenate([after[kept], self._uses.next(hits)]))
            kept = after <= self._limit_at(batch)
        if (excess := int(kept.sum()) - self._free_count) > 0:  # slots of batches that are not delivered yet
            nearest = np.flatnonzero(kept)[np.argsort(after[kept], kind="stable")]
            kept[nearest[len(nearest) - excess :]] = False
        return kept

    def _make_room(self, batch: int, coming: Int64) -> None:
        """Evicts the frames with the farthest next uses, and does not keep such frames from now on."""
        held = np.flatnonzero((self._row != NONE) & (self._touched != batch))
        after = self._uses.next(self._row[held])
        everything = np.concatenate([after, coming])
        most = self._kept - self._kept // _SLACK
        if len(everything) <= most:
            return
        self._limit = int(np.partition(everything, most - 1)[most - 1]) if most else -1
        self._limit, self._limit_batch = min(self._limit, NEVER - 1), batch
        self._forget(batch, self._row[held[after > self._limit]])

    def _limit_at(self, batch: int) -> int:
        """The latest next use that a frame is kept for. It moves on with the batches."""
        if self._keep_all:
            return NEVER
        return min(self._limit + batch - self._limit_batch, NEVER - 1)

    def _keep(self, batch: int, frames: Int64) -> None:
        self._free_count -= len(frames)
        slots = self._free[self._free_count : self._free_count + len(frames)][::-1]
        self._table.columns[self._slot][frames] = slots
        self._row[slots] = frames
        self._touched[slots] = batch
        self._table.hold(frames)
        self.cached += len(frames)

    def _forget(self, batch: int, frames: Int64) -> None:
        """Takes frames out of the cache. Their slots are free when the batches that write or show them are delivered."""
        slots = self._table.columns[self._slot][frames]
        self._table.columns[self._slot][frames] = NONE
        self._row[slots] = NONE
        self.cached -= len(frames)
        self.evicted_before_use += int((self._uses.next(frames) < NEVER).sum())
        free_from = self._touched[slots] + self._in_flight
        self._release(slots[free_from <= batch])
        for later in np.unique(free_from[free_from > batch]).tolist():
            self._cooling.setdefault(later, []).append(slots[free_from == later])
        self._table.release(frames)

    def _release(self, slots: Int64) -> None:
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

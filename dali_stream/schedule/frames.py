"""Which frames of a camera are decoded for each batch, and which decoded frames stay in memory until when.

Each GOP that a batch needs is decoded from its keyframe. Frames that come out beside the requested ones are kept for later
batches, and a GOP is decoded further than the batch needs where that brings frames worth keeping. If the cache is full, the
frame whose next use is farthest away is evicted.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.schedule.belady import nearest
from dali_stream.schedule.episodes import NONE, EpisodeTable
from dali_stream.schedule.look_ahead import NEVER, Window

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_SLACK = 256  # a full cache gives up one frame in so many at once, so that the farthest uses are looked for rarely


@dataclass(frozen=True)
class FramePlan:
    """What one camera does for one batch.

    Attributes:
        show: Slot of each frame of the batch, shape (B, T). `NONE` where the video has no packet for it.
        episode, frame, packet, slot: What to decode, each of shape (n,): frame `frame` of episode `episode`, which is packet
            `packet` of its file, into slot `slot`. Frames of one GOP stand together, in decode order.
        gop: The same number for frames of one GOP, shape (n,).
        hits: How many of the B · T frames an earlier batch has decoded.
        decodes: How many frames are decoded, those that are only on the way to others included.
        evicted: How many frames were evicted although a later batch was known to show them.
    """

    show: Int64
    episode: Int64
    frame: Int64
    packet: Int64
    slot: Int64
    gop: Int64
    hits: int
    decodes: int
    evicted: int

    def __str__(self) -> str:
        def listed(values: Int64) -> str:
            return ", ".join(map(str, values.reshape(-1).tolist()))

        gops = [self.gop == gop for gop in np.unique(self.gop)]
        lines = [
            f"decode episode {self.episode[own][0]} frames {listed(self.frame[own])} into slots {listed(self.slot[own])}"
            for own in gops
        ]
        return "\n".join([*lines, f"show slots {listed(self.show)}"])


class FrameCache:
    """The decoded frames of one camera.

    A slot is the place of one decoded frame in memory. Each frame of a batch has a slot until the batch is delivered. Of all
    other frames, up to `kept` are cached: those with the nearest next uses.

    Args:
        table: Open episodes.
        camera: Name of the camera.
        window: Its window.
        kept: Number of frames that may be kept for later batches.
        batch_frames: Maximum number of frames of a batch, B · T.
        in_flight: Batch n is planned when batch n - in_flight has been delivered. Then its slots may be written again.

    Attributes:
        slots: Number of slots: for cached frames, and for the batches in flight.
    """

    def __init__(
        self, table: EpisodeTable, camera: str, window: Window, *, kept: int, batch_frames: int, in_flight: int
    ) -> None:
        self._table, self._camera, self._window = table, table.cameras[camera], window
        self._kept, self._in_flight = kept, in_flight
        self.slots = kept + in_flight * batch_frames
        self._slot_of: dict[int, int] = {}  # of cached frames
        self._state = _Slots(self.slots, in_flight)
        self._room = kept  # frames that may still be kept
        self._room_later = defaultdict[int, int](int)  # more of them, from a batch on

    @property
    def cached(self) -> int:
        """Number of frames that are kept."""
        return len(self._slot_of)

    @property
    def keeps_all(self) -> bool:
        """Whether every frame of the dataset may be kept, so that none is ever evicted."""
        return self._kept >= int(self._table.lengths.sum())

    @property
    def full(self) -> bool:
        """Whether frames have to be evicted before others can be cached."""
        return self.cached >= self._kept - self._kept // _SLACK - 1

    def slots_of(self, frames: Int64) -> Int64:
        """Return the slot of each frame. `NONE` if it is not cached."""
        return np.fromiter(map(self._slot_of.get, frames.tolist(), itertools.repeat(NONE)), np.int64, len(frames))

    def kept(self) -> list[tuple[int, int]]:
        """Return (frame, batch that shows it next) of all cached frames."""
        return [(frame, int(self._state.next_use[slot])) for frame, slot in self._slot_of.items()]

    def foresee(self, batch: int, frames: Int64) -> None:
        """Take note that the order was read ahead to a batch, which shows these frames."""
        if not self.keeps_all:
            slots = self.slots_of(frames)
            slots = slots[slots >= 0]
            self._state.next_use[slots] = np.minimum(self._state.next_use[slots], batch)

    def plan(self, batch: int, frames: Int64) -> FramePlan:
        """Plan a batch.

        Args:
            batch: Number of the batch.
            frames: Frames that it shows, of open episodes, shape (B, T).
        """
        self._state.begin(batch)
        self._room += self._room_later.pop(batch, 0)
        shown, place = np.unique(frames, return_inverse=True)
        slot = self.slots_of(shown)
        hit = slot >= 0
        self._state.touched[slot[hit]] = batch
        rows = self._table.rows(shown[~hit])
        present = self._camera.packet[rows] >= 0
        wanted = rows[present]
        beside = self._beside(wanted)
        decode, keep, evicted = self._choose(batch, wanted, beside, shown[hit], slot[hit])
        into = self._state.take(batch, len(decode))
        self._keep(decode[keep], into[keep], batch)
        self._state.free_later(batch, into[~keep])
        slot[np.flatnonzero(~hit)[present]] = into[: len(wanted)]
        packet, gop = self._camera.packet[decode].astype(np.int64), self._camera.gops(decode)
        order = np.lexsort((packet, gop))
        decode, packet, gop = decode[order], packet[order], gop[order]
        episode = self._table.episode[decode].astype(np.int64)
        return FramePlan(
            show=slot[place].reshape(frames.shape),
            episode=episode,
            frame=decode - self._table.first_row[episode],
            packet=packet,
            slot=into[order],
            gop=gop,
            hits=int(hit[place].sum()),
            decodes=self._decodes(packet, gop),
            evicted=evicted,
        )

    def _beside(self, wanted: Int64) -> Int64:
        """Return the rows of the other frames of these frames' GOPs that are not cached."""
        members = self._camera.members(np.unique(self._camera.gops(wanted)))
        others = self._camera.packet[members] >= 0
        others[np.searchsorted(members, wanted)] = False
        members = members[others]
        return members[self.slots_of(self._table.frames(members)) == NONE]

    def _decodes(self, packet: Int64, gop: Int64) -> int:
        """Return how many frames are decoded for these packets: each GOP from its keyframe to the last of them."""
        if not len(gop):
            return 0
        starts = np.flatnonzero(np.diff(gop, prepend=NONE))
        last = np.append(starts[1:], len(gop)) - 1
        return int((packet[last] - self._camera.packet[gop[starts]] + 1).sum())

    def _choose(self, batch: int, wanted: Int64, beside: Int64, hits: Int64, hit_slots: Int64) -> tuple[Int64, Mask, int]:
        """Choose what is decoded and kept. Evict other frames if they are farther from their next use.

        Args:
            batch: Number of the batch.
            wanted: Rows of the frames that the batch shows and that must be decoded.
            beside: Rows of frames that may be decoded beside them.
            hits, hit_slots: Cached frames that the batch shows, and their slots.

        Returns:
            Rows to decode, the wanted ones first; a mask of those to keep after the batch; and how many frames with a known
            use were evicted.
        """
        coming = np.concatenate([wanted, beside])
        keep, count, evicted = np.ones(len(coming), np.bool_), len(wanted), 0
        if not self.keeps_all:
            next_use = self._state.next_use
            after = self._window.uses.next(self._table.frames(coming), batch)
            next_use[hit_slots] = self._window.uses.next(hits, batch)
            # A frame that the batch shows, and no later batch is known to show, is not kept. A frame decoded beside it may be
            # kept as long as there is room: its next use may lie beyond what has been read of the order.
            keep[:count], stays = after[:count] < NEVER, next_use[hit_slots] < NEVER
            if keep.sum() > self._room + (~stays).sum():
                held = np.flatnonzero((self._state.frame != NONE) & (self._state.touched != batch))
                parts = next_use[held], after[keep], next_use[hit_slots[stays]]
                near = nearest(np.concatenate(parts), max(self._kept - self._kept // _SLACK, 0))
                near_held, near_coming, near_hits = np.split(near, np.cumsum([len(part) for part in parts])[:-1])
                keep[keep], stays[stays] = near_coming, near_hits
                evicted += self._evict(batch, held[~near_held])
            if (excess := int(keep.sum() - self._room - (~stays).sum())) > 0:  # slots of batches that are not delivered yet
                farthest = np.flatnonzero(keep)[np.argsort(-after[keep], kind="stable")]
                keep[farthest[:excess]] = False
            gone = hit_slots[~stays]
            self._room += len(gone)  # the batches in flight have slots of their own
            evicted += self._forget(batch, gone)
        into = keep.copy()
        into[:count] = True
        return coming[into], keep[into], evicted

    def _keep(self, rows: Int64, slots: Int64, batch: int) -> None:
        frames = self._table.frames(rows)
        self._slot_of.update(zip(frames.tolist(), slots.tolist(), strict=True))
        self._state.frame[slots] = frames
        if not self.keeps_all:
            self._state.next_use[slots] = self._window.uses.next(frames, batch)
        self._room -= len(frames)

    def _evict(self, batch: int, slots: Int64) -> int:
        free_from, count = np.unique(self._state.free_from(batch, slots), return_counts=True)
        for at, freed in zip(free_from.tolist(), count.tolist(), strict=True):
            if at == batch:
                self._room += freed
            else:
                self._room_later[at] += freed
        return self._forget(batch, slots)

    def _forget(self, batch: int, slots: Int64) -> int:
        """Take frames out of the cache. Return how many of them a later batch is known to show."""
        for frame in self._state.frame[slots].tolist():
            del self._slot_of[frame]
        self._state.frame[slots] = NONE
        self._state.free_later(batch, slots)
        return int((self._state.next_use[slots] < NEVER).sum())


class _Slots:
    """What the slots of a camera hold, and which of them are free.

    Attributes:
        frame: Frame that is kept in each slot. `NONE` if none is.
        next_use: Batch that shows it next.
        touched: Last batch that writes or shows each slot.
    """

    def __init__(self, count: int, in_flight: int) -> None:
        self._in_flight = in_flight
        self.frame = np.full(count, NONE, np.int64)
        self.next_use = np.full(count, NEVER, np.int64)
        self.touched = np.full(count, -in_flight, np.int64)
        self._free = np.arange(count, dtype=np.int64)[::-1].copy()  # a stack: memory that was never used is used last
        self._free_count = count
        self._later = defaultdict[int, list[Int64]](list)  # slots that are free from a batch on

    def begin(self, batch: int) -> None:
        """Give back the slots that are free from this batch on."""
        for slots in self._later.pop(batch, ()):
            self._give_back(slots)

    def take(self, batch: int, count: int) -> Int64:
        """Return free slots, to be written for a batch."""
        self._free_count -= count
        slots = self._free[self._free_count : self._free_count + count][::-1].copy()
        self.touched[slots] = batch
        return slots

    def free_from(self, batch: int, slots: Int64) -> Int64:
        """Return the batch from which on each slot may be written: when the batches that write or show it are delivered."""
        return np.maximum(self.touched[slots] + self._in_flight, batch)

    def free_later(self, batch: int, slots: Int64) -> None:
        """Give slots back as soon as they may be written again."""
        free_from = self.free_from(batch, slots)
        self._give_back(slots[free_from == batch])
        for at in np.unique(free_from[free_from > batch]).tolist():
            self._later[at].append(slots[free_from == at])

    def _give_back(self, slots: Int64) -> None:
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

"""Schedule of one camera's decoded frames: which frames each batch decodes, and which of them stay in the cache.

Each GOP that a batch needs is decoded from its keyframe. Other frames of the GOP are cached for later batches, and the GOP is
decoded further than the batch needs if that yields frames worth caching. If the cache is full, the frame whose next use is
farthest away is evicted. If only few frames do not fit, the frames that cost the least decodes are evicted first: those near
their keyframes.

Names say which numbers an array has. Frames are numbered over all episodes of the dataset. A row is the place of a frame in the
`EpisodeTable`, which holds open episodes only. A slot is a place in memory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from dali_stream.checks.arrays import NONE, Int64, Mask
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.samples import NEVER, FrameSet, Window, nearest


class Reads(NamedTuple):
    """Frames that are read from the frame cache on disk, sorted by episode.

    Attributes:
        episode: Episode of each frame, shape (n,).
        frame: Index of each frame within its episode, shape (n,).
        packet: Packet of each frame, shape (n,).
        slot: Slot of each frame, shape (n,).
        place: Place of each frame in the batch, as an index into the flattened `show`, shape (n,). Such a frame may be read
            directly into the batch, since nothing else needs it in its slot. `NONE` for frames that are cached or that the
            batch shows several times.
    """

    episode: Int64
    frame: Int64
    packet: Int64
    slot: Int64
    place: Int64

    def chosen(self, mask: Mask) -> Reads:
        """Return the frames for which a mask is True."""
        return Reads(*(values[mask] for values in self))


NOTHING = np.empty(0, np.int64)
NO_READS = Reads(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)


@dataclass(frozen=True)
class FramePlan:
    """Plan of one camera for one batch.

    The plan decodes frame `frame[i]` of episode `episode[i]`, which is packet `packet[i]` of its file, into slot `slot[i]`.
    Frames of one GOP are adjacent and in decode order. Frames without a slot are decoded for the frame cache on disk only.

    Attributes:
        show: Slot of each frame of the batch, shape (B, T). `NONE` if the frame has no packet.
        episode: Episode of each frame to decode, shape (n,).
        frame: Index of each frame to decode within its episode, shape (n,).
        packet: Packet of each frame to decode, shape (n,).
        slot: Slot that each frame is decoded into, shape (n,). `NONE` if the frame has no slot.
        gop: Number that identifies the GOP of each frame, shape (n,).
        hits: Number of the B · T frames that were cached, so that they need not be decoded.
        decodes: Number of frames that are decoded, including those that are only decoded to reach others.
        evicted: Number of frames that were evicted although a later batch was known to show them.
        reads: Frames that are read from the frame cache on disk.
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
    reads: Reads = NO_READS

    def chosen(self, decoded: Mask, read: Mask) -> FramePlan:
        """Return the plan for some of the frames to decode and to read, for which the masks are True. `show` is the same."""
        return replace(
            self,
            episode=self.episode[decoded],
            frame=self.frame[decoded],
            packet=self.packet[decoded],
            slot=self.slot[decoded],
            gop=self.gop[decoded],
            reads=self.reads.chosen(read),
        )

    def __str__(self) -> str:
        def listed(values: Int64) -> str:
            return ", ".join(map(str, values.reshape(-1).tolist()))

        gops = [self.gop == gop for gop in np.unique(self.gop)]
        lines = [
            f"decode episode {self.episode[own][0]} frames {listed(self.frame[own])} into slots {listed(self.slot[own])}"
            for own in gops
        ]
        if len(self.reads.slot):
            lines.append(f"read frames {listed(self.reads.frame)} into slots {listed(self.reads.slot)}")
        return "\n".join([*lines, f"show slots {listed(self.show)}"])


SLOT_BYTES = 4 * 8  # memory of the numbers of a slot: one in each array of a `SlotAllocator`


class SlotAllocator:
    """Contents of a camera's slots, and the slots that are free.

    Attributes:
        frame: Frame that is cached in each slot. `NONE` if none is.
        next_use: Batch that shows that frame next. `NEVER` if none is known. It may be in the past, if that batch decoded
            nothing.
        cost: Number of frames that are decoded to decode that frame again.
        touched: Last batch that writes or shows each slot.
    """

    def __init__(self, count: int, in_progress: int) -> None:
        self._in_progress = in_progress
        self.frame = np.full(count, NONE, np.int64)
        self.next_use = np.full(count, NEVER, np.int64)
        self.cost = np.ones(count, np.int32)
        self.touched = np.full(count, -in_progress, np.int64)  # early enough for batch 0 to write all slots
        # The free slots are a stack, so that slots that were used before are used first. The system allocates the memory of a
        # slot when it is first written, so a cache that is never full takes less memory.
        self._free = np.arange(count, dtype=np.int64)[::-1].copy()
        self._free_count = count
        self._later = defaultdict[int, list[Int64]](list)  # {batch: slots that become free when it is planned}

    def release(self, batch: int) -> None:
        """Release the slots that have become free with this batch or before it."""
        for at in [at for at in self._later if at <= batch]:
            for slots in self._later.pop(at):
                self._give_back(slots)

    def take(self, batch: int, count: int) -> Int64:
        """Allocate `count` free slots, which a batch will write."""
        self._free_count -= count
        slots = self._free[self._free_count : self._free_count + count][::-1].copy()
        self.touched[slots] = batch
        return slots

    def free_from(self, batch: int, slots: Int64) -> Int64:
        """Return the first batch that may write each slot. The batches that write or show it now are copied by then."""
        return np.maximum(self.touched[slots] + self._in_progress, batch)

    def free_later(self, batch: int, slots: Int64) -> None:
        """Release slots, each as soon as it may be written again."""
        free_from = self.free_from(batch, slots)
        for at in set(free_from.tolist()):
            if at == batch:
                self._give_back(slots[free_from == at])
            else:
                self._later[at].append(slots[free_from == at])

    def _give_back(self, slots: Int64) -> None:
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)


class Room:
    """Room for frames that are kept for later batches.

    Attributes:
        free: Number of frames that may be added now.
    """

    def __init__(self, count: int) -> None:
        self.free = count
        self._later = defaultdict[int, int](int)  # {batch: growth of `free` when it is planned}

    def release(self, batch: int) -> None:
        """Release the room that has become free with this batch or before it."""
        for at in [at for at in self._later if at <= batch]:
            self.free += self._later.pop(at)

    def take(self, count: int) -> None:
        """Take room for `count` frames, which are added."""
        self.free -= count

    def give_back(self, count: int) -> None:
        """Return the room of `count` frames at once."""
        self.free += count

    def give_back_later(self, batch: int, free_from: Int64) -> None:
        """Return the room of frames once their slots may be written again.

        Args:
            batch: Number of the batch that is planned.
            free_from: First batch that may write the slot of each frame, see `SlotAllocator.free_from`.
        """
        for at, count in zip(*(values.tolist() for values in np.unique(free_from, return_counts=True)), strict=True):
            if at == batch:
                self.free += count
            else:
                self._later[at] += count


_PRECISION = 1 << 10  # batches until the next use are multiplied by this before they are divided by a cost
_SLACK = 256  # a full cache evicts 1/256 of its frames more than necessary, so that it rarely ranks all of them
_TURNOVERS = 2  # a frame without a known next use is assumed to be evicted before a full cache was replaced this many times


@dataclass
class _Choice:
    """Frames that are cached after a batch. By default, all of them are.

    Attributes:
        batch: Number of the batch.
        ahead: Number of later batches that have been read from the order.
        rows: Rows of the new frames, which may be cached. Those that the batch shows precede the others of their GOPs.
        wanted: Number of new frames that the batch shows.
        hits: Slots of the cached frames that the batch shows.
        keep: Whether each new frame is cached.
        stays: Whether each hit stays cached.
        next_use: Next use of each new frame.
        by_cost: Whether frames are ranked by the decodes that they cost.
    """

    batch: int
    ahead: int
    rows: Int64
    wanted: int
    hits: Int64
    keep: Mask = field(init=False)
    stays: Mask = field(init=False)
    next_use: Int64 = field(init=False)
    by_cost: bool = False

    def __post_init__(self) -> None:
        self.keep, self.stays = np.ones(len(self.rows), np.bool_), np.ones(len(self.hits), np.bool_)

    @property
    def growth(self) -> int:
        """Number of cached frames that are added, less the hits that make room for them."""
        return int(self.keep.sum()) - int((~self.stays).sum())


class FramesInMemory:
    """Decoded frames of one camera in memory: which are cached, and in which slots. `dali_stream.cache.slots` stores them.

    Frames on disk are those of `dali_stream.cache.frames_on_disk`.

    A slot is the place of one decoded frame in memory. Each frame of a batch has a slot until the batch is copied. A batch
    may show a slot that an earlier batch in progress is still decoding: batches are completed in order, so the frame has been
    written before the later batch is copied. Up to `kept` frames are cached for later batches, those with the nearest next
    uses.

    Args:
        table: Table of the open episodes.
        camera: Name of the camera.
        window: Window of the camera.
        kept: Maximum number of frames that are kept for later batches.
        batch_frames: Maximum number of frames of a batch, B · T.
        in_progress: Maximum number of batches that are planned and not copied. Batch n - in_progress is copied before
            batch n is planned, so batch n may overwrite the slots of batch n - in_progress.
        needed: Frames that batches show, in any epoch. Other frames are never cached. None if batches show all frames of the
            dataset. Default: None.

    Attributes:
        slot_count: Number of slots, for cached frames and for the frames of the batches in progress.
        keeps_all: Whether the cache has room for every frame that batches show, so that none is ever evicted.
        adds_to_disk: Whether decoded frames are added to the frame cache on disk. Other frames of a decoded GOP are then
            decoded as well, since a later batch or another process reads them from the disk.
    """

    def __init__(
        self,
        table: EpisodeTable,
        camera: str,
        window: Window,
        kept: int,
        batch_frames: int,
        in_progress: int,
        needed: FrameSet | None = None,
    ) -> None:
        self._table, self._camera, self._window = table, table.cameras[camera], window
        self._kept, self._needed = kept, needed
        frames = int(table.lengths.sum()) if needed is None else len(needed)
        self.keeps_all, self._holds_most = kept >= frames, 2 * kept >= frames
        self._missing = max(1 - kept / max(frames, 1), 0.0)  # share of the frames that do not fit
        self.slot_count = kept + in_progress * batch_frames
        self._slot_of: dict[int, int] = {}  # {cached frame: its slot}
        self._slots = SlotAllocator(self.slot_count, in_progress)
        self._room = Room(kept)
        self.adds_to_disk = False

    @property
    def cached(self) -> int:
        """Number of frames that are cached."""
        return len(self._slot_of)

    def needs(self, frames: Int64) -> Mask:
        """Return which frames batches show, in any epoch."""
        return np.ones(len(frames), np.bool_) if self._needed is None else self._needed.has(frames)

    def slots_of(self, frames: Int64) -> Int64:
        """Return the slot of each frame, or `NONE` for frames that are not cached."""
        return np.fromiter(map(self._slot_of.get, frames.tolist(), itertools.repeat(NONE)), np.int64, len(frames))

    def next_uses(self) -> list[tuple[int, int]]:
        """Return (frame, batch that shows it next) for each cached frame. The batch is `NEVER` if none is known.

        The batch may be in the past if it decoded nothing.
        """
        return [(frame, int(self._slots.next_use[slot])) for frame, slot in self._slot_of.items()]

    def foresee(self, batch: int, frames: Int64) -> None:
        """Update the next uses of cached frames when another batch is read from the order.

        Args:
            batch: Number of the batch.
            frames: Frames that it shows.
        """
        if not self.keeps_all:
            slots = self.slots_of(frames)
            slots = slots[slots >= 0]
            self._slots.next_use[slots] = np.minimum(self._slots.next_use[slots], batch)

    def drop(self, batch: int, slots: list[int]) -> None:
        """Remove cached frames that could not be read, so that the next batch that shows them decodes them.

        Args:
            batch: Number of the batch that is planned next.
            slots: Slots of the frames.
        """
        if not slots:
            return
        cached = np.unique(np.array(slots, np.int64))
        cached = cached[self._slots.frame[cached] != NONE]
        # Any batch in progress may show these slots. In `plan`, a batch whose frames are all cached does not mark its slots.
        self._slots.touched[cached] = batch
        self._evict(batch, cached)

    def plan(self, batch: int, frames: Int64, ahead: int) -> FramePlan:
        """Plan a batch.

        Args:
            batch: Number of the batch.
            frames: Frames that it shows, numbered over all episodes, shape (B, T). Their episodes must be open.
            ahead: Number of later batches that have been read from the order.

        Returns:
            Plan of the batch. The cache is updated as if the plan had been carried out.
        """
        if self.keeps_all and len(show := self.slots_of(frames.reshape(-1))) and show.min() >= 0:
            # In later epochs of a dataset that fits in memory, planning must be cheap, to leave the cores to the threads that
            # copy. `touched` need not be updated, since only `drop` frees slots.
            return FramePlan(show.reshape(frames.shape), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, len(show), 0, 0)
        self._slots.release(batch)
        self._room.release(batch)
        shown, place = np.unique(frames, return_inverse=True)
        slot = self.slots_of(shown)
        hit = slot >= 0
        # Hits are marked before others are evicted, so that no frame of this batch is evicted for another one.
        self._slots.touched[slot[hit]] = batch
        new = np.flatnonzero(~hit)
        rows = self._table.rows(shown[new])
        present = self._camera.packet[rows] >= 0
        new, rows = new[present], rows[present]
        stored = self._camera.stored[rows]
        wanted_rows, read_rows = rows[~stored], rows[stored]
        decode_rows, into, evicted = self._assign_decoded(batch, ahead, wanted_rows, slot[hit])
        read_into, cached = self._assign_read(batch, read_rows)
        slot[new[~stored]], slot[new[stored]] = into[: len(wanted_rows)], read_into
        packet, gop = self._camera.packet[decode_rows].astype(np.int64), self._camera.gops(decode_rows)
        # The decoders rely on this order, see `FramePlan`.
        order = np.lexsort((packet, gop))
        decode_rows, packet, gop = decode_rows[order], packet[order], gop[order]
        episode = self._table.episode[decode_rows].astype(np.int64)
        return FramePlan(
            show=slot[place].reshape(frames.shape),
            episode=episode,
            frame=decode_rows - self._table.first_row[episode],
            packet=packet,
            slot=into[order],
            gop=gop,
            hits=int(hit[place].sum()),
            decodes=self._count_decodes(packet, gop),
            evicted=evicted,
            reads=self._reads(read_rows, read_into, _only_places(place, new[stored], cached)) if len(read_rows) else NO_READS,
        )

    def _assign_decoded(self, batch: int, ahead: int, wanted_rows: Int64, hit_slots: Int64) -> tuple[Int64, Int64, int]:
        """Assign slots to the frames to decode, and cache those that `_choose` chooses.

        Args:
            batch: Number of the batch.
            ahead: Number of later batches that have been read from the order.
            wanted_rows: Rows of the frames that the batch shows and that must be decoded.
            hit_slots: Slots of the cached frames that the batch shows.

        Returns:
            Rows of the frames to decode, beginning with `wanted_rows`, the slot of each, or `NONE` for those that are decoded
            for the disk only, and the number of frames that were evicted although a later batch was known to show them.
        """
        if not len(wanted_rows):  # no frame needs the slot of another one
            return wanted_rows, wanted_rows, 0
        beside_rows = self._beside(wanted_rows)
        choice, evicted = self._choose(batch, ahead, wanted_rows, beside_rows, hit_slots)
        # All wanted frames get a slot. Other frames of a GOP get one only to be cached: otherwise they are not decoded, or
        # decoded on the way to others and dropped.
        has_slot = choice.keep.copy()
        has_slot[: choice.wanted] = True
        rows, keep = choice.rows[has_slot], choice.keep[has_slot]
        slots = self._slots.take(batch, len(rows))
        self._keep(rows[keep], slots[keep], batch)
        self._slots.free_later(batch, slots[~keep])
        if self.adds_to_disk and not has_slot.all():
            rows = np.concatenate([rows, choice.rows[~has_slot]])
            slots = np.concatenate([slots, np.full(len(rows) - len(slots), NONE)])
        return rows, slots, evicted

    def _assign_read(self, batch: int, rows: Int64) -> tuple[Int64, int]:
        """Assign slots to the frames to read from disk. They are cached only if there is room, since nothing is gained
        by evicting a frame that must be decoded.

        Returns:
            Slot of each frame, and how many frames are cached, which are the first ones.
        """
        slots = self._slots.take(batch, len(rows))
        kept = max(min(self._room.free, len(rows)), 0)
        self._keep(rows[:kept], slots[:kept], batch)
        self._slots.free_later(batch, slots[kept:])
        return slots, kept

    def _reads(self, rows: Int64, slots: Int64, place: Int64) -> Reads:
        episode = self._table.episode[rows].astype(np.int64)
        return Reads(episode, rows - self._table.first_row[episode], self._camera.packet[rows].astype(np.int64), slots, place)

    def _beside(self, wanted_rows: Int64) -> Int64:
        """Return the rows of frames beside `wanted_rows`: needed, in the same GOPs, and neither cached nor on disk."""
        members = self._camera.members(np.unique(self._camera.gops(wanted_rows)))
        others = (self._camera.packet[members] >= 0) & ~self._camera.stored[members]
        others[np.searchsorted(members, wanted_rows)] = False
        members = members[others]
        frames = self._table.frames(members)
        return members[self.needs(frames) & (self.slots_of(frames) == NONE)]

    def _count_decodes(self, packet: Int64, gop: Int64) -> int:
        """Return the number of frames that a decoder decodes: each GOP from its keyframe to the last of these packets."""
        if not len(gop):
            return 0
        starts = np.flatnonzero(np.diff(gop, prepend=NONE))
        last = np.append(starts[1:], len(gop)) - 1
        return int((packet[last] - self._camera.packet[gop[starts]] + 1).sum())

    def _choose(self, batch: int, ahead: int, wanted_rows: Int64, beside_rows: Int64, hit_slots: Int64) -> tuple[_Choice, int]:
        """Choose which frames to cache after a batch. Evict cached frames whose next uses are farther away.

        Cached frames, and evicted frames that a batch in progress still uses, occupy at most `kept` slots together. Each batch
        in progress occupies at most B · T other slots. Therefore a slot is always free for each new frame.

        Args:
            batch: Number of the batch.
            ahead: Number of later batches that have been read from the order.
            wanted_rows: See `_assign_decoded`.
            beside_rows: Rows of the other frames of the same GOPs that are not cached.
            hit_slots: See `_assign_decoded`.

        Returns:
            The choice, and the number of frames that were evicted although a later batch was known to show them.
        """
        rows = np.concatenate([wanted_rows, beside_rows])
        choice = _Choice(batch, ahead, rows, len(wanted_rows), hit_slots)
        if self.keeps_all:
            return choice, 0
        choice.by_cost = self._ranks_by_cost(wanted_rows)
        choice.next_use = self._window.uses.next(self._table.frames(rows), batch)
        evicted = self._evict_passed(choice)
        if not choice.by_cost:
            self._find_candidates(choice)
        if choice.growth > self._room.free:
            evicted += self._rank(choice)
        self._admit(choice)
        return choice, evicted + self._evict(batch, choice.hits[~choice.stays], at_once=True)

    def _evict_passed(self, choice: _Choice) -> int:
        """Update the next uses of frames that were shown since, and evict those that no later batch is known to show.

        A batch that decodes nothing does not update the next uses of the frames that it shows, so this is done here.

        Returns:
            See `_evict`.
        """
        next_use = self._slots.next_use
        passed = np.flatnonzero((self._slots.frame != NONE) & (next_use <= choice.batch))
        next_use[passed] = self._window.uses.next(self._slots.frame[passed], choice.batch)
        if choice.by_cost:
            return 0
        gone = passed[(next_use[passed] == NEVER) & (self._slots.touched[passed] != choice.batch)]
        return self._evict(choice.batch, gone, at_once=True)

    def _find_candidates(self, choice: _Choice) -> None:
        """Leave out the new frames that would soon be evicted, before a batch shows them again.

        A frame whose next use is unknown is shown after the batches ahead. Each of these adds about as many frames as this
        batch, so the frame is not cached if it would be evicted before that. Frames that this batch shows are rarely shown
        again before the next epoch, so in a full or a small cache, their next use must be known. If nearly all frames fit, each
        is cached until it is ranked below others. An unknown next use then counts as the first batch after those ahead.
        """
        choice.stays = self._slots.next_use[choice.hits] < NEVER
        known = choice.next_use < NEVER
        if choice.ahead * choice.wanted > _TURNOVERS * self._kept:
            choice.keep = known
        elif len(choice.rows) > self._room.free or not self._holds_most:
            choice.keep[: choice.wanted] = known[: choice.wanted]

    def _rank(self, choice: _Choice) -> int:
        """Rank cached frames, new frames and hits together, and keep those with the nearest next uses. Evict the others.

        Returns:
            See `_evict`.
        """
        batch, hits, rows = choice.batch, choice.hits[choice.stays], choice.rows[choice.keep]
        held = np.flatnonzero((self._slots.frame != NONE) & (self._slots.touched != batch))
        rank = np.concatenate([self._slots.next_use[held], choice.next_use[choice.keep], self._slots.next_use[hits]])
        if choice.by_cost:
            costs = np.concatenate([self._slots.cost[held], self._costs(rows), self._slots.cost[hits]])
            rank = (np.minimum(rank, batch + choice.ahead) - batch) * _PRECISION // costs
        near = nearest(rank, max(self._kept - self._kept // _SLACK, 0))
        near_held, near_rows, near_hits = np.split(near, [len(held), len(held) + len(rows)])
        choice.keep[choice.keep], choice.stays[choice.stays] = near_rows, near_hits
        return self._evict(batch, held[~near_held])

    def _admit(self, choice: _Choice) -> None:
        """Leave out the new frames that do not fit, those with the farthest next uses.

        An evicted frame makes no room while a batch in progress uses its slot. During that time, fewer new frames are cached.
        """
        if (excess := choice.growth - self._room.free) > 0:
            new = np.flatnonzero(choice.keep)
            farthest = new[np.argsort(-choice.next_use[new], kind="stable")]
            choice.keep[farthest[:excess]] = False

    def _ranks_by_cost(self, wanted_rows: Int64) -> bool:
        """Return whether frames are ranked by the decodes that they cost, and not only by their next use.

        With x, the share of the frames that do not fit, and GOPs of G frames, evicting the first x G frames of each GOP costs
        about x (x G + 1) / 2 decodes per frame and epoch. Evicting by the next use costs up to 1 decode per frame, since a
        decoded GOP then serves several batches.
        """
        x, length = self._missing, float(-self._camera.gop[self._camera.gops(wanted_rows)].mean())
        return self._holds_most and x * (x * length + 1) < 2

    def _costs(self, rows: Int64) -> Int64:
        """Return the number of frames that are decoded to reach each frame, from its keyframe on."""
        packet = self._camera.packet
        costs: Int64 = np.maximum(packet[rows].astype(np.int64) - packet[self._camera.gops(rows)] + 1, 1)
        return costs

    def _keep(self, rows: Int64, slots: Int64, batch: int) -> None:
        """Add frames to the cache."""
        if not len(rows):
            return
        frames = self._table.frames(rows)
        self._slot_of.update(zip(frames.tolist(), slots.tolist(), strict=True))
        self._slots.frame[slots] = frames
        if not self.keeps_all:
            self._slots.next_use[slots] = self._window.uses.next(frames, batch)
            self._slots.cost[slots] = self._costs(rows)
        self._room.take(len(frames))

    def _evict(self, batch: int, slots: Int64, at_once: bool = False) -> int:
        """Remove frames from the cache, and free their slots as soon as no batch in progress uses them.

        Args:
            batch: Number of the batch that is planned.
            slots: Slots of the frames.
            at_once: Whether the frames make room at once, and not only when their slots are free. This is possible for frames
                that a batch has shown last: until it is copied, their slots are among the B · T other slots of that batch.
                Default: False.

        Returns:
            Number of these frames that a later batch is known to show.
        """
        if at_once:
            self._room.give_back(len(slots))
        else:
            self._room.give_back_later(batch, self._slots.free_from(batch, slots))
        for frame in self._slots.frame[slots].tolist():
            del self._slot_of[frame]
        self._slots.frame[slots] = NONE
        self._slots.free_later(batch, slots)
        return int((self._slots.next_use[slots] < NEVER).sum())


def _only_places(shown: Int64, frames: Int64, cached: int) -> Int64:
    """Return the only place of each frame in a batch, see `Reads.place`.

    Args:
        shown: Index of the frame at each place of the batch, among the different frames of the batch.
        frames: Indices of the frames that are read.
        cached: How many of them are cached. These are the first ones.
    """
    places = shown.reshape(-1)
    place = np.full(int(places.max()) + 1, NONE)
    place[places] = np.arange(len(places))
    place[np.bincount(places) > 1] = NONE
    own = place[frames]
    own[:cached] = NONE
    return own

"""Which frames of a camera are decoded for each batch, and which decoded frames stay in memory until when.

Each GOP that a batch needs is decoded from its keyframe. Frames that come out beside those asked for are kept for later
batches, and a GOP is decoded further than the batch needs where that brings frames worth keeping. Where the cache is full, the
frame whose next use is farthest away goes (Belady 1966, "A study of replacement algorithms for a virtual-storage computer").
"""

from __future__ import annotations

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
        decodes: how many frames are decoded, those that are only on the way to others included.
        evicted: how many frames were evicted although a later batch was known to show them.
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


class FrameCache:
    """The schedule of one camera's decoded frames.

    A slot is the place of one decoded frame in memory. Each frame of a batch has a slot until the batch is delivered. Of all
    other frames, up to `kept` are cached: those with the nearest next uses.

    Args:
        table: the frames; gets the columns of this camera.
        camera: its name.
        uses: when its frames are shown.
        kept: frames that may be kept for later batches.
        batch_frames: frames of a batch at most, B · T.
        in_flight: batch n is planned when batch n - in_flight has been delivered: then its slots may be written again.
        keep_all: `kept` is enough for every frame of the dataset, so none is ever evicted.

    Attributes:
        slots: their number: for cached frames, and for the batches in flight.
        cached: frames that are kept.
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
        self._kept, self._in_flight, self._keep_all = kept, in_flight, keep_all
        self.slots = kept + in_flight * batch_frames
        self._row = np.full(self.slots, NONE, np.int64)  # per slot, the frame that is kept in it
        self._touched = np.full(self.slots, -in_flight, np.int64)  # per slot, the last batch that writes or shows it
        self._free = np.arange(self.slots, dtype=np.int64)[::-1].copy()  # a stack: memory that was never used is used last
        self._free_count = self.slots
        self._freed: dict[int, list[Int64]] = {}  # slots that are free from a batch on
        self._evicted: dict[int, int] = {}  # of these, how many belonged to evicted frames
        self._room = kept  # frames that may still be kept
        self.cached = self._evicted_early = 0  # frames; of these, evicted by the present step before a known use

    @property
    def full(self) -> bool:
        """Whether frames have to be evicted before others can be cached."""
        return self.cached >= self._kept - self._kept // _SLACK - 1

    def clear(self) -> None:
        """Evicts all frames. The cache cannot be used afterwards."""
        self._table.release(self._row[self._row != NONE])

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
        columns, self._evicted_early = self._table.columns, 0
        for slots in self._freed.pop(batch, ()):
            self._give_back(slots)
        self._room += self._evicted.pop(batch, 0)
        shown, place = np.unique(rows, return_inverse=True)
        slot = columns[self._slot][shown]
        hit = slot >= 0
        self._touched[slot[hit]] = batch
        wanted = shown[~hit]
        wanted = wanted[columns[self._packet][wanted] >= 0]
        beside = self._beside(wanted)
        kept, stays = self._choose(batch, np.concatenate([wanted, beside]), len(wanted), shown[hit])
        decode = np.concatenate([wanted, beside[kept[len(wanted) :]]])
        kept = np.concatenate([kept[: len(wanted)], np.ones(len(decode) - len(wanted), np.bool_)])
        into = self._take(batch, len(decode))
        self._keep(decode[kept], into[kept])
        self._free_later(batch, into[~kept])
        self._forget(batch, shown[hit][~stays], shown=True)
        slot[np.searchsorted(shown, wanted)] = into[: len(wanted)]
        order = np.lexsort((columns[self._packet][decode], columns[self._gop][decode]))
        decode = decode[order]
        packet, gop = columns[self._packet][decode], columns[self._gop][decode]
        episode = columns["episode"][decode].astype(np.int64)
        return FrameStep(
            show=slot[place].reshape(rows.shape),
            episode=episode,
            frame=decode - self._table.first_row[episode],
            packet=packet,
            slot=into[order],
            gop=gop,
            hits=int(hit[place].sum()),
            decodes=self._decodes(packet, gop),
            evicted=self._evicted_early,
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

    def _decodes(self, packet: Int64, gop: Int64) -> int:
        """Frames that are decoded for these packets: each GOP from its first frame, the keyframe, to the last of them."""
        if not len(gop):
            return 0
        starts = np.flatnonzero(np.diff(gop, prepend=NONE))
        last = np.append(starts[1:], len(gop)) - 1
        return int((packet[last] - self._table.columns[self._packet][gop[starts]] + 1).sum())

    def _choose(self, batch: int, coming: Int64, wanted: int, hits: Int64) -> tuple[Mask, Mask]:
        """Which frames of this batch are kept after it. Evicts others where they are farther from their next use.

        Args:
            batch: its number.
            coming: frames that may be decoded, first the `wanted` ones that the batch shows.
            wanted: how many those are.
            hits: cached frames that the batch shows.

        Returns:
            Masks over `coming` and `hits`.
        """
        after, after_hits = self._uses.next(coming), self._uses.next(hits)
        keep, stays = np.ones(len(coming), np.bool_), np.ones(len(hits), np.bool_)
        if self._keep_all:
            return keep, stays
        # A frame that the batch shows, and no later batch is known to show, is not kept. A frame decoded beside it may be kept
        # as long as there is room: its next use may lie beyond what has been read of the order.
        keep[:wanted], stays = after[:wanted] < NEVER, after_hits < NEVER
        if keep.sum() > self._room + (~stays).sum():
            held = np.flatnonzero((self._row != NONE) & (self._touched != batch))
            parts = self._uses.next(self._row[held]), after[keep], after_hits[stays]
            everything = np.concatenate(parts)
            most = max(self._kept - self._kept // _SLACK, 0)
            if len(everything) > most:
                nearest = np.zeros(len(everything), np.bool_)
                nearest[np.argpartition(everything, most - 1)[:most] if most else []] = True
                near_held, near_coming, near_hits = np.split(nearest, np.cumsum([len(part) for part in parts])[:-1])
                keep[keep], stays[stays] = near_coming, near_hits
                self._forget(batch, self._row[held[~near_held]], shown=False)
        if (excess := int(keep.sum() - self._room - (~stays).sum())) > 0:  # slots of batches that are not delivered yet
            farthest = np.flatnonzero(keep)[np.argsort(-after[keep], kind="stable")]
            keep[farthest[:excess]] = False
        return keep, stays

    def _take(self, batch: int, count: int) -> Int64:
        """Free slots, to be written for a batch."""
        self._free_count -= count
        slots = self._free[self._free_count : self._free_count + count][::-1].copy()
        self._touched[slots] = batch
        return slots

    def _keep(self, frames: Int64, slots: Int64) -> None:
        self._table.columns[self._slot][frames] = slots
        self._row[slots] = frames
        self._table.hold(frames)
        self._room -= len(frames)
        self.cached += len(frames)

    def _forget(self, batch: int, frames: Int64, shown: bool) -> None:
        """Takes frames out of the cache: those that the batch has `shown`, or evicted ones."""
        slots = self._table.columns[self._slot][frames]
        self._table.columns[self._slot][frames] = NONE
        self._row[slots] = NONE
        self.cached -= len(frames)
        self._evicted_early += int((self._uses.next(frames) < NEVER).sum())
        self._free_later(batch, slots)
        if shown:  # there are slots for the batches in flight beside those for what is kept
            self._room += len(frames)
        else:
            free_from, count = np.unique(np.maximum(self._touched[slots] + self._in_flight, batch), return_counts=True)
            for at, freed in zip(free_from.tolist(), count.tolist(), strict=True):
                if at == batch:
                    self._room += freed
                else:
                    self._evicted[at] = self._evicted.get(at, 0) + freed
        self._table.release(frames)

    def _free_later(self, batch: int, slots: Int64) -> None:
        """Gives slots back, when the batches that write or show them are delivered."""
        free_from = np.maximum(self._touched[slots] + self._in_flight, batch)
        self._give_back(slots[free_from == batch])
        for at in np.unique(free_from[free_from > batch]).tolist():
            self._freed.setdefault(at, []).append(slots[free_from == at])

    def _give_back(self, slots: Int64) -> None:
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

"""Allocation of the slots of one camera's decoded frames, and the room for frames that stay in them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dali_stream.checks.arrays import NONE, Int64
from dali_stream.schedule.next_uses import NEVER

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

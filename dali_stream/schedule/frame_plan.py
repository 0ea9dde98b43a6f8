"""Plan of one camera's frames for one batch, which a decoder carries out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dali_stream.checks.arrays import Int64, Mask


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

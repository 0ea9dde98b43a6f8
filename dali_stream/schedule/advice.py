"""Whether more memory for decoded frames would help, found out during a run."""

from __future__ import annotations

from typing import NamedTuple

from dali_stream.schedule.frames import FrameCache, FrameStep

_BATCHES = 200  # that are compared, once both caches are full
_WORTH = 0.95  # more memory is advised where it leaves so much of the decodes, or less


class Advice(NamedTuple):
    """What a larger cache would bring.

    Attributes:
        kept: frames that it keeps, of each camera.
        now, then: frames that are decoded per frame that is delivered, without it and with it.
    """

    kept: int
    now: float
    then: float


class Advisor:
    """Plans one camera a second time, with room for more frames, and compares.

    Args:
        larger: the cache of that camera with more room.
        kept: frames that `larger` keeps.
    """

    def __init__(self, larger: FrameCache, kept: int) -> None:
        self.larger, self._kept = larger, kept
        self._compared = self._shown = self._now = self._then = 0

    def compare(self, step: FrameStep, larger: FrameStep) -> bool:
        """Takes what both do for a batch. Returns whether there is an answer."""
        if self._compared or self.larger.full:
            self._compared += 1
            self._shown += step.show.size
            self._now += step.decodes
            self._then += larger.decodes
        return self._compared == _BATCHES

    def advice(self) -> Advice | None:
        """The answer, where more memory is worth it."""
        if self._then > _WORTH * self._now:
            return None
        return Advice(self._kept, self._now / self._shown, self._then / self._shown)

"""Whether more memory for decoded frames would help, and what helps if rows, indices or video are read more than once."""

from __future__ import annotations

from typing import NamedTuple

from dali_stream.arguments import gibibytes
from dali_stream.schedule.frames import FrameCache, FramePlan

_BATCHES = 200  # that are compared, once both caches are full
_WORTH = 0.95  # more memory is advised where it leaves so much of the decodes, or less


class Advice(NamedTuple):
    """The effect of a larger cache.

    Attributes:
        kept: frames that it keeps, of each camera.
        now, then: frames decoded per delivered frame, without it and with it.
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

    def compare(self, step: FramePlan, larger: FramePlan) -> bool:
        """Adds a batch, as both caches plan it. Returns whether enough batches were compared."""
        if self._compared or self.larger.full:
            self._compared += 1
            self._shown += step.show.size
            self._now += step.decodes
            self._then += larger.decodes
        return self._compared == _BATCHES

    def advice(self) -> Advice | None:
        """The effect of the larger cache; None if it is not worth the memory."""
        if self._then > _WORTH * self._now:
            return None
        return Advice(self._kept, self._now / self._shown, self._then / self._shown)


def reread_remedies(larger: int | None, shuffle: bool | str, remote: bool, cached: bool) -> str:
    """Return what helps if rows, indices or encoded video are read more than once, as the end of a message.

    Args:
        larger: Memory budget that holds those in use, in bytes. None if a larger budget would not help.
        shuffle: Argument of the Loader.
        remote: Whether the dataset is read over a network.
        cached: Whether it has a `cache_dir`.
    """
    remedies = [f'a larger memory_budget, such as "{gibibytes(larger)}"'] if larger else []
    if shuffle is True:
        remedies.append("a smaller episode_pool_size for a new run")
    if shuffle == "global":
        remedies.append("shuffle=True for a new run, which draws from few episodes at a time")
    if remote and not cached:
        remedies.append("a cache_dir on a local disk")
    return f". Give {' or '.join(remedies)}" if remedies else ""

"""Advice on memory: whether a larger frame cache would help, and how to avoid reading rows, indices or video repeatedly."""

from __future__ import annotations

from typing import NamedTuple

from dali_stream.arguments import gibibytes
from dali_stream.schedule.frames import FrameCache, FramePlan

_BATCHES = 200  # number of batches to compare, once both caches are full
_WORTH = 0.95  # a larger cache is advised if it decodes at most this share of the frames that the present one decodes


class Advice(NamedTuple):
    """Effect of a larger frame cache.

    Attributes:
        kept: Number of frames that the larger cache keeps per camera.
        now, then: Number of frames decoded per delivered frame, with the present cache and with the larger one.
    """

    kept: int
    now: float
    then: float


class Advisor:
    """Comparison of one camera's frame cache with a larger one, for which the same batches are planned as well.

    Args:
        larger: Larger cache of that camera.
        kept: Number of frames that `larger` keeps.
    """

    def __init__(self, larger: FrameCache, kept: int) -> None:
        self.larger, self._kept = larger, kept
        self._compared = self._shown = self._now = self._then = 0

    def compare(self, step: FramePlan, larger: FramePlan) -> bool:
        """Add a batch, as planned for both caches. Return whether enough batches were compared."""
        # A cache that is filling up decodes more than it will later, so the comparison begins when the larger one is full.
        if self._compared or self.larger.full:
            self._compared += 1
            self._shown += step.show.size
            self._now += step.decodes
            self._then += larger.decodes
        return self._compared == _BATCHES

    def advice(self) -> Advice | None:
        """Return the effect of the larger cache, or None if it is not worth its memory."""
        if self._then > _WORTH * self._now:
            return None
        return Advice(self._kept, self._now / self._shown, self._then / self._shown)


def reread_remedies(larger: int | None, shuffle: bool | str, remote: bool, cached: bool) -> str:
    """Return the end of a message that says how to avoid reading rows, indices or encoded video repeatedly.

    Args:
        larger: Memory budget that holds the rows, indices and encoded video in use, in bytes. None if a larger budget would
            not help.
        shuffle: Argument of the Loader.
        remote: Whether the dataset is read over a network.
        cached: Whether the dataset has a `cache_dir`.

    Returns:
        Text to append to a sentence. Empty if nothing would help.
    """
    remedies = [f'a larger memory_budget, such as "{gibibytes(larger)}"'] if larger else []
    if shuffle is True:
        remedies.append("a smaller episode_pool_size for a new run")
    if shuffle == "global":
        remedies.append("shuffle=True for a new run, which draws from few episodes at a time")
    if remote and not cached:
        remedies.append("a cache_dir on a local disk")
    return f". Give {' or '.join(remedies)}" if remedies else ""

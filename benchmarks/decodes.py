"""Count the frames that a schedule decodes and stores, without a dataset. Programs and tests import this module."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.schedule.episodes import Located, OpenEpisode
from dali_stream.schedule.plan import BatchPlan, Schedule


class Decodes(NamedTuple):
    """Work per delivered frame.

    Attributes:
        decoded: Number of frames decoded, including those that are only decoded to reach others.
        stored: Number of decoded frames that are resized and stored. At most `decoded`.
    """

    decoded: float
    stored: float


def decodes(schedule: Schedule, lengths: npt.NDArray[np.int64], gop: int, batches: int) -> Decodes:
    """Plan the next batches. Return the work per delivered frame, averaged over all cameras.

    Args:
        schedule: Schedule of a loader whose table has no episodes yet, or the one of an earlier call.
        lengths: Number of frames of each episode, shape (E,).
        gop: Number of frames of each GOP.
        batches: Number of batches to plan.
    """
    decoded = stored = shown = 0
    for _ in range(batches):
        for plan in plan_next(schedule, lengths, gop).frames.values():
            decoded, stored, shown = decoded + plan.decodes, stored + len(plan.slot), shown + plan.show.size
    return Decodes(decoded / shown, stored / shown)


def plan_next(schedule: Schedule, lengths: npt.NDArray[np.int64], gop: int) -> BatchPlan:
    """Plan the next batch of a dataset whose episodes have GOPs of `gop` frames in all cameras."""
    [samples] = schedule.ahead(1)
    for episode in schedule.table.closed(samples.episode):
        frame = np.arange(lengths[episode])
        located = Located(frame, frame // gop * gop)
        schedule.table.open(OpenEpisode(episode, dict.fromkeys(schedule.frames, located)))
    return schedule.plan()

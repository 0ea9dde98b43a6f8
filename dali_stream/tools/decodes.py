"""Numbers of frames that a loader decodes and stores per delivered frame, computed with its own order and schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.order.batches import Batches
from dali_stream.order.order import EpochOrder
from dali_stream.schedule.budget import divide, order_horizon
from dali_stream.schedule.episodes import EpisodeTable, Located, OpenEpisode
from dali_stream.schedule.frame_set import FrameSet
from dali_stream.schedule.plan import BatchPlan, Limits, Schedule
from dali_stream.schedule.samples import samples

if TYPE_CHECKING:
    from dali_stream.mp4.index import VideoIndex
    from dali_stream.pipeline.config import Config

_BATCHES = 400  # number of simulated batches of a long epoch after the cache is full


class Decodes(NamedTuple):
    """Work per delivered frame, averaged over an epoch.

    Attributes:
        decoded: Number of frames decoded, including those that are only decoded to reach others.
        stored: Number of decoded frames that are resized and stored. At most `decoded`.
    """

    decoded: float
    stored: float


def decodes_of(config: Config, cameras: Sequence[str], gop: int | None = None) -> tuple[Decodes, Decodes]:
    """Return the work of a loader in the first epoch, and in later ones, averaged over the frames of its cameras.

    All files of a camera are assumed to have GOPs of the same length as its first file.

    Args:
        config: Configuration of the loader.
        cameras: Cameras whose decoded frames are cached.
        gop: Number of frames of each GOP. Default: that of each camera.
    """
    sizes = config.sizes(cameras)
    parts, found = divide(config.memory_budget, sizes), dict[tuple[bytes, int], tuple[Decodes, Decodes]]()
    limits = Limits(parts.kept, config.in_progress, order_horizon(parts, sizes))
    total, frames = np.zeros((2, 2)), 0
    for camera, index in sizes.indices.items():
        if camera in cameras:
            offsets, length = config.windows.widest(camera), gop or median_gop([index])
            key = offsets.tobytes(), length
            if key not in found:
                lengths = config.source.lengths
                needed = config.needed([camera]).get(camera)
                found[key] = decodes(lengths, config.order, config.batches, offsets, length, limits, config.rank, needed)
            total, frames = total + np.array(found[key]) * len(offsets), frames + len(offsets)
    first, later = (total / max(frames, 1)).tolist()
    return Decodes(*first), Decodes(*later)


def median_gop(indices: Sequence[VideoIndex]) -> int:
    """Return the median length of the GOPs of some files, in frames."""
    return max(int(np.median(np.concatenate([index.gop_lengths for index in indices]))), 1)


def decodes(
    lengths: npt.NDArray[np.int64],
    order: Callable[[int], EpochOrder],
    batches: Batches,
    offsets: npt.NDArray[np.int64],
    gop: int,
    limits: Limits,
    rank: int = 0,
    needed: FrameSet | None = None,
) -> tuple[Decodes, Decodes]:
    """Return the work of one camera in the first epoch, and in later ones.

    If the cache holds all frames, later epochs decode only frames that no earlier batch has shown. Then the second epoch is
    returned. Several ranks have such frames unless the order is sharded. Most mixtures have some, and so have samples that
    `last_batch="drop"` omits.

    Args:
        lengths: Number of frames of each episode, shape (E,).
        order: Function from an epoch to its order.
        batches: Division of an epoch into batches.
        offsets: Offsets of the window, in frames, shape (T,).
        gop: Number of frames of each GOP.
        limits: Limits of the cache, of the look-ahead and of the batches in progress.
        rank: Rank whose batches are planned. Default: 0.
        needed: Frames that the batches of the rank show in any epoch. Default: all frames.
    """
    frames = int(lengths.sum()) if needed is None else len(needed)
    kept, camera, epoch = limits.kept, "", batches.count(0)
    fill = kept // (batches.batch_size * min(gop, 8)) + 1  # batches until the cache is about full, since decodes add whole GOPs
    # The frames of a GOP serve later batches for as long as they are cached. For a steady state, the simulation must be long
    # enough to replace the contents of the cache.
    steady = fill + max(_BATCHES, 2 * kept // batches.batch_size)
    # In a long epoch, batches after the cache is full are like those of later epochs, so only a part is simulated. A short
    # epoch and the one after it are simulated as a whole, since only the latter finds frames of the first epoch in the cache.
    count, later_from = (2 * epoch, epoch) if kept >= frames or steady > epoch else (steady, fill)
    read = samples(order, batches, rank, 0, 0)
    table, own = EpisodeTable(lengths, [camera]), {} if needed is None else {camera: needed}
    schedule = Schedule(table, read, batches.largest, {camera: offsets}, limits, needed=own)
    total, shown = np.zeros((2, 2)), np.zeros((2, 1))  # one row for the first epoch, and one for later epochs
    for number in range(count):
        if number >= epoch and schedule.frames[camera].cached == frames:
            break  # nothing is left to decode
        plan = plan_next(schedule, lengths, gop).frames[camera]
        counts = np.array([[number < epoch], [number >= later_from]])
        total, shown = total + counts * [plan.decodes, len(plan.slot)], shown + counts * plan.show.size
    first, later = (total / np.maximum(shown, 1)).tolist()
    return Decodes(*first), Decodes(*later)


def plan_next(schedule: Schedule, lengths: npt.NDArray[np.int64], gop: int) -> BatchPlan:
    """Plan the next batch of a dataset whose episodes have GOPs of `gop` frames in all cameras."""
    [samples] = schedule.ahead(1)
    for episode in schedule.table.closed(samples.episode):
        frame = np.arange(lengths[episode])
        located = Located(frame, frame // gop * gop)
        schedule.table.open(OpenEpisode(episode, dict.fromkeys(schedule.frames, located)))
    return schedule.plan()

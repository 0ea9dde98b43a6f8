"""The effect of `memory_budget` for a dataset: frames decoded per delivered frame, computed with the loader's schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.format import describe
from dali_stream.order.batches import Batches
from dali_stream.order.order import EpochOrder
from dali_stream.schedule.budget import divide, order_horizon
from dali_stream.schedule.episodes import EpisodeTable, Located, OpenEpisode
from dali_stream.schedule.plan import BatchPlan, BatchPlanner, Limits
from dali_stream.schedule.samples import samples

if TYPE_CHECKING:
    from dali_stream.loader import Loader
    from dali_stream.mp4.index import VideoIndex

BUDGETS = tuple(1 << 28 + i for i in range(8))  # 256 MiB to 32 GiB
_BATCHES = 400  # simulated batches of a long epoch, once the cache is full
_TIMED = 32  # frames that are decoded and resized to measure the time per frame


@dataclass(frozen=True)
class Forecast:
    """The effect of a `memory_budget`.

    Attributes:
        memory_budget: Budget in bytes.
        kept: Number of decoded frames per camera that the cache keeps.
        decodes: Frames decoded per delivered frame, in an epoch after the first. 0 if all frames are kept.
        first_decodes: Frames decoded per delivered frame, in the first epoch.
        frames_per_s: Approximate limit of this machine's decode threads, in frames of all cameras per second, in an epoch after
            the first. None if nothing is decoded then.
    """

    memory_budget: int
    kept: int
    decodes: float
    first_decodes: float
    frames_per_s: float | None


def forecast(loader: Loader, budgets: Sequence[int] = BUDGETS) -> list[Forecast]:
    """Return forecasts for a loader with other budgets, up to the first that keeps all frames.

    Assumes that all files of a camera have the GOPs of its first file. Decodes some frames to measure the time.

    Args:
        loader: Loader with the dataset, image_size, batch_size, order and threads.
        budgets: Budgets in bytes.

    Returns:
        Forecasts by rising budget. Empty if the CPU decodes no video.
    """
    config = loader._config
    dataset = config.dataset
    cameras = [key for key in dataset.videos if loader.routes[key].decoder == "torchcodec"]
    if not cameras:
        return []
    tables = {key: config.indices.of(key, 0, config.dataset.data_store) for key in cameras}
    seconds = float(np.mean([_seconds_per_frame(loader, key, table) for key, table in tables.items()]))
    forecasts: list[Forecast] = []
    for budget in sorted(budgets):
        sizes = config.sizes(cameras)
        parts = divide(budget, sizes)
        offsets, gop = config.windows.widest(cameras[0]), median_gop([tables[cameras[0]]])
        limits = Limits(parts.frames, config.depth, order_horizon(parts, sizes))
        first, later = decodes(dataset.lengths, config.order, config.batches, offsets, gop, limits, config.rank)
        rate = config.num_threads / (seconds * later) if later else None
        forecasts.append(Forecast(budget, parts.frames, later, first, rate))
        if not later:
            break
    return forecasts


def median_gop(tables: Sequence[VideoIndex]) -> int:
    """Return the median length of the GOPs of some files, in frames."""
    return max(int(np.median(np.concatenate([table.gop_lengths for table in tables]))), 1)


def decodes(
    lengths: npt.NDArray[np.int64],
    order: Callable[[int], EpochOrder],
    batches: Batches,
    offsets: npt.NDArray[np.int64],
    gop: int,
    limits: Limits,
    rank: int = 0,
) -> tuple[float, float]:
    """Return the frames decoded per delivered frame, in the first epoch and later, by the loader's own schedule.

    Args:
        lengths: Number of frames of each episode, (E,).
        order, batches: Order and batches of an epoch.
        offsets: Offsets of the window, in frames.
        gop: Number of frames of each GOP.
        limits: Number of decoded frames that the cache keeps, and of batches in progress.
        rank: Rank whose batches are planned.
    """
    frames, kept, camera, epoch = int(lengths.sum()), limits.kept, "", batches.count(0)
    fill = kept // (batches.batch_size * min(gop, 8)) + 1
    # A GOP that was decoded to its end feeds batches for as long as the cache holds frames, so that has to turn over.
    steady = fill + max(_BATCHES, 2 * kept // batches.batch_size)
    # In a long epoch, batches with a full cache are like those of later epochs. A short one is simulated whole, and so is the
    # epoch after it: only that one finds frames of the first epoch in the cache.
    count, later_from = (epoch if kept >= frames else 2 * epoch, epoch) if steady > epoch else (steady, fill)
    read = samples(order, batches, rank, 0, 0)
    planner = BatchPlanner(EpisodeTable(lengths, [camera]), read, batches.largest, {camera: offsets}, limits)
    decoded, shown = np.zeros(2), np.zeros(2)  # in the first epoch, and later
    for number in range(count):
        plan = plan_next(planner, lengths, gop).frames[camera]
        counts = np.array([number < epoch, number >= later_from])
        decoded, shown = decoded + counts * plan.decodes, shown + counts * plan.show.size
    first, later = (decoded / np.maximum(shown, 1)).tolist()
    return first, later


def plan_next(planner: BatchPlanner, lengths: npt.NDArray[np.int64], gop: int) -> BatchPlan:
    """Plan the next batch of a dataset whose episodes have GOPs of `gop` frames in all cameras."""
    [samples] = planner.ahead(1)
    for episode in planner.closed(samples):
        frame = np.arange(lengths[episode])
        located = Located(frame, frame // gop * gop)
        planner.observe([OpenEpisode(episode, dict.fromkeys(planner.frames, located))])
    return planner.plan()


def _seconds_per_frame(loader: Loader, camera: str, table: VideoIndex) -> float:
    """Return the seconds that one thread takes to decode and resize a frame of the camera's first file."""
    from dali_stream.decode import torchcodec as decode  # these load torch, which the doctor may find broken
    from dali_stream.decode.resize import resize

    config = loader._config
    packets = list(range(min(_TIMED, len(table))))
    video = describe(table.configs[table.config[0]])
    seconds: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        for _, frames, _ in decode.decode_in_parts(
            config.dataset.data_store, [table] * len(packets), packets, video, len(packets)
        ):
            resize(frames.numpy(), config.frame_size(camera))
        seconds.append(time.perf_counter() - started)
    return min(seconds) / len(packets)

"""The effect of `memory_budget` for a dataset: frames decoded per delivered frame, computed with the loader's schedule."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dali_stream.decode import torchcodec as decode
from dali_stream.decode.resize import resize
from dali_stream.mp4.format import describe
from dali_stream.schedule.budget import divide, horizon
from dali_stream.schedule.samples import samples
from dali_stream.schedule.schedule import Limits, Schedule

if TYPE_CHECKING:
    from dali_stream.loader import Loader
    from dali_stream.mp4.index import VideoIndex

BUDGETS = tuple(1 << 28 + i for i in range(8))  # 256 MiB to 32 GiB
_BATCHES = 400  # counted batches, once the cache is full
_TIMED = 32  # frames that are decoded and resized to measure the time per frame


@dataclass(frozen=True)
class Forecast:
    """The effect of a `memory_budget`.

    Attributes:
        memory_budget: bytes.
        kept: decoded frames per camera that the cache keeps.
        decodes: frames decoded per delivered frame, in an epoch after the first; 0 if all frames are kept.
        first_decodes: the same in the first epoch.
        frames_per_s: approximate limit of this machine's decode threads, frames of all cameras, in an epoch after the first;
            None if nothing is decoded then.
    """

    memory_budget: int
    kept: int
    decodes: float
    first_decodes: float
    frames_per_s: float | None


def forecast(loader: Loader, budgets: Sequence[int] = BUDGETS) -> list[Forecast]:
    """Forecasts for a loader with other budgets, up to the first that keeps all frames.

    Assumes that all files of a camera have the GOPs of its first file. Decodes some frames to measure the time.

    Args:
        loader: dataset, image_size, batch_size, order and threads are taken from it.
        budgets: bytes.

    Returns:
        By rising budget; empty if the CPU decodes no video.
    """
    config = loader._config
    cameras = [key for key in config.dataset.videos if loader.routes[key].decoder == "torchcodec"]
    if not cameras:
        return []
    tables = {key: config.indices.of(key, 0, config.dataset.data_store) for key in cameras}
    seconds = float(np.mean([_seconds_per_frame(loader, key, table) for key, table in tables.items()]))
    found: list[Forecast] = []
    for budget in sorted(budgets):
        shares = divide(budget, config.sizes(cameras))
        first, later = _decodes(loader, tables[cameras[0]], cameras[0], shares.frames)
        rate = config.threads / (seconds * later) if later else None
        found.append(Forecast(budget, shares.frames, later, first, rate))
        if not later:
            break
    return found


def _decodes(loader: Loader, table: VideoIndex, camera: str, kept: int) -> tuple[float, float]:
    """Frames decoded per delivered frame, in the first epoch and later."""
    config = loader._config
    gop = max(int(np.median(np.diff(np.append(table.keyframes, len(table))))), 1)
    offsets = config.windows.of(camera)
    frames = config.dataset.num_frames
    batches = config.batches.count(0)
    fill = 0 if kept >= frames else kept // (config.batches.batch_size * min(gop, 8)) + 1
    count = batches if kept >= frames else min(fill + _BATCHES, 4 * batches)
    read = samples(config.order, config.batches, config.rank, 0, 0)
    limits = Limits(kept, 2, horizon(kept, frames))
    schedule = Schedule(config.dataset.lengths, read, config.batches.largest, {camera: offsets}, limits)
    decoded = shown = 0
    for number in range(count):
        schedule.next()
        for episode in schedule.unknown(camera):
            frame = np.arange(config.dataset.lengths[episode])
            schedule.learn(camera, episode, frame, frame // gop * gop)
        step = schedule.step()[camera]
        if number >= min(fill, count // 2):
            decoded, shown = decoded + step.decodes, shown + step.show.size
    return (decoded / shown, 0.0) if kept >= frames else (decoded / shown, decoded / shown)


def _seconds_per_frame(loader: Loader, camera: str, table: VideoIndex) -> float:
    """Seconds that one thread takes to decode and resize a frame of the camera's first file."""
    config = loader._config
    packets = list(range(min(_TIMED, len(table))))
    video = describe(table.configs[table.config[0]])
    taken: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        frames: npt.NDArray[np.uint8]
        for _, frames, _ in decode.decode_in_parts(
            config.dataset.data_store, list(itertools.repeat(table, len(packets))), packets, video, len(packets)
        ):
            resize(frames, config.frame_size(camera))
        taken.append(time.perf_counter() - started)
    return min(taken) / len(packets)

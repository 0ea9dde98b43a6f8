"""Whether `memory_budget` holds one batch, told before the run and not in the middle of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError, MemoryBudgetError
from dali_stream.residency import HEADROOM, block_bytes, row_share
from dali_stream.video.table import SampleTable

if TYPE_CHECKING:
    from dali_stream.stage import Plan


def check(plan: Plan) -> None:
    """Holds a batch of the longest episodes, and of the largest GOPs in the first video files, against the budget.

    Images and text in rows do not count: how large they are is known when they are read.

    Raises:
        MemoryBudgetError: it does not fit.
    """
    if not _fits(plan, plan.memory_budget):
        least = next(bound for bound in _bounds(plan.memory_budget) if _fits(plan, bound))
        size = plan.batches.batch_size
        raise MemoryBudgetError(
            f"memory_budget is {plan.memory_budget} bytes, and a batch of {size} samples can need about {least} for the rows, "
            "indices and encoded video of its episodes; give a larger memory_budget, or a smaller batch_size"
        )


class Shares(NamedTuple):
    """How `memory_budget` is divided.

    Attributes:
        encoded: bytes for rows, indices and, of remote data, encoded video.
        frames: decoded frames of each camera that may be kept for later batches.
        frame_bytes: of one decoded frame of each camera.
    """

    encoded: int
    frames: int
    frame_bytes: int


def divide(plan: Plan, on_cpu: Sequence[str]) -> Shares:
    """Divides `memory_budget`: what the episodes in use need of rows, indices and encoded video, half of it at most, and
    the rest for decoded frames of the cameras that the CPU decodes. If these all fit, what they leave goes back.

    The frames of the batches under way come on top.
    """
    budget, frames = plan.memory_budget, plan.dataset.num_frames
    need = _need(plan)
    if need > budget // 2:
        need = budget // 2 if _fits(plan, budget // 2) else budget
    frame_bytes = sum(math.prod(plan.frame_size(camera)) * 3 for camera in on_cpu)
    kept = min((budget - need) // frame_bytes, frames) if frame_bytes else 0
    return Shares(budget - kept * frame_bytes, kept, frame_bytes)


def horizon(kept: int, frames: int) -> int:
    """Samples that the order is read ahead, to know the next uses of `kept` frames of a dataset of `frames`.

    Of frames that are used once each, and that many decodes bring, those kept are used within some twice as many samples as
    there is room for; where a decode brings few, as with GOPs of 2, they are farther away.
    """
    return 0 if kept >= frames else min(2 * frames, max(2 * kept, min(8 * kept, 1 << 18)))


def _need(plan: Plan) -> int:
    """About how many bytes the rows, indices and, of remote data, the encoded video of the episodes in use take."""
    dataset = plan.dataset
    in_use = min(dataset.num_frames, int(_episodes(plan) * dataset.num_frames / dataset.num_episodes * 1.5))
    rows, (first, every) = in_use * dataset.row_bytes * 2, _indices(plan)
    video = 0
    if dataset.data_store.remote:
        for camera in dataset.videos:
            if table := _table(plan, camera):
                video += in_use * int(table.size.sum()) // len(table) * 5 // 4
    return (rows + max(first, every) + video) * HEADROOM // (HEADROOM - 1) + (1 << 20)


def _bounds(refused: float) -> Iterator[int]:
    """Larger budgets than one that was refused, in steps of a tenth."""
    bound = max(refused, 4096.0)
    while True:
        yield int(bound)
        bound *= 1.1


def _fits(plan: Plan, budget: int) -> bool:
    """Whether a batch fits beside all that `Residency` may hold then."""
    dataset, size = plan.dataset, plan.batches.batch_size
    longest = np.sort(dataset.lengths)[-min(_episodes(plan), size) :]
    row_bytes = dataset.row_bytes_without_objects + 1
    rows, all_rows = int(longest.sum() * row_bytes * 1.02), dataset.num_frames * row_bytes * 2
    share = row_share(dataset, budget)
    if rows > share:
        return False
    if not (dataset.data_store.remote and dataset.videos):
        return True
    first, every = _indices(plan)
    indices = max(first, min(budget // 4, every))
    ahead = min(share // 4 + rows, all_rows) + min(share // 4, all_rows)
    room = budget - budget // HEADROOM - min(share, all_rows) - indices - ahead
    return room >= max(_pictures_bytes(plan, camera, budget) for camera in dataset.videos)


def _indices(plan: Plan) -> tuple[int, int]:
    """Bytes of the index of a camera's first file, and about those of all files."""
    first, each = 0, 0.0
    for camera in plan.dataset.videos:
        if table := _table(plan, camera):
            first, each = max(first, table.nbytes), each + table.nbytes / len(table)
    return first, int(each * plan.dataset.table.length.sum())


def _pictures_bytes(plan: Plan, camera: str, budget: int) -> int:
    """Bytes of the blocks that one batch of a camera may need."""
    window = plan.windows.get(camera, np.zeros(1, np.int64))
    if (table := _table(plan, camera)) is None:
        return 0
    pictures = plan.batches.batch_size * len(window)
    return plan.batches.batch_size * window_bytes(table, window) + pictures * block_bytes(budget, pictures)


def _episodes(plan: Plan) -> int:
    """How many episodes a batch may show: as many as the pools hold, as lie beside each other, or as it has samples."""
    batches, lengths = plan.batches, plan.dataset.lengths
    if plan.shuffle is True:  # a pool, and what takes the place of a segment that drains in a batch
        return plan.consumers // batches.world_size * (plan.episode_pool_size + 1)
    if plan.shuffle is False:
        ends = np.cumsum(lengths)
        return int((np.searchsorted(ends, ends - lengths + batches.stride) - np.arange(len(ends))).max()) + 1
    return batches.batch_size


def _table(plan: Plan, camera: str) -> SampleTable | None:
    with contextlib.suppress(DecodeError):  # the first batch that needs the file says what is wrong
        return plan.tables.of(camera, 0, plan.dataset.data_store)
    return None


def window_bytes(table: SampleTable, offsets: npt.NDArray[np.int64]) -> int:
    """Bytes of encoded video that one sample may need: the GOPs of its window's frames."""
    largest = int(np.add.reduceat(table.size, table.sync).max())
    stretch = int(offsets.max() - offsets.min()) * int(table.size.sum()) // len(table)
    return min(len(offsets) * largest, stretch + 2 * largest)

"""Whether `memory_budget` holds one batch, told before the run and not in the middle of it."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError, MemoryBudgetError
from dali_stream.stage import Plan
from dali_stream.video.table import SampleTable


def check(plan: Plan) -> None:
    """Holds a batch of the longest episodes, and of the largest GOPs in the first video files, against the budget.

    Raises:
        MemoryBudgetError: it does not fit.
    """
    dataset, size, remote = plan.dataset, plan.batches.batch_size, plan.dataset.data_store.remote
    longest = np.sort(dataset.lengths)[-min(_episodes(plan), size) :]
    rows = int(longest.sum()) * dataset.row_bytes
    encoded = size * max((_window_bytes(plan, camera) for camera in dataset.videos), default=0) if remote else 0
    least = max(rows * 4, rows + encoded) if remote else rows * 4 // 3  # the shares of `Residency`
    if plan.memory_budget < least:
        video = f", {encoded} for encoded video" if encoded else ""
        raise MemoryBudgetError(
            f"memory_budget is {plan.memory_budget} bytes, and a batch of {size} samples can need {least}: {rows} for the rows "
            f"of its episodes{video}; give a larger memory_budget, or a smaller batch_size"
        )


def _episodes(plan: Plan) -> int:
    """How many episodes a batch may show: as many as the pools hold, as lie beside each other, or as it has samples."""
    batches, lengths = plan.batches, plan.dataset.lengths
    if plan.shuffle is True:  # a pool, and what takes the place of a segment that drains in a batch
        return plan.consumers // batches.world_size * (plan.episode_pool_size + 1)
    if plan.shuffle is False:
        ends = np.cumsum(lengths)
        return int((np.searchsorted(ends, ends - lengths + batches.stride) - np.arange(len(ends))).max()) + 1
    return batches.batch_size


def _window_bytes(plan: Plan, camera: str) -> int:
    with contextlib.suppress(DecodeError):  # the first batch that needs the file says what is wrong
        table = plan.tables.of(camera, 0, plan.dataset.data_store)
        return window_bytes(table, plan.windows.get(camera, np.zeros(1, np.int64)))
    return 0


def window_bytes(table: SampleTable, offsets: npt.NDArray[np.int64]) -> int:
    """Bytes of encoded video that one sample may need: the GOPs of its window's frames."""
    largest = int(np.add.reduceat(table.size, table.sync).max())
    stretch = int(offsets.max() - offsets.min()) * int(table.size.sum()) // len(table)
    return min(len(offsets) * largest, stretch + 2 * largest)

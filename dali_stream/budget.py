"""Whether `memory_budget` holds one batch, told before the run and not in the middle of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.errors import MemoryBudgetError
from dali_stream.order import Shuffle
from dali_stream.video.table import SampleTable


def check(dataset: Dataset, budget: int, batch_size: int, episodes: int, encoded: int) -> None:
    """Raises MemoryBudgetError where a batch of the longest episodes does not fit.

    Args:
        dataset: the selected part of a dataset.
        budget: bytes.
        batch_size: samples of a batch.
        episodes: that a batch may show.
        encoded: bytes of video that a batch may need, of remote data; see `window_bytes`.
    """
    longest = np.sort(dataset.lengths)[-min(episodes, batch_size) :]
    rows = int(longest.sum()) * dataset.row_bytes
    share = 4 if dataset.data_store.remote else 4 / 3  # see `Residency`
    least = max(int(rows * share), rows + encoded)
    if budget < least:
        video = f", {encoded} for encoded video" if encoded else ""
        raise MemoryBudgetError(
            f"memory_budget is {budget} bytes, and a batch of {batch_size} samples can need {least}: {rows} for the rows of "
            f"its episodes{video}; give a larger memory_budget, or a smaller batch_size"
        )


def episodes_of_a_batch(dataset: Dataset, shuffle: Shuffle, samples: int, pools: int) -> int:
    """How many episodes a batch may show: as many as lie beside each other, as the pools hold, or as it has samples.

    Args:
        dataset: the selected part of a dataset.
        shuffle: see `Order`.
        samples: of all ranks together.
        pools: segments that this rank draws from, and those that may take the place of drained ones.
    """
    if shuffle is True:
        return pools
    if shuffle is False:
        ends = np.cumsum(dataset.lengths)
        after = np.searchsorted(ends, ends - dataset.lengths + samples)
        return int((after - np.arange(len(ends))).max()) + 1
    return samples


def window_bytes(table: SampleTable, offsets: npt.NDArray[np.int64]) -> int:
    """Bytes of encoded video that one sample may need: the GOPs of its window's frames, judged by one file's table."""
    largest = int(np.add.reduceat(table.size, table.sync).max())
    stretch = int(offsets.max() - offsets.min()) * int(table.size.sum()) // len(table)
    return min(len(offsets) * largest, stretch + 2 * largest)

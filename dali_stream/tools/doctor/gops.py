"""What long GOPs cost: frames decoded per delivered frame, and how the frame cache lowers that."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.errors import MemoryBudgetError
from dali_stream.mp4.index import VideoIndex
from dali_stream.order import Order, default_pools
from dali_stream.order.batches import Batches
from dali_stream.schedule.budget import Sizes, divide
from dali_stream.tools.doctor.report import OK, WARNING, Result
from dali_stream.tools.forecast import decodes, median_gop

COSTLY = 4.0  # frames decoded per delivered one, from which on a finding says so
_BATCH = 64
_SIZE = 224, 224
_BUDGETS = 4 << 30, 16 << 30  # the default, and a large one
_GOOD = 1.5  # what a GOP of 2 costs
_EPISODES = 2000  # that are simulated, at most


def examine(dataset: Dataset, camera: str, tables: Sequence[VideoIndex]) -> Result | None:
    """The finding on a camera's GOPs; None if they are short."""
    gops = np.concatenate([np.diff(np.append(table.keyframes, len(table))) for table in tables])
    plain = float((gops * (gops + 1) / 2).sum() / gops.sum())
    if plain < COSTLY:
        return None
    text = f"GOP {median_gop(tables)} decodes {plain:.0f} frames per delivered frame without a frame cache"
    shorter, status = "`dali-stream transcode URI OUT --gop 2`", WARNING
    remedy = f"{shorter} makes it 1.5"
    if found := _cached(dataset, camera, tables):
        budget, first, later = found
        cache = f'memory_budget="{budget >> 30}GiB" with image_size={_SIZE}'
        text += f"; {cache} brings it to about {first:.1f}" + ("" if later else ", and to 0 after the first epoch")
        text += f", {shorter} to 1.5"
        remedy = f"give the Loader {cache}; or {shorter}"
        if budget == _BUDGETS[0] and first <= _GOOD:
            status = OK  # the default does it
    return status, text, "" if status == OK else remedy


def _cached(dataset: Dataset, camera: str, tables: Sequence[VideoIndex]) -> tuple[int, float, float] | None:
    """The first of two budgets that makes the cost small, or else the larger, and the cost in the first epoch and later."""
    lengths = dataset.lengths[:_EPISODES]
    batches = Batches(int(lengths.sum()), min(_BATCH, int(lengths.sum())), 1, "drop")
    consumers, pool = default_pools(batches.batch_size, 1)
    window = np.zeros(1, np.int64)
    frame = math.prod(_SIZE) * 3 * len(dataset.videos)
    sizes = Sizes(
        lengths=dataset.lengths,
        batch_size=batches.batch_size,
        episodes=min(consumers * (pool + 1), dataset.num_episodes),
        row_bytes=dataset.row_bytes,
        least_row_bytes=dataset.row_bytes_without_objects,
        files={camera: len(np.unique(dataset.table.video[camera].index[dataset.rows]))},
        indices={camera: tables[0]},
        windows={camera: window},
        fetched=dataset.data_store.remote,
        frame_bytes=frame,
        in_progress=2 * batches.largest * frame,
    )
    found = None
    for budget in _BUDGETS:
        try:
            kept = divide(budget, sizes).frames
        except MemoryBudgetError:
            continue
        kept = int(lengths.sum()) if kept >= dataset.lengths.sum() else min(kept, int(lengths.sum()) - 1)
        first, later = decodes(
            lengths, lambda epoch: Order(lengths, True, 0, epoch, consumers, pool), batches, window, median_gop(tables), kept
        )
        found = budget, first, later
        if first <= _GOOD:
            break
    return found

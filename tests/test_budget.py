"""Division of memory_budget, with numbers that were computed by hand from the descriptions in `schedule/budget.py`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dali_stream.errors import MemoryBudgetError
from dali_stream.schedule.budget import (
    Parts,
    Sizes,
    batches_in_progress,
    divide,
    encoded_horizon,
    frames_budget,
    look_ahead,
    order_horizon,
    reads_budget,
    window_bytes,
)


class Index(SimpleNamespace):
    """Index of a file of 100 packets of 50 bytes, in GOPs of 10."""

    def __len__(self) -> int:
        return 100


INDEX: Any = Index(nbytes=1000, size=lambda: np.full(100, 50), keyframes=np.arange(0, 100, 10))
# 40 episodes of 100 frames, of which the order draws from 10 at a time, in batches of 8 samples with 2 frames.
REMOTE = Sizes(
    lengths=np.full(40, 100), batch_size=8, episodes=10, row_bytes=64, least_row_bytes=32, files={"top": 30},
    indices={"top": INDEX}, windows={"top": np.array([0, 5])}, fetched=True, frame_bytes=1000, in_progress_bytes=300_000,
)  # fmt: skip
LOCAL = replace(REMOTE, fetched=False)
ROWS = 1500 * 64 * 5 // 4 + (1 << 20)  # of 10 episodes and half as much again, with a quarter and 1 MiB to spare
INDICES = 10 * 1000 * 3 // 2
VIDEO = 1500 * 50 * 5 // 4


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        # All frames fit. The memory that they leave is for reads, of which rows and indices get at most half.
        (REMOTE, 8 << 20, Parts(4_388_608, 2_194_304, 2_194_304 * INDICES // (ROWS + INDICES), 4000, 16_384)),
        # Some frames fit, beside those in progress.
        (REMOTE, 4 << 20, Parts(1_278_304, 639_152, 639_152 * INDICES // (ROWS + INDICES), 2616, 8192)),
        # Reads get up to half of the budget.
        (REMOTE, 2 << 20, Parts(1_049_152, 524_576, 524_576 * INDICES // (ROWS + INDICES), 748, 4096)),
        # Files that are read in place leave all of it to rows and indices.
        (LOCAL, 8 << 20, Parts(4_388_608, 4_388_608, 4_388_608 * INDICES // (ROWS + INDICES), 4000, 16_384)),
        # The frames in progress leave no memory for others, so all of it is for rows and indices.
        (
            replace(LOCAL, in_progress_bytes=4 << 20),
            4 << 20,
            Parts(4 << 20, 4 << 20, (4 << 20) * INDICES // (ROWS + INDICES), 0, 8192),
        ),
        (replace(REMOTE, frame_bytes=0), 8 << 20, Parts(8 << 20, 4 << 20, (4 << 20) * INDICES // (ROWS + INDICES), 0, 16_384)),
    ],
)
def test_parts(sizes: Sizes, budget: int, expected: Parts) -> None:
    assert divide(budget, sizes) == expected


def test_all_files_are_in_use_if_batches_draw_from_anywhere() -> None:
    everywhere = replace(LOCAL, scattered=True)
    indices = 30 * 1000 * 3 // 2
    assert divide(8 << 20, everywhere).indices == 4_388_608 * indices // (ROWS + indices)


def test_larger_budgets_that_help() -> None:
    needed = ROWS + INDICES + VIDEO
    assert reads_budget(divide(2 << 20, REMOTE), REMOTE) == 2 * needed
    assert reads_budget(divide(4 << 20, REMOTE), REMOTE) is None, "it holds what is in use"
    enough = frames_budget(REMOTE)
    assert enough == 4000 * 1000 + needed
    assert divide(enough, REMOTE).kept == 4000
    assert divide(enough - 1, REMOTE).kept < 4000


def test_a_rank_that_needs_a_part_of_the_frames_needs_a_part_of_the_memory() -> None:
    part = replace(REMOTE, needed=2000)
    enough = frames_budget(part)
    assert enough == 2000 * 1000 + ROWS + INDICES + VIDEO
    assert divide(enough, part).kept == 2000
    assert divide(8 << 20, part).kept == 2000, "other frames are never shown"
    assert 0 < divide(enough - 1, part).kept < 2000
    assert order_horizon(Parts(1, 1, 1, 3000, 1), replace(part, fetched=False, needed=3001)) == 6002, "two epochs of the rank"


def test_all_frames_fit_even_if_a_batch_needs_more_than_they_do() -> None:
    """40 frames of 10 bytes, and batches of 8 samples whose blocks of video alone need more."""
    sizes = replace(REMOTE, lengths=np.full(4, 10), frame_bytes=10)
    assert divide(frames_budget(sizes), sizes).kept == 40


def test_a_batch_needs_at_least_its_rows_indices_and_gops() -> None:
    """8 episodes of 100 rows, 8 indices, and for each of 16 frames one block beside the GOPs of its window."""
    rows, indices = 8 * 100 * 32 * 5 // 4, 8 * 1000
    for budget in (42_000, 48_000, 49_300):
        block = budget // 32 // 16
        assert rows + indices + 8 * 1000 + 16 * block > budget
        with pytest.raises(MemoryBudgetError, match=rf"at least about (\d+) bytes, got {budget}: a batch of 8 samples"):
            divide(budget, REMOTE)
    with pytest.raises(MemoryBudgetError) as raised:
        divide(1000, REMOTE)
    enough = int(str(raised.value).split("about ")[1].split()[0])
    assert divide(enough, REMOTE).opened >= rows + indices
    with pytest.raises(MemoryBudgetError):
        divide(enough * 10 // 12, REMOTE)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [([0], 500), ([0, 5], 1000), ([3, 9], 1000), (list(range(1, 11)), 9 * 50 + 1000), (list(range(-4, 6)), 9 * 50 + 1000)],
)
def test_bytes_of_a_window(offsets: list[int], expected: int) -> None:
    """A GOP for each frame, or the whole stretch with a GOP at either end if that is less."""
    assert window_bytes(INDEX, np.array(offsets)) == expected


def test_horizons() -> None:
    assert encoded_horizon(100_000, REMOTE) == 2 * 100_000 // 50
    assert encoded_horizon(1 << 30, REMOTE) == 2 * 4000, "two epochs"
    assert encoded_horizon(1 << 30, replace(REMOTE, lengths=np.full(4000, 1000))) == 1 << 18
    assert encoded_horizon(100_000, LOCAL) == 0
    assert order_horizon(divide(4 << 20, REMOTE), REMOTE) == 8000
    assert order_horizon(divide(8 << 20, LOCAL), LOCAL) == 4096
    assert [look_ahead(size) for size in (1, 64, 4096)] == [256, 64, 16]


@pytest.mark.parametrize(
    ("threads", "batch_frames", "task_frames", "affordable", "expected"),
    [
        (2, 64, 32, 0, 2),
        (8, 64, 32, 0, 8),
        (8, 60, 32, 0, 9),
        (1, 64, 32, 0, 2),
        (64, 64, 32, 0, 64),
        (64, 8, 32, 0, 128),
        (2, 1, 3, 0, 12),
        (2, 2, 32, 0, 16),
        (2, 2, 32, 40, 40),
        (2, 2, 32, 400, 64),
        (1, 0, 4, 0, 8),
    ],
)
def test_batches_in_progress_keep_all_threads_busy(
    threads: int, batch_frames: int, task_frames: int, affordable: int, expected: int
) -> None:
    """Two tasks for each thread, rounded up to whole batches: at least 2, and at most 16, two per thread, or `affordable`."""
    assert batches_in_progress(threads, batch_frames, task_frames, affordable) == expected

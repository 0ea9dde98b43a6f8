"""The example of a plan in `dali_stream.schedule.example`, its smaller rules, and what planning does not import."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dali_stream
from dali_stream.pipeline.planner import reread_remedies
from dali_stream.schedule import example
from dali_stream.schedule.budget import Sizes, divide, horizon, window_bytes
from dali_stream.schedule.samples import nearest


def test_the_example_returns_what_it_says() -> None:
    failed, tried = doctest.testmod(example)
    assert not failed
    assert tried > 10


def test_planning_imports_neither_storage_nor_what_reads_from_it() -> None:
    """Imports for type checking do not count."""
    for path in (Path(dali_stream.__file__).parent / "schedule").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dali_stream."):
                assert (node.module or "").split(".")[1] in ("checks", "errors", "order", "schedule"), (path, node.module)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=12), st.integers(0, 40))
def test_the_items_with_the_nearest_next_uses_are_kept(items: list[tuple[int, int]], room: int) -> None:
    next_use, sizes = np.array(items, np.int64).reshape(-1, 2).T
    alike, sized = nearest(next_use, room), nearest(next_use, room, sizes)
    assert alike.sum() == min(room, len(items))
    assert sizes[sized].sum() <= room
    for keep in (alike, sized):
        assert max(next_use[keep], default=0) <= min(next_use[~keep], default=9)


def test_indices_of_files_in_use_have_room_beside_the_rows() -> None:
    """With room to spare, since files differ."""
    index = SimpleNamespace(nbytes=10_000, size=lambda: np.full(100, 50), keyframes=np.arange(0, 100, 10), __len__=lambda: 100)
    sizes = Sizes(
        lengths=np.full(40, 100), batch_size=8, episodes=20, row_bytes=50, least_row_bytes=50, files={"top": 30},
        indices={"top": index}, windows={"top": np.array([0])}, fetched=False, frame_bytes=0, in_progress_bytes=0,
    )  # type: ignore[dict-item]  # fmt: skip
    parts = divide(2 << 20, sizes)
    assert parts.indices >= 20 * index.nbytes * 1.5
    assert parts.opened - parts.indices >= 20 * 100 * 50


def file_index(sizes: list[int], gop: int) -> SimpleNamespace:
    """An index of packets of these sizes in bytes."""

    class Index(SimpleNamespace):
        def __len__(self) -> int:
            return len(sizes)

    return Index(nbytes=1000, size=lambda: np.array(sizes), keyframes=np.arange(0, len(sizes), gop))


@pytest.mark.parametrize(
    ("kept", "frames", "expected"),
    [
        (100, 100, 0),  # all frames are cached
        (10, 1000, 80),  # 8 K
        (1000, 3000, 6000),  # at most two epochs
        (1 << 16, 1 << 30, 1 << 18),
        (1 << 20, 1 << 30, 1 << 21),  # 2 K
    ],
)
def test_the_order_is_read_far_enough_for_the_frames_that_are_cached(kept: int, frames: int, expected: int) -> None:
    assert horizon(kept, frames) == expected


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0], 500),  # one GOP, the largest
        ([3, 3], 1000),  # two of them
        ([0, 2, 4], 4 * 100 + 2 * 500),  # the stretch, and a GOP at either end; three GOPs would be 1500
        ([0, 1, 2, 3, 4, 9], 9 * 100 + 2 * 500),
    ],
)
def test_a_window_needs_its_gops_or_its_stretch(offsets: list[int], expected: int) -> None:
    index: Any = file_index([75, 75, 75, 75, 125, 125, 125, 125, 100, 100, 100, 100], 4)
    assert window_bytes(index, np.array(offsets)) == expected


@pytest.mark.parametrize(
    ("larger", "shuffle", "remote", "cached", "named"),
    [
        (3 << 30, True, True, False, ["memory_budget", "episode_pool_size", "cache_dir"]),
        (None, True, True, True, ["episode_pool_size"]),
        (None, "sharded", False, False, ["episode_pool_size"]),
        (None, "global", False, False, ["shuffle=True"]),
        (None, False, True, True, []),
        (None, False, False, True, []),
        (None, False, True, False, ["cache_dir"]),
    ],
)
def test_remedies_against_reading_twice_fit_the_loader(
    larger: int | None, shuffle: bool | str, remote: bool, cached: bool, named: list[str]
) -> None:
    text = reread_remedies(larger, shuffle, remote, cached)
    words = ("memory_budget", "episode_pool_size", "shuffle=True", "cache_dir")
    assert [word for word in words if word in text] == named
    assert bool(text) == bool(named)

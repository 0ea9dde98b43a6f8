"""Slots: frames that are written are the frames that are copied, black where none is, and errors belong to samples."""

from __future__ import annotations

import mmap
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from dali_stream import DecodeError
from dali_stream.cache.slots import Slots
from dali_stream.system.workers import Workers

SHAPE = (2, 3, 3)
FRAMES = np.arange(4 * 18, dtype=np.uint8).reshape(4, *SHAPE) + 1


@pytest.fixture
def slots() -> Slots:
    """Four slots, all of which are written."""
    made = Slots(4, SHAPE)
    made.put([3, 0, 2, 1], FRAMES[[3, 0, 2, 1]])
    return made


def test_slot_minus_one_is_black_and_no_slot_of_a_frame(slots: Slots) -> None:
    show = np.array([[3, -1], [0, 2], [1, 3]])
    out = np.full((3, 2, *SHAPE), 7, np.uint8)
    assert slots.copy_batch(show, out, Workers("", 0)) == {}
    expected = FRAMES[show]
    expected[0, 1] = 0
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_slot_is_not_the_black_one(count: int) -> None:
    slots = Slots(count, SHAPE)
    slots.put([count - 1], FRAMES[:1])
    out = np.full((1, 2, *SHAPE), 7, np.uint8)
    slots.copy_batch(np.array([[count - 1, -1]]), out, Workers("", 0))
    np.testing.assert_array_equal(out[0], [FRAMES[0], np.zeros(SHAPE)])


def test_a_sample_has_the_error_of_its_first_frame_that_failed(slots: Slots) -> None:
    first, second = DecodeError("first"), DecodeError("second")
    slots.fail(2, first)
    slots.fail(1, second)
    show = np.array([[0, 2, 1], [0, 3, 0], [1, 3, 2]])
    failed = slots.copy_batch(show, np.empty((3, 3, *SHAPE), np.uint8), Workers("", 0))
    assert failed == {0: first, 2: second}
    slots.put([2], FRAMES[[2]])
    failed = slots.copy_batch(show, np.empty((3, 3, *SHAPE), np.uint8), Workers("", 0))
    assert failed == {0: second, 2: second}, "a slot that is written again has no error"


def test_freed_slots_take_no_memory(slots: Slots) -> None:
    slots.free()
    with pytest.raises(IndexError):
        slots.put([0], FRAMES[[0]])


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="page faults and memory are counted as on Linux")
def test_slots_are_in_huge_pages_and_take_the_memory_of_what_was_written() -> None:
    """Half of the slots take at most two huge pages more than their frames, and all slots no more than theirs."""
    huge = 2 << 20
    if os.environ.get("NUMPY_MADVISE_HUGEPAGE") == "0":
        pytest.skip("NUMPY_MADVISE_HUGEPAGE turns huge pages off")
    with mmap.mmap(-1, 16 * huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = page_faults()
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1
        if page_faults() - before > 100:
            pytest.skip("the system gives this process no huge pages, see /sys/kernel/mm/transparent_hugepage/enabled")
    count, frames = 400, np.ones((10, 224, 224, 3), np.uint8)
    empty = anonymous_bytes()
    slots = Slots(count, frames.shape[1:])
    faults = page_faults()
    for limit in (count // 2, count):
        for first in range(limit - count // 2, limit, len(frames)):
            slots.put(range(first, first + len(frames)), frames)
        written = limit * frames[0].nbytes
        assert written <= anonymous_bytes() - empty <= min(written + 2 * huge, (count + 1) * frames[0].nbytes) + (1 << 20)
    pages = count * frames[0].nbytes // mmap.PAGESIZE
    assert page_faults() - faults < pages / 10
    slots.free()
    assert anonymous_bytes() - empty < 1 << 20

"""Slots: frames that are written are the frames that are copied, black where none is, and errors belong to samples."""

from __future__ import annotations

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

"""Slots: frames that are written are the frames that are copied, black where none is, and errors belong to samples."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys

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
    slots.copy_batch(show, out, Workers("", 0))
    assert slots.failed(show) == {}
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
    failed = slots.failed(show)
    assert failed == {0: first, 2: second}
    slots.put([2], FRAMES[[2]])
    failed = slots.failed(show)
    assert failed == {0: second, 2: second}, "a slot that is written again has no error"


def test_freed_slots_take_no_memory(slots: Slots) -> None:
    slots.free()
    with pytest.raises(IndexError):
        slots.put([0], FRAMES[[0]])


PROGRAM = """
import json, mmap, resource
import numpy as np
from dali_stream.cache.slots import Slots

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def memory():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10

with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
    probe.madvise(mmap.MADV_HUGEPAGE)
    before = faults()
    for at in range(0, len(probe), mmap.PAGESIZE):
        probe[at] = 1
    print(json.dumps(faults() - before))
count, frames = 400, np.ones((10, 224, 224, 3), np.uint8)
empty, before = memory(), faults()
slots = Slots(count, frames.shape[1:])
for stop in (count // 2, count):
    for first in range(stop - count // 2, stop, len(frames)):
        slots.put(range(first, first + len(frames)), frames)
    print(json.dumps(memory() - empty))
print(json.dumps(faults() - before))
slots.free()
print(json.dumps(memory() - empty))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="page faults and memory are counted as on Linux")
def test_slots_are_in_huge_pages_and_take_the_memory_of_what_was_written() -> None:
    """Half of the slots take at most two huge pages more than their frames, and all slots no more than theirs."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMPY_MADVISE_HUGEPAGE"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    probe, half, full, faults, freed = map(json.loads, done.stdout.splitlines())
    frame, mib = 224 * 224 * 3, 1 << 20
    assert 200 * frame <= half <= 200 * frame + 5 * mib
    assert 400 * frame <= full <= 401 * frame + mib
    assert freed < mib
    if probe > 1000:
        pytest.skip("the system gives this process no huge pages, see /sys/kernel/mm/transparent_hugepage/enabled")
    assert faults < 400 * frame / mmap.PAGESIZE / 10

"""Memory of glibc's heaps."""

from __future__ import annotations

import contextlib
import ctypes

# Bytes of decoded frames (RGB at full size) per thread after which free memory is returned to the system. This takes some
# milliseconds, so it is not done for every batch.
TRIM_AFTER = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from malloc.h


def trim_memory() -> None:
    """Return free memory of the heaps to the operating system, with glibc's malloc_trim. Do nothing without glibc.

    glibc keeps freed blocks of decoded frames in the heaps of the threads, and cannot always reuse them: a freed aligned block
    is not reused for a block of the same size while a small block next to it is in use (glibc bug 14581).

    During an epoch of the recording g1 at 224×224 with memory_budget="200MiB", on 2 shared cores of an AMD EPYC, 2026-11-25,
    13 calls took 0.06 s of 16 s of CPU time, and the process had 748 MB at most, and 793 MB without them. A threshold of 1 MiB
    for mmap, set once with mallopt, gave 705 MB but took 20 s, and would also apply to all other code in the process.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory of this process for later allocations, up to 256 MiB. Do nothing without glibc.

    A function that allocates a frame for each of its steps then gets memory that it has used before, which needs no page
    faults. LeRobot's transforms of frames of 480×640 took 4 % less CPU time, on 2 cores of an AMD EPYC, 2026-11-28.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc allows
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)

"""Threads and open files, which a loader must not leave in the process."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dali_stream import Loader

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="threads and handles are read from /proc")


def traces() -> tuple[list[str], list[str]]:
    """Threads and open files. Only DALI's native threads count, since those of Arrow and jemalloc start once and stay."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate()]
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            name = (path / "comm").read_text().strip()
            threads += [name] if "DALI" in name else []
    return sorted(threads), sorted(handles().values())


def handles() -> dict[str, str]:
    """The open files of this process by their numbers."""
    gc.collect()
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the handle of the listing itself
            found[path.name] = os.readlink(path)
    return found


@pytest.fixture(scope="module")
def warm(demo: Path) -> None:
    """Libraries open what they keep for good when they are first used, and threads of other files' tests end.

    A thread for requests outlives a store that was not closed by half a second, and DALI's threads end a moment after their
    pipeline. The first test here would count them before, and miss them after.
    """
    with Loader(demo, batch_size=8) as loader:
        next(iter(loader))
    deadline = time.monotonic() + 30
    while ours := [name for name in traces()[0] if "dali_stream" in name or "DALI" in name]:
        assert time.monotonic() < deadline, f"threads of earlier tests do not end: {ours}"
        os.sched_yield()


@contextlib.contextmanager
def nothing_left() -> Iterator[Any]:
    """Check that threads and open files are the same before and after the block. Yields those from before."""
    before = traces()
    yield before
    deadline = time.monotonic() + 30  # a thread that has been joined stays in the kernel's list for a moment
    while (after := traces())[0] != before[0] and time.monotonic() < deadline:
        os.sched_yield()
    assert after == before

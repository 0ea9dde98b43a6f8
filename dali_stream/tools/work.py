"""Division of work: evenly spread selections, groups of limited size, and jobs in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from typing import TypeVar

import numpy as np

from dali_stream.system.workers import Workers

R = TypeVar("R")
T = TypeVar("T")


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0 to `count` - 1, evenly spread. Two or more numbers include both ends."""
    numbers: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return numbers


def grouped(
    items: Iterable[T], most: float, size: Callable[[T], float], kind: Callable[[T], object] = lambda item: None
) -> Iterator[list[T]]:
    """Yield groups of consecutive items. All items of a group have the same kind.

    Args:
        items: Items to group.
        most: Maximum total size of a group. A larger item forms a group of its own.
        size: Function that returns the size of an item.
        kind: Function that returns the kind of an item. Default: all items have the same kind.
    """
    group: list[T] = []
    total = 0.0
    for item in items:
        if group and (total + size(item) > most or kind(item) != kind(group[0])):
            yield group
            group, total = [], 0.0
        group.append(item)
        total += size(item)
    if group:
        yield group


def in_threads(
    jobs: Mapping[str, Callable[[], R]], threads: int, interrupt: Callable[[], None]
) -> Generator[tuple[str, Future[R]], None, None]:
    """Run jobs in threads. Yield (name, future) of each job when it has ended.

    If the iteration ends early, the jobs that have not started are cancelled, and the others are interrupted.

    Args:
        jobs: {name: function to call}.
        threads: Maximum number of concurrent jobs.
        interrupt: Function that aborts the reads of running jobs. It may be called several times.
    """
    # The standard library's pool does not know of a thread whose start was interrupted by Ctrl-C, and would not wait for it.
    pool = Workers("dali_stream index", threads)
    try:
        names: dict[Future[R], str] = {}
        for name, job in jobs.items():
            names[pool.submit(job)] = name
        for future in as_completed(names):
            yield names[future], future
    except BaseException:
        pool.stop()
        ended = threading.Thread(target=pool.join, name="dali_stream end of index", daemon=True)
        ended.start()
        while ended.is_alive():
            interrupt()  # more than once, since a job that was between two reads has started another one
            ended.join(0.5)
        raise
    pool.stop()
    pool.join()

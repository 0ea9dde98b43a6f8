"""Division of work: evenly spread samples, groups by size, and reading in several threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

import numpy as np

R = TypeVar("R")
T = TypeVar("T")


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of the numbers below `count`, evenly spread, with the first and the last."""
    numbers: list[int] = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return numbers


def grouped(
    items: Iterable[T], most: float, size: Callable[[T], float], kind: Callable[[T], object] = lambda item: None
) -> Iterator[list[T]]:
    """Yield groups of consecutive items of one kind, with a total size of up to `most`, or of one item that is larger."""
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
    """Run jobs in threads. Yield (name, future) of each when it has ended.

    If an error ends the iteration, the jobs that have not begun are cancelled, and the others are interrupted.

    Args:
        jobs: Function to call for each name.
        threads: Number of jobs at a time.
        interrupt: Function that aborts whatever jobs may be waiting for. It may be called several times.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="dali_stream index") as pool:
        names: dict[Future[R], str] = {}
        try:
            for name, job in jobs.items():
                names[pool.submit(job)] = name
            for future in as_completed(names):
                yield names[future], future
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            begun = [future for future in names if not future.cancelled()]  # `wait` never returns for the others
            interrupt()
            while wait(begun, timeout=0.5).not_done:
                interrupt()  # a job was between two reads
            raise

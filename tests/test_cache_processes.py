"""The disk cache between processes: writers and readers at once, locks, and processes that are killed."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.killing import start
from test_cache import cut, keep, segments, total, whole

from dali_stream.storage.cache import CACHE_BLOCK, DiskCache

LIMIT = 40 * CACHE_BLOCK
HANG = 120  # seconds; only a hang takes so long


@contextmanager
def processes(count: int, work: Callable[..., None], *arguments: Any) -> Iterator[list[tuple[Any, Connection]]]:
    """Runs `work(number, *arguments, pipe)` in as many processes; each is dead afterwards."""
    started = [start(work, number, *arguments) for number in range(count)]
    try:
        yield started
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            pipe.close()


def received(pipe: Connection) -> Any:
    assert pipe.poll(HANG), "the process hangs"
    return pipe.recv()


def total_now(folder: Path) -> int:
    """Bytes of the cache while nobody writes."""
    with open(folder / "usage", "rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        return total(folder)


def assert_in_order(folder: Path) -> None:
    """Check that no lock is held, the limit is kept, the cached blocks are right, and the cache works."""
    with open(folder / "usage", "ab") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(folder / "locks", "ab") as locks:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert total(folder) <= LIMIT
    cache = DiskCache(folder, LIMIT)
    for file in "abcdefgh":
        for number, data in enumerate(cache.read(file, "v1", 0, 20)):
            assert data is None or data == cut(file, number, number + 1)
    new = os.urandom(4).hex()
    keep(cache, new, 0, 2)
    assert whole(cache, new, 0, 2)


def use(folder: Path, rng: random.Random, rounds: int) -> tuple[int, int]:
    """Asks for ranges and writes what is missing, as a store does; returns (hits, the highest total seen)."""
    cache, hits, highest = DiskCache(folder, LIMIT), 0, 0
    for number in range(rounds):
        file, first = rng.choice("abcdefgh"), rng.randrange(0, 15)
        last = first + rng.choice((1, 2, 5))
        with cache.fetching(file, first, last):
            for at, data in enumerate(cache.read(file, "v1", first, last), start=first):
                if data is None:
                    keep(cache, file, at, at + 1)
                else:
                    assert data == cut(file, at, at + 1), f"{file} {at}"
                    hits += 1
        if number % 5 == 0:
            highest = max(highest, total_now(folder))
    return hits, highest


def user(number: int, folder: Path, pipe: Connection) -> None:
    with ThreadPoolExecutor(2) as pool:
        pipe.send(list(pool.map(lambda thread: use(folder, random.Random(10 * number + thread), 150), range(2))))


def test_the_limit_holds_and_every_hit_is_right_with_several_processes(tmp_path: Path) -> None:
    with processes(4, user, tmp_path) as users:
        seen = [result for _, pipe in users for result in received(pipe)]
    assert all(hits > 10 for hits, _ in seen)
    assert 0.5 * LIMIT < max(highest for _, highest in seen) <= LIMIT
    assert_in_order(tmp_path)


def count_up(number: int, folder: Path, pipe: Connection) -> None:
    cache, counter = DiskCache(folder / "cache", None), folder / "counter"

    def add(_: int) -> None:
        with cache.fetching("f", 0, 10):
            counter.write_text(str(int(counter.read_text()) + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(40)))
    pipe.send("done")


def test_one_thread_of_one_process_at_a_time_fetches_a_range(tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    with processes(3, count_up, tmp_path) as workers:
        assert [received(pipe) for _, pipe in workers] == ["done"] * 3
    assert (tmp_path / "counter").read_text() == "120"


def hold(number: int, folder: Path, pipe: Connection) -> None:
    with DiskCache(folder, None).fetching("f", 0, 10):
        pipe.send("held")
        signal.pause()


def test_a_killed_process_lets_go_of_a_range(tmp_path: Path) -> None:
    with processes(1, hold, tmp_path) as [(process, pipe)]:
        assert received(pipe) == "held"
        with open(tmp_path / "locks", "ab") as locks, pytest.raises(BlockingIOError):
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB)
        entered = threading.Event()

        def fetch() -> None:
            with DiskCache(tmp_path, None).fetching("f", 0, 10):
                entered.set()

        waiting = threading.Thread(target=fetch)
        waiting.start()
        process.kill()
        process.join()
        waiting.join(HANG)
    assert entered.is_set()
    assert_in_order(tmp_path)


@contextmanager
def forked() -> Iterator[None]:
    """Fork a process that keeps the open files, as those of a DataLoader do. It ends after the `with` block."""
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    os.close(ended)
    try:
        yield
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_a_forked_process_does_not_keep_the_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, forks, write = DiskCache(tmp_path, LIMIT), ExitStack(), os.pwrite

    def fork(*arguments: Any) -> int:
        forks.enter_context(forked())
        return write(*arguments)

    with forks:
        with cache.fetching("a", 0, 2):
            forks.enter_context(forked())
        with monkeypatch.context() as patched:
            patched.setattr("os.pwrite", fork)
            keep(cache, "a", 0, 2)
        assert_in_order(tmp_path)


def test_other_ranges_do_not_wait(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, None)
    with cache.fetching("f", 0, 10), ThreadPoolExecutor(1) as pool:

        def fetch() -> str:
            with cache.fetching("f", 10, 20):
                return "in"

        assert pool.submit(fetch).result(HANG) == "in"


def write_on(number: int, folder: Path, pipe: Connection) -> None:
    rng, cache = random.Random(number), DiskCache(folder, LIMIT)
    while True:
        first = rng.randrange(0, 15)
        keep(cache, rng.choice("abcdefgh"), first, first + rng.choice((1, 5)))
        pipe.send("written")


def test_writers_killed_at_random_moments_leave_the_cache_in_order(tmp_path: Path) -> None:
    for number in range(4):
        with processes(2, write_on, tmp_path) as writers:
            for process, pipe in writers:
                for _ in range(random.Random(number).randrange(1, 60)):
                    received(pipe)
                process.kill()
        assert_in_order(tmp_path)


def die_at(step: int) -> None:
    """Kills this process right before its n-th change of the file system from now on."""
    left, pwrite = [step], os.pwrite

    def watch(event: str, arguments: tuple) -> None:
        if event in ("pwrite", "os.mkdir", "os.remove", "os.rmdir", "open", "fcntl.flock"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    os.pwrite = lambda *arguments: (watch("pwrite", ()), pwrite(*arguments))[1]  # which audits nothing


def write_twice(folder: Path, step: int) -> None:
    cache = DiskCache(folder, LIMIT)
    die_at(step)
    for number in range(2):
        keep(cache, f"{step} {number}", 0, 5)


def die_at_each_step(number: int, folder: Path, pipe: Connection) -> None:
    """Lets a child die at the first change of the file system, one at the second, and so on, until one gets through."""
    for step in range(1, 200):
        child = os.fork()
        if not child:
            write_twice(folder, step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        size = total(folder)
        assert_in_order(folder)
        pipe.send((step, os.WIFSIGNALED(status), size))
        if not os.WIFSIGNALED(status):
            return


def test_a_writer_killed_at_any_step_leaves_the_cache_in_order(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, LIMIT)
    for file in "abcdefgh":
        keep(cache, file, 0, 4)
    with processes(1, die_at_each_step, tmp_path) as [(_, pipe)]:
        steps, killed, deaths = 0, True, 0
        while killed:
            steps, killed, size = received(pipe)
            deaths += killed
            assert size <= LIMIT
    assert deaths == steps - 1 > 10
    assert_in_order(tmp_path)
    assert len(segments(tmp_path)) > 2

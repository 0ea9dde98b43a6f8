"""The disk cache by itself: what is kept, what is found again, and what becomes of damage, death and full disks."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_stream.storage.cache import RangeCache

BLOB = np.random.default_rng(0).bytes(300_000)
PAGE = 65536


def cut(file: str, start: int, stop: int) -> bytes:
    """What a remote file holds there; another file holds other bytes."""
    shift = sum(file.encode(errors="surrogatepass")) % 1000
    return BLOB[shift + start : shift + stop]


def keep(cache: RangeCache, file: str, start: int, stop: int) -> None:
    cache.write(file, start, cut(file, start, stop))


def hits(cache: RangeCache, file: str, start: int, stop: int) -> set[int]:
    """The bytes that the cache has, having checked that they are right and that the parts are the range."""
    at, found = start, set[int]()
    for a, b, data in cache.parts(file, start, stop):
        assert a == at < b
        at = b
        if data is not None:
            assert bytes(data) == cut(file, a, b)
            found.update(range(a, b))
    assert at == max(start, stop)
    return found


def whole(cache: RangeCache, file: str, start: int, stop: int) -> bool:
    return len(hits(cache, file, start, stop)) == stop - start


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "ranges").rglob("*") if not path.is_dir())


def total(folder: Path) -> int:
    """Bytes of the cache, with what a dead process left, without the few of its own books."""
    return sum(path.lstat().st_size for path in [*entries(folder), *folder.glob("incoming")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="dali_stream")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


SPANS = st.tuples(st.integers(0, 5), st.integers(-3, 40), st.integers(0, 2), st.integers(1, 60)).map(
    lambda t: (max(t[0] * 30 * (t[2] + 1) + t[1], 0), t[2] * PAGE + t[3])
)
STEPS = st.tuples(st.sampled_from(["write", "ask", "another process"]), st.sampled_from(["a", "b"]), SPANS)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(STEPS, min_size=2, max_size=25))
def test_what_was_written_is_found_in_any_other_cut_and_nothing_else(steps: list) -> None:
    folder = Path(tempfile.mkdtemp())
    caches, model = [RangeCache(folder, None), RangeCache(folder, None)], {"a": set[int](), "b": set[int]()}
    try:
        for kind, file, (start, length) in steps:
            if kind == "another process":
                caches.reverse()
            elif kind == "write":
                keep(caches[0], file, start, start + length)
                model[file].update(range(start, start + length))
            else:
                wanted = model[file] & set(range(start, start + length))
                assert hits(caches[0], file, start, start + length) == wanted
    finally:
        shutil.rmtree(folder)


def test_an_empty_range_has_no_parts(folder: Path) -> None:
    cache = RangeCache(folder, None)
    keep(cache, "f", 0, 100)
    assert cache.parts("f", 5, 5) == cache.parts("f", 500, 500) == []
    cache.write("f", 7, b"")
    assert len(entries(folder)) == 1


def test_a_later_run_finds_what_an_earlier_one_wrote(folder: Path) -> None:
    keep(RangeCache(folder, None), "f", 10, 200_000)
    assert whole(RangeCache(str(folder), 1 << 30), "f", 70_000, 140_000)


def test_what_another_process_writes_meanwhile_is_found(folder: Path) -> None:
    here, there = RangeCache(folder, None), RangeCache(folder, None)
    keep(here, "f", 0, 100)
    assert whole(there, "f", 0, 100)
    keep(here, "f", 50, 300)
    assert whole(there, "f", 0, 300)


def test_entries_that_another_process_removed_are_absent(folder: Path, warnings: Callable[[], list[str]]) -> None:
    cache = RangeCache(folder, None)
    keep(cache, "f", 0, 100)
    keep(cache, "f", 50, 300)
    entries(folder)[0].unlink()
    assert hits(cache, "f", 0, 300) == set(range(50, 300))
    assert not warnings()


# -- the limit


def test_the_least_recently_used_goes(folder: Path) -> None:
    cache = RangeCache(folder, 12_000)
    for age, file in enumerate("cba"):
        keep(cache, file, 0, 3000)
        newest = max(entries(folder), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (0, 1_000_000 + 1000 * age))  # c is the oldest, of 1970
    assert whole(cache, "c", 5, 6)  # and is used now
    keep(cache, "d", 0, 3000)
    assert [whole(cache, file, 0, 3000) for file in "abcd"] == [True, False, True, True]
    assert total(folder) <= 12_000


def test_an_entry_above_the_limit_is_not_kept_and_costs_no_other(folder: Path) -> None:
    cache = RangeCache(folder, 10_000)
    keep(cache, "small", 0, 1000)
    keep(cache, "large", 0, 10_000)  # with its header
    assert whole(cache, "small", 0, 1000)
    assert hits(cache, "large", 0, 10_000) == set()


def test_a_lower_limit_holds_from_the_start(folder: Path) -> None:
    cache = RangeCache(folder, None)
    for at in range(0, 100_000, 1000):
        keep(cache, "f", at, at + 1000)
    assert total(folder) > 100_000
    RangeCache(folder, 50_000)
    assert 40_000 < total(folder) <= 50_000


def test_a_lost_count_is_made_again(folder: Path) -> None:
    keep(RangeCache(folder, 100_000), "f", 0, 60_000)
    for count in (b"", b"nonsense", b"0\n"):
        (folder / "usage").write_bytes(count)
        keep(RangeCache(folder, 100_000), "f", 60_000, 60_000 + 50_000)
        assert total(folder) <= 100_000


def test_all_entries_are_looked_at_rarely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (looks.append(path), scandir(path))[1])
    cache = RangeCache(folder, 200 * 1100)
    for number in range(600):
        keep(cache, "f", 100 * number, 100 * number + 1000)
    # 200 entries fit, so 600 make room at least 400 / 20 times; each time two walks over three levels
    assert len(looks) < 30 * 2 * 3
    assert total(folder) <= 200 * 1100


# -- damage


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 4
        path.write_bytes(data)

    return damage


def linked(path: Path) -> None:
    """Whole, but elsewhere."""
    elsewhere = path.parents[4] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "a byte of the data": flip(-1),
    "the magic": flip(0),
    "the hash": flip(10),
    "the start": flip(24),
    "a check": flip(42),
    "the header's check": flip(50),
    "truncated": lambda path: os.truncate(path, 70_000),
    "truncated in the header": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "foreign": lambda path: path.write_bytes(b"hello"),
    "of another range": lambda path: shutil.copy(path.with_name("1-100001"), path),
    "of another file": lambda path: shutil.copy(next(p for p in path.parents[2].rglob(path.name) if p != path), path),
    "a symbolic link": linked,
    "a pipe": piped,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_absent_and_removed_and_said_once(
    folder: Path, warnings: Callable[[], list[str]], kind: str
) -> None:
    cache = RangeCache(folder, None)
    cache.write("another", 0, b"?" * 100_000)
    keep(cache, "f", 1, 100_001)
    keep(cache, "f", 0, 100_000)
    path = next(path for path in (folder / "ranges").rglob("0-100000") if path.with_name("1-100001").exists())
    DAMAGE[kind](path)
    assert hits(cache, "f", 0, 100_000) == set(range(1, 100_000))  # what the other entry has
    assert not os.path.lexists(path)
    assert len(warnings()) == 1
    assert "damaged" in warnings()[0]
    keep(cache, "f", 0, 100_000)
    assert whole(cache, "f", 0, 100_000)


def test_a_small_part_of_a_large_entry_is_checked_by_itself(folder: Path) -> None:
    cache = RangeCache(folder, None)
    keep(cache, "f", 0, 4 * PAGE)
    flip(-PAGE - 1)(entries(folder)[0])  # in the third of four pages
    assert whole(cache, "f", PAGE + 5, 2 * PAGE)
    assert whole(cache, "f", 3 * PAGE, 4 * PAGE)
    assert hits(cache, "f", 2 * PAGE - 1, 2 * PAGE + 1) == set()


def test_no_part_of_a_truncated_entry_is_read(folder: Path) -> None:
    cache = RangeCache(folder, None)
    keep(cache, "f", 0, 4 * PAGE)
    os.truncate(entries(folder)[0], 3 * PAGE)
    assert hits(cache, "f", 0, PAGE) == set()
    assert entries(folder) == []


def test_files_that_are_no_entries_are_left_alone(folder: Path) -> None:
    cache = RangeCache(folder, 3000)
    keep(cache, "f", 0, 1000)
    strangers = [folder / "notes", folder / "ranges" / "notes", entries(folder)[0].with_name("notes")]
    for path in strangers:
        path.write_bytes(b"x" * 5000)
    for at in range(0, 20_000, 1000):
        keep(cache, "f", at, at + 1000)
        assert whole(cache, "f", at, at + 1000)
    assert [path.stat().st_size for path in strangers] == [5000] * 3


# -- names and permissions


@pytest.mark.parametrize("file", ["../../../x", "/etc/x", "a\0b", "\ud800", "x" * 5000, "", "https://h/f?token=SECRET"])
def test_nothing_of_a_file_s_name_gets_to_the_disk(folder: Path, file: str) -> None:
    cache = RangeCache(folder, None)
    with cache.fetching(file, 0, 100):
        keep(cache, file, 0, 100)
    assert whole(cache, file, 0, 100)
    assert [path.name for path in folder.parent.iterdir()] == ["cache"]
    for path in folder.rglob("*"):
        assert "SECRET" not in path.name
        assert path.is_dir() or b"SECRET" not in path.read_bytes()


def test_files_are_as_private_as_the_umask_says(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        keep(RangeCache(folder, None), "f", 0, 100)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}


def test_a_folder_that_cannot_be_one_is_said_up_front(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    for name in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"cache_dir is .*/file.* is a file or below one"):
            RangeCache(tmp_path / name, None)
    with pytest.raises(ValueError, match="cache_dir is /proc/none/x, which cannot be created"):
        RangeCache("/proc/none/x", None)
    with pytest.raises(ValueError, match="cache_bytes is 0; give"):
        RangeCache(tmp_path / "cache", 0)
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert not (tmp_path / "cache").exists()


# -- disks that take no writes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(cache: RangeCache) -> list[int]:
    """Writes 2 MB; returns what of it is kept."""
    for number in range(20):
        keep(cache, f"f{number}", 0, 100_000)
        with cache.fetching(f"f{number}", 0, 10):
            pass
    return [number for number in range(20) if whole(cache, f"f{number}", 0, 100_000)]


def test_a_full_disk_is_said_once_and_reading_goes_on(small_disk: Path, warnings: Callable[[], list[str]]) -> None:
    kept = fill(RangeCache(small_disk / "cache", None))
    assert kept == list(range(len(kept)))
    assert 5 < len(kept) < 11
    assert len(warnings()) == 1
    assert "No space left on device. Fetched bytes are no longer cached" in warnings()[0]
    assert not (small_disk / "cache/incoming").exists()
    assert os.statvfs(small_disk).f_bavail > 0  # the rest of the entry that found no room is gone


def test_a_failed_write_is_said_once_and_reading_goes_on(folder: Path, warnings: Callable[[], list[str]]) -> None:
    cache = RangeCache(folder, None)
    keep(cache, "f0", 0, 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # each file, and so in the middle of one
    try:
        kept = fill(cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept == [0]
    assert len(warnings()) == 1
    assert [path.name for path in folder.iterdir() if path.name == "incoming"] == []


def test_a_read_only_disk_is_said_once_and_read(small_disk: Path, warnings: Callable[[], list[str]]) -> None:
    keep(RangeCache(small_disk, None), "f3", 0, 100_000)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert fill(RangeCache(small_disk, None)) == [3]
    assert len(warnings()) == 1
    assert "Read-only file system" in warnings()[0]


def test_a_disk_without_locks_is_said_once_and_not_written(
    folder: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    keep(RangeCache(folder, None), "f3", 0, 100_000)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert fill(RangeCache(folder, None)) == [3]
    assert len(warnings()) == 1
    assert "Function not implemented" in warnings()[0]


def test_a_folder_that_vanishes_is_not_made_again(folder: Path, warnings: Callable[[], list[str]]) -> None:
    cache = RangeCache(folder, None)
    keep(cache, "f", 0, 100)
    shutil.rmtree(folder)
    assert hits(cache, "f", 0, 100) == set()
    assert fill(cache) == []
    assert len(warnings()) == 1
    assert not folder.exists()

"""The disk cache by itself: what is kept, what is found again, and what becomes of damage, death and full disks."""

from __future__ import annotations

import contextlib
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
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.disks import small_file_system
from support.slow import examples

from dali_stream.storage.cache import CACHE_BLOCK, DiskCache

BLOB = np.random.default_rng(0).bytes(300 * CACHE_BLOCK)
SEGMENT = 256  # blocks
SIZE = 1234


def cut(file: str, first: int, last: int) -> bytes:
    """Bytes of these blocks of a remote file. Each file has different bytes."""
    shift = 1 + sum(file.encode(errors="surrogatepass")) % 1000
    return b"".join(
        BLOB[at : at + CACHE_BLOCK] for at in (shift + number % SEGMENT * CACHE_BLOCK for number in range(first, last))
    )


def keep(cache: DiskCache, file: str, first: int, last: int) -> None:
    cache.write(file, "v1", first, cut(file, first, last), SIZE)


def hits(cache: DiskCache, file: str, first: int, last: int) -> set[int]:
    """The blocks that the cache has, having checked that they are right."""
    found = cache.read(file, "v1", first, last)
    assert len(found) == last - first
    for number, block in enumerate(found, start=first):
        assert block is None or block == cut(file, number, number + 1)
    return {number for number, block in enumerate(found, start=first) if block is not None}


def whole(cache: DiskCache, file: str, first: int, last: int) -> bool:
    return len(hits(cache, file, first, last)) == last - first


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "blocks").rglob("*") if not path.is_dir())


def total(folder: Path) -> int:
    """Bytes on disk of the cache, without the few of its own books."""
    return sum(path.lstat().st_blocks * 512 for path in segments(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="dali_stream")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


SPANS = st.tuples(st.sampled_from([0, SEGMENT - 3, 5 * SEGMENT - 2]), st.integers(0, 5), st.integers(1, 6))
STEPS = st.tuples(st.sampled_from(["write", "ask", "another process"]), st.sampled_from(["a", "b"]), SPANS)


@examples(120)
@given(st.lists(STEPS, min_size=2, max_size=25))
def test_what_was_written_is_found_and_nothing_else(steps: list) -> None:
    folder = Path(tempfile.mkdtemp())
    caches, model = [DiskCache(folder, None), DiskCache(folder, None)], {"a": set[int](), "b": set[int]()}
    try:
        for kind, file, (base, start, length) in steps:
            first, last = base + start, base + start + length
            if kind == "another process":
                caches.reverse()
            elif kind == "write":
                keep(caches[0], file, first, last)
                model[file].update(range(first, last))
            else:
                assert hits(caches[0], file, first, last) == model[file] & set(range(first, last))
    finally:
        shutil.rmtree(folder)


def test_the_last_block_of_a_file_may_be_short(folder: Path) -> None:
    cache = DiskCache(folder, None)
    cache.write("f", "v1", 3, b"x" * (CACHE_BLOCK + 5), SIZE)
    assert cache.read("f", "v1", 2, 6) == [None, b"x" * CACHE_BLOCK, b"x" * 5, None]


@pytest.mark.parametrize("first", [0, 3 * SEGMENT])
def test_the_size_of_a_file_is_kept_with_any_block(folder: Path, first: int) -> None:
    cache = DiskCache(folder, None)
    assert cache.size("f") is None
    cache.write("f", "v1", first, b"x", 1 << 40)
    assert DiskCache(folder, None).size("f") == 1 << 40
    assert cache.read("f", "v1", first, first + 2) == [b"x", None]


def test_another_version_of_a_file_takes_its_place(folder: Path) -> None:
    old, new = DiskCache(folder, None), DiskCache(folder, None)
    keep(old, "f", 0, 4)
    assert new.read("f", "v2", 0, 4) == [None] * 4
    new.write("f", "v2", 1, b"n" * CACHE_BLOCK, 7)
    assert new.read("f", "v2", 0, 2) == [None, b"n" * CACHE_BLOCK]
    assert hits(old, "f", 0, 4) == set()
    assert new.size("f") == 7
    assert len(segments(folder)) == 1


def test_a_later_run_finds_what_an_earlier_one_wrote(folder: Path) -> None:
    keep(DiskCache(folder, None), "f", 1, 20)
    assert whole(DiskCache(str(folder), 1 << 30), "f", 7, 14)


# -- the limit


def test_the_least_recently_used_goes(folder: Path) -> None:
    cache = DiskCache(folder, 16 * CACHE_BLOCK)
    for age, file in enumerate("cba"):
        keep(cache, file, 0, 4)
        newest = max(segments(folder), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (0, 1_000_000 + 1000 * age))  # c is the oldest, of 1970
    assert whole(cache, "c", 1, 2)  # and is used now
    keep(cache, "d", 0, 4)
    assert [whole(cache, file, 0, 4) for file in "abcd"] == [True, False, True, True]
    assert total(folder) <= 16 * CACHE_BLOCK


def test_what_is_above_the_limit_is_not_kept_and_costs_nothing_else(folder: Path) -> None:
    cache = DiskCache(folder, 4 * CACHE_BLOCK)
    keep(cache, "small", 0, 1)
    keep(cache, "large", 0, 4)  # with its header
    assert whole(cache, "small", 0, 1)
    assert hits(cache, "large", 0, 4) == set()


def test_a_lower_limit_holds_from_the_start(folder: Path) -> None:
    cache = DiskCache(folder, None)
    for number in range(100):
        keep(cache, f"f{number}", 0, 1)
    assert total(folder) > 100 * CACHE_BLOCK
    DiskCache(folder, 50 * CACHE_BLOCK)
    assert 40 * CACHE_BLOCK < total(folder) <= 50 * CACHE_BLOCK


def test_a_lost_count_is_made_again(folder: Path) -> None:
    keep(DiskCache(folder, 10 * CACHE_BLOCK), "f", 0, 6)
    for count in (b"", b"nonsense", b"0\n"):
        (folder / "usage").write_bytes(count)
        keep(DiskCache(folder, 10 * CACHE_BLOCK), "g", 0, 5)
        assert total(folder) <= 10 * CACHE_BLOCK


def test_all_segments_are_looked_at_rarely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, walk = [], os.walk
    monkeypatch.setattr(os, "walk", lambda path: (looks.append(path), walk(path))[1])
    cache = DiskCache(folder, 200 * CACHE_BLOCK)
    for number in range(600):
        keep(cache, f"f{number}", 0, 1)
    assert len(looks) < 60
    assert total(folder) <= 200 * CACHE_BLOCK


# -- damage


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 4
        path.write_bytes(data)

    return damage


def linked(path: Path) -> None:
    """Whole, but elsewhere."""
    elsewhere = path.parents[3] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "a byte of the data": flip(-1),
    "the magic": flip(0),
    "the hash": flip(10),
    "the number": flip(24),
    "the version": flip(33),
    "the size": flip(49),
    "the header's check": flip(57),
    "a length": flip(64),
    "a check": flip(68),
    "truncated": lambda path: os.truncate(path, 70_000),
    "truncated in the header": lambda path: os.truncate(path, 20),
    "foreign": lambda path: path.write_bytes(b"hello"),
    "of another segment": lambda path: shutil.copy(path.with_name(path.name.replace("-0", "-1")), path),
    "of another file": lambda path: shutil.copy(
        next(p for p in segments(path.parents[2]) if p.stem[:5] != path.stem[:5]), path
    ),
    "a symbolic link": linked,
    "a pipe": piped,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_segment_is_absent_and_removed_and_said_once(
    folder: Path, warnings: Callable[[], list[str]], kind: str
) -> None:
    cache = DiskCache(folder, None)
    keep(cache, "f", 0, 6)
    path = segments(folder)[0]
    keep(cache, "f", SEGMENT, SEGMENT + 6)
    keep(cache, "another", 0, 6)
    DAMAGE[kind](path)
    assert hits(cache, "f", 0, 6) == set()
    assert whole(cache, "f", SEGMENT, SEGMENT + 6)
    assert not os.path.lexists(path)
    assert len(warnings()) == 1
    assert "damaged" in warnings()[0]
    keep(cache, "f", 0, 6)
    assert whole(cache, "f", 0, 6)


def test_a_link_in_place_of_the_blocks_is_refused_up_front(folder: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    (folder / "blocks").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=f"blocks is a symbolic link. Give the folder to which it leads, {elsewhere}"):
        DiskCache(folder, None)
    cache = DiskCache(elsewhere, None)  # the remedy
    keep(cache, "f", 0, 6)
    assert whole(cache, "f", 0, 6)


@pytest.mark.parametrize("limit", [None, 20 * CACHE_BLOCK])
@pytest.mark.parametrize("level", ["blocks", "group"])
def test_a_link_that_takes_the_place_of_a_folder_is_not_followed(
    folder: Path, tmp_path: Path, warnings: Callable[[], list[str]], level: str, limit: int | None
) -> None:
    cache = DiskCache(folder, limit)
    keep(cache, "f", 0, 6)
    moved = segments(folder)[0].parent if level == "group" else folder / "blocks"
    moved.rename(elsewhere := tmp_path / "elsewhere")
    moved.symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    assert hits(cache, "f", 0, 6) == set()
    assert cache.size("f") is None
    keep(cache, "f", 6, 12)
    if level == "group":
        keep(DiskCache(folder, limit), "f", 12, 18)
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before
    assert "is a symbolic link, which is not followed" in warnings()[0]


class Killed(BaseException):
    """Stands for the death of the process."""


def test_a_writer_that_is_killed_anywhere_leaves_no_entry_without_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """The data of a block is on the disk before its entry, in a new segment and in one that exists, at every write."""
    write, left = os.pwrite, [0]

    def killed(handle: int, data: Any, at: int) -> int:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return write(handle, data, at)

    monkeypatch.setattr(os, "pwrite", killed)
    for number in range(5):  # two writes for each call of `keep`
        cache, left[0] = DiskCache(tmp_path / str(number), None), number
        with contextlib.suppress(Killed):
            keep(cache, "f", 0, 6)
            keep(cache, "f", 6, 12)
        later = DiskCache(tmp_path / str(number), None)
        assert hits(later, "f", 0, 6) == (set(range(6)) if number >= 2 else set())
        assert hits(later, "f", 6, 12) == (set(range(6, 12)) if number >= 4 else set())
    assert not warnings(), "no block is damaged"


def test_a_segment_that_another_process_is_writing_is_absent_without_a_warning(
    folder: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, write = DiskCache(folder, None), DiskCache(folder, None), os.pwrite

    def looked(*arguments: Any) -> int:
        assert segments(folder)[0].exists()
        assert hits(reader, "f", 2, 8) == set()
        assert reader.size("f") is None
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", looked)
    keep(writer, "f", 2, 8)
    assert whole(reader, "f", 2, 8)
    assert not warnings()


def test_a_segment_whose_writer_died_is_written_again(folder: Path, warnings: Callable[[], list[str]]) -> None:
    cache = DiskCache(folder, None)
    keep(cache, "f", 0, 6)
    os.truncate(segments(folder)[0], 0)
    assert hits(cache, "f", 0, 6) == set()
    keep(cache, "f", 0, 6)
    assert whole(cache, "f", 0, 6)
    assert not warnings()


def test_files_that_are_no_segments_are_left_alone(folder: Path) -> None:
    cache = DiskCache(folder, 5 * CACHE_BLOCK)
    keep(cache, "f", 0, 1)
    strangers = [folder / "notes", folder / "blocks" / "notes", segments(folder)[0].with_name("notes")]
    for path in strangers:
        path.write_bytes(b"x" * 5000)
    for number in range(20):
        keep(cache, f"f{number}", 0, 1)
        assert whole(cache, f"f{number}", 0, 1)
    assert [path.stat().st_size for path in strangers] == [5000] * 3


# -- names and permissions


@pytest.mark.parametrize("file", ["../../../x", "/etc/x", "a\0b", "\ud800", "x" * 5000, "", "https://h/f?token=SECRET"])
def test_nothing_of_a_file_s_name_gets_to_the_disk(folder: Path, file: str) -> None:
    cache = DiskCache(folder, None)
    with cache.fetching(file, 0, 1):
        keep(cache, file, 0, 1)
    assert whole(cache, file, 0, 1)
    assert [path.name for path in folder.parent.iterdir()] == ["cache"]
    for path in folder.rglob("*"):
        assert "SECRET" not in path.name
        assert path.is_dir() or b"SECRET" not in path.read_bytes()


def test_files_are_as_private_as_the_umask_says(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        cache = DiskCache(folder, None)
        with cache.fetching("f", 0, 1):
            keep(cache, "f", 0, 1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}


def test_a_folder_that_cannot_be_one_is_said_up_front(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    for name in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"cache_dir must be .*/file.* is a file or below one"):
            DiskCache(tmp_path / name, None)
    with pytest.raises(ValueError, match=r"cache_dir must be .*, got /proc/none/x, which cannot be created"):
        DiskCache("/proc/none/x", None)
    with pytest.raises(ValueError, match=r"cache_bytes must be a positive number of bytes, .*, got 0"):
        DiskCache(tmp_path / "cache", 0)
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert not (tmp_path / "cache").exists()


# -- disks that take no writes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_file_system(tmp_path / "disk", "1m") as place:
        yield place


def fill(cache: DiskCache) -> list[int]:
    """Writes 2 MB; returns what of it is kept."""
    for number in range(20):
        keep(cache, f"f{number}", 0, 6)
        with cache.fetching(f"f{number}", 0, 10):
            pass
    return [number for number in range(20) if whole(cache, f"f{number}", 0, 6)]


def test_a_full_disk_is_said_once_and_reading_goes_on(small_disk: Path, warnings: Callable[[], list[str]]) -> None:
    kept = fill(DiskCache(small_disk / "cache", None))
    assert kept == list(range(len(kept)))
    assert 5 < len(kept) < 11
    assert len(warnings()) == 1
    assert "No space left on device. Fetched bytes are no longer cached" in warnings()[0]


def test_a_failed_write_is_said_once_and_reading_goes_on(folder: Path, warnings: Callable[[], list[str]]) -> None:
    cache = DiskCache(folder, None)
    keep(cache, "f0", 0, 6)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # each file, and so in the middle of one
    try:
        kept = fill(cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept == [0]
    assert len(warnings()) == 1


def test_a_read_only_disk_is_said_once_and_read(small_disk: Path, warnings: Callable[[], list[str]]) -> None:
    keep(DiskCache(small_disk, None), "f3", 0, 6)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert fill(DiskCache(small_disk, None)) == [3]
    assert len(warnings()) == 1
    assert "Read-only file system" in warnings()[0]


def test_a_disk_without_locks_is_said_once_and_not_written(
    folder: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, *operation: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    keep(DiskCache(folder, 1 << 30), "f3", 0, 6)
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert fill(DiskCache(folder, 1 << 30)) == [3]
    assert len(warnings()) == 1
    assert "Function not implemented" in warnings()[0]


def test_a_folder_that_vanishes_is_not_made_again(folder: Path, warnings: Callable[[], list[str]]) -> None:
    cache = DiskCache(folder, None)
    keep(cache, "f", 0, 1)
    shutil.rmtree(folder)
    assert hits(cache, "f", 0, 1) == set()
    assert fill(cache) == []
    assert len(warnings()) == 1
    assert not folder.exists()

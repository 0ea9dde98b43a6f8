"""Claims of frames that a process decodes for the frame cache on disk, so that other processes do not decode them as well."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import resource
import shutil
import struct
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.frame_cache import records, run, same
from support.killing import start

from dali_stream.cache.claims import Claims

NEVER_FREE = "did not become free"


def unsupported(*arguments: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors of the files in which locks are set or released from now on."""
    files: list[int] = []
    lock = fcntl.fcntl
    monkeypatch.setattr("fcntl.fcntl", lambda file, *arguments: (files.append(file), lock(file, *arguments))[1])
    return files


@pytest.mark.parametrize("cause", ["a process that does not continue", "no locks", "another kind of file"])
def test_claims_that_are_never_free_or_impossible_are_passed_over(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    """A Loader waits 2 s for claims that are not free, five times at most."""
    expected, _ = run(small, tmp_path)
    [group] = tmp_path.iterdir()
    every = [(path.name, number) for path in records(tmp_path) for number in range(1000)]
    for path in group.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    holder = Claims(group).divided(every)
    if cause == "a process that does not continue":
        assert len(next(holder)) == len(every)
    elif cause == "no locks":
        monkeypatch.setattr("fcntl.fcntl", unsupported)
    else:
        (group / "claims00").mkdir()
    found, stats = run(small, tmp_path, num_threads=5, prefetch=2)  # tasks of a batch each
    assert same(found, expected)
    assert stats["disk_written_bytes"] > 0
    assert (NEVER_FREE in caplog.text) == (cause == "a process that does not continue")
    holder.close()


def test_many_claims_are_not_in_one_file_and_a_waiting_thread_tries_one(tmp_path: Path, tried: list[int]) -> None:
    """The time of a try grows with the number of locks of the file."""
    digits = [hashlib.md5(bytes([file])).hexdigest() for file in range(4)]
    frames = [(each, number) for each in digits for number in range(0, 500, 2)]
    holder = Claims(tmp_path).divided(frames)
    assert len(next(holder)) == len(frames) == len(tried)
    assert max(Counter(tried).values()) < len(frames) / 8
    tried.clear()
    assert list(Claims(tmp_path, wait_s=0.1).divided(frames)) == [list(range(len(frames)))]
    assert len(tried) < 1.5 * len(frames)
    holder.close()


def test_claims_that_never_become_free_are_waited_for_only_a_few_times(
    tmp_path: Path, tried: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a lock that a network file system has not released."""
    frames = [("ab" * 16, number) for number in range(100)]
    holder, own = Claims(tmp_path).divided(frames), Claims(tmp_path, wait_s=0.0)
    assert len(next(holder)) == len(frames)
    for _ in range(10):
        tried.clear()
        assert list(own.divided(frames)) == [list(range(100))]
    assert not tried
    assert caplog.text.count(NEVER_FREE) == 1
    holder.close()


def test_a_claim_covers_each_of_its_frames(tmp_path: Path) -> None:
    """Also if its frames are in several blocks, whose claims are in different files."""
    digits = "ab" * 16
    holder = Claims(tmp_path).divided([(digits, number) for number in range(50, 210)])
    assert len(next(holder)) == 160
    for number in range(50, 210):
        other = Claims(tmp_path, wait_s=0.0).divided([(digits, 10), (digits, number)])
        assert next(other) == [0], "the other frame is claimed"
        other.close()
    holder.close()


def test_a_claim_that_is_denied_is_that_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """POSIX allows EACCES in place of EAGAIN for a lock that somebody else holds."""
    lock, digits = fcntl.fcntl, "ab" * 16
    held = (int(digits[:7], 16) << 32) + 70

    def denied(handle: int, command: int, flock: bytes) -> bytes:
        kind, _, first, count, _ = struct.unpack("hhqqi0q", flock)
        if kind == fcntl.F_WRLCK and first <= held < first + count:
            raise PermissionError(errno.EACCES, "Permission denied")
        return lock(handle, command, flock)

    monkeypatch.setattr("fcntl.fcntl", denied)
    assert list(Claims(tmp_path, wait_s=0.0).divided([(digits, 3), (digits, 70)])) == [[0], [1]]


def run_with_few_descriptors(root: Path, folder: Path, pipe: Connection) -> None:
    expected, _ = run(root, None, 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    found, stats = run(root, folder, 1, num_threads=8)
    pipe.send((same(found, expected), stats["disk_written_bytes"]))


@pytest.mark.slow
def test_a_process_that_may_open_few_files_makes_no_claims(small: Path, tmp_path: Path) -> None:
    process, pipe = start(run_with_few_descriptors, small, tmp_path)
    is_same, written = pipe.recv()
    process.join()
    assert is_same
    assert written > 0
    assert not list(tmp_path.glob("*/claims*"))

"""Claims of frames, with which processes that share a frame cache on disk divide the decoding.

Processes such as the runs of a sweep need the same frames at the same time. Each claims frames before it decodes them, and
reads those that another process has claimed afterwards. A claim is a lock on a range of an empty file, which the system
releases if the process dies. A claim that cannot be made, or that takes too long, only causes frames to be decoded twice.

To set or to release a lock, the system searches all locks of the file, while no other process can use the file. With hundreds
of threads that claim single frames, this takes longer than decoding. Therefore, claims are distributed to several files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dali_stream.storage.local_files import NO_FOLLOW, OpenFile, OpenFiles, allowed_descriptors, lock_range

_log = logging.getLogger("dali_stream")
WAIT_S = 2.0  # maximum wait for frames that other processes decode, in seconds. A task usually takes less than 0.5 s
_WAITS = 5  # number of timeouts in a row before this process stops claiming. Each costs a thread `wait_s`
_POLL_S = 0.005  # interval at which a waiting thread tries again
_FILES = 31  # number of files. It is prime, so the blocks of all videos are distributed evenly
_BLOCK = 64  # frames of a video next to each other whose claims are in the same file
_DESCRIPTORS = 8 * _FILES  # a process that may have fewer open files needs them for videos


class Claims:
    """Claims of the frames in a folder. Threads may use it at the same time for different frames.

    Args:
        folder: Folder of the frame cache.
        wait_s: Maximum wait for frames that other processes decode, in seconds. Default: `WAIT_S`.
    """

    def __init__(self, folder: Path, wait_s: float | None = None) -> None:
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._folder, self._files = folder, OpenFiles(folder, os.O_WRONLY | os.O_CREAT | NO_FOLLOW)
        self._is_used = allowed_descriptors(_DESCRIPTORS) >= _DESCRIPTORS
        self._waits = 0  # number of timeouts since a claim last became free

    def divided(self, frames: Sequence[tuple[str, int]]) -> Iterator[list[int]]:
        """Divide the decoding of frames between the processes that need them at the same time.

        The frames of a part are claimed until the next part is requested. While other processes have claimed all that remain,
        this waits. After `wait_s`, or if the folder allows no claims, the last part has all of them. After several timeouts,
        for example because a network file system has not released a lock, no more claims are made.

        Args:
            frames: Hexadecimal digits that identify the file of each frame, and number of the frame in it.

        Yields:
            Numbers of the frames in `frames` that the caller should read or decode next.
        """
        remaining = list(range(len(frames)))
        if not self._is_used:
            yield remaining
            return
        try:
            files = [self._files.get(f"claims{number:02}") for number in range(_FILES)]
        except OSError:  # for example, the folder was removed
            yield remaining
            return
        # Each frame has a byte. Two files whose digits begin alike share bytes, and only wait for each other.
        places = [(int(digits[:7], 16) << 32) + number for digits, number in frames]
        while remaining:
            claimed = self._claimed(files, _ranges([places[i] for i in remaining]))
            self._count(bool(claimed))
            own = {place for each in claimed for place in each}
            part = [i for i in remaining if places[i] in own] or remaining
            try:
                yield part
            finally:
                for each in claimed:
                    _lock(files, fcntl.F_UNLCK, each)
            remaining = [i for i in remaining if i not in part]

    def _claimed(self, files: Sequence[OpenFile], ranges: list[range]) -> list[range]:
        """Claim the ranges that no other process has claimed, or wait for the first. Return none after `wait_s`."""
        until = time.monotonic() + self._wait_s
        if claimed := [each for each in ranges if _lock(files, fcntl.F_WRLCK, each)]:
            return claimed
        while not _lock(files, fcntl.F_WRLCK, ranges[0]):
            if time.monotonic() >= until:
                return []
            time.sleep(_POLL_S)
        return ranges[:1] + [each for each in ranges[1:] if _lock(files, fcntl.F_WRLCK, each)]

    def _count(self, is_claimed: bool) -> None:
        """Count timeouts in a row, and stop claiming after `_WAITS` of them."""
        self._waits = 0 if is_claimed else self._waits + 1
        if self._is_used and self._waits >= _WAITS:
            self._is_used = False
            _log.warning(
                "%s: frames that other processes have claimed did not become free for %d times %g s, as with locks that a "
                "network file system does not release. From now on, this process decodes them without waiting",
                *(self._folder, self._waits, self._wait_s),
            )

    def close(self) -> None:
        """Close the files. The next claim opens them again."""
        self._files.close()


def _ranges(places: list[int]) -> list[range]:
    """Return the ranges of consecutive numbers among `places`, each within a block."""
    ranges: list[range] = []
    for place in sorted(places):
        if ranges and place <= ranges[-1].stop and place // _BLOCK == ranges[-1].start // _BLOCK:
            ranges[-1] = range(ranges[-1].start, place + 1)
        else:
            ranges.append(range(place, place + 1))
    return ranges


def _lock(files: Sequence[OpenFile], kind: int, places: range) -> bool:
    """Set a lock of a kind on a range. Return False if another process has locked a part of the range."""
    file = files[places.start // _BLOCK % _FILES]
    try:
        lock_range(file.number, kind, places.start, len(places))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        pass
    return True

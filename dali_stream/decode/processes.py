"""Processes that decode clips for the decode threads of this process, so that one interpreter does not limit all of them.

    this process                                             decode process
    decode thread: reads and packs a clip   -- clip -->      thread: decodes, checks the times, resizes
                   copies frames into slots <-- numbers --   writes frames into memory that both processes share

A decode process has no dataset, no order and no state. It decodes one clip after the other, whatever batch or camera they are
for. A decode thread uses any thread of a decode process that is unused. If none is, because the processes start or have ended,
the decode thread decodes the clip itself.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dali_stream.decode.resized import Frames, Output, decode_resized
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat
from dali_stream.observe.counters import Counters
from dali_stream.system.child_process import Child, ChildEnded, Connection, checked
from dali_stream.system.shared_memory import SharedBlock, new_block
from dali_stream.system.workers import join_started

MAIN = "dali_stream.decode.process_main:main"
MEMORY_BYTES = 8 << 20  # memory for the frames of a thread, unless a single frame is larger
_CLIPS_BEFORE = 4  # clips per decode thread that are decoded before processes start, which is longer than a short loop takes
_TRIES = 2  # processes that may end while they decode a clip, before this process decodes it
_DEATHS = 3  # processes that may end one after the other before they have decoded a clip. Afterwards, no other one is started
_log = logging.getLogger("dali_stream")


class DecodeWork(NamedTuple):
    """Message to a thread of a decode process: the arguments of `decode_resized`."""

    clip: Clip
    expected: VideoFormat
    output: Output


class Decoded(NamedTuple):
    """Message of a thread of a decode process. Its frames are at the beginning of the shared memory.

    Before the thread writes further frames, it waits for a bool, which says whether they are needed.

    Attributes:
        requests, decoded: See `decode_resized`.
        resize_s: Seconds that resizing took.
        cpu_s: CPU seconds of the thread.
        is_last: Whether the clip has no more frames, so that the thread waits for another clip.
    """

    requests: list[int]
    decoded: int
    resize_s: float
    cpu_s: float
    is_last: bool


class _RemoteThread:
    """Thread of a decode process. It decodes one clip at a time.

    Args:
        child: Decode process, which gets a message to start the thread.
        size: Size of the shared memory in bytes.

    Attributes:
        is_idle: Whether the thread waits for a clip.
        has_decoded: Whether it has decoded a clip.
    """

    is_idle, has_decoded = True, False

    def __init__(self, child: Child, size: int) -> None:
        own, other = socket.socketpair()
        self._child, self._connection = child, Connection(own, lambda: child.is_running)
        with other:
            descriptor, size = new_block(size)
            try:
                self._memory = SharedBlock(descriptor, size).array((size,), np.uint8)
                child.send(size, [other.fileno(), descriptor])
            finally:
                os.close(descriptor)

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._child.is_running

    def decode(self, work: DecodeWork, counters: Counters) -> Iterator[tuple[list[int], Frames, int]]:
        """See `DecodeProcesses.decode`. Raises EOFError if the process has ended."""
        self.is_idle, is_last = False, False
        self._connection.send(work)
        while not is_last:
            message, _ = self._connection.receive()
            self.is_idle = not isinstance(message, Decoded)  # then it is an error
            requests, decoded, resize_s, cpu_s, is_last = checked(message)
            self.is_idle = is_last
            self.has_decoded |= is_last
            counters.add_inner("resize_s", resize_s, cpu_s)
            frames = self._memory[: len(requests) * work.output.nbytes].view(work.output.dtype)
            is_needed = False
            try:
                yield requests, frames.reshape(len(requests), *work.output.shape), decoded
                is_needed = True
            finally:
                if not is_last:
                    with contextlib.suppress(EOFError):  # which `receive` raises
                        self._connection.send(is_needed)
                        self.is_idle = not is_needed

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class DecodeProcesses:
    """Processes that decode clips. They start when the decode threads have decoded some clips themselves.

    Args:
        count: Number of processes.
        threads: Number of decode threads of this process, among which those of the processes are divided.
        frame_bytes: Memory of the largest frame, in bytes.
    """

    def __init__(self, count: int, threads: int, frame_bytes: int) -> None:
        self._threads = [(number + 1) * threads // count - number * threads // count for number in range(count)]
        self._bytes = max(MEMORY_BYTES, frame_bytes)
        self._clips = itertools.count()
        self._unused = queue.SimpleQueue[_RemoteThread]()
        self._lock = threading.RLock()
        self._attending: list[threading.Thread] = []
        self._children = set[Child]()
        self._stopping = self._told = False

    def decode(
        self, clip: Clip, expected: VideoFormat, output: Output, counters: Counters
    ) -> Iterator[tuple[list[int], Frames, int]]:
        """Decode the requests of a clip as `decode_resized` does. Frames are valid until the next ones are requested.

        If a process ends while it decodes the clip, another one decodes it from the beginning.

        Raises:
            CancelledError: If `stop` has killed the process.
        """
        if not self._attending and next(self._clips) >= _CLIPS_BEFORE * sum(self._threads):
            self._start()
        ended = 0  # processes that ended while they decoded the clip
        while ended < _TRIES:
            try:
                thread = self._unused.get_nowait()
            except queue.Empty:
                break
            if not thread.is_running:
                thread.close()
                continue
            try:
                yield from thread.decode(DecodeWork(replace(clip, hashes=[]), expected, output), counters)
                return
            except EOFError:
                ended += 1
                if self._stopping:
                    raise CancelledError from None
            finally:
                if thread.is_idle:
                    self._unused.put(thread)
                else:
                    thread.close()
        yield from decode_resized(clip, expected, output, counters.timed)

    def _start(self) -> None:
        atexit.register(self.stop)  # otherwise other processes would replace those that end at the exit of the interpreter
        with self._lock:
            for threads in self._threads[len(self._attending) :]:
                thread = threading.Thread(target=self._attend, args=(threads,), name="dali_stream process", daemon=True)
                self._attending.append(thread)
                try:
                    thread.start()
                except RuntimeError as reason:  # the system allows no more threads
                    self._tell(reason)

    def _attend(self, count: int) -> None:
        """Start a process with `count` threads, and another one each time it ends."""
        deaths = 0  # processes that ended one after the other before they had decoded a clip
        while deaths < _DEATHS and not self._stopping:
            threads = list[_RemoteThread]()
            try:
                child = Child(MAIN, "a decode process")
                try:
                    self._children.add(child)
                    if self._stopping:  # `stop` may have overlooked it
                        child.kill()
                    threads += [_RemoteThread(child, self._bytes) for _ in range(count)]
                    for thread in threads:
                        child.receive()  # the thread has started
                        self._unused.put(thread)
                    child.receive()
                finally:
                    self._children.discard(child)
                    child.close()
            except ChildEnded as ended:
                if not self._stopping:
                    _log.warning("A decode process %s. The clips that it was decoding are decoded again", ended)
                deaths = 0 if any(thread.has_decoded for thread in threads) else deaths + 1
            except Exception as reason:  # such as too many processes, threads, open files or too little memory
                self._tell(reason)
                return

    def _tell(self, reason: Exception) -> None:
        """Log the first reason for which decode threads lack a process."""
        with self._lock:
            is_first, self._told = not self._told, True
        if is_first and not self._stopping:
            _log.warning("Clips are decoded without a decode process, since %s", reason)

    def stop(self) -> None:
        """Kill the processes, and start no more. They complete no clip, which may take long if they were suspended."""
        self._stopping = True
        for child in list(self._children):
            child.kill()

    def join(self) -> None:
        """Wait for the processes to end, after `stop`, when no clip is decoded any more."""
        atexit.unregister(self.stop)
        for thread in self._attending:
            join_started(thread)
        with contextlib.suppress(queue.Empty):
            while True:
                self._unused.get_nowait().close()

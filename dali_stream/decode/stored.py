"""Frames on disk, as decode threads use them: they read frames in place of decoding them, and add those that they decode."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import Buffers, ReadFrames
from dali_stream.cache.frame_files import FrameFiles, Records
from dali_stream.cache.slots import Frames, Slots
from dali_stream.checks.arrays import NONE
from dali_stream.observe.counters import Counters
from dali_stream.observe.waiting import working
from dali_stream.schedule.frame_plan import FramePlan, Reads
from dali_stream.system.workers import Workers

T = TypeVar("T")
_random = random.SystemRandom()  # equal process IDs, as in containers, do not matter, and the state of `random` is the user's
READ_FRAMES = 64  # maximum number of frames that a task reads, of 150 KB each if they are 224×224: about 5 ms


class StoredFrames:
    """Frames of one camera on disk. Decode threads read them into slots, and add frames.

    Args:
        files: Files of the frames.
        slots: Slots into which frames are read.
        counters: Counters of the Loader.
        buffers: Memory for batches into which frames are read directly. None if the frames of a batch have another type, or are
            in another order in memory.
    """

    def __init__(self, files: FrameFiles, slots: Slots, counters: Counters, buffers: Buffers | None) -> None:
        self._files, self._slots, self._counters, self._buffers = files, slots, counters, buffers

    def batch(self, plan: FramePlan) -> ReadFrames | None:
        """Return memory for a batch into which frames are read directly. None if all of them are read into slots."""
        if self._buffers is None or not (plan.reads.place != NONE).any():
            return None
        frames = self._buffers.take((*plan.show.shape, *self._slots.shape), self._slots.dtype)
        return ReadFrames(frames, np.zeros(plan.show.size, np.bool_))

    def start(
        self,
        pool: Workers,
        reads: Reads,
        batch: ReadFrames | None,
        records: Mapping[int, Records],
        decode: Callable[[list[int]], None],
    ) -> list[Future[None]]:
        """Start the tasks that read the frames of a batch.

        Args:
            pool: Decode threads.
            reads: Frames to read.
            batch: Memory of the batch, see `batch`.
            records: {episode of the frames: its records}.
            decode: Function that decodes the frames that are missing or damaged on disk. It gets their numbers in `reads`, and
                runs in a decode thread.
        """
        count = len(reads.slot)
        tasks = -(-count // READ_FRAMES)
        parts = (slice(count * task // tasks, count * (task + 1) // tasks) for task in range(tasks))
        return [pool.submit(self._read, reads, batch, part, records, decode) for part in parts]

    def _read(
        self,
        reads: Reads,
        batch: ReadFrames | None,
        part: slice,
        records: Mapping[int, Records],
        decode: Callable[[list[int]], None],
    ) -> None:
        episodes, packets, slots = (column[part].tolist() for column in (reads.episode, reads.packet, reads.slot))
        place = reads.place[part]
        instead: list[Frames | None] = [None] * len(slots)
        if batch is not None:
            frames = batch.frames.reshape(-1, *batch.frames.shape[2:])
            instead = [None if at == NONE else frames[at] for at in place.tolist()]
        good = np.zeros(len(slots), np.bool_)
        with self._counters.timed("read_s"), working("reads {} frames from frame_cache", len(slots)):
            for episode, group in itertools.groupby(range(len(episodes)), episodes.__getitem__):
                own = list(group)  # adjacent, since frames are sorted by episode
                each = slice(own[0], own[-1] + 1)
                read = functools.partial(self._files.read, records[episode], packets[each])
                good[each] = self._slots.fill(slots[each], read, instead[each])
        if batch is not None:
            batch.is_read[place[good & (place != NONE)]] = True
        damaged = (part.start + np.flatnonzero(~good)).tolist()
        self._counters.add(frame_cache_disk_hits=len(episodes) - len(damaged))
        if damaged:
            decode(damaged)

    def rotated(self, tasks: list[T]) -> list[T]:
        """Return the decode tasks of a batch in another order, so that runs with the same batches begin with different ones."""
        first = _random.randrange(max(len(tasks), 1))
        return tasks[first:] + tasks[:first]

    def divided(self, frames: Sequence[tuple[Records | None, int]]) -> Iterator[list[int]]:
        """See `FrameFiles.divided`. Waiting for other processes counts as decoding."""
        parts = self._files.divided(frames)
        while True:
            with self._counters.timed("decode_s"):
                part = next(parts, None)
            if part is None:
                return
            yield part

    def read_added(
        self,
        records: Records,
        numbers: Sequence[int],
        slots: Sequence[int],
        places: Sequence[tuple[int, int]],
        read_packets: Callable[[list[int]], Mapping[int, int]] | None = None,
    ) -> list[bool]:
        """Read frames that were added after the batch was planned, by another batch or by another process.

        Args:
            records: Records of the episode.
            numbers: Number of each record.
            slots: Slot of each frame. `NONE` for frames that need not be read.
            places: (episode, frame) of each frame.
            read_packets: See `FrameFiles.stored`. Default: None.

        Returns:
            Whether each frame need not be decoded.
        """
        there = self._files.stored(records, np.array(numbers), read_packets)
        own = [i for i in np.flatnonzero(there).tolist() if slots[i] != NONE]
        if own:
            read = functools.partial(self._files.read, records, [numbers[i] for i in own])
            with self._counters.timed("read_s"):
                there[own] = self._slots.fill([slots[i] for i in own], read, [None] * len(own))
            self._counters.add(frame_cache_disk_hits=int(there[own].sum()))
        self._files.added.extend(itertools.compress(places, there.tolist()))
        return there.tolist()

    @property
    def is_open(self) -> bool:
        """Whether frames can be added."""
        return self._files.is_open

    def add(self, frames: Iterable[tuple[Records | None, int, Mapping[int, int], tuple[int, int], npt.NDArray[Any]]]) -> None:
        """Add decoded frames, if frames can still be added.

        Args:
            frames: For each frame, the records of its episode, the number of its record, the hashes of the packets from which
                it was decoded and of others of the video ({} for an image), (episode, frame), and the pixels of shape
                (H, W, C). A frame without records is not added.
        """
        if not self._files.is_open:
            return
        written, read = 0, {}
        with self._counters.timed("write_s"):
            for records, number, packets, place, pixels in frames:
                if records is None:
                    continue
                if self._files.write(records, number, packets.get(number, 0), np.ascontiguousarray(pixels)):
                    self._files.added.append(place)
                    written += pixels.nbytes
                    read[id(records), id(packets)] = records, packets
            for records, packets in read.values():
                self._files.remember(records, packets)
        self._counters.add(frame_cache_disk_written_bytes=written)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

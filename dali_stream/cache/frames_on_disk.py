"""Frames of a camera on disk: what the schedule knows of them, and the tasks that read them, decode the others and add those.

The planner's thread calls `open_episode`, `close_episode`, `update` and `start`. The tasks run in decode threads.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import Buffers, ReadFrames
from dali_stream.cache.frame_files import FrameFiles, Records, image_records, video_records
from dali_stream.cache.slots import Frames, Slots
from dali_stream.checks.arrays import NONE, Mask
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.observe.waiting import working
from dali_stream.schedule.frames import FramePlan, Reads
from dali_stream.schedule.plan import Schedule
from dali_stream.storage import Store
from dali_stream.system.workers import Workers

_random = random.SystemRandom()  # equal process IDs, as in containers, do not matter, and the state of `random` is the user's
READ_FRAMES = 64  # maximum number of frames that a task reads, of 150 KB each if they are 224×224: about 5 ms


class WantedFrame(Protocol):
    """Frame that a task decodes if it is not on disk.

    Attributes:
        episode: Episode of the frame.
        in_episode: Frame index within the episode.
        packet: Packet of the frame, or `in_episode` if it is an image.
        slot: Slot into which the frame is put. `NONE` for a frame that is decoded for the disk only.
        records: Records of the episode on disk. None if its frames are not stored.
    """

    @property
    def episode(self) -> int: ...
    @property
    def in_episode(self) -> int: ...
    @property
    def packet(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def records(self) -> Records | None: ...


Wanted = TypeVar("Wanted", bound=WantedFrame)


class Decoding(NamedTuple):
    """How a decoder decodes frames, each given as a `WantedFrame`.

    Attributes:
        frames: Function that returns the frames that could not be read, by their numbers in `Reads`.
        decode: Function that decodes frames, and puts them into their slots.
        hash_packets: See `FrameFiles.stored`. It also gets one of the frames, which are all in the same file. None for images.
    """

    frames: Callable[[list[int]], list[Any]]
    decode: Callable[[list[Any]], None]
    hash_packets: Callable[[Any, list[int]], Mapping[int, int]] | None = None


class FramesOnDisk:
    """Frames of one camera on disk.

    Args:
        camera: Name of the camera.
        files: Files of the frames.
        slots: Slots into which frames are read.
        counters: Counters of the Loader.
        buffers: Memory for batches into which frames are read directly. None if the frames of a batch have another type, or are
            in another order in memory.
    """

    def __init__(self, camera: str, files: FrameFiles, slots: Slots, counters: Counters, buffers: Buffers | None) -> None:
        self._camera, self._files, self._slots, self._counters, self._buffers = camera, files, slots, counters, buffers
        self._records: dict[int, Records] = {}  # {open episode whose frames are stored: its records}
        self._added: deque[tuple[int, int]] = deque()  # (episode, frame) of each frame that was added after it was planned
        self._epoch: int | None = None  # epoch in which the disk was searched for frames of other processes

    @property
    def is_open(self) -> bool:
        """Whether frames can be added."""
        return self._files.is_open

    def open_episode(
        self,
        episode: int,
        store: Store,
        index: VideoIndex | None,
        images: npt.NDArray[np.object_] | None,
        packets: npt.NDArray[np.integer],
    ) -> Mask | None:
        """Return which frames of an episode are known to be on disk, bool of shape (L,). None if its frames are not stored.

        A frame that was stored from another source is False: its decode task compares its packets, see `_still_missing`.

        Args:
            episode: Number of the episode.
            store: Store that has read the index.
            index: Index of the episode's video file. None if the file is broken, or if the episode has none.
            images: Encoded images of the episode. None if its frames are in a video file, or missing.
            packets: Packet of each frame, shape (L,).
        """
        if index is not None:
            records = video_records(store, index, packets)
            if records is None:
                self._files.tell_of_unknown_version(store.where(index.path))
        else:
            records = None if images is None else image_records(images)
        if records is None:
            return None
        self._records[episode] = records
        return self._files.stored(records, packets)

    def close_episode(self, episode: int) -> None:
        """Forget an episode that is closed."""
        self._records.pop(episode, None)

    def records(self, episode: int) -> Records | None:
        """Return the records of an open episode. None if its frames are not stored."""
        return self._records.get(episode)

    def update(self, schedule: Schedule, epoch: int) -> None:
        """Tell the schedule which frames are on disk, before it plans a batch of an epoch.

        These are the frames that were added. In a new epoch, the disk is searched again for all open episodes, since other
        processes add frames and remove files.
        """
        camera = schedule.table.cameras[self._camera]
        if self._epoch is not None and epoch > self._epoch:
            self._files.look()
            for episode, records in self._records.items():
                rows = schedule.table.rows_of(episode)
                if not camera.stored[rows].all():
                    camera.stored[rows] = self._files.stored(records, camera.packet[rows])
        self._epoch = epoch
        schedule.table.set_stored(self._camera, [self._added.popleft() for _ in range(len(self._added))])
        schedule.frames[self._camera].adds_to_disk = self.is_open

    def start(
        self,
        workers: Workers,
        plan: FramePlan,
        reads: Reads,
        tasks: Sequence[Callable[[], tuple[list[Wanted], Decoding]]],
        decoding: Decoding,
    ) -> tuple[list[Future[None]], list[Future[None]], ReadFrames | None]:
        """Start the tasks of a batch.

        Args:
            workers: Decode threads.
            plan: Plan of the batch.
            reads: Frames to read. Those that are missing or damaged on disk are decoded.
            tasks: For each task, a function that returns its frames to decode, and how, in the thread that decodes them. Those
                that were added to the disk meanwhile are read.
            decoding: How frames are decoded that cannot be read.

        Returns:
            Reads in progress, `tasks` in progress, and the memory of the batch if frames are read directly into it.
        """
        batch = None
        if self._buffers is not None and (plan.reads.place != NONE).any():
            frames = self._buffers.take((*plan.show.shape, *self._slots.shape), self._slots.dtype)
            batch = ReadFrames(frames, np.zeros(plan.show.size, np.bool_))
        records = {episode: self._records[episode] for episode in set(reads.episode.tolist())}
        count = len(reads.slot)
        parts = -(-count // READ_FRAMES)
        bounds = (slice(count * part // parts, count * (part + 1) // parts) for part in range(parts))
        reading = [workers.submit(self._read, reads, batch, part, records, decoding) for part in bounds]
        first = _random.randrange(max(len(tasks), 1))  # runs with the same batches begin with different tasks
        started = [workers.submit(self._begin, task) for task in (*tasks[first:], *tasks[:first])]
        return reading, started[len(tasks) - first :] + started[: len(tasks) - first], batch

    def add(self, frames: Iterable[tuple[WantedFrame, Mapping[int, int], npt.NDArray[Any]]]) -> None:
        """Add decoded frames, if frames can still be added.

        Args:
            frames: For each frame, the frame, the hashes of the packets from which it was decoded and of others of the video
                ({} for an image), and the pixels of shape (H, W, C). A frame without records is not added.
        """
        if not self.is_open:
            return
        written, read = 0, {}
        with self._counters.timed("write_s"):
            for frame, hashes, pixels in frames:
                if frame.records is None:
                    continue
                if self._files.write(frame.records, frame.packet, hashes.get(frame.packet, 0), np.ascontiguousarray(pixels)):
                    self._added.append((frame.episode, frame.in_episode))
                    written += pixels.nbytes
                    read[id(frame.records), id(hashes)] = frame.records, hashes
            for records, hashes in read.values():
                self._files.remember(records, hashes)
        self._counters.add(disk_written_bytes=written)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _read(
        self, reads: Reads, batch: ReadFrames | None, part: slice, records: Mapping[int, Records], decoding: Decoding
    ) -> None:
        """Read frames, and decode those that are missing or damaged on disk."""
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
        self._counters.add(disk_hits=len(episodes) - len(damaged))
        if damaged:
            self._decode(decoding.frames(damaged), decoding)

    def _begin(self, task: Callable[[], tuple[list[Wanted], Decoding]]) -> None:
        self._decode(*task())

    def _decode(self, frames: Sequence[Wanted], decoding: Decoding) -> None:
        """Decode the frames of a task that are not on disk, and that no other process decodes."""
        # Waiting for other processes counts as decoding.
        parts = self._files.divided([(frame.records, frame.packet) for frame in frames])
        while True:
            with self._counters.timed("decode_s"), working("claims {} frames of frame_cache, or waits for others", len(frames)):
                part = next(parts, None)
            if part is None:
                return
            if missing := list(self._still_missing([frames[i] for i in part], decoding)):
                decoding.decode(missing)

    def _still_missing(self, frames: Sequence[Wanted], decoding: Decoding) -> Iterator[Wanted]:
        """Yield the frames that must be decoded. Read the others.

        They were added by another batch or process after the batch was planned, or the disk has them from another source with
        the same packets.
        """
        for records, group in itertools.groupby(frames, lambda frame: frame.records):
            own = list(group)
            if records is None:
                yield from own
                continue
            hash_packets = decoding.hash_packets and functools.partial(decoding.hash_packets, own[0])
            is_stored = self._files.stored(records, np.array([frame.packet for frame in own]), hash_packets)
            # Frames for the disk only need not be read.
            wanted = [i for i in np.flatnonzero(is_stored).tolist() if own[i].slot != NONE]
            if wanted:
                read = functools.partial(self._files.read, records, [own[i].packet for i in wanted])
                with self._counters.timed("read_s"):
                    is_stored[wanted] = self._slots.fill([own[i].slot for i in wanted], read, [None] * len(wanted))
                self._counters.add(disk_hits=int(is_stored[wanted].sum()))
            self._added.extend((frame.episode, frame.in_episode) for frame in itertools.compress(own, is_stored.tolist()))
            yield from itertools.compress(own, (~is_stored).tolist())

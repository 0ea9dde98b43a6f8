"""Access to the files of the source: stores, packets in large ranges, and the frames of rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dali_stream.checks.none import NONE
from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import children, find, read_moov
from dali_stream.mp4.index import Int64, VideoIndex
from dali_stream.mp4.timing import EpisodeTimes, Interval, explain, find_packets
from dali_stream.storage import Store, open_store
from dali_stream.storage.store import StoreView

RANGE = 8 << 20  # maximum bytes per request: large enough for few requests, and small enough to repeat after a failure
HOLE = 256 << 10  # maximum bytes between two packets that are fetched in one request


def locate(
    where: str,
    table: VideoIndex,
    interval: Interval,
    seconds: npt.NDArray[np.float32],
    frame_index: Int64,
    fps: float,
    tolerance_s: float | None,
) -> Int64:
    """Return the packets of an episode's rows, shape (n,).

    Args:
        where: File, camera and episode, for the message.
        table: Index of the file.
        interval: Interval of the episode in the file.
        seconds: Times of the rows since the start of the episode in seconds, shape (n,).
        frame_index: `frame_index` of the rows, shape (n,).
        fps: Frames per second of the dataset.
        tolerance_s: Maximum distance of a frame from the time of its row, in seconds. None for a quarter of a frame.

    Raises:
        DecodeError: If a row has no frame.
    """
    packets = find_packets(table, interval, seconds, fps, tolerance_s)
    if (packets == NONE).any():
        frame = int(np.argmax(packets == NONE))
        why = explain(EpisodeTimes(table, interval, seconds, frame_index, fps, tolerance_s), frame, prepares=True)
        raise DecodeError(f"{where}, frame {frame}: {why}")
    return packets


@functools.lru_cache(4)
def open_cached(address: str, options: str, revision: str | None) -> Store:
    """Return the store of an address, with storage options as JSON. All tasks of a process share it."""
    return open_store(address, json.loads(options), revision=revision)


class LoadedRange(StoreView):
    """Store that reads from memory within the last loaded range. One thread may load while others read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._loaded = ("", 0, b"")

    def load(self, path: str, start: int, stop: int) -> None:
        """Fetch the range [start, stop) of a file, unless it is already loaded."""
        loaded, begin, data = self._loaded
        if loaded != path or not begin <= start <= stop <= begin + len(data):
            self._loaded = ("", 0, b"")  # frees the last range before the next one is fetched
            parts = [self.store.read(path, at, min(at + RANGE, stop)) for at in range(start, stop, RANGE)]
            self._loaded = (path, start, b"".join(parts))

    def read(self, path: str, start: int, stop: int) -> bytes:
        loaded, begin, data = self._loaded
        if loaded == path and begin <= start <= stop <= begin + len(data):
            return data[start - begin : stop - begin]
        return self.store.read(path, start, stop)


def refuse_sound(store: Store, path: str) -> None:
    """Raise DecodeError if an MP4 file has a sound track, since new files would lack it."""
    moov = read_moov(store, path)
    for kind, start, end in children(moov, 0, len(moov)):
        handler = find(moov, start, end, b"mdia", b"hdlr") if kind == b"trak" else None
        if handler and moov[handler[0] + 8 : handler[0] + 12] == b"soun":
            raise DecodeError(
                f"{store.where(path)}: has sound, which cannot be copied. Remove it with `ffmpeg -i IN -c copy -an OUT`"
            )


def read_packets(store: Store, table: VideoIndex, start: int, stop: int) -> Iterator[list[memoryview]]:
    """Yield the packets [start, stop) in decode order, in lists of packets that are read together.

    Args:
        store: Storage of the file.
        table: Index of the file.
        start, stop: Range of packets.

    Raises:
        DecodeError: If the file has become shorter since its index was read.
    """
    offset, end = table.offset, table.end
    while start < stop:
        last, after = start, int(end[start])
        while last + 1 < stop and 0 <= offset[last + 1] - after <= HOLE and end[last + 1] - offset[start] <= RANGE:
            last += 1
            after = int(end[last])
        begin = int(offset[start])
        data = memoryview(store.read(table.path, begin, after))
        if len(data) != after - begin:
            raise DecodeError(
                f"{store.where(table.path)}: bytes {begin} to {after} are missing, because the file has become shorter "
                "since its index was read. Run the same command again"
            )
        yield [data[offset[i] - begin : end[i] - begin] for i in range(start, last + 1)]
        start = last + 1

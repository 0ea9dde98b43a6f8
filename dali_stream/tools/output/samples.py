"""Packets of a video file, read in large ranges."""

from __future__ import annotations

from collections.abc import Iterator

from dali_stream.errors import DecodeError
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store
from dali_stream.tools.output.copy import RANGE

HOLE = 256 << 10  # bytes between packets up to which they are fetched in one request


def read_samples(store: Store, table: VideoIndex, start: int, stop: int) -> Iterator[list[memoryview]]:
    """The packets [start, stop) in decode order, as many at a time as one range of a few megabytes holds.

    Raises:
        DecodeError: the file has become shorter.
    """
    offset, end = table.offset, table.offset + table.size
    while start < stop:
        last, after = start, int(end[start])
        while last + 1 < stop and 0 <= offset[last + 1] - after <= HOLE and end[last + 1] - offset[start] <= RANGE:
            last += 1
            after = int(end[last])
        begin = int(offset[start])
        data = memoryview(store.read(table.path, begin, after))
        if len(data) != after - begin:
            raise DecodeError(
                f"{store.where(table.path)}: bytes {begin} to {after} are not all there: the file has become shorter since its "
                "index was read; run the same command again"
            )
        yield [data[offset[i] - begin : end[i] - begin] for i in range(start, last + 1)]
        start = last + 1

"""Index of an MP4's video track: the position of each packet, the display time of its frame, and the GOPs.

`read_index` makes it from the tables of a file, see `sample_tables` and `display`.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dali_stream.checks.arrays import Array, Float64, Int64
from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import COPY, find, has_fragments, read_moov
from dali_stream.mp4.display import apply_edit_list, track_header
from dali_stream.mp4.format import VideoFormat, as_displayed, codec_of, describe, with_size
from dali_stream.mp4.preamble import depends_on_encoder, preamble_of
from dali_stream.mp4.sample_tables import (
    packet_places,
    packet_sizes,
    presentation_times,
    required,
    sync_packets,
    ticks_per_second,
    track_tables,
    video_track,
)
from dali_stream.mp4.slices import SLICE_HEAD, is_intra_refresh
from dali_stream.storage import Store
from dali_stream.storage.store import StoreView


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """Index of the n packets of one file, in decode order. `read_index` creates it.

    Arrays of numbers that are not negative and below 2^32 are uint32, and others are int64. The methods return int64.
    An index of a file at a constant frame rate stores no times.

    Attributes:
        path: Path of the file, relative to the dataset.
        configs: Sample descriptions (`stsd` entries without their bit rates). A clip contains packets of only one of them.
        track_header: Matrix and display size, as at the end of `tkhd`. The matrix of the movie is applied.
        timescale: Number of ticks per second.
        bounds: Positions in the file, in bytes. The first n are the positions of the packets, and the last n are the positions
            after them. If all packets are stored end to end, the shape is (n + 1,), because each packet begins where the one
            before it ends. Otherwise, it is (2 n,).
        times: Presentation times in ticks, in increasing order, n numbers: a range if the frame rate is constant, and an array
            otherwise. The edit list is applied.
        displayed: Places in `display_order` of the displayed frames. The edit list hides the other frames, which are only
            decoded if a displayed frame depends on them. A file that was cut without encoding it again has such frames.
        keyframes: Packets at which decoding can start, shape (k,).
        config: Index of each packet's sample description in `configs`, int8 of shape (n,).
        reordering: Packets in display order, and the place of each packet in it, both of shape (n,). None if display order and
            decode order are the same (no B-frames).
        open_gops: Whether some frames follow a keyframe but are displayed before it. Decoding them requires the previous GOP.
        longest_gop: Number of frames of the longest GOP.
        index_bytes: Size in bytes of the `moov` box from which the index was read.
        moov_hash: Hash of the `moov` box, 32 hexadecimal digits.
        preambles: For each of `configs`, bytes to put before the first packet of a clip, which name the encoder. Empty for
            most files. See the module `preamble`.
    """

    path: str
    configs: tuple[bytes, ...]
    track_header: bytes
    timescale: int
    bounds: Array
    times: Array | range
    displayed: range
    keyframes: Array
    config: npt.NDArray[np.int8]
    reordering: tuple[Array, Array] | None
    open_gops: bool
    longest_gop: int
    index_bytes: int
    moov_hash: str
    preambles: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.times)

    @property
    def nbytes(self) -> int:
        """Memory of the index in bytes: 5 to 33 per packet, and 4 per GOP.

        It is 5 for contiguous packets without B-frames at a constant frame rate, in a file of less than 4 GiB.
        """
        arrays = self.bounds, self.times, self.keyframes, self.config, *(self.reordering or ())
        return sum(each.nbytes for each in arrays if isinstance(each, np.ndarray)) + len(self.track_header) + 1024

    @property
    def offset(self) -> Array:
        """Position of each packet in the file, in bytes, shape (n,)."""
        return self.bounds[: len(self)]

    @property
    def end(self) -> Array:
        """Position after each packet in the file, in bytes, shape (n,)."""
        return self.bounds[-len(self) :]

    @property
    def reordered(self) -> bool:
        """Whether display order and decode order differ (B-frames)."""
        return self.reordering is not None

    @property
    def display_order(self) -> Array:
        """Packets in the order in which their frames are displayed, shape (n,)."""
        return np.arange(len(self)) if self.reordering is None else self.reordering[0]

    def size(self, packets: Any = slice(None)) -> Any:
        """Return the sizes of packets in bytes.

        Args:
            packets: Packet, or array or slice of packets. Default: all packets.
        """
        return (self.end[packets] - self.offset[packets]).astype(np.int64)

    def pts(self, packets: Any = slice(None)) -> Any:
        """Return the presentation times of packets in ticks. See `size` for the argument."""
        return self.shown_at(self.place(packets))

    def place(self, packets: Any) -> Any:
        """Return the places of packets in display order. See `size` for the argument. A slice may be returned as it is."""
        return packets if self.reordering is None else self.reordering[1][packets].astype(np.int64)

    def shown_at(self, places: Any = slice(None)) -> Any:
        """Return the presentation times of places in display order, in ticks. See `size` for the argument."""
        times = self.times
        if not isinstance(times, range):
            return times[places].astype(np.int64)
        if isinstance(places, slice):
            times = times[places]
            return np.arange(times.start, times.stop, times.step)
        return times.start + times.step * np.asarray(places, np.int64)

    def gop(self, packets: Any) -> Any:
        """Return the number of the GOP of a packet, or of each packet of an array."""
        # NumPy would convert all keyframes to the type of the packets if it was another one.
        return self.keyframes.searchsorted(np.asarray(packets, self.keyframes.dtype), "right") - 1

    def gop_start(self, packets: Any) -> Any:
        """Return the keyframe of the GOP of a packet, or of each packet of an array."""
        return self.keyframes[self.gop(packets)].astype(np.int64)

    @property
    def hidden(self) -> int:
        """Number of frames that the edit list hides."""
        return len(self) - len(self.displayed)

    @property
    def displayed_packets(self) -> Int64:
        """Packets of the displayed frames, in display order."""
        return self.display_order[self.displayed.start : self.displayed.stop].astype(np.int64)

    @property
    def gop_lengths(self) -> Int64:
        """Number of frames of each GOP, shape (k,)."""
        edges = np.append(self.keyframes, len(self))
        return edges[1:] - edges[:-1]

    def format(self, number: int = 0) -> VideoFormat:
        """Return the format of frames as they are displayed, for one of `configs`.

        Raises:
            DecodeError: If the sample description is broken.
        """
        return as_displayed(describe(self.configs[number]), self.track_header)

    def decode_starts(self, packets: Int64) -> Int64:
        """Return the keyframe at which decoding each packet starts.

        It is the keyframe of the packet's GOP. For a frame of an open GOP that is displayed before this keyframe, it is the
        keyframe of the previous GOP.

        Args:
            packets: Packets, of any shape.
        """
        head: Int64 = self.gop_start(packets)
        if not self.open_gops:
            return head
        before = self.gop_start(np.maximum(head - 1, 0))
        return np.where(self.pts(packets) < self.pts(head), before, head)

    def nearest(self, seconds: Float64) -> tuple[Int64, Float64, Float64]:
        """Find the packets whose display times are nearest to some times. Only displayed frames are found.

        Args:
            seconds: Times in seconds, shape (m,). They need not be sorted.

        Returns:
            Packets, their distances in seconds, and their display times in seconds, all of shape (m,).
        """
        # Only the frames from the first time to the last one are searched, and two more on each side, because these limits are
        # rounded to ticks. The times are compared in seconds and not in ticks, to avoid rounding.
        ends = float(np.fmin.reduce(seconds, initial=np.inf)), float(np.fmax.reduce(seconds, initial=-np.inf))
        ticks = [int(min(max(end * self.timescale, -_MOST_TICKS), _MOST_TICKS)) for end in ends]
        first, stop = self.displayed.start, self.displayed.stop
        # Unlike NumPy, `bisect` compares the times without converting all of them to the type of `ticks`.
        begin, end = (bisect.bisect_left(self.times, tick, first, stop) for tick in ticks)
        begin, end = max(min(begin, end) - 2, first), min(end + 2, stop)
        shown = self.shown_at(slice(begin, end)) / self.timescale
        # Each time is between the frames `left` and `right`, or beyond the first or the last frame.
        right = np.minimum(np.maximum(shown.searchsorted(seconds), min(1, len(shown) - 1)), len(shown) - 1)
        left = np.maximum(right - 1, 0)
        before, after = np.abs(shown[left] - seconds), np.abs(shown[right] - seconds)
        is_after = after < before
        place: Int64 = np.where(is_after, right, left)
        packets = place + begin if self.reordering is None else self.reordering[0][place + begin].astype(np.int64)
        return packets, np.where(is_after, after, before), shown[place]


_MOST_TICKS = float(1 << 62)


def video_index(
    path: str,
    configs: tuple[bytes, ...],
    track_header: bytes,
    timescale: int,
    *,
    offset: Int64,
    size: Int64,
    pts: Int64,
    keyframes: Int64,
    config: npt.NDArray[np.integer[Any]],
    index_bytes: int,
    displayed: range | None = None,
    moov_hash: str = "",
    preambles: tuple[bytes, ...] | None = None,
) -> VideoIndex:
    """Return an index. See `VideoIndex` for the arguments.

    The positions and sizes of packets are in bytes, and their times `pts` in ticks, all of shape (n,). By default, all frames
    are displayed, and no packet names an encoder.
    """
    n, end, times, reordering = len(size), offset + size, pts, None
    if not (np.diff(pts) > 0).all():
        order = np.argsort(pts, kind="stable")
        times, reordering = pts[order], (_narrow(order), _narrow(np.argsort(order)))
    is_contiguous = (offset[1:] == end[:-1]).all()
    first, step = int(times[0]), int(times[-1] - times[0]) // max(n - 1, 1) or 1
    is_constant = (times == first + step * np.arange(n)).all()
    return VideoIndex(
        path, configs, track_header, timescale,
        bounds=_narrow(np.concatenate([offset, end[-1:] if is_contiguous else end])),
        times=range(first, first + step * n, step) if is_constant else _narrow(times),
        displayed=range(n) if displayed is None else displayed,
        keyframes=_narrow(keyframes),
        config=config.astype(np.int8),
        reordering=reordering,
        open_gops=reordering is not None and bool((np.minimum.reduceat(pts, keyframes) < pts[keyframes]).any()),
        longest_gop=int(np.diff(np.append(keyframes, n)).max()),
        index_bytes=index_bytes,
        moov_hash=moov_hash,
        preambles=preambles or (b"",) * len(configs),
    )  # fmt: skip


def _narrow(values: Int64) -> Array:
    """Return integers as uint32 if that holds all of them, and as int64 otherwise."""
    return values.astype(np.uint32 if values.min() >= 0 and values.max() < 1 << 32 else np.int64)


def read_index(store: Store, path: str) -> VideoIndex:
    """Read the index of a file from its `moov` box.

    For H.264, the beginning of the second keyframe is read as well, to check whether decoding can start at it. If decoding may
    depend on the encoder, the beginning of the first packet is also read (see `preamble`).

    Raises:
        DecodeError: If the file is not an MP4, is truncated or fragmented, does not have exactly one video track, has an edit
            list of several parts, or if its index contradicts itself or the size of the file. The message names the file.
    """
    try:
        read = _Read(store)
        return _parse(read, path, read_moov(read, path), store.size(path))
    except DecodeError as error:
        raise DecodeError(f"{store.where(path)}: {error}") from error.__cause__
    except (struct.error, ValueError, OverflowError, IndexError) as error:
        raise DecodeError(f"{store.where(path)}: invalid index (moov): {error}") from error


class _Read(StoreView):
    """Store that keeps the first bytes of a file. If `moov` is at the end, the beginning of the first packet is among them."""

    _head = b""

    def read(self, path: str, start: int, stop: int) -> bytes:
        data = self.store.read(path, start, stop)
        if start == 0:
            self._head = data
        return data

    def read_again(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file without reading them if they are among its first bytes."""
        return self._head[start:stop] if stop <= len(self._head) else self.read(path, start, stop)


def _parse(store: _Read, path: str, moov: bytes, file_size: int) -> VideoIndex:
    track = video_track(moov)
    boxes = track_tables(moov, track)
    size = packet_sizes(boxes)
    n = len(size)
    # A file whose `moov` announces fragments may have none, and one with fragments may have its first frames in `moov`.
    if find(moov, 0, len(moov), b"mvex") and (not n or has_fragments(store, path)):
        raise DecodeError(f"fragmented MP4, whose index is spread over the file. Remux it with {COPY}")
    if not n:
        raise DecodeError("the video track has no frames")
    configs, offset, config = packet_places(boxes, size)
    configs = tuple(map(with_size, configs))
    outside = (offset < 0) | (offset > file_size - size)
    if outside.any():
        first = int(np.argmax(outside))
        raise DecodeError(
            f"sample {first} of {n} must end within the {file_size} bytes of the file, got bytes {offset[first]} to "
            f"{offset[first] + size[first]}. The file is truncated or its index is broken, so fetch or record it again"
        )
    timescale = ticks_per_second(moov, required(moov, *track, b"mdia", b"mdhd"))
    if not timescale:
        raise DecodeError("the timescale must be positive, got 0")
    codec = codec_of(configs[0])
    pts, displayed = apply_edit_list(moov, track, presentation_times(boxes, n), timescale, codec)
    keyframes = sync_packets(boxes, n, codec)
    if len(keyframes) > 1 and codec == "h264":
        begin, length = int(offset[keyframes[1]]), int(size[keyframes[1]])
        if is_intra_refresh(configs[0], store.read(path, begin, begin + min(length, SLICE_HEAD))):
            keyframes = keyframes[:1]  # only the first keyframe of a file with intra refresh is decodable on its own
    preambles = [b""] * len(configs)
    for number in filter(lambda number: depends_on_encoder(configs[number]), range(len(configs))):
        first = int(np.argmax(config == number))
        begin, length = int(offset[first]), int(size[first])
        data = store.read_again(path, begin, begin + min(length, SLICE_HEAD))
        preambles[number] = preamble_of(configs[number], data) or b""
    index = video_index(
        path, configs, track_header(moov, track), timescale, offset=offset, size=size, pts=pts, keyframes=keyframes,
        config=config, index_bytes=len(moov), displayed=displayed,
        moov_hash=xxhash.xxh3_128_hexdigest(moov), preambles=tuple(preambles),
    )  # fmt: skip
    _check(index)
    return index


def _check(index: VideoIndex) -> None:
    """Check that times are unique, hidden frames are at the ends of the file, and no GOP has several sample descriptions.

    Raises:
        DecodeError: If a check fails. A hidden frame is also refused if it is in a GOP after that of the first displayed frame,
            or before that of the last one: a broken time may hide a frame between displayed ones.
    """
    if (np.diff(index.shown_at()) == 0).any():
        raise DecodeError("the index displays two frames at the same time (stts, ctts), which makes a timestamp ambiguous")
    if index.hidden:
        gops = index.gop(index.display_order)
        start, stop = index.displayed.start, index.displayed.stop
        if (gops[:start] > gops[start]).any() or (gops[stop:] < gops[stop - 1]).any():
            raise DecodeError("the index must hide frames at the ends of the file only (elst, ctts). Record the file again")
    if len(index.configs) > 1 and (index.config != index.config[index.gop_start(np.arange(len(index)))]).any():
        raise DecodeError("the sample description (stsd) changes between frames that are decoded together (stsc, stss)")

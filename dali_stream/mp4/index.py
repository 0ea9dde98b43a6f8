"""Index of an MP4's video track: the position of each packet, the display time of its frame, and the GOPs.

`read_index` makes it from the tables of a file, see `sample_tables` and `display`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dali_stream.checks.arrays import Float64, Int64
from dali_stream.errors import DecodeError
from dali_stream.mp4.boxes import COPY, find, has_fragments, read_moov
from dali_stream.mp4.column import Column, Line, packed
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
    """Index of the n packets of one file, in decode order. `read_index` creates it. The columns are compressed, see `Column`.

    Attributes:
        path: Path of the file, relative to the dataset.
        configs: Sample descriptions (`stsd` entries without their bit rates). A clip contains packets of only one of them.
        track_header: Matrix and display size, as at the end of `tkhd`. The matrix of the movie is applied.
        timescale: Number of ticks per second.
        offset: Position of each packet in the file, in bytes, shape (n,).
        end: Position after each packet in the file, in bytes, shape (n,).
        contiguous: Whether all packets are stored end to end. `offset` and `end` then share their memory.
        shown_at: Presentation times in ticks, in increasing order, shape (n,). The edit list is applied.
        displayed: Places in `display_order` of the displayed frames. The edit list hides the other frames, which are only
            decoded if a displayed frame depends on them. A file that was cut without encoding it again has such frames.
        keyframes: Packets at which decoding can start, shape (k,).
        config: Index of each packet's sample description in `configs`, shape (n,).
        display_order: Packets in the order in which their frames are displayed, shape (n,).
        display_place: Place of each packet in `display_order`, shape (n,).
        reordered: Whether display order and decode order differ (B-frames).
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
    offset: Column
    end: Column
    contiguous: bool
    shown_at: Column
    displayed: range
    keyframes: Column
    config: Column
    display_order: Column
    display_place: Column
    reordered: bool
    open_gops: bool
    longest_gop: int
    index_bytes: int
    moov_hash: str
    preambles: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def nbytes(self) -> int:
        """Memory of the index in bytes: 4 per frame for contiguous packets at a constant rate, and up to 16 for others."""
        columns = sum(value.nbytes for value in vars(self).values() if isinstance(value, Column))
        return columns - (self.end.nbytes if self.contiguous else 0) + len(self.track_header) + 1024

    def size(self, packets: Any = slice(None)) -> Any:
        """Return the sizes of packets in bytes.

        Args:
            packets: Packet, or array or slice of packets. Default: all packets.
        """
        return self.end[packets] - self.offset[packets]

    def pts(self, packets: Any = slice(None)) -> Any:
        """Return the presentation times of packets in ticks. See `size` for the argument."""
        return self.shown_at[self.display_place[packets] if self.reordered else packets]

    def gop_start(self, packets: Any) -> Any:
        """Return the keyframe of the GOP of a packet, or of an array of packets."""
        return self.keyframes[self.keyframes.searchsorted(packets, "right") - 1]

    @property
    def hidden(self) -> int:
        """Number of frames that the edit list hides."""
        return len(self) - len(self.displayed)

    @property
    def displayed_packets(self) -> Int64:
        """Packets of the displayed frames, in display order."""
        packets: Int64 = self.display_order[self.displayed.start : self.displayed.stop]
        return packets

    @property
    def gop_lengths(self) -> Int64:
        """Number of frames of each GOP, shape (k,)."""
        return np.diff(self.keyframes[:], append=len(self))

    def format(self, number: int = 0) -> VideoFormat:
        """Return the format of frames as they are displayed, for one of `configs`.

        Raises:
            DecodeError: If the sample description is broken.
        """
        return as_displayed(describe(self.configs[number]), self.track_header)

    def is_contiguous(self, first: int, last: int) -> bool:
        """Return whether the packets from `first` to `last` are stored end to end in the file."""
        return self.contiguous or bool((self.offset[first + 1 : last + 1] == self.end[first:last]).all())

    def decode_starts(self, packets: Int64) -> Int64:
        """Return the keyframe at which decoding each packet starts.

        It is the keyframe of the packet's GOP. For a frame of an open GOP that is displayed before this keyframe, it is the
        keyframe of the previous GOP.

        Args:
            packets: Packets, of any shape.
        """
        if not packets.size:
            return packets
        # Only the keyframes of these packets are computed, since an episode is a small part of its file.
        begin, end = self.keyframes.searchsorted(np.array([packets.min(), packets.max()]), "right").tolist()
        keyframes = self.keyframes[max(begin - 1, 0) : max(end, 1)]
        head: Int64 = keyframes[keyframes.searchsorted(packets, "right") - 1]
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
        begin, end = np.clip(self.shown_at.searchsorted(np.array(ticks)), first, stop).tolist()
        begin, end = max(min(begin, end) - 2, first), min(end + 2, stop)
        shown = self.shown_at[begin:end] / self.timescale
        # Each time is between the frames `left` and `right`, or beyond the first or the last frame.
        right = np.minimum(np.maximum(shown.searchsorted(seconds), min(1, len(shown) - 1)), len(shown) - 1)
        left = np.maximum(right - 1, 0)
        before, after = np.abs(shown[left] - seconds), np.abs(shown[right] - seconds)
        is_after = after < before
        place: Int64 = np.where(is_after, right, left)
        packets = self.display_order[place + begin] if self.reordered else place + begin
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
    """Return an index, with its columns compressed. See `VideoIndex` for the arguments.

    The times `pts` are in decode order and in ticks, shape (n,). By default, all frames are displayed, and no packet names an
    encoder.
    """
    n = len(size)
    order: Column = Line(0, 1, n)
    place, shown_at = order, pts
    reordered = not (np.diff(pts) > 0).all()
    if reordered:
        packets = np.argsort(pts, kind="stable")
        order, place, shown_at = packed(packets), packed(np.argsort(packets)), pts[packets]
    end = offset + size
    contiguous = bool((offset[1:] == end[:-1]).all())
    if contiguous:  # each packet begins where the one before it ends, so both columns are parts of one
        edges = packed(np.append(offset, end[-1]))
        begins, ends = edges.part(0, n), edges.part(1, n + 1)
    else:
        begins, ends = packed(offset), packed(end)
    return VideoIndex(
        path, configs, track_header, timescale,
        offset=begins,
        end=ends,
        contiguous=contiguous,
        shown_at=packed(shown_at),
        displayed=range(n) if displayed is None else displayed,
        keyframes=packed(keyframes),
        config=packed(config) if len(configs) > 1 else Line(0, 0, n),
        display_order=order,
        display_place=place,
        reordered=reordered,
        open_gops=reordered and bool((np.minimum.reduceat(pts, keyframes) < pts[keyframes]).any()),
        longest_gop=int(np.diff(np.append(keyframes, n)).max()),
        index_bytes=index_bytes,
        moov_hash=moov_hash,
        preambles=preambles or (b"",) * len(configs),
    )  # fmt: skip


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
    if (np.diff(index.shown_at[:]) == 0).any():
        raise DecodeError("the index displays two frames at the same time (stts, ctts), which makes a timestamp ambiguous")
    if index.hidden:
        gops = index.gop_start(index.display_order[:])
        start, stop = index.displayed.start, index.displayed.stop
        if (gops[:start] > gops[start]).any() or (gops[stop:] < gops[stop - 1]).any():
            raise DecodeError("the index must hide frames at the ends of the file only (elst, ctts). Record the file again")
    config = index.config[:]
    if len(index.configs) > 1 and (config != config[index.gop_start(np.arange(len(index)))]).any():
        raise DecodeError("the sample description (stsd) changes between frames that are decoded together (stsc, stss)")

"""Index of an MP4's video track (ISO/IEC 14496-12, section 8): the position of each packet and the display time of its frame.

Files may be damaged or malicious, so each count is checked against the size of its table before memory is allocated.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError, counted
from dali_stream.mp4.boxes import UPRIGHT, box, children, find, read_moov
from dali_stream.mp4.column import Chosen, Column, Floor, Gaps, Line, Without, packed
from dali_stream.mp4.damage import is_intra_refresh
from dali_stream.mp4.format import VideoFormat, codec_of, describe, displayed
from dali_stream.storage import Store

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
LACKING = -1  # the packet of a row whose frame is missing in the video, see `timing`


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """Index of the n packets of one file, in decode order. `video_index` creates it. The columns are compressed, see `Column`.

    Attributes:
        path: Path of the file, relative to the dataset.
        configs: Sample descriptions (`stsd` entries without their bit rates). A clip contains packets of only one of them.
        track_header: Matrix and display size, as at the end of `tkhd`. The matrix of the movie is applied.
        timescale: Number of ticks per second.
        offset: Position of each packet in the file, in bytes, shape (n,).
        size: Size of each packet in bytes, shape (n,).
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
    """

    path: str
    configs: tuple[bytes, ...]
    track_header: bytes
    timescale: int
    offset: Column
    size: Column
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

    def __len__(self) -> int:
        return len(self.size)

    @property
    def nbytes(self) -> int:
        """Memory that the index takes, in bytes: 4 per frame for contiguous packets at a constant frame rate, and up to 16."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Column)) + len(self.track_header) + 1024

    @property
    def pts(self) -> Column:
        """Presentation time of each packet in ticks, shape (n,)."""
        return Chosen(self.shown_at, self.display_place) if self.reordered else self.shown_at

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
    def gop_start(self) -> Column:
        """Keyframe of each packet's GOP, shape (n,)."""
        return Floor(self.keyframes, len(self))

    @property
    def gop_lengths(self) -> Int64:
        """Number of frames of each GOP, shape (k,)."""
        return np.diff(np.append(self.keyframes, len(self)))

    def format(self, number: int = 0) -> VideoFormat:
        """Return the format of frames as they are displayed, for one of `configs`.

        Raises:
            DecodeError: If the sample description is broken.
        """
        return displayed(describe(self.configs[number]), self.track_header)

    def is_contiguous(self, first: int, last: int) -> bool:
        """Return whether the packets from `first` to `last` are stored end to end in the file."""
        if isinstance(self.size, Gaps):  # `video_index` uses `Gaps` only if all packets are contiguous
            return True
        offset = self.offset[first : last + 1]
        return bool((np.diff(offset) == self.size[first:last]).all())

    def decode_starts(self, samples: Int64) -> Int64:
        """Return the keyframe at which decoding each packet starts.

        It is the keyframe of the packet's GOP. For a frame of an open GOP that is displayed before this keyframe, it is the
        keyframe of the previous GOP.

        Args:
            samples: Packets, of any shape.
        """
        if not samples.size:
            return samples
        # Only the keyframes of these packets are computed, since an episode is a small part of its file.
        begin, end = self.keyframes.searchsorted(np.array([samples.min(), samples.max()]), "right").tolist()
        keyframes = self.keyframes[max(begin - 1, 0) : max(end, 1)]
        head: Int64 = keyframes[keyframes.searchsorted(samples, "right") - 1]
        if not self.open_gops:
            return head
        pts = self.pts
        before = self.gop_start[np.maximum(head - 1, 0)]
        return np.where(pts[samples] < pts[head], before, head)

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

    def consecutive(self, seconds: Float64, tolerance: float) -> tuple[Int64, Float64] | None:
        """Return the same packets as `nearest`, but faster, for consecutive frames at a constant rate: the usual episode.

        Args:
            seconds: Times in seconds, shape (m,).
            tolerance: Maximum distance between a time and its frame, in seconds.

        Returns:
            Packets and their display times in seconds, both of shape (m,). None if the frames are others, or farther away.
        """
        count = len(seconds)
        start = (float(seconds[0]) - tolerance) * self.timescale if count else np.nan
        if not abs(start) < _MOST_TICKS:
            return None
        first = max(int(self.shown_at.searchsorted(math.ceil(start))), self.displayed.start)
        end = first + count
        step = self.shown_at.step(first, end) if end <= self.displayed.stop else None
        # A frame within less than half a step is the nearest one. The limit is 0.4, since times are rounded.
        if step is None or not tolerance < 0.4 * step / self.timescale:
            return None
        shown = (self.shown_at[first] + step * np.arange(count)) / self.timescale
        if not np.abs(shown - seconds).max() <= tolerance:
            return None
        # The next frame may follow after less than a step, such as the first one of another recording in the same file.
        if end < self.displayed.stop and not self.shown_at[end] / self.timescale - seconds[-1] > abs(shown[-1] - seconds[-1]):
            return None
        return self.display_order[first : first + count], shown


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
) -> VideoIndex:
    """Return an index, with its columns compressed. See `VideoIndex` for the arguments.

    The times `pts` are in decode order and in ticks, shape (n,). By default, all frames are displayed.
    """
    n = len(size)
    reordered = not (np.diff(pts) > 0).all()
    order: Column = Line(0, 1, n)
    place, times = order, pts
    if reordered:
        places = np.argsort(pts, kind="stable")
        order, place, times = packed(places, 1), packed(np.argsort(places), 1), pts[places]
    ends = offset + size
    # Offsets grow by about the mean size per packet, so `packed` has to store only small differences from that.
    mean = int(ends[-1] - offset[0]) // n
    contiguous = bool((offset[1:] == ends[:-1]).all())
    # If the packets are stored end to end, their sizes are the differences of the offsets and are not stored.
    edges = packed(np.append(offset, ends[-1]), mean) if contiguous else packed(offset, mean)
    return VideoIndex(
        path, configs, track_header, timescale,
        offset=Without(edges) if contiguous else edges,
        size=Gaps(edges) if contiguous else packed(size),
        shown_at=packed(times),
        displayed=range(n) if displayed is None else displayed,
        keyframes=packed(keyframes),
        config=packed(config) if len(configs) > 1 else Line(0, 0, n),
        display_order=order,
        display_place=place,
        reordered=reordered,
        open_gops=reordered and bool((np.minimum.reduceat(pts, keyframes) < pts[keyframes]).any()),
        longest_gop=int(np.diff(np.append(keyframes, n)).max()),
        index_bytes=index_bytes,
    )  # fmt: skip


def read_index(store: Store, path: str) -> VideoIndex:
    """Read the index of a file from its `moov` box.

    For H.264, the beginning of the second keyframe is read as well, to check whether decoding can start at it.

    Raises:
        DecodeError: If the file is not an MP4, is truncated or fragmented, does not have exactly one video track, has an edit
            list of several parts, or if its index contradicts itself or the size of the file. The message names the file.
    """
    try:
        return _parse(store, path, read_moov(store, path), store.size(path))
    except DecodeError as error:
        raise DecodeError(f"{store.where(path)}: {error}") from error.__cause__
    except (struct.error, ValueError, OverflowError, IndexError) as error:
        raise DecodeError(f"{store.where(path)}: invalid index (moov): {error}") from error


def _parse(store: Store, path: str, moov: bytes, file_size: int) -> VideoIndex:
    track = _video_track(moov)
    stbl = find(moov, *track, b"mdia", b"minf", b"stbl")
    if stbl is None:
        raise DecodeError("the video track must have a sample table (stbl)")
    boxes = {kind: moov[start:end] for kind, start, end in children(moov, *stbl)}
    size = _sizes(boxes)
    n = len(size)
    if not n:
        fragmented = find(moov, 0, len(moov), b"mvex") is not None
        raise DecodeError(
            "fragmented MP4, whose index is spread over the file. Remux it with `ffmpeg -i IN -c copy OUT`"
            if fragmented
            else "the video track has no frames"
        )
    configs, offset, config = _places(boxes, size)
    outside = (offset < 0) | (offset > file_size - size)
    if outside.any():
        first = int(np.argmax(outside))
        raise DecodeError(
            f"sample {first} of {n} must end within the {file_size} bytes of the file, got bytes {offset[first]} to "
            f"{offset[first] + size[first]}. The file is truncated or its index is broken, so fetch or record it again"
        )
    mdhd = _required(find(moov, *track, b"mdia", b"mdhd"), "mdhd")
    timescale = struct.unpack_from(">I", moov, mdhd[0] + (20 if moov[mdhd[0]] == 1 else 12))[0]
    if not timescale:
        raise DecodeError("the timescale must be positive, got 0")
    pts = _presentation_times(boxes, n)
    pts, displayed = _edited(moov, track, pts, timescale, codec_of(configs[0]))
    sync = _sync(boxes, n)
    if len(sync) > 1 and codec_of(configs[0]) == "h264":
        begin = int(offset[sync[1]])
        if is_intra_refresh(configs[0], store.read(path, begin, begin + min(int(size[sync[1]]), _SLICE_HEAD))):
            sync = sync[:1]  # only the first keyframe of a file with intra refresh is decodable on its own
    tkhd = _required(find(moov, *track, b"tkhd"), "tkhd")
    index = video_index(
        path, configs, _oriented(moov, moov[tkhd[1] - 44 : tkhd[1]]), timescale,
        offset=offset, size=size, pts=pts, keyframes=sync, config=config, index_bytes=len(moov),
        displayed=displayed,
    )  # fmt: skip
    if (np.diff(index.shown_at) == 0).any():
        raise DecodeError("the index displays two frames at the same time (stts, ctts), which makes a timestamp ambiguous")
    _check_hidden(index)
    if len(configs) > 1 and (config != config[index.gop_start]).any():
        raise DecodeError("the sample description (stsd) changes between frames that are decoded together (stsc, stss)")
    return index


_SLICE_HEAD = 4096  # bytes of a packet that contain the header of its first slice


def _video_track(moov: bytes) -> tuple[int, int]:
    tracks = []
    for kind, start, end in children(moov, 0, len(moov)):
        if kind == b"trak":
            handler = find(moov, start, end, b"mdia", b"hdlr")
            if handler and moov[handler[0] + 8 : handler[0] + 12] == b"vide":
                tracks.append((start, end))
    if len(tracks) != 1:
        raise DecodeError(
            f"the file must have exactly one video track, got {len(tracks)}. "
            "Keep one with `ffmpeg -i IN -map 0:v:0 -c copy OUT`"
        )
    return tracks[0]


def _sizes(boxes: dict[bytes, bytes]) -> Int64:
    stsz = boxes.get(b"stsz")
    if stsz is None:
        raise DecodeError("the video track must have sample sizes (stsz)")
    fixed, n = struct.unpack_from(">II", stsz, 4)
    # A table of n sizes has 4 n bytes, which limits n. A single size for all packets takes no table, so n has a fixed limit:
    # packets of equal size are rare, and a box that claims millions of them is broken.
    if n > (len(stsz) - 12) // 4 and not (fixed and n <= 65536):
        raise DecodeError(f"invalid stsz table: must have the sizes of {n} samples, got {(len(stsz) - 12) // 4}")
    return np.full(n, fixed, np.int64) if fixed else np.frombuffer(stsz, ">u4", n, 12).astype(np.int64)


def _runs(boxes: dict[bytes, bytes], kind: bytes, columns: str) -> npt.NDArray[Any]:
    """Return the entries of a table box as a structured array.

    Args:
        boxes: Bodies of the boxes by kind.
        kind: Kind of the table box.
        columns: Names and types of the columns, such as "count:u4 delta:u4".
    """
    body = boxes[kind]
    count = struct.unpack_from(">I", body, 4)[0]
    dtype = np.dtype([(name, ">" + form) for name, form in (c.split(":") for c in columns.split())])
    if count > (len(body) - 8) // dtype.itemsize:
        raise DecodeError(f"invalid {kind.decode()} table: must have {count} entries, got {len(body)} bytes")
    return np.frombuffer(body, dtype, count, 8)


def _expand(values: npt.NDArray[Any], counts: npt.NDArray[Any], n: int, kind: str) -> Int64:
    counts = counts.astype(np.int64)
    if counts.sum() != n:
        raise DecodeError(f"invalid {kind} table: must describe {n} samples, got {counts.sum()}")
    return np.repeat(values.astype(np.int64), counts)


def _presentation_times(boxes: dict[bytes, bytes], n: int) -> Int64:
    if b"stts" not in boxes:
        raise DecodeError("the video track must have sample times (stts)")
    stts = _runs(boxes, b"stts", "count:u4 delta:u4")
    deltas = _expand(stts["delta"], stts["count"], n, "stts")
    pts = np.cumsum(deltas) - deltas
    if b"ctts" in boxes:
        ctts = _runs(boxes, b"ctts", "count:u4 shift:i4")  # signed in version 0 too, as FFmpeg reads and writes it
        pts = pts + _expand(ctts["shift"], ctts["count"], n, "ctts")
    return pts


def _sync(boxes: dict[bytes, bytes], n: int) -> Int64:
    if b"stss" not in boxes:
        return np.arange(n)  # without the table, decoding can start at every packet
    sync = _runs(boxes, b"stss", "sample:u4")["sample"].astype(np.int64) - 1
    if not len(sync) or sync[0] != 0 or sync[-1] >= n or (np.diff(sync) <= 0).any():
        raise DecodeError(f"invalid stss table (keyframes): must be 1, ... up to {n} in increasing order")
    return sync


def _places(boxes: dict[bytes, bytes], size: Int64) -> tuple[tuple[bytes, ...], Int64, npt.NDArray[np.int8]]:
    """Return the sample descriptions, and the offset and the description of each packet, both of shape (n,).

    A track is stored in chunks. `stco` or `co64` has the offset of each chunk, and `stsc` has the number of packets and the
    sample description for runs of chunks. The packets of a chunk are stored end to end.
    """
    configs = _descriptions(boxes)
    if b"stsc" not in boxes or not (b"stco" in boxes or b"co64" in boxes):
        raise DecodeError("the video track must have a chunk table (stsc with stco or co64)")
    kind, form = (b"stco", "u4") if b"stco" in boxes else (b"co64", "u8")
    chunk = _runs(boxes, kind, f"offset:{form}")["offset"].astype(np.int64)
    stsc = _runs(boxes, b"stsc", "first:u4 samples:u4 description:u4")
    first = stsc["first"].astype(np.int64) - 1
    if not len(first) or first[0] != 0 or (np.diff(first) <= 0).any() or first[-1] >= len(chunk):
        raise DecodeError(f"invalid stsc table: must cover {len(chunk)} chunks")
    description = stsc["description"].astype(np.int64) - 1
    if (description < 0).any() or (description >= len(configs)).any():
        raise DecodeError(f"invalid stsc table: must refer to the {len(configs)} sample descriptions of the file")
    chunks = np.diff(np.append(first, len(chunk)))
    per_chunk = np.repeat(stsc["samples"].astype(np.int64), chunks)
    if per_chunk.sum() != len(size):
        raise DecodeError(f"invalid stsc table: must place {len(size)} samples, got {per_chunk.sum()}")
    before = np.cumsum(size) - size  # total size of all packets before each packet
    # The offset of a packet is the offset of its chunk, plus the sizes of the packets before it in the chunk.
    chunk_first = np.cumsum(per_chunk) - per_chunk
    chunk_before = before[np.minimum(chunk_first, len(size) - 1)]
    offset = before + np.repeat(chunk - chunk_before, per_chunk)
    return configs, offset, np.repeat(np.repeat(description, chunks), per_chunk).astype(np.int8)


def _descriptions(boxes: dict[bytes, bytes]) -> tuple[bytes, ...]:
    stsd = boxes.get(b"stsd", b"")
    entries = []
    for kind, start, end in children(stsd, 8, len(stsd)) if len(stsd) > 8 else ():
        entry = stsd[start:end]
        if len(entry) < 78:
            raise DecodeError(f"sample description {kind!r} must have at least 78 bytes, got {len(entry)}")
        # The bit rate differs between files and is irrelevant for decoding. Without it, files can share clips.
        parts = [box(k, entry[a:b]) for k, a, b in children(entry, 78, len(entry)) if k != b"btrt"]
        entries.append(box(kind, entry[:78], *parts))
    if not 0 < len(entries) <= 127:  # `_places` stores their numbers as int8
        raise DecodeError(f"the file must have 1 to 127 sample descriptions (stsd), got {len(entries)}")
    return tuple(entries)


def _edited(moov: bytes, track: tuple[int, int], pts: Int64, timescale: int, codec: str) -> tuple[Int64, range]:
    """Apply the edit list, which may have one part at rate 1 after an optional delay, as FFmpeg does.

    A frame is displayed if its presentation time is in the part. The first displayed frame has the time of the delay, also if
    the part begins inside the frame before it. All other frames keep their distance from it.

    Args:
        moov: Body of the `moov` box.
        track: Range of the video track in `moov`.
        pts: Presentation times without the edit list in ticks, in decode order, shape (n,).
        timescale: Number of ticks per second.
        codec: Codec of the file, for the message.

    Returns:
        Presentation times in ticks, shape (n,), and the places of the displayed frames in display order.

    Raises:
        DecodeError: If the edit list has more than one part, changes the rate, or hides all frames.
    """
    elst = find(moov, *track, b"edts", b"elst")
    if elst is None:
        return pts, range(len(pts))
    body = moov[elst[0] : elst[1]]
    form = "duration:u8 media:i8" if body[0] == 1 else "duration:u4 media:i4"
    edits = _runs({b"elst": body}, b"elst", f"{form} rate:i2 fraction:i2")
    mvhd = _required(find(moov, 0, len(moov), b"mvhd"), "mvhd")
    movie = struct.unpack_from(">I", moov, mvhd[0] + (20 if moov[mvhd[0]] == 1 else 12))[0]
    delays = edits["media"] == -1
    parts = edits[~delays]
    if len(parts) == 0:
        return pts, range(len(pts))
    if len(parts) > 1 or delays[-1] or parts["rate"][0] != 1 or not movie:
        raise DecodeError(
            f"the edit list must be one part at rate 1, perhaps delayed, got {counted(len(parts), 'part')}. "
            f"{_encode_again(codec)}"
        )
    # Durations are in ticks of the movie. They are rounded to the nearest tick of the track, as FFmpeg rounds them.
    *waits, length = [(int(ticks) * timescale + movie // 2) // movie for ticks in edits["duration"]]
    start = int(parts["media"][0])
    before = int((pts < start).sum())
    after = int((pts >= start + length).sum()) if length else 0  # without a length, the part ends with the track
    displayed = range(before, len(pts) - after)
    if not displayed:
        raise DecodeError(f"the edit list must display a frame, got {counted(len(pts), 'hidden frame')}. Record the file again")
    return pts - int(pts[pts >= start].min()) + sum(waits), displayed


def _oriented(moov: bytes, track_header: bytes) -> bytes:
    """Return the end of `tkhd`, with the matrix of the movie (`mvhd`) applied to that of the track, as in FFmpeg."""
    mvhd = find(moov, 0, len(moov), b"mvhd") or (0, 0)
    movie = moov[mvhd[0] : mvhd[1]]
    movie = movie[48:84] if movie[:1] == b"\1" else movie[36:72]
    if movie == UPRIGHT:
        return track_header
    if not any(movie):  # FFmpeg then turns no frames, whatever the matrix of the track
        return UPRIGHT + track_header[36:]
    track, whole = (np.frombuffer(part, ">i4", 9).astype(np.int64).reshape(3, 3) for part in (track_header, movie))
    # The entries of the first two columns are fixed-point numbers with 16 bits after the point, and those of the third with 30.
    product = ((track[:, :, None] * whole) >> np.array([16, 16, 30])[:, None]).sum(1)
    return product.astype(">i4").tobytes() + track_header[36:]


def _check_hidden(index: VideoIndex) -> None:
    """Check that hidden frames are at the ends of the file. A broken time may hide a frame between displayed ones.

    Raises:
        DecodeError: If a hidden frame is in a GOP after that of the first displayed frame, or before that of the last one.
    """
    if not index.hidden:
        return
    gops = index.gop_start[index.display_order[:]]
    start, stop = index.displayed.start, index.displayed.stop
    if (gops[:start] > gops[start]).any() or (gops[stop:] < gops[stop - 1]).any():
        raise DecodeError("the index must hide frames at the ends of the file only (elst, ctts). Record the file again")


def _encode_again(codec: str) -> str:
    """Return how to write a file without an edit list of several parts: the frames that FFmpeg displays, at the same times."""
    # FFmpeg 5.1 displays hidden frames of AV1 if it decodes with libdav1d, its default.
    decoder = "-c:v libaom-av1 " if codec == "av1" else ""
    return (
        f"Encode its displayed frames again: `ffmpeg {decoder}-copyts -i IN -map 0:v:0 -fps_mode passthrough "
        "-enc_time_base -1 -c:v libx264 -crf 18 OUT`, or record it again"
    )


def _required(body: tuple[int, int] | None, kind: str) -> tuple[int, int]:
    if body is None:
        raise DecodeError(f"the file must have a box {kind!r}")
    return body

"""MP4 files that consist of packets copied from other MP4 files, with new times.

Source files are cut at keyframes, so each new file begins with a keyframe and has no gaps. A source file with open GOPs is
copied as a whole, since decoders do not agree on which of its packets a frame requires. All parts of a new file have the
same timescale, track matrix, display size and codec. Their sample descriptions may differ.

A new file has no edit list. Frames that the source's edit list hides are displayed in it, between the episodes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.errors import DecodeError
from dali_stream.mp4 import muxer
from dali_stream.mp4.damage import Damage
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.muxer import Track
from dali_stream.storage import Store
from dali_stream.tools.preparation.place import content_hash

RANGE = 8 << 20  # maximum bytes per request: large enough for few requests, and small enough to repeat after a failure
HOLE = 256 << 10  # maximum bytes between two packets that are fetched in one request


@dataclass
class PacketRange:
    """Packets [start, stop) of a source file.

    Attributes:
        first: Position of the first of these packets in the new file.
        shift: Number of ticks to add to their times.
        begin: Time in ticks at which the earliest of its episodes begins. The rows of its first frames may have been removed.
    """

    index: VideoIndex
    start: int
    stop: int
    first: int = 0
    shift: int = 0
    begin: float = math.inf

    @property
    def preamble(self) -> bytes:
        """Bytes to put before the first packet, which name the encoder (see `mp4.preamble`), unless the packet does so."""
        return self.index.preambles[self.index.config[self.start]] if self.start else b""

    def times(self, fps: float) -> Int64:
        """Return the times of the packets in the source, in ticks. Hidden frames are moved away from the displayed ones.

        The first displayed frame may follow a hidden one at any distance. If the distance is less than a frame, the hidden
        frames are moved, so that no row of the new file, which has no edit list, is nearest to one of them.
        """
        place, displayed = self.index.place(np.arange(self.start, self.stop)), self.index.displayed
        pts: Int64 = self.index.pts(slice(self.start, self.stop))
        hidden = (place < displayed.start, -1, displayed.start), (place >= displayed.stop, 1, displayed.stop)
        for is_hidden, sign, edge in hidden:
            if is_hidden.any():
                distance = int(self.index.shown_at(edge) - self.index.shown_at(edge - 1))
                pts = pts + sign * is_hidden * max(frame_ticks(self.index, fps) - distance, 0)
        return pts


def kind(index: VideoIndex) -> str:
    """Return a digest of the properties that all sources of a new file must share."""
    codecs = sorted({config[4:8] for config in index.configs})
    parts: list[Any] = [index.timescale, index.track_header.hex(), codecs]
    # FFmpeg remembers the encoder of the first part and, for MPEG-4, the first sample description.
    if any(index.preambles) or b"mp4v" in codecs:
        parts += [index.configs, index.preambles]
    if index.open_gops:
        # Frames that are displayed before the first keyframe depend on packets that the file lacks. A file with such frames is
        # not joined with others, since a decoder could treat them differently after the packets of another file.
        leads = (index.pts(slice(index.keyframes[1] if len(index.keyframes) > 1 else None)) < index.pts(0)).any()
        parts += [index.configs, index.path if leads else ""]
    return content_hash(repr(parts).encode())


def needed(index: VideoIndex, packets: Int64) -> tuple[int, int]:
    """Return the range [start, stop) of whole GOPs that are needed to decode some packets."""
    after = int(index.gop(packets.max())) + 1
    stop = int(index.keyframes[after]) if after < len(index.keyframes) else len(index)
    return int(index.decode_starts(packets).min()), stop


def since(index: VideoIndex, start: float, shown: Int64) -> Int64:
    """Return the packets of an episode's rows, and those from its start to its first row, whose rows were removed.

    Without these, a new file would have a gap before the episode. LeRobot counts frames, so it cannot read such a file.

    Args:
        index: Index of the file.
        start: Time at which the episode begins, in seconds.
        shown: Packets of the rows.
    """
    first, stop = index.displayed.start, int(index.place(shown[:1])[0])
    before = index.shown_at(slice(first, stop)) / index.timescale >= start - 0.5 / index.timescale
    return np.append(index.display_order[first:stop][before], shown)


def add(runs: list[PacketRange], index: VideoIndex, packets: Int64) -> PacketRange:
    """Return the run that contains the packets of an episode. If necessary, extend the last run or append a new one.

    Args:
        runs: Runs of the new file so far. The list is changed in place.
        index: Index of the episode's source file.
        packets: Packets of the episode.
    """
    start, stop = (0, len(index)) if index.open_gops else needed(index, packets)
    for run in runs:
        if run.index.path == index.path and run.start <= start and stop <= run.stop:
            return run
    if runs and runs[-1].index.path == index.path and runs[-1].start <= start <= runs[-1].stop:
        runs[-1].stop = stop
    else:
        runs.append(PacketRange(index, start, stop))
    return runs[-1]


def frame_ticks(index: VideoIndex, fps: float) -> int:
    """Return the usual duration of a frame in ticks."""
    intervals = np.diff(index.shown_at())
    return int(np.median(intervals)) if len(intervals) else max(1, round(index.timescale / fps))


def join(runs: Sequence[PacketRange], fps: float) -> int:
    """Set `first` and `shift` so that runs follow each other. Return the duration of the last frame, in ticks.

    If an episode begins before its first frame, a gap precedes the run in the file. Otherwise, the episode would begin before
    the end of the previous one. Video may have more frames per second than the dataset, whose tolerance is up to half a frame.
    The last frame of a run takes longer than this, so that it is not counted to the next episode. See `find_packets`.
    """
    packet = tick = frame = 0
    for run in runs:
        pts, frame = run.times(fps), max(frame_ticks(run.index, fps), int(run.index.timescale / fps / 2) + 1)
        gap = int(pts.min()) - min(run.begin, pts.min())
        tick += round(gap) if packet and gap > frame / 2 else 0
        run.first, run.shift = packet, tick - int(pts.min())
        packet += run.stop - run.start
        tick += int(np.ptp(pts)) + frame
    return frame


def descriptions(runs: Sequence[PacketRange]) -> tuple[bytes, ...]:
    """Return the sample descriptions of a new file."""
    return tuple(dict.fromkeys(config for run in runs for config in run.index.configs))


def write(
    file: Path, store: Store, runs: Sequence[PacketRange], pts: Sequence[Int64], timescale: int, header: bytes, last: int
) -> tuple[Track, str]:
    """Write an MP4 file.

    Args:
        file: Path of the new file.
        store: Storage of the source files.
        runs: Packets to copy.
        pts: New times of the packets of each run, in ticks.
        timescale, header, last: See `Track`.

    Returns:
        The track of the new file, and a digest of all packets.
    """
    configs = descriptions(runs)
    numbers = [np.array([configs.index(config) for config in run.index.configs]) for run in runs]
    size = [run.index.size(slice(run.start, run.stop)) for run in runs]
    for run, own in zip(runs, size, strict=True):
        own[0] += len(run.preamble)
    track = Track(
        timescale=timescale,
        header=header,
        configs=configs,
        size=np.concatenate(size),
        pts=np.concatenate(pts),
        sync=np.concatenate([np.isin(np.arange(run.start, run.stop), run.index.keyframes) for run in runs]),
        config=np.concatenate(
            [number[run.index.config[run.start : run.stop]] for number, run in zip(numbers, runs, strict=True)]
        ),
        last=last,
    )
    with open(file, "wb") as out:
        out.write(muxer.head(track))
        return track, _digest(_parts(store, runs), out.writelines)


def _parts(store: Store, runs: Sequence[PacketRange]) -> Iterator[list[memoryview]]:
    """Yield the packets of a new file, see `read_packets`."""
    for run in runs:
        parts = read_packets(store, run.index, run.start, run.stop)
        first, *others = next(parts)
        yield [memoryview(run.preamble + first) if run.preamble else first, *others]
        yield from parts


def read_back(store: Store, path: str, track: Track, digest: str) -> VideoIndex | None:
    """Return the index of a file that `write` has written, or None if its content differs from what was written.

    Args:
        store: Storage of the file.
        path: Path of the file.
        track, digest: Result of `write`.
    """
    index = read_index(store, path)
    same = (
        (index.timescale, index.track_header, index.configs) == (track.timescale, track.header, track.configs)
        and np.array_equal(index.keyframes, np.flatnonzero(track.sync))
        and np.array_equal(index.size(), track.size)
        and np.array_equal(index.pts(), track.pts)
        and np.array_equal(index.config, track.config)
        and _digest(read_packets(store, index, 0, len(index))) == digest
    )
    return index if same else None


def _digest(parts: Iterable[list[memoryview]], also: Any = lambda part: None) -> str:
    """Return a digest of packets. Also pass each part to a function, so that packets are read only once."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        also(part)
        for packet in part:
            digest.update(packet)
    return digest.hexdigest()


def read_packets(store: Store, table: VideoIndex, start: int, stop: int) -> Iterator[list[memoryview]]:
    """Yield the packets [start, stop) in decode order, in lists of packets that are read together.

    Args:
        store: Storage of the file.
        table: Index of the file.
        start, stop: Range of packets.

    Raises:
        DecodeError: If the file has become shorter since its index was read.
    """
    offset, end = table.offset.astype(np.int64), table.end.astype(np.int64)
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


def check_unchanged(store: Store, runs: Iterable[PacketRange]) -> None:
    """Check that local source files have not changed since their indices were read. Remote stores check this themselves.

    Raises:
        DecodeError: If a file has changed.
    """
    if not store.remote:
        for index in {run.index.path: run.index for run in runs}.values():
            if read_index(store, index.path).moov_hash != index.moov_hash:
                raise DecodeError(
                    f"{store.where(index.path)}: the file has changed while it was copied. Run the same command again"
                )


def check_packets(store: Store, table: VideoIndex, start: int, stop: int) -> None:
    """Check the packets [start, stop) of a source file.

    Decoders conceal damage, so it could no longer be detected after encoding.

    Raises:
        DecodeError: If a packet is damaged.
    """
    is_keyframe = np.isin(np.arange(len(table)), table.keyframes)
    damage = [Damage(store, table, config) for config in range(len(table.configs))]
    packets = itertools.chain.from_iterable(read_packets(store, table, start, stop))
    for number, data in enumerate(map(bytes, packets), start):
        if wrong := damage[table.config[number]].of(number, data, 0, len(data), bool(is_keyframe[number])):
            where = f"at bytes {table.offset[number]} to {table.offset[number] + len(data)}"
            raise DecodeError(f"the encoded frame {where} is damaged: {wrong}. Copy the file again")

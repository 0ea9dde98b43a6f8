"""Packed clips: small MP4s in memory with only the packets that decoding the requested frames requires.

    file A   |I p|I p|I p|I p|I p| ...        requests: A3 (packet 3 of file A), A7, B4
    file B   |I p|I p|I p| ...

    clip     |I p|I p|I|     the GOP prefixes of A3, A7 and B4, packed end to end
    frames    1   3   4      indices of the requested frames in the clip, in display order

Decoding starts at a keyframe and continues to the requested frame, so a request requires this prefix of its GOP. The packets of
a prefix stay in decode order. Times are rewritten to a constant frame rate, so that the time of a frame determines its index.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dali_stream.errors import DecodeError
from dali_stream.mp4 import hidden, keyframes
from dali_stream.mp4.damage import ZEROS, checker, is_padded
from dali_stream.mp4.format import codec_of
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.muxer import Track, head
from dali_stream.mp4.slices import is_idr
from dali_stream.observe.counters import Timed, untimed
from dali_stream.storage import Store

TIMESCALE, TICK = 15360, 512  # FFmpeg's timescale for 30 frames per second; any rate would do


@dataclass(frozen=True)
class Clip:
    """MP4 in memory.

    Attributes:
        data: Bytes of the file. It is a `bytearray`, because torch warns about buffers that are not writable.
        frames: Index of each requested frame in the clip, counted in display order. The list has the order of the requests.
        coded_frames: Number of frames in the clip.
    """

    data: bytearray
    frames: list[int]
    coded_frames: int


class UnsafeForNvdec(DecodeError):
    """A clip for NVDEC would contain hidden frames, or a GOP prefix would begin with a keyframe that is not an IDR frame."""


class _Run:
    """Packets of one file that are decoded one after the other, beginning with a keyframe.

    Args:
        index: Index of the file.
        start: Packet of the keyframe.
        stop: Last packet.
    """

    __slots__ = ("index", "packets", "ranks", "sizes")

    # Most runs have only a few frames, for which Python ints are faster than NumPy.
    def __init__(self, index: VideoIndex, start: int, stop: int) -> None:
        self.index = index
        self.packets: Sequence[int] = range(start, stop + 1)
        self.sizes: list[int] = index.size(slice(start, stop + 1)).tolist()
        if index.open_gops:
            # Frames of the first GOP that are displayed before its keyframe refer to frames before the run. No other frame
            # refers to them, so they are left out. If one of them is requested, `span` starts the run a GOP earlier.
            own = np.arange(start, stop + 1)
            own = own[(index.gop_start(own) != start) | (index.pts(own) >= index.pts(start))]
            self.packets, self.sizes = own.tolist(), index.size(own).tolist()
        self.ranks: Sequence[int] = range(len(self.sizes))  # place of each packet in display order within the run
        if index.reordered:
            # Ranks are counted within the run. In display order of the whole file, frames that were left out would be gaps.
            self.ranks = np.argsort(np.argsort(index.pts(np.array(self.packets)), kind="stable")).tolist()

    def rank(self, packet: int) -> int:
        """Return the place of a packet in display order within the run.

        Raises:
            DecodeError: If the packet was left out, because it refers to frames before the start of the file.
        """
        if packet not in self.packets:
            raise DecodeError(
                "the frame depends on frames before the start of the file, which was cut in the middle of an open GOP. "
                "Record or convert it again"
            )
        return self.ranks[self.packets.index(packet)]

    def read(self, store: Store) -> bytes:
        """Read the packets and return their bytes, in decode order.

        Raises:
            DecodeError: If the file has become shorter.
        """
        index, packets = self.index, self.packets
        first, last = packets[0], packets[-1]
        # One read is faster than a read for each packet, both remotely (a request each) and locally (a call each).
        if last - first == len(packets) - 1 and index.is_contiguous(first, last):
            begin = int(index.offset[first])
            parts = [(begin, begin + sum(self.sizes))]
        else:
            offsets = index.offset[np.array(packets)].tolist()
            parts = [(begin, begin + size) for begin, size in zip(offsets, self.sizes, strict=True)]
        data = [store.read(index.path, start, stop) for start, stop in parts]
        whole = data[0] if len(data) == 1 else b"".join(data)
        # A store returns fewer bytes if a range exceeds the file, and all later packets would then be at wrong offsets.
        if len(whole) != sum(self.sizes):
            raise DecodeError(
                f"bytes {parts[0][0]} to {parts[-1][1]} are incomplete, because the file has become shorter since its index "
                "was read. Open the dataset again"
            )
        return whole

    def check(self, store: Store, data: bytes, for_nvdec: bool, hidden_frames: bool) -> None:
        """Check the encoded frames, because decoders ignore most damage (see `damage`).

        Args:
            store: Store of the file.
            data: Bytes of the packets, as `read` returns them.
            for_nvdec, hidden_frames: See `pack`.

        Raises:
            UnsafeForNvdec: If `for_nvdec` is set and NVDEC would decode the frames wrongly.
            DecodeError: If a frame is damaged.
        """
        index, at, padded = self.index, 0, False
        config = index.configs[index.config[self.packets[0]]]
        check, codec = checker(config), codec_of(config) if for_nvdec else ""
        look = codec in hidden.CODECS and not hidden_frames
        if check is None and not look:
            return
        for packet, size in zip(self.packets, self.sizes, strict=True):
            wrong = check(data, at, at + size, at == 0) if check and size else ""
            padded = padded or (wrong == ZEROS and is_padded(store, index, packet))
            if wrong and not (wrong == ZEROS and padded):
                raise DecodeError(
                    f"the encoded frame at bytes {index.offset[packet]} to "
                    f"{index.offset[packet] + size} is damaged: {wrong}. Copy the file again, or exclude its episodes"
                )
            if look and hidden.hidden(codec, data[at : at + size]):
                place = f"the {codec} packet at byte {index.offset[packet]} has hidden frames"
                raise UnsafeForNvdec(f"{hidden.hidden_frames_refusal(codec)} ({place})")
            at += size
        if codec in keyframes.CODECS and not is_idr(config, data[: self.sizes[0]]):
            place = f"the keyframe at byte {index.offset[self.packets[0]]}"
            raise UnsafeForNvdec(f"{keyframes.other_keyframes_refusal(codec)} ({place})")


def pack(
    store: Store,
    indices: Sequence[VideoIndex],
    packets: Sequence[int],
    *,
    from_the_start: bool = False,
    for_nvdec: bool = False,
    hidden_frames: bool = False,
    timed: Timed = untimed,
) -> Clip:
    """Pack the packets that decoding the requested frames requires into one clip.

    Args:
        store: Store of the files.
        indices: Index of the file of each request. All requested packets must have the same sample description.
        packets: Packet of each request in its file. Requests may be repeated.
        from_the_start: Whether the clip starts at the first frame of the file. Default: False.
        for_nvdec: Whether to refuse frames that are decoded wrongly on NVDEC. Default: False.
        hidden_frames: Whether to accept hidden frames with `for_nvdec`, which only DALI decodes wrongly. Default: False.
        timed: Timer that measures reading. Default: no measurement.

    Returns:
        Clip whose `frames` are in the order of the requests.

    Raises:
        UnsafeForNvdec: If `for_nvdec` is set, and a packet has hidden frames or decoding starts at a keyframe that is not an
            IDR frame.
        DecodeError: If a file has open GOPs (see `VideoIndex.open_gops`) and the clip would have more than one run, if the
            sample descriptions differ, if a frame is damaged or depends on frames before the start of the file, or if a file
            has become shorter.
    """
    # Requests of the same file whose decoding starts at the same packet share a run, which ends with the last of their packets.
    stops: dict[tuple[int, int], int] = {}
    by_id = {id(index): index for index in indices}
    spans = [(0, max(packet, _stop(index, packet))) if from_the_start else span(index, packet)
             for index, packet in zip(indices, packets, strict=True)]  # fmt: skip
    keys = [(id(index), start) for index, (start, _) in zip(indices, spans, strict=True)]
    for key, (_, stop) in zip(keys, spans, strict=True):
        stops[key] = max(stops.get(key, 0), stop)
    # The keyframe of an open GOP need not reset the decoder (see `keyframes`), so the previous run would affect the frames of
    # the GOP.
    if len(stops) > 1 and any(index.open_gops for index in by_id.values()):
        raise DecodeError("frames of open GOPs cannot share a clip with others, because each GOP prefix needs its own clip")
    runs = {key: _Run(by_id[key[0]], key[1], stop) for key, stop in stops.items()}
    # If a file has one sample description, it applies to all packets. Otherwise, the first and the last packet of each run are
    # compared. `read_index` rejects files whose description changes within a GOP, and most runs have one or two GOPs.
    configs = {config(index, 0) for index in by_id.values() if len(index.configs) == 1}
    mixed = [run for run in runs.values() if len(run.index.configs) > 1]
    if len(configs.union(config(run.index, packet) for run in mixed for packet in (run.packets[0], run.packets[-1]))) > 1:
        raise DecodeError("frames of different sample descriptions (stsd) cannot share a clip")
    # The runs are displayed one after the other, so the index of a frame is its rank in its run plus the length of all earlier
    # runs.
    before = dict(zip(runs, itertools.accumulate((len(run.packets) for run in runs.values()), initial=0), strict=False))
    frames = [before[key] + runs[key].rank(packet) for key, packet in zip(keys, packets, strict=True)]
    data = _mux(store, list(runs.values()), for_nvdec, hidden_frames, timed)
    return Clip(data, frames, sum(len(run.packets) for run in runs.values()))


def config(index: VideoIndex, packet: int) -> tuple[bytes, bytes]:
    """Return what all packets of a clip must have in common: the sample description, and the matrix and size of the track."""
    return index.configs[index.config[packet]], index.track_header


def span(index: VideoIndex, packet: int) -> tuple[int, int]:
    """Return the first and the last packet that decoding the frame of a packet requires.

    A frame that follows the keyframe of an open GOP, but is displayed before it, also depends on the previous GOP.
    """
    start = int(index.gop_start(packet))
    if not index.open_gops:
        return start, packet
    if index.pts(packet) < index.pts(start) and start > 0:
        start = int(index.gop_start(start - 1))
    # FFmpeg drops no frames of a clip that starts at the beginning of the file (see `_stop`), so such a clip needs no further
    # packets.
    return (start, _stop(index, packet)) if is_avc(index) and start > 0 else (start, packet)


def is_avc(index: VideoIndex) -> bool:
    """Return whether the codec is H.264."""
    return index.configs[0][4:8] in (b"avc1", b"avc3")


def _stop(index: VideoIndex, packet: int) -> int:
    """Return the last packet to decode for a frame of an open GOP of H.264.

    FFmpeg delays the output of frames. If a clip does not start with an IDR frame, FFmpeg drops the frames that are still
    delayed when the clip ends. The clip therefore continues until `_HELD_BACK` frames with later display times are decoded.
    """
    # H.264 reorders at most 16 frames, so 64 packets are enough to find them.
    later = np.flatnonzero(index.pts(slice(packet + 1, packet + 65)) > index.pts(packet))[:_HELD_BACK]
    return packet + 1 + int(later[-1]) if len(later) else packet


# Encoders with hierarchical B-frames delay frames by two or three. If FFmpeg delays more and decoding fails, the CPU route
# (`torchcodec.decode_in_parts`) decodes again from the start of the file.
_HELD_BACK = 4


def _mux(store: Store, runs: list[_Run], for_nvdec: bool, hidden_frames: bool, timed: Timed) -> bytearray:
    index, first = runs[0].index, runs[0].packets[0]
    begins = list(itertools.accumulate((len(run.packets) for run in runs), initial=0))
    sync = np.zeros(begins.pop(), np.bool_)
    # Only the first packet of each run is marked as a keyframe. A run may also contain the keyframe of an open GOP. If that
    # were marked, a decoder could seek to it, and lose the frames that follow it but are displayed before it.
    sync[begins] = True
    track = Track(
        TIMESCALE,
        index.track_header,
        (index.configs[index.config[first]],),
        size=np.array([size for run in runs for size in run.sizes]),
        pts=TICK * np.array([begin + rank for begin, run in zip(begins, runs, strict=True) for rank in run.ranks]),
        sync=sync,
        config=np.zeros(len(sync), np.int64),
        last=TICK,
    )
    with timed("read_s"):  # once per clip and not per run, because timing takes as long as a local read
        body = [run.read(store) for run in runs]
    for run, data in zip(runs, body, strict=True):
        run.check(store, data, for_nvdec, hidden_frames)
    return bytearray().join((head(track), *body))

"""Packed clips: small MP4s in memory with only the packets that decoding the requested frames requires.

    file A   |I p|I p|I p|I p|I p| ...        requests: A3 (packet 3 of file A), A7, B4
    file B   |I p|I p|I p| ...

    clip     |I p|I p|I|     the GOP prefixes of A3, A7 and B4, packed end to end
    frames    1   3   4      indices of the requested frames in the clip, in display order

Decoding starts at a keyframe and continues to the requested frame, so a request requires this prefix of its GOP. The packets of
a prefix stay in decode order. Times are rewritten to a constant frame rate, so that the time of a frame determines its index.
If decoding depends on the encoder, bytes that name it precede the first packet (see `preamble`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dali_stream.errors import DecodeError
from dali_stream.mp4 import hidden, keyframes
from dali_stream.mp4.boxes import encode_again
from dali_stream.mp4.damage import Damage
from dali_stream.mp4.format import codec_of
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.muxer import Track, head
from dali_stream.mp4.preamble import depends_on_encoder, preamble_of
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
        hashes: For each request, {packet of its GOP prefix: hash of the prefix up to it}. Empty unless they were requested. See
            `packet_hashes`.
        keyframes: Indices of the keyframes at which decoding continues although they are not marked as keyframes. Whoever
            decodes the clip also decodes these, and compares their times. If one of them were lost, the frames after it would
            be decoded against another GOP without an error. Empty unless the clip is for NVDEC.
    """

    data: bytearray
    frames: list[int]
    coded_frames: int
    hashes: list[Mapping[int, int]] = field(default_factory=list)
    keyframes: list[int] = field(default_factory=list)


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

    def hashes(self, data: bytes, start: int) -> dict[int, int]:
        """Return {packet whose decoding starts at a keyframe: hash of the packets of this run from the keyframe to it}.

        The preamble counts as well. The hashes do not depend on the run. They have 64 bits, and are never 0.

        Args:
            data: Bytes of the packets, as `read` returns them.
            start: The keyframe.
        """
        index, view = self.index, memoryview(data)
        own = self if start == self.packets[0] else _Run(index, start, self.packets[-1])
        places = dict(zip(self.packets, itertools.accumulate(self.sizes, initial=0), strict=False))
        hashes, digest = {}, hashlib.blake2b(config(index, start)[-1], digest_size=8)
        for packet, size in zip(own.packets, own.sizes, strict=True):
            digest.update(view[places[packet] : places[packet] + size])
            hashes[packet] = int.from_bytes(digest.digest(), "little") or 1
        if index.open_gops or index.gop_start(own.packets[-1]) != start:  # the run has other packets as well
            starts = index.decode_starts(np.array(own.packets)).tolist()
            hashes = {
                packet: hashes[packet] for packet, its_start in zip(own.packets, starts, strict=True) if its_start == start
            }
        return hashes

    def check(self, store: Store, data: bytes, for_nvdec: bool, hidden_frames: bool) -> None:
        """Check the encoded frames, because decoders ignore most damage (see `damage`).

        Args:
            store: Store of the file.
            data: Bytes of the packets, as `read` returns them.
            for_nvdec, hidden_frames: See `pack`.

        Raises:
            UnsafeForNvdec: If `for_nvdec` is set and NVDEC would decode the frames wrongly.
            DecodeError: If a frame is damaged, or written by another encoder than the first one.
        """
        index, at = self.index, 0
        number = index.config[self.packets[0]]
        description = index.configs[number]
        damage, codec = Damage(store, index, number), codec_of(description) if for_nvdec else ""
        look = codec in hidden.CODECS and not hidden_frames
        if not damage.exists and not look:
            return
        names_encoder = depends_on_encoder(description)
        for packet, size in zip(self.packets, self.sizes, strict=True):
            if names_encoder and preamble_of(description, data[at : at + size]) not in (None, index.preambles[number]):
                raise DecodeError(
                    f"the encoded frame at bytes {index.offset[packet]} to {index.offset[packet] + size} is of another encoder "
                    "than the first one, and FFmpeg undoes the errors of one of them. Encode the file again: "
                    f"{encode_again(codec_of(description))}"
                )
            if wrong := damage.of(packet, data, at, at + size, at == 0):
                raise DecodeError(
                    f"the encoded frame at bytes {index.offset[packet]} to "
                    f"{index.offset[packet] + size} is damaged: {wrong}. Copy the file again, or exclude its episodes"
                )
            if look and hidden.hidden(codec, data[at : at + size]):
                place = f"the {codec} packet at byte {index.offset[packet]} has hidden frames"
                raise UnsafeForNvdec(f"{hidden.hidden_frames_refusal(codec)} ({place})")
            at += size
        if codec in keyframes.CODECS and not is_idr(description, data[: self.sizes[0]]):
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
    hashed: bool = False,
    timed: Timed = untimed,
) -> Clip:
    """Pack the packets that decoding the requested frames requires into one clip.

    Args:
        store: Store of the files.
        indices: Index of the file of each request. All requested packets must have the same `config`.
        packets: Packet of each request in its file. Requests may be repeated.
        from_the_start: Whether the clip starts at the first frame of the file. Default: False.
        for_nvdec: Whether to refuse frames that are decoded wrongly on NVDEC, and to mark only the first packet of the clip as
            a keyframe. Default: False.
        hidden_frames: Whether to accept hidden frames with `for_nvdec`, which only DALI decodes wrongly. Default: False.
        hashed: Whether to compute `Clip.hashes`. Default: False.
        timed: Timer that measures reading. Default: no measurement.

    Returns:
        Clip whose `frames` are in the order of the requests.

    Raises:
        UnsafeForNvdec: If `for_nvdec` is set, and a packet has hidden frames or decoding starts at a keyframe that is not an
            IDR frame.
        DecodeError: If a file has open GOPs (see `VideoIndex.open_gops`) and the clip would have more than one run, if the
            sample descriptions or encoders differ, if a frame is damaged or depends on frames before the start of the file, or
            if a file has become shorter.
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
        raise DecodeError("frames of different sample descriptions (stsd) or encoders cannot share a clip")
    # The runs are displayed one after the other, so the index of a frame is its rank in its run plus the length of all earlier
    # runs.
    before = dict(zip(runs, itertools.accumulate((len(run.packets) for run in runs.values()), initial=0), strict=False))
    frames = [before[key] + runs[key].rank(packet) for key, packet in zip(keys, packets, strict=True)]
    with timed("read_s"):  # once per clip and not per run, because timing takes as long as a local read
        data = {key: run.read(store) for key, run in runs.items()}
    for key, run in runs.items():
        run.check(store, data[key], for_nvdec, hidden_frames)
    hashes = list[Mapping[int, int]]()
    if hashed:
        starts = [span(index, packet)[0] for index, packet in zip(indices, packets, strict=True)]
        each = {(key, start): runs[key].hashes(data[key], start) for key, start in set(zip(keys, starts, strict=True))}
        hashes = [each[key, start] for key, start in zip(keys, starts, strict=True)]
    coded_frames = sum(len(run.packets) for run in runs.values())
    # torchcodec seeks to marked keyframes and then flushes the decoder, which takes NVDEC about 200 µs. IDR frames and the
    # keyframes of other codecs reset decoders as well, so frames are right without it. The CPU's clips keep the marks, because
    # FFmpeg conceals damage that no check finds with the previous frame, which could then more often be of another GOP.
    unmarked = list(before.values())[1:] if for_nvdec else []
    return Clip(_mux(list(runs.values()), list(data.values()), unmarked), frames, coded_frames, hashes, unmarked)


def packet_hashes(store: Store, index: VideoIndex, packets: Sequence[int]) -> dict[int, int]:
    """Read the GOP prefixes of packets, and return the hash of each packet in them. Nothing is decoded.

    Returns:
        {packet: hash of the bytes of all packets from which its frame is decoded}, with 64 bits, never 0. It has the given
        packets, and those between them and their keyframes. If a server chooses its bytes, it cannot find others with the same
        hash (BLAKE2, RFC 7693).

    Raises:
        DatasetError, StorageError: If the file cannot be read.
        DecodeError: If the file has become shorter.
    """
    stops: dict[int, int] = {}
    for packet in packets:
        start = span(index, packet)[0]
        stops[start] = max(stops.get(start, 0), packet)
    hashes: dict[int, int] = {}
    for start, stop in stops.items():
        run = _Run(index, start, stop)
        hashes |= run.hashes(run.read(store), start)
    return hashes


def config(index: VideoIndex, packet: int) -> tuple[bytes, bytes, bytes]:
    """Return what all packets of a clip share: the sample description, the matrix and size of the track, and the preamble."""
    number = index.config[packet]
    return index.configs[number], index.track_header, index.preambles[number]


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


def _mux(runs: list[_Run], body: list[bytes], unmarked: list[int]) -> bytearray:
    index, first = runs[0].index, runs[0].packets[0]
    begins = list(itertools.accumulate((len(run.packets) for run in runs), initial=0))
    sync = np.zeros(begins.pop(), np.bool_)
    # At most the first packet of each run is marked as a keyframe. A run may also contain the keyframe of an open GOP. If that
    # were marked, a decoder could seek to it, and lose the frames that follow it but are displayed before it.
    sync[begins] = True
    sync[unmarked] = False
    description, track_header, preamble = config(index, first)
    sizes = [size for run in runs for size in run.sizes]
    sizes[0] += len(preamble)
    track = Track(
        TIMESCALE,
        track_header,
        (description,),
        size=np.array(sizes),
        pts=TICK * np.array([begin + rank for begin, run in zip(begins, runs, strict=True) for rank in run.ranks]),
        sync=sync,
        config=np.zeros(len(sync), np.int64),
        last=TICK,
    )
    return bytearray().join((head(track), preamble, *body))

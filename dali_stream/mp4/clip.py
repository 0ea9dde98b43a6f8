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

import bisect
import hashlib
import itertools
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dali_stream.errors import DecodeError
from dali_stream.mp4 import hidden, keyframes
from dali_stream.mp4.boxes import encode_again
from dali_stream.mp4.damage import Damage
from dali_stream.mp4.format import codec_of
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.muxer import Track, head
from dali_stream.mp4.preamble import depends_on_encoder, preamble_of
from dali_stream.mp4.slices import is_idr, own_sets
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


class _Stretch(NamedTuple):
    """Packets of one file that are stored end to end, so that one read returns all of them.

    Attributes:
        file: Index of the file.
        packets: The packets.
        sizes: Their sizes in bytes.
        start: Position of the first one in the file.
    """

    file: VideoIndex
    packets: Sequence[int]
    sizes: list[int]
    start: int

    def read(self, store: Store) -> bytes:
        """Return the bytes of the packets. Raises DecodeError if the file has become shorter."""
        stop = self.start + sum(self.sizes)
        data = store.read(self.file.path, self.start, stop)
        # A store returns fewer bytes if a range exceeds the file, and all later packets would then be at wrong offsets.
        if len(data) != stop - self.start:
            raise DecodeError(
                f"bytes {self.start} to {stop} are incomplete, because the file has become shorter since its index "
                "was read. Open the dataset again"
            )
        return data


def _decoded(index: VideoIndex, start: int, stop: int) -> Sequence[int]:
    """Return the packets from the keyframe `start` to the packet `stop` that are decoded."""
    if not index.open_gops:
        return range(start, stop + 1)
    # Frames of the first GOP that are displayed before its keyframe refer to frames before it. No other frame refers to them,
    # so they are left out. If one of them is requested, decoding starts a GOP earlier.
    own = np.arange(start, stop + 1)
    packets: list[int] = own[(index.gop_start(own) != start) | (index.pts(own) >= index.pts(start))].tolist()
    return packets


def _stretches(index: VideoIndex, packets: Sequence[int]) -> Iterator[_Stretch]:
    """Divide packets of a file into stretches."""
    own = slice(packets.start, packets.stop) if isinstance(packets, range) else packets
    starts, stops = index.offset[own].tolist(), index.end[own].tolist()
    sizes = list(map(operator.sub, stops, starts))
    # One read is faster than a read for each packet, both remotely (a request each) and locally (a call each).
    if starts[1:] == stops[:-1]:
        yield _Stretch(index, packets, sizes, starts[0])
        return
    edges = [0, *(i for i in range(1, len(packets)) if starts[i] != stops[i - 1]), len(packets)]
    for begin, end in itertools.pairwise(edges):
        yield _Stretch(index, packets[begin:end], sizes[begin:end], starts[begin])


def _by_packet(stretches: Iterable[_Stretch], data: Iterable[bytes]) -> dict[tuple[int, int], memoryview]:
    """Return {(id of the index, packet): bytes of the packet}."""
    result = {}
    for stretch, part in zip(stretches, data, strict=True):
        view, ends = memoryview(part), itertools.accumulate(stretch.sizes)
        for packet, size, end in zip(stretch.packets, stretch.sizes, ends, strict=True):
            result[id(stretch.file), packet] = view[end - size : end]
    return result


def _hashes(index: VideoIndex, start: int, stop: int, data: Mapping[tuple[int, int], memoryview]) -> dict[int, int]:
    """Return {packet up to `stop` whose decoding starts at a keyframe: hash of the packets from the keyframe to it}.

    The preamble counts as well. The hashes have 64 bits, and are never 0.

    Args:
        index: Index of the file.
        start: The keyframe.
        stop: Last packet.
        data: Result of `_by_packet`.
    """
    packets = _decoded(index, start, stop)
    hashes, digest = {}, hashlib.blake2b(config(index, start)[-1], digest_size=8)
    for packet in packets:
        digest.update(data[id(index), packet])
        hashes[packet] = int.from_bytes(digest.digest(), "little") or 1
    if index.open_gops or index.gop_start(packets[-1]) != start:  # decoding some of the packets starts elsewhere
        starts = index.decode_starts(np.array(packets)).tolist()
        hashes = {packet: hashes[packet] for packet, own in zip(packets, starts, strict=True) if own == start}
    return hashes


def _check(
    store: Store, stretch: _Stretch, data: bytes, starts: Container[tuple[int, int]], for_nvdec: bool, hidden_frames: bool
) -> set[tuple[bytes, ...]]:
    """Check encoded frames, because decoders ignore most damage (see `damage`).

    Args:
        store: Store of the file.
        stretch: The packets. They have one sample description.
        data: Their bytes.
        starts: (id of the index, packet) of all packets at which decoding starts.
        for_nvdec, hidden_frames: See `pack`.

    Returns:
        The results of `own_sets` for the packets at which decoding starts. Empty for codecs without parameter sets.

    Raises:
        UnsafeForNvdec: If `for_nvdec` is set and NVDEC would decode the frames wrongly.
        DecodeError: If a frame is damaged, or written by another encoder than the first one.
    """
    index, packets, sizes, place = stretch
    number = index.config[packets[0]]
    description = index.configs[number]
    damage, codec, sets = Damage(store, index, number), codec_of(description), set[tuple[bytes, ...]]()
    look, has_sets = for_nvdec and codec in hidden.CODECS and not hidden_frames, codec in keyframes.CODECS
    if not damage.exists and not look:
        return sets
    file, names_encoder, at = id(index), depends_on_encoder(description), 0
    for packet, size in zip(packets, sizes, strict=True):
        end, is_start = at + size, (file, packet) in starts
        if names_encoder and preamble_of(description, data[at:end]) not in (None, index.preambles[number]):
            raise DecodeError(
                f"the encoded frame at bytes {place + at} to {place + end} is of another encoder "
                "than the first one, and FFmpeg undoes the errors of one of them. Encode the file again: "
                f"{encode_again(codec_of(description))}"
            )
        if wrong := damage.of(packet, data, at, end, is_start):
            raise DecodeError(
                f"the encoded frame at bytes {place + at} to {place + end} is damaged: {wrong}. Copy the file again, or "
                "exclude its episodes"
            )
        if look and hidden.hidden(codec, data[at:end]):
            where = f"the {codec} packet at byte {place + at} has hidden frames"
            raise UnsafeForNvdec(f"{hidden.hidden_frames_refusal(codec)} ({where})")
        if has_sets and is_start:
            sets.add(own_sets(description, data[at:end]))
        if for_nvdec and has_sets and is_start and not is_idr(description, data[at:end]):
            where = f"the keyframe at byte {place + at}"
            raise UnsafeForNvdec(f"{keyframes.other_keyframes_refusal(codec)} ({where})")
        at = end
    return sets


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
        DecodeError: If a file has open GOPs (see `VideoIndex.open_gops`) and the clip would have more than one GOP prefix,
            if the sample descriptions, encoders or parameter sets differ, if a frame is damaged or depends on frames before the
            start of the file, or if a file has become shorter.
    """
    by_id = {id(index): index for index in indices}
    starts = [_start(index, packet) for index, packet in zip(indices, packets, strict=True)]
    # Requests of the same file whose decoding starts at the same packet share a GOP prefix, which ends with the last packet
    # that one of them needs.
    keys = [(id(index), 0 if from_the_start else start) for index, start in zip(indices, starts, strict=True)]
    stops: dict[tuple[int, int], int] = {}
    for index, packet, key in zip(indices, packets, keys, strict=True):
        stop = _stop(index, packet) if from_the_start else _last(index, packet, key[1])
        if stop > stops.get(key, -1):
            stops[key] = stop
    # The keyframe of an open GOP need not reset the decoder (see `keyframes`), so the previous prefix would affect the frames
    # of the GOP.
    open_gops = any(index.open_gops for index in by_id.values())
    if len(stops) > 1 and open_gops:
        raise DecodeError("frames of open GOPs cannot share a clip with others, because each GOP prefix needs its own clip")
    # If a file has one sample description, it applies to all packets. `read_index` rejects files whose description changes
    # within a GOP, and most prefixes have one or two GOPs, so the first and the last packet are compared.
    configs = {config(index, 0) for index in by_id.values() if len(index.configs) == 1}
    mixed = [(by_id[file], start, stop) for (file, start), stop in stops.items() if len(by_id[file].configs) > 1]
    if len(configs.union(config(index, packet) for index, *ends in mixed for packet in ends)) > 1:
        raise DecodeError("frames of different sample descriptions (stsd) or encoders cannot share a clip")
    decoded = [(by_id[file], _decoded(by_id[file], start, stop)) for file, start, stop in _runs(stops)]
    ranks = _ranks(decoded)
    # Places in the clip at which prefixes begin. The only prefix of a file with open GOPs may have fewer packets than counted.
    begins = list(itertools.accumulate((stop - start + 1 for (_, start), stop in stops.items()), initial=0))
    begin = dict(zip(stops, begins, strict=False))
    if open_gops:
        frames = [ranks[_place(decoded[0][1], packet)] for packet in packets]
    else:
        frames = [ranks[begin[key] + packet - key[1]] for key, packet in zip(keys, packets, strict=True)]
    stretches = [stretch for run in decoded for stretch in _stretches(*run)]
    with timed("read_s"):  # once per clip and not per read, because timing takes as long as a local read
        data = [stretch.read(store) for stretch in stretches]
    sets = set[tuple[bytes, ...]]()
    for stretch, part in zip(stretches, data, strict=True):
        sets |= _check(store, stretch, part, stops, for_nvdec, hidden_frames)
    # Decoders keep parameter sets until others replace them. If not all keyframes repeat them, those of one GOP prefix would
    # apply to the next one.
    if len(sets) > 1:
        raise DecodeError("frames with different parameter sets in the bitstream cannot share a clip")
    hashes = list[Mapping[int, int]]()
    if hashed:
        views = _by_packet(stretches, data)
        each = {
            (key, start): _hashes(by_id[key[0]], start, stops[key], views) for key, start in set(zip(keys, starts, strict=True))
        }
        hashes = [each[key, start] for key, start in zip(keys, starts, strict=True)]
    sizes = [size for stretch in stretches for size in stretch.sizes]
    index, first = decoded[0][0], decoded[0][1][0]
    # torchcodec seeks to marked keyframes and then flushes the decoder, which takes NVDEC about 200 µs. IDR frames and the
    # keyframes of other codecs reset decoders as well, so frames are right without it. The CPU's clips keep the marks, because
    # FFmpeg conceals damage that no check finds with the previous frame, which could then more often be of another GOP.
    marked, unmarked = ([0], begins[1:-1]) if for_nvdec else (begins[:-1], [])
    return Clip(_mux(index, first, sizes, ranks, marked, data), frames, len(sizes), hashes, unmarked)


def _runs(stops: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    """Return the (id of the index, first packet, last packet) of GOP prefixes. Neighbours in a file are joined.

    Args:
        stops: {(id of the index, first packet): last packet} of each prefix.
    """
    runs: list[tuple[int, int, int]] = []
    for (file, start), stop in stops.items():
        if runs and runs[-1][0] == file and runs[-1][2] + 1 == start:
            runs[-1] = file, runs[-1][1], stop
        else:
            runs.append((file, start, stop))
    return runs


def _ranks(decoded: Sequence[tuple[VideoIndex, Sequence[int]]]) -> Sequence[int]:
    """Return the place of each packet of a clip in display order. Runs of packets are displayed one after the other.

    Args:
        decoded: File and packets of each run.
    """
    if not any(index.reordered for index, _ in decoded):
        return range(sum(len(packets) for _, packets in decoded))
    ranks: list[int] = []
    for index, packets in decoded:
        # Ranks are counted within the run. In display order of the whole file, packets that were left out would be gaps.
        own = np.argsort(np.argsort(index.place(np.array(packets))))
        ranks += (len(ranks) + own).tolist()
    return ranks


def _place(packets: Sequence[int], packet: int) -> int:
    """Return the place of a packet among the packets of a clip.

    Raises:
        DecodeError: If the packet was left out, because it refers to frames before the start of the file.
    """
    if packet not in packets:
        raise DecodeError(
            "the frame depends on frames before the start of the file, which was cut in the middle of an open GOP. "
            "Record or convert it again"
        )
    return packets.index(packet)


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
        start = _start(index, packet)
        stops[start] = max(stops.get(start, 0), packet)
    hashes: dict[int, int] = {}
    for start, stop in stops.items():
        stretches = list(_stretches(index, _decoded(index, start, stop)))
        hashes |= _hashes(index, start, stop, _by_packet(stretches, [stretch.read(store) for stretch in stretches]))
    return hashes


def config(index: VideoIndex, packet: int) -> tuple[bytes, bytes, bytes]:
    """Return what all packets of a clip share: the sample description, the matrix and size of the track, and the preamble."""
    number = index.config[packet]
    return index.configs[number], index.track_header, index.preambles[number]


def span(index: VideoIndex, packet: int) -> tuple[int, int]:
    """Return the first and the last packet that decoding the frame of a packet requires. See `VideoIndex.decode_starts`."""
    start = _start(index, packet)
    return start, _last(index, packet, start)


def _start(index: VideoIndex, packet: int) -> int:
    """Return the keyframe at which decoding a packet starts. See `VideoIndex.decode_starts`."""
    if index.open_gops:
        return int(index.decode_starts(np.array(packet)))
    start: int = index.keyframes.item(bisect.bisect_right(index.keyframes, packet) - 1)  # faster than NumPy for one packet
    return start


def _last(index: VideoIndex, packet: int, start: int) -> int:
    """Return the last packet that decoding the frame of a packet requires, if decoding begins at `start`."""
    # FFmpeg drops no frames of a clip that starts at the beginning of the file (see `_stop`), so such a clip needs no further
    # packets.
    return _stop(index, packet) if index.open_gops and start > 0 and is_avc(index) else packet


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


def _mux(
    index: VideoIndex, first: int, sizes: list[int], ranks: Sequence[int], marked: list[int], body: list[bytes]
) -> bytearray:
    sync = np.zeros(len(sizes), np.bool_)
    # At most the first packet of each prefix is marked as a keyframe. It may also contain the keyframe of an open GOP. If that
    # were marked, a decoder could seek to it, and lose the frames that follow it but are displayed before it.
    sync[marked] = True
    description, track_header, preamble = config(index, first)
    sizes[0] += len(preamble)
    track = Track(
        TIMESCALE,
        track_header,
        (description,),
        size=sizes,
        pts=[TICK * rank for rank in ranks],
        sync=sync,
        config=[0] * len(sizes),
        last=TICK,
    )
    return bytearray().join((head(track), preamble, *body))

"""Checks of encoded frames for damage that decoders do not report. They examine the bitstream before it is decoded.

FFmpeg conceals damage in H.264, HEVC and MPEG-4, and the arithmetic decoders of AV1 and VP9 accept any bytes. In both cases the
decoder delivers a wrong frame without an error, and MP4 has no checksums. The checks detect bytes that a valid bitstream cannot
contain:

    H.264, HEVC   sizes of NAL units that do not add up to the size of the packet, invalid headers, no slice, and 00 00 00,
                  00 00 01 or 00 00 02 inside a unit, where an encoder would have inserted a 03; zeros that replace the
                  end of a unit
    AV1           sizes of OBUs that do not add up, invalid OBU types, no frame
    VP9, VP8      invalid frame markers, sizes in the superframe index or start codes of keyframes
    MPEG-4        no start code at the beginning, no frame, 24 zero bits in a row, zeros that replace the end
    MJPEG         no start of image
    arithmetic    more equal bytes (00 or ff) in a row than arithmetic coding writes, for AV1, VP9, HEVC and H.264 with CABAC

The checks therefore find blocks of zeros in all codecs except VP8 and MJPEG, and blocks of ff in codecs with arithmetic coding.
In all codecs they find packets whose beginning was overwritten, and lost or inserted bytes, which shift the packets after them.

Zeros after the end of a unit are padding. They look the same as zeros that replace the end of a frame, so more than a few are
accepted only in files whose other frames end in zeros, too, as phones write them (`Damage`).

The checks do not find damage that leaves the bitstream valid, such as flipped bits or other bytes in the payload. Decoders
report part of such damage in AV1 and VP9, and little of it in H.264, HEVC and MPEG-4. The rest results in wrong pixels. FFmpeg
logs most of this damage in H.264 and MPEG-4, but its log is not used: a log callback acquires the interpreter's lock for each
of about ten messages per frame, which made decoding four times slower next to a busy main thread.

Sources: ISO/IEC 14496-10 and 23008-2, 7.4.1 (emulation prevention); the AV1 bitstream, 5.3 and annex B of the ISO binding;
the VP9 bitstream, 6.2 and annex B; RFC 6386, 9.1; ISO/IEC 14496-2, 6.2.1 (start codes).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from dali_stream.errors import DecodeError
from dali_stream.mp4.bits import Bits
from dali_stream.mp4.format import codec_of, config_box, length_bytes
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.parameter_sets import avc_sets
from dali_stream.mp4.sequence_header import obus
from dali_stream.mp4.slices import is_intra, is_slice, nal_units
from dali_stream.storage import Store

Check = Callable[[bytes, int, int, bool], str]

# Number of equal bytes in a row that count as damage. The longest run observed in intact files was 32 (libvpx, a lossless
# gradient), and 10 in all others.
_RUN = 64
_TOO_LONG = f"{_RUN} equal bytes in a row, which arithmetic coding does not write"
_ZEROS, _ONES = b"\0" * _RUN, b"\xff" * _RUN
_ILLEGAL = re.compile(rb"\0\0[\0-\2]")  # twice as fast as bytes.find in a loop
_NO_KEY = "decoding starts at it, but it is not a keyframe"
_PADDING = 8  # number of zeros at the end of a unit that are no evidence of damage
ZEROS = "it ends in zeros, and the frames around it do not"
_EVIDENCE = 8  # number of other packets that show whether an encoder pads its frames


@functools.lru_cache(maxsize=256)
def checker(config: bytes) -> Check | None:
    """Return the check for the packets of a sample description (a whole `stsd` entry), or None if the codec has no check.

    The arguments of the check are a buffer, the start and the end of the packet in it, and whether decoding starts at this
    packet. It returns a description of the damage, or an empty string.

    Raises:
        DecodeError: If the sample description is broken.
    """
    codec = codec_of(config)
    if codec in ("h264", "hevc"):
        return _nal_check(codec, config)
    if codec == "vp9":
        return _vp9_check(config)
    return {"av1": _av1, "vp8": _vp8, "mpeg4": _mpeg4, "mjpeg": _mjpeg}.get(codec)


def _nal_check(codec: str, config: bytes) -> Check:
    """Return the check for H.264 or HEVC. Each NAL unit follows its length, whose number of bytes avcC or hvcC specifies."""
    width, hevc = length_bytes(config), codec == "hevc"
    arithmetic = hevc or _is_cabac(config_box(config, b"avcC"))

    def check(data: bytes, start: int, end: int, key: bool) -> str:
        slices = zeros = False
        for unit, stop in nal_units(data, start, end, width, hevc):
            if stop > end or stop <= unit + hevc:  # the header of a unit has 1 byte in H.264 and 2 bytes in HEVC
                return "its NAL units do not add up to its size"
            header, last = data[unit], stop if data[stop - 1] else unit + len(data[unit:stop].rstrip(b"\0"))
            if header & 0x80 or (hevc and not data[unit + 1] & 7):  # forbidden_zero_bit; nuh_temporal_id_plus1 is never 0
                return f"invalid NAL unit header {data[unit : unit + 1 + hevc].hex()}"
            if is_slice(header, hevc):
                if key and not slices and not (0x20 <= header < 0x30 if hevc else is_intra(data, unit)):
                    return _NO_KEY
                slices = True
                if arithmetic and _monotonous(data, unit, last):
                    return _TOO_LONG
            # An encoder inserts a 03 into these bytes. At the end of a unit, zeros are padding.
            if illegal := _ILLEGAL.search(data, unit, last):
                return f"invalid bytes {illegal[0].hex(' ')} inside a NAL unit"
            zeros |= stop - last > _PADDING
        return "no slice of a frame" if not slices else ZEROS if zeros else ""

    return check


def _is_cabac(avcc: bytes) -> bool:
    """Return whether all picture parameter sets in avcC select arithmetic coding (ISO/IEC 14496-10, 7.3.2.2)."""
    try:
        _, units, _ = avc_sets(avcc)
        for unit in units:
            bits = Bits(unit[1:], "PPS")
            bits.skip_numbers(2)  # the id of the set, and the id of its SPS
            if not bits.flag():
                return False
    except DecodeError:  # a broken box does not tell
        return False
    return bool(units)


class Damage:
    """Check of the packets of a file with one sample description. See `checker`.

    Args:
        store: Store of the file.
        index: Index of the file.
        config: Number of the sample description in `index.configs`.

    Attributes:
        exists: Whether damage of the codec can be recognized.
    """

    def __init__(self, store: Store, index: VideoIndex, config: int) -> None:
        self._store, self._index, self._check = store, index, checker(index.configs[config])
        self._padded = False  # whether the encoder is known to pad its frames
        self.exists = self._check is not None

    def of(self, packet: int, data: bytes, start: int, end: int, key: bool) -> str:
        """Return the damage of a packet, or an empty text.

        Args:
            packet: Number of the packet.
            data: Buffer with the packet.
            start, end: Range of the packet in the buffer.
            key: Whether decoding starts at the packet.
        """
        if self._check is None or start == end:
            return ""
        damage = self._check(data, start, end, key)
        if damage == ZEROS and (self._padded or self._is_padded(packet)):
            self._padded, damage = True, ""
        return damage

    def _is_padded(self, packet: int) -> bool:
        """Return whether the encoder pads its frames with zeros, as phones do, so that `ZEROS` does not mean damage.

        If it does, most of the packets around `packet` end in zeros, too. Other encoders write no such zeros. Damage rarely
        ends where a packet ends, and does not do so in several packets.
        """
        index = self._index
        # From its keyframe on, since a GOP is fetched as a whole.
        first = max(min(int(index.gop_start(packet)), len(index) - 1 - _EVIDENCE), 0)
        others = [other for other in range(first, min(first + 1 + _EVIDENCE, len(index))) if other != packet]
        ends = index.end[np.array(others, np.int64)].tolist()
        return sum(self._store.read(index.path, end - 1, end) == b"\0" for end in ends) > len(others) // 2


def _monotonous(data: bytes, start: int, end: int) -> bool:
    """Return whether 00 or ff occurs `_RUN` times in a row."""
    return data.find(_ZEROS, start, end) >= 0 or data.find(_ONES, start, end) >= 0


def _av1(data: bytes, start: int, end: int, key: bool) -> str:
    frames, reduced = 0, 0
    for header, first, stop in obus(data, start, end):
        kind = header >> 3 & 15
        if header & 0x81 or kind not in (1, 2, 3, 4, 5, 6, 7, 8, 15):
            return f"invalid OBU header {header:02x}"
        if max(first, stop) > end:
            return "its OBUs do not add up to its size"
        if kind == 1 and first < stop:  # sequence header: profile (3 bits), still picture, reduced_still_picture_header
            reduced = data[first] >> 3 & 1
        elif kind in (3, 4, 6):
            # Frame header: show_existing_frame, frame_type (2 bits). All three bits of a keyframe are 0.
            if key and not frames and not reduced and (first == stop or data[first] & 0xE0):
                return _NO_KEY
            frames += kind != 4
            if _monotonous(data, first, stop):
                return _TOO_LONG
    return "" if frames else "no frame"


def _vp9_check(config: bytes) -> Check:
    vpcc = config_box(config, b"vpcC")
    profile = vpcc[4] if len(vpcc) > 4 else None

    # Frame header: marker (2 bits, always 2), the low and the high bit of the profile, and further flags.
    def check(data: bytes, start: int, end: int, key: bool) -> str:
        frames = vp9_frames(data, start, end)
        if not frames:
            return "the sizes in its superframe index do not add up"
        for first, last in frames:
            header = data[first]
            own = header >> 5 & 1 | header >> 3 & 2
            if header >> 6 != 2 or own != (own if profile is None else profile):
                return f"invalid frame header {header:02x}"
            is_key = not header & (0x06 if own == 3 else 0x0C)  # neither show_existing_frame nor predicted
            if is_key and own < 3 and data[first + 1 : first + 4] != b"\x49\x83\x42":
                return "missing sync code of a keyframe"
            if key and first == start and not is_key:
                return _NO_KEY
            if _monotonous(data, first, last):
                return _TOO_LONG
        return ""

    return check


def vp9_frames(data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    """Split a VP9 packet into frames. A packet with a superframe index has several frames, of which some are hidden.

    Returns:
        (start, end) of each frame, or an empty list if the sizes in the superframe index do not add up.
    """
    last = data[end - 1]
    count, width = (last & 7) + 1, (last >> 3 & 3) + 1
    index = end - 2 - count * width
    if last & 0xE0 != 0xC0 or index < start or data[index] != last:
        return [(start, end)]
    frames = []
    for at in range(index + 1, end - 1, width):
        stop = start + int.from_bytes(data[at : at + width], "little")
        if stop > index:
            return []
        if stop > start:
            frames.append((start, stop))
        start = stop
    return frames


def _vp8(data: bytes, start: int, end: int, key: bool) -> str:
    tag = int.from_bytes(data[start : start + 3], "little")
    is_key = not tag & 1
    if key and not is_key:
        return _NO_KEY
    if is_key and data[start + 3 : start + 6] != b"\x9d\x01\x2a":
        return "missing start code of a keyframe"
    if start + (10 if is_key else 3) + (tag >> 5) > end:
        return "its first partition is larger than the packet"
    return ""


def _mpeg4(data: bytes, start: int, end: int, key: bool) -> str:
    if data[start : start + 3] != b"\0\0\1":
        return "missing start code at its beginning"
    vop = data.find(b"\0\0\1\xb6", start, end)
    if vop < 0:
        return "no frame (VOP)"
    last = end if data[end - 1] else vop + len(data[vop:end].rstrip(b"\0"))
    if data.find(b"\0\0\0", vop, last) >= 0:
        return "24 zero bits in a row, which no encoder writes"
    return ZEROS if end - last > _PADDING else ""


def _mjpeg(data: bytes, start: int, end: int, key: bool) -> str:
    return "" if data[start : start + 2] == b"\xff\xd8" else "missing start of a JPEG image"

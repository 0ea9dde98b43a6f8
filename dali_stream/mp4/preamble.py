"""Preamble of clips: what FFmpeg keeps from the first packet of a file, for clips that begin at a later keyframe.

A keyframe resets a decoder, but some decoders also remember which encoder wrote the stream, and undo known errors of that
encoder in all later frames. The encoder may be named only in the first packet, so a clip that begins later would be decoded
differently. The index of such a file has these bytes, and `clip.pack` puts them before the first packet of each clip.

FFmpeg keeps the following from the start of a stream until its end. It also keeps parameter sets and sequence headers, but
the sample description or each keyframe contains these (ISO/IEC 14496-15; the AV1 and VP9 bindings). `clip.pack` compares the
parameter sets in keyframes.

    H.264     The build of x264, from an SEI message with user data (`h264_sei.c`). It changes pixels in three cases:
              4:4:4 with CABAC and an 8×8 transform, of builds before 151 (`h264_cabac.c`); lossless 8×8 intra blocks in the
              profile High 4:4:4 Predictive, of builds before 151 (`h264_mb.c`); and spatial direct prediction with B-frames as
              references, of builds up to 33 (`h264_direct.c`). Without an SEI message, FFmpeg assumes a new build.
    MPEG-4    The builds of DivX, Xvid and libavcodec, from user data in the sample description or before a frame. They select
              the inverse transform of Xvid, and work around errors in chroma vectors, edges, direct prediction and clipping
              (`mpeg4videodec.c`). FFmpeg also counts wrong stuffing, which affects only messages (`h263dec.c`).
    HEVC,     Film grain of an SEI message that is marked as persistent, which FFmpeg keeps longer than the standards allow: it
    H.264     ends with the coded video sequence, so encoders repeat it. All other SEI messages describe frames, such as their
              brightness, and change no pixel.
    AV1       Nothing. Metadata (HDR, ITU-T T.35) changes no pixel, and film grain belongs to a frame.
    VP9, VP8  Nothing. A keyframe resets probabilities, segmentation and filter levels (`vp9.c`, `vp8.c`).
    MJPEG     Tables and comments of an image. All images observed so far have their own tables.
    PNG       Nothing.

The names are those of source files of FFmpeg 5.1.9, in `libavcodec`.

If a file was joined from parts of several encoders, only the first keyframe of a part may name its encoder. Later keyframes of
the part would be decoded with the preamble of the file, so `clip.pack` raises an error when it finds such a keyframe.

Builds of x264 up to 33 have no preamble unless their profile is High 4:4:4 Predictive. Their error needs B-frames as
references, an option from March 2005 on that was off by default, and build 34 is from August 2005. To find these files, the
first packet of every file with B-frames would have to be read.
"""

from __future__ import annotations

import functools
import re

from dali_stream.errors import DecodeError
from dali_stream.mp4.format import codec_of, config_box, length_bytes
from dali_stream.mp4.parameter_sets import avc_sets, unescaped
from dali_stream.mp4.slices import is_slice, nal_units

_HIGH_444 = 244  # High 4:4:4 Predictive, the profile of 4:4:4 and of lossless video of any chroma
_FIXED = 151  # first build of x264 without the errors that FFmpeg undoes in this profile
_X264 = re.compile(rb"x264\s*-\s*core\s*(\d+)")  # as FFmpeg's sscanf with "x264 - core %d"
_USER_DATA, _X264_UUID = 5, bytes.fromhex("dc45e9bde6d948b7962cd820d923eeef")
_VOP = b"\0\0\1\xb6"
_LAST_OLD_LAVC = 57, 66, 104  # last version of libavcodec with an error that FFmpeg undoes
_LAVC = re.compile(rb"\x00\x00\x01\xb2Lavc(\d+)\.(\d+)\.(\d+)")
_ENCODERS = re.compile(rb"\x00\x00\x01\xb2(?:DivX|XviD|Lavc|FFmpe|ffmpeg).*?(?=\x00\x00\x01|\Z)", re.DOTALL)


@functools.lru_cache(maxsize=256)
def depends_on_encoder(config: bytes) -> bool:
    """Return whether decoding a video with this sample description may depend on its encoder, which its first packet names."""
    try:
        codec, avcc = codec_of(config), config_box(config, b"avcC")
        if codec != "h264":
            return codec == "mpeg4"
        return _HIGH_444 in {*avcc[1:2], *(unit[1] for unit in avc_sets(avcc)[0] if len(unit) > 1)}
    except DecodeError:  # a broken sample description, which is reported when its frames are decoded
        return False


def preamble_of(config: bytes, data: bytes) -> bytes | None:
    """Return the bytes to put before a clip with this sample description, for which `depends_on_encoder` is True.

    Args:
        config: Sample description.
        data: First packet of the sample description, or its beginning.

    Returns:
        Bytes that name the encoder, in the form of the packets of the file. Empty if the encoder needs no special treatment,
        and None if the packet names no encoder.
    """
    return _user_data(config, data) if codec_of(config) == "mpeg4" else _sei(length_bytes(config), data)


def encoder_refusal(codec: str) -> str:
    """Return why a video with a preamble is not decoded with NVDEC."""
    return f"{codec} of an encoder whose errors FFmpeg undoes, and NVDEC does not"


def _user_data(config: bytes, data: bytes) -> bytes | None:
    """Return the user data before the first frame of MPEG-4 that names an encoder, and that the sample description lacks."""
    vop, known = data.find(_VOP), config_box(config, b"esds")
    units = [unit for unit in _ENCODERS.findall(data[: vop if vop >= 0 else None]) if not _is_new_lavc(unit)]
    return b"".join(unit for unit in units if unit not in known) if units else None


def _is_new_lavc(unit: bytes) -> bool:
    version = _LAVC.match(unit)
    return version is not None and tuple(map(int, version.groups())) > _LAST_OLD_LAVC


def _sei(width: int, data: bytes) -> bytes | None:
    """Return an SEI message with the build of x264 if FFmpeg treats this build differently. See `preamble_of`.

    All builds with the same errors have the same message, so that their files can share clips.

    Args:
        width: Number of bytes of the length before each NAL unit.
        data: See `preamble_of`.
    """
    result = None
    for unit, stop in nal_units(data, 0, len(data), width, hevc=False):
        if unit >= len(data) or is_slice(data[unit], hevc=False):
            break
        build = _x264_build(unescaped(data[unit + 1 : stop])) if data[unit] & 31 == 6 else None
        if build is not None:
            result = _sei_of(width, _FIXED - 1) if build < _FIXED else b""
    return result


def _x264_build(messages: bytes) -> int | None:
    """Return the build of x264 in the messages of an SEI unit (ITU-T H.264, 7.3.2.3), or None if they name none."""
    at, build = 0, None
    while at + 2 < len(messages):
        header = [0, 0]  # type and size of a message. Each is the sum of any number of bytes ff and one smaller byte
        for field in range(2):
            while at < len(messages) and messages[at] == 0xFF:
                header[field] += 0xFF
                at += 1
            header[field] += messages[at] if at < len(messages) else 0
            at += 1
        kind, size = header
        if kind == _USER_DATA and (found := _X264.match(messages[at + 16 : at + size])) and int(found[1]):
            build = int(found[1])
        at += size
    return build


def _sei_of(width: int, build: int) -> bytes:
    text = b"x264 - core %d\0" % build
    unit = bytes((6, _USER_DATA, 16 + len(text))) + _X264_UUID + text + b"\x80"
    return len(unit).to_bytes(width, "big") + unit

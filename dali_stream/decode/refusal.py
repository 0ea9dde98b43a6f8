"""Videos that DALI must not decode, and why.

`refusal` judges a file by its index, and `refusal_of_file` also by its first packets.
"""

from __future__ import annotations

from dali_stream.decode.capability import capability
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.format import PROFILES, VideoFormat
from dali_stream.mp4.hidden import hidden_frames, hidden_frames_refusal
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes, other_keyframes_refusal
from dali_stream.mp4.parameter_sets import UNSPECIFIED
from dali_stream.mp4.preamble import encoder_refusal
from dali_stream.storage import Store

DALI_ON_CPU = ("vp8", "vp9", "mjpeg")
_OPEN_GOPS = "open GOPs: a clip may begin with frames that NVDEC would show and FFmpeg drops"
_TORCHCODEC_MATRICES = (None, UNSPECIFIED, 1, 5, 6, 9, 10)
"""Colour matrices that torchcodec knows on NVDEC. It converts all others as BT.601 (0.17.0, BetaCudaDeviceInterface.cpp)."""
_BLOCKS = {"h264": 16, "mpeg4": 16, "hevc": 8}
"""Smallest block size of each codec in pixels, which divides coded sizes. HEVC encoders may use 16, 32 or 64 instead."""


def refusal_of_file(gpu: int | None, video: VideoFormat, index: VideoIndex, store: Store) -> str:
    """Return why DALI must not decode this video, judging by its index and first frames. The text is empty if DALI may."""
    refused = refusal(gpu, video, index)
    if refused or gpu is None:
        return refused
    if hidden_frames(store, index, video.codec)[0]:
        return hidden_frames_refusal(video.codec)
    return other_keyframes_refusal(video.codec) if has_other_keyframes(store, index, video.codec) else ""


def refusal(gpu: int | None, video: VideoFormat, index: VideoIndex) -> str:
    """Return why DALI must not decode this video, judging by its index. The text is empty if DALI may."""
    if gpu is None:
        if video.codec not in DALI_ON_CPU:
            return f"DALI decodes only {', '.join(DALI_ON_CPU)} on a CPU, and not {video.codec}"
    elif refused := capability_refusal(gpu, video):
        return refused
    if len(index.configs) > 1:
        return f"the file has {len(index.configs)} sample descriptions, and a clip for DALI is made of one"
    if index.track_header[:36] != UPRIGHT:
        return "the file asks for rotated frames, which DALI does not support"
    if index.open_gops:
        return _OPEN_GOPS
    if gpu is None:
        return ""
    return encoder_refusal(video.codec) if any(index.preambles) else _unsafe_on_nvdec(video)


def refusal_of_torchcodec(gpu: int | None, video: VideoFormat, index: VideoIndex, store: Store | None = None) -> str:
    """Return why torchcodec must not decode this video on NVDEC. The text is empty if it may.

    With a store, the first keyframes of the file are read.

    If a clip contains GOPs of different parts of a file, some of their frames are wrong on NVDEC unless each GOP can be decoded
    alone (5 of 192 frames of an H.264 video without IDR frames on an H100, 2026-11-26).
    """
    if gpu is None:
        return ""
    if refused := capability_refusal(gpu, video):
        return refused
    if index.open_gops:
        return _OPEN_GOPS
    if any(index.preambles):
        return encoder_refusal(video.codec)
    if video.matrix not in _TORCHCODEC_MATRICES:
        return f"the colours are those of {video.matrix_name}, and torchcodec converts them as BT.601 on NVDEC"
    if video.colours_in_file_only:
        return _colours_in_file_only(video)
    return other_keyframes_refusal(video.codec) if store and has_other_keyframes(store, index, video.codec) else ""


def capability_refusal(gpu: int, video: VideoFormat) -> str:
    """Return why NVDEC of a GPU does not decode this format. The text is empty if it does."""
    return capability(gpu, video.codec, video.chroma, video.depth).refusal(video.height, video.width)


def _unsafe_on_nvdec(video: VideoFormat) -> str:
    """Return why DALI must not decode a video on a GPU. The text is empty if DALI may.

    DALI decodes some of the refused formats wrongly, according to its sources. Most of them were never tested on a GPU.
    """
    if video.chroma != "420" or video.depth != 8:
        return f"DALI was not seen to deliver {video_name(video)} right from NVDEC"
    if video.profile not in PROFILES.get(video.codec, (video.profile,)):
        return f"NVDEC is not documented to decode {video.codec} of profile {video.profile}"
    if not video.like_bt601:
        return f"the colours are those of {video.matrix_name}, and DALI converts all as BT.601 on a GPU"
    if video.colours_in_file_only:
        return _colours_in_file_only(video)
    if video.interlaced:
        return f"DALI was not seen to deliver interlaced {video.codec} right from NVDEC"
    if video.height % 2 or video.width % 2:
        return f"NVDEC delivers only frames of even sizes, and not of {video.height}×{video.width}"
    return video.header_error or _padding_refusal(video)


def _colours_in_file_only(video: VideoFormat) -> str:
    named = "the full range" if video.like_bt601 else video.matrix_name
    return f"the colours are those of {named} according to the file, and NVDEC reads only the bitstream, which does not say so"


def smallest_coded_size(codec: str, height: int, width: int) -> tuple[int, int]:
    """Return the smallest coded size (height, width) of progressive frames with this displayed size, in pixels."""
    block = _BLOCKS.get(codec, 1)
    return -(-height // block) * block, -(-width // block) * block


def _padding_refusal(video: VideoFormat) -> str:
    """Return why DALI must not decode frames that are coded larger than they are displayed. The text is empty for others.

    DALI caches NVDEC decoders by displayed size and looks them up by coded size (2.4.0, `NVDECCache` in
    frames_decoder_gpu.cc). If the two sizes differ, each clip gets a new decoder, or a decoder for frames of another size.
    """
    size = video.height, video.width
    coded = video.coded or smallest_coded_size(video.codec, *size)
    if coded == size:
        return ""
    helps = smallest_coded_size("hevc", *size) == size
    advice = ". `dali-stream prepare URI OUT --codec hevc` re-encodes the dataset for NVDEC" if helps else ""
    sizes = f"{size[0]}×{size[1]} is coded as {coded[0]}×{coded[1]} in {video.codec}"
    return f"{sizes}, which DALI's cache of NVDEC decoders confuses with frames of that size{advice}"


def video_name(video: VideoFormat) -> str:
    """Return codec, chroma subsampling and bit depth as text."""
    return f"{video.codec} {video.chroma} {video.depth} bit"

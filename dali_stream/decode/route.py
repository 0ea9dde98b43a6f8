"""Routes: the decoder of each camera, and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass

from dali_stream.decode.capability import capability
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.format import PROFILES, VideoFormat
from dali_stream.mp4.hidden import hidden_frames, hidden_frames_refusal
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes, other_keyframes_refusal
from dali_stream.storage import Store

TORCHCODEC_CUDA = "torchcodec-cuda"
DECODE = ("auto", "fastest", "dali", "torchcodec", TORCHCODEC_CUDA)
SLOW = 0.7
"""NVDEC is reported as slow if its speed is below this fraction of the CPU's."""
DALI_ON_CPU = ("vp8", "vp9", "mjpeg")
_BLOCKS = {"h264": 16, "mpeg4": 16, "hevc": 8}
"""Smallest block size of each codec in pixels, which divides coded sizes. HEVC encoders may use 16, 32 or 64 instead."""


@dataclass(frozen=True)
class Rates:
    """Measured speed of two decoders on requests for single frames, in frames per second.

    Attributes:
        nvdec: Speed of NVDEC, with DALI.
        cpu: Speed of the CPU, with torchcodec in all decode threads of the Loader.
    """

    nvdec: float
    cpu: float

    def __str__(self) -> str:
        return f"NVDEC {self.nvdec:.0f} frames/s, the CPU {self.cpu:.0f}"


@dataclass(frozen=True)
class Route:
    """Decoder of a camera, with the reason for it.

    Attributes:
        decoder: "dali" (NVDEC on a GPU), "torchcodec" (FFmpeg on the CPU), or "torchcodec-cuda" (NVDEC without DALI).
        reason: Reason for this decoder, in one sentence.
        rates: Measured speed of both decoders, or None if it was not measured.
    """

    decoder: str
    reason: str
    rates: Rates | None = None

    @property
    def advice(self) -> str:
        """Advice for the user if the decoder is DALI and is much slower than the CPU. Otherwise, the text is empty."""
        if self.rates is None or self.decoder != "dali" or self.rates.nvdec >= SLOW * self.rates.cpu:
            return ""
        return f'NVDEC reaches {self.rates.nvdec / self.rates.cpu:.2f} of the CPU\'s speed. Use decode="fastest"'


def choose(decode: str, gpu: int | None, video: VideoFormat, index: VideoIndex, store: Store) -> Route:
    """Return the route of a camera, according to what the decoders support.

    Args:
        decode: One of `DECODE`. "fastest" and "auto" give the same route here. See `by_speed`.
        gpu: Number of the CUDA device, or None if batches are made on the CPU.
        video: Format of the camera's first file.
        index: Index of this file.
        store: Store of this file.

    Raises:
        ValueError: If `decode` is "dali" or "torchcodec-cuda", and this decoder cannot decode the video.
    """
    if decode == "torchcodec":
        return Route("torchcodec", 'decode="torchcodec" asks for it')
    if decode == TORCHCODEC_CUDA:
        if refused := "" if gpu is None else _capability_refusal(gpu, video):
            raise ValueError(f'decode="{TORCHCODEC_CUDA}": {refused}. Use decode="auto"')
        return Route(TORCHCODEC_CUDA, f'decode="{TORCHCODEC_CUDA}" asks for it')
    refused = refusal_of_file(gpu, video, index, store)
    if not refused:
        where = "DALI's CPU decoder" if gpu is None else "NVDEC"
        if decode == "dali" or gpu is not None:
            return Route("dali", f"{where} decodes {_name(video)} of {video.height}×{video.width}")
        refused = "batches are made on the CPU, where FFmpeg decodes every codec"
    if decode == "dali":
        raise ValueError(f'decode="dali": {refused}. Use decode="auto", which takes torchcodec for such cameras')
    return Route("torchcodec", refused)


def by_speed(decode: str, route: Route, rates: Rates) -> Route:
    """Return the route of a camera that NVDEC can decode, according to the measured speeds.

    Args:
        decode: One of `DECODE`. "fastest" selects the faster decoder, and all other values keep NVDEC.
        route: Route with NVDEC.
        rates: Measured speed of both decoders.
    """
    if decode == "fastest" and rates.cpu > rates.nvdec:
        return Route("torchcodec", f"the CPU decodes it faster ({rates})", rates)
    return Route("dali", f"{route.reason} ({rates})", rates)


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
    elif refused := _capability_refusal(gpu, video):
        return refused
    if len(index.configs) > 1:
        return f"the file has {len(index.configs)} sample descriptions, and a clip for DALI is made of one"
    if index.track_header[:36] != UPRIGHT:
        return "the file asks for rotated frames, which DALI does not support"
    if index.open_gops:
        return "open GOPs: a clip may begin with frames that NVDEC would show and FFmpeg drops"
    return "" if gpu is None else _unsafe_on_nvdec(video, index)


def _capability_refusal(gpu: int, video: VideoFormat) -> str:
    return capability(gpu, video.codec, video.chroma, video.depth).refusal(video.height, video.width)


def _unsafe_on_nvdec(video: VideoFormat, index: VideoIndex) -> str:
    """Return why DALI must not decode a video on a GPU. The text is empty if DALI may.

    DALI decodes some of the refused formats wrongly, according to its sources. The others were never tested on a GPU.
    """
    if video.chroma != "420" or video.depth != 8:
        return f"DALI was not seen to deliver {_name(video)} right from NVDEC"
    if video.profile not in PROFILES.get(video.codec, (video.profile,)):
        return f"NVDEC is not documented to decode {video.codec} of profile {video.profile}"
    if not video.like_bt601:
        return f"the colours are those of {video.matrix_name}, and DALI converts all as BT.601 on a GPU"
    if video.interlaced:
        return f"DALI was not seen to deliver interlaced {video.codec} right from NVDEC"
    if video.height % 2 or video.width % 2:
        return f"NVDEC delivers only frames of even sizes, and not of {video.height}×{video.width}"
    return video.header_error or _padding_refusal(video)


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


def _name(video: VideoFormat) -> str:
    return f"{video.codec} {video.chroma} {video.depth} bit"

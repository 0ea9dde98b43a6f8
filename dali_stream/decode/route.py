"""Routes: the decoder of each camera, and the reason for it. All decisions between decoders are in this module.

A decoder other than torchcodec on the CPU may refuse a file in three steps, from cheap to expensive. `refusal` judges by the
index, `refusal_of_file` also by the first packets, and a trial decodes some frames. A Loader takes all three steps for the
first file of each camera (`choose_routes`). Programs that describe a dataset omit the trial (`choose`). For later files, the
decoder calls `refusal`, and packing a clip checks its packets.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import numpy as np

from dali_stream.cache.indices import IndexCache
from dali_stream.decode.capability import DriverError, capabilities, capability
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, StorageError
from dali_stream.lerobot.source import ABSENT, Source
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.format import PROFILES, VideoFormat
from dali_stream.mp4.hidden import hidden_frames, hidden_frames_refusal
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.keyframes import has_other_keyframes, other_keyframes_refusal
from dali_stream.storage import Store

TORCHCODEC_CUDA = "torchcodec-cuda"
DECODE = ("auto", "dali", "torchcodec", TORCHCODEC_CUDA)
DALI_ON_CPU = ("vp8", "vp9", "mjpeg")
_BLOCKS = {"h264": 16, "mpeg4": 16, "hevc": 8}
"""Smallest block size of each codec in pixels, which divides coded sizes. HEVC encoders may use 16, 32 or 64 instead."""
_log = logging.getLogger("dali_stream")


@dataclass(frozen=True)
class Route:
    """Decoder of a camera, with the reason for it.

    Attributes:
        decoder: "dali" (NVDEC on a GPU), "torchcodec" (FFmpeg on the CPU), or "torchcodec-cuda" (NVDEC without DALI).
        reason: Reason for this decoder, in one sentence.
    """

    decoder: str
    reason: str


IMAGES = Route("torchcodec", "its frames are images in Parquet rows")


def choose_routes(source: Source, indices: IndexCache, decode: str, gpu: int | None) -> dict[str, Route]:
    """Return the route of each camera, according to the first video file of each dataset. The routes are logged.

    Args:
        source: Episodes of the Loader.
        indices: Indices of the video files.
        decode: One of `DECODE`.
        gpu: CUDA device, or None if batches are made on the CPU.

    Raises:
        ValueError: If `decode` is "dali" or "torchcodec-cuda", and this decoder cannot decode a camera.
        DecodeError: If `decode` is "dali" or "torchcodec-cuda", and a file is damaged.
        StorageError: If a file cannot be fetched.
    """
    if decode == TORCHCODEC_CUDA:
        from dali_stream.decode.torchcodec_cuda import unavailable  # imported on use, because it imports DALI

        if why := unavailable(gpu):
            raise ValueError(f'decode="{TORCHCODEC_CUDA}": {why}')
    routes = dict.fromkeys(source.cameras, IMAGES)
    routes |= {key: _choose_for_camera(key, source, indices, decode, gpu) for key in source.videos}
    for key, route in routes.items():
        _log.info("%s: %s, since %s", key, route.decoder, route.reason)
    if gpu is not None and source.videos and decode != "torchcodec":
        _warn_without_nvdec(gpu)
    return routes


def _choose_for_camera(key: str, source: Source, indices: IndexCache, decode: str, gpu: int | None) -> Route:
    """Return the route of a camera that is stored as video. See `choose_routes` for the other arguments and the errors.

    The first file of each dataset is tested. If torchcodec must decode one of them, it decodes the camera in all datasets.
    """
    present = source.files(key) != ABSENT
    try:
        if not present.all() and decode != "torchcodec":
            why = "a dataset of the mixture has no video of the camera, and NVDEC would need a clip of each sample"
            return _torchcodec_instead(decode, why)
        _, first = np.unique(source.dataset_of[present], return_index=True)
        routes = []
        for episode in np.flatnonzero(present)[first].tolist():
            routes.append(_choose_for_episode(key, source, indices, episode, decode, gpu))
            if routes[-1].decoder == "torchcodec":
                return routes[-1]
        return routes[0]
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _choose_for_episode(key: str, source: Source, indices: IndexCache, episode: int, decode: str, gpu: int | None) -> Route:
    """Return the route of a camera according to the file that contains an episode, after a trial. See `choose_routes`."""
    store = source.data_store
    try:
        index = indices.of(key, episode, store)
        video = VideoFiles(source, key).format(index, 0)
        route = choose(decode, gpu, video, index, store)
        if route.decoder != "torchcodec":
            from dali_stream.decode.trial import trial  # imported on use, because it imports DALI

            if refused := trial(route.decoder, store, index, video, gpu):
                return _torchcodec_instead(decode, refused)
        return route
    except StorageError:
        raise
    except DaliStreamError as error:
        if decode in ("dali", TORCHCODEC_CUDA):
            raise
        # Other files may be intact, so no error is raised here. The first batch that requires the damaged file raises it.
        return Route("torchcodec", f"the file of its first episode cannot be read: {error}")


def _torchcodec_instead(decode: str, why: str) -> Route:
    """Return torchcodec as the route of a camera that DALI or NVDEC cannot decode.

    Raises:
        ValueError: If `decode` requests the decoder that cannot decode it.
    """
    if decode != "auto":
        raise ValueError(f'decode="{decode}": {why}. Use decode="auto", which takes torchcodec for such cameras')
    return Route("torchcodec", why)


@functools.cache
def _warn_without_nvdec(gpu: int) -> None:
    """Warn once per process and GPU if the driver does not report what NVDEC decodes."""
    try:
        capabilities(gpu)
    except DriverError as error:
        _log.warning("The CPU decodes all videos, although GPU %d is used: %s. %s", gpu, error, error.remedy)


def choose(decode: str, gpu: int | None, video: VideoFormat, index: VideoIndex, store: Store) -> Route:
    """Return the route of a camera according to its first file, without decoding frames.

    Args:
        decode: One of `DECODE`.
        gpu: Number of the CUDA device, or None if batches are made on the CPU.
        video: Format of the camera's first file.
        index: Index of this file.
        store: Store of this file.

    Raises:
        ValueError: If `decode` is "dali" or "torchcodec-cuda", and this decoder cannot decode the video.
    """
    if decode == "torchcodec":
        return Route("torchcodec", 'decode="torchcodec" asks for it')
    if decode == "auto" and gpu is None:
        return Route("torchcodec", "batches are made on the CPU, where FFmpeg decodes every codec")
    if decode == TORCHCODEC_CUDA:
        refused = "" if gpu is None else _capability_refusal(gpu, video)
        route = Route(TORCHCODEC_CUDA, f'decode="{TORCHCODEC_CUDA}" asks for it')
    else:
        refused = refusal_of_file(gpu, video, index, store)
        where = "DALI's CPU decoder" if gpu is None else "NVDEC"
        route = Route("dali", f"{where} decodes {_name(video)} of {video.height}×{video.width}")
    return _torchcodec_instead(decode, refused) if refused else route


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

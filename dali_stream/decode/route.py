"""Routes: the decoder of each camera, and the reason for it. All decisions between decoders are in this module.

A decoder other than torchcodec on the CPU may refuse a file in three steps, from cheap to expensive. `refusal` judges by the
index, `refusal_of_file` also by the first packets, and a trial decodes some frames. A Loader takes all three steps for the
first file of each camera (`choose_routes`). Programs that describe a dataset omit the trial (`choose`). For later files, the
decoder calls `refusal`, and packing a clip checks its packets.

"auto" chooses between NVDEC and the CPU, both with torchcodec, by the number of decode threads per NVDEC engine. A measurement
could differ between the ranks of a run, which would then store the frames of both decoders on disk. DALI decodes only where
`decode` is "dali": on an H100, it delivered 117 frames/s of H.264 of 480×640 with a clip per frame, and torchcodec 9,085 with
16 frames per clip (`benchmarks/nvdec_decoders.py`).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import numpy as np

from dali_stream.cache.indices import IndexCache
from dali_stream.checks.arrays import NONE
from dali_stream.decode import depth
from dali_stream.decode.capability import DriverError, capabilities, capability
from dali_stream.decode.refusal import refusal_of_file, refusal_of_torchcodec, video_name
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, StorageError, counted
from dali_stream.lerobot.source import Source
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

TORCHCODEC_CUDA = "torchcodec-cuda"
DECODE = ("auto", "dali", "torchcodec", TORCHCODEC_CUDA)
_THREADS_PER_ENGINE, _PIXELS = 4, 480 * 640
"""Decode threads on the CPU that are about as fast as an NVDEC engine, for frames of up to `_PIXELS`.

In the committed reports, 16 threads with 7 engines would have needed to be 20 to 36 threads (2.8 to 5.1 per engine) for H.264
of 480×640, and 140 for HEVC of 1080×1920 (3.0 per engine and 480×640 pixels). See docs/gpu.md."""
_log = logging.getLogger("dali_stream")


@dataclass(frozen=True)
class Route:
    """Decoder of a camera, with the reason for it.

    Attributes:
        decoder: "dali" (on NVDEC or, without a GPU, on the CPU), "torchcodec" (FFmpeg on the CPU), "torchcodec-cuda" (NVDEC
            without DALI), or "pyav" (FFmpeg on the CPU, for depth cameras).
        reason: Reason for this decoder, in one sentence.
    """

    decoder: str
    reason: str


IMAGES = Route("torchcodec", "its frames are images in Parquet rows")
DEPTH = Route("pyav", "depth has 12 bits, and torchcodec decodes to 8")


def choose_routes(source: Source, indices: IndexCache, decode: str, gpu: int | None, threads: int) -> dict[str, Route]:
    """Return the route of each camera, according to the first video file of each dataset. The routes are logged.

    Args:
        source: Episodes of the Loader.
        indices: Indices of the video files.
        decode: One of `DECODE`.
        gpu: CUDA device, or None if batches are made on the CPU.
        threads: Number of decode threads of the Loader.

    Raises:
        ValueError: If `decode` is "dali" or "torchcodec-cuda", and this decoder cannot decode a camera.
        DecodeError: If `decode` is "dali" or "torchcodec-cuda", and a file is damaged.
        StorageError: If a file cannot be fetched.
        DaliStreamError: If a depth camera needs PyAV, and it cannot be imported.
    """
    if decode == TORCHCODEC_CUDA:
        from dali_stream.decode.torchcodec_cuda import unavailable  # imported on use, because it imports torchcodec

        if why := unavailable(gpu):
            raise ValueError(f'decode="{TORCHCODEC_CUDA}": {why}')
    routes = dict.fromkeys(source.cameras, IMAGES)
    choice = _Choice(source, indices, decode, gpu, threads)
    for key in source.videos:
        if source.features[key].is_depth:
            depth.pyav(key)
            routes[key] = DEPTH
        else:
            routes[key] = choice.of_camera(key)
    for key, route in routes.items():
        _log.info("%s: %s, since %s", key, route.decoder, route.reason)
    if gpu is not None and source.videos and decode != "torchcodec":
        _warn_without_nvdec(gpu)
    return routes


@dataclass(frozen=True)
class _Choice:
    """Choice of the routes of the cameras of a Loader that are stored as video. See `choose_routes` for the attributes."""

    source: Source
    indices: IndexCache
    decode: str
    gpu: int | None
    threads: int

    def of_camera(self, key: str) -> Route:
        """Return the route of a camera. See `choose_routes` for the errors.

        The first file of each dataset is tested. If torchcodec must decode one of them, it decodes the camera in all datasets.
        """
        present = self.source.videos[key].file != NONE
        _, first = np.unique(self.source.dataset_of[present], return_index=True)
        routes = []
        try:
            if self.decode == "dali" and not present.all():
                why = "a dataset of the mixture has no video of the camera, and DALI would need a clip of each sample"
                return _torchcodec_instead(self.decode, why)
            for episode in np.flatnonzero(present)[first].tolist():
                routes.append(self._of_episode(key, episode))
                if routes[-1].decoder == "torchcodec":
                    return routes[-1]
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return routes[0]

    def _of_episode(self, key: str, episode: int) -> Route:
        """Return the route of a camera according to the file that contains an episode, after a trial."""
        store = self.source.data_store
        try:
            index = self.indices.of(key, episode, store)
            video = VideoFiles(self.source, key).format(index, 0)
            route = choose(self.decode, self.gpu, self.threads, video, index, store)
            if route.decoder == "torchcodec":
                return route
            try:
                from dali_stream.decode.trial import trial  # imported on use, because it imports DALI

                if refused := trial(route.decoder, store, index, video, self.gpu):
                    return _torchcodec_instead(self.decode, refused)
            except (RuntimeError, MemoryError) as error:  # such as too little memory on the GPU
                if self.decode != "auto":
                    raise
                return Route("torchcodec", f"NVDEC could not be tried: {error}")
            return route
        except StorageError:
            raise
        except DaliStreamError as error:
            if self.decode in ("dali", TORCHCODEC_CUDA):
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


def choose(decode: str, gpu: int | None, threads: int, video: VideoFormat, index: VideoIndex, store: Store) -> Route:
    """Return the route of a camera according to its first file, without decoding frames.

    The route depends on facts alone, so all ranks with the same GPU and the same number of threads choose the same one.

    Args:
        decode: One of `DECODE`.
        gpu: Number of the CUDA device, or None if batches are made on the CPU.
        threads: Number of decode threads.
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
    if decode == "dali":
        refused, name = refusal_of_file(gpu, video, index, store), "DALI's CPU decoder" if gpu is None else "NVDEC"
        route = Route("dali", f"{name} decodes {_name_and_size(video)}")
    else:
        refused = refusal_of_nvdec(gpu, video, index, store)
        route = Route(TORCHCODEC_CUDA, f'decode="{TORCHCODEC_CUDA}" asks for it')
    if refused:
        return _torchcodec_instead(decode, refused)
    return _faster(gpu, threads, video) if decode == "auto" and gpu is not None else route


def refusal_of_nvdec(gpu: int | None, video: VideoFormat, index: VideoIndex, store: Store) -> str:
    """Return why torchcodec cannot or must not decode this video on NVDEC of this machine. The text is empty if it may."""
    return refusal_of_torchcodec(gpu, video, index, store) or _lacks_torchcodec(gpu)


def _faster(gpu: int, threads: int, video: VideoFormat) -> Route:
    """Return NVDEC, or the CPU if it has more threads than the engines of NVDEC are worth.

    On the CPU, a frame takes time in proportion to its pixels. On NVDEC, small frames are not faster than those of `_PIXELS`.
    """
    engines = capability(gpu, video.codec, video.chroma, video.depth).engines
    worth = int(_THREADS_PER_ENGINE * engines * max(video.height * video.width / _PIXELS, 1))
    decoder, verb = (TORCHCODEC_CUDA, "decodes") if threads <= worth else ("torchcodec", "would decode")
    text = f"NVDEC {verb} {_name_and_size(video)} with {counted(engines, 'engine')}, worth about {worth} threads"
    return Route(decoder, f"{text}, and num_threads is {threads}")


def _name_and_size(video: VideoFormat) -> str:
    return f"{video_name(video)} of {video.height}×{video.width}"


def _lacks_torchcodec(gpu: int | None) -> str:
    """Return why torchcodec cannot decode on the GPU, also if it or DALI cannot be imported."""
    try:
        from dali_stream.decode.torchcodec_cuda import unavailable  # imported on use, because it imports torchcodec
    except (DaliStreamError, ImportError, OSError, RuntimeError) as error:
        return str(error)
    return unavailable(gpu)

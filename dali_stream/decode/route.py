"""Routes: the decoder of each camera, and the reason for it. All decisions between decoders are in this module.

A decoder other than torchcodec on the CPU may refuse a file in three steps, from cheap to expensive. `refusal` judges by the
index, `refusal_of_file` also by the first packets, and a trial decodes some frames. A Loader takes all three steps for the
first file of each camera (`choose_routes`), and measures speeds if `decode` is "auto". Programs that describe a dataset omit
the trial and the measurement (`choose`). For later files, the decoder calls `refusal`, and packing a clip checks its packets.

"auto" chooses between NVDEC and the CPU, both with torchcodec. DALI decodes only where `decode` is "dali": on an H100, it
delivered 117 frames/s of H.264 of 480×640 with a clip per frame, and torchcodec 9,085 with 16 frames per clip
(`benchmarks/nvdec_decoders.py`).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dali_stream.cache.indices import IndexCache
from dali_stream.checks.arrays import NONE
from dali_stream.decode import depth
from dali_stream.decode.capability import DriverError, capabilities
from dali_stream.decode.refusal import refusal_of_file, refusal_of_torchcodec, video_name
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError, StorageError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

if TYPE_CHECKING:
    from dali_stream.decode.rate import Rates

TORCHCODEC_CUDA = "torchcodec-cuda"
DECODE = ("auto", "dali", "torchcodec", TORCHCODEC_CUDA)
_MEASURED_S = 0.4  # time for measuring the speed of both decoders, in seconds
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
    if gpu is not None and choice.rates:
        from dali_stream.decode.torchcodec_cuda import release_decoders

        if not any(route.decoder == TORCHCODEC_CUDA for route in routes.values()):
            release_decoders(gpu)
    for key, route in routes.items():
        _log.info("%s: %s, since %s", key, route.decoder, route.reason)
    if gpu is not None and source.videos and decode != "torchcodec":
        _warn_without_nvdec(gpu)
    return routes


@dataclass(frozen=True)
class _Choice:
    """Choice of the routes of the cameras of a Loader that are stored as video. See `choose_routes` for the other attributes.

    Attributes:
        rates: Speeds that were measured so far, {(format of the video, median GOP length): speeds}.
    """

    source: Source
    indices: IndexCache
    decode: str
    gpu: int | None
    threads: int
    rates: dict[tuple[VideoFormat, int], Rates] = field(default_factory=dict)

    def of_camera(self, key: str) -> Route:
        """Return the route of a camera. See `choose_routes` for the errors.

        The first file of each dataset is tested. If torchcodec must decode one of them, it decodes the camera in all datasets.
        """
        present = self.source.videos[key].file != NONE
        _, first = np.unique(self.source.dataset_of[present], return_index=True)
        routes = []
        try:
            if self.decode == "dali" and (why := self._unfit_for_dali(key)):
                return _torchcodec_instead(self.decode, why)
            for episode in np.flatnonzero(present)[first].tolist():
                routes.append(self._of_episode(key, episode))
                if routes[-1].decoder == "torchcodec":
                    return routes[-1]
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return routes[0]

    def _unfit_for_dali(self, key: str) -> str:
        """Return why DALI must not decode a camera, whatever its files are. The text is empty if it may."""
        if (self.source.videos[key].file == NONE).any():
            return "a dataset of the mixture has no video of the camera, and DALI would need a clip of each sample"
        return ""

    def _of_episode(self, key: str, episode: int) -> Route:
        """Return the route of a camera according to the file that contains an episode, after a trial."""
        store = self.source.data_store
        try:
            index = self.indices.of(key, episode, store)
            video = VideoFiles(self.source, key).format(index, 0)
            route = choose(self.decode, self.gpu, video, index, store)
            if route.decoder == "torchcodec":
                return route
            try:
                from dali_stream.decode.trial import trial  # imported on use, because it imports DALI

                if refused := trial(route.decoder, store, index, video, self.gpu):
                    return _torchcodec_instead(self.decode, refused)
                if self.decode == "auto" and self.gpu is not None:
                    return self._fastest(index, video, self.gpu)
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

    def _fastest(self, index: VideoIndex, video: VideoFormat, gpu: int) -> Route:
        """Return the faster of NVDEC and the CPU for a file on this machine."""
        kind = video, int(np.median(index.gop_lengths))
        if kind not in self.rates:
            from dali_stream.decode import rate

            try:
                clip = rate.request_clip(self.source.data_store, index)
                self.rates[kind] = rate.measure(clip, video, gpu, self.threads, _MEASURED_S)
            except DecodeError as error:
                return Route("torchcodec", f"the speed of NVDEC could not be measured: {error}")
        rates = self.rates[kind]
        text = (
            f"NVDEC decodes {_name_and_size(video)} at {rates.nvdec:.0f} frames/s here, and the CPU with {self.threads} "
            f"threads at {rates.cpu:.0f}"
        )
        return Route(TORCHCODEC_CUDA if rates.nvdec >= rates.cpu else "torchcodec", text)


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

    On a GPU, "auto" returns NVDEC if torchcodec can use it. A Loader then takes the CPU instead if that is faster.

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
    if decode == "dali":
        refused, name = refusal_of_file(gpu, video, index, store), "DALI's CPU decoder" if gpu is None else "NVDEC"
        route = Route("dali", f"{name} decodes {_name_and_size(video)}")
    else:
        refused = refusal_of_torchcodec(gpu, video, index, store) or _lacks_torchcodec(gpu)
        asked = f'decode="{TORCHCODEC_CUDA}" asks for it'
        route = Route(TORCHCODEC_CUDA, f"NVDEC decodes {_name_and_size(video)}" if decode == "auto" else asked)
    return _torchcodec_instead(decode, refused) if refused else route


def _name_and_size(video: VideoFormat) -> str:
    return f"{video_name(video)} of {video.height}×{video.width}"


def _lacks_torchcodec(gpu: int | None) -> str:
    """Return why torchcodec cannot decode on the GPU, also if it or DALI cannot be imported."""
    try:
        from dali_stream.decode.torchcodec_cuda import unavailable  # imported on use, because it imports torchcodec
    except (DaliStreamError, ImportError, OSError, RuntimeError) as error:
        return str(error)
    return unavailable(gpu)

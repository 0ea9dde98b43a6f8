"""Choice of the decoder of each camera when a loader starts.

The choice depends on the index of the first video file of each dataset. For DALI, it also depends on a trial with frames of
this file and on the measured speeds of DALI and torchcodec.
"""

from __future__ import annotations

import functools
import logging

import numpy as np

from dali_stream.cache.indices import IndexCache
from dali_stream.decode.capability import DriverError, capabilities
from dali_stream.decode.route import TORCHCODEC_CUDA, Route, by_speed, choose
from dali_stream.decode.speed import Speeds, median_gop, request_clips
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError, StorageError
from dali_stream.lerobot.source import ABSENT, Source
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex

_log = logging.getLogger("dali_stream")


def choose_routes(source: Source, indices: IndexCache, decode: str, gpu: int | None, num_threads: int) -> dict[str, Route]:
    """Return the route of each camera, according to the first video file of each dataset. The routes are logged.

    Args:
        source: Episodes of the Loader.
        indices: Indices of the video files.
        decode: Choice of the decoder, see `route.choose`.
        gpu: CUDA device, or None if batches are made on the CPU.
        num_threads: Number of decode threads of the Loader.

    Raises:
        ValueError: If `decode` is "dali" or "torchcodec-cuda", and this decoder cannot decode a camera.
        DecodeError: If `decode` is "dali" or "torchcodec-cuda", and a file is damaged.
        StorageError: If a file cannot be fetched.
    """
    if decode == TORCHCODEC_CUDA:
        from dali_stream.decode.torchcodec_cuda import unavailable  # imported on use, because it imports DALI

        if why := unavailable(gpu):
            raise ValueError(f'decode="{TORCHCODEC_CUDA}": {why}')
    chooser = _Chooser(source, indices, decode, gpu, num_threads)
    routes = {key: Route("torchcodec", "its frames are images in Parquet rows") for key in source.cameras}
    routes |= {key: chooser.choose(key) for key in source.videos}
    for key, route in routes.items():
        advice = route.advice if decode == "auto" else ""
        _log.log(
            logging.WARNING if advice else logging.INFO,
            "%s: %s, since %s%s", key, route.decoder, route.reason, f". {advice}" if advice else "",
        )  # fmt: skip
    if gpu is not None and source.videos and decode != "torchcodec":
        _warn_without_nvdec(gpu)
    return routes


@functools.cache
def _warn_without_nvdec(gpu: int) -> None:
    """Warn once per process and GPU if the driver does not report what NVDEC decodes."""
    try:
        capabilities(gpu)
    except DriverError as error:
        _log.warning("The CPU decodes all videos, although GPU %d is used: %s. %s", gpu, error, error.remedy)


class _Chooser:
    """Chooser of the routes of a Loader's cameras. See `choose_routes` for the arguments."""

    def __init__(self, source: Source, indices: IndexCache, decode: str, gpu: int | None, num_threads: int) -> None:
        self._source, self._indices, self._decode, self._gpu = source, indices, decode, gpu
        self._speeds = Speeds(num_threads, len(source.videos), gpu)

    def choose(self, key: str) -> Route:
        """Return the route of a camera.

        The first file of each dataset is tested. If torchcodec must decode one of them, it decodes the camera in all datasets.
        """
        source, decode = self._source, self._decode
        present = source.files(key) != ABSENT
        if not present.all() and decode != "torchcodec":
            why = "a dataset of the mixture has no video of the camera, and NVDEC would need a clip of each sample"
            if decode in ("dali", TORCHCODEC_CUDA):
                raise ValueError(f'{key}: decode="{decode}": {why}. Use decode="auto", which takes torchcodec for such cameras')
            return Route("torchcodec", why)
        _, first = np.unique(source.dataset_of[present], return_index=True)
        routes = []
        for episode in np.flatnonzero(present)[first].tolist():
            routes.append(self._choose_for_file(key, episode))
            if routes[-1].decoder == "torchcodec":
                return routes[-1]
        return next((route for route in routes if route.advice), routes[0])

    def _choose_for_file(self, key: str, episode: int) -> Route:
        decode, gpu, store = self._decode, self._gpu, self._source.data_store
        try:
            index, video = VideoFiles(self._source, key).describe(self._indices, episode)
            route = choose(decode, gpu, video, index, store)
            if route.decoder == "torchcodec":
                return route
            from dali_stream.decode.trial import trial, trial_of_torchcodec

            if route.decoder == TORCHCODEC_CUDA:
                from dali_stream.decode.torchcodec_cuda import device_name

                if refused := trial_of_torchcodec(store, index, video, device_name(gpu)):
                    raise ValueError(f'decode="{TORCHCODEC_CUDA}": {refused}. Use decode="auto"')
                return route
            if refused := trial(store, index, video, gpu):
                if decode == "dali":
                    raise ValueError(f'decode="dali": {refused}. Use decode="auto", which takes torchcodec for such cameras')
                return Route("torchcodec", refused)
            return route if decode == "dali" or gpu is None else self._by_speed(route, index, video)
        except StorageError:
            raise
        except DaliStreamError as error:
            if decode in ("dali", TORCHCODEC_CUDA):
                raise
            # Other files may be intact, so no error is raised here. The first batch that requires the damaged file raises it.
            return Route("torchcodec", f"the file of its first episode cannot be read: {error}")
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    def _by_speed(self, route: Route, index: VideoIndex, video: VideoFormat) -> Route:
        """Return the route of a camera that NVDEC decodes correctly, after measuring both decoders."""
        store, gpu = self._source.data_store, self._gpu
        try:
            rates = self._speeds.of(video, median_gop(index), lambda: request_clips(store, index, gpu))
        except DecodeError as error:
            return Route("torchcodec", f"{error}, when its speed was measured")
        return by_speed(self._decode, route, rates)

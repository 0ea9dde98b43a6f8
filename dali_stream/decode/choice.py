"""The decoder of each camera when a loader starts: what its index tells, and for DALI a trial of its first frames."""

from __future__ import annotations

import functools
import logging

import numpy as np

from dali_stream.cache.indices import IndexCache
from dali_stream.decode.capability import DriverError, capabilities
from dali_stream.decode.route import Route, choose
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, StorageError
from dali_stream.lerobot.source import ABSENT, Source

_log = logging.getLogger("dali_stream")


def choose_routes(source: Source, indices: IndexCache, decode: str, gpu: int | None) -> dict[str, Route]:
    """The route of each camera, by each dataset's first video file. Logs them. `decode` and `gpu` are as for `route.choose`.

    Raises:
        ValueError: `decode` is "dali" and DALI cannot decode a camera here.
        DecodeError: `decode` is "dali" and a file cannot be read.
        StorageError: a file cannot be fetched.
    """
    routes = {key: Route("torchcodec", "its frames are images in Parquet rows") for key in source.cameras}
    routes |= {key: _choose_route(source, indices, key, decode, gpu) for key in source.videos}
    for key, route in routes.items():
        _log.info("%s: %s, since %s", key, route.decoder, route.reason)
    if gpu is not None and source.videos and decode != "torchcodec":
        _warn_without_nvdec(gpu)
    return routes


@functools.cache
def _warn_without_nvdec(gpu: int) -> None:
    """Warn once per process and GPU if the driver does not answer what NVDEC decodes."""
    try:
        capabilities(gpu)
    except DriverError as error:
        _log.warning("The CPU decodes all videos, although GPU %d is used: %s. %s", gpu, error, error.remedy)


def _choose_route(source: Source, indices: IndexCache, key: str, decode: str, gpu: int | None) -> Route:
    """The route of a camera: DALI's, if that is the route of each dataset's first file."""
    present = source.files(key) != ABSENT
    if not present.all() and decode != "torchcodec":
        why = "a dataset of the mixture has no video of the camera, and DALI would need a clip of each sample"
        if decode == "dali":
            raise ValueError(f'{key}: decode="dali": {why}. Use decode="auto", which takes torchcodec for such cameras')
        return Route("torchcodec", why)
    _, first = np.unique(source.dataset_of[present], return_index=True)
    for episode in np.flatnonzero(present)[first].tolist():
        route = _route_of_file(source, indices, key, episode, decode, gpu)
        if route.decoder != "dali":
            break
    return route


def _route_of_file(source: Source, indices: IndexCache, key: str, episode: int, decode: str, gpu: int | None) -> Route:
    store = source.data_store
    try:
        index, video = VideoFiles(source, key).describe(indices, episode)
        route = choose(decode, gpu, video, index, store)
        if route.decoder != "dali":
            return route
        from dali_stream.decode.trial import trial  # with DALI, which other routes do without

        if not (refused := trial(store, index, video, gpu)):
            return route
        if decode == "dali":
            raise ValueError(f'decode="dali": {refused}. Use decode="auto", which takes torchcodec for such cameras')
        return Route("torchcodec", refused)
    except StorageError:
        raise
    except DaliStreamError as error:
        if decode == "dali":
            raise
        # The first batch that needs the file says what is wrong, and with which frame; other files may be whole.
        return Route("torchcodec", f"the file of its first episode cannot be read: {error}")
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error

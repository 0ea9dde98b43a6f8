"""The decoder of each camera when a loader starts: what its index tells, and for DALI a trial of its first frames."""

from __future__ import annotations

import logging

from dali_stream.cache.indices import IndexCache
from dali_stream.decode.route import Route, choose
from dali_stream.decode.trial import trial
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, StorageError
from dali_stream.lerobot.dataset import DatasetFiles

_log = logging.getLogger("dali_stream")


def choose_routes(dataset: DatasetFiles, indices: IndexCache, decode: str, gpu: int | None) -> dict[str, Route]:
    """The route of each camera, by its first video file. Logs them. `decode` and `gpu` are as for `route.choose`.

    Raises:
        ValueError: `decode` is "dali" and DALI cannot decode a camera here.
        DecodeError: `decode` is "dali" and a file cannot be read.
        StorageError: a file cannot be fetched.
    """
    routes = {key: Route("torchcodec", "its frames are images in Parquet rows") for key in dataset.cameras}
    routes |= {key: _choose_route(dataset, indices, key, decode, gpu) for key in dataset.videos}
    for key, route in routes.items():
        _log.info("%s: %s, since %s", key, route.decoder, route.reason)
    return routes


def _choose_route(dataset: DatasetFiles, indices: IndexCache, key: str, decode: str, gpu: int | None) -> Route:
    store = dataset.data_store
    try:
        index, video = VideoFiles(dataset, key).describe(indices, 0)
        route = choose(decode, gpu, video, index, store)
        if route.decoder != "dali" or not (refused := trial(store, index, video, gpu)):
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

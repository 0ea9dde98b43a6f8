"""Base class of the decoders that keep no decoded frames, so each batch decodes all frames of its samples."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import Buffers
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.checks.none import NONE
from dali_stream.decode.decoder import RouteChange, named, succeeded
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.schedule.plan import BatchPlan
from dali_stream.system.workers import Workers

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Request(NamedTuple):
    """Frames and packets of one sample, which is a window of one episode.

    Attributes:
        row: Row of the sample in the batch.
        episode: Episode of the sample.
        frames: Frame indices of the window within the episode, shape (T,).
        packets: Packets of these frames in the file, shape (T,).
        file: Index of the file.
    """

    row: int
    episode: int
    frames: Array
    packets: Array
    file: VideoIndex


class SampleWork:
    """`Work` of a `SampleDecoder`.

    Args:
        samples: Number of samples in the batch.

    Attributes:
        results: Frames or clip of each sample, or None for a sample in `failed`.
    """

    def __init__(self, samples: int) -> None:
        self.results: list[Any] = [None] * samples
        self.tasks: list[Future[None]] = []
        self.failed: dict[int, DaliStreamError] = {}

    def ready(self) -> bool:
        return not self.failed and all(map(succeeded, self.tasks))

    def collect(self, buffers: Buffers, dtype: type[np.generic], copiers: Workers) -> list[Any]:
        return self.results


class SampleDecoder(VideoFiles):
    """Decoder that locates the packets of each sample.

    Subclasses implement `start`, which calls `requests`.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        counters: Counters of the Loader.
        any_size: See `VideoFiles`.
    """

    def __init__(self, source: Source, key: str, counters: Counters, any_size: bool = False) -> None:
        super().__init__(source, key, any_size)
        self._counters = counters

    def close(self) -> None:
        """Do nothing, because no decoded frames are kept."""

    def requests(self, work: SampleWork, plan: BatchPlan, episodes: OpenEpisodes) -> list[Request]:
        """Return a request for each sample. Errors of samples that fail a check are added to `work`. See `Decoder.start`."""
        requests, shown = [], plan.shown_in_episode[self.key]
        for row, episode in enumerate(plan.samples.episode.tolist()):
            packets = plan.packets[self.key][row]
            try:
                index = self._locate(episodes, episode, shown[row], packets)
            except DecodeError as error:
                work.failed[row] = DecodeError(str(error))  # without the traceback, see `named`
            else:
                requests.append(Request(row, episode, shown[row], packets, index))
        return requests

    def fail(self, work: SampleWork, request: Request, error: DaliStreamError) -> None:
        """Add the error of a sample to `work`, without the traceback, which would keep packets and pixels."""
        if isinstance(error, DecodeError):
            error = self.named(request.episode, request.frames, request.file, error)
        work.failed[request.row] = error.with_traceback(None)

    def change(self, file: VideoIndex, reason: object) -> RouteChange:
        """Return the error that moves the camera to the CPU."""
        return RouteChange([self.key], f"{self._source.data_store.where(file.path)}: {reason}")

    def check(self, index: VideoIndex, packet: int) -> None:
        """Check whether this decoder may decode the file of a packet. Subclasses raise an error if it must not."""

    def _locate(self, episodes: OpenEpisodes, episode: int, frames: Int64, packets: Int64) -> VideoIndex:
        """Return the index of the episode's file, after all checks that are possible without decoding.

        Raises:
            DecodeError: If a frame has no packet, or the file differs from the metadata.
        """
        if (packets == NONE).any():
            raise self.missing(episodes, episode, frames[packets == NONE])
        try:
            index = episodes.index(self.key, episode)
            self.checked(index, packets, episode)
        except DecodeError as error:
            raise named(self._source, self.key, episode, frames, error) from error
        self.check(index, int(packets[0]))
        return index

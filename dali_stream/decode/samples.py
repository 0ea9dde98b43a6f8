"""Base of the decoders that make the frames of each sample from a clip of its own, and keep no decoded frames."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.counters import Counters
from dali_stream.decode.decoder import Pool, named
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DecodeError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.index import LACKING, VideoIndex
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Request(NamedTuple):
    """The frames of one sample: a window of one episode, and their packets."""

    row: int
    episode: int
    frames: Array
    packets: Array
    file: VideoIndex


class SampleWork(Protocol):
    """Part of `Work` that `start_samples` fills."""

    tasks: list[Future[None]]
    failed: dict[int, DecodeError]


class SampleDecoder(VideoFiles):
    """Finds the packets of each sample. Subclasses add `start`, which calls `start_samples`, and what a task does."""

    def __init__(self, source: Source, key: str, counters: Counters) -> None:
        super().__init__(source, key)
        self._counters = counters

    def close(self) -> None:
        """Do nothing, since no decoded frames are kept."""

    def start_samples(
        self, work: SampleWork, pool: Pool, plan: BatchPlan, frames: Int64, episodes: OpenEpisodes, store: Store
    ) -> None:
        """Start a task per sample, which calls `make(store, request, work)`. See `Decoder.start`."""
        for row, episode in enumerate(plan.samples.episode.tolist()):
            packets = plan.packets[self.key][row]
            try:
                index = self._locate(episodes, episode, frames[row], packets)
            except DecodeError as error:
                work.failed[row] = error
            else:
                work.tasks.append(pool.submit(self.make, store, Request(row, episode, frames[row], packets, index), work))

    def make(self, store: Store, request: Request, work: Any) -> None:
        """Make what `work` collects for one sample, in a decode thread."""
        raise NotImplementedError

    def check(self, index: VideoIndex, packet: int) -> None:
        """Check whether this decoder suits the file that holds a packet."""

    def _locate(self, episodes: OpenEpisodes, episode: int, frames: Int64, packets: Int64) -> VideoIndex:
        """Return the index of the episode's file, after all checks that need no decoding."""
        try:
            index = episodes.index(self.key, episode)
            absent = packets == LACKING
            if absent.any():
                frames = frames[absent]
                raise self.lacking(episodes, index, episode, int(frames[0]))
            self.checked(index, packets, episode)
        except DecodeError as error:
            raise named(self._source, self.key, episode, frames, error) from error
        self.check(index, int(packets[0]))
        return index

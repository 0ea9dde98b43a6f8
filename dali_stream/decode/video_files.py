"""A camera's MP4 files: their indices, and whether they hold what the metadata promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.cache.indices import IndexCache
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.decode.decoder import named
from dali_stream.errors import DecodeError
from dali_stream.lerobot.dataset import CLOCKS
from dali_stream.lerobot.source import Source
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.timing import explain

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class VideoFiles:
    """A camera's MP4s: their indices, and whether they hold what the metadata promise."""

    def __init__(self, source: Source, key: str) -> None:
        self.key, self._source = key, source
        self._formats: dict[bytes, VideoFormat] = {}

    def describe(self, indices: IndexCache, episode: int) -> tuple[VideoIndex, VideoFormat]:
        """Index and format of the file that holds an episode. Raises DecodeError."""
        index = indices.of(self.key, episode, self._source.data_store)
        return index, self.format(index, 0)

    def checked(self, index: VideoIndex, packets: Int64, episode: int) -> None:
        """Check the sample descriptions of an episode's packets against the metadata. Raises DecodeError."""
        if len(index.configs) > 1:
            _, first = np.unique(index.config[packets], return_index=True)
            packets = packets[first]
        else:
            packets = packets[:1]
        for packet in packets.tolist():
            self._check_size(index, self.format(index, packet), episode)

    def lacking(self, episodes: OpenEpisodes, index: VideoIndex, episode: int, frame: int) -> DecodeError:
        """The error for a frame that the video lacks."""
        row = np.array([episode]), np.array([frame])
        [seconds] = self._source.seconds(episode, {key: episodes.table.gather(key, *row) for key in CLOCKS})
        why = explain(index, self._source.interval(self.key, episode), seconds, *self._source.timing(episode))
        return DecodeError(f"{self._source.data_store.where(index.path)}: {why}")

    def format(self, index: VideoIndex, packet: int) -> VideoFormat:
        """What a packet's sample description says. Raises DecodeError."""
        config = index.configs[index.config[packet]]
        if config not in self._formats:
            try:
                self._formats[config] = describe(config)
            except DecodeError as error:
                raise DecodeError(f"{self._source.data_store.where(index.path)}: {error}") from error
        return self._formats[config]

    def _check_size(self, index: VideoIndex, video: VideoFormat, episode: int) -> None:
        """Batches have one shape, and a corrupt frame size could allocate any amount of memory."""
        feature = self._source.feature(self.key, episode)
        assert feature is not None
        size = feature.frame_size
        if (video.height, video.width) != size:
            raise DecodeError(
                f"{self._source.data_store.where(index.path)}: has frames of {video.height}×{video.width}, and "
                f"meta/info.json promises {size[0]}×{size[1]}"
            )

    def named(self, episode: int, frames: Array, index: VideoIndex, error: DecodeError) -> DecodeError:
        """The error with camera, episode, frames and file in front."""
        where = self._source.data_store.where(index.path)
        return named(self._source, self.key, episode, frames, DecodeError(f"{where}: {error}"))

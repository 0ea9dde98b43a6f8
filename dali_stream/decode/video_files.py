"""MP4 files of a camera: their indices and formats, and the check that they agree with the metadata."""

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
    """MP4 files of a camera.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
    """

    def __init__(self, source: Source, key: str) -> None:
        self.key, self._source = key, source
        self._formats: dict[bytes, VideoFormat] = {}

    def describe(self, indices: IndexCache, episode: int) -> tuple[VideoIndex, VideoFormat]:
        """Return the index and the format of the file that contains an episode.

        Raises:
            DecodeError: If the index or the first sample description is broken.
        """
        index = indices.of(self.key, episode, self._source.data_store)
        return index, self.format(index, 0)

    def checked(self, index: VideoIndex, packets: Int64, episode: int) -> None:
        """Compare the sample descriptions of an episode's packets with the metadata.

        Raises:
            DecodeError: If a sample description is broken, or has another frame size than the metadata.
        """
        if len(index.configs) > 1:
            _, first = np.unique(index.config[packets], return_index=True)
            packets = packets[first]
        else:
            packets = packets[:1]
        for packet in packets.tolist():
            self._check_size(index, self.format(index, packet), episode)

    def lacking(self, episodes: OpenEpisodes, index: VideoIndex, episode: int, frame: int) -> DecodeError:
        """Return the error for a frame that is missing in the video."""
        every = np.array([episode]), np.arange(self._source.lengths[episode])[None]
        rows = {key: episodes.table.gather(key, *every)[0] for key in CLOCKS}
        seconds, timing = self._source.seconds(episode, rows), self._source.timing(episode)
        interval = self._source.interval(self.key, episode)
        why = explain(index, interval, seconds, rows["frame_index"], frame, *timing)
        return DecodeError(f"{self._source.data_store.where(index.path)}: {why}")

    def format(self, index: VideoIndex, packet: int) -> VideoFormat:
        """Return the format according to the sample description of a packet.

        Raises:
            DecodeError: If the sample description is broken.
        """
        config = index.configs[index.config[packet]]
        if config not in self._formats:
            try:
                self._formats[config] = describe(config)
            except DecodeError as error:
                raise DecodeError(f"{self._source.data_store.where(index.path)}: {error}") from error
        return self._formats[config]

    def _check_size(self, index: VideoIndex, video: VideoFormat, episode: int) -> None:
        """Compare the size of the frames with the metadata.

        All frames of a batch must have the same size, and a decoder could allocate any amount of memory for a corrupt size.

        Raises:
            DecodeError: If the sizes differ, or if the video is gray with more than 8 bits per value.
        """
        feature = self._source.feature(self.key, episode)
        assert feature is not None
        size = feature.frame_size
        if (video.height, video.width) != size:
            raise DecodeError(
                f"{self._source.data_store.where(index.path)}: frames must be {size[0]}×{size[1]}, as meta/info.json says, got "
                f"{video.height}×{video.width}"
            )
        if video.chroma == "gray" and video.depth > 8:
            raise DecodeError(
                f"{self._source.data_store.where(index.path)}: Gray video must have 8 bits per value, got a depth map of "
                f"{video.depth} bits. Leave {self.key} out of cameras"
            )

    def named(self, episode: int, frames: Array, index: VideoIndex, error: DecodeError) -> DecodeError:
        """Return an error whose message starts with the camera, the episode, the frames and the file."""
        where = self._source.data_store.where(index.path)
        return named(self._source, self.key, episode, frames, DecodeError(f"{where}: {error}"))

"""MP4 files of a camera: their indices and formats, and the check that they agree with the metadata."""

from __future__ import annotations

import numpy as np

from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.checks.arrays import Array, Int64
from dali_stream.decode.decoder import OtherSizes, named
from dali_stream.errors import DecodeError
from dali_stream.lerobot.dataset_files import CLOCKS
from dali_stream.lerobot.source import Source
from dali_stream.mp4.clip import config
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.timing import explain


class VideoFiles:
    """MP4 files of a camera.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        any_size: Whether frames may have another size than `meta/info.json` says, since they are resized. Default: False.
    """

    def __init__(self, source: Source, key: str, any_size: bool = False) -> None:
        self.key, self._source, self._any_size = key, source, any_size
        self._other_sizes = OtherSizes(source, key)
        self._formats: dict[tuple[bytes, ...], VideoFormat] = {}
        self._agreeing = set[tuple[int, tuple[bytes, ...]]]()  # datasets, and results of `config` that agree with them

    def checked(self, index: VideoIndex, packets: Int64, episode: int) -> None:
        """Compare the sample descriptions of an episode's packets with the metadata.

        Raises:
            FrameSizeError: If a sample description has another frame size than the metadata.
            DecodeError: If a sample description is broken.
        """
        if len(index.configs) > 1:
            _, first = np.unique(index.config[packets], return_index=True)
            packets = packets[first]
        else:
            packets = packets[:1]
        for packet in packets.tolist():
            kind = int(self._source.dataset_of[episode]), config(index, packet)
            if kind not in self._agreeing:
                self._check_size(index, self.format(index, packet), episode)
                self._agreeing.add(kind)

    def missing(self, episodes: OpenEpisodes, episode: int, frames: Int64) -> DecodeError:
        """Return the error for frames of an episode that have no packet. It explains the first one."""
        try:
            index = episodes.index(self.key, episode)
        except DecodeError as error:
            return named(self._source, self.key, episode, frames, error)
        every = np.array([episode]), np.arange(self._source.lengths[episode])[None]
        rows = {key: episodes.table.values(key, *every)[0] for key in CLOCKS}
        why = explain(self._source.episode_times(self.key, episode, index, rows), int(frames[0]))
        return self.named(episode, frames, index, DecodeError(why))

    def format(self, index: VideoIndex, packet: int) -> VideoFormat:
        """Return the format according to the sample description of a packet.

        Raises:
            DecodeError: If the sample description is broken.
        """
        kind = config(index, packet)
        if kind not in self._formats:
            try:
                self._formats[kind] = index.format(index.config[packet])
            except DecodeError as error:
                raise DecodeError(f"{self._source.data_store.where(index.path)}: {error}") from error
        return self._formats[kind]

    def _check_size(self, index: VideoIndex, video: VideoFormat, episode: int) -> None:
        """Compare the size of the frames with the metadata.

        All frames of a batch must have the same size, and a decoder could allocate any amount of memory for a corrupt size.

        Raises:
            FrameSizeError: If the sizes differ, and frames are not resized.
            DecodeError: If the video is gray with more than 8 bits per value, and the camera is not marked as depth.
        """
        feature, where = self._source.part_of(episode).features[self.key], self._source.data_store.where(index.path)
        turned = f" (turned by {video.rotation}°)" if video.rotation else ""
        feature.check_size((video.height, video.width), self._any_size, f"{where}: ", turned)
        if video.chroma == "gray" and video.depth > 8 and not feature.is_depth:
            raise DecodeError(
                f"{where}: Gray video must have 8 bits per value unless it is marked as depth, got {video.depth} bits. If it "
                f'is a depth map as LeRobot writes it, add "is_depth_map": true to the info of {self.key} in meta/info.json. '
                "Otherwise, leave it out of cameras"
            )
        self._other_sizes.add(episode, (video.height, video.width), where)

    def named(self, episode: int, frames: Array, index: VideoIndex, error: DecodeError) -> DecodeError:
        """Return an error whose message starts with the camera, the episode, the frames and the file."""
        where = self._source.data_store.where(index.path)
        return named(self._source, self.key, episode, frames, DecodeError(f"{where}: {error}"))

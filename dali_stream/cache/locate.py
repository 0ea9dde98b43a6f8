"""Location of the frames of an episode in its video files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import NONE
from dali_stream.lerobot.source import Source
from dali_stream.mp4.blocks import cut
from dali_stream.mp4.index import VideoIndex
from dali_stream.schedule.episodes import Located


def locate(
    source: Source,
    camera: str,
    episode: int,
    rows: Mapping[str, npt.NDArray[np.generic]],
    index: VideoIndex | None,
    block: int | None = None,
) -> Located:
    """Return the locations of an episode's frames.

    Args:
        source: Episodes.
        camera: Name of the camera.
        episode: Number of the episode.
        rows: {key: values of the episode's rows}. It must have the keys "timestamp" and "frame_index".
        index: Index of the episode's video file. None if the frames are images, if the dataset of the episode lacks the camera,
            or if the file is broken. In the last two cases, no frame has a packet: frames of a missing camera are zeros, and
            decoding a frame of a broken file raises an error.
        block: Approximate size of a block of encoded video in bytes. None if the video is read in place. Default: None.
    """
    length = int(source.lengths[episode])
    if index is None:
        feature = source.part_of(episode).features.get(camera)
        if feature is not None and feature.is_image:
            return Located(np.arange(length), np.arange(length))  # each image is a GOP of its own
        nothing = np.full(length, NONE, np.int64)
        return Located(nothing, nothing)
    times = source.episode_times(camera, episode, index, rows)
    packet = times.packets()
    part = source.part_of(episode)
    part.dataset.warn_of_cut(part.keys[camera], episode - part.first, times)
    exists = packet != NONE
    if exists.all():
        keyframe = index.decode_starts(packet)
    else:
        keyframe = np.full(length, NONE, np.int64)
        keyframe[exists] = index.decode_starts(packet[exists])
    return Located(packet, keyframe, None if block is None else cut(index, packet, keyframe, block))

"""Videos whose frames contain their identity, and requests for frames."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.decode import torchcodec
from dali_stream.demo import read_identities, write_demo
from dali_stream.mp4.clip import Clip, pack
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore


class Video:
    """One MP4 whose frames contain their identity.

    Args:
        store: Storage of the file.
        path: Path of the file in the storage.
        identity: (episode, frame, camera) of each frame in display order, shape (n, 3).

    Attributes:
        table: Index of the file.
        format: Format of the video.
    """

    def __init__(self, store: LocalStore, path: str, identity: npt.ArrayLike) -> None:
        self.store, self.table, self.identity = store, read_index(store, path), np.asarray(identity)
        self.format = self.table.format()
        self._packets: list[int] = self.table.display_order.tolist()

    def clip(self, shown: Sequence[int], for_nvdec: bool = False) -> Clip:
        """Return a packed clip with some frames.

        Args:
            shown: Numbers of the frames in display order.
            for_nvdec: Whether the clip is for torchcodec on NVDEC. Default: False.
        """
        indices, packets = [self.table] * len(shown), [self._packets[frame] for frame in shown]
        return pack(self.store, indices, packets, for_nvdec=for_nvdec, hidden_frames=True)

    def frames(self, shown: Sequence[int], device: str = "cpu") -> npt.NDArray[np.uint8]:
        """Return some frames, decoded by torchcodec, with shape (n, H, W, 3).

        Args:
            shown: Numbers of the frames in display order.
            device: Device of the decoder, such as "cuda:0". Default: "cpu".
        """
        indices, packets = [self.table] * len(shown), [self._packets[frame] for frame in shown]
        return torchcodec.decode(self.store, indices, packets, self.format, device=device)[0]


def write(folder: str, codec: str, gop: int, size: tuple[int, int]) -> None:
    """Write a demo dataset with two episodes and two cameras to a new folder."""
    write_demo(folder, episodes=2, codec=codec, gop=gop, size=size)


def read(folder: str) -> list[Video]:
    """Return the videos of all cameras of a demo dataset."""
    dataset, store = Dataset(folder), LocalStore(folder)
    videos = []
    for number, camera in enumerate(dataset.videos):
        files = dataset.table.video[camera]
        for i, path in enumerate(files.paths):
            episodes = np.flatnonzero(files.index == i).tolist()
            identity = [(episode, frame, number) for episode in episodes for frame in range(int(dataset.lengths[episode]))]
            videos.append(Video(store, path, identity))
    return videos


def count_wrong(frames: npt.NDArray[np.uint8], expected: npt.NDArray[np.int64]) -> int:
    """Return the number of frames that do not contain their expected identity.

    Args:
        frames: Frames, shape (n, H, W, 3).
        expected: (episode, frame, camera) of each frame, shape (n, 3).
    """
    try:
        return int((read_identities(frames) != expected).any(1).sum())
    except ValueError:  # the identity of one or more frames cannot be read
        if len(frames) == 1:
            return 1
        return sum(count_wrong(frames[i : i + 1], expected[i : i + 1]) for i in range(len(frames)))


_SECOND = 20  # frames per second of a demo dataset
SHAPES = {"one frame": (1, 1), "window of 4": (4, 1), "8 frames a second apart": (8, _SECOND), "16 anywhere": (16, 0)}
"""Shapes of requests: {name: (number of frames, their distance in frames, or 0 for random frames)}."""


def request(shape: str, count: int, rng: np.random.Generator) -> list[int]:
    """Return the numbers of the frames of a random request, in increasing order.

    Args:
        shape: Name in `SHAPES`.
        count: Number of frames of the video. A request for more frames than the video has is shortened.
        rng: Random generator.
    """
    frames, distance = SHAPES[shape]
    if not distance:
        return sorted(rng.choice(count, min(frames, count), replace=False).tolist())
    first = int(rng.integers(max(count - (frames - 1) * distance, distance)))
    return list(range(first, count, distance))[:frames]


def mix(folder: str, top: str, side: str) -> str:
    """Write a copy of dataset `top` whose second camera is that of dataset `side`. The two may have different codecs.

    Returns:
        `folder`.
    """
    shutil.copytree(top, folder)
    camera = Dataset(top).cameras[1]
    shutil.rmtree(Path(folder, "videos", camera))
    shutil.copytree(Path(side, "videos", camera), Path(folder, "videos", camera))
    return folder

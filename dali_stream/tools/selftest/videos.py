"""Videos whose frames contain their identity, and requests for frames."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.decode import torchcodec
from dali_stream.demo import write_demo
from dali_stream.mp4.clip import Clip, pack
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Video:
    """One MP4 of a demo dataset.

    Attributes:
        store: Storage of the file.
        table: Index of the file.
        format: Format of the video.
        identity: (episode, frame, camera) of each frame in display order, shape (n, 3).
    """

    store: LocalStore
    table: VideoIndex
    format: VideoFormat
    identity: Int64

    def clip(self, shown: Sequence[int]) -> Clip:
        """Return a packed clip with some frames, which are numbered in display order."""
        return pack(self.store, [self.table] * len(shown), self._packets(shown))

    def frames(self, shown: Sequence[int], device: str = "cpu") -> npt.NDArray[np.uint8]:
        """Return some frames, decoded by torchcodec, with shape (n, H, W, 3).

        Args:
            shown: Numbers of the frames in display order.
            device: Device of the decoder, such as "cuda:0". Default: "cpu".
        """
        indices = [self.table] * len(shown)
        return torchcodec.decode(self.store, indices, self._packets(shown), self.format, device=device)[0]

    def _packets(self, shown: Sequence[int]) -> list[int]:
        packets: list[int] = self.table.display_order[list(shown)].tolist()
        return packets


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
            table = read_index(store, path)
            identity = [
                (episode, frame, number)
                for episode in np.flatnonzero(files.index == i).tolist()
                for frame in range(int(dataset.lengths[episode]))
            ]
            videos.append(Video(store, table, describe(table.configs[0]), np.array(identity)))
    return videos


SHAPES = ("one frame", "window of 4", "8 frames a second apart", "16 anywhere")
_SECOND = 20  # frames per second of a demo dataset


def request(shape: str, count: int, rng: np.random.Generator) -> list[int]:
    """Return the numbers of the frames of a random request, in increasing order.

    Args:
        shape: Name in `SHAPES`.
        count: Number of frames of the video.
        rng: Random generator.
    """
    first = int(rng.integers(count))
    if shape == "one frame":
        return [first]
    if shape == "window of 4":
        return list(range(first, min(first + 4, count)))
    if shape == "8 frames a second apart":
        return list(range(first % _SECOND, count, _SECOND))[:8]
    return sorted(rng.choice(count, min(16, count), replace=False).tolist())


def mix(folder: str, top: str, side: str) -> None:
    """Write a copy of dataset `top` whose second camera is that of dataset `side`. The two may have different codecs."""
    shutil.copytree(top, folder)
    camera = Dataset(top).cameras[1]
    shutil.rmtree(Path(folder, "videos", camera))
    shutil.copytree(Path(side, "videos", camera), Path(folder, "videos", camera))

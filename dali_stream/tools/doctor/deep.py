"""Decodes every frame, as `--deep` asks."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from dali_stream import process
from dali_stream.dataset import Dataset
from dali_stream.decode import images as image
from dali_stream.errors import DecodeError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import LACKING, Int64, VideoIndex
from dali_stream.tools.doctor.report import OK, PROBLEM, Result

Progress = Callable[[int, int], None]  # frames decoded, frames in all
_AT_ONCE = 64  # frames of a task, unless a single GOP has more


class _Part(NamedTuple):
    """Some frames of an episode, whole GOPs of one sample description, by rising packet."""

    episode: int
    frames: list[int]
    packets: list[int]


class Deep:
    """Decodes all frames of the selected cameras with the decoder of the CPU route, in threads of this process.

    `progress` is called as (frames decoded, frames in all), from several threads.

    Attributes:
        broken: per camera and episode, its first frame that cannot be decoded, and why.
    """

    def __init__(self, dataset: Dataset, progress: Progress) -> None:
        self._dataset, self._progress = dataset, progress
        self._done, self._total = 0, int(dataset.lengths.sum()) * len(dataset.cameras)
        self._lock = threading.Lock()
        self._threads = process.reading_threads(dataset.data_store.remote)
        self.broken: dict[str, dict[int, tuple[int, str]]] = {camera: {} for camera in dataset.cameras}

    def video(self, camera: str, table: VideoIndex, packets: Mapping[int, Int64]) -> None:
        """Decodes the frames of episodes, by their packets in one file.

        Raises:
            StorageError: it cannot be read.
            DaliStreamError: torchcodec cannot be loaded.
        """
        from dali_stream.decode import torchcodec as decode  # loads torch

        store = self._dataset.data_store

        def broken(part: _Part, count: int) -> str:
            """Why the first `count` frames cannot be decoded; empty if they can."""
            chosen = part.packets[:count]
            video = describe(table.configs[table.config[chosen[0]]])
            try:
                for _ in decode.decode_in_parts(
                    store, [table] * count, chosen, video, decode.frames_at_once((video.height, video.width))
                ):
                    pass
            except DecodeError as error:
                where = store.where(table.path)
                return str(error) if str(error).startswith(where) else f"{where}: {error}"
            return ""

        def check(part: _Part) -> None:
            if broken(part, len(part.packets)):
                count = 1 + bisect.bisect_left(range(1, len(part.packets)), True, key=lambda n: bool(broken(part, n)))
                self._fail(camera, part.episode, part.frames[count - 1], broken(part, count))
            self._count(len(part.packets))

        with ThreadPoolExecutor(self._threads, thread_name_prefix="dali_stream doctor") as pool:
            list(pool.map(check, _parts(table, packets)))

    def images(self, camera: str) -> None:
        """Decodes the images of a camera whose frames are in the rows.

        Raises:
            DaliStreamError: rows cannot be read.
        """
        dataset = self._dataset
        reader = RowReader(dataset, keys={camera})

        def check(episode: int) -> None:
            for frame, encoded in enumerate(reader.read(episode)[episode][camera]):
                try:
                    image.decode(encoded, dataset.features[camera])
                except DecodeError as error:
                    self._fail(camera, episode, frame, str(error))
            self._count(int(dataset.lengths[episode]))

        with ThreadPoolExecutor(self._threads, thread_name_prefix="dali_stream doctor") as pool:
            list(pool.map(check, range(dataset.num_episodes)))

    def found(self, camera: str) -> dict[str, Result]:
        """What was found of a camera, by the name of the finding."""
        broken, dataset = self.broken[camera], self._dataset
        if not broken:
            return {f"{camera} all frames": (OK, f"decoded, in {counted(dataset.num_episodes, 'episode')}", "")}
        first = min(broken)
        frame, why = broken[first]
        more = f"; {len(broken)} of {dataset.num_episodes} episodes have such frames" if len(broken) > 1 else ""
        text = f"episode {dataset.episodes[first]}, frame {frame}: {why}{more}"
        return {f"{camera} all frames": (PROBLEM, text, "copy the files again, or exclude these episodes (episodes=...)")}

    def _fail(self, camera: str, episode: int, frame: int, why: str) -> None:
        with self._lock:
            before = self.broken[camera].get(episode, (frame, why))
            self.broken[camera][episode] = min(before, (frame, why))

    def _count(self, frames: int) -> None:
        with self._lock:
            self._done += frames
            self._progress(self._done, self._total)


def _parts(table: VideoIndex, packets: Mapping[int, Int64]) -> Iterator[_Part]:
    for episode, found in packets.items():
        frames = np.flatnonzero(found != LACKING)
        frames = frames[np.argsort(found[frames], kind="stable")]
        gops = table.gop_start[found[frames]]
        ends = [*(np.flatnonzero(np.diff(gops)) + 1).tolist(), len(frames)]
        start = 0
        for end, following in zip(ends, [*ends[1:], 0], strict=True):
            changes = following and table.config[found[frames[end]]] != table.config[found[frames[start]]]
            if end > start and (end - start >= _AT_ONCE or not following or changes):
                chosen = frames[start:end]
                yield _Part(episode, chosen.tolist(), found[chosen].tolist())
                start = end

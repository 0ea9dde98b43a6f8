"""Decoded frames: one per camera by every decoder of this machine that a Loader could choose, and all of them for `--deep`."""

from __future__ import annotations

import bisect
import dataclasses
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream import process
from dali_stream.dataset import Dataset
from dali_stream.decode import images as image
from dali_stream.errors import DecodeError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import LACKING, Int64, VideoIndex
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.report import OK, PROBLEM, Result
from dali_stream.tools.isolated import Call, call_each

# Of luma, since decoders upsample chroma differently: in RGB, DALI and FFmpeg differ by 31 dB in saturated colours. Measured in
# luma, VP9 on a CPU: 45.4 to 46.7 dB between the two, on drawn frames and on the G1 recording; at most 22 for the next frame of
# a moving drawn scene; 32 for BT.601 taken for BT.709 in saturated colours. A wrong matrix in muted colours, and a neighbouring
# frame of a still scene, are not detected.
LEAST_PSNR_DB = 35.0
_LUMA = (0.299, 0.587, 0.114)  # of RGB, BT.601
Progress = Callable[[int, int], None]  # frames decoded, frames in all
_AT_ONCE = 64  # frames that `Deep` decodes in a task, unless a single GOP has more


@dataclass(frozen=True)
class Decoders:
    """Decoders that load on this machine. `gpus`: {name: index} of those with known NVDEC capabilities, one of each kind."""

    torchcodec: bool
    dali: bool
    gpus: Mapping[str, int]


@dataclass(frozen=True)
class Task:
    """A frame to decode, the first request of `clip`. `routes` are (name, whether DALI decodes, on which GPU)."""

    camera: str
    clip: Clip
    video: VideoFormat
    routes: Sequence[tuple[str, bool, int | None]]


@dataclass(frozen=True)
class Decoded:
    """Attributes: `error`, empty on success; `psnr_db` against the first decoder that succeeded (None: this is the first)."""

    error: str = ""
    psnr_db: float | None = None


def decode(tasks: Sequence[Task], limit_s: float) -> dict[str, dict[str, Decoded]]:
    """{camera: {route: result}}. A process per route decodes all cameras; if it crashes, another continues."""
    found: dict[str, dict[str, Decoded]] = {task.camera: {} for task in tasks}
    decoded: dict[str, npt.NDArray[np.uint8]] = {}
    with tempfile.TemporaryDirectory(prefix="dali-stream-doctor-") as folder:
        clips = [Path(folder, f"{number}.mp4") for number in range(len(tasks))]
        for task, clip in zip(tasks, clips, strict=True):
            clip.write_bytes(task.clip.data)
        for route in dict.fromkeys(route for task in tasks for route in task.routes):
            name, dali, gpu = route
            own = [(task, clip) for task, clip in zip(tasks, clips, strict=True) if route in task.routes]
            calls: list[Call] = []
            for task, clip in own:
                arguments = {"clip": str(clip), "frame": task.clip.frames[0], "video": dataclasses.asdict(task.video)}
                arguments |= {"dali": dali, "gpu": gpu, "out": f"{clip}.npy"}
                calls.append((str(answers.__file__), "decode", arguments))
            for (task, clip), answer in zip(own, call_each(calls, limit_s), strict=True):
                if answer.error:
                    found[task.camera][name] = Decoded(answer.reason)
                    continue
                frame = np.load(f"{clip}.npy")
                first = decoded.setdefault(task.camera, frame)
                found[task.camera][name] = Decoded("", None if first is frame else psnr(first, frame))
    return found


def psnr(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
    """Peak signal to noise ratio in dB of two frames' luma; 0 where their shapes differ, 99 where they are equal."""
    if one.shape != other.shape:
        return 0.0
    error = float(np.mean(((one.astype(np.float64) - other) @ _LUMA) ** 2))
    return round(10 * math.log10(255**2 / error), 1) if error else 99.0


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
                return f"{where}: {str(error).removeprefix(f'{where}: ')}"
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

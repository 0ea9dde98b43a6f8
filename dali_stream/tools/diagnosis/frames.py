"""Checks that decode: one frame per camera with each decoder that a Loader could choose, their speed, and all frames."""

from __future__ import annotations

import bisect
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream import process
from dali_stream.dataset import Dataset
from dali_stream.decode import images
from dali_stream.decode.route import Route
from dali_stream.errors import DecodeError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import LACKING, Int64, VideoIndex
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Result
from dali_stream.tools.isolated import Answer, Call, call_each

# Frames are compared in luma, since decoders upsample chroma differently: in saturated colours, the PSNR of DALI against FFmpeg
# is only 31 dB in RGB. In luma, with VP9 on a CPU, it was 45.4 to 46.7 dB on drawn frames and on the G1 recording. A wrong
# frame (the next one of a moving drawn scene) had at most 22 dB, and a wrong matrix (BT.601 interpreted as BT.709) had 32 dB in
# saturated colours. A wrong matrix in muted colours, and a neighbouring frame of a still scene, are not detected.
LEAST_PSNR_DB = 35.0
_LUMA = (0.299, 0.587, 0.114)  # weights of R, G and B in BT.601
T = TypeVar("T")
_AT_ONCE = 64  # approximate number of frames that `Deep` decodes in a task, which has at least one whole GOP


@dataclass(frozen=True)
class Decoders:
    """Decoders that load on this machine.

    Attributes:
        torchcodec: Whether torchcodec loads.
        dali: Whether DALI loads.
        gpus: {name: index} of one GPU of each kind whose NVDEC capabilities are known.
    """

    torchcodec: bool
    dali: bool
    gpus: Mapping[str, int]


class Via(NamedTuple):
    """A decoder: DALI on a GPU or the CPU, or torchcodec on the CPU."""

    name: str
    dali: bool = False
    gpu: int | None = None


@dataclass(frozen=True)
class Task:
    """The first requested frame of `clip`, and the decoders that decode it."""

    camera: str
    clip: Clip
    video: VideoFormat
    decoders: Sequence[Via]


@dataclass(frozen=True)
class Decoded:
    """Result of a decoder.

    Attributes:
        error: Reason for a failure. Empty on success.
        psnr_db: PSNR in dB against the frame of the first decoder that succeeded. None for that decoder, and on failure.
    """

    error: str = ""
    psnr_db: float | None = None


def decode(tasks: Sequence[Task], limit_s: float) -> dict[str, dict[str, Decoded]]:
    """Decode the frame of each task with each of its decoders. Return {camera: {decoder: result}}.

    One process per decoder decodes all cameras. If this process crashes, another one continues with the next camera.

    Args:
        tasks: Frames and decoders.
        limit_s: Time limit of each process, in seconds.
    """
    results: dict[str, dict[str, Decoded]] = {task.camera: {} for task in tasks}
    frames: dict[str, npt.NDArray[np.uint8]] = {}
    for via in dict.fromkeys(via for task in tasks for via in task.decoders):
        own = [task for task in tasks if via in task.decoders]
        calls = [partial(answers.decode, task.clip, task.video, via.dali, via.gpu) for task in own]
        for task, answer in zip(own, call_each(calls, limit_s), strict=True):
            if answer.error:
                results[task.camera][via.name] = Decoded(answer.reason)
                continue
            first = frames.setdefault(task.camera, answer.value)
            results[task.camera][via.name] = Decoded("", None if first is answer.value else psnr(first, answer.value))
    return results


def psnr(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
    """Return the peak signal-to-noise ratio of the luma of two frames, in dB.

    It is 0 if the shapes differ, and 99 if the frames are equal.

    Args:
        one, other: Frames of shape (H, W, 3).
    """
    if one.shape != other.shape:
        return 0.0
    error = float(np.mean(((one.astype(np.float64) - other) @ _LUMA) ** 2))
    return round(10 * math.log10(255**2 / error), 1) if error else 99.0


def measure_speeds(calls: Mapping[tuple[str, str], Call], limit_s: float) -> tuple[dict[str, Result], dict[str, Any]]:
    """Measure the speed of decoders in another process.

    Args:
        calls: {(camera, kind of GPU): call of `answers.speed`}.
        limit_s: Time limit of a process, in seconds.

    Returns:
        Results by name, and {camera: {kind of GPU: speeds}} for the report.
    """
    results: dict[str, Result] = {}
    facts: dict[str, Any] = {}
    for (camera, where), answer in zip(calls, call_each(list(calls.values()), limit_s), strict=True):
        results[f"{camera} speed on {where}"] = _speed_result(answer)
        facts.setdefault(camera, {})[where] = {} if answer.error else dataclasses.asdict(answer.value)
    return results, facts


def _speed_result(answer: Answer) -> Result:
    if answer.error:
        return WARNING, f"it could not be measured: {answer.reason}", 'use Loader(decode="torchcodec") if the Loader fails, too'
    text = str(answer.value)
    if advice := Route("dali", "", answer.value).advice:
        comparison, _, remedy = advice.partition(". ")
        return WARNING, f"{text}. {comparison}", f"{remedy[0].lower()}{remedy[1:]}"
    return OK, text, ""


class _Part(NamedTuple):
    """Some frames of an episode in decode order: consecutive GOPs with the same sample description."""

    episode: int
    frames: list[int]
    packets: list[int]


class Deep:
    """Decodes all frames of the selected cameras with the decoder of the CPU route, in threads of this process.

    Args:
        dataset: Dataset, or a selected part of one.
        progress: Function that is called from several threads with (frames decoded, number of frames).
    """

    def __init__(self, dataset: Dataset, progress: Callable[[int, int], None]) -> None:
        self._dataset, self._progress = dataset, progress
        self._done, self._total = 0, int(dataset.lengths.sum()) * len(dataset.cameras)
        self._lock = threading.Lock()
        # {camera: {episode: (first frame that cannot be decoded, reason)}}
        self._broken: dict[str, dict[int, tuple[int, str]]] = {camera: {} for camera in dataset.cameras}

    def decode_videos(self, camera: str, table: VideoIndex, packets: Mapping[int, Int64]) -> None:
        """Decode the frames of all episodes of one file.

        Args:
            camera: Key of the camera.
            table: Index of the file.
            packets: {episode: packet of each row}.

        Raises:
            StorageError: If the file cannot be read.
        """
        from dali_stream.decode import torchcodec as decoder  # loads torch

        store = self._dataset.data_store

        def error(part: _Part, count: int) -> str:
            """Return the reason why the first `count` frames cannot be decoded. Empty if they can."""
            chosen = part.packets[:count]
            video = describe(table.configs[table.config[chosen[0]]])
            at_once = decoder.frames_at_once((video.height, video.width))
            try:
                for _ in decoder.decode_in_parts(store, [table] * count, chosen, video, at_once):
                    pass
            except DecodeError as error:
                where = store.where(table.path)
                return f"{where}: {str(error).removeprefix(f'{where}: ')}"
            return ""

        def check(part: _Part) -> None:
            # An error does not say which frame caused it. A binary search finds the first frame that cannot be decoded.
            if error(part, len(part.packets)):
                count = 1 + bisect.bisect_left(range(1, len(part.packets)), True, key=lambda n: bool(error(part, n)))
                self._fail(camera, part.episode, part.frames[count - 1], error(part, count))
            self._count(len(part.packets))

        self._each(check, _parts(table, packets))

    def decode_images(self, camera: str) -> None:
        """Decode all images of a camera whose frames are images in the rows.

        Raises:
            DaliStreamError: If rows cannot be read.
        """
        dataset, reader = self._dataset, RowReader(self._dataset, keys={camera})

        def check(episode: int) -> None:
            for frame, encoded in enumerate(reader.read(episode)[episode][camera]):
                try:
                    images.decode(encoded, dataset.features[camera])
                except DecodeError as error:
                    self._fail(camera, episode, frame, str(error))
            self._count(int(dataset.lengths[episode]))

        self._each(check, range(dataset.num_episodes))

    def result(self, camera: str) -> Result:
        """Return the result for a camera."""
        broken, dataset = self._broken[camera], self._dataset
        if not broken:
            return OK, f"decoded, in {counted(dataset.num_episodes, 'episode')}", ""
        first = min(broken)
        frame, error = broken[first]
        more = f". {len(broken)} of {dataset.num_episodes} episodes have such frames" if len(broken) > 1 else ""
        text = f"episode {dataset.episodes[first]}, frame {frame}: {error}{more}"
        return PROBLEM, text, "copy the files again, or exclude these episodes (episodes=...)"

    def _each(self, check: Callable[[T], None], items: Iterable[T]) -> None:
        threads = process.reading_threads(self._dataset.data_store.remote)
        with ThreadPoolExecutor(threads, thread_name_prefix="dali_stream doctor") as pool:
            list(pool.map(check, items))

    def _fail(self, camera: str, episode: int, frame: int, error: str) -> None:
        with self._lock:
            self._broken[camera][episode] = min(self._broken[camera].get(episode, (frame, error)), (frame, error))

    def _count(self, frames: int) -> None:
        with self._lock:
            self._done += frames
            self._progress(self._done, self._total)


def _parts(table: VideoIndex, packets: Mapping[int, Int64]) -> Iterator[_Part]:
    gops_at_once = max(_AT_ONCE // int(np.median(table.gop_lengths)), 1)
    for episode, own in packets.items():
        frames = np.argsort(own, kind="stable")[np.count_nonzero(own == LACKING) :]  # LACKING is less than any packet
        _, gop = np.unique(table.gop_start[own[frames]], return_inverse=True)
        part = np.stack([table.config[own[frames]], gop // gops_at_once])
        for chosen in np.split(frames, np.flatnonzero(np.diff(part).any(0)) + 1):
            if len(chosen):
                yield _Part(episode, chosen.tolist(), own[chosen].tolist())

"""Checks that decode: one frame per camera with each decoder that a Loader could choose, their speed, and all frames."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import NONE, Int64
from dali_stream.dataset import Dataset
from dali_stream.decode import images
from dali_stream.errors import DaliStreamError, DecodeError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store
from dali_stream.system import cpu
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding
from dali_stream.tools.isolated import Answer, Call, call_each
from dali_stream.tools.work import grouped

# Standard deviation of the pixels of a channel below which a frame is flat. Recorded and drawn scenes have 20 and more, and
# the noise of a covered camera has about 1.
_FLAT_STD = 2.0
_FLAT = "look at the camera with `dali-stream preview URI --out sheet.png`, and leave it out (cameras=...) if it shows nothing"
_AT_ONCE = 64  # approximate number of frames that `Deep` decodes in a task, which has at least one whole GOP
_Part = tuple[int, Int64]  # an episode, and numbers of its frames
_Failure = tuple[int, str]  # the first frame that cannot be decoded, and the reason


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


def call_by_name(calls: Mapping[str, Mapping[str, Call]], limit_s: float) -> dict[str, dict[str, Answer]]:
    """Call functions for all cameras, with one process per name. Return {camera: {name: answer}}.

    If a process crashes, another one continues with the next camera.

    Args:
        calls: {camera: {name, such as that of a decoder: call}}.
        limit_s: Time limit of each process, in seconds.
    """
    answered: dict[str, dict[str, Answer]] = {camera: {} for camera in calls}
    for name in dict.fromkeys(name for each in calls.values() for name in each):
        own = {camera: each[name] for camera, each in calls.items() if name in each}
        for camera, answer in zip(own, call_each(list(own.values()), limit_s), strict=True):
            answered[camera][name] = answer
    return answered


def located(store: Store, path: str, error: DaliStreamError) -> str:
    """Return the message of an error, with the address of the file unless the message has it already."""
    where, text = store.where(path), str(error)
    return text if where in text else f"{where}: {text}"


def find_flat_colour(name: str, image: npt.NDArray[np.uint8], where: str) -> list[Finding]:
    """Return a warning if a frame shows a single colour, as that of a covered or unplugged camera. Else an empty list.

    Args:
        name: Name of the finding.
        image: Frame of shape (H, W, C).
        where: Name of the frame, for the text.
    """
    if image.std((0, 1)).max() >= _FLAT_STD:
        return []
    text = f"{where} is one flat colour, {image.mean((0, 1)).round().astype(int).tolist()} of 255"
    return [Finding("dataset", name, WARNING, text, _FLAT)]


def check_images(key: str, dataset: Dataset, deep: Deep | None) -> list[Finding]:
    """Decode an image of the first episode of a camera whose frames are images in the rows and, with `deep`, all images."""
    height, width = dataset.features[key].frame_size
    findings = [Finding("dataset", key, OK, f"images of {height}×{width} in Parquet rows; one was decoded")]
    try:
        encoded = RowReader(dataset, keys={key}).read(0)[key]
        middle = len(encoded) // 2
        image = images.decode(encoded[middle], dataset.features[key])
        if not dataset.features[key].is_depth:
            findings += find_flat_colour(f"{key} picture", image, f"episode {dataset.episodes[0]}, frame {middle}")
        if deep:
            deep.decode_images(key)
            findings.append(deep.finding(key))
    except DaliStreamError as error:
        return [Finding("dataset", key, PROBLEM, str(error))]
    return findings


class Deep:
    """Decodes all frames of the selected cameras with the decoder of the CPU route, in threads of this process.

    Args:
        dataset: Dataset, or a selected part of one.
        progress: Function that is called with (frames decoded, number of frames).
    """

    def __init__(self, dataset: Dataset, progress: Callable[[int, int], None]) -> None:
        self._dataset, self._progress = dataset, progress
        self._done, self._total = 0, int(dataset.lengths.sum()) * len(dataset.cameras)
        self._broken: dict[str, dict[int, _Failure]] = {camera: {} for camera in dataset.cameras}

    def decode_videos(self, camera: str, table: VideoIndex, packets: Mapping[int, Int64]) -> None:
        """Decode the frames of all episodes of one file.

        Args:
            camera: Key of the camera.
            table: Index of the file.
            packets: {episode: packet of each row}.

        Raises:
            DaliStreamError: If the file cannot be read, or if a sample description is broken.
        """
        from dali_stream.decode import depth
        from dali_stream.decode import torchcodec as decoder  # loads torch

        store, decode_parts = self._dataset.data_store, None
        if self._dataset.features[camera].is_depth:
            depth.pyav(camera)
            decode_parts = depth.decode_clip_in_parts
        parts = [(episode, part) for episode, own in packets.items() for part in _parts(table, own)]

        def decode(episode: int, frames: Int64) -> None:
            chosen = packets[episode][frames].tolist()
            video, indices = table.format(table.config[chosen[0]]), [table] * len(chosen)
            at_once = decoder.frames_at_once((video.height, video.width))
            try:
                for _ in decoder.decode_in_parts(store, indices, chosen, video, at_once, decode_parts=decode_parts):
                    pass
            except DecodeError as error:
                raise DecodeError(located(store, table.path, error)) from error

        self._each(camera, decode, parts)

    def decode_images(self, camera: str) -> None:
        """Decode all images of a camera whose frames are images in the rows.

        Raises:
            DaliStreamError: If rows cannot be read.
        """
        dataset, reader = self._dataset, RowReader(self._dataset, keys={camera})

        def decode(episode: int, frames: Int64) -> None:
            encoded = reader.read(episode)[camera]
            for frame in frames.tolist():
                images.decode(encoded[frame], dataset.features[camera])

        self._each(camera, decode, [(episode, np.arange(length)) for episode, length in enumerate(dataset.lengths)])

    def finding(self, camera: str) -> Finding:
        """Return the finding for a camera."""
        broken, dataset, name = self._broken[camera], self._dataset, f"{camera} all frames"
        if not broken:
            return Finding("dataset", name, OK, f"decoded, in {counted(dataset.num_episodes, 'episode')}")
        first = min(broken)
        frame, error = broken[first]
        more = f". {len(broken)} of {dataset.num_episodes} episodes have such frames" if len(broken) > 1 else ""
        text = f"episode {dataset.episodes[first]}, frame {frame}: {error}{more}"
        return Finding("dataset", name, PROBLEM, text, "copy the files again, or exclude these episodes (episodes=...)")

    def _each(self, camera: str, decode: Callable[[int, Int64], None], parts: Sequence[_Part]) -> None:
        """Decode parts in threads, and keep the first failure of each episode."""

        def error(episode: int, frames: Int64) -> str:
            try:
                decode(episode, frames)
            except DecodeError as error:
                return str(error)
            return ""

        def check(part: _Part) -> _Failure | None:
            episode, frames = part
            if not error(*part):
                return None
            # An error does not say which frame caused it. A binary search finds the first frame that cannot be decoded.
            last = bisect.bisect_left(range(1, len(frames)), True, key=lambda count: bool(error(episode, frames[:count])))
            return int(frames[last]), error(episode, frames[: last + 1])

        threads, kept = cpu.reading_threads(self._dataset.data_store.remote), self._broken[camera]
        with ThreadPoolExecutor(threads, thread_name_prefix="dali_stream doctor") as pool:
            for (episode, frames), failure in zip(parts, pool.map(check, parts), strict=True):
                if failure:
                    kept[episode] = min(failure, kept.get(episode, failure))
                self._done += len(frames)
                self._progress(self._done, self._total)


def _parts(table: VideoIndex, packets: Int64) -> Iterator[Int64]:
    """Yield the numbers of an episode's frames in decode order, as consecutive GOPs with the same sample description."""
    frames = np.argsort(packets, kind="stable")[np.count_nonzero(packets == NONE) :]  # NONE is less than any packet
    gops = np.split(frames, np.flatnonzero(np.diff(table.gop_start(packets[frames]))) + 1) if len(frames) else []
    yield from map(np.concatenate, grouped(gops, _AT_ONCE, len, lambda gop: table.config[packets[gop[0]]]))

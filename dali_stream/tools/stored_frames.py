"""Folders of the frame cache on disk: what they hold, removal, filling ahead of a run, and comparison with a dataset."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dali_stream.dataset import Dataset
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture
from dali_stream.storage.local_files import NO_FOLLOW

_BATCH, _MEASURED = 32, 20  # batch size and number of batches that `estimate` measures
_MOST = 1 << 16  # characters of a key, far more than it has
# All frames once, in recorded order.
_IN_ORDER: dict[str, Any] = {
    "shuffle": False, "last_batch": "partial", "image_dtype": "uint8", "device": "cpu", "on_error": "substitute",
    "in_process": True,
}  # fmt: skip
_NAME = re.compile(r"[0-9a-f]{16}")  # folder of the frames with the same key


class FrameGroup(NamedTuple):
    """Frames of one size and of the same versions in a frame cache on disk.

    Attributes:
        name: Name of their folder.
        key: Description of everything that determines their pixels, besides the video files. See `pixel_key`.
        files: Number of video files, or of episodes of images, with stored frames.
        size: Bytes on disk.
        used: Time at which the last run began to use them, or at which frames were last added, in seconds since 1970.
    """

    name: str
    key: dict[str, str]
    files: int
    size: int
    used: float


def stored(folder: str | os.PathLike[str]) -> list[FrameGroup]:
    """Return what a frame cache on disk holds, the most recently used frames first.

    Raises:
        ValueError: If the folder does not exist.
    """
    return sorted((_looked_at(place, key) for place, key in _keys(folder)), key=lambda each: -each.used)


def remove(folder: str | os.PathLike[str], names: list[str]) -> int:
    """Remove frames from a frame cache on disk. Loaders that use them decode them again. Other files in the folder stay.

    Args:
        folder: Folder of the frame cache on disk.
        names: Names of the frames to remove, see `FrameGroup.name`.

    Returns:
        Number of bytes on disk that were removed.

    Raises:
        ValueError: If the folder does not exist, or has no frames of one of these names.
    """
    places = {place.name: (place, key) for place, key in _keys(folder)}
    if missing := [name for name in names if name not in places]:
        raise ValueError(f"{folder} has no frames with the name {missing[0]!r}. `dali-stream frames list {folder}` shows them")
    removed = 0
    for name in names:
        removed += _looked_at(*places[name]).size
        shutil.rmtree(places[name][0])
    return removed


def fill(dataset: Dataset | Mixture, progress: Callable[[int, int], None], **arguments: Any) -> dict[str, Any]:
    """Decode the frames of a dataset into a frame cache on disk. After an interruption, the same call continues.

    Several processes may share the work, each with its `rank` and `world_size`.

    Args:
        dataset: Dataset or mixture.
        progress: Function that is called with the number of finished batches of this process, and the number of all of them.
        arguments: Arguments of `Loader`, with `frame_cache`.

    Returns:
        Result of `Loader.stats`.
    """
    with Loader(dataset, **arguments | _IN_ORDER) as loader:
        batches = len(loader)
        for number, _ in enumerate(loader, 1):
            progress(number, batches)
        return loader.stats()


class Verified(NamedTuple):
    """Result of `verify`.

    Attributes:
        frames: Number of frames of all cameras.
        read: Number of frames that were read from the frame cache on disk.
        different: Indices of the frames that differ from the decoded ones, for each pair of a text, which names the episode and
            in a mixture also the dataset, and a camera.
    """

    frames: int
    read: int
    different: dict[tuple[str, str], list[int]]


def verify(dataset: Dataset | Mixture, progress: Callable[[int, int], None], **arguments: Any) -> Verified:
    """Decode all frames of a dataset, and compare them with those that a Loader reads from a frame cache on disk.

    Frames that are not stored, or that a Loader does not use, are decoded in both cases. No frame is added.

    Args:
        dataset: Dataset or mixture.
        progress: Function that is called with the number of finished batches, and the number of all batches.
        arguments: Arguments of `Loader`, with `frame_cache`.
    """
    different: dict[tuple[str, str], list[int]] = {}
    frame_cache = {"frame_cache": arguments.pop("frame_cache"), "frame_cache_bytes": 1}  # no room for another frame
    with Loader(dataset, **arguments | frame_cache | _IN_ORDER) as stored, Loader(dataset, **arguments | _IN_ORDER) as decoded:
        batches = len(stored)
        for number, (found, expected) in enumerate(zip(stored, decoded, strict=True), 1):
            names = found.get("dataset", [""] * len(found["index"]))  # of a mixture
            for camera in dataset.cameras:
                same = (found[camera] == expected[camera]).flatten(1).all(1)
                for sample in (~same).nonzero().flatten().tolist():
                    place = f"{names[sample]} episode {int(found['episode_index'][sample])}".strip()
                    different.setdefault((place, camera), []).append(int(found["frame_index"][sample]))
            progress(number, batches)
        stats = stored.stats()
        return Verified(stats["frames"], stats["disk_hits"], different)


class Fill(NamedTuple):
    """Size of a frame cache on disk for a dataset, and the time to fill it.

    Attributes:
        size: Bytes on disk of the frames of all cameras.
        frames_per_s: Measured speed of decoding on this machine, in frames of all cameras per second.
        seconds: Time that filling takes at this speed.
    """

    size: int
    frames_per_s: float
    seconds: float


def estimate(dataset: Dataset, image_size: tuple[int, int] | None) -> Fill:
    """Estimate the size of a frame cache on disk for a dataset and the time to fill it, by decoding the first batches.

    Args:
        dataset: Dataset.
        image_size: Size (height, width) of the frames in pixels. None for the recorded size.

    Raises:
        ValueError: If the dataset has no cameras.
    """
    if not dataset.cameras:
        raise ValueError(f"the dataset must have a camera for a frame cache on disk, got {dataset.uri} without one")
    options: dict[str, Any] = {"image_size": image_size, "image_dtype": "uint8", "device": "cpu", "shuffle": False}
    with Loader(dataset, **options, batch_size=min(_BATCH, dataset.num_frames), last_batch="partial") as loader:
        began, before = time.perf_counter(), 0
        for number, _ in enumerate(loader, 1):
            frames = loader.stats()["frames"]
            if number == 1 and len(loader) > 1:  # which also includes the start
                began, before = time.perf_counter(), frames
            if number > _MEASURED:
                break
        rate = (frames - before) / (time.perf_counter() - began)
        size = sum(map(loader._config.frame_bytes, dataset.cameras)) * dataset.num_frames
    return Fill(size, rate, dataset.num_frames * len(dataset.cameras) / rate)


def _keys(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the folders of a frame cache on disk with frames, and their keys."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ValueError(f"the frame cache on disk must be a folder, got {str(folder)!r}")
    for place in sorted(root.iterdir()):
        if _NAME.fullmatch(place.name) and not place.is_symlink():
            with suppress(OSError, ValueError, RecursionError):  # without a key, it is not a folder of a frame cache on disk
                with open(place / "key.json", opener=lambda path, flags: os.open(path, flags | NO_FOLLOW)) as file:
                    key = json.loads(file.read(_MOST))
                if isinstance(key, dict) and "layout" in key:
                    yield place, {str(name): str(value) for name, value in key.items()}


def _looked_at(place: Path, key: dict[str, str]) -> FrameGroup:
    size, files, used = 0, 0, 0.0
    for group, _, names in os.walk(place):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                status = os.lstat(os.path.join(group, name))
                size += status.st_blocks * 512
                used = max(used, status.st_mtime)
                files += Path(group) != place  # the folder itself has other files
    return FrameGroup(place.name, key, files, size, used)

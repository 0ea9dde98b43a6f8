"""Checks before anything is written, and the identity of a run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError, DecodeError
from dali_stream.lerobot import metadata
from dali_stream.lerobot.rows import check_rising
from dali_stream.mp4.boxes import children, find, read_moov
from dali_stream.mp4.index import LACKING, Int64, VideoIndex
from dali_stream.mp4.timing import Interval, explain, find_packets
from dali_stream.storage import LocalStore, Store
from dali_stream.storage.store import checked


def read_source(dataset: Dataset) -> tuple[dict[str, Any], list[str], metadata.Episodes]:
    """Of a dataset to rewrite: info.json, its video keys, and its episodes with all of these, also those that a Loader skips.

    Raises:
        ValueError: only a part of the dataset is selected.
        DatasetError: its metadata is broken.
    """
    info = metadata.read_json(dataset.store, metadata.INFO)
    keys = {
        kind: [key for key, feature in info["features"].items() if feature.get("dtype") == kind] for kind in ("image", "video")
    }
    selected = dataset.num_episodes != len(dataset.table.index) or dataset.frame_ranges is not None
    if selected or not set(keys["image"]) <= set(dataset.cameras):
        raise ValueError("only a part of the dataset is selected. Only a whole dataset can be rewritten; remove the selection")
    return info, keys["video"], dataset.read_table(keys["video"])


def check_outside(dataset: Dataset, out: str | os.PathLike[str]) -> None:
    """Raises ValueError if OUT is inside the source, or the source inside OUT."""
    place = Path(os.path.realpath(os.path.expanduser(os.fspath(out))))
    for store in dataset.stores:
        if isinstance(store, LocalStore):
            source = Path(os.path.realpath(store.address))
            if source in place.parents or place in source.parents:
                raise ValueError(f"one of {place} and the dataset's {source} lies in the other; give a folder elsewhere")


def check_apart(places: Iterable[tuple[str, str]]) -> None:
    """Checks names from the source's metadata that become paths in OUT.

    Args:
        places: (name, path) of files. No path may equal another, or be above or below it.
    """
    files: dict[PurePosixPath, str] = {}
    folders: dict[PurePosixPath, str] = {}
    for name, path in places:
        place = PurePosixPath(inside(name, path))
        above = [parent for parent in place.parents if parent.name]
        other = next((files[p] for p in (place, *above) if p in files), folders.get(place))
        if other is not None:
            raise DatasetError(
                f"{other[:80]!r} and {name[:80]!r} would be written to the same path; nothing was written. Rename one in "
                "meta/info.json and meta/episodes"
            )
        files[place] = name
        folders |= dict.fromkeys(above, name)


def inside(name: str, path: str) -> str:
    """The path itself. Raises DatasetError if it is outside OUT."""
    try:
        return checked(path)
    except DatasetError:
        raise DatasetError(
            f"{name[:80]!r} is a path outside the output folder; nothing was written. Rename it in meta/info.json and "
            "meta/episodes"
        ) from None


def refuse_sound(store: Store, path: str) -> None:
    """Raises DecodeError if an MP4 has a sound track, which would be lost."""
    moov = read_moov(store, path)
    for kind, start, end in children(moov, 0, len(moov)):
        handler = find(moov, start, end, b"mdia", b"hdlr") if kind == b"trak" else None
        if handler and moov[handler[0] + 8 : handler[0] + 12] == b"soun":
            raise DecodeError(
                f"{store.where(path)}: has sound, which cannot be copied; remove it with `ffmpeg -i IN -c copy -an OUT`"
            )


def shown(
    where: str,
    table: VideoIndex,
    interval: Interval,
    timestamp: npt.NDArray[np.float32],
    fps: float,
    tolerance_s: float | None = None,
) -> Int64:
    """Return the packets of an episode's rows. See `find_packets`.

    Args:
        where: File, camera and episode, for the message.
        table, interval, timestamp, fps, tolerance_s: See `find_packets`.

    Raises:
        DecodeError: a row has no frame.
        DatasetError: the timestamps do not rise.
    """
    check_rising(where, timestamp)
    samples = find_packets(table, interval, timestamp, fps, tolerance_s)
    if (samples == LACKING).any():
        frame = int(np.argmax(samples == LACKING))
        raise DecodeError(f"{where}, frame {frame}: {explain(table, interval, float(timestamp[frame]), fps, tolerance_s)}")
    return samples


def identity(dataset: Dataset, info: dict[str, Any], table: metadata.Episodes) -> str:
    videos = [
        [camera, files.paths, files.index.tolist(), table.start[camera].tolist()] for camera, files in table.video.items()
    ]
    return content_hash(json.dumps([dataset.fingerprint, info, videos], sort_keys=True).encode())


def content_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()

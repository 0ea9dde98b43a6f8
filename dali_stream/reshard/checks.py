"""What has to hold before anything is written, and what makes a run the same as an earlier one."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Any

from dali_stream import metadata
from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError
from dali_stream.reshard.meta import VIDEO_PATH, Layout
from dali_stream.reshard.rows import Parquet
from dali_stream.storage.store import checked


def check_whole(dataset: Dataset, info: dict[str, Any]) -> None:
    there = {key for key, feature in info["features"].items() if feature.get("dtype") == "image"}
    if dataset.num_episodes != len(dataset.table.index) or not there <= set(dataset.cameras):
        raise ValueError("a part of the dataset is selected, and only a whole one can be resharded; leave out the selection")


def check_names(layout: Layout, cameras: list[str]) -> None:
    """A camera's name becomes a folder in OUT."""
    taken: dict[PurePosixPath, str] = {}
    for camera in cameras:
        path = layout.path(VIDEO_PATH, 0, camera)
        try:
            checked(camera)
            place = PurePosixPath(checked(path))
        except DatasetError:
            raise DatasetError(
                f"the camera {camera[:80]!r} has a name that leads out of the folder of videos; nothing was written. Rename it "
                "in meta/info.json and meta/episodes"
            ) from None
        for other in taken:
            if place == other or place in other.parents or other in place.parents:
                raise DatasetError(
                    f"the cameras {taken[other]!r} and {camera!r} would be written to the same place; nothing was written. "
                    "Rename one in meta/info.json and meta/episodes"
                )
        taken[place] = camera


def check_columns(dataset: Dataset, videos: list[str], sources: list[Parquet]) -> None:
    """Everything has to be in a file that is copied."""
    features = metadata.read_json(dataset.store, metadata.INFO)["features"]
    for source in sources:
        missing = [key for key in features if key not in videos and key not in source.schema.names]
        if missing:
            raise DatasetError(
                f"{dataset.data_store.where(source.path)}: lacks the column {missing[0]}, which meta/info.json has as a "
                f"feature of dtype {str(features[missing[0]].get('dtype'))[:40]!r}; only columns and videos can be copied"
            )


def chunks_size(info: dict[str, Any]) -> int:
    size = info.get("chunks_size")
    return size if type(size) is int and 0 < size < 1000 else 1000  # names of three digits, which are to sort


def identity(dataset: Dataset, info: dict[str, Any], table: metadata.Episodes) -> str:
    videos = [
        [camera, files.paths, files.index.tolist(), table.start[camera].tolist()] for camera, files in table.video.items()
    ]
    return content_hash(json.dumps([dataset.fingerprint, info, videos], sort_keys=True).encode())


def content_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()

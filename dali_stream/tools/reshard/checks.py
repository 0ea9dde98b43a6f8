"""Checks before anything is written."""

from __future__ import annotations

from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError
from dali_stream.lerobot import metadata
from dali_stream.tools.output.checks import check_apart, inside
from dali_stream.tools.reshard.meta import VIDEO_PATH, Layout
from dali_stream.tools.reshard.rows import Parquet


def check_names(layout: Layout, cameras: list[str]) -> None:
    """Checks camera names, which become folders in OUT."""
    check_apart((camera, layout.path(VIDEO_PATH, 0, inside(camera, camera))) for camera in cameras)


def check_columns(dataset: Dataset, videos: list[str], sources: list[Parquet]) -> None:
    """Checks that every feature is a video or a column of every data file."""
    features = metadata.read_json(dataset.store, metadata.INFO)["features"]
    for source in sources:
        missing = [key for key in features if key not in videos and key not in source.schema.names]
        if missing:
            raise DatasetError(
                f"{dataset.data_store.where(source.path)}: has no column {missing[0]}, a feature of dtype "
                f"{str(features[missing[0]].get('dtype'))[:40]!r} in meta/info.json. Only columns and videos can be copied; "
                "remove the feature or copy the dataset again"
            )


def chunks_size(info: dict[str, Any]) -> int:
    size = info.get("chunks_size")
    return size if type(size) is int and 0 < size < 1000 else 1000  # three digits sort by name

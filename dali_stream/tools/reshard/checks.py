"""What has to hold before anything is written."""

from __future__ import annotations

from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError
from dali_stream.lerobot import metadata
from dali_stream.tools.output.checks import check_apart, inside
from dali_stream.tools.reshard.meta import VIDEO_PATH, Layout
from dali_stream.tools.reshard.rows import Parquet


def check_names(layout: Layout, cameras: list[str]) -> None:
    """A camera's name becomes a folder in OUT."""
    check_apart((camera, layout.path(VIDEO_PATH, 0, inside(camera, camera))) for camera in cameras)


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

"""Checks of a dataset: its metadata, its files, its rows, and each camera."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.decode import images
from dali_stream.errors import DaliStreamError, DatasetError, StorageError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.tools.description import missing_files
from dali_stream.tools.diagnosis import frames
from dali_stream.tools.diagnosis.camera import Camera, check_frame
from dali_stream.tools.diagnosis.frames import Decoders, Deep
from dali_stream.tools.diagnosis.report import OK, PROBLEM, Check, Finding, Result, as_findings, run_checks
from dali_stream.tools.diagnosis.rows import Rows, check_names, check_rows

_SHOWN = 5  # missing files named


def opened(uri: str | os.PathLike[str], **options: Any) -> Dataset | Finding:
    """Return a dataset, or a finding if it cannot be opened.

    Raises:
        ValueError: If an argument does not fit the address.
    """
    try:
        return Dataset(uri, **options)
    except DaliStreamError as error:
        return unreadable(error)


def unreadable(error: DaliStreamError) -> Finding:
    """Return the finding on a dataset that cannot be opened or reached."""
    if isinstance(error, StorageError):
        remedy = "check what the message names: the address, the network or the credentials"
        return Finding("dataset", "storage", PROBLEM, str(error), remedy)
    return Finding("dataset", "metadata", PROBLEM, str(error), "repair what the message names, or copy the dataset again")


def examine(
    dataset: Dataset, decoders: Decoders, limit_s: float, deep: Deep | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """Run all checks of a dataset.

    Args:
        dataset: Dataset to check.
        decoders: Decoders that load on this machine.
        limit_s: Maximum time of decoding one frame of each camera, in seconds.
        deep: Decodes all frames. Without it, only a part of a large dataset is checked.

    Returns:
        Findings, and the facts for the report.
    """
    results: dict[str, Result] = {}
    cameras: dict[str, Any] = {}
    facts = {
        "uri": dataset.uri,
        "address": dataset.store.address,
        "episodes": dataset.num_episodes,
        "frames": dataset.num_frames,
        "fps": dataset.fps,
        "cameras": cameras,
    }
    rows = Rows(dataset, deep is not None)
    try:
        for name, result in run_checks(CHECKS, rows):
            results[name] = result
        videos = [Camera(key, rows, decoders, deep) for key in dataset.videos]
    except StorageError as error:
        return [*as_findings("dataset", results.items()), unreadable(error)], facts
    decoded = frames.decode([camera.task for camera in videos if camera.task], limit_s)
    speed_results, rates = frames.measure_speeds([each for camera in videos for each in camera.speeds], len(videos), limit_s)
    for key in dataset.images:
        height, width = dataset.picture_size(key)
        results |= _check_images(dataset, key, deep)
        cameras[key] = {"kind": "image", "height": height, "width": width}
    for camera in videos:
        own = decoded.get(camera.key, {})
        results |= camera.results | check_frame(camera, own)
        if deep:
            results[f"{camera.key} all frames"] = deep.result(camera.key)
        cameras[camera.key] = camera.facts | {
            "decoded": {decoder: dataclasses.asdict(each) for decoder, each in own.items()},
            "speed": rates.get(camera.key, {}),
        }
    return as_findings("dataset", (results | speed_results).items()), facts


def check_metadata(rows: Rows) -> Result:
    """Describe the size of the dataset, whose metadata has been read."""
    dataset = rows.dataset
    size = f"{counted(dataset.num_episodes, 'episode')}, {counted(dataset.num_frames, 'frame')}"
    return OK, f"{dataset.store.address}: {size} at {dataset.fps:g} fps", ""


def check_statistics(rows: Rows) -> Result:
    """Check that statistics can be read if the dataset has some."""
    place = rows.dataset.stored_stats_place
    try:
        stats = rows.dataset.stored_stats
    except DaliStreamError as error:
        return PROBLEM, str(error), f"copy or fetch {place} again, or write another: `dali-stream stats URI --out FILE`"
    if stats:
        return OK, f"{place} has those of {counted(len(stats), 'feature')}", ""
    return OK, f"{place} is missing: only `normalize` needs it, and `dali-stream stats URI` computes it", ""


def check_files(rows: Rows) -> Result:
    """Check that all files exist. Raises StorageError."""
    dataset = rows.dataset
    try:
        missing, looked_for = missing_files(dataset, rows.deep)
    except DatasetError as error:
        return PROBLEM, str(error), "correct data_path and video_path in meta/info.json"
    if not missing:
        return OK, f"{counted(looked_for, 'file')} of rows and video, none missing", ""
    names = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    text = f"{dataset.data_store.address}: {len(missing)} of {counted(looked_for, 'file')} missing: {names}"
    remedy = "copy or fetch them again, or exclude their episodes (episodes=...); `dali-stream info URI --json` lists all"
    return PROBLEM, text, remedy


def _check_images(dataset: Dataset, key: str, deep: Deep | None) -> dict[str, Result]:
    """Decode an image of the first episode, or all images."""
    height, width = dataset.picture_size(key)
    results: dict[str, Result] = {key: (OK, f"images of {height}×{width} in Parquet rows; one was decoded", "")}
    try:
        encoded = RowReader(dataset, keys={key}).read(0)[0][key]
        images.decode(encoded[len(encoded) // 2], dataset.features[key])
        if deep:
            deep.decode_images(key)
            results[f"{key} all frames"] = deep.result(key)
    except DaliStreamError as error:
        return {key: (PROBLEM, str(error), "record, convert or copy the dataset again")}
    return results


CHECKS: Mapping[str, Check[Rows]] = {
    "metadata": check_metadata,
    "statistics": check_statistics,
    "files": check_files,
    "rows": check_rows,
    "tasks": check_names,
}
"""Checks of a dataset by name, in reading order. Those of a camera are `camera.CHECKS`."""

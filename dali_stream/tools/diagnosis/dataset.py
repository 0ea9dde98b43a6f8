"""Findings on a dataset: its metadata, its rows, and each camera."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.decode import images as image
from dali_stream.errors import DaliStreamError, DatasetError, StorageError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.tools.description import missing_files
from dali_stream.tools.diagnosis import frames, speed
from dali_stream.tools.diagnosis.camera import Camera
from dali_stream.tools.diagnosis.frames import Decoded, Decoders, Deep
from dali_stream.tools.diagnosis.report import OK, PROBLEM, Finding, Result
from dali_stream.tools.diagnosis.rows import Rows, examine_names, spread
from dali_stream.tools.diagnosis.rows import examine as examine_rows

_SHOWN = 5  # missing files named


def opened(uri: str | os.PathLike[str], **options: Any) -> Dataset | Finding:
    """A dataset, or a finding if it cannot be opened.

    Raises:
        ValueError: an argument that does not fit the address.
    """
    try:
        return Dataset(uri, **options)
    except DaliStreamError as error:
        return unreadable(error)


def unreadable(error: DaliStreamError) -> Finding:
    """The finding on a dataset that cannot be opened or reached."""
    if isinstance(error, StorageError):
        remedy = "check what the message names: the address, the network or the credentials"
        return Finding("dataset", "storage", PROBLEM, str(error), remedy)
    return Finding("dataset", "metadata", PROBLEM, str(error), "repair what the message names, or copy the dataset again")


def examine(
    dataset: Dataset, decoders: Decoders, limit_s: float, deep: Deep | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and the facts for the report. Without `deep`, one frame of each camera is decoded within `limit_s` seconds, and
    of a large dataset only a part is checked."""
    size = f"{counted(dataset.num_episodes, 'episode')}, {counted(dataset.num_frames, 'frame')}"
    found: dict[str, Result] = {"metadata": (OK, f"{dataset.store.address}: {size} at {dataset.fps:g} fps", "")}
    found["statistics"] = _statistics(dataset)
    rows = Rows(dataset)
    try:
        found["files"] = _files(dataset, bool(deep))
        found["rows"] = examine_rows(dataset, rows, spread(dataset, dataset.num_episodes, bool(deep)))
        found["tasks"] = examine_names(dataset, rows)
        cameras = [Camera(dataset, key, rows, decoders, deep) for key in dataset.videos]
    except StorageError as error:
        return [*_findings(found), unreadable(error)], _facts(dataset, {})
    decoded = frames.decode([camera.task for camera in cameras if camera.task], limit_s)
    speed_findings, rates = speed.measure([each for camera in cameras for each in camera.speeds], len(cameras), limit_s)
    facts: dict[str, Any] = {}
    for key in dataset.cameras:
        if key not in dataset.videos:
            found |= _images(dataset, key, deep)
            facts[key] = {"kind": "image", "height": dataset.picture_size(key)[0], "width": dataset.picture_size(key)[1]}
    for camera in cameras:
        own: dict[str, Decoded] = decoded.get(camera.key, {})
        found |= camera.found | camera.decoded(own) | (deep.found(camera.key) if deep else {})
        facts[camera.key] = camera.facts | {
            "decoded": {route: dataclasses.asdict(each) for route, each in own.items()},
            "speed": rates.get(camera.key, {}),
        }
    found |= speed_findings
    return _findings(found), _facts(dataset, facts)


def _findings(found: Mapping[str, Result]) -> list[Finding]:
    return [Finding("dataset", name, *result) for name, result in found.items()]


def _files(dataset: Dataset, deep: bool) -> Result:
    """The result of `missing_files`. Raises StorageError."""
    try:
        missing, looked_for = missing_files(dataset, deep)
    except DatasetError as error:
        return PROBLEM, str(error), "correct data_path and video_path in meta/info.json"
    if not missing:
        return OK, f"{counted(looked_for, 'file')} of rows and video, none missing", ""
    named = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    text = f"{dataset.data_store.address}: {len(missing)} of {counted(looked_for, 'file')} missing: {named}"
    remedy = "copy or fetch them again, or exclude their episodes (episodes=...); `dali-stream info URI --json` lists all"
    return PROBLEM, text, remedy


def _facts(dataset: Dataset, cameras: dict[str, Any]) -> dict[str, Any]:
    return {
        "uri": dataset.uri,
        "address": dataset.store.address,
        "episodes": dataset.num_episodes,
        "frames": dataset.num_frames,
        "fps": dataset.fps,
        "cameras": cameras,
    }


def _statistics(dataset: Dataset) -> Result:
    try:
        found = dataset.stored_stats
    except DaliStreamError as error:
        remedy = f"copy or fetch {dataset.stored_stats_place} again, or write another: `dali-stream stats URI --out FILE`"
        return PROBLEM, str(error), remedy
    if found:
        return OK, f"{dataset.stored_stats_place} has those of {counted(len(found), 'feature')}", ""
    only = "only `normalize` needs it, and `dali-stream stats URI` computes it"
    return OK, f"{dataset.stored_stats_place} is missing: {only}", ""


def _images(dataset: Dataset, key: str, deep: Deep | None) -> dict[str, Result]:
    """By name. Decodes an image of the first episode, or all."""
    height, width = dataset.picture_size(key)
    try:
        encoded = RowReader(dataset, keys={key}).read(0)[0][key]
        image.decode(encoded[len(encoded) // 2], dataset.features[key])
        if deep:
            deep.images(key)
    except DaliStreamError as error:
        return {key: (PROBLEM, str(error), "record, convert or copy the dataset again")}
    found: dict[str, Result] = {key: (OK, f"images of {height}×{width} in Parquet rows; one was decoded", "")}
    return found | (deep.found(key) if deep else {})

"""Runs the checks of a dataset and of its cameras, and decodes frames."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.decode import images
from dali_stream.errors import DaliStreamError, StorageError
from dali_stream.lerobot.rows import RowReader
from dali_stream.tools.diagnosis import frames
from dali_stream.tools.diagnosis.camera import Camera, check_frame
from dali_stream.tools.diagnosis.checks import CHECKS
from dali_stream.tools.diagnosis.frames import Decoders, Deep
from dali_stream.tools.diagnosis.report import OK, PROBLEM, Finding, Result, as_findings, run_checks
from dali_stream.tools.diagnosis.rows import Rows


def opened(uri: str | os.PathLike[str], **options: Any) -> Dataset | Finding:
    """Open a dataset. Return the dataset, or a finding if it cannot be opened.

    Args:
        uri: Address of the dataset.
        options: Other arguments of `Dataset`.

    Raises:
        ValueError: If an argument does not fit the address.
    """
    try:
        return Dataset(uri, **options)
    except DaliStreamError as error:
        return unreadable(error)


def unreadable(error: DaliStreamError) -> Finding:
    """Return the finding for a dataset that cannot be opened or reached."""
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
        limit_s: Time limit of a decoder for one frame of each camera, in seconds.
        deep: Decoder of all frames. Default: None, which checks only a part of a large dataset.

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
        results.update(run_checks(CHECKS["dataset"], rows))  # results before an error are kept
        videos = [Camera(key, rows, decoders, deep) for key in dataset.videos]
        for camera in videos:
            camera.run(CHECKS["camera"])
    except StorageError as error:
        return [*as_findings("dataset", results.items()), unreadable(error)], facts
    decoded = frames.decode([camera.task for camera in videos if camera.task], limit_s)
    speeds = {name: call for camera in videos for name, call in camera.speeds.items()}
    speed_results, rates = frames.measure_speeds(speeds, limit_s)
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


def _check_images(dataset: Dataset, key: str, deep: Deep | None) -> dict[str, Result]:
    """Decode an image of the first episode and, if `deep`, all images."""
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

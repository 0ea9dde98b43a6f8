"""Findings on a dataset: its metadata, its rows, and each camera."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.decode import images as image
from dali_stream.errors import DaliStreamError, DecodeError, StorageError, counted
from dali_stream.lerobot.rows import Columns, RowReader
from dali_stream.tools.doctor import frames
from dali_stream.tools.doctor.camera import Camera
from dali_stream.tools.doctor.frames import Decoded, Decoders
from dali_stream.tools.doctor.looks import look
from dali_stream.tools.doctor.report import OK, PROBLEM, Finding
from dali_stream.tools.doctor.timing import Timestamps, spread


def opened(uri: str | os.PathLike[str], **options: Any) -> Dataset | Finding:
    """A dataset, or a finding if it cannot be opened.

    Raises:
        ValueError: an argument that does not fit the address.
    """
    try:
        return Dataset(uri, **options)
    except DaliStreamError as error:
        return _unreadable(error)


def _unreadable(error: DaliStreamError) -> Finding:
    if isinstance(error, StorageError):
        remedy = "check what the message names: the address, the network or the credentials"
        return Finding("dataset", "storage", PROBLEM, str(error), remedy)
    return Finding("dataset", "metadata", PROBLEM, str(error), "repair what the message names, or copy the dataset again")


def examine(dataset: Dataset, decoders: Decoders, limit_s: float) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and the facts for the report.

    Args:
        dataset: the selected part of a dataset.
        decoders: available on this machine.
        limit_s: seconds for a decoder's frames.
    """
    size = f"{counted(dataset.num_episodes, 'episode')}, {counted(dataset.num_frames, 'frame')}"
    text = f"{dataset.store.address}: {size} at {dataset.fps:g} fps"
    findings = [Finding("dataset", "metadata", OK, text)]
    reader = RowReader(dataset)
    timestamps = Timestamps(dataset)
    rows, found = _rows(dataset, reader, timestamps)
    findings.append(found)
    cameras = [Camera(dataset, key, timestamps, decoders) for key in dataset.videos]
    decoded = frames.decode([camera.task for camera in cameras if camera.task], limit_s)
    facts: dict[str, Any] = {}
    for key in dataset.cameras:
        if key not in dataset.videos:
            findings.append(_image(dataset, key, rows))
            facts[key] = {"kind": "image", "height": dataset.picture_size(key)[0], "width": dataset.picture_size(key)[1]}
    for camera in cameras:
        own: dict[str, Decoded] = decoded.get(camera.key, {})
        findings += [*camera.findings, *camera.decoded(own)]
        facts[camera.key] = camera.facts | {"decoded": {route: dataclasses.asdict(each) for route, each in own.items()}}
    return findings, {
        "uri": dataset.uri,
        "address": dataset.store.address,
        "episodes": dataset.num_episodes,
        "frames": dataset.num_frames,
        "fps": dataset.fps,
        "cameras": facts,
    }


def _rows(dataset: Dataset, reader: RowReader, timestamps: Timestamps) -> tuple[Columns | None, Finding]:
    """Checks the rows of the first selected episode, and timestamps of others."""
    rows, episode = None, 0
    looked_at = spread(dataset, range(dataset.num_episodes))
    try:
        rows = reader.read(0)[0]
        for episode in looked_at:
            timestamps.of(episode)
        if timestamps.errors:
            episode, error = min(timestamps.errors.items())
            raise error
    except DaliStreamError as error:
        files, count = dataset.table.data, len(timestamps.errors)
        said, remedy = look(dataset.data_store, files.paths[files.index[dataset.rows[episode]]])
        more = f"; {count} of {len(looked_at)} checked episodes have such rows" if count > 1 else ""
        text = f"{error}{'; ' if said else ''}{said}{more}"
        return rows, Finding("dataset", "rows", PROBLEM, text, remedy or "copy the dataset again")
    readable = f"the {dataset.lengths[0]} rows of episode {dataset.episodes[0]} are readable"
    text = f"{readable}; timestamps rise in {len(looked_at)} checked episodes of {dataset.num_episodes}"
    return rows, Finding("dataset", "rows", OK, text)


def _image(dataset: Dataset, key: str, rows: Columns | None) -> Finding:
    height, width = dataset.picture_size(key)
    if rows is None:
        return Finding("dataset", key, PROBLEM, "its images are in rows that cannot be read", "repair the rows first")
    try:
        image.decode(rows[key][len(rows[key]) // 2], (height, width))
    except DecodeError as error:
        return Finding("dataset", key, PROBLEM, str(error), "record or convert the dataset again")
    return Finding("dataset", key, OK, f"images of {height}×{width} in Parquet rows; one was decoded")

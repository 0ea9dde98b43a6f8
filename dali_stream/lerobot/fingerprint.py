"""Fingerprint of a dataset, and comparison of the dataset with that of a saved state by the parts of the fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.errors import ResumeError
from dali_stream.lerobot.address import commit_of
from dali_stream.lerobot.dataset_files import CLOCKS, DatasetFiles
from dali_stream.lerobot.features import ENCODING
from dali_stream.lerobot.info import INFO
from dali_stream.mp4.counting import TOLERANCE
from dali_stream.system.log_records import DATASET_LOG

_log = logging.getLogger(DATASET_LOG)
_SHOWN = 8  # maximum number of parts in a message
# Parts of the fingerprint. Those of `FRAMES` only affect the frames of a row, and not the order and the rows.
FEATURES, EPISODES, TASKS, STATISTICS = "features or fps", "episodes or their lengths", "tasks", "statistics"
SELECTION = "selection of episodes (episodes=, episode_filter=)"
RANGES = "sampled frames (frames=, drop_n_first_frames=, drop_n_last_frames=)"
KEYS = "renamed keys (keys=)"
CLOCK, CAMERAS, CAMERA_STATISTICS = "clock (clock=, tolerance_s=, trust_timestamps=)", "cameras", "statistics of cameras"
FRAMES = (CLOCK, CAMERAS, CAMERA_STATISTICS)


class Identity(NamedTuple):
    """Properties that distinguish a dataset or a mixture from others.

    Attributes:
        uri: Name for messages.
        fingerprint: Hash that a state must have, see `Dataset`.
        contents: Hash of each part of the fingerprint, {part: hash}, without parts that have their default values. The parts of
            a mixture are "<dataset>: <part>".
        origin: Origin of the metadata, as information. It has the `address`, and the `commit` of a repository of the Hub.
            Without a commit, it has `versions`, the versions of some metadata files by path. For a mixture, it is
            {dataset: origin}.
    """

    uri: str
    fingerprint: str
    contents: dict[str, str]
    origin: dict[str, Any]


def hashed(data: bytes) -> str:
    """Return a short hash for comparisons, 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def identity(dataset: DatasetFiles) -> Identity:
    """Return the identity of a dataset. Raises DatasetError or StorageError if its tasks or statistics cannot be read."""
    features = {key: _without(feature, *ENCODING, "fps") for key, feature in dataset.info.features.items()}
    cameras = [key for key, feature in dataset.info.features.items() if feature.is_camera]
    # Statistics tell datasets of equal lengths apart, which are common. Only min, max and count are exact after the statistics
    # of episodes are aggregated, so only they are hashed.
    stats = {
        key: {name: _numbers(statistics[name]) for name in ("min", "max", "count") if name in statistics}
        for key, statistics in dataset.stored_stats.items()
    }
    fps, clock, table, rows = float(dataset.fps), (dataset.clock, dataset.tolerance_s), dataset.table, _int64s(dataset.rows)
    # Another clock or tolerance may select different frames.
    clock_bytes = b"" if clock == (CLOCKS[0], TOLERANCE / dataset.fps) else _json(clock)
    clock_bytes += b"trust_timestamps" if dataset.trust_timestamps else b""
    episodes = _int64s(table.index) + _int64s(table.length)
    tasks = _json(sorted(dataset.tasks.items()))
    ranges = b"" if dataset.frame_ranges is None else b"frames" + dataset.frame_ranges.to_bytes()
    whole = b"".join([_json([fps, features]), clock_bytes, episodes, rows, tasks, ranges, _json(stats)])
    parts = {
        FEATURES: _json([fps, _without(features, *cameras)]),
        CAMERAS: _json({key: features[key] for key in cameras}),
        CLOCK: clock_bytes,
        EPISODES: episodes,
        SELECTION: b"" if len(dataset.rows) == len(table.index) else rows,
        RANGES: ranges,
        TASKS: tasks,
        STATISTICS: _json(_without(stats, *cameras)),
        CAMERA_STATISTICS: _json({key: own for key, own in stats.items() if key in cameras}),
    }
    contents = {part: hashed(data) for part, data in parts.items() if data}
    return Identity(dataset.uri, hashlib.blake2b(whole, digest_size=16).hexdigest(), contents, _origin(dataset))


def _origin(dataset: DatasetFiles) -> dict[str, Any]:
    store, commit = dataset.store, dataset.revision or commit_of(dataset.store)
    if commit:
        return {"address": store.address, "commit": commit}
    paths = (INFO, dataset.tasks_place, dataset.stored_stats_place)
    return {"address": store.address, "versions": {path: version for path in paths if (version := store.version(path))}}


def saved(dataset: Identity) -> dict[str, Any]:
    """Return the entries about a dataset in the state of a run.

    `dataset` must match when the run is resumed. `contents` says which part differs otherwise, and `source` is information.
    """
    return {"dataset": dataset.fingerprint, "contents": dataset.contents, "source": dataset.origin}


def check(dataset: Identity, state: Mapping[str, Any], allow_other_frames: bool = False) -> None:
    """Check that a state is of the same dataset. Log a warning if it is of another commit, or of other versions of files.

    Args:
        dataset: Identity of the dataset to resume with.
        state: State of a run.
        allow_other_frames: Whether only the rows must be the same, and not the frames of the cameras. Default: False.

    Raises:
        ResumeError: If the state is of another dataset. The message names the parts that differ.
    """
    before, now = state.get("contents"), dataset.contents
    if state.get("dataset") != dataset.fingerprint:
        if not isinstance(before, Mapping) or before == now:
            raise ResumeError(
                f"The state is of another dataset or of other episodes than {dataset.uri}, and does not say in which part they "
                "differ. Resume with the dataset and the episodes of that run"
            )
        parts = [part for part in dict.fromkeys([*now, *map(str, before)]) if before.get(part) != now.get(part)]
        text = ", ".join(parts[:_SHOWN]) + (f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else "")
        if any(part.rpartition(": ")[2] not in FRAMES for part in parts):
            raise ResumeError(
                f"The state is of another dataset or of other episodes than {dataset.uri}. These parts differ: {text}. "
                "Resume with the dataset and the episodes of that run"
            )
        if not allow_other_frames:
            raise ResumeError(
                f"The run of the state had other frames than {dataset.uri} has for the same rows. These parts differ: {text}. "
                "Resume with the dataset of that run. To continue with these frames, for example on a copy of another size, "
                "call load_state_dict(state, allow_other_frames=True)"
            )
        _log.warning("%s has other frames than the run had for the same rows. These parts differ: %s", dataset.uri, text)
    for difference in _other_sources(state.get("source"), dataset.origin):
        _log.warning("%s. Episodes, tasks and statistics are those of the run, but rows and videos may differ", difference)


def _other_sources(before: object, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each commit, or version of a file, that differs from that of the run."""
    if not isinstance(before, Mapping):
        return
    if "address" not in now:  # the sources of a mixture
        for name, source in now.items():
            yield from (f"dataset {name!r}: {text}" for text in _other_sources(before.get(name), source))
    elif "commit" in now and "commit" in before:
        if now["commit"] != before["commit"]:
            yield (
                f"The state was saved at commit {before['commit']} of {before.get('address')}, and {now['address']} is at "
                f"commit {now['commit']}"
            )
    elif before.get("address") == now["address"] and isinstance(versions := before.get("versions"), Mapping):
        for path, version in now.get("versions", {}).items():
            if versions.get(path, version) != version:
                yield f"{now['address']}/{path} had version {versions[path]} when the state was saved, and has {version} now"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _int64s(values: npt.NDArray[np.int64]) -> bytes:
    return values.astype("<i8").tobytes()


def _without(entries: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key not in keys}


def _numbers(values: npt.NDArray[Any]) -> list[Any]:
    """Return the values of a statistic as a flat list that does not depend on the dtype and nesting of the file."""
    flat = values.ravel()
    return [str(v) for v in flat] if flat.dtype.kind not in "biuf" else (flat.astype(np.float64) + 0.0).tolist()  # no -0.0

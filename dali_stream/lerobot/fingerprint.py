"""Comparison of a dataset with that of a saved state, by the parts of its fingerprint."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from dali_stream.errors import ResumeError
from dali_stream.system.log_records import DATASET_LOG

_log = logging.getLogger(DATASET_LOG)
_SHOWN = 8  # maximum number of parts in a message
# Parts of the fingerprint. Those of `FRAMES` only affect the frames of a row, and not the order and the rows.
FEATURES, EPISODES, TASKS, STATISTICS = "features or fps", "episodes or their lengths", "tasks", "statistics"
SELECTION = "selection of episodes (episodes=, episode_filter=)"
RANGES = "sampled frames (frames=, drop_n_first_frames=, drop_n_last_frames=)"
KEYS = "renamed keys (keys=)"
CLOCK, CAMERAS, CAMERA_STATISTICS = "clock (clock=, tolerance_s=)", "cameras", "statistics of cameras"
FRAMES = (CLOCK, CAMERAS, CAMERA_STATISTICS)


class Identified(Protocol):
    """Dataset or mixture.

    Attributes:
        uri: Name for messages.
        fingerprint: Hash that a state must have.
        contents: Hash of each part of the fingerprint, {part: hash}. The parts of a mixture are "<dataset>: <part>".
        origin: See `DatasetFiles.origin`, or {dataset: origin} for a mixture.
    """

    @property
    def uri(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def contents(self) -> dict[str, str]: ...
    @property
    def origin(self) -> dict[str, Any]: ...


def hashed(data: bytes) -> str:
    """Return a short hash for comparisons, 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def saved(dataset: Identified) -> dict[str, Any]:
    """Return the entries about a dataset in the state of a run.

    `dataset` must match when the run is resumed. `contents` says which part differs otherwise, and `source` is information.
    """
    return {"dataset": dataset.fingerprint, "contents": dataset.contents, "source": dataset.origin}


def check(dataset: Identified, state: Mapping[str, Any], allow_other_frames: bool = False) -> None:
    """Check that a state is of the same dataset. Log a warning if it is of another commit, or of other versions of files.

    Args:
        dataset: Dataset to resume with.
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

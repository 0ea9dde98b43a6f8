"""Reader of `meta/info.json`, which all versions of the format have."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dali_stream.errors import DatasetError
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.json_files import read_json
from dali_stream.storage import Store
from dali_stream.system.log_records import DATASET_LOG

INFO = "meta/info.json"
TABULAR = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
DTYPES = (*TABULAR, "video", "image", "string", "language")
FRAME_INDEX = "frame_index"  # the only feature that a dataset may lack: it then counts the rows of each episode
_V3_FIELDS = {"video_key": "", "chunk_index": ":03d", "file_index": ":03d"}
_V2_FIELDS = {
    "video_key": "",
    "episode_chunk": ":03d",
    "chunk_index": ":03d",
    "episode_index": ":06d",
}  # LeRobot writes episode_chunk, and some other exporters write chunk_index
_log = logging.getLogger(DATASET_LOG)


@dataclass(frozen=True)
class Info:
    """Validated contents of `meta/info.json`.

    Attributes:
        version: Version of the format, such as "v3.0".
        fps: Frames per second.
        features: Features that can be read, and `frame_index`, even if the file lacks it.
        data_path: Template of the paths to Parquet files.
        video_path: Template of the paths to MP4 files. None if the dataset has none.
        episodes: Number of episodes. None if the file has no total.
        frames: Number of frames. None if the file has no total.
        chunk: Number of episodes in a chunk of v2.x. 0 if the paths do not depend on it.
        splits: Splits of the dataset. Empty if the file has none.
        left_out: Features that cannot be read, {key: reason}.
        tools: Schemas of the tools that annotations call. Empty if the file has none.
    """

    version: str
    fps: float
    features: dict[str, Feature]
    data_path: str
    video_path: str | None
    episodes: int | None
    frames: int | None
    chunk: int = 0
    splits: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_v2(self) -> bool:
        """Whether the version of the dataset is v2.0 or v2.1."""
        return self.version.startswith("v2.")


def read_info(store: Store) -> Info:
    """Read `meta/info.json`. Features that cannot be read are left out, with a warning.

    Raises:
        DatasetError: If the file is missing or broken, or if its version or storage format is not supported.
    """
    try:
        info = _object(read_json(store, INFO), store, "content")
    except DatasetError:
        if store.exists(INFO):
            raise
        raise DatasetError(
            f"{store.address} is not a LeRobot dataset, because {INFO} does not exist. {_looks(store)}"
        ) from None
    if "codebase_version" not in info:
        problem = "codebase_version is missing" if info else "the JSON object is empty"
        raise DatasetError(f"Invalid {store.where(INFO)}: {problem}. {_looks(store)}")
    version = f"v{str(info['codebase_version']).removeprefix('v')}"  # some exporters leave the "v" out
    if version not in ("v2.0", "v2.1", "v3.0"):
        newer = re.fullmatch(r"v(3\.[1-9]\d*|[4-9]\.\d+|\d{2,}\.\d+)", version)
        raise DatasetError(
            f"Invalid codebase_version in {store.where(INFO)}: must be v2.0, v2.1 or v3.0, got "
            f"{str(info['codebase_version'])[:40]!r}"
            f"{'. A newer format needs a newer dali_stream, since its files may have another meaning' if newer else ''}"
        )
    fields = _V2_FIELDS if version.startswith("v2.") else _V3_FIELDS
    if info.get("storage_format") == "lance":
        raise DatasetError(
            f'Invalid storage_format in {store.where(INFO)}: must be Parquet with MP4, got "lance". LeRobot with its Lance '
            "reader loads this dataset. Neither LeRobot nor dali_stream converts it, so use the Parquet dataset that it was "
            "made from, if it exists"
        )
    fps = _fps(info.get("fps"), store)
    features = _object(info.get("features"), store, "features")
    data_path = _template(info.get("data_path"), "data_path", fields, store)
    video_path = _template(info["video_path"], "video_path", fields, store) if info.get("video_path") else None
    left_out = {key: why for key, feature in features.items() if (why := _left_out(key, feature, store))}
    warn_of_left_out(store, left_out)
    readable = {key: Feature(feature) for key, feature in features.items() if key not in left_out}
    readable.setdefault(FRAME_INDEX, Feature(dtype="int64", shape=[1], names=None))
    return Info(
        version=version,
        fps=fps,
        features=readable,
        data_path=data_path,
        video_path=video_path,
        episodes=_count(info.get("total_episodes"), "total_episodes", store),
        frames=_count(info.get("total_frames"), "total_frames", store),
        splits=splits if isinstance(splits := info.get("splits"), dict) else {},
        chunk=_chunk(info.get("chunks_size"), f"{data_path}{video_path}", store) if version.startswith("v2.") else 0,
        left_out=left_out,
        tools=_tools(info.get("tools"), store),
    )


def warn_of_left_out(store: Store, left_out: Mapping[str, str]) -> None:
    """Log a warning for each feature that is left out, {key: reason}."""
    for key, why in left_out.items():
        _log.warning("%s: feature %.80r %s. Batches will lack it", store.where(INFO), key, why)


def video_template(store: Store, info: Info) -> str:
    """Return `video_path`. Raises DatasetError if `info.json` has none."""
    if not info.video_path:
        raise DatasetError(f"Invalid video_path in {store.where(INFO)}: must be a path template for video features, got null")
    return info.video_path


def _looks(store: Store) -> str:
    """Return text for messages about an `info.json` that is missing or has no version: the probable version, and advice."""
    if store.exists("meta/episodes.jsonl"):
        return f"It has meta/episodes.jsonl, so it looks like v2.x. Copy or fetch {INFO} again"
    if store.files("meta/episodes"):
        return f"It has meta/episodes/, so it looks like v3.0. Copy or fetch {INFO} again"
    return "It has neither meta/episodes/ (v3.0) nor meta/episodes.jsonl (v2.x). Give the folder that holds meta/"


def _object(value: Any, store: Store, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DatasetError(f"Invalid {name} in {store.where(INFO)}: must be a JSON object, got {type(value).__name__}")
    return value


def _fps(value: Any, store: Store) -> float:
    """Return the frame rate. It may be stored as text."""
    number: Any = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            number = int(number) if number.is_integer() else number
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= 100_000:
        raise _invalid("fps", "above 0 and at most 100000", value, store)
    return number


def _tools(value: Any, store: Store) -> list[dict[str, Any]]:
    tools = [] if value is None else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _invalid("tools", "a list of JSON objects", value, store)
    return tools


def _count(value: Any, name: str, store: Store) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise _invalid(name, "a nonnegative integer", value, store)
    return value


def _chunk(value: Any, templates: str, store: Store) -> int:
    """Return the number of episodes in a chunk of v2.x, or 0 if the templates of paths do not contain the chunk."""
    if "{episode_chunk" not in templates and "{chunk_index" not in templates:
        return 0
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _invalid("chunks_size", "the number of episodes in a chunk", value, store)
    return value


def _invalid(name: str, allowed: str, value: Any, store: Store) -> DatasetError:
    return DatasetError(f"Invalid {name} in {store.where(INFO)}: must be {allowed}, got {str(value)[:40]}")


def _left_out(key: str, feature: Any, store: Store) -> str:
    """Return the reason why a feature cannot be read, or "" if it can. Raises DatasetError if its entry is broken."""
    feature = _object(feature, store, f"feature {key[:80]!r}")
    dtype, shape = feature.get("dtype"), feature.get("shape")
    if dtype not in DTYPES:
        return f"has dtype {str(dtype)[:40]!r}, which is not read"
    if not isinstance(shape, list) or any(type(n) is int and n >= 1 << 31 for n in shape):
        raise DatasetError(
            f"Invalid shape of feature {key[:80]!r} in {store.where(INFO)}: must be a list of up to five positive integers, "
            f"got {str(shape)[:80]}"
        )
    if len(shape) > 5 or not all(type(n) is int and n > 0 for n in shape):
        return f"has shape {str(shape)[:80]}, and only up to five positive integers are read"
    if Feature(feature).is_unmarked_depth:
        return (
            "has more than 8 bits per value, but is not marked as depth, so it is not read. If it is a depth map as LeRobot "
            'writes it, add "is_depth_map": true to its info'
        )
    return ""


def _template(value: Any, name: str, fields: dict[str, str], store: Store) -> str:
    """Check a template of paths, and return it.

    Only plain integer formats are allowed, since others can produce gigabytes of padding. In v2.x, the template must contain
    the episode, and the template of videos must also contain the camera. Otherwise, episodes or cameras would share a file.

    Args:
        value: Template from `info.json`.
        name: Either "data_path" or "video_path".
        fields: Allowed fields, {name: format that the error message shows}.
        store: Store of the dataset.

    Raises:
        DatasetError: If the template is not allowed.
    """
    needed = {"episode_index", "video_key"} if name == "video_path" else {"episode_index"}
    try:
        if not isinstance(value, str):
            raise ValueError(f"must be text, got {type(value).__name__}")
        template_fields = [
            (key, form or "", conversion) for _, key, form, conversion in string.Formatter().parse(value) if key is not None
        ]
        for key, form, conversion in template_fields:
            plain = re.fullmatch("" if key == "video_key" else r"(0?\d{1,2}d?)?", form)
            if key not in fields or conversion or not plain:
                raise ValueError(f"unknown field {{{key}:{form}}}"[:80])
        lacking = sorted(needed & fields.keys() - {key for key, _, _ in template_fields}) if "episode_index" in fields else []
        if lacking:
            raise ValueError(f"missing field {{{lacking[0]}}}")
    except ValueError as error:
        allowed = ", ".join(f"{{{key}{form}}}" for key, form in fields.items())
        raise DatasetError(
            f"Invalid path template {name} in {store.where(INFO)}: {error}. Allowed fields: {allowed}"
        ) from error
    return value

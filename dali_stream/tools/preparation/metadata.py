"""Writes the files below `meta/`, from those of the source (of any version), the plan, and the notes of the tasks."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError
from dali_stream.lerobot import metadata, v2
from dali_stream.lerobot.features import ENCODING
from dali_stream.lerobot.stats import table_stats
from dali_stream.tools.preparation.place import Place
from dali_stream.tools.preparation.plan import DATA_MB, DATA_PATH, VIDEO_MB, VIDEO_PATH, Plan, path_of
from dali_stream.tools.work import grouped

EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DONE = "meta/prepare.json"  # header of the plan and report, in a finished dataset
AT_THE_ROOT = ("README.md", "README", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
Json = dict[str, Any]
_log = logging.getLogger("dali_stream")
_EPISODES = 1000  # episodes per part of the episode table, for v2.x
_GONE = ("total_chunks", "total_videos")  # entries of info.json in v2.x that v3.0 does not have
# Entries of newer LeRobot versions that are no longer true after encoding again.
_UNTRUE = ("video.fast_decode", "video.video_backend", "video.extra_options")


@dataclass
class _Columns:
    """New values of the episode table.

    Attributes:
        new: {index in the source: index in the new dataset}.
        values: {column: {index in the source: value}}.
        added: {column: type} of columns that are added if the source lacks them.
    """

    new: dict[int, int] = field(default_factory=dict)
    values: dict[str, dict[int, Any]] = field(default_factory=dict)
    added: dict[str, pa.DataType] = field(default_factory=dict)

    def put(self, old: int, values: Mapping[str, Any], added: bool = True) -> None:
        """Set values of an episode.

        Args:
            old: Index of the episode in the source.
            values: {column: value}.
            added: Whether to add columns that the source lacks. Default: True.
        """
        for name, value in values.items():
            self.values.setdefault(name, {})[old] = value
            if added:
                self.added[name] = _kind(value)


def write(dataset: Dataset, plan: Plan, notes: Mapping[str, Json], place: Place, done: Json) -> None:
    """Write all metadata. The last file is info.json, which makes OUT a dataset.

    Args:
        dataset: Source.
        plan: Plan of the run.
        notes: {path of an output file: note of its task}.
        place: OUT.
        done: Content of meta/prepare.json.
    """
    head, columns = plan.header, _columns(dataset, plan, notes)
    files_of_v2 = (v2.EPISODES, v2.TASKS, v2.EPISODES_STATS) if dataset.is_v2 else ()
    skipped = {metadata.INFO, DONE, *episode_files(dataset), *files_of_v2}
    kept = [name for name in dataset.store.files("meta") if name not in skipped and not name.startswith("meta/prepare/")]
    for name in (*kept, *filter(dataset.store.exists, AT_THE_ROOT)):
        place.write(name, dataset.store.read_all(name))
    if dataset.is_v2:
        place.write("meta/tasks.parquet", _encoded(metadata.tasks_table(dict(sorted(dataset.tasks.items())))))
    parts = _write_episodes(dataset, plan, columns, place)
    stats = _stats(dataset, plan, columns, notes, parts)
    if stats is not None:
        place.write(metadata.STATS, json.dumps(stats, indent=4).encode())
    place.write(DONE, json.dumps(done, indent=4).encode())
    lengths = {e["new"]: e["length"] for task in plan.tasks if "camera" not in task for e in task["episodes"]}
    place.write(metadata.INFO, json.dumps(_info(dataset, head, len(lengths), sum(lengths.values())), indent=4).encode())


def _encoded(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


# ---- info.json


def _info(dataset: Dataset, head: Json, episodes: int, frames: int) -> Json:
    info: Json = metadata.read_json(dataset.store, metadata.INFO)
    features = {key: deepcopy(feature) for key, feature in info["features"].items() if key in head["features"]}
    fps = int(dataset.fps) if dataset.fps == int(dataset.fps) else dataset.fps
    if dataset.is_v2:
        features = {key: each if each.get("dtype") == "video" else each | {"fps": fps} for key, each in features.items()}
        info = {"total_tasks": len(dataset.tasks)} | {key: value for key, value in info.items() if key not in _GONE}
        info |= {"codebase_version": "v3.0", "fps": fps}  # without total_tasks, LeRobot reads no tasks
    for key, spec in head["cameras"].items():
        if spec["mode"] != "copy":
            features[key] = _encoded_feature(features[key], spec, fps)
    size = head["options"].get("file_mb")
    info |= {
        "total_episodes": episodes,
        "total_frames": frames,
        "chunks_size": head["chunks_size"],
        "data_files_size_in_mb": max(1, round(size or DATA_MB)),
        "video_files_size_in_mb": max(1, round(size or VIDEO_MB)),
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if head["cameras"] else None,
        "features": features,
    }
    if head["renumber"] and "splits" in info:  # ranges of the old indices
        info["splits"] = {"train": f"0:{episodes}"}
    return info


def _encoded_feature(feature: Json, spec: Json, fps: float) -> Json:
    """Return the feature of a camera after encoding. Keys with an unknown meaning are kept."""
    (height, width), chosen = spec["size"], spec["encoder"]
    place = next((each for each in ENCODING if isinstance(feature.get(each), dict)), "info")
    encoding = {key: value for key, value in (feature.get(place) or {}).items() if key not in _UNTRUE}
    encoding |= {
        "video.height": height, "video.width": width, "video.codec": chosen["codec"], "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False, "video.fps": fps, "video.channels": 3, "has_audio": False,
        "video.g": spec["gop"], "video.crf": chosen["quality"], "video.preset": chosen["preset"] or None,
        "video.encoder": chosen["name"],
    }  # fmt: skip
    shape, names = [height, width, 3], ["height", "width", "channels"]
    was = tuple(feature["shape"])
    if len(was) == 3 and was[0] in (1, 3) and was[2] not in (1, 3):  # (C, H, W)
        shape, names = [3, height, width], ["channels", "height", "width"]
    changed = {"dtype": "video", "shape": shape, place: encoding}
    if feature.get("dtype") == "image" or not isinstance(feature.get("names"), list):
        changed["names"] = names
    return {key: value for key, value in feature.items() if key != "fps" or feature.get("dtype") == "video"} | changed


# ---- the episode table


def _columns(dataset: Dataset, plan: Plan, notes: Mapping[str, Json]) -> _Columns:
    head, columns = plan.header, _Columns()
    numbers: dict[str, int] = {}
    for task in plan.tasks:
        camera, note = task.get("camera", ""), notes[task["path"]]
        prefix = f"videos/{camera}/" if camera else "data/"
        chunk, file = divmod(numbers.setdefault(camera, 0), head["chunks_size"])
        numbers[camera] += 1
        encoded = camera and head["cameras"][camera]["mode"] != "copy"
        for episode in task["episodes"]:
            old = episode["old"]
            columns.put(old, {f"{prefix}chunk_index": chunk, f"{prefix}file_index": file})
            if not camera:
                _put_row_columns(columns, head, old, episode)
                continue
            start = note["from"][str(episode["new"])]
            stop = start + episode["length"] / dataset.fps
            columns.put(old, {f"{prefix}from_timestamp": start, f"{prefix}to_timestamp": stop})
            stats = note["stats"][str(episode["new"])] if encoded else {}
            columns.put(old, {f"stats/{camera}/{name}": value for name, value in stats.items()})
    return columns


def _put_row_columns(columns: _Columns, head: Json, old: int, episode: Json) -> None:
    new, first, length = episode["new"], episode["first"], episode["length"]
    columns.new[old] = new
    columns.put(old, {"episode_index": new, "dataset_from_index": first, "dataset_to_index": first + length})
    changed: dict[str, npt.NDArray[Any]] = {}
    if head["renumber"]:
        changed |= {"index": np.arange(first, first + length), "episode_index": np.full(length, new)}
    if head["regular"]:
        changed["timestamp"] = (np.arange(length) / head["fps"]).astype(np.float32)
    for key, values in changed.items():
        columns.put(old, {f"stats/{key}/{name}": value for name, value in table_stats(values).items()}, added=False)


def _kind(value: Any) -> pa.DataType:
    if isinstance(value, list):
        return pa.list_(_kind(value[0]))
    return pa.int64() if isinstance(value, int) else pa.float64()


def _write_episodes(dataset: Dataset, plan: Plan, columns: _Columns, place: Place) -> list[pa.Table]:
    """Write the episode table, one part of the source's table at a time. Return the columns with statistics of each part."""
    stats: list[pa.Table] = []
    most = (plan.header["options"].get("file_mb") or DATA_MB) * (1 << 20)

    def parts() -> Iterator[tuple[pa.Table, int]]:
        for source, nbytes in _episode_tables(dataset):
            part = _renewed(source, plan.header, columns)
            stats.append(part.select([name for name in part.column_names if name.startswith("stats/")]))
            yield part, nbytes

    files = grouped(parts(), most, lambda pair: pair[1], lambda pair: pair[0].schema.serialize().to_pybytes())
    for number, file in enumerate(files):
        table = pa.concat_tables([part for part, _ in file])
        for name, value in zip(("chunk_index", "file_index"), divmod(number, plan.header["chunks_size"]), strict=True):
            table = _set(table, f"meta/episodes/{name}", [value] * len(table), pa.int64())
        place.write(path_of(EPISODES_PATH, number, plan.header), _encoded(table))
    return stats


def _renewed(part: pa.Table, head: Json, columns: _Columns) -> pa.Table:
    """Return a part of the episode table, reduced to the kept episodes and cameras, with their new values."""
    index = part["episode_index"].to_numpy()
    kept = np.isin(index, list(columns.new))
    encoded = {key for key, spec in head["cameras"].items() if spec["mode"] != "copy"}

    def is_kept(name: str) -> bool:
        kind, _, rest = name.partition("/")
        key = rest.rpartition("/")[0]
        if kind == "videos":
            return key in head["cameras"]
        if kind == "stats" and key in encoded:
            return name in columns.values
        return kind != "stats" or key in head["features"]

    part = part.filter(pa.array(kept)).select([name for name in part.column_names if is_kept(name)])
    for name, values in columns.values.items():
        if name in part.column_names or name in columns.added:
            part = _set(part, name, [values[episode] for episode in index[kept].tolist()], columns.added.get(name))
    return part


def _set(table: pa.Table, name: str, values: list[Any], kind: pa.DataType | None) -> pa.Table:
    """Return a table with new values of a column. An existing column keeps its type, and a new column gets the type `kind`."""
    if name not in table.column_names:
        return table.append_column(name, pa.array(values, kind))
    place = table.column_names.index(name)
    own = table.schema.field(place)
    return table.set_column(place, own, pa.array(values, kind).cast(own.type))


def episode_files(dataset: Dataset) -> list[str]:
    """Return the paths of the files of the episode table."""
    return [name for name in dataset.store.files("meta/episodes") if name.endswith(".parquet")]


# ---- statistics


def has_episode_stats(dataset: Dataset) -> bool:
    """Return whether the source has statistics of the rows of each episode."""
    if dataset.is_v2:
        return dataset.stored_stats_place == v2.EPISODES_STATS
    first = episode_files(dataset)[0]
    with metadata.parquet_errors(dataset.store, first), dataset.store.open(first) as file:
        return any(name.startswith("stats/frame_index/") for name in pq.ParquetFile(file).schema_arrow.names)


def _stats(dataset: Dataset, plan: Plan, columns: _Columns, notes: Mapping[str, Json], parts: list[pa.Table]) -> Json | None:
    """Return the new content of stats.json, or None if it does not change or does not exist.

    Statistics that change are aggregated from those of the episodes in the same way as in LeRobot.
    """
    head, stored = plan.header, dataset.stored_stats
    encoded = {key for key, spec in head["cameras"].items() if spec["mode"] != "copy"}
    # All statistics change if episodes are left out. Otherwise only those of encoded cameras and of regular timestamps do.
    changed = (
        set(stored) | encoded if head["renumber"] else encoded | ({"timestamp"} & set(stored) if head["regular"] else set())
    )
    changed &= set(head["features"])
    of_source_file = not dataset.is_v2 or dataset.stored_stats_place == metadata.STATS
    if not changed and of_source_file and set(stored) <= set(head["features"]):
        return None
    new = {key: value for key, value in stored.items() if key in head["features"] and key not in changed}
    for key in changed:
        episodes = _episode_stats(key, columns, parts, notes)
        if not episodes:
            _log.warning("stats of %.80r are left out: the source has none for single episodes", key)
            continue
        stats = [{key: {name: np.asarray(value) for name, value in each.items() if value is not None}} for each in episodes]
        new[key] = {name: value for name, value in v2.aggregate(stats)[key].items() if key not in stored or name in stored[key]}
    order = dict.fromkeys(key for key in (*stored, *new) if key in new)
    return {key: {name: value.tolist() for name, value in new[key].items()} for key in order} or None


def _episode_stats(key: str, columns: _Columns, parts: list[pa.Table], notes: Mapping[str, Json]) -> list[dict[str, Any]]:
    """Return the statistics of a feature for each episode.

    These are the new ones if the feature has changed, or otherwise those of the source. If the source has none, they are those
    that the tasks have computed from the rows.
    """

    def named(names: Iterable[str]) -> dict[str, str]:
        """Return {statistic: column} of the feature's columns in the episode table."""
        return {name.rpartition("/")[2]: name for name in names if name.rpartition("/")[0] == f"stats/{key}"}

    if new := named(columns.values):
        return [{name: columns.values[column][old] for name, column in new.items()} for old in columns.new]
    own = [
        part.select(list(names.values())).rename_columns(list(names)) for part in parts if (names := named(part.column_names))
    ]
    of_rows = [stats for note in notes.values() if "rows" in note for stats in note["stats"].values()]
    return [row for part in own for row in part.to_pylist()] or [stats[key] for stats in of_rows if key in stats]


def _episode_tables(dataset: Dataset) -> Iterator[tuple[pa.Table, int]]:
    """Yield the parts of the source's episode table, each with its encoded size in bytes.

    For v2.x, the table is made from JSON lines, and lacks the columns that locate files.
    """
    if not dataset.is_v2:
        for name in episode_files(dataset):
            yield metadata.read_parquet(dataset.store, name), dataset.store.size(name)
        return
    lines = {entry["episode_index"]: entry for _, entry in v2.read_lines(dataset.store, v2.EPISODES)}
    table = dataset.read_table([])
    stats = v2.read_episode_stats(dataset.store) if dataset.stored_stats_place == v2.EPISODES_STATS else {}
    names = dict.fromkeys((key, name) for episode in stats.values() for key, values in episode.items() for name in values)
    own = _own_columns(dataset, [lines[episode] for episode in table.index.tolist()])
    for at in range(0, len(table.index), _EPISODES):
        index = table.index[at : at + _EPISODES]
        columns: dict[str, Any] = {
            "episode_index": index,
            "tasks": pa.array([_tasks(dataset, lines[e]) for e in index.tolist()], pa.list_(pa.string())),
            "length": table.length[at : at + _EPISODES],
        }
        columns |= {name: values.slice(at, len(index)) for name, values in own.items() if name not in columns}
        for key, name in names:
            values = [stats.get(episode, {}).get(key, {}).get(name) for episode in index.tolist()]
            columns[f"stats/{key}/{name}"] = _nested(dataset, values, key, name)
        encoded = io.BytesIO()
        pq.write_table(pa.table(columns), encoded)
        yield pq.read_table(encoded), encoded.getbuffer().nbytes  # reading it back gives the types of the new file


def _own_columns(dataset: Dataset, entries: list[dict[str, Any]]) -> dict[str, pa.Array]:
    """Return {name: column} of all entries of the source's episodes, including entries that the format does not define."""
    columns = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        try:
            values = pa.array([entry.get(name) for entry in entries])
            pq.write_table(pa.table({name: values}), io.BytesIO())  # a trial, since Parquet does not support every type
            columns[name] = values
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            where = dataset.store.where(v2.EPISODES)
            _log.warning("%s: %.80r cannot be a column (%s), so the new episode table lacks it", where, name, error)
    return columns


def _tasks(dataset: Dataset, entry: dict[str, Any]) -> list[str]:
    tasks = entry.get("tasks", [])
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise DatasetError(
            f"{dataset.store.where(v2.EPISODES)}: episode {entry['episode_index']}: tasks must be a list of texts, "
            f"got {str(tasks)[:40]}"
        )
    return tasks


def _nested(dataset: Dataset, values: list[Any], key: str, name: str) -> pa.Array:
    """Return a statistic of some episodes as nested lists of numbers. Raises DatasetError if their types or shapes differ."""
    number = np.int64 if name == "count" else np.float64
    try:
        return pa.array([None if each is None else each.astype(number).tolist() for each in values])
    except (pa.ArrowException, ValueError, TypeError) as error:
        where = dataset.store.where(v2.EPISODES_STATS)
        raise DatasetError(f"{where}: {name} of {key} has another kind or shape in some episodes: {error}") from error

"""The files below `meta/`, made from those of the source (of any version), the plan, and the notes of the tasks."""

from __future__ import annotations

import bisect
import io
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError
from dali_stream.lerobot import v2, v3
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.info import FRAME_INDEX, INFO
from dali_stream.lerobot.json_files import read_json, read_lines
from dali_stream.lerobot.parquet import read_parquet
from dali_stream.lerobot.selection import split_range
from dali_stream.lerobot.stats import STATS, table_stats
from dali_stream.tools.preparation import rows
from dali_stream.tools.preparation.place import Json
from dali_stream.tools.preparation.plan import DATA_MB, VIDEO_MB, Plan, encoded_cameras, path_of
from dali_stream.tools.preparation.state import STATE
from dali_stream.tools.preparation.video import LEROBOT_TOLERANCE_S
from dali_stream.tools.work import grouped

AT_THE_ROOT = ("README.md", "README", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
_log = logging.getLogger("dali_stream")
_EPISODES = 1000  # episodes per part of the episode table, for v2.x
_MOST_TASKS = 1 << 16  # number of tasks up to which unused numbers are filled
_GONE = ("total_chunks", "total_videos")  # entries of info.json in v2.x that v3.0 does not have
# Entries of newer LeRobot versions that are no longer true after encoding again.
_UNTRUE = ("video.fast_decode", "video.video_backend", "video.extra_options")
# Statistics that are computed from the plan. An episode table that lacks them does not get them.
_PLANNED = ("stats/index/", "stats/episode_index/", "stats/timestamp/", "stats/frame_index/")
Columns = dict[str, dict[int, Any]]
"""New values of the episode table, {column: {index of an episode in the source: value}}."""


def files(dataset: Dataset, plan: Plan, notes: Mapping[str, Json], report: Json) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file of metadata except `STATE`. The last one is info.json, which makes OUT a dataset.

    Args:
        dataset: Source.
        plan: Plan of the run.
        notes: {path of an output file: note of its task}.
        report: Report of the run.
    """
    recounted = {key for note in notes.values() for key in note.get("recounted", ())}
    recounted |= {"index", "episode_index"} if plan.header["renumber"] else set()
    plan = Plan(plan.header | {"recounted": sorted(recounted)}, plan.tasks)
    head, columns = plan.header, _columns(plan, notes)
    # Types are inferred from all episodes, since a part of them may lack a value, or have integers only.
    types = {name: pa.infer_type(list(values.values())) for name, values in columns.items()}
    parts = [(_renewed(source, head, columns, types), nbytes) for source, nbytes in _episode_tables(dataset)]
    stats = _stats(dataset, plan, columns, notes, [part for part, _ in parts])
    if (np.diff(np.concatenate([part["episode_index"].to_numpy() for part, _ in parts])) < 0).any():
        whole = pa.concat_tables([part for part, _ in parts], promote_options="default").sort_by("episode_index")
        parts = [(whole, sum(nbytes for _, nbytes in parts))]
    writes_tasks = len(dataset.tasks) > 0 and not v3.has_regular_tasks(dataset.store)
    skipped = {INFO, STATE, v2.EPISODES, v2.TASKS, v2.EPISODES_STATS, *dataset.table.tables}
    skipped |= {path for path, is_written in ((STATS, stats is not None), (v3.TASKS, writes_tasks)) if is_written}
    kept = [name for name in dataset.store.files("meta") if name not in skipped and not name.startswith("meta/prepare/")]
    for name in (*kept, *filter(dataset.store.exists, AT_THE_ROOT)):
        yield name, dataset.store.read_all(name)
    if writes_tasks:
        yield v3.TASKS, _encoded(v3.tasks_table(_regular_tasks(dataset)))
    yield from _episode_files(head, parts)
    if stats:
        yield STATS, json.dumps(stats, indent=4).encode()
    _warn_of_times(notes)
    yield INFO, json.dumps(_info(dataset, head, report, columns["episode_index"]), indent=4).encode()


def _warn_of_times(notes: Mapping[str, Json]) -> None:
    """Log a warning if frames are too far from the times of their rows for LeRobot to read them."""
    away = {path: note["away_s"] for path, note in notes.items() if note.get("away_s", 0) > LEROBOT_TOLERANCE_S}
    if away:
        path = max(away, key=lambda each: away[each])
        _log.warning(
            "%s: timestamps of rows are up to %.5f s away from their frames, as in the source. A Loader reads them, LeRobot "
            "only with a larger tolerance_s. --clock frame_index, or a larger --tolerance-s, writes regular times",
            path, away[path],
        )  # fmt: skip


def _encoded(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def _regular_tasks(dataset: Dataset) -> dict[int, str]:
    """Return the tasks in the order of their numbers. Unused numbers get an empty name, since LeRobot finds tasks by place."""
    numbers = range(max(dataset.tasks, default=-1) + 1)
    if len(numbers) > _MOST_TASKS:
        return dict(sorted(dataset.tasks.items()))
    return {number: dataset.tasks.get(number, "") for number in numbers}


# ---- info.json


def _info(dataset: Dataset, head: Json, report: Json, new_index: Mapping[int, int]) -> Json:
    info: Json = read_json(dataset.store, INFO)
    features = {key: feature for key, feature in info["features"].items() if key in head["features"]}
    fps = int(dataset.fps) if dataset.fps == int(dataset.fps) else dataset.fps
    if dataset.info.is_v2:
        features = {key: each if each.get("dtype") == "video" else each | {"fps": fps} for key, each in features.items()}
        info = {"total_tasks": 0} | {key: value for key, value in info.items() if key not in _GONE}
        info |= {"codebase_version": "v3.0", "fps": fps}
    else:
        info |= {"codebase_version": dataset.version, "fps": dataset.fps}  # LeRobot does not read other spellings
    features.setdefault(FRAME_INDEX, head["features"][FRAME_INDEX])
    for key in encoded_cameras(head):
        features[key] = _encoded_feature(Feature(features[key]), head["cameras"][key], fps)
    size = head["options"].get("file_mb")
    info |= {
        "total_tasks": len(_regular_tasks(dataset)),  # LeRobot reads no tasks without it
        "total_episodes": report["episodes"],
        "total_frames": report["frames"],
        "chunks_size": head["chunks_size"],
        "data_files_size_in_mb": max(1, round(size or DATA_MB)),
        "video_files_size_in_mb": max(1, round(size or VIDEO_MB)),
        "data_path": v3.DATA_PATH,
        "video_path": v3.VIDEO_PATH if head["cameras"] else None,
        "features": features,
    }
    if head["renumber"] and "splits" in info:
        info["splits"] = dict(_new_splits(dataset.info.splits, sorted(new_index)))
    return info


def _new_splits(splits: Json, kept: list[int]) -> Iterator[tuple[str, str]]:
    """Yield the name and the new range of each split with episodes, given the indices of the kept episodes in the source."""
    for name, span in splits.items():
        if (limits := split_range(span)) is not None:
            start, stop = (bisect.bisect_left(kept, limit) for limit in limits)
            if start < stop:
                yield name, f"{start}:{stop}"


def _encoded_feature(feature: Feature, spec: Json, fps: float) -> Json:
    """Return the feature of a camera after encoding. Keys with an unknown meaning are kept."""
    (height, width), chosen = spec["size"], spec["encoder"]
    place, recorded = feature.encoding
    encoding = {key: value for key, value in recorded.items() if key not in _UNTRUE}
    encoding |= {
        "video.height": height, "video.width": width, "video.codec": chosen["codec"], "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False, "video.fps": fps, "video.channels": 3, "has_audio": False,
        "video.g": spec["gop"], "video.crf": chosen["quality"], "video.preset": chosen["preset"] or None,
        "video.encoder": chosen["name"],
    }  # fmt: skip
    shape, names = [height, width, 3], ["height", "width", "channels"]
    if feature.frame_size != feature.shape[:2]:  # (C, H, W)
        shape, names = [3, height, width], ["channels", "height", "width"]
    changed = {"dtype": "video", "shape": shape, place: encoding}
    if feature.is_image or not isinstance(feature.get("names"), list):
        changed["names"] = names
    return {key: value for key, value in feature.items() if key != "fps" or feature.is_video} | changed


# ---- the episode table


def _columns(plan: Plan, notes: Mapping[str, Json]) -> Columns:
    columns = defaultdict[str, dict[int, Any]](dict)
    for camera, tasks in itertools.groupby(plan.tasks, lambda task: task.get("camera", "")):
        prefix = f"videos/{camera}" if camera else "data"
        for number, task in enumerate(tasks):
            chunk, file = divmod(number, plan.header["chunks_size"])
            for episode in task["episodes"]:
                values = {f"{prefix}/chunk_index": chunk, f"{prefix}/file_index": file}
                for name, value in (values | _values(plan.header, camera, episode, notes[task["path"]])).items():
                    columns[name][episode["old"]] = value
    return columns


def _values(head: Json, camera: str, episode: Json, note: Json) -> Json:
    """Return {column: value} of an episode for the columns of a camera or, if `camera` is empty, of the rows."""
    new, length = episode["new"], episode["length"]
    if camera:
        start, frames = note["from"][str(new)], max(length, note["frames"][str(new)])  # more if rows were removed
        values = {f"videos/{camera}/from_timestamp": start, f"videos/{camera}/to_timestamp": start + frames / head["fps"]}
        stats = {camera: note.get("stats", {}).get(str(new), {})}
    else:
        first, stop = episode["first"], episode["first"] + length
        values = {"episode_index": new, "dataset_from_index": first, "dataset_to_index": stop}
        counted = {"index": np.arange(first, stop), "episode_index": np.full(length, new), "frame_index": np.arange(length)}
        stats = {key: table_stats(counted[key]) for key in head["recounted"]}
        if head["regular"]:
            stats["timestamp"] = note["times"][str(new)]
    return values | {f"stats/{key}/{name}": value for key, own in stats.items() for name, value in own.items()}


def _episode_files(head: Json, parts: list[tuple[pa.Table, int]]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file of the episode table.

    Args:
        head: Header of the plan.
        parts: Parts of the table, each with the encoded size of its source in bytes. Empty ones are left out.
    """
    most = (head["options"].get("file_mb") or DATA_MB) * (1 << 20)
    parts = [(part, nbytes) for part, nbytes in parts if len(part)]
    groups = grouped(parts, most, lambda pair: pair[1], lambda pair: pair[0].schema.serialize().to_pybytes())
    for number, group in enumerate(groups):
        table = pa.concat_tables([part for part, _ in group])
        chunk, index = (pa.array(np.full(len(table), value)) for value in divmod(number, head["chunks_size"]))
        table = rows.replaced(table, {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": index})
        yield path_of(v3.EPISODES_PATH, number, head), _encoded(table)


def _renewed(part: pa.Table, head: Json, columns: Columns, types: Mapping[str, pa.DataType]) -> pa.Table:
    """Return a part of the episode table, reduced to the kept episodes and cameras, with their new values."""
    index = part["episode_index"].to_numpy()
    is_kept = np.isin(index, list(columns["episode_index"]))
    keys = {"videos": head["cameras"].keys(), "stats": head["features"].keys() - encoded_cameras(head)}

    def stays(name: str) -> bool:
        kind, _, rest = name.partition("/")
        return name in columns or kind not in keys or rest.rpartition("/")[0] in keys[kind]

    part = part.filter(pa.array(is_kept)).select(list(filter(stays, part.column_names)))
    new = {
        name: pa.array([values[episode] for episode in index[is_kept].tolist()], types[name])
        for name, values in columns.items()
        if name in part.column_names or not name.startswith(_PLANNED)
    }
    return rows.replaced(part, new)


# ---- statistics


def has_episode_stats(dataset: Dataset) -> bool:
    """Return whether the source has statistics of the rows of each episode."""
    if dataset.info.is_v2:
        return dataset.stored_stats_place == v2.EPISODES_STATS
    columns = rows.read_footer(dataset.store, dataset.table.tables[0]).schema.names
    return any(name.startswith("stats/index/") for name in columns)


def _stats(dataset: Dataset, plan: Plan, columns: Columns, notes: Mapping[str, Json], parts: list[pa.Table]) -> Json | None:
    """Return the new content of stats.json, or None if it does not change. The file is not written if this is empty.

    Statistics that change are aggregated from those of the episodes in the same way as in LeRobot.
    """
    head, stored = plan.header, dataset.stored_stats
    encoded = encoded_cameras(head)
    keys = [key for key in dict.fromkeys((*stored, *encoded)) if key in head["features"]]
    # All statistics change if episodes are left out. Otherwise only those of encoded cameras, of regular timestamps and of
    # numbers that were counted again do.
    own = [*encoded, *(["timestamp"] if head["regular"] else []), *head["recounted"]]
    changed = {*keys} if head["renumber"] else {*own}.intersection(keys)
    if not changed and dataset.stored_stats_place == STATS and len(keys) == len(stored):
        return None
    new = {}
    for key in keys:
        if key not in changed:
            new[key] = stored[key]
        elif episodes := _episode_stats(key, columns, parts, notes):
            whole = v2.aggregate([{key: each} for each in episodes])[key]
            new[key] = {name: value for name, value in whole.items() if name in stored.get(key, whole)}
        else:
            _log.warning("stats of %.80r are left out: the source has none for single episodes", key)
    return {key: {name: value.tolist() for name, value in statistics.items()} for key, statistics in new.items()}


def _episode_stats(key: str, columns: Columns, parts: list[pa.Table], notes: Mapping[str, Json]) -> list[dict[str, Any]]:
    """Return the statistics of a feature for each episode.

    These are the new ones if the feature has changed, or otherwise those of the source. If the source has none, they are those
    that the tasks have computed from the rows. Episodes without statistics are left out, as in `Dataset.stats`.
    """

    def named(names: Iterable[str]) -> dict[str, str]:
        """Return {statistic: column} of the feature's columns in the episode table."""
        return {name.rpartition("/")[2]: name for name in names if name.rpartition("/")[0] == f"stats/{key}"}

    if new := named(columns):
        episodes = [{name: columns[column][old] for name, column in new.items()} for old in columns["episode_index"]]
    else:
        own = [
            part.select(list(names.values())).rename_columns(list(names))
            for part in parts
            if (names := named(part.column_names))
        ]
        of_rows = [stats for note in notes.values() if "rows" in note for stats in note["stats"].values()]
        episodes = [row for part in own for row in part.to_pylist()] or [stats[key] for stats in of_rows if key in stats]
    known = ({name: np.asarray(value) for name, value in each.items() if value is not None} for each in episodes)
    return [each for each in known if each]


def _episode_tables(dataset: Dataset) -> Iterator[tuple[pa.Table, int]]:
    """Yield the parts of the source's episode table, each with its encoded size in bytes.

    For v2.x, the table is made from JSON lines, and lacks the columns that locate files.
    """
    if not dataset.info.is_v2:
        for name in dataset.table.tables:
            yield v3.regular(read_parquet(dataset.store, name)), dataset.store.size(name)
        return
    lines = {entry["episode_index"]: entry for _, entry in read_lines(dataset.store, v2.EPISODES)}
    index = dataset.table.index
    entries = [lines[episode] for episode in index.tolist()]
    columns: dict[str, Any] = {
        "episode_index": index,
        "tasks": pa.array([_tasks(dataset, entry) for entry in entries], pa.list_(pa.string())),
        "length": dataset.table.length,
    }
    columns |= {name: values for name, values in _own_columns(dataset, entries).items() if name not in columns}
    stats = v2.read_episode_stats(dataset.store) if dataset.stored_stats_place == v2.EPISODES_STATS else {}
    for key, name in dict.fromkeys((key, name) for own in stats.values() for key, values in own.items() for name in values):
        values = [stats.get(episode, {}).get(key, {}).get(name) for episode in index.tolist()]
        columns[f"stats/{key}/{name}"] = _nested(dataset, values, key, name)
    whole = pa.table(columns)
    for start in range(0, len(whole), _EPISODES):
        encoded = _encoded(whole.slice(start, _EPISODES))
        yield pq.read_table(pa.BufferReader(encoded)), len(encoded)  # reading it back gives the types of the new file


def _own_columns(dataset: Dataset, entries: list[dict[str, Any]]) -> dict[str, pa.Array]:
    """Return {name: column} of all entries of the source's episodes, including entries that the format does not define."""
    columns = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        try:
            values = pa.array([entry.get(name) for entry in entries])
            _encoded(pa.table({name: values}))  # a trial, since Parquet does not support every type
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

"""The unit of work: one output file, as an idempotent function of JSON arguments.

A task writes the file to a scratch folder, verifies it against the source, and moves it into place or uploads it. Its result
has a note: the size of the file, and values for the metadata of the new dataset. The state of the run keeps it. See `state`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from dali_stream.errors import DaliStreamError, StorageError
from dali_stream.lerobot.info import TABULAR
from dali_stream.lerobot.stats import table_stats
from dali_stream.tools.preparation import rows, video
from dali_stream.tools.preparation.place import Json, open_place
from dali_stream.tools.preparation.source import TaskInput


def write_file(job: Json, task: Json) -> Json:
    """Write an output file.

    Args:
        job: Values that all tasks share. See `plan`.
        task: Task of the file. See `plan`.

    Returns:
        {"path": path, "note": note, "upload": value for `Place.commit`}, or {"path": path, "error": reason} if the file cannot
        be written. The note is JSON. Its keys for episodes are their new indices as strings.
    """
    path, place = task["path"], open_place(job["out"], job["out_options"])
    try:
        with place.scratch() as scratch:
            file = scratch / Path(path).name
            source = TaskInput(job, task, f"{place.address}/{path}")
            note = _WRITERS[source.spec["mode"]](source, file) | {"bytes": file.stat().st_size}
            return {"path": path, "note": note, "upload": place.put(path, file)}
    except (DaliStreamError, OSError, pa.ArrowException) as error:
        return {"path": path, "error": str(error) or type(error).__name__}


def check_episodes(job: Json, task: Json) -> Json:
    """Check the episodes of an output file.

    Args:
        job, task: See `write_file`.

    Returns:
        {"broken": {index in the source: reason}} of the episodes that cannot be read, or {"error": reason} if the storage
        fails.
    """
    source, broken = TaskInput(job, task), {}
    for episode in source.episodes:
        try:
            source.check(episode)
        except StorageError as error:  # the network or the credentials, and not the episode
            return {"error": str(error)}
        except (DaliStreamError, pa.ArrowException) as error:
            broken[episode["old"]] = str(error)
    return {"broken": broken}


def _write_rows(task: TaskInput, file: Path) -> Json:
    """Write and verify a Parquet file. Return the content of its note."""
    job, stats = task.job, dict[str, Json]()
    first = task.rows.footer(task.episodes[0])
    rows.check_columns(task.store, job["features"], first)
    schema = rows.with_frame_index(rows.new_schema(first.schema, job["columns"], job["is_v2"]))
    times, recounted = dict[str, Json](), set[str]()

    def changed() -> Iterator[pa.Table]:
        for episode in task.episodes:
            table, new = task.rows.read(episode), dict[str, pa.Array]()
            task.check_values(episode, table)
            if task.regular:
                new["timestamp"] = pa.array(task.regular_times(table))
                times[str(episode["new"])] = table_stats(task.times(table))
            numbers = np.arange(len(table))
            counted = {"frame_index": numbers, "index": episode["first"] + numbers}
            counted["episode_index"] = np.full(len(table), episode["new"])
            for key, values in counted.items():
                if key not in table.column_names or (table[key].to_numpy() != values).any():
                    new[key] = pa.array(values)
                    recounted.add(key)
            table = rows.replaced(table, new)
            if job["row_stats"]:
                stats[str(episode["new"])] = {
                    key: table_stats(np.array(table[key].to_pylist()))
                    for key in (*job["reads"], "timestamp")
                    if key in table.column_names and job["features"][key]["dtype"] in TABULAR
                }
            yield rows.cast(table, schema)

    rows.write(file, schema, first.codec, changed(), task.rows_per_group)
    if not rows.is_as_written(file, schema, sum(episode["length"] for episode in task.episodes)):
        raise DaliStreamError(f"{task.where}: its rows are not as they were written. Check the disk")
    return {"stats": stats, "rows": True, "times": times, "recounted": sorted(recounted)}


# Functions that write and verify an output file, and return the content of its note, by the mode in `TaskInput.spec`.
_WRITERS = {"rows": _write_rows, "copy": video.copy, "encode": video.encode, "images": video.encode}

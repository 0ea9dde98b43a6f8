"""Checks that the files of a dataset exist."""

from __future__ import annotations

from dali_stream.dataset import Dataset
from dali_stream.errors import DatasetError, counted
from dali_stream.tools.describe import missing_files
from dali_stream.tools.doctor.report import OK, PROBLEM, Finding

_SHOWN = 5  # missing files named


def examine(dataset: Dataset, deep: bool) -> Finding:
    """The finding on `missing_files`. Raises StorageError."""
    try:
        missing, looked_for = missing_files(dataset, deep)
    except DatasetError as error:
        return Finding("dataset", "files", PROBLEM, str(error), "correct data_path and video_path in meta/info.json")
    if not missing:
        return Finding("dataset", "files", OK, f"{counted(looked_for, 'file')} of rows and video, none missing")
    named = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    text = f"{dataset.data_store.address}: {len(missing)} of {counted(looked_for, 'file')} missing: {named}"
    remedy = "copy or fetch them again, or exclude their episodes (episodes=...); `dali-stream info --json` lists all"
    return Finding("dataset", "files", PROBLEM, text, remedy)

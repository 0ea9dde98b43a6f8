"""Small Parquet files that expand to gigabytes lead to an error or a bounded read, measured in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.datasets import EPISODE_TABLE, ROWS, Column, build, change_info
from support.slow import slow

MB = 1 << 20
MEMORY = 16 * MB  # for rows
METADATA = 64 * MB  # what a file of meta/ with few rows may take
MORE = 32 * MB  # what a read may take beyond it, with what Python and pyarrow keep for themselves
TASKS = "meta/tasks.parquet"
_CHILD = f"""
import gc, json, sys
from pathlib import Path
import dali_stream
from dali_stream.lerobot.rows import RowMemory, RowReader

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) << 10

def read(root):
    dataset = dali_stream.Dataset(root)
    dataset.tasks
    dataset.episode_columns(stats=True)
    rows = RowReader(dataset, memory=RowMemory({MEMORY}, {MEMORY})).read(0)
    return rows["index"].tolist()

healthy, root = sys.argv[1:]
read(healthy)  # imports
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
before = status("VmRSS")
try:
    outcome = read(root)
except dali_stream.DatasetError as error:
    outcome = str(error)
print(json.dumps([status("VmHWM") - before, outcome]))
"""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes with vectors of 256 numbers. Read only."""
    values = np.random.default_rng(0).random((8, 256), np.float32)
    return build(tmp_path_factory.mktemp("healthy") / "set", [3, 5], {"wide": Column("float32", [256], values)})


def read(healthy: Path, root: Path, most: int = MEMORY) -> str | list[int]:
    """Reads everything but videos in a process that takes few bytes more than `most`. Returns the rows' index or the error."""
    done = subprocess.run([sys.executable, "-c", _CHILD, healthy, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, outcome = json.loads(done.stdout)
    assert grown < most + MORE
    return outcome  # type: ignore[no-any-return]


def one_long_list(root: Path) -> None:
    """One of the values is a list of 32 million zeros."""
    table, path = pq.read_table(root / ROWS), root / ROWS
    offsets = np.append(np.arange(8) * 256, 7 * 256 + (32 << 20)).astype(np.int32)
    values = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.float32)))
    table = table.set_column(table.column_names.index("wide"), "wide", values)
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)


def rows_of(count: int, episodes: np.ndarray) -> pa.Table:
    numbers = {
        "episode_index": episodes,
        "index": np.arange(count),
        "frame_index": np.arange(count),
        "task_index": 0 * episodes,
    }
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(256 * count, np.float32)), 256)
    times = (np.arange(count) / 10).astype(np.float32)
    return pa.table({**numbers, "timestamp": times, "wide": wide})


def many_rows(root: Path) -> None:
    """A row group of 64 MB has rows of episodes that the metadata does not have."""
    table = rows_of(70_000, np.r_[np.zeros(3), np.full(69_997, 9)].astype(np.int64))
    pq.write_table(table, root / ROWS, compression="zstd", row_group_size=1 << 20)


def many_promised_rows(root: Path) -> None:
    """The same, but the metadata has the other episode."""
    pq.write_table(
        rows_of(70_000, (np.arange(70_000) >= 3).astype(np.int64)), root / ROWS, compression="zstd", row_group_size=1 << 20
    )
    table = pq.read_table(root / EPISODE_TABLE)
    for name, values in {"length": [3, 69_997], "dataset_to_index": [3, 70_000]}.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, root / EPISODE_TABLE)
    change_info(root, total_frames=70_000)


def many_episodes(root: Path, total: int | None = 2) -> None:
    """A million rows in the episode table."""
    table = pq.read_table(root / EPISODE_TABLE)
    columns = {name: np.zeros(1_500_000, np.int64) for name in table.column_names if name != "tasks"}
    pq.write_table(pa.table(columns), root / EPISODE_TABLE)
    change_info(root, total_episodes=total)


def many_episodes_without_a_total(root: Path) -> None:
    """The same, and info.json has no total."""
    many_episodes(root, None)


def long_statistics(root: Path) -> None:
    """A list of 16 million numbers in a column of statistics."""
    table = pq.read_table(root / EPISODE_TABLE)
    offsets = pa.array([0, 1, 16 << 20], pa.int32())
    values = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(16 << 20)))
    pq.write_table(
        table.append_column("stats/wide/mean", values), root / EPISODE_TABLE, compression="zstd", use_dictionary=False
    )


def many_tasks(root: Path) -> None:
    """Two million tasks."""
    _write_tasks(
        root,
        pa.table(
            {"task_index": np.zeros(2_000_000, np.int64), "task": pa.array(["a"]).take(pa.array(np.zeros(2_000_000, np.int64)))}
        ),
    )


def long_tasks(root: Path) -> None:
    """One text of 64 KiB that 1,500 tasks share."""
    number = np.zeros(1_500, np.int64)
    _write_tasks(root, pa.table({"task_index": number, "task": pa.array(["a" * (64 << 10)]).take(pa.array(number))}))


def _write_tasks(root: Path, table: pa.Table) -> None:
    described = pq.read_schema(root / TASKS).metadata
    pq.write_table(table.replace_schema_metadata({b"pandas": described[b"pandas"]}), root / TASKS)


CASES: dict[Callable[[Path], None], str] = {
    one_long_list: "Invalid column wide in ",
    many_rows: "Invalid row group in ",
    many_episodes: "Invalid total_episodes in ",
    many_episodes_without_a_total: "Invalid total_episodes in ",
    long_statistics: "its 2 rows must take at most ",
    many_tasks: "its 2000000 rows must take at most ",
    long_tasks: "its 1500 rows must take at most ",
}


@pytest.mark.parametrize(
    "change", [case if case in (many_episodes_without_a_total, many_tasks) else slow(case) for case in CASES]
)
def test_a_small_file_that_stands_for_a_large_one_is_refused(
    change: Callable[[Path], None], healthy: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(healthy, tmp_path / "set"))
    change(root)
    assert all(path.stat().st_size < MB for path in root.rglob("*.parquet"))
    said = read(healthy, root, METADATA if change is long_tasks else MEMORY)
    assert isinstance(said, str)
    assert CASES[change] in said


@pytest.mark.slow
def test_promised_rows_that_exceed_the_memory_are_read_in_pieces(healthy: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(healthy, tmp_path / "set"))
    many_promised_rows(root)
    assert read(healthy, root) == [0, 1, 2]

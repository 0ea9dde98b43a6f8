"""Datasets whose rows count otherwise, lack rows or have odd timestamps, and the frames that each row must have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream import Dataset
from support.broken import edit_table, put
from support.datasets import EPISODE_TABLE as TABLE
from support.datasets import ROWS, change_info
from support.videos import CAMERA, EPISODES, identities, loader

FRAME = np.concatenate([np.arange(n) for n in EPISODES])  # number of each row within its episode
Change = Callable[[pa.Table], pa.Table]


def change_rows(root: Path, change: Change) -> Path:
    edit_table(root, ROWS, change)
    return root


def with_index(values: Any) -> Change:
    return lambda table: put(table, "frame_index", pa.array(np.asarray(values, np.int64)))


def with_times(values: Any, kind: str = "float32") -> Change:
    return lambda table: put(table, "timestamp", pa.array(values, getattr(pa, kind)()))


def without_rows(root: Path, cut: dict[int, list[int]]) -> dict[int, list[int]]:
    """Cut rows out of episodes, as a tool that removes idle frames does. Returns {episode: numbers of the rows that stay}."""
    rows, table = pq.read_table(root / ROWS), pq.read_table(root / TABLE)
    stays = {episode: [n for n in range(length) if n not in cut.get(episode, [])] for episode, length in enumerate(EPISODES)}
    first = np.cumsum([0, *EPISODES])
    rows = rows.take(np.concatenate([first[episode] + np.array(numbers) for episode, numbers in stays.items()]))
    pq.write_table(put(rows, "index", pa.array(np.arange(len(rows)))), root / ROWS)
    lengths = [len(numbers) for numbers in stays.values()]
    stops = np.cumsum(lengths)
    table = put(put(table, "length", lengths), "dataset_from_index", [int(n) for n in stops - lengths])
    pq.write_table(put(table, "dataset_to_index", [int(n) for n in stops]), root / TABLE)
    change_info(root, total_frames=len(rows))
    return stays


def delivered(dataset: Dataset | Path, **options: Any) -> dict[int, tuple[int, int]]:
    """{index of each sample: episode and frame that its pixels show}."""
    found = {}
    with loader(dataset, **options) as batches:
        for batch in batches:
            found |= dict(zip(batch["index"].tolist(), identities(batch[CAMERA]), strict=True))
    return found


def expected(stays: dict[int, list[int]]) -> dict[int, tuple[int, int]]:
    return dict(enumerate((episode, number) for episode, numbers in stays.items() for number in numbers))


EVERY = expected({episode: list(range(length)) for episode, length in enumerate(EPISODES)})
NUMBERINGS = {
    "all 0": np.zeros_like(FRAME),
    "from 1": FRAME + 1,
    "through the dataset": np.arange(len(FRAME)),
    "falling": FRAME[::-1],
}

"""What the loader's tests share: datasets read back with pyarrow alone, identities of batches, a dataset of odd features."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from dali_stream.demo import read_identities, stamp

TOP, SIDE = "observation.images.top", "observation.images.side"
CAMERAS = {TOP: 0, SIDE: 1}  # the number that the demo stamps into a camera's frames
Batch = dict[str, Any]


def read_rows(root: Path) -> dict[str, np.ndarray]:
    """All rows by rising `index`, one array per column; text and images as arrays of objects."""
    tables = [pq.read_table(path) for path in sorted(root.glob("data/*/*.parquet"))]
    found = {}
    for key in tables[0].column_names:
        values = [value for table in tables for value in table[key].to_pylist()]
        found[key] = np.array(values, object if isinstance(values[0], (str, dict)) else None)
    order = np.argsort(found["index"])
    return {key: values[order] for key, values in found.items()}


def read_lengths(root: Path) -> dict[int, int]:
    """Frames of each episode, out of meta/episodes."""
    table = pq.read_table(root / "meta/episodes").to_pydict()
    return dict(zip(table["episode_index"], table["length"], strict=True))


def as_lerobot(values: np.ndarray) -> np.ndarray:
    """The dtype that LeRobot delivers: Python numbers that went through `torch.tensor`."""
    kinds: dict[str, Any] = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}
    return values.astype(kinds[values.dtype.kind])


def pictures(images: torch.Tensor) -> np.ndarray:
    """Frames (..., C, H, W), uint8 or float in [0, 1], as uint8 (N, H, W, C)."""
    if images.is_floating_point():
        images = (images * 255).round().to(torch.uint8)
    return images.movedim(-3, -1).flatten(0, -4).numpy()


def check_identities(batch: Batch, camera: str, offsets: Sequence[int] | None, lengths: dict[int, int]) -> None:
    """Holds the frames of a batch against the frames that its rows and the window ask for."""
    expected = []
    for episode, frame in zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True):
        for offset in (0,) if offsets is None else offsets:
            expected.append((episode, min(max(frame + offset, 0), lengths[episode] - 1), CAMERAS[camera]))
    np.testing.assert_array_equal(read_identities(pictures(batch[camera])), expected)


def samples(batches: Iterable[Batch]) -> list[int]:
    """The `index` of every sample, in the order of delivery."""
    return [index for batch in batches for index in batch["index"].tolist()]


def equal(first: Batch, second: Batch) -> bool:
    """Whether two batches are the same in keys, dtypes and every value."""
    if list(first) != list(second):
        return False
    return all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first.values(), second.values(), strict=True)
    )


# ------------------------------------------------------------------------------------- a dataset of every tabular kind

ODD_SIZE = (120, 128)
ODD_CAMERA = "observation.image"
_ODD: dict[str, tuple[str, list[int]]] = {
    ODD_CAMERA: ("image", [*ODD_SIZE, 3]),
    "note": ("string", [1]),
    "observation.state": ("float64", [3]),
    "scalar": ("float64", [1]),
    "half": ("float16", [2]),
    "matrix": ("float32", [2, 3]),
    "cube": ("float32", [2, 1, 2]),
    "tesseract": ("float32", [1, 2, 1, 2]),
    "one": ("float32", [1, 1]),
    "flag": ("bool", [1]),
    "flags": ("bool", [3]),
    "small": ("int16", [1]),
    "bytes": ("uint8", [2]),
    "subtask_index": ("int64", [1]),
    "timestamp": ("float32", [1]),
    "frame_index": ("int64", [1]),
    "episode_index": ("int64", [1]),
    "index": ("int64", [1]),
    "task_index": ("int64", [1]),
}


def write_odd(root: Path, lengths: Sequence[int] = (5, 1, 8, 7), rows_per_group: int = 4, fps: int = 10) -> Path:
    """A dataset without video: PNGs in rows, text, every dtype, one to four axes. Row groups cut through episodes."""
    rng = np.random.default_rng(0)
    rows = []
    for episode, length in enumerate(lengths):
        for frame in range(length):
            row: dict[str, Any] = {}
            for key, (dtype, shape) in _ODD.items():
                if dtype in ("image", "string"):
                    continue
                values = rng.normal(0, 100, shape) if dtype.startswith("float") else rng.integers(0, 2, shape)
                row[key] = values.astype(dtype).tolist() if shape != [1] else values.astype(dtype).item()
            row |= {"timestamp": frame / fps, "frame_index": frame, "episode_index": episode, "index": len(rows)}
            row |= {"task_index": episode % 2, "note": f"note {len(rows)}", ODD_CAMERA: _png(episode, frame)}
            rows.append(row)
    schema = pa.schema([(key, _odd_type(*kind)) for key, kind in _ODD.items()])
    (root / "data/chunk-000").mkdir(parents=True)
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, root / "data/chunk-000/file-000.parquet", row_group_size=rows_per_group)
    _write_odd_meta(root, list(lengths), fps)
    return root


def _png(episode: int, frame: int) -> dict[str, Any]:
    picture = np.random.default_rng([episode, frame]).integers(0, 256, (*ODD_SIZE, 3), np.uint8)
    stamp(picture, episode, frame, 0)
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": f"frame-{frame:06d}.png"}


def _odd_type(dtype: str, shape: list[int]) -> pa.DataType:
    if dtype == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind = pa.string() if dtype == "string" else pa.from_numpy_dtype(dtype)
    if shape == [1]:
        return kind
    if len(shape) == 1:
        return pa.list_(kind, shape[0])
    for _ in shape:
        kind = pa.list_(kind)
    return kind


def _write_odd_meta(root: Path, lengths: list[int], fps: int) -> None:
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    ends = np.cumsum(lengths).tolist()
    episodes = [
        {"episode_index": i, "tasks": [f"task {i % 2}"], "length": n, "dataset_from_index": end - n, "dataset_to_index": end}
        | {"data/chunk_index": 0, "data/file_index": 0, "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    for name in ("task", "subtask"):
        table = pa.table({f"{name}_index": [0, 1], name: [f"{name} 0", f"{name} 1"]})
        columns = [(f"{name}_index", "int64", "int64"), (name, "unicode", "object")]
        described = [
            {"name": key, "field_name": key, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for key, kind, numpy in columns
        ]
        pandas = {"index_columns": [name], "columns": described, "column_indexes": [], "pandas_version": "2.3.0"}
        pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), root / f"meta/{name}s.parquet")
    info = {
        "codebase_version": "v3.0",
        "total_episodes": len(lengths),
        "total_frames": ends[-1],
        "fps": fps,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": {key: {"dtype": dtype, "shape": shape, "names": None} for key, (dtype, shape) in _ODD.items()},
    }
    (root / "meta/info.json").write_text(json.dumps(info))

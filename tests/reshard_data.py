"""What the tests of `dali-stream reshard` share: comparing datasets, looking into files, a dataset with more than cameras."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loader_data import TOP, equal

import dali_stream
from dali_stream import Dataset
from dali_stream.tools.reshard import Report, reshard

SMALL = {"data_file_size": 15_000, "video_file_size": 100_000}  # several files of each kind out of a demo
DEPTH = "observation.images.depth"


def written(source: Path | str, out: Path, **options: Any) -> Report:
    """Reshards."""
    dataset = Dataset(source)
    try:
        return reshard(dataset, out, **options)
    finally:
        dataset.close()


def assert_same_stream(first: Path | str, second: Path | str) -> int:
    """Every batch of an epoch in recorded order is the same, bit for bit. Returns how many samples there are."""
    options: dict[str, Any] = {"batch_size": 16, "shuffle": False, "image_dtype": "uint8", "last_batch": "partial"}
    count = 0
    with (
        dali_stream.Loader(str(first), **options, device="cpu", decode="torchcodec", threads=2) as a,
        dali_stream.Loader(str(second), **options, device="cpu", decode="torchcodec", threads=2) as b,
    ):
        for left, right in zip(a, b, strict=True):
            assert equal(left, right)
            count += len(left["index"])
    return count


def tree(root: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def videos(root: Path) -> list[Path]:
    return sorted(root.glob("videos/**/*.mp4"))


def top_boxes(path: Path) -> list[bytes]:
    """The kinds of the boxes at the top of an MP4."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        found.append(data[at + 4 : at + 8])
        at += size if size != 1 else int.from_bytes(data[at + 8 : at + 16], "big")
    return found


def frames_by_ffmpeg(path: Path) -> int:
    """Frames that FFmpeg shows of a file, which it has to read without a word, at a constant rate from time 0 on."""
    if not shutil.which("ffmpeg") or not shutil.which("ffprobe"):
        pytest.skip("needs the programs ffmpeg and ffprobe")
    done = subprocess.run(["ffmpeg", "-v", "error", "-i", path, "-f", "null", "-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    asked = ["-show_entries", "frame=pts", "-of", "csv=p=0"]
    shown = subprocess.run(["ffprobe", "-v", "error", *asked, path], capture_output=True, text=True, check=True).stdout
    times = [int(line.strip(",")) for line in shown.split()]
    assert times[0] == 0
    assert len({b - a for a, b in itertools.pairwise(times)}) <= 1
    return len(times)


def episode_table(root: Path) -> dict[str, list[Any]]:
    """All of meta/episodes."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(root.glob("meta/episodes/*/*.parquet"))]).to_pydict()


def change_info(root: Path, **changes: Any) -> dict[str, Any]:
    """Writes other values into a dataset's info.json; returns all of it."""
    info = json.loads((root / "meta/info.json").read_text()) | changes
    (root / "meta/info.json").write_text(json.dumps(info))
    return info


def change_episodes(root: Path, change: Any) -> None:
    """Has `change` make other tables of those in meta/episodes."""
    for path in root.glob("meta/episodes/*/*.parquet"):
        pq.write_table(change(pq.read_table(path)), path)


def rename_camera(root: Path, name: str) -> None:
    """Gives the camera `TOP` another name in the metadata."""
    features = json.loads((root / "meta/info.json").read_text())["features"]
    change_info(root, features={name if key == TOP else key: feature for key, feature in features.items()})
    change_episodes(root, lambda t: t.rename_columns([n.replace(f"/{TOP}/", f"/{name}/") for n in t.column_names]))


def enrich(root: Path) -> None:
    """Adds to a demo what a Loader does not read: a depth map, a feature of an unknown dtype, language, types, files."""
    features = json.loads((root / "meta/info.json").read_text())["features"]
    depth = json.loads(json.dumps(features[TOP]))
    depth["info"]["video.is_depth_map"] = True
    features |= {DEPTH: depth, "language_events": {"dtype": "language", "shape": [1], "names": None}}
    change_info(root, features=features, robot_type="a robot", mine={"kept": [1, None]}, chunks_size=2)
    shutil.copytree(root / "videos" / TOP, root / "videos" / DEPTH)

    def with_depth(table: pa.Table) -> pa.Table:
        for name in [n for n in table.column_names if n.startswith(f"videos/{TOP}/")]:
            table = table.append_column(name.replace(TOP, DEPTH), table[name])
        return table

    change_episodes(root, with_depth)
    for path in root.glob("data/*/*.parquet"):
        _add_columns(path)
    (root / "README.md").write_text("# A robot\n")
    (root / "LICENSE").write_bytes(b"\xff\xfe any bytes")
    (root / "meta/more").mkdir()
    (root / "meta/more/notes.bin").write_bytes(bytes(range(256)))


def _add_columns(path: Path) -> None:
    table = pq.read_table(path)
    said = [None if i % 3 == 0 else [{"role": "user", "text": f"{i}"}] * (i % 3) for i in range(len(table))]
    table = table.append_column("language_events", pa.array(said))
    # A type of the library `datasets`, which need not be installed: what marks it is kept.
    mark = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": "[[1, 2], 0]",
    }
    kind = pa.list_(pa.list_(pa.float32()))
    table = table.append_column(pa.field("matrix", kind, metadata=mark), pa.array([[[1.0, np.nan]]] * len(table), kind))
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {}}})})
    pq.write_table(table, path, row_group_size=37, compression="zstd")


def write_wide(root: Path, lengths: list[int], width: int) -> Path:
    """A dataset of rows alone, of `width` random float32 each."""
    rng, first = np.random.default_rng(0), np.cumsum([0, *lengths])
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    kind = pa.list_(pa.float32(), width)
    scalars = [("frame_index", pa.int64()), ("episode_index", pa.int64()), ("index", pa.int64()), ("task_index", pa.int64())]
    schema = pa.schema([("wide", kind), ("timestamp", pa.float32()), *scalars])
    with pq.ParquetWriter(root / "data/chunk-000/file-000.parquet", schema, use_dictionary=False) as writer:
        for episode, n in enumerate(lengths):
            wide = pa.FixedSizeListArray.from_arrays(rng.random(n * width, np.float32), type=kind)
            frame = np.arange(n)
            rows = [wide, (frame / 10).astype(np.float32), frame, np.full(n, episode), first[episode] + frame, np.zeros(n, int)]
            writer.write_table(pa.Table.from_arrays([pa.array(values) for values in rows], schema=schema))
    count, zero = len(lengths), [0] * len(lengths)
    episodes: dict[str, Any] = {"episode_index": range(count), "length": lengths, "tasks": [["do"]] * count}
    episodes |= {"data/chunk_index": zero, "data/file_index": zero}
    episodes |= {"dataset_from_index": first[:-1], "dataset_to_index": first[1:]}
    pq.write_table(pa.table({k: pa.array(v) for k, v in episodes.items()}), root / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0], "task": ["do"]}), root / "meta/tasks.parquet")
    features = {key: {"dtype": "int64", "shape": [1], "names": None} for key, _ in scalars}
    features |= {"timestamp": {"dtype": "float32", "shape": [1]}, "wide": {"dtype": "float32", "shape": [width]}}
    paths = {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_path": None}
    (root / "meta/info.json").write_text(
        json.dumps({"codebase_version": "v3.0", "fps": 10, "total_episodes": count, "features": features} | paths)
    )
    return root

"""Small datasets: one builder, two datasets of rows made with it, reading datasets back with pyarrow alone, changing them.

`support.videos` has the datasets around video files.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dali_stream.demo import stamp

TOP, SIDE = "observation.images.top", "observation.images.side"
CAMERAS = {TOP: 0, SIDE: 1}  # the number that the demo stamps into a camera's frames
DEPTH = "observation.images.depth"
VIDEO = "videos/{}/chunk-000/file-{:03d}.mp4"
ROWS, EPISODE_TABLE = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"


class Column(NamedTuple):
    """A feature of every row."""

    dtype: str  # NumPy's, or "string" or "image"
    shape: Sequence[int]
    values: Any  # one per frame; an Arrow array is stored as it is
    info: dict[str, Any] | None = None


class Camera(NamedTuple):
    """The video files of a camera."""

    files: Sequence[Path]
    episodes: Sequence[Sequence[int]]  # per file, the frames of the episodes in it
    size: tuple[int, int]  # (height, width) that info.json promises
    delay: float = 0.0  # display time of each file's first frame, in seconds


def build(
    root: Path,
    lengths: Sequence[int],
    columns: Mapping[str, Column],
    *,
    cameras: Mapping[str, Camera] | None = None,
    fps: int = 10,
    rows_per_group: int | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    version: str = "v3.0",
    stats: bool = False,
) -> Path:
    """Build a LeRobot dataset with copies of the videos. It has one file of rows, or in v2.0 and v2.1 one per episode.

    Args:
        root: Folder to create.
        lengths: Number of frames of each episode.
        columns: Columns in addition to those that every dataset has.
        cameras: Cameras by key.
        fps: Frames per second.
        rows_per_group: Number of rows of a row group. None: one row group per episode.
        labels: Texts of the columns `<name>_index`, each in its own file of meta/. Episodes take turns with the tasks.
        version: "v3.0"; or "v2.0" or "v2.1", with two episodes in a chunk and one in each video file.
        stats: Whether to write statistics of the columns, as this version does.
    """
    labels = {"task": ["see"]} if labels is None else labels
    cameras = cameras or {}
    count = sum(lengths)
    frame = np.concatenate([np.arange(n) for n in lengths])
    episode = np.repeat(np.arange(len(lengths)), lengths)
    columns = {
        **columns,
        "timestamp": Column("float32", [1], (frame / fps).astype(np.float32)),
        "frame_index": Column("int64", [1], frame),
        "episode_index": Column("int64", [1], episode),
        "index": Column("int64", [1], np.arange(count)),
        "task_index": Column("int64", [1], episode % len(labels["task"])),
    }
    rows = pa.table({key: _arrow(column) for key, column in columns.items()})
    features = _features(columns, cameras)
    info: dict[str, Any] = {"codebase_version": version, "fps": fps, "total_episodes": len(lengths), "total_frames": count}
    info["total_tasks"] = len(labels["task"])
    if version != "v3.0":
        _write_v2(root, rows, lengths, cameras, labels["task"], info | {"features": features})
        if stats:
            _write_v2_stats(root, columns, lengths, version)
        return root
    (root / ROWS).parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(root / ROWS, rows.schema, use_dictionary=False) as writer:
        if rows_per_group is None:
            for first, n in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):
                writer.write_table(rows.slice(first, n))
        else:
            writer.write_table(rows, row_group_size=rows_per_group)
    (root / EPISODE_TABLE).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(_episode_table(lengths, cameras, fps, labels["task"]), root / EPISODE_TABLE)
    for name, texts in labels.items():
        _write_labels(root / f"meta/{name}s.parquet", name, list(texts))
    for key, camera in cameras.items():
        for number, path in enumerate(camera.files):
            target = root / VIDEO.format(key, number)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path != target:
                shutil.copy(path, target)
    if stats:
        (root / "meta/stats.json").write_text(json.dumps(_stats(columns, slice(None))))
    info |= {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4" if cameras else None,
        "features": features,
    }
    (root / "meta/info.json").write_text(json.dumps(info, indent=2))
    return root


def _features(columns: Mapping[str, Column], cameras: Mapping[str, Camera]) -> dict[str, Any]:
    names = ["height", "width", "channels"]
    videos = {key: {"dtype": "video", "shape": [*camera.size, 3], "names": names} for key, camera in cameras.items()}
    rows = {key: {"dtype": c.dtype, "shape": list(c.shape), "names": None} for key, c in columns.items()}
    return videos | {key: entry | ({"info": columns[key].info} if columns[key].info else {}) for key, entry in rows.items()}


V2_CHUNK = 2
V2_ROWS = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
V2_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


def v2_path(template: str, episode: int, key: str = "") -> str:
    """The path of an episode's file in a dataset of v2.x that `build` has written."""
    return template.format(episode_chunk=episode // V2_CHUNK, episode_index=episode, video_key=key)


def _write_v2(
    root: Path,
    rows: pa.Table,
    lengths: Sequence[int],
    cameras: Mapping[str, Camera],
    tasks: Sequence[str],
    info: dict[str, Any],
) -> None:
    """Write a dataset without statistics. Each file of rows has pandas' index in its metadata, as early writers stored it."""
    for number, (first, n) in enumerate(zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False)):
        place = root / v2_path(V2_ROWS, number)
        place.parent.mkdir(parents=True, exist_ok=True)
        index = {"index_columns": [{"kind": "range", "start": 0, "stop": n, "step": 1}], "columns": []}
        pq.write_table(rows.slice(first, n).replace_schema_metadata({"pandas": json.dumps(index)}), place)
        for key, camera in cameras.items():
            assert [len(held) for held in camera.episodes] == [1] * len(lengths)
            target = root / v2_path(V2_VIDEO, number, key)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(camera.files[number], target)
    (root / "meta").mkdir()
    episodes = [{"episode_index": i, "tasks": [tasks[i % len(tasks)]], "length": length} for i, length in enumerate(lengths)]
    write_lines(root / "meta/episodes.jsonl", episodes)
    write_lines(root / "meta/tasks.jsonl", [{"task_index": i, "task": task} for i, task in enumerate(tasks)])
    paths = {"data_path": V2_ROWS, "video_path": V2_VIDEO if cameras else None}
    chunks = {
        "total_chunks": -(-len(lengths) // V2_CHUNK),
        "chunks_size": V2_CHUNK,
        "total_videos": len(lengths) * len(cameras),
    }
    (root / "meta/info.json").write_text(json.dumps({**info, **paths, **chunks}))


def _write_v2_stats(root: Path, columns: Mapping[str, Column], lengths: Sequence[int], version: str) -> None:
    if version == "v2.0":  # which has no count
        found = _stats(columns, slice(None))
        rest = {key: {name: value for name, value in of.items() if name != "count"} for key, of in found.items()}
        (root / "meta/stats.json").write_text(json.dumps(rest))
        return
    ends = np.cumsum([0, *lengths]).tolist()
    parts = [_stats(columns, slice(*ends[i : i + 2])) for i in range(len(lengths))]
    write_lines(root / "meta/episodes_stats.jsonl", [{"episode_index": i, "stats": of} for i, of in enumerate(parts)])


def _stats(columns: Mapping[str, Column], rows: slice) -> dict[str, Any]:
    """min, max, mean, std and count of the columns of numbers, over some rows."""
    found = {}
    for key, column in columns.items():
        if column.dtype not in ("image", "string"):
            values = np.asarray(column.values).astype(column.dtype)[rows]
            values = values.reshape(len(values), *column.shape)
            whole = values.astype(np.float64)
            numbers = {"min": values.min(0), "max": values.max(0), "mean": whole.mean(0), "std": whole.std(0)}
            found[key] = {name: value.tolist() for name, value in numbers.items()} | {"count": [len(values)]}
    return found


def write_lines(path: Path, entries: Sequence[Any]) -> None:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def _arrow(column: Column) -> pa.Array:
    """A column as LeRobot stores it: scalars for shape (1,), fixed-size lists for vectors, else nested lists."""
    if isinstance(column.values, pa.Array):
        return column.values
    if column.dtype == "image":
        return pa.array(column.values, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if column.dtype == "string":
        return pa.array(column.values, pa.string())
    values = np.asarray(column.values).astype(column.dtype)
    kind = pa.from_numpy_dtype(values.dtype)
    if list(column.shape) == [1]:
        return pa.array(values.ravel(), kind)
    if len(column.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel(), kind), column.shape[0])
    for _ in column.shape:
        kind = pa.list_(kind)
    return pa.array(values.tolist(), kind)


def _episode_table(lengths: Sequence[int], cameras: Mapping[str, Camera], fps: int, tasks: Sequence[str]) -> pa.Table:
    ends, zeros = np.cumsum(lengths), np.zeros(len(lengths), int)
    table: dict[str, Any] = {
        "episode_index": np.arange(len(lengths)),
        "tasks": [[tasks[number % len(tasks)]] for number in range(len(lengths))],
        "length": lengths,
        "data/chunk_index": zeros,
        "data/file_index": zeros,
        "dataset_from_index": ends - lengths,
        "dataset_to_index": ends,
        "meta/episodes/chunk_index": zeros,
        "meta/episodes/file_index": zeros,
    }
    for key, camera in cameras.items():
        starts = np.array([camera.delay + sum(held[:i]) / fps for held in camera.episodes for i in range(len(held))])
        table[f"videos/{key}/chunk_index"] = zeros
        table[f"videos/{key}/file_index"] = [number for number, held in enumerate(camera.episodes) for _ in held]
        table[f"videos/{key}/from_timestamp"] = starts
        table[f"videos/{key}/to_timestamp"] = starts + np.array(lengths) / fps
    return pa.table(table)


def _write_labels(path: Path, name: str, texts: list[str]) -> None:
    """Tasks and the like as pandas writes them: the text is the index."""
    table = pa.table({f"{name}_index": np.arange(len(texts)), name: texts})
    columns = [(f"{name}_index", "int64", "int64"), (name, "unicode", "object")]
    described = [
        {"name": key, "field_name": key, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for key, kind, numpy in columns
    ]
    pandas = {"index_columns": [name], "columns": described, "column_indexes": [], "pandas_version": "2.3.0"}
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


# ---- datasets of rows alone

ODD_SIZE = (120, 128)
ODD_CAMERA = "observation.image"
_ODD: dict[str, tuple[str, list[int]]] = {
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
}


def write_odd(
    root: Path, lengths: Sequence[int] = (5, 1, 8, 7), rows_per_group: int = 4, fps: int = 10, **options: Any
) -> Path:
    """A dataset without video: PNGs in rows, text, every dtype, one to four axes. Row groups cut through episodes."""
    rng, count = np.random.default_rng(0), sum(lengths)
    columns = {
        ODD_CAMERA: Column("image", [*ODD_SIZE, 3], [_png(e, f) for e, n in enumerate(lengths) for f in range(n)]),
        "note": Column("string", [1], [f"note {row}" for row in range(count)]),
    }
    for key, (dtype, shape) in _ODD.items():
        values = (count, *shape)
        columns[key] = Column(dtype, shape, rng.normal(0, 100, values) if "float" in dtype else rng.integers(0, 2, values))
    labels = {name: [f"{name} 0", f"{name} 1"] for name in ("task", "subtask")}
    return build(root, lengths, columns, fps=fps, rows_per_group=rows_per_group, labels=labels, **options)


def _png(episode: int, frame: int) -> dict[str, Any]:
    return {"bytes": image_file(noise(episode, frame)), "path": f"frame-{frame:06d}.png"}


def noise(episode: int, frame: int) -> Image.Image:
    """An RGB image of `ODD_SIZE`, stamped."""
    picture = np.random.default_rng([episode, frame]).integers(0, 256, (*ODD_SIZE, 3), np.uint8)
    stamp(picture, episode, frame, 0)
    return Image.fromarray(picture)


def image_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image as the bytes of a file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write_wide(root: Path, lengths: Sequence[int], width: int) -> Path:
    """A dataset of rows alone, of `width` random float32 each."""
    values = np.random.default_rng(0).random((sum(lengths), width), np.float32)
    return build(root, lengths, {"wide": Column("float32", [width], values)})


# ---- reading datasets


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


def episode_table(root: Path) -> dict[str, list[Any]]:
    """All of meta/episodes."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(root.glob("meta/episodes/*/*.parquet"))]).to_pydict()


def tree(root: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def videos(root: Path) -> list[Path]:
    return sorted(root.glob("videos/**/*.mp4"))


def video(root: Path) -> Path:
    """The only video file of a dataset."""
    (path,) = root.glob("videos/**/*.mp4")
    return path


# ---- changing datasets


def copied(root: Path, folder: Path) -> Path:
    """A copy of a dataset below `folder`."""
    return Path(shutil.copytree(root, folder / root.name))


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
    features["matrix"] = {"dtype": "float32", "shape": [-1, 2], "names": None}
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


def damage_middle(root: Path) -> None:
    """Overwrite the media of a video in the middle."""
    path = root / VIDEO.format(TOP, 0)
    data = bytearray(path.read_bytes())
    middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
    data[middle : middle + 400] = bytes(400)
    path.write_bytes(data)

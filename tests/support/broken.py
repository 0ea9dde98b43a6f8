"""Every way of breaking a dataset that the tests know, in one registry, `WAYS`.

The tables by name have the message that each way leads to.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore
from support import videos as data
from support.datasets import EPISODE_TABLE as EPISODES
from support.datasets import ODD_CAMERA, ROWS, VIDEO, build, write_odd

TASKS = "meta/tasks.parquet"
INFO = "meta/info.json"


def edit_info(root: Path, **entries: Any) -> None:
    """Sets entries of info.json; `features__KEY` sets one feature, None removes."""
    info = json.loads((root / INFO).read_text())
    for name, value in entries.items():
        place, key = (info["features"], name.removeprefix("features__")) if name.startswith("features__") else (info, name)
        place[key] = value
        if value is None and name != "video_path":
            del place[key]
    (root / INFO).write_text(json.dumps(info))


def edit_table(root: Path, path: str, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(root / path)
    pq.write_table(change(table), root / path)


def put(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values) if isinstance(values, list) else values)


# ---- files as such

GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": lambda good: good[: len(good) * 2 // 3],
    "other bytes": lambda good: np.random.default_rng(0).bytes(len(good)),
    "LFS pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}

# ---- info.json

VIDEO_FEATURE = {"dtype": "video", "shape": [128, 160, 3], "names": None}
INFOS: dict[str, tuple[dict[str, Any], str]] = {
    "no version": ({"codebase_version": None}, r"info\.json: codebase_version is missing\. It has meta/episodes/.*like v3\.0"),
    "no fps": ({"fps": None}, "Invalid fps in .*: must be above 0 and at most 100000, got None"),
    "fps of 0": ({"fps": 0}, "Invalid fps in .*, got 0$"),
    "fps as text": ({"fps": "30 Hz"}, "Invalid fps in .*: must be above 0 .*, got 30 Hz$"),
    "fps that no float holds": ({"fps": 10**400}, "Invalid fps in .*, got 1000"),
    "no features": ({"features": None}, "Invalid features in .*: must be a JSON object, got NoneType"),
    "a feature that is none": ({"features__action": 3}, "Invalid feature 'action' in .*: must be a JSON object, got int"),
    "a shape of text": (
        {"features__action": {"dtype": "float32", "shape": "2"}},
        "Invalid shape of feature 'action' in .*, got 2$",
    ),
    "a shape of gigabytes": ({"features__action": {"dtype": "float32", "shape": [1 << 40]}}, "positive integers"),
    "a camera without channels": (
        {f"features__{data.CAMERA}": {**VIDEO_FEATURE, "shape": [128, 160]}},
        r"Invalid shape of camera '.*' in .*: must be \(H, W, C\) or .*, got \[128, 160\]",
    ),
    "no timestamp": ({"features__timestamp": None}, "Missing feature 'timestamp'"),
    "no path of the videos": ({"video_path": None}, "Invalid video_path in .* for video features, got null"),
    "no path of the data": ({"data_path": None}, "Invalid path template data_path in .*: must be text, got NoneType"),
    "a path out of the dataset": (
        {"data_path": "../{chunk_index:03d}"},
        "file name '../000' in the metadata: must be a path within the dataset",
    ),
    "an absolute path": (
        {"data_path": "/etc/{file_index:03d}"},
        "file name '/etc/000' in the metadata: must be a path within the dataset",
    ),
    "a path of gigabytes": ({"data_path": "{file_index:09999999999d}"}, "Invalid path template data_path in"),
    "a path that looks into objects": ({"video_path": "{video_key.__class__}"}, "Invalid path template video_path in"),
    "a path with other fields": ({"data_path": "{episode_index}"}, "Invalid path template .* Allowed fields: {video_key}"),
    "episodes that are not there": (
        {"total_episodes": 3},
        r"Invalid total_episodes in .*: must be 2, .* in .*meta/episodes, got 3",
    ),
    "frames that are not there": (
        {"total_frames": 100},
        "Invalid total_frames in .*: must be 72, .* in .*meta/episodes, got 100",
    ),
    "totals of another kind": ({"total_frames": "72"}, "Invalid total_frames in .*: must be a nonnegative integer, got 72"),
}

# ---- the episode table

FROM = f"videos/{data.CAMERA}/from_timestamp"
TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "no episodes": (lambda t: t.slice(0, 0), "No episodes in "),
    "a lost column": (lambda t: t.drop_columns(["length"]), "Missing column length in "),
    "a lost column of a camera": (lambda t: t.drop_columns([FROM]), f"Missing column {FROM} in "),
    "text for numbers": (
        lambda t: put(t, "length", ["31", "41"]),
        "Invalid column length in .*: must hold a number for each episode",
    ),
    "a missing number": (
        lambda t: put(t, "length", [31, None]),
        "Invalid column length in .*: must hold a number for each episode",
    ),
    "the same episode twice": (
        lambda t: put(t, "episode_index", [1, 1]),
        "Invalid episode 1 in .*: episode_index .* not duplicated",
    ),
    "a negative episode": (
        lambda t: put(t, "episode_index", [-1, 1]),
        "Invalid episode -1 in .*: episode_index must be nonnegative",
    ),
    "an empty episode": (lambda t: put(t, "length", [31, 0]), "Invalid episode 1 in .*: length must be a positive number"),
    "lengths at odds": (
        lambda t: put(t, "length", [30, 42]),
        "Invalid episode 0 in .*: length must be dataset_to_index - dataset_from_index",
    ),
    "a negative file": (
        lambda t: put(t, "data/file_index", [0, -1]),
        "Invalid episode 1 in .*: data/file_index must be the number of a file",
    ),
    "no time": (lambda t: put(t, FROM, [0.0, float("nan")]), "Invalid episode 1 in .*from_timestamp must be a time in seconds"),
    "an end before its start": (
        lambda t: put(t, f"videos/{data.CAMERA}/to_timestamp", [31 / 30, 1.0]),
        "Invalid episode 1 in .*to_timestamp must not be less than from_timestamp",
    ),
}


# ---- rows


def with_null(table: pa.Table, name: str) -> pa.Table:
    values = table[name].to_pylist()
    return put(table, name, pa.array([*values[:50], None, *values[51:]], table.schema.field(name).type))


def with_time(table: pa.Table, row: int, seconds: float) -> pa.Table:
    times = table["timestamp"].to_numpy().copy()
    times[row] = seconds
    return put(table, "timestamp", pa.array(times))


def fewer(table: pa.Table) -> pa.Table:
    return table.slice(0, 60)


def swapped(table: pa.Table) -> pa.Table:
    """Two rows have changed places, and `frame_index` does not tell which."""
    return put(table.take([0, 2, 1, *range(3, 72)]), "frame_index", [0] * 72)


ROW_TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "fewer rows than promised": (fewer, "Invalid episode 1 in .*: must have 41 rows, as the metadata says, got 29"),
    "rows of another episode": (
        lambda t: put(t, "episode_index", pa.array(np.full(72, 5))),
        "Invalid episode 0 in .*: must have 31 rows, as the metadata says, got 0",
    ),
    "rows out of order": (
        swapped, r"Invalid timestamp of row 2 in .*episode 0: must be greater than 0\.0667 s.*The rows are out of order"
    ),
    "a timestamp that falls": (
        lambda t: with_time(t, 48, 0.15),
        r"timestamp of row 17 in .*episode 1: must be greater than 0\.5333 s, that of row 16, got 0\.1500 s\. The file is",
    ),
    "a timestamp that stays": (
        lambda t: with_time(t, 48, 16 / 30),
        r"timestamp of row 17 in .*episode 1: must be .*, got 0\.5333 s",
    ),
    "a timestamp that is none": (
        lambda t: with_time(t, 31, float("nan")),
        "timestamp of row 0 in .*episode 1: must be a finite number, got nan s",
    ),
    "a missing number": (lambda t: with_null(t, "timestamp"), "episode 1: timestamp: 1 of 41 values are missing"),
    "a missing vector": (
        lambda t: with_null(t, "action"),
        "episode 1: action: 1 of 41 values are missing|Expected all lists to be of size=2",  # the latter before pyarrow 26
    ),
    "text for numbers": (
        lambda t: put(t, "timestamp", pc.cast(t["timestamp"], pa.string())),
        "timestamp must hold float32 of shape .*, as meta/info.json says, got string",
    ),
    "a scalar for a vector": (
        lambda t: put(t, "action", t["timestamp"]),
        r"action must have shape \[2\], as .* says, got float",
    ),
    "longer vectors": (
        lambda t: put(t, "action", pa.array([[1.0, 2.0, 3.0]] * 72)),
        r"action must have shape \[2\], .*got a value of another shape",
    ),
    "a hole in a vector": (lambda t: put(t, "action", pa.array([[1.0, None]] * 72)), "action: .*numbers are missing"),
    "a lost column": (lambda t: t.drop_columns(["task_index"]), f"Missing column task_index in .*{ROWS}"),
    "no episode index": (lambda t: t.drop_columns(["episode_index"]), f"Missing column episode_index in .*{ROWS}"),
}  # fmt: skip


# ---- video files


def cut_in_media(video: bytes) -> bytes:
    return video[: video.index(b"mdat") + 2000]


AGAIN = "Copy or fetch it again"
WHOLE_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", f"no moov box.*the file is empty. {AGAIN}"),
    "Git LFS pointer": (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "HTML page": (lambda _: b"\n<!DOCTYPE html><html>Sign in</html>" + b" " * 500, "HTML page.*Fetch it again"),
    "something else": (lambda _: b"PK\3\4" + bytes(1000), rf"begins with b'PK.*not an MP4. {AGAIN}"),
    "cut in the media": (
        cut_in_media, rf"box 'mdat' at byte \d+ must have \d+ bytes, got 2004: the file is truncated or damaged. {AGAIN}"
    ),
    "cut in the index": (lambda video: video[:-300], f"'moov'.*truncated.*{AGAIN}"),
    "index at the end is gone": (
        lambda video: video[: video.index(b"moov") - 4], f"no moov box.*truncated, or its recording was not finished. {AGAIN}"
    ),
    "cut in a box header": (lambda video: video[: video.index(b"moov") + 1], f"a box header at byte.*truncated.*{AGAIN}"),
}  # fmt: skip


def other_size(video: bytes) -> bytes:
    """The sample description says 96×96."""
    at = video.index(b"avc1", video.index(b"stsd")) + 28
    return video[:at] + (96).to_bytes(2, "big") * 2 + video[at + 4 :]


def trimmed(video: bytes, part: str) -> bytes:
    """An edit list that hides frames at the head or the tail."""
    tree = data.boxes(video)
    elst = data.box(tree, b"moov", b"trak", b"edts", b"elst")
    duration, media = np.frombuffer(elst[1], ">u4", 2, 8).tolist()
    duration, media = (duration, media + 5 * 512) if part == "head" else (duration // 2, media)
    elst[1] = elst[1][:8] + np.array([duration, media], ">u4").tobytes() + elst[1][16:]
    return data.unboxed(tree)


def other_keyframe(video: bytes) -> bytes:
    """The index calls the frame after the second keyframe a keyframe."""
    tree = data.boxes(video)
    stss = data.box(tree, *data.STBL, b"stss")
    stss[1] = stss[1][:16] + (int.from_bytes(stss[1][16:20], "big") + 1).to_bytes(4, "big") + stss[1][20:]
    return data.unboxed(tree)


def lost_bytes(video: bytes) -> bytes:
    """A block is missing in the middle of the media data, and the rest has moved up."""
    begin = video.index(b"mdat") + 5000
    moov = video.index(b"moov") - 4
    return video[:begin] + video[begin + 512 : moov] + bytes(512) + video[moov:]


# ---- packets

WHOLE = {"zeros": bytes, "ff": lambda n: b"\xff" * n, "random": np.random.default_rng(7).bytes}


def hole(payload: bytes, begin: float) -> bytes:
    """A packet with zeros from a share of it on."""
    first = int(len(payload) * begin)
    stop = max(len(payload) if begin > 0.5 else int(len(payload) * (begin + 0.4)), first + 144)
    return (payload[:first] + bytes(stop - first) + payload[stop:])[: len(payload)]


def damage(root: Path, path: str, sample: int, change: Callable[[bytes], bytes]) -> None:
    """Changes one packet of a video file, in place."""
    table = read_index(LocalStore(str(root)), path)
    start, size = int(table.offset[sample]), int(table.size(sample))
    video = (root / path).read_bytes()
    payload = change(video[start : start + size])
    assert len(payload) == size
    assert payload != video[start : start + size]
    (root / path).write_bytes(video[:start] + payload + video[start + size :])


# ---- the registry


class Way(NamedTuple):
    """A way of breaking `healthy(codec)`: `apply` changes a copy of it."""

    apply: Callable[[Path], object]
    codec: str = "h264"
    decodes: bool = False  # whether it shows only where all frames are decoded


def healthy(folder: Path, codec: str) -> Path:
    """The dataset that is broken: two episodes in one file of h264; "image", pictures in rows; or "v2.1", a file each."""
    if codec == "image":
        return write_odd(folder / "image")
    if codec == "v2.1":
        cameras = data.one_file_each(folder, [data.CAMERA], _V2_LENGTHS, data.FPS)
        return build(folder / "v2.1", _V2_LENGTHS, {}, cameras=cameras, fps=data.FPS, version="v2.1", stats=True)
    return data.write_dataset(folder / codec, [data.encode(data.draw(), folder / "video.mp4", data.h264(12))])


_V2_LENGTHS = (9, 6)
VIDEO_FILE = VIDEO.format(data.CAMERA, 0)
WAYS: dict[str, Way] = {}

for _path in (INFO, EPISODES, ROWS, TASKS, VIDEO_FILE):
    WAYS[f"{_path}: missing"] = Way(lambda root, path=_path: (root / path).unlink())
    for _kind in GARBAGE:
        WAYS[f"{_path}: {_kind}"] = Way(lambda root, path=_path, kind=_kind: _rewrite(root / path, GARBAGE[kind]))
for _name in INFOS:
    WAYS[f"{INFO}: {_name}"] = Way(lambda root, name=_name: edit_info(root, **INFOS[name][0]))
for _name in TABLES:
    WAYS[f"{EPISODES}: {_name}"] = Way(lambda root, name=_name: edit_table(root, EPISODES, TABLES[name][0]))
for _name in ROW_TABLES:
    WAYS[f"{ROWS}: {_name}"] = Way(lambda root, name=_name: edit_table(root, ROWS, ROW_TABLES[name][0]))
for _name in WHOLE_FILES:
    WAYS[f"video: {_name}"] = Way(lambda root, name=_name: _rewrite(root / VIDEO_FILE, WHOLE_FILES[name][0]))
for _part in ("head", "tail"):
    WAYS[f"video: an edit list that trims its {_part}"] = Way(
        lambda root, part=_part: _rewrite(root / VIDEO_FILE, lambda video: trimmed(video, part))
    )
for _offset in (1, -1, 0.4):
    WAYS[f"{ROWS}: {_offset} frames late"] = Way(lambda root, offset=_offset: data.shifted(root, offset))
for _kind in WHOLE:
    WAYS[f"packet: {_kind}"] = Way(
        lambda root, kind=_kind: damage(root, VIDEO_FILE, 40, lambda payload: WHOLE[kind](len(payload))), decodes=True
    )
for _begin in (0.0, 0.3, 0.6):
    WAYS[f"packet: a hole from {_begin}"] = Way(
        lambda root, begin=_begin: damage(root, VIDEO_FILE, 24, lambda payload: hole(payload, begin)), decodes=True
    )
for _end in ("episodes.jsonl", "tasks.jsonl", "episode_000001.parquet", "episode_000001.mp4"):
    WAYS[f"v2.1: {_end}: missing"] = Way(lambda root, end=_end: _only(root, end).unlink(), "v2.1")
    for _kind in GARBAGE:
        WAYS[f"v2.1: {_end}: {_kind}"] = Way(
            lambda root, end=_end, kind=_kind: _rewrite(_only(root, end), GARBAGE[kind]), "v2.1"
        )
WAYS |= {
    "v2.1: an episode twice": Way(lambda root: _rewrite(_only(root, "episodes.jsonl"), lambda lines: lines + lines), "v2.1"),
    "v2.1: another length": Way(
        lambda root: _rewrite(_only(root, "episodes.jsonl"), lambda lines: lines.replace(b'"length": 6', b'"length": 5')),
        "v2.1",
    ),
    f"{TASKS}: other tasks": Way(lambda root: edit_table(root, TASKS, lambda t: put(t, "task_index", pa.array([7])))),
    f"{ROWS}: a task without a name": Way(
        lambda root: edit_table(root, ROWS, lambda t: put(t, "task_index", pa.array(np.r_[np.zeros(71, np.int64), 9])))
    ),
    f"{INFO}: frames of another size": Way(
        lambda root: edit_info(root, **{f"features__{data.CAMERA}": {**VIDEO_FEATURE, "shape": [96, 160, 3]}})
    ),
    f"{EPISODES}: frames that the video lacks": Way(lambda root: _longer(root)),
    "video: a size that the bitstream contradicts": Way(
        lambda root: (
            _rewrite(root / VIDEO_FILE, other_size),
            edit_info(root, **{f"features__{data.CAMERA}": {**VIDEO_FEATURE, "shape": [96, 96, 3]}}),
        ),
        decodes=True,
    ),
    "video: several tracks": Way(lambda root: _remuxed(root, "-map", "0:v", "-map", "0:v")),
    "video: fragmented": Way(lambda root: _remuxed(root, "-movflags", "frag_keyframe+empty_moov")),
    "video: another keyframe": Way(lambda root: _rewrite(root / VIDEO_FILE, other_keyframe), decodes=True),
    "video: lost bytes": Way(lambda root: _rewrite(root / VIDEO_FILE, lost_bytes), decodes=True),
    "image: damaged": Way(lambda root: _image(root, 9, lambda png: png[:60] + bytes(200) + png[260:]), "image", True),
    "image: another size": Way(lambda root: _image(root, 9, lambda _: _png((8, 8))), "image", True),
    "image: missing": Way(lambda root: _image(root, 9, lambda _: None), "image", True),
    "image: no row": Way(lambda root: edit_table(root, ROWS, lambda t: t.slice(0, 20)), "image"),
}


def _only(root: Path, end: str) -> Path:
    [path] = root.rglob(end)
    return path


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _remuxed(root: Path, *options: str) -> None:
    path = root / VIDEO_FILE
    data.ffmpeg("-i", path, *options, "-c", "copy", path.with_name("new.mp4"))
    path.with_name("new.mp4").rename(path)


def _longer(root: Path) -> None:
    """Episode 1 has a frame more in table, rows and intervals than the video has."""
    table = pq.read_table(root / ROWS)
    last = table.slice(71, 1)
    for name, value in (("frame_index", 41), ("index", 72), ("timestamp", 41 / data.FPS)):
        last = put(last, name, pa.array([value], table.schema.field(name).type))
    pq.write_table(pa.concat_tables([table, last]), root / ROWS)
    stop = f"videos/{data.CAMERA}/to_timestamp"
    for name, values in (("length", [31, 42]), ("dataset_to_index", [31, 73]), (stop, [31 / data.FPS, 73 / data.FPS])):
        edit_table(root, EPISODES, lambda t, name=name, values=values: put(t, name, values))
    edit_info(root, total_frames=73)


def _image(root: Path, row: int, change: Callable[[bytes], bytes | None]) -> None:
    def changed(table: pa.Table) -> pa.Table:
        values = table[ODD_CAMERA].to_pylist()
        values[row]["bytes"] = change(values[row]["bytes"])
        return put(table, ODD_CAMERA, pa.array(values, table.schema.field(ODD_CAMERA).type))

    edit_table(root, ROWS, changed)


def _png(size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size).save(stream, "PNG")
    return stream.getvalue()

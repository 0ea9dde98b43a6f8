"""Small videos whose frames say which frame they are, and the smallest LeRobot v3 datasets around them."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

import dali_stream
from dali_stream.demo import read_identities, stamp

Pictures = npt.NDArray[np.uint8]
CAMERA = "observation.images.cam"
SIZE = (128, 160)
FPS = 30
EPISODES = (31, 41)  # frames of the episodes of one file: the second begins in the middle of a GOP
FRAMES = sum(EPISODES)
VIDEO = "videos/{}/chunk-000/file-{:03d}.mp4"

X264 = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-sc_threshold", "0", "-bf", "3")
X265 = ("-c:v", "libx265", "-preset", "superfast", "-crf", "24", "-tag:v", "hvc1")
SVT = ("-c:v", "libsvtav1", "-preset", "10", "-crf", "30", "-svtav1-params", "scm=0:enable-tf=0")
VPX = ("-c:v", "libvpx-vp9", "-crf", "32", "-b:v", "0", "-deadline", "good", "-cpu-used", "5")
MPEG4 = ("-c:v", "mpeg4", "-q:v", "3")


def h264(gop: int, open_gop: bool = False, pixels: str = "yuv420p") -> tuple[str, ...]:
    """x264 with three B-frames, one of which others may refer to, and keyframes exactly `gop` apart."""
    params = f"b-pyramid=normal:b-adapt=0:open-gop={int(open_gop)}:keyint={gop}:min-keyint={gop}"
    return (*X264, "-pix_fmt", pixels, "-x264-params", params)


def hevc(gop: int, open_gop: bool = False, pixels: str = "yuv420p") -> tuple[str, ...]:
    """x265 with its usual B-frames and keyframes `gop` apart; open GOPs are its default."""
    params = f"open-gop={int(open_gop)}:keyint={gop}:min-keyint={gop}:scenecut=0:bframes=3:b-adapt=0:log-level=none"
    return (*X265, "-pix_fmt", pixels, "-x265-params", params)


def av1(gop: int, pixels: str = "yuv420p") -> tuple[str, ...]:
    """SVT-AV1, which hides frames at the longer GOPs."""
    return (*SVT, "-pix_fmt", pixels, "-g", str(gop))


def vp9(gop: int, pixels: str = "yuv420p", hidden: bool = False) -> tuple[str, ...]:
    """libvpx; `hidden` lets it use alternate reference frames, which are never shown and take two passes."""
    return (*VPX, "-pix_fmt", pixels, "-g", str(gop), *(_HIDDEN if hidden else ("-auto-alt-ref", "0", "-lag-in-frames", "0")))


_HIDDEN = ("-auto-alt-ref", "1", "-lag-in-frames", "25")


def mpeg4(gop: int, b_frames: int = 0) -> tuple[str, ...]:
    """FFmpeg's MPEG-4 Part 2."""
    return (*MPEG4, "-pix_fmt", "yuv420p", "-g", str(gop), "-sc_threshold", "1000000000", "-bf", str(b_frames))


def draw(episodes: Sequence[int] = EPISODES, first: int = 0, size: tuple[int, int] = SIZE, camera: int = 0) -> Pictures:
    """Frames (N, H, W, 3) of episodes end to end: textured squares that move, and the stamp of `dali_stream.demo`."""
    height, width = size
    rng = np.random.default_rng([first, camera])
    back = np.kron(rng.integers(40, 200, (height // 16 + 1, width // 16 + 1, 3)), np.ones((16, 16, 1)))[:height, :width]
    square = rng.integers(0, 256, (24, 24, 3))
    pictures = np.empty((sum(episodes), height, width, 3), np.uint8)
    at = 0
    for number, length in enumerate(episodes, first):
        for frame in range(length):
            pictures[at] = back
            y, x = (7 * frame) % (height - 40), (11 * frame) % (width - 24)
            pictures[at, y : y + 24, x : x + 24] = square
            stamp(pictures[at], number, frame, camera)
            at += 1
    return pictures


def ffmpeg(*arguments: str | Path, stdin: bytes | None = None) -> None:
    """Runs the ffmpeg program; the test is skipped where there is none, or where it lacks the encoder."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("the ffmpeg program is not installed")
    for encoder in (str(b) for a, b in itertools.pairwise(arguments) if a == "-c:v" and b != "copy"):
        if f" {encoder} " not in _encoders():
            pytest.skip(f"this ffmpeg has no encoder {encoder}")
    command = ["ffmpeg", "-hide_banner", "-loglevel", "error", "-y", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, env={**os.environ, "SVT_LOG": "1"}, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]


@functools.cache
def _encoders() -> str:
    return subprocess.run(["ffmpeg", "-hide_banner", "-encoders"], capture_output=True, text=True, check=True).stdout


def encode(pictures: Pictures, path: Path, arguments: Sequence[str], *more_input: str, fps: int = FPS) -> Path:
    """Writes frames to a video file; `more_input` stands before the encoder's arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = pictures.shape[1:3]
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-")
    passes: list[tuple[str, ...]] = [()]
    if tuple(arguments[-len(_HIDDEN) :]) == _HIDDEN:
        passes = [("-pass", number, "-passlogfile", str(path.with_suffix(".log"))) for number in ("1", "2")]
    for options in passes:
        ffmpeg(*raw, *more_input, *arguments, *options, path, stdin=pictures.tobytes())
    return path


# ---- MP4 boxes as trees, to make the files that FFmpeg does not

_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts")
Box = list[Any]  # [kind, body], the body being bytes or a list of boxes


def boxes(data: bytes) -> list[Box]:
    """The boxes of a file that FFmpeg wrote."""
    found: list[Box] = []
    while data:
        size, kind, head = int.from_bytes(data[:4], "big"), data[4:8], 8
        if size == 1:
            size, head = int.from_bytes(data[8:16], "big"), 16
        body = data[head:size]
        found.append([kind, boxes(body) if kind in _CONTAINERS else body])
        data = data[size:]
    return found


def unboxed(tree: list[Box]) -> bytes:
    """The bytes of boxes."""
    bodies = [(kind, unboxed(body) if isinstance(body, list) else body) for kind, body in tree]
    return b"".join(struct.pack(">I4s", 8 + len(body), kind) + body for kind, body in bodies)


def box(tree: list[Box], *path: bytes) -> Box:
    """The first box at a path."""
    found = next(entry for entry in tree if entry[0] == path[0])
    return box(found[1], *path[1:]) if len(path) > 1 else found


STBL = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def joined(first: Path, second: Path) -> bytes:
    """Two MP4s end to end as one with two sample descriptions, a chunk for each, and without an edit list."""
    trees = [boxes(path.read_bytes()) for path in (first, second)]
    kinds = (b"stts", b"ctts", b"stss", b"stsz")
    tables = [{kind: _words(body[4:]) for kind, body in box(tree, *STBL)[1] if kind in kinds} for tree in trees]
    sizes = [table[b"stsz"][2:] for table in tables]
    n = [len(size) for size in sizes]
    late = [np.repeat(t[b"ctts"][2::2], t[b"ctts"][1::2]) if b"ctts" in t else [0] * k for t, k in zip(tables, n, strict=True)]
    ftyp, media = unboxed(trees[0][:1]), [box(tree, b"mdat")[1][-size.sum() :] for tree, size in zip(trees, sizes, strict=True)]
    begin = len(ftyp) + 8
    entries = {
        b"stts": [1, sum(n), tables[0][b"stts"][2]],
        b"ctts": [sum(n), *np.stack([np.ones(sum(n), int), np.concatenate(late)], 1).ravel()],
        b"stss": [0, *tables[0][b"stss"][1:], *(tables[1][b"stss"][1:] + n[0])],
        b"stsc": [2, 1, n[0], 1, 2, n[1], 2],
        b"stsz": [0, sum(n), *np.concatenate(sizes)],
        b"stco": [2, begin, begin + len(media[0])],
    }
    entries[b"stss"][0] = len(entries[b"stss"]) - 1
    described = [box(tree, *STBL, b"stsd")[1][8:] for tree in trees]
    moov = box(trees[0], b"moov")
    box([moov], *STBL)[1] = [[b"stsd", struct.pack(">II", 0, 2) + b"".join(described)]] + [
        [kind, bytes(4) + np.array(values).astype(">u4").tobytes()] for kind, values in entries.items()
    ]
    trak = box([moov], b"moov", b"trak")
    trak[1] = [entry for entry in trak[1] if entry[0] != b"edts"]
    return ftyp + unboxed([[b"mdat", b"".join(media)], moov])


def _words(body: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(body, ">u4").astype(np.int64)


def write_dataset(
    root: Path,
    files: Sequence[Path],
    episodes: Sequence[Sequence[int]] = (EPISODES,),
    *,
    size: tuple[int, int] = SIZE,
    fps: int = FPS,
    delay: float = 0.0,
) -> Path:
    """A dataset of one camera around these MP4s, which are hard-linked or copied into it.

    Args:
        root: folder to make.
        files: the MP4s, in order.
        episodes: per MP4, the frames of the episodes in it.
        size: (height, width) that info.json promises.
        fps: frames per second.
        delay: seconds at which each file's first frame is shown.
    """
    lengths = [length for held in episodes for length in held]
    for number, path in enumerate(files):
        target = root / VIDEO.format(CAMERA, number)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path != target:
            shutil.copy(path, target)
    starts = [delay + sum(held[:i]) / fps for held in episodes for i in range(len(held))]
    numbers = [number for number, held in enumerate(episodes) for _ in held]
    first = np.cumsum([0, *lengths])
    table = {
        "episode_index": range(len(lengths)),
        "tasks": [["see"]] * len(lengths),
        "length": lengths,
        "data/chunk_index": [0] * len(lengths),
        "data/file_index": [0] * len(lengths),
        "dataset_from_index": first[:-1].tolist(),
        "dataset_to_index": first[1:].tolist(),
        f"videos/{CAMERA}/chunk_index": [0] * len(lengths),
        f"videos/{CAMERA}/file_index": numbers,
        f"videos/{CAMERA}/from_timestamp": starts,
        f"videos/{CAMERA}/to_timestamp": [start + n / fps for start, n in zip(starts, lengths, strict=True)],
    }
    _parquet(root / "meta/episodes/chunk-000/file-000.parquet", pa.table({k: list(v) for k, v in table.items()}))
    tasks = pa.table({"task_index": [0], "task": ["see"]})
    pandas = json.dumps({"index_columns": ["task"], "columns": []})
    _parquet(root / "meta/tasks.parquet", tasks.replace_schema_metadata({"pandas": pandas}))
    frame = np.concatenate([np.arange(n) for n in lengths])
    rows = {
        "timestamp": pa.array((frame / fps).astype(np.float32)),
        "frame_index": frame,
        "episode_index": np.repeat(np.arange(len(lengths)), lengths),
        "index": np.arange(len(frame)),
        "task_index": np.zeros(len(frame), np.int64),
        "action": pa.FixedSizeListArray.from_arrays(np.arange(2 * len(frame), dtype=np.float32), 2),
    }
    _parquet(root / "data/chunk-000/file-000.parquet", pa.table(rows), row_group_size=max(lengths))
    (root / "meta/info.json").write_text(json.dumps(_info(lengths, size, fps), indent=2))
    return root


def shifted(root: Path, frames: float) -> Path:
    """A dataset whose rows are so many frames late against its video."""
    rows = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(rows)
    times = pa.array((table["timestamp"].to_numpy() + frames / FPS).astype(np.float32))
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), rows)
    return root


def _info(lengths: Sequence[int], size: tuple[int, int], fps: int) -> dict[str, object]:
    scalar = {"shape": [1], "names": None}
    return {
        "codebase_version": "v3.0",
        "fps": fps,
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            CAMERA: {"dtype": "video", "shape": [*size, 3], "names": ["height", "width", "channels"]},
            "timestamp": {"dtype": "float32", **scalar},
            **{key: {"dtype": "int64", **scalar} for key in ("frame_index", "episode_index", "index", "task_index")},
            "action": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
        },
    }


def _parquet(path: Path, table: pa.Table, **options: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)


def whole_file(path: Path) -> torch.Tensor:
    """Every frame of a video, (N, 3, H, W) uint8, decoded from the beginning to the end by torchcodec alone."""
    decoder = VideoDecoder(path, num_ffmpeg_threads=1)
    pictures: torch.Tensor = decoder.get_frames_in_range(0, len(decoder)).data
    return pictures


def loader(dataset: Path | str | dali_stream.Dataset, **options: object) -> dali_stream.Loader:
    """A Loader that keeps frames as they are and serves every sample."""
    defaults: dict[str, object] = {
        "batch_size": 16, "image_dtype": "uint8", "last_batch": "partial", "device": "cpu", "decode": "torchcodec",
        "threads": 2, "consumers": 4, "episode_pool_size": 2,
    }  # fmt: skip
    return dali_stream.Loader(dataset, **{**defaults, **options})  # type: ignore[arg-type]


def samples(batches: dali_stream.Loader) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(episode, frame, frames) of each sample of an epoch."""
    for batch in batches:
        yield from zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), batch[CAMERA], strict=True)


def identities(pictures: torch.Tensor) -> list[tuple[int, int]]:
    """(episode, frame) that each of the frames (N, 3, H, W) carries."""
    return [(e, f) for e, f, _ in read_identities(pictures.movedim(1, -1).numpy()).tolist()]

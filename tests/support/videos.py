"""Small videos whose frames say which frame they are; MP4 boxes; what FFmpeg finds in a file."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from filelock import FileLock
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

import dali_stream
from dali_stream.demo import read_identities, stamp
from dali_stream.mp4.index import read_index
from dali_stream.mp4.muxer import Track, head
from dali_stream.storage import LocalStore
from support.datasets import ROWS, Camera, Column, build
from support.datasets import VIDEO as VIDEO

Frames = npt.NDArray[np.uint8]
CAMERA = "observation.images.cam"
SIZE = (128, 160)
FPS = 30
EPISODES = (31, 41)  # frames of the episodes of one file: the second begins in the middle of a GOP
FRAMES = sum(EPISODES)
X264 = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-sc_threshold", "0", "-bf", "3")
X265 = ("-c:v", "libx265", "-preset", "superfast", "-crf", "24", "-tag:v", "hvc1")
SVT = ("-c:v", "libsvtav1", "-preset", "10", "-crf", "30", "-svtav1-params", "scm=0:enable-tf=0")
VPX = ("-c:v", "libvpx-vp9", "-crf", "32", "-b:v", "0", "-deadline", "good", "-cpu-used", "5")
MPEG4 = ("-c:v", "mpeg4", "-q:v", "3")


def h264(gop: int, open_gop: bool = False, pixels: str = "yuv420p", b_frames: int = 3) -> tuple[str, ...]:
    """x264 with this many B-frames, one of which others may refer to, and keyframes exactly `gop` apart."""
    params = f"b-pyramid=normal:b-adapt=0:bframes={b_frames}:open-gop={int(open_gop)}:keyint={gop}:min-keyint={gop}"
    return (*X264, "-pix_fmt", pixels, "-x264-params", params)


def h264_without_idr() -> tuple[str, ...]:
    """x264 with recovery points as keyframes after the first, and no frame displayed before the keyframe that it follows."""
    return (*X264, "-pix_fmt", "yuv420p", "-x264-params", "open-gop=1:keyint=13:bframes=1:b-adapt=0")


def lossless(gop: int) -> tuple[str, ...]:
    """x264 without loss: 4:2:0 of the profile High 4:4:4 Predictive, whose intra blocks FFmpeg decodes by the build of x264."""
    params = f"keyint={gop}:min-keyint={gop}:bframes=3"
    return (*X264[:4], "-qp", "0", "-sc_threshold", "0", "-pix_fmt", "yuv420p", "-x264-params", params)


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


def draw(episodes: Sequence[int] = EPISODES, first: int = 0, size: tuple[int, int] = SIZE, camera: int = 0) -> Frames:
    """Frames (N, H, W, 3) of episodes end to end: textured squares that move, and the stamp of `dali_stream.demo`."""
    height, width = size
    rng = np.random.default_rng([first, camera])
    back = np.kron(rng.integers(40, 200, (height // 16 + 1, width // 16 + 1, 3)), np.ones((16, 16, 1)))[:height, :width]
    square = rng.integers(0, 256, (24, 24, 3))
    frames = np.empty((sum(episodes), height, width, 3), np.uint8)
    at = 0
    for number, length in enumerate(episodes, first):
        for frame in range(length):
            frames[at] = back
            y, x = (7 * frame) % (height - 40), (11 * frame) % (width - 24)
            frames[at, y : y + 24, x : x + 24] = square
            stamp(frames[at], number, frame, camera)
            at += 1
    return frames


def colourful() -> Frames:
    """As `draw`, but in large areas of strong colours, which subsampling leaves alone."""
    height, width = SIZE
    areas = np.random.default_rng(0).integers(20, 236, (height // 32, width // 32, 3))
    back = np.kron(areas, np.ones((32, 32, 1))).astype(np.uint8)
    frames = np.stack([np.roll(back, 4 * frame, 1) for n in EPISODES for frame in range(n)])
    for number, (episode, frame) in enumerate((e, f) for e, n in enumerate(EPISODES) for f in range(n)):
        stamp(frames[number], episode, frame, 0)
    return frames


def ffmpeg(*arguments: str | Path, stdin: bytes | None = None) -> None:
    """Run the ffmpeg program. The test is skipped if ffmpeg is not installed or lacks the encoder."""
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


def encode(frames: Frames, path: Path, arguments: Sequence[str], *more_input: str, fps: int = FPS) -> Path:
    """Write frames to a video file. `more_input` precedes the encoder's arguments. Each file is encoded once per test run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    what = repr((frames.shape, arguments, more_input, fps)).encode()
    made = Path(os.environ["WRITTEN_BY_TESTS"], hashlib.sha256(what + frames.tobytes()).hexdigest() + path.suffix)
    with FileLock(f"{made}.lock"):
        if not made.exists():
            _encode(frames, unfinished := made.with_stem(f"unfinished-{made.stem}"), arguments, more_input, fps)
            unfinished.rename(made)
    return Path(shutil.copy(made, path))


def _encode(frames: Frames, path: Path, arguments: Sequence[str], more_input: Sequence[str], fps: int) -> None:
    height, width = frames.shape[1:3]
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-")
    passes: list[tuple[str, ...]] = [()]
    if tuple(arguments[-len(_HIDDEN) :]) == _HIDDEN:
        passes = [("-pass", number, "-passlogfile", str(path.with_suffix(".log"))) for number in ("1", "2")]
    for options in passes:
        ffmpeg(*raw, *more_input, *arguments, *options, path, stdin=frames.tobytes())


def encode_apart(parts: Sequence[Frames], path: Path, arguments: Sequence[str]) -> Path:
    """Encode each part on its own, as LeRobot encodes episodes, and join the packets to one file at a constant rate."""
    files = [encode(part, path.with_name(f"{path.stem}-part-{n}.mp4"), arguments) for n, part in enumerate(parts)]
    listed = path.with_suffix(".txt")
    listed.write_text("".join(f"file '{file.name}'\n" for file in files))
    ffmpeg("-f", "concat", "-i", listed, "-c", "copy", path)
    return path


def write_dataset(
    root: Path,
    files: Sequence[Path],
    episodes: Sequence[Sequence[int]] = (EPISODES,),
    *,
    size: tuple[int, int] = SIZE,
    fps: int = FPS,
    delay: float = 0.0,
) -> Path:
    """A dataset of one camera around these MP4s, with the numbers of its frames as actions. See `datasets.Camera`."""
    lengths = [length for held in episodes for length in held]
    actions = Column("float32", [2], np.arange(2 * sum(lengths)).reshape(-1, 2))
    camera = Camera(files, episodes, size, delay)
    # If lengths differ, row groups cut through episodes.
    return build(root, lengths, {"action": actions}, cameras={CAMERA: camera}, fps=fps, rows_per_group=max(lengths))


def one_file_each(folder: Path, keys: Sequence[str], lengths: Sequence[int], fps: int) -> dict[str, Camera]:
    """Cameras with an AV1 file per episode, as v2.x has them, written below `folder`."""
    cameras = {}
    for number, key in enumerate(keys):
        drawn = [draw([n], first=episode, camera=number) for episode, n in enumerate(lengths)]
        files = [encode(frames, folder / f"{number}-{e}.mp4", av1(2), fps=fps) for e, frames in enumerate(drawn)]
        cameras[key] = Camera(files, [[n] for n in lengths], SIZE)
    return cameras


def recorded(folder: Path, arguments: tuple[str, ...], *, delay: float = 0.0, frames: Frames | None = None) -> Path:
    """A dataset of one camera, with two episodes in one file of this encoding."""
    path = encode(draw() if frames is None else frames, folder / "a.mp4", arguments)
    return write_dataset(folder / "data", [path], delay=delay)


def shifted(root: Path, frames: float) -> Path:
    """A dataset whose timestamps are `frames` frames later than its video."""
    rows = root / ROWS
    table = pq.read_table(rows)
    times = pa.array((table["timestamp"].to_numpy() + frames / FPS).astype(np.float32))
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), rows)
    return root


# H.264 by x264 of build 150, 4:4:4 of 32×64: two keyframes, without the SEI message that names the build.
_OF_BUILD_150 = (
    "AAAAAWf0EAqRlxFoQAAAAwBAAAAPIQAAAAFo7gRESEQAAAABZYiEJ/OwOpCe7UcBJFKnaV4yXyOFpxY7M1Vmg+Qn7UsVATKk//6D/3W9voT+UqEd"
    "HGtUFk3JplkrsdtaFs8/MARkd5+vGwomT5WD8Fk9+Q0Dd+cp5UmqEHOBCYAkato3h3MYquyJUTEHHBBBD/AQY+mWnkHqb7A1LrPnO+nNK/t0oiNR"
    "dSq1FYsafsGm9DkJ8lw+l/svCZxiD6tLQiWrtY+2dIyRt6J2iucRxN9MYPoYrWU4mLqSuONeqZoLfq0edYPPXMthKlkXJAK5wFnuva4NEaVVAK0l"
    "Q8eGfgdXzd/K3IROnlJOY73Adv5zdooKY1aRmpJIgfIwGZE/uzIxiV8Ed0Dj1JEql3Q6OEi7aaiUQP2FGb/IgJ9Z5iQ8tdSJlIaK9ucWNHawMhgt"
    "O3jlzdk9YY2WDDr79VgXxHqBUTRz3ZJP3IkbrlIsZOrO8DNvDsI1DG89EHlPgttKzcMWOK3/wheXiF7xvTyi9T+o7f/yaGKkuuGBAAAAAWWIggPf"
    "WyoJ9nnFegiLFOkWl/yHW+yMT6ZAq4HpuUvf4Rcf2sHb1MNTTvBkDvqQWmFBRp3LF3QbkchZ44evxoqP7ILTxJlds37fGpCcRj/0bVDfIyrvULZc"
    "BceJu1zS3inMKLBBaleVPPxeY8EDcVrO0zZCtBIo7wFYI0vpB5FulCMx4WiGYtyJnyunL5DFjBs12+oTHYHqcoKFmYSBOOtRWKJWRRfnigshwsnU"
    "LO8UiLgGmol0xk2hB5m2R4hTaAJ+MCdsdjxfoZmtmaktVifP+H5O0/m+A9Si6HIsM8uF12IsYKwHMOV2a0IR6OvyfHTaE3+Ov7qUKpXDcYdJXF3d"
    "HyuTVwbcEsM8wfXWTg=="
)


def of_build_150(path: Path) -> Path:
    """Write a 4:4:4 video of an old encoder, which only the first of its two keyframes names."""
    start, *frames = base64.b64decode(_OF_BUILD_150).split(b"\0\0\0\1\x65")
    text = b"x264 - core 150 r2835 79b36f2 - H.264/MPEG-4 AVC codec\0"
    sei = b"\0\0\0\1\x06\x05" + bytes([16 + len(text)]) + bytes.fromhex("dc45e9bde6d948b7962cd820d923eeef") + text + b"\x80"
    stream = (b"\0\0\0\1\x65").join([start + sei, *frames])
    ffmpeg("-f", "h264", "-r", str(FPS), "-i", "-", "-c", "copy", path, stdin=stream)
    return path


def with_packets(source: Path, target: Path, change: Callable[[list[bytes]], list[bytes]]) -> Path:
    """Write a file with other packets, and the times and keyframes of another one."""
    index, data = read_index(LocalStore(str(source.parent)), source.name), source.read_bytes()
    packets = change([data[start:end] for start, end in zip(index.offset[:].tolist(), index.end[:].tolist(), strict=True)])
    size = np.array([len(packet) for packet in packets])
    sync = np.isin(np.arange(len(size)), index.keyframes)
    pts, last = index.pts() - index.shown_at(0), int(index.shown_at(1) - index.shown_at(0))
    track = Track(index.timescale, index.track_header, index.configs, size, pts, sync, index.config, last)
    target.write_bytes(head(track) + b"".join(packets))
    return target


def of_x264(source: Path, target: Path, build: int | None) -> Path:
    """Write a file whose SEI message names another build of x264, or no build."""
    text = b"x264 - core"
    [(before, number)] = re.findall(b"(" + text + rb" )(\d+)", data := source.read_bytes())
    target.write_bytes(data.replace(before + number, b"encoder 000 000" if build is None else b"%s %d" % (text, build)))
    return target


def whole_file(path: Path) -> torch.Tensor:
    """Every frame of a video, (N, 3, H, W) uint8, decoded from the beginning to the end by torchcodec alone."""
    decoder = VideoDecoder(path, num_ffmpeg_threads=1)
    frames: torch.Tensor = decoder.get_frames_in_range(0, len(decoder)).data
    return frames


def loader(dataset: Path | str | dali_stream.Dataset, **options: object) -> dali_stream.Loader:
    """A Loader that keeps frames as they are and serves every sample."""
    defaults: dict[str, object] = {
        "batch_size": 16, "image_dtype": "uint8", "last_batch": "partial", "device": "cpu", "decode": "torchcodec",
        "num_threads": 2, "consumers": 4, "episode_pool_size": 2,
    }  # fmt: skip
    return dali_stream.Loader(dataset, **{**defaults, **options})  # type: ignore[arg-type]


def samples(batches: dali_stream.Loader) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(episode, frame, frames) of each sample of an epoch."""
    for batch in batches:
        yield from zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), batch[CAMERA], strict=True)


def identities(frames: torch.Tensor) -> list[tuple[int, int]]:
    """(episode, frame) that each of the frames (N, 3, H, W) carries."""
    return [(e, f) for e, f, _ in read_identities(frames.movedim(1, -1).numpy()).tolist()]


def identity(number: int) -> tuple[int, int]:
    """(episode, frame) of a frame of a file that `draw` filled, by its number in the file."""
    return (0, number) if number < EPISODES[0] else (1, number - EPISODES[0])


class Shown(NamedTuple):
    """Frames of a file according to FFmpeg: the time of each frame in seconds, and the identity that it carries."""

    seconds: list[float]
    identity: list[tuple[int, int]]


def shown_by_ffmpeg(video: Path) -> Shown:
    """Times and identities of a file's frames. The test is skipped if ffmpeg is not installed."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("the ffmpeg program is not installed")
    # FFmpeg 5.1 shows hidden frames of AV1 if it decodes with libdav1d, its default.
    decoder = ["-c:v", "libaom-av1"] if b"av01" in video.read_bytes() else []
    command = ["ffmpeg", "-hide_banner", *decoder, "-copyts", "-i", video, "-map", "0:v", "-vf", "showinfo"]
    command += ["-fps_mode", "passthrough", "-pix_fmt", "rgb24", "-f", "rawvideo", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    frames = torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8).view(-1, *SIZE, 3)
    seconds = [float(time) for time in re.findall(r" pts_time:(\S+)", done.stderr.decode())]
    assert len(seconds) == len(frames)
    return Shown(seconds, identities(frames.movedim(-1, 1)))


def dataset_of(root: Path, video: Path, seconds: Sequence[float], late: float = 0.0) -> Path:
    """A dataset of two episodes, a row for each of these times. They are `late` seconds later than these."""
    lengths = (len(seconds) // 3, len(seconds) - len(seconds) // 3)
    write_dataset(root, [video], [lengths], delay=seconds[0])
    starts = np.repeat([seconds[0], seconds[0] + lengths[0] / FPS], lengths)
    table = pq.read_table(root / ROWS)
    times = pa.array((np.array(seconds) - starts + late).astype(np.float32))
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), root / ROWS)
    return root


def difference(first: Path, second: Path) -> float:
    """The largest of the mean differences between frames of two files, of 255, over RGB as torchcodec has it."""
    a, b = (whole_file(path).numpy().astype(np.int16) for path in (first, second))
    return float(np.abs(a - b).mean((1, 2, 3)).max())


def probe(path: Path) -> dict[str, Any]:
    """Properties of a file's video stream, as ffprobe reports them."""
    if not shutil.which("ffprobe"):
        pytest.skip("needs the program ffprobe")
    asked = ["-show_entries", "stream=pix_fmt,color_range,color_space,codec_name,codec_tag_string,has_b_frames"]
    done = subprocess.run(["ffprobe", "-v", "error", *asked, "-of", "json", path], capture_output=True, text=True, check=True)
    stream: dict[str, Any] = json.loads(done.stdout)["streams"][0]
    return stream


def b_frames(files: Sequence[Path]) -> bool:
    """Whether FFmpeg finds B-frames in the first of these files."""
    command = ["ffprobe", "-v", "error", "-select_streams", "v", "-show_entries", "frame=pict_type", "-of", "csv", *files[:1]]
    if not shutil.which("ffprobe"):
        pytest.skip("needs the program ffprobe")
    return ",B" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


def top_boxes(path: Path) -> list[bytes]:
    """The kinds of the boxes at the top of an MP4."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        found.append(data[at + 4 : at + 8])
        at += size if size != 1 else int.from_bytes(data[at + 8 : at + 16], "big")
    return found


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


def repacked(source: Path, target: Path, change: Callable[[bytes], bytes]) -> Path:
    """Writes a file with changed packets, end to end. Its times and keyframes stay."""
    index, whole = read_index(LocalStore(str(source.parent)), source.name), source.read_bytes()
    packets = [change(whole[a:b]) for a, b in zip(index.offset[:].tolist(), index.end[:].tolist(), strict=True)]
    tree = boxes(whole)
    ftyp, moov = unboxed(tree[:1]), box(tree, b"moov")
    n = len(packets)
    tables = {b"stsc": [1, 1, n, 1], b"stsz": [0, n, *map(len, packets)], b"stco": [1, len(ftyp) + 8]}
    for kind, values in tables.items():
        box([moov], *STBL, kind)[1] = bytes(4) + np.array(values).astype(">u4").tobytes()
    target.write_bytes(ftyp + unboxed([[b"mdat", b"".join(packets)], moov]))
    return target


def _words(body: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(body, ">u4").astype(np.int64)


def command_in(error: BaseException) -> str:
    """The command that a message names."""
    (command,) = re.findall(r"`(ffmpeg .*?)`", str(error))
    return str(command)


def follow(command: str, source: Path) -> Path:
    """Runs the command of a message for a file. Returns the file that it writes."""
    target = source.with_name("new.mp4")
    names = {"IN": source, "OUT.mp4": target}
    subprocess.run([names.get(word, word) for word in shlex.split(command)], check=True, capture_output=True)
    return target


def turned(source: Path, target: Path, degrees: int, *, movie: bool = False) -> Path:
    """Writes a file whose frames are displayed turned counterclockwise, as `ffmpeg -display_rotation` does.

    The matrix is written to the header of the track or, if `movie` is True, to that of the movie.
    """
    a, b = {0: (1, 0), 90: (0, -1), 180: (-1, 0), -90: (0, 1)}[degrees]
    return displayed_by(source, target, (a, b, -b, a), movie=movie)


def displayed_by(source: Path, target: Path, matrix: tuple[int, int, int, int], *, movie: bool = False) -> Path:
    """Writes a file with another display matrix, of which these are the numbers a, b, c and d. See `turned`."""
    a, b, c, d = (number << 16 for number in matrix)
    tree = boxes(source.read_bytes())
    header = box(tree, b"moov", b"mvhd") if movie else box(tree, b"moov", b"trak", b"tkhd")
    at = 36 if movie else len(header[1]) - 44
    header[1] = header[1][:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + header[1][at + 36 :]
    target.write_bytes(unboxed(tree))
    return target

"""Writes and verifies MP4 files of copied packets, or of frames that are resized and encoded."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dali_stream.checks.arrays import Float64, Int64
from dali_stream.decode import torchcodec
from dali_stream.decode.resize import resize
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.stats import MAX_IMAGES, image_histogram, image_stats
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.muxer import Track
from dali_stream.mp4.timing import EpisodeTimes
from dali_stream.storage import LocalStore
from dali_stream.tools.preparation import encoders, packets, quality
from dali_stream.tools.preparation.encoders import Encoder
from dali_stream.tools.preparation.packets import PacketRange
from dali_stream.tools.preparation.place import Json
from dali_stream.tools.preparation.source import LoadedRange, TaskInput, Times, frame_numbers, locate
from dali_stream.tools.work import spread

TIMESCALE = 90_000  # ticks per second of encoded files; a multiple of 24, 25, 30, 50 and 60 frames per second
_MOST_CONFIGS = 127  # maximum number of sample descriptions per file that the reader supports
_PART = 16  # minimum number of frames that are decoded together, in whole GOPs
LEROBOT_TOLERANCE_S = 1e-4  # maximum distance of a frame from its row's time that LeRobot allows by default
_EXACT_S = 1e-6  # distance below which times are equal, since rows have times of float32
_TRIAL = 64  # approximate number of frames of a trial


class _Episode(NamedTuple):
    """An episode in the new file: index, start in the file in seconds, times of the rows in seconds, and their packets."""

    number: int
    start: float
    times: Times
    packets: Int64


def copy(task: TaskInput, file: Path) -> Json:
    """Write and verify a file of copied packets. Return the content of its note."""
    runs, copied = list[PacketRange](), []
    for episode in task.episodes:
        table = task.rows.read(episode)
        index, shown = task.shown(episode, table)
        times = task.times(table)
        start = _aligned(episode["start"], index.pts(shown) / index.timescale, times)
        run = packets.add(runs, index, packets.since(index, start, shown))
        run.begin = min(run.begin, start * index.timescale)
        copied.append((episode["new"], start, times, shown, run))
    last, count = packets.join(runs, task.fps), len(packets.descriptions(runs))
    if count > _MOST_CONFIGS:
        raise DecodeError(f"{task.where}: its sources have {count} sample descriptions. Give a smaller --file-mb")
    pts, timescale = np.concatenate([run.times(task.fps) + run.shift for run in runs]), runs[0].index.timescale
    episodes = [
        _Episode(number, _moved(start, run.index.timescale, run.shift), times, shown - run.start + run.first)
        for number, start, times, shown, run in copied
    ]
    if _distance(episodes, pts, timescale) > LEROBOT_TOLERANCE_S:
        # Frames that drift from the rows, or have rounded times, get regular times if they follow each other like the rows.
        place = np.argsort(np.argsort(pts))
        regular = np.round(place * TIMESCALE / task.fps).astype(np.int64)
        starts = [place[each.packets[0]] / task.fps - round(float(each.times[0]) * task.fps) / task.fps for each in episodes]
        aligned = [each._replace(start=start) for each, start in zip(episodes, starts, strict=True)]
        if (distance := _distance(aligned, regular, TIMESCALE)) <= LEROBOT_TOLERANCE_S:
            episodes, pts, timescale, last = aligned, regular, TIMESCALE, round(TIMESCALE / task.fps)
        elif task.regular:
            raise DecodeError(
                f"{task.where}: {task.camera}: the video has more or fewer frames than rows between some rows, so that frames "
                f"would be up to {distance:.4f} s away from multiples of 1/fps, and LeRobot would not read them. Give --codec "
                "too, which writes a frame for each row"
            )
    parts = np.split(pts, np.cumsum([run.stop - run.start for run in runs])[:-1])
    track, digest = packets.write(file, task.store, runs, parts, timescale, runs[0].index.track_header, last)
    packets.check_unchanged(task.store, runs)
    with contextlib.closing(LocalStore(str(file.parent))) as scratch:
        index = _verify(task, scratch, file, track, digest, episodes)
    return _times_of(task, index, episodes)


def _aligned(start: float, shown_at: Float64, times: Times) -> float:
    """Return the time at which an episode begins in its file, for which its rows have the times of their frames.

    It is `start` if that is right. If rows and frames drift apart, it is the time with the smallest distance between them.

    Args:
        start: Time at which the episode begins according to the metadata, in seconds.
        shown_at: Time of each row's frame in the file, in seconds, shape (L,).
        times: Times of the rows, shape (L,).
    """
    starts = shown_at - times
    candidates = (start, float(starts[0]), float(starts.min() + starts.max()) / 2)
    away = [float(np.abs(starts - each).max()) for each in candidates]
    return next(each for each, distance in zip(candidates, away, strict=True) if distance <= min(away) + _EXACT_S)


def _distance(episodes: list[_Episode], pts: Int64, timescale: int) -> float:
    """Return the largest distance between the time of a row and that of its frame, in seconds.

    Args:
        episodes: Episodes of a file.
        pts: Time of each packet of the file, in ticks.
        timescale: Number of ticks per second.
    """

    def farthest(each: _Episode) -> float:
        distance = np.abs(pts[each.packets] / timescale - each.start - each.times)
        return float((distance - np.spacing(each.times)).max())  # the times of rows are rounded to float32

    return max(map(farthest, episodes))


def _times_of(task: TaskInput, index: VideoIndex, episodes: list[_Episode]) -> Json:
    """Return the notes with the time at which each episode begins in a file, its length in frames, up to its last row, and the
    largest distance between the times of a row and its frame."""
    return {
        "from": {str(each.number): each.start for each in episodes},
        "frames": {str(each.number): round(float(each.times[-1]) * task.fps) + 1 for each in episodes},
        "away_s": _distance(episodes, index.pts(), index.timescale),
    }


def _verify(task: TaskInput, store: LocalStore, file: Path, track: Track, digest: str, episodes: list[_Episode]) -> VideoIndex:
    """Check that a file has the packets that were written, and that rows locate the right packets. Return its index."""
    index = packets.read_back(store, file.name, track, digest)
    if index is None:
        raise DaliStreamError(f"{task.where}: its encoded frames or their times differ from the source's. Check the disk")
    starts = sorted({episode.start for episode in episodes})
    stops = dict(zip(starts, [*starts[1:], math.inf], strict=True))
    for number, start, times, expected in episodes:
        where = f"{task.where}: {task.camera}, episode {number}"
        own_end = start + (round(float(times[-1]) * task.fps) + 1) / task.fps  # episodes may share frames
        numbers, interval = np.arange(len(times)), (start, max(stops[start], own_end))
        written = EpisodeTimes(index, interval, times, numbers, task.fps, task.new_tolerance_s)
        if (locate(where, written) != expected).any():
            raise DaliStreamError(f"{where}: a timestamp has another frame than in the source. Check the disk")
    return index


def encode(task: TaskInput, file: Path) -> Json:
    """Write and verify a file of encoded frames. Return the content of its note.

    Each episode is encoded separately, so that it begins with a keyframe. The packets are then joined to one file. Frames
    follow each other at the dataset's rate, since LeRobot counts them. The last frame is repeated where rows were removed.
    """
    encoder, size, frame = Encoder(**task.spec["encoder"]), tuple(task.spec["size"]), round(TIMESCALE / task.fps)
    runs, pts, episodes, compared = list[PacketRange](), list[Int64](), list[_Episode](), list[quality.MovingFrame]()
    first = tick = 0
    with contextlib.closing(LocalStore(str(file.parent))) as scratch:
        for episode in task.episodes:
            table, length, number = task.rows.read(episode), episode["length"], episode["new"]
            times = task.times(table)
            grid = _grid(task, number, times)
            begin = int(grid[0]) if not 0 <= grid[0] <= length else 0  # no frames are repeated if it is far from 0
            before, places = round(begin * TIMESCALE / task.fps), grid - begin
            count, tick = int(places[-1]) + 1, tick + (max(before, 0) if runs else 0)  # a file begins with a frame
            pts.append(tick + np.round(np.arange(count) * TIMESCALE / task.fps).astype(np.int64))
            compared.append(quality.MovingFrame())
            with task.naming(episode):
                frames = _resized(_frames(task, episode, table), size, compared[-1])
                shown = _repeated(frames, np.diff(places, prepend=-1))
                runs.append(PacketRange(_encode_episode(scratch, f"episode-{number}.mp4", shown, size, encoder), 0, count))
            if (written := len(runs[-1].index)) != count:
                where = f"{task.where}: {task.camera}, episode {number}"
                raise DecodeError(f"{where}: {encoder.name} got {count} frames and wrote {written}")
            episodes.append(_Episode(number, (tick - before) / TIMESCALE, times, first + places))
            first, tick = first + count, int(pts[-1][-1]) + frame
        header = UPRIGHT + b"".join((side << 16).to_bytes(4, "big") for side in (size[1], size[0]))
        track, digest = packets.write(file, scratch, runs, pts, TIMESCALE, header, frame)
        index = _verify(task, scratch, file, track, digest, episodes)
        if why := quality.refusal(scratch, index, encoder.codec, task.spec["gop"]):
            raise DecodeError(f"{task.where}: {task.camera}: {encoder.name} did not meet the request: {why}")
        note: Json = _times_of(task, index, episodes) | {name: {} for name in ("psnr", "stats")}
        for episode, moving in zip(episodes, compared, strict=True):
            for name, value in _compare(task, scratch, index, episode, moving).items():
                note[name][str(episode.number)] = value
    return note


def _compare(task: TaskInput, store: LocalStore, index: VideoIndex, episode: _Episode, moving: quality.MovingFrame) -> Json:
    """Return the PSNR of an encoded frame of an episode, and the statistics of its encoded frames."""
    where, sampled = f"{task.where}: {task.camera}, episode {episode.number}", spread(len(episode.packets), MAX_IMAGES)
    wanted = sorted({*sampled, moving.number})
    frames = torchcodec.decode(store, [index] * len(wanted), episode.packets[wanted].tolist(), index.format())[0]
    psnr = quality.check_psnr(where, moving.number, moving.frame, frames[wanted.index(moving.number)])
    return {"psnr": psnr, "stats": image_stats([image_histogram(frames[np.isin(wanted, sampled)])])}


def trial(job: Json, first: Json) -> Json:
    """Encode the first frames of a task's first episode, to test the encoder and to predict the size of files.

    Args:
        job: Values that all tasks share. See `plan`.
        first: Task of the camera.

    Returns:
        {"camera": key, "frame_bytes": mean size of a frame in bytes}, or {"error": reason} if frames cannot be encoded. If the
        episode is broken, the size is a guess.
    """
    task = TaskInput(job, first | {"episodes": first["episodes"][:1]})
    [episode], size = task.episodes, tuple(task.spec["size"])
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(LocalStore(folder)) as scratch:
        try:
            parts = itertools.islice(_frames(task, episode, task.rows.read(episode)), _TRIAL // _PART)
            frames = _resized(parts, size, quality.MovingFrame())
            index = _encode_episode(scratch, "trial.mp4", frames, size, Encoder(**task.spec["encoder"]))
            return {"camera": task.camera, "frame_bytes": float(index.size().mean())}
        except (DatasetError, DecodeError):  # the task that writes the file reports this error
            return {"camera": task.camera, "frame_bytes": math.prod(size) / 10}
        except DaliStreamError as error:
            return {"error": str(error)}


def _encode_episode(
    scratch: LocalStore, path: str, frames: Iterator[quality.Frames], size: tuple[int, int], encoder: Encoder
) -> VideoIndex:
    """Encode frames to a new file. Return the index of the file."""
    encoders.encode(frames, size, encoder, Path(scratch.address, path))
    index = read_index(scratch, path)
    if index.reordered:
        raise DecodeError(f"{encoder.name} did not meet the request, and wrote B-frames")
    return index


def _grid(task: TaskInput, episode: int, times: Times) -> Int64:
    """Return the time of each row's frame in units of 1/fps. Raises DatasetError if the times are irregular."""
    of_images = task.spec["mode"] == "images"
    numbers = frame_numbers(times, task.fps)
    if numbers is not None and not (of_images and numbers[0]):
        return numbers
    advice = "Give --clock frame_index, which writes regular timestamps"  # each image is that of its row
    raise DatasetError(
        f"{task.where}: episode {episode}: its timestamps are not near multiples of 1/fps{' from 0 on' if of_images else ''}, "
        f"so its frames cannot be encoded at the dataset's rate. {advice if of_images else 'Copy them, without encoding them'}"
    )


def _frames(task: TaskInput, episode: Json, table: pa.Table) -> Iterator[quality.Frames]:
    """Yield the frames of an episode as arrays of shape (n, H, W, 3).

    Args:
        task: Input of the task.
        episode: Episode of the task.
        table: Rows of the episode.
    """
    if task.spec["mode"] == "images":
        for image in task.decoded_images(episode, table, task.camera):
            yield np.repeat(image, 3, 2)[None] if image.shape[2] == 1 else image[None]
        return
    feature, any_size = Feature(task.job["features"][task.camera]), "size" in task.job["options"]
    index, shown = task.shown(episode, table)
    start, stop = packets.needed(index, shown)
    loaded = LoadedRange(task.store, index.path, int(index.offset[start]), int(index.end[stop - 1]))
    packets.check_packets(loaded, index, start, stop)
    for part in _parts(index, shown):
        expected = index.format(index.config[part[0]])
        feature.check_size((expected.height, expected.width), any_size)
        yield torchcodec.decode(loaded, [index] * len(part), part.tolist(), expected)[0]


def _parts(index: VideoIndex, shown: Int64) -> Iterator[Int64]:
    """Split packets into parts of at least `_PART` packets. A part ends with a GOP, or with a change of sample description."""
    gops, configs, start = index.gop_start(shown), index.config[shown], 0
    for stop in range(1, len(shown) + 1):
        if stop == len(shown) or configs[stop] != configs[start] or (stop - start >= _PART and gops[stop] != gops[stop - 1]):
            yield shown[start:stop]
            start = stop


def _resized(frames: Iterator[quality.Frames], size: tuple[int, int], moving: quality.MovingFrame) -> Iterator[quality.Frames]:
    """Yield the frames of an episode, resized to (height, width) as in a Loader. Also add them to `moving`."""
    for part in frames:
        part = resize(part, size)
        moving.add(part)
        yield part


def _repeated(frames: Iterator[quality.Frames], steps: Int64) -> Iterator[quality.Frames]:
    """Yield the frames of an episode, each repeated until the next one, and the first one from the beginning on.

    Args:
        frames: Frames of the rows, in parts.
        steps: Number of frames from the place of the previous row, or from -1, to that of each row, shape (L,).
    """
    before, row = None, 0
    for part in frames:
        if (steps[row : row + len(part)] == 1).all():
            yield part
        else:
            for frame, step in zip(part, steps[row : row + len(part)].tolist(), strict=True):
                for _ in range(step - 1):
                    yield (frame if before is None else before)[None]
                yield frame[None]
                before = frame
        before, row = part[-1], row + len(part)


def _moved(seconds: float, clock: int, shift: int) -> float:
    """Return a time in seconds, moved by a number of ticks. A time that is almost a whole number of ticks is rounded to it."""
    ticks = seconds * clock
    whole = round(ticks)
    return ((whole if abs(ticks - whole) < 1e-3 else ticks) + shift) / clock

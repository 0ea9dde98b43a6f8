"""The unit of work: one output file, as an idempotent function of JSON arguments.

A task writes to a scratch folder, verifies against the source, moves the file into place (or uploads it), and leaves a note
beside it, from which the metadata are made at the end. A file with a note is not written again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.errors import DaliStreamError, DatasetError, DecodeError
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.stats import MAX_IMAGES, image_histogram, image_stats, table_stats
from dali_stream.mp4 import muxer
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import Int64, VideoIndex, read_index
from dali_stream.storage import LocalStore
from dali_stream.tools.preparation import packets, quality, rows
from dali_stream.tools.preparation.encoders import Encoder
from dali_stream.tools.preparation.place import Place, file_hash, open_place
from dali_stream.tools.preparation.source import Clock, Window, open_cached, read_packets, refuse_sound

NOTES = "meta/prepare/done"
TIMESCALE = 90_000  # ticks per second of encoded files: whole ticks at 24, 25, 30, 50 and 60 frames per second
_MOST_CONFIGS = 127  # sample descriptions per file that the reader allows
_PART = 16  # frames of one step of decoding, at least; it ends with a GOP
_TRIAL = 64  # frames, about
Json = dict[str, Any]


def write_file(job: Json, task: Json) -> Json:
    """Write one output file, unless that was done.

    Args:
        job: Values that all tasks share, see `plan`.
        task: The file, see `plan`.

    Returns:
        {"path": path, "bytes": size}, with "error" if it cannot be written.
    """
    path, place = task["path"], open_place(job["out"], job["out_options"])
    try:
        noted = place.read(f"{NOTES}/{path}.json")
        if noted is not None and (note := json.loads(noted))["bytes"] == place.size(path):
            return {"path": path, "bytes": note["bytes"]}
        with place.scratch() as scratch:
            file = scratch / Path(path).name
            note = _Task(job, task, place).write(file)
            note |= {"bytes": file.stat().st_size, "hash": file_hash(file)}
            place.put(path, file)
        place.write(f"{NOTES}/{path}.json", json.dumps(note).encode())
        return {"path": path, "bytes": note["bytes"]}
    except (DaliStreamError, OSError, pa.ArrowException) as error:
        return {"path": path, "bytes": 0, "error": str(error) or type(error).__name__}


def check_episodes(job: Json, task: Json) -> Json:
    """Return {"broken": {episode: why it cannot be read}} of the episodes of one output file, by their index in the source."""
    broken = {}
    for episode in task["episodes"]:
        try:
            _Task(job, task | {"episodes": [episode]}, None).check()
        except DaliStreamError as error:
            broken[episode["old"]] = str(error)
    return {"broken": broken}


class _Task:
    """One file.

    Args:
        job, task: See `write_file`.
        place: OUT, for messages.
    """

    def __init__(self, job: Json, task: Json, place: Place | None) -> None:
        self.job, self.task = job, task
        self.store = open_cached(job["uri"], job["storage_options"], job["revision"])
        if job["data_files_root"]:
            self.store = open_cached(job["data_files_root"], job["storage_options"], None)
        self.window = Window(self.store)
        self.fps, self.regular = float(job["fps"]), bool(job["regular"])
        self.clock = Clock(self.fps, job["clock"], job["tolerance_s"])
        self.new_clock = Clock(self.fps, "timestamp", None) if self.regular else self.clock
        self.where = "" if place is None else f"{place.address}/{task['path']}"
        self.footer = functools.lru_cache(4)(lambda path: rows.read_footer(self.store, path))
        self.index = functools.lru_cache(16)(lambda path: self._index(path))

    def _index(self, path: str) -> VideoIndex:
        refuse_sound(self.store, path)
        return read_index(self.store, path)

    def write(self, file: Path) -> Json:
        """Write and verify the file. Return what its note holds."""
        camera = self.task.get("camera")
        if camera is None:
            return self.write_rows(file)
        if self.job["cameras"][camera]["mode"] == "copy":
            return self.copy_video(file)
        return self.encode_video(file)

    def check(self) -> None:
        """Read all of the task's episodes. Raise DaliStreamError if one cannot be read."""
        read = self.rows()
        for episode in self.task["episodes"]:
            table = read(episode)
            if "camera" in self.task and self.job["cameras"][self.task["camera"]]["mode"] != "images":
                index, shown = self.shown(episode, self.times(table))
                with self._naming(episode):
                    quality.check_packets(self.store, index, *packets.needed(index, shown))

    # ---- rows

    def rows(self, columns: list[str] | None = None) -> Callable[[Json], pa.Table]:
        """Return a function that reads the rows of an episode of the task."""
        until: dict[str, int] = {}
        for episode in self.task["episodes"]:
            until[episode["data"]] = max(until.get(episode["data"], 0), episode["place"] + episode["length"])
        reader = rows.EpisodeRows(self.window, self.footer, until, columns)

        def read(episode: Json) -> pa.Table:
            return reader.read(episode["data"], episode["old"], episode["place"], episode["length"])

        return read

    def times(self, table: pa.Table, clock: Clock | None = None) -> npt.NDArray[np.float32]:
        """Return the times that locate the frames of rows, in seconds since their episode began."""
        if (clock or self.clock).name == "frame_index" or (clock is self.new_clock and self.regular):  # not written yet
            return (table["frame_index"].to_numpy() / self.fps).astype(np.float32)
        return table["timestamp"].to_numpy().astype(np.float32)

    def write_rows(self, file: Path) -> Json:
        """Write and verify a Parquet file."""
        task, job = self.task, self.job
        first = self.footer(task["episodes"][0]["data"])
        rows.check_columns(self.store, job["features"], first)
        schema = rows.without(first.schema, job["without"], job["is_v2"])
        read, stats = self.rows(), dict[int, Json]()

        def changed() -> Iterator[pa.Table]:
            for episode in task["episodes"]:
                table, new = read(episode).drop_columns(job["without"]), dict[str, npt.NDArray[Any]]()
                if self.regular:
                    new["timestamp"] = table["frame_index"].to_numpy() / self.fps
                if job["renumber"]:
                    new["index"] = episode["first"] + np.arange(len(table))
                    new["episode_index"] = np.full(len(table), episode["new"])
                table = rows.replaced(table, new)
                if job["row_stats"]:
                    stats[episode["new"]] = _row_stats(table, job["features"])
                yield table.replace_schema_metadata(schema.metadata).cast(schema)

        digests = rows.write(file, schema, first.codec, changed(), task["rows_per_group"])
        with pq.ParquetFile(file) as written:
            found = [rows.digest(written.read_row_group(group, use_threads=False)) for group in range(written.num_row_groups)]
            if found != digests or not written.schema_arrow.equals(schema, check_metadata=True):
                raise DaliStreamError(f"{self.where}: its rows differ from the source's; check the disk")
        return {"stats": stats, "rows": True}

    # ---- video

    def shown(self, episode: Json, times: npt.NDArray[np.float32]) -> tuple[VideoIndex, Int64]:
        """Return the index of an episode's video file, and the packets of its rows."""
        index = self.index(episode["video"])
        stop = math.inf if episode["stop"] is None else episode["stop"]
        where = f"{self.store.where(index.path)}: {self.task['camera']}, episode {episode['old']}"
        return index, self.clock.locate(where, index, (episode["start"], stop), times)

    def copy_video(self, file: Path) -> Json:
        """Write and verify an MP4 file of packets that are copied."""
        camera, episodes = self.task["camera"], self.task["episodes"]
        read, new_times = self.rows(["episode_index", "timestamp", "frame_index"]), []
        by_path: dict[str, dict[int, Int64]] = {}
        for number, episode in enumerate(episodes):
            table = read(episode)
            index, shown = self.shown(episode, self.times(table))
            by_path.setdefault(index.path, {})[number] = shown
            new_times.append(self.times(table, self.new_clock))
        sources = {path: packets.make_source(self.index(path), self.fps, shown) for path, shown in by_path.items()}
        made = packets.VideoFile()
        for number, episode in enumerate(episodes):
            source = sources[episode["video"]]
            made.add(number, source, *source.spans[number])
        made.place()
        if len(made.configs) > _MOST_CONFIGS:
            raise DecodeError(
                f"{self.where}: its sources have {len(made.configs)} sample descriptions; give a smaller --file-mb"
            )
        marks = []
        with open(file, "wb") as out:
            out.write(muxer.head(packets.track(made)))
            for run in made.runs:
                found: list[bytes] = []
                for part in read_packets(self.store, run.source.index, run.start, run.stop):
                    out.writelines(part)
                    found += map(packets.mark, part)
                marks.append(np.frombuffer(b"".join(found), np.uint8).reshape(-1, 16))
        starts, digests = {}, []
        for number, episode in enumerate(episodes):
            run = made.runs[made.episodes[number]]
            starts[episode["new"]] = _moved(episode["start"], run.source.index.timescale, run.shift)
            index = run.source.index
            digests.append(packets.digest(index, by_path[index.path][number], marks[made.episodes[number]], run.start))
        self._verify_copy(file, camera, starts, new_times, digests)
        return {"from": starts}

    def _verify_copy(
        self, file: Path, camera: str, starts: dict[int, float], times: list[npt.NDArray[np.float32]], digests: list[str]
    ) -> None:
        with contextlib.closing(LocalStore(str(file.parent))) as store:
            index, marks = read_index(store, file.name), list[bytes]()
            for part in read_packets(store, index, 0, len(index)):
                marks += map(packets.mark, part)
            whole = np.frombuffer(b"".join(marks), np.uint8).reshape(-1, 16)
            for number, (episode, shown) in enumerate(self._found(index, starts, times)):
                if packets.digest(index, shown, whole) != digests[number]:
                    raise DaliStreamError(
                        f"{self.where}: {camera}, episode {episode}: its encoded frames or their times differ from the "
                        "source's; check the disk"
                    )

    def _found(
        self, index: VideoIndex, starts: dict[int, float], times: list[npt.NDArray[np.float32]]
    ) -> Iterator[tuple[int, Int64]]:
        """Yield each episode with the packets of its rows in the new file."""
        rising = sorted(set(starts.values()))
        stops = dict(zip(rising, [*rising[1:], math.inf], strict=True))
        for (episode, start), seconds in zip(starts.items(), times, strict=True):
            where = f"{self.where}: {self.task['camera']}, episode {episode}"
            yield episode, self.new_clock.locate(where, index, (start, stops[start]), seconds)

    def encoding(self) -> tuple[Json, Encoder]:
        """Return what is asked of the camera, and its encoder."""
        spec = self.job["cameras"][self.task["camera"]]
        return spec, Encoder(**spec["encoder"] | {"arguments": tuple(spec["encoder"]["arguments"])})

    def frames(self, episode: Json, table: pa.Table) -> Iterator[quality.Frames]:
        """Yield the frames of an episode, which has these rows, in arrays of shape (n, H, W, 3)."""
        if self.encoding()[0]["mode"] == "images":
            return self._images(table)
        return self._decoded(episode, self.times(table))

    def encode_video(self, file: Path) -> Json:
        """Write and verify an MP4 file of frames that are encoded, each episode on its own."""
        spec, encoder = self.encoding()
        size = tuple(spec["size"])
        read = self.rows(None if spec["mode"] == "images" else ["episode_index", "timestamp", "frame_index"])
        body, tracks, starts, kept, times, at = file.with_suffix(".packets"), list[Json](), {}, [], [], 0
        with open(body, "wb") as out:
            for episode in self.task["episodes"]:
                table, keep = read(episode), dict[int, quality.Frames]()
                seconds = self.times(table, self.new_clock)
                grid = self._grid(episode, seconds)
                frames = self.frames(episode, table)
                with self._naming(episode):
                    tracks.append(
                        encode_episode(_resized(frames, size, episode["length"], keep), size, encoder, file.parent, out)
                    )
                if len(tracks[-1]["size"]) != episode["length"]:
                    raise DecodeError(
                        f"{self.where}: {self.task['camera']}, episode {episode['new']}: "
                        f"{encoder.name} got {episode['length']} "
                        f"frames and wrote {len(tracks[-1]['size'])}"
                    )
                ticks = np.round(grid * TIMESCALE / self.fps).astype(np.int64)
                tracks[-1]["pts"] = at + ticks
                starts[episode["new"]] = at / TIMESCALE
                at += int(ticks[-1]) + round(TIMESCALE / self.fps)
                kept.append(keep)
                times.append(seconds)
        _join(file, body, tracks, size, round(TIMESCALE / self.fps))
        return {"from": starts} | self._verify_encoded(file, encoder, spec, starts, times, kept)

    def _grid(self, episode: Json, seconds: npt.NDArray[np.float32]) -> Int64:
        """Return the time of each row's frame as a multiple of 1/fps."""
        grid = np.round(seconds.astype(np.float64) * self.fps).astype(np.int64)
        if grid[0] != 0 or (np.diff(grid) <= 0).any():
            raise DatasetError(
                f"{self.where}: episode {episode['new']}: its timestamps are not near multiples of 1/fps from 0 on, so its "
                "frames cannot be encoded at the dataset's rate; give --clock frame_index, which writes regular timestamps"
            )
        return grid

    def _decoded(self, episode: Json, times: npt.NDArray[np.float32]) -> Iterator[quality.Frames]:
        from dali_stream.decode.torchcodec import decode

        index, shown = self.shown(episode, times)
        start, stop = packets.needed(index, shown)
        self.window.load(index.path, int(index.offset[start]), int(index.offset[stop - 1] + index.size[stop - 1]))
        with self._naming(episode):
            quality.check_packets(self.window, index, start, stop)
            gops, at = index.gop_start[shown], 0
            while at < len(shown):
                end = min(at + _PART, len(shown))
                while end < len(shown) and gops[end] == gops[end - 1]:
                    end += 1
                config = index.configs[index.config[shown[at]]]
                end = at + int(np.argmax(np.append(index.config[shown[at:end]] != index.config[shown[at]], True)))
                wanted = shown[at:end].tolist()
                yield decode(self.window, [index] * len(wanted), wanted, describe(config))[0]
                at = end

    def _images(self, table: pa.Table) -> Iterator[quality.Frames]:
        from dali_stream.decode.images import decode

        feature = Feature(self.job["features"][self.task["camera"]])
        for value in table[self.task["camera"]].to_pylist():
            image = decode(value["bytes"] if isinstance(value, dict) else value, feature)
            yield np.repeat(image, 3, 2)[None] if image.shape[2] == 1 else image[None]

    def _verify_encoded(
        self,
        file: Path,
        encoder: Encoder,
        spec: Json,
        starts: dict[int, float],
        times: list[npt.NDArray[np.float32]],
        kept: list[dict[int, quality.Frames]],
    ) -> Json:
        from dali_stream.decode.torchcodec import decode

        note: Json = {"psnr": {}, "ssim": {}, "stats": {}}
        with contextlib.closing(LocalStore(str(file.parent))) as store:
            index = read_index(store, file.name)
            if why := quality.refusal(store, index, encoder.codec, spec["gop"]):
                raise DecodeError(f"{self.where}: {self.task['camera']}: {encoder.name} did not meet the request: {why}")
            video = describe(index.configs[0])
            first = 0
            for (episode, shown), keep in zip(self._found(index, starts, times), kept, strict=True):
                what = f"{self.where}: {self.task['camera']}, episode {episode}"
                if (shown != first + np.arange(len(shown))).any():
                    raise DaliStreamError(f"{what}: a timestamp has another frame than in the source; check the disk")
                first += len(shown)
                sampled = np.unique(np.linspace(0, len(shown) - 1, min(len(shown), MAX_IMAGES)).round().astype(int))
                wanted = sorted({*sampled.tolist(), *quality.compared(len(shown))})
                frames = decode(store, [index] * len(wanted), shown[wanted].tolist(), video)[0]
                found = []
                for frame in quality.compared(len(shown)):
                    near = [(other, keep[other]) for other in (frame - 1, frame + 1) if other in keep]
                    found.append(quality.compare(what, frame, keep[frame], frames[wanted.index(frame)], near))
                low, mean = np.min(found, 0), np.mean(found, 0)
                note["psnr"][episode], note["ssim"][episode] = ((float(low[i]), float(mean[i])) for i in (0, 1))
                note["stats"][episode] = image_stats([image_histogram(frames[np.isin(wanted, sampled)])])
        return note

    @contextlib.contextmanager
    def _naming(self, episode: Json) -> Iterator[None]:
        """Add file, camera and episode to an error that lacks them."""
        try:
            yield
        except DecodeError as error:
            what = self.store.where(episode.get("video") or episode["data"])
            named = what in str(error)
            raise DecodeError(str(error) if named else f"{what}: {self.task['camera']}: {error}") from error


def trial(job: Json, task: Json) -> Json:
    """Encode the first frames of a task's first episode.

    Returns:
        {"frame_bytes": bytes of a frame}, a guess if the episode is broken; or {"error": why frames cannot be encoded}.
    """
    made, episode = _Task(job, task | {"episodes": task["episodes"][:1]}, None), task["episodes"][0]
    spec, encoder = made.encoding()
    size = tuple(spec["size"])
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/packets", "wb") as out:
        try:
            parts = itertools.islice(made.frames(episode, made.rows()(episode)), _TRIAL // _PART)
            track = encode_episode(_resized(parts, size, 1, {}), size, encoder, Path(folder), out)
            return {"frame_bytes": float(track["size"].mean())}
        except (DatasetError, DecodeError):  # named when its file is written
            return {"frame_bytes": math.prod(size) / 10}
        except DaliStreamError as error:
            return {"error": str(error)}


def encode_episode(frames: Iterator[quality.Frames], size: tuple[int, int], encoder: Encoder, scratch: Path, out: Any) -> Json:
    """Encode frames, and append their packets to a file.

    Returns:
        Size, keyframe and sample description of each packet.
    """
    from dali_stream.tools.preparation.ffmpeg import encode

    target = scratch / "episode.mp4"
    target.unlink(missing_ok=True)
    encode(frames, size, encoder, target)
    with contextlib.closing(LocalStore(str(scratch))) as store:
        index = read_index(store, target.name)
        if index.reordered:
            raise DecodeError(f"{encoder.name} did not meet the request, and wrote B-frames")
        for part in read_packets(store, index, 0, len(index)):
            out.writelines(part)
    return {
        "size": index.size[:],
        "sync": packets.keyframes(index, 0, len(index)),
        "configs": index.configs,
        "config": index.config[:],
    }


def _join(file: Path, body: Path, tracks: list[Json], size: tuple[int, int], frame: int) -> None:
    """Write an MP4 file of the packets of several episodes."""
    configs = tuple(dict.fromkeys(config for track in tracks for config in track["configs"]))
    numbers = [np.array([configs.index(config) for config in track["configs"]])[track["config"]] for track in tracks]
    height, width = size
    header = UPRIGHT + (width << 16).to_bytes(4, "big") + (height << 16).to_bytes(4, "big")
    sizes, pts, sync = (np.concatenate([each[name] for each in tracks]) for name in ("size", "pts", "sync"))
    track = muxer.Track(TIMESCALE, header, configs, sizes, pts, sync, np.concatenate(numbers), frame)
    with open(file, "wb") as out, open(body, "rb") as source:
        out.write(muxer.head(track))
        shutil.copyfileobj(source, out, 8 << 20)
    body.unlink()


def _resized(
    frames: Iterator[quality.Frames], size: tuple[int, int], length: int, keep: dict[int, quality.Frames]
) -> Iterator[quality.Frames]:
    """Yield frames resized as a loader does, and keep those that are compared later, with their neighbours."""
    from dali_stream.decode.resize import resize

    wanted = {frame + step for frame in quality.compared(length) for step in (-1, 0, 1)}
    at = 0
    for part in frames:
        part = resize(part, size)
        keep |= {at + i: part[i].copy() for i in range(len(part)) if at + i in wanted}
        at += len(part)
        yield part


def _row_stats(table: pa.Table, features: dict[str, Any]) -> Json:
    """Return statistics of the columns of numbers."""
    found = {}
    for key, feature in features.items():
        if key in table.column_names and feature.get("dtype") not in ("image", "video", "string"):
            found[key] = table_stats(np.array(table[key].to_pylist()))
    return found


def _moved(seconds: float, clock: int, shift: int) -> float:
    """Return a time moved by whole ticks. A time within rounding of a whole tick becomes one."""
    ticks = seconds * clock
    whole = round(ticks)
    return ((whole if abs(ticks - whole) < 1e-3 else ticks) + shift) / clock

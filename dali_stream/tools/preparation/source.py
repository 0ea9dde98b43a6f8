"""Input of a task: the episodes of one output file, read from the source."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.checks.arrays import NONE, Int64
from dali_stream.decode import images
from dali_stream.errors import DaliStreamError, DecodeError, prefixed
from dali_stream.lerobot.arrow import to_numpy
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.rows import check_counting, check_rising
from dali_stream.mp4.boxes import COPY, children, find, read_moov
from dali_stream.mp4.counting import TOLERANCE, Count, FileEpisodes, count_rows
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.timing import EpisodeTimes, explain
from dali_stream.storage import Store, open_store
from dali_stream.storage.store import StoreView
from dali_stream.tools.preparation import packets, rows
from dali_stream.tools.preparation.packets import RANGE
from dali_stream.tools.preparation.place import Json
from dali_stream.tools.preparation.plan import VERSION

Times = npt.NDArray[np.float32]
_CLOCKS = ["episode_index", "timestamp", "frame_index"]  # columns that locate frames


def locate(where: str, episode: EpisodeTimes) -> Int64:
    """Return the packets of an episode's rows, shape (L,).

    Args:
        where: File, camera and episode, for the message.
        episode: Times of the rows.

    Raises:
        DecodeError: If a row has no frame.
    """
    packets_of_rows = episode.packets()
    if len(missing := np.flatnonzero(packets_of_rows == NONE)):
        frame = episode.to_explain(missing)
        raise DecodeError(f"{where}, frame {frame}: {explain(episode, frame, prepares=True)}")
    return packets_of_rows


@functools.lru_cache(4)
def open_cached(address: str, options: str, revision: str | None) -> Store:
    """Return the store of an address, with storage options as JSON. All tasks of a process share it."""
    return open_store(address, json.loads(options), revision=revision)


class LoadedRange(StoreView):
    """Store that reads from memory within the range [start, stop) of a file, which the constructor fetches."""

    def __init__(self, store: Store, path: str, start: int, stop: int) -> None:
        super().__init__(store)
        self._path, self._start = path, start
        self._data = b"".join(store.read(path, at, min(at + RANGE, stop)) for at in range(start, stop, RANGE))

    def read(self, path: str, start: int, stop: int) -> bytes:
        if path == self._path and self._start <= start <= stop <= self._start + len(self._data):
            return self._data[start - self._start : stop - self._start]
        return self.store.read(path, start, stop)


def refuse_sound(store: Store, path: str) -> None:
    """Raise DecodeError if an MP4 file has a sound track, since new files would lack it."""
    moov = read_moov(store, path)
    for kind, start, end in children(moov, 0, len(moov)):
        handler = find(moov, start, end, b"mdia", b"hdlr") if kind == b"trak" else None
        if handler and moov[handler[0] + 8 : handler[0] + 12] == b"soun":
            raise DecodeError(f"{store.where(path)}: has sound, which cannot be copied. Copy its video alone: {COPY}")


def _frame_index(table: pa.Table) -> Int64:
    """Return `frame_index` of an episode's rows. Without this column, it is the number of the row."""
    return table["frame_index"].to_numpy() if "frame_index" in table.column_names else np.arange(len(table))


def frame_numbers(seconds: npt.NDArray[Any], fps: float) -> Int64 | None:
    """Return the nearest multiples of 1/fps of some times, or None if they do not increase or a time is not finite."""
    exact = np.round(seconds.astype(np.float64) * fps)
    return exact.astype(np.int64) if np.isfinite(exact).all() and (np.diff(exact) > 0).all() else None


class TaskInput:
    """Reads the episodes of one output file from the source.

    Args:
        job, task: See `plan`.
        where: Address of the output file, for messages.

    Attributes:
        episodes: Episodes of the task. See `plan`.
        camera: Key of the camera. Empty for a file of rows.
        rows_per_group: Number of rows of a row group, for a file of rows.
        spec: How the camera is written. See `plan.header`. Its "mode" is "rows" for a file of rows.
        store: Storage of the source's files.
        rows: Reader of the rows of the episodes, with the columns that the task needs.
        fps, regular: Frames per second, and whether `timestamp` becomes frame_index / fps. If `frame_index` does not begin at
            0 or does not increase, the nearest frame number of each timestamp replaces it if timestamps locate frames, and
            otherwise the number of the row within its episode.
        new_tolerance_s: Tolerance with which rows of the new dataset locate their frames. See `source.locate`.

    Raises:
        DaliStreamError: If the command has another version of `prepare` than this worker.
    """

    def __init__(self, job: Json, task: Json, where: str = "") -> None:
        if job["version"] != VERSION:
            raise DaliStreamError(
                f"the version of prepare must be that of the command, {job['version']}, got {VERSION} on {platform.node()}. "
                "Install the same dali_stream on all machines"
            )
        self.job, self.where = job, where
        self.episodes, self.camera = task["episodes"], task.get("camera", "")
        self.rows_per_group: int = task.get("rows_per_group", 0)
        self.spec: Json = job["cameras"].get(self.camera, {"mode": "rows"})
        revision = None if job["data_files_root"] else job["revision"]
        self.store = open_cached(job["data_files_root"] or job["uri"], json.dumps(job["storage_options"]), revision)
        self.fps, self.regular = float(job["fps"]), bool(job["regular"])
        self.new_tolerance_s: float = TOLERANCE / self.fps if self.regular else job["tolerance_s"]
        columns = {key: kind for key, kind in job["columns"].items() if self.spec["mode"] == "rows" or key in _CLOCKS}
        image_keys = {"rows": job["images"], "images": [self.camera]}.get(self.spec["mode"], [])
        columns |= dict.fromkeys(image_keys, ("image", 0))
        has_video = any(spec["mode"] != "images" for spec in job["cameras"].values())
        self._locates: str = job["clock"] if has_video else ""
        footer = functools.lru_cache(4)(lambda path: rows.read_footer(self.store, path))
        self.rows = rows.EpisodeRows(self.store, footer, self.episodes, columns, self._locates, job["is_v2"])
        self._index = functools.lru_cache(16)(self._read_index)
        self._files: Json = task.get("files", {})
        self._counts = functools.lru_cache(16)(self._count)

    def _read_index(self, path: str) -> VideoIndex:
        refuse_sound(self.store, path)
        return read_index(self.store, path)

    def _count(self, path: str) -> dict[int, Count]:
        """Return what counting the frames of a file tells about each of its episodes, by their numbers."""
        columns = [np.array(values, np.float64) for values in zip(*self._files[path], strict=True)]  # null becomes NaN
        number, start, length, end = columns
        whole = FileEpisodes(number.astype(np.int64), start, length.astype(np.int64), end)
        counted = count_rows(whole, self._index(path), self.fps)
        return {each: counted.of(place) for place, each in enumerate(whole.number.tolist())}

    def check(self, episode: Json) -> None:
        """Read an episode. Raises DaliStreamError if it cannot be read. The task of the rows checks images in rows."""
        mode = self.spec["mode"]
        if mode == "rows":
            table = self.rows.read(episode)
            self.check_values(episode, table)
            for key in self.job["images"]:
                deque(self.decoded_images(episode, table, key), maxlen=0)
        elif mode != "images":
            index, shown = self.shown(episode, self.rows.read(episode))
            with self.naming(episode):
                packets.check_packets(self.store, index, *packets.needed(index, shown))

    def decoded_images(self, episode: Json, table: pa.Table, key: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the images of an episode, decoded, of shape (H, W, C).

        Args:
            episode: Episode of the task.
            table: Rows of the episode.
            key: Key of the camera. If its images stay in rows, they may have any size.
        """
        feature, any_size = Feature(self.job["features"][key]), "size" in self.job["options"] or key not in self.job["cameras"]
        for number, value in enumerate(table[key].to_pylist()):
            try:
                image = images.decode(value["bytes"] if isinstance(value, dict) else value, feature, any_size)
            except DecodeError as error:
                where = f"{self.store.where(episode['data'])}: {key}, episode {episode['old']}, frame {number}"
                raise prefixed(where, error) from error
            yield image

    def shown(self, episode: Json, table: pa.Table) -> tuple[VideoIndex, Int64]:
        """Return the index of an episode's video file, and the packets of its rows.

        Args:
            episode: Episode of the task.
            table: Rows of the episode.
        """
        index = self._index(episode["video"])
        own = self._counts(episode["video"])[episode["old"]]
        where = f"{self.store.where(index.path)}: {self.camera}, episode {episode['old']}"
        frame_index = _frame_index(table)
        if self.job["clock"] == "frame_index":
            check_counting(where, frame_index)
            times = (frame_index / self.fps).astype(np.float32)
        else:
            exact = table["timestamp"].to_numpy()
            check_rising(where, exact, frame_index if "frame_index" in table.column_names else None)
            times = exact.astype(np.float32)
        interval = episode["start"], own.stop
        located = EpisodeTimes(index, interval, times, frame_index, self.fps, self.job["tolerance_s"], count=own)
        return index, locate(where, located)

    def times(self, table: pa.Table) -> Times:
        """Return the times of an episode's rows in the new dataset, in seconds since its start: see `self.regular`."""
        times = self.regular_times(table) if self.regular else table["timestamp"].to_numpy()
        return times.astype(np.float32)

    def regular_times(self, table: pa.Table) -> npt.NDArray[np.float64]:
        """Return frame_index / fps of an episode's rows. See `self.regular`."""
        numbers = _frame_index(table)
        if numbers[0] != 0 or (np.diff(numbers) <= 0).any():  # it counts something else, or the first rows were cut out
            nearest = frame_numbers(table["timestamp"].to_numpy(), self.fps)
            # If timestamps locate frames, they are the times of frames. Otherwise, they may be those of any clock.
            numbers = nearest if self._locates == "timestamp" and nearest is not None else np.arange(len(table))
        return numbers / self.fps

    def check_values(self, episode: Json, table: pa.Table) -> None:
        """Check that a Loader can read all numbers and texts of an episode. Raises DatasetError if it cannot."""
        for key in self.job["reads"]:
            if key in table.column_names:
                where = f"{self.store.where(episode['data'])}: episode {episode['old']}: {key}"
                to_numpy(table[key], Feature(self.job["features"][key]), where, leave_out=False)

    @contextlib.contextmanager
    def naming(self, episode: Json) -> Iterator[None]:
        """Add the file, the camera and the episode to the message of a DecodeError that does not name the file."""
        try:
            yield
        except DecodeError as error:
            path = self.store.where(episode.get("video") or episode["data"])
            where = f"{path}: {self.camera}, episode {episode['old']}"
            raise DecodeError(str(error) if path in str(error) else f"{where}: {error}") from error

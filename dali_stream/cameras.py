"""From a batch's requests of one camera to frames or clips: dealt into tasks, run by the decode pool, collected by row.

A task that fails is run again sample by sample, so that an error names the sample that is at fault and no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_stream.buffers import Buffers
from dali_stream.counters import Counters
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.residency import Residency
from dali_stream.storage import Store
from dali_stream.tables import Tables
from dali_stream.video import decode, image
from dali_stream.video.clip import HiddenFrames, config, pack
from dali_stream.video.format import VideoFormat, describe
from dali_stream.video.route import Route, refusal
from dali_stream.video.table import LACKING, SampleTable
from dali_stream.video.timing import explain

Array = npt.NDArray[Any]
CLIP_FRAMES = 32  # decoded by one decoder, or one window where that is longer: opening it costs less than one frame
# Of decoded RGB. Threads have heaps of 64 MiB, where glibc does not use an aligned block again for another of its size while
# a small one beside it lives on (its bug 14581): with blocks of 30 MiB, two to a heap, the process grew by gigabytes.
CLIP_BYTES = 15 << 20


def requests_per_clip(size: tuple[int, int], steps: int) -> int:
    """How many windows of so many steps are decoded by one task, of pictures of this (height, width)."""
    frames = min(CLIP_FRAMES, CLIP_BYTES // max(size[0] * size[1] * 3, 1))
    return max(frames // steps, 1)


class RouteChange(DaliStreamError):
    """Cameras on the DALI route that cannot stay there: a file is unsafe for it, or it failed. The loader builds anew."""

    def __init__(self, cameras: Sequence[str], reason: str) -> None:
        super().__init__(f"{', '.join(cameras)}: {reason}")
        self.cameras, self.reason = cameras, reason


class Pool(Protocol):
    """What does the work: `Workers`, or an executor of the standard library."""

    def submit(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Has a call done."""
        ...


class Request(NamedTuple):
    """What a video camera is to show for one sample: a window of frames of one episode, and the samples that show them."""

    row: int
    episode: int
    frames: Array
    samples: Array
    table: SampleTable


@dataclass
class Pending:
    """What one camera shows for one batch, to come.

    Attributes:
        out: (B, T, H, W, 3) uint8 that the tasks fill; on the DALI route a list of one `Packed` a sample.
        tasks: under way; each gives the rows that could not be had.
        failed: those rows, with their errors.
    """

    out: Any
    tasks: list[Future[dict[int, DecodeError]]] = field(default_factory=list)
    failed: dict[int, DecodeError] = field(default_factory=dict)

    def succeeded(self) -> bool:
        """Whether all is there, without waiting."""
        return not self.failed and all(
            t.done() and not t.cancelled() and not t.exception() and not t.result() for t in self.tasks
        )

    def collect(self) -> Any:
        """Waits for all tasks, and returns `out`."""
        for task in self.tasks:
            self.failed |= task.result()
        return self.out


class Packed(NamedTuple):
    """One sample on the DALI route: a clip, the frames in it, rising, and per step of the window which of those it shows."""

    clip: Array
    frames: Array
    order: Array


class VideoCamera:
    """A camera whose frames are in MP4s.

    Args:
        dataset: where they are.
        key: the camera.
        store: where its encoded pictures are read.
        route: its decoder.
        gpu: the CUDA device of the DALI route; None on a CPU.
        counters: what to add to.
    """

    def __init__(self, dataset: Dataset, key: str, store: Store, route: Route, gpu: int | None, counters: Counters) -> None:
        self.key, self._dataset, self._store, self._route = key, dataset, store, route
        self._gpu, self._counters = gpu, counters
        self._formats: dict[bytes, VideoFormat] = {}

    def submit(self, pool: Pool, buffers: Buffers, residency: Residency, episode: Array, frames: Array) -> Pending:
        """Starts the work for a batch. `episode` is (B,), `frames` (B, T)."""
        pending = Pending(None)
        requests = []
        for row, (e, shown) in enumerate(zip(episode.tolist(), residency.samples(self.key, episode, frames), strict=True)):
            try:
                requests.append(Request(row, e, frames[row], shown, self._locate(residency, e, frames[row], shown)))
            except DecodeError as error:
                pending.failed[row] = error
        release = residency.hold(self.key, [(r.episode, r.table, r.samples) for r in requests])
        if self._route.decoder == "dali":
            pending.out = [None] * len(episode)
            pending.tasks = [pool.submit(self._pack, request, pending.out) for request in requests]
        else:
            pending.out = buffers.take(*frames.shape, *self._dataset.picture_size(self.key), 3)
            pending.tasks = [pool.submit(self._decode, group, pending.out) for group in self._deal(requests)]
        _when_done(pending.tasks, release)
        return pending

    def describe(self, tables: Tables, episode: int) -> tuple[SampleTable, VideoFormat]:
        """Index and format of the file that holds an episode. Raises DecodeError."""
        table = tables.of(self.key, episode, self._store)
        return table, self._format(table, 0)

    def _locate(self, residency: Residency, episode: int, frames: Array, samples: Array) -> SampleTable:
        """The index of the episode's file, with all checked that can be before decoding."""
        try:
            table = residency.table(self.key, episode)
            lacking = samples == LACKING
            if lacking.any():
                frames = frames[lacking]
                [timestamp] = residency.gather("timestamp", np.array([episode]), frames[:1])
                interval = self._dataset.table.interval(self.key, self._dataset.rows[episode])
                why = explain(table, interval, timestamp, self._dataset.fps)
                raise DecodeError(f"{self._dataset.data_store.where(table.path)}: {why}")
            video = self._format(table, int(samples[0]))
            self._check_size(table, video)
        except DecodeError as error:
            raise named(self._dataset, self.key, episode, frames, error) from error
        if self._route.decoder == "dali" and (reason := refusal(self._gpu, video, table)):
            raise RouteChange([self.key], f"{self._dataset.data_store.where(table.path)}: {reason}")
        return table

    def _format(self, table: SampleTable, sample: int) -> VideoFormat:
        config = table.configs[table.config[sample]]
        if config not in self._formats:
            try:
                self._formats[config] = describe(config)
            except DecodeError as error:
                raise DecodeError(f"{self._dataset.data_store.where(table.path)}: {error}") from error
        return self._formats[config]

    def _check_size(self, table: SampleTable, video: VideoFormat) -> None:
        """A file's size has to be the promised one: batches are of one shape, and a broken size takes memory at will."""
        size = self._dataset.picture_size(self.key)
        if (video.height, video.width) != size:
            raise DecodeError(
                f"{self._dataset.data_store.where(table.path)}: has pictures of {video.height}×{video.width}, and "
                f"meta/info.json promises {size[0]}×{size[1]}"
            )

    def _deal(self, requests: list[Request]) -> list[list[Request]]:
        """Groups that are decoded by one task. Neighbours in a file share GOPs, and a clip has one sample description."""
        by_config: dict[bytes, list[Request]] = {}
        for request in sorted(requests, key=lambda r: (r.table.path, int(r.samples[0]))):
            by_config.setdefault(config(request.table, request.samples[0]), []).append(request)
        groups = []
        for alike in by_config.values():
            most = requests_per_clip(self._dataset.picture_size(self.key), len(alike[0].frames))
            groups += [alike[part.start : part.stop] for part in _even(len(alike), most)]
        return groups

    def _decode(self, requests: list[Request], out: Array) -> dict[int, DecodeError]:
        """Decode pool, torchcodec route: fills the rows of `out`."""
        # Windows are clamped to their episodes and overlap each other: what is shown several times is converted once.
        places: dict[tuple[int, int], int] = {}
        shown = [[places.setdefault((id(r.table), s), len(places)) for s in r.samples.tolist()] for r in requests]
        by_id = {id(r.table): r.table for r in requests}
        tables, samples = [by_id[key] for key, _ in places], [sample for _, sample in places]
        video = self._format(tables[0], samples[0])
        try:
            decoded, pictures = decode.decode(self._store, tables, samples, video, self._counters.timed)
        except DecodeError as error:
            if len(requests) == 1:
                return {requests[0].row: self._blame(requests[0], video, error)}
            return {row: e for request in requests for row, e in self._decode([request], out).items()}
        # Copied at once: the decoder's own array goes back to this thread's heap, where the next clip takes it again.
        with self._counters.timed("decode_s"):
            for request, steps in zip(requests, shown, strict=True):
                np.take(decoded, steps, axis=0, out=out[request.row], mode="clip")  # "raise" goes by way of another copy
        self._counters.add(clips=1, decoded_pictures=pictures)
        return {}

    def _blame(self, request: Request, video: VideoFormat, error: DecodeError) -> DecodeError:
        """A window's error with the name of the first frame in it that fails on its own."""
        frames = request.frames
        for i, sample in enumerate(request.samples.tolist()):
            try:
                decode.decode(self._store, [request.table], [sample], video)
            except DecodeError as own:
                frames, error = frames[i : i + 1], own
                break
        return self._named(request, frames, error)

    def _pack(self, request: Request, out: list[Packed | None]) -> dict[int, DecodeError]:
        """Decode pool, DALI route. Each frame of the window is decoded once, in rising order, and then put into place."""
        unique, steps = np.unique(request.samples, return_inverse=True)
        try:
            with self._counters.timed("pack_s"):
                tables, shown_only = [request.table] * len(unique), self._gpu is not None
                clip = pack(self._store, tables, unique.tolist(), shown_only=shown_only, timed=self._counters.timed)
        except HiddenFrames as error:
            where = self._dataset.data_store.where(request.table.path)
            raise RouteChange([self.key], f"{where}: {error}") from error
        except DecodeError as error:
            return {request.row: self._named(request, request.frames, error)}
        self._counters.add(clips=1, decoded_pictures=clip.pictures)
        places = np.array(clip.frames, np.int32)
        order = np.argsort(np.argsort(places))[steps.reshape(-1)].astype(np.int32)
        out[request.row] = Packed(np.frombuffer(clip.data, np.uint8), np.sort(places), order)
        return {}

    def _named(self, request: Request, frames: Array, error: DecodeError) -> DecodeError:
        where = self._dataset.data_store.where(request.table.path)
        return named(self._dataset, self.key, request.episode, frames, DecodeError(f"{where}: {error}"))


def _even(count: int, most: int) -> list[range]:
    """Cuts `count` into as few parts of `most` as can be, of about equal size, so that threads are done together."""
    parts = -(-count // most)
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def _when_done(tasks: Sequence[Future[Any]], call: Callable[[], None]) -> None:
    """Has `call` called when the last of the tasks has ended, however it did."""
    left = itertools.count(len(tasks) - 1, -1)  # `next` of it is atomic
    for task in tasks:
        task.add_done_callback(lambda _: None if next(left) else call())
    if not tasks:
        call()


class ImageCamera:
    """A camera whose frames are images in Parquet rows."""

    def __init__(self, dataset: Dataset, key: str, counters: Counters) -> None:
        self.key, self._dataset, self._counters = key, dataset, counters

    def submit(self, pool: Pool, buffers: Buffers, residency: Residency, episode: Array, frames: Array) -> Pending:
        """Starts the work for a batch. `episode` is (B,), `frames` (B, T)."""
        out = buffers.take(*frames.shape, *self._dataset.picture_size(self.key), 3)
        encoded = residency.gather(self.key, episode, frames)
        groups = _even(len(episode), requests_per_clip(self._dataset.picture_size(self.key), frames.shape[1]))
        return Pending(out, [pool.submit(self._decode, rows, encoded, episode, frames, out) for rows in groups])

    def _decode(self, rows: range, encoded: Array, episode: Array, frames: Array, out: Array) -> dict[int, DecodeError]:
        failed = {}
        with self._counters.timed("decode_s"):
            for row, step in itertools.product(rows, range(frames.shape[1])):
                try:
                    out[row, step] = image.decode(encoded[row, step], out.shape[2:4])
                except DecodeError as error:
                    failed[row] = named(self._dataset, self.key, int(episode[row]), frames[row, step : step + 1], error)
        self._counters.add(clips=1, decoded_pictures=len(rows) * frames.shape[1])
        return failed


def named(dataset: Dataset, camera: str, episode: int, frames: Array, error: DecodeError) -> DecodeError:
    """The error with camera, episode and frames in front."""
    which = ", ".join(str(frame) for frame in np.unique(frames).tolist()[:8])
    found = DecodeError(f"{camera}: episode {dataset.episodes[episode]}, frame {which}: {error}")
    found.__cause__ = error
    return found

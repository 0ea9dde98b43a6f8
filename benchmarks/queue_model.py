"""Queue model of training: replays the Loader's schedule with the bandwidth and latency of a network.

As in a Loader, the schedule (`dali_stream.schedule`) decides what is read, when and in which order. A read occupies a fetch
thread, waits for its round trips, and then uses the link. Reads use the link one after the other.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from dali_stream.decode.decoder import TASK_FRAMES
from dali_stream.mp4.blocks import cut
from dali_stream.mp4.index import VideoIndex, video_index
from dali_stream.order import Order
from dali_stream.order.batches import Batches
from dali_stream.pipeline.reading import FETCHERS
from dali_stream.schedule.budget import Sizes, batches_in_progress, divide, look_ahead, order_horizon
from dali_stream.schedule.episodes import ROW_SPARE, EpisodeTable, Located, OpenEpisode
from dali_stream.schedule.opening import Opening, Read, Storage
from dali_stream.schedule.plan import BatchPlanner, Limits
from dali_stream.schedule.samples import samples
from dali_stream.tools.bench import measure

VIDEO_FILE, DATA_FILE = 200 << 20, 100 << 20  # sizes of the files that LeRobot writes, in bytes
HEAD = 4096  # bytes of a video file that are read to find its index
FOOTER = 140  # bytes of a Parquet footer per column of a row group; 146 on demo data, including the schema
COLUMNS, ROW = 7, 14 * 4 * 2 + 4 * 8 + 4  # columns and bytes of a row: state and action of 14 numbers, and LeRobot's indices
MOST_EPISODES = 4_000_000  # maximum number of simulated episodes, which is more than any simulated run reaches


class Recording:
    """Invented dataset with the layout of LeRobot: many episodes per file, with a row group for each.

    All episodes have the same length, and all packets the same size.

    Args:
        bytes_in_all: Size of the encoded video in bytes.
        episode_s, fps: Length of an episode in seconds, and frames per second.
        cameras: Number of cameras.
        bitrate: Bits per second of a camera.
        gop: Distance of keyframes in frames.
    """

    def __init__(self, bytes_in_all: float, episode_s: float, fps: float, cameras: int, bitrate: float, gop: int = 2) -> None:
        self.bytes_in_all, self.fps, self.gop = bytes_in_all, fps, gop
        self.cameras = tuple(f"observation.images.{i}" for i in range(cameras))
        self.features = {"action"}
        self.packet = max(round(bitrate / 8 / fps), 16)  # bytes of a packet
        self.frames = max(round(episode_s * fps), 1)  # frames of an episode
        self.episode_bytes = self.packet * self.frames * cameras
        self.episodes = max(int(bytes_in_all // self.episode_bytes), 1)
        self.num_episodes = min(self.episodes, MOST_EPISODES)
        self.num_frames = self.num_episodes * self.frames
        self.lengths = np.full(self.num_episodes, self.frames)
        self.in_video = max(min(VIDEO_FILE // (self.packet * self.frames), self.num_episodes), 1)  # episodes per video file
        self.in_data = max(min(DATA_FILE // (self.frames * ROW), self.num_episodes), 1)
        # Simulated runs share orders, since making an order of millions of episodes takes as long as simulating the steps.
        self.order = functools.lru_cache(2)(self._order)

    def _order(self, *key: int) -> Order:
        return Order(self.lengths, True, *key)

    @functools.cached_property
    def index(self) -> VideoIndex:
        """Index of a video file, in which each episode begins with a keyframe."""
        frame, every = np.tile(np.arange(self.frames), self.in_video), np.arange(self.frames * self.in_video)
        sync = np.flatnonzero(frame % self.gop == 0)
        # FFmpeg writes 4 bytes per frame, 4 per keyframe, and 16 per chunk of one second.
        moov = 1024 + 4 * len(every) + 4 * len(sync) + 16 * int(len(every) / self.fps)
        size = np.full(len(every), self.packet)
        return video_index(
            "", (b"",), b"", round(self.fps * 1000),
            offset=HEAD + every * self.packet, size=size, pts=every * 1000, keyframes=sync,
            config=np.zeros(len(every), np.int8), index_bytes=moov,
        )  # fmt: skip

    def open(self, episode: int, block: int) -> OpenEpisode:
        """Return an open episode, with the locations of its frames in blocks of `block` bytes."""
        frames = np.arange(self.frames)
        first = episode % self.in_video * self.frames
        packet, keyframe = first + frames, first + frames - frames % self.gop
        located = Located(packet, keyframe, cut(self.index, packet, keyframe, block))
        return OpenEpisode(episode, dict.fromkeys(self.cameras, located))


@dataclass(frozen=True)
class Training:
    """Training on a rank.

    Attributes:
        step_s: Time of a training step in seconds, from receiving a batch to requesting the next.
        decode_frames_per_s: Rate of all decode threads of the rank together, in frames/s. None if decoding takes no time.
        frame_bytes: Size of a decoded frame in bytes.
        warmup: Share of the steps that belong to the warm-up, in which the pools fill. Their waiting time is reported
            separately.
    """

    batch_size: int
    step_s: float
    steps: int
    mode: str = "single"
    memory_budget: int = 4 << 30
    consumers: int = 32
    pool: int = 8
    seed: int = 0
    num_threads: int = 16
    decode_frames_per_s: float | None = None
    frame_bytes: int = 480 * 640 * 3
    warmup: float = 0.5


@dataclass
class Outcome:
    """Result of a simulated run.

    Attributes:
        waits: Time that the slowest rank waited for each batch, in seconds. For the first batch, it is measured from the start.
        step_s: See `Training`.
        seconds: Time from the start to the end of the last step, in seconds.
        fetched: Bytes that all ranks had fetched when each batch was ready.
        evicted, requests: Numbers of blocks evicted early and of requests, of all ranks. See `Loader.stats`.
        decodes: Decoded frames per delivered frame.
        peak_resident: Largest memory of a rank in bytes.
        warmup: Number of steps of the warm-up.
    """

    waits: list[float]
    step_s: float
    seconds: float
    fetched: list[int]
    evicted: int
    requests: int
    decodes: float
    peak_resident: int
    warmup: int

    @property
    def wait_share(self) -> float:
        """Share of the time after the warm-up that training waits."""
        waits = self.waits[self.warmup :]
        return sum(waits) / max(sum(waits) + len(waits) * self.step_s, 1e-9)

    @property
    def waiting_steps(self) -> float:
        """Share of the steps after the warm-up that wait for more than 1 % of the duration of a step."""
        return float(np.mean([wait > self.step_s / 100 for wait in self.waits[self.warmup :]]))


def simulate(
    recording: Recording, training: Training, bytes_per_s: float, latency_s: float, world: int = 1, ranks: int = 1,
    patience_s: float = math.inf,
) -> Outcome:  # fmt: skip
    """Simulate some training steps.

    Args:
        recording: Dataset.
        training: Work of each rank.
        bytes_per_s, latency_s: Bandwidth of each rank in bytes per second, and latency of a request in seconds.
        world: Number of ranks that share the order. Default: 1.
        ranks: Number of simulated ranks, beginning with rank 0. They wait for each other in every step. Default: 1.
        patience_s: Waiting time after the warm-up at which the run ends early, in seconds. Default: infinity.

    Returns:
        Waiting times and counters of the run.

    Raises:
        ValueError: If the ranks cannot share the order, or the epoch has no batch.
        MemoryBudgetError: If memory_budget does not hold a batch.
    """
    running = [_Rank(recording, training, Network(bytes_per_s, latency_s), rank, world) for rank in range(ranks)]
    warmup, depth = int(training.steps * training.warmup), running[0].depth
    waits: list[float] = []
    fetched: list[int] = []
    requested = ready = 0.0
    for number in range(training.steps + depth):
        if number >= depth:
            ready = max(requested, *(rank.ready(number - depth) for rank in running))
            waits.append(ready - requested)
            fetched.append(sum(rank.network.fetched(ready) for rank in running))
            requested = ready + training.step_s
            if sum(waits[warmup:]) > patience_s:
                break
        if number < training.steps:
            for rank in running:
                rank.plan(ready)
    return Outcome(
        waits, training.step_s, requested, fetched,
        evicted=sum(rank.evicted for rank in running),
        requests=sum(rank.network.requests for rank in running),
        decodes=sum(rank.decoded for rank in running) / max(sum(rank.shown for rank in running), 1),
        peak_resident=max(rank.peak for rank in running),
        warmup=min(warmup, len(waits) - 1),
    )  # fmt: skip


@dataclass(order=True)
class Job:
    """A read: `trips` consecutive round trips, followed by `size` bytes. Jobs are compared by priority and number."""

    priority: tuple[int, ...]
    number: int
    trips: int = field(compare=False)
    size: int = field(compare=False)
    done: float = field(default=math.inf, compare=False)


class Network:
    """Fetch threads, latency of requests, and a link.

    Args:
        bytes_per_s: Bandwidth of the link in bytes per second.
        latency_s: Time of a round trip in seconds.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.now, self.requests = 0.0, 0
        self._free = FETCHERS
        self._queue: list[Job] = []
        self._events: list[tuple[float, int, bool, Job]] = []  # (time, number, whether the bytes have arrived, job)
        self._number = itertools.count()
        self._link_free = 0.0
        self._times, self._bytes = [0.0], [0]  # total number of bytes that have arrived by each time

    def fetched(self, at: float) -> int:
        """Return the number of bytes that had arrived at a time."""
        return self._bytes[bisect.bisect_right(self._times, at) - 1]

    def submit(self, priority: tuple[int, ...], trips: int, size: int) -> Job:
        """Request a read now."""
        job = Job(priority, next(self._number), trips, size)
        heapq.heappush(self._queue, job)
        return job

    def advance(self, until: float) -> None:
        """Advance the time to `until`, and process all events until then."""
        while self._step(until):
            pass
        self.now = max(self.now, until)

    def wait(self, job: Job) -> float:
        """Advance the time until a job is done. Return the time at which it was done."""
        while job.done > self.now and self._step(math.inf):
            pass
        return job.done

    def _step(self, until: float) -> bool:
        self._start()
        if not self._events or self._events[0][0] > until:
            return False
        self.now, _, has_arrived, job = heapq.heappop(self._events)
        if has_arrived:
            job.done = self.now
            self._times.append(self.now)
            self._bytes.append(self._bytes[-1] + job.size)
            self._free += 1
        else:
            self._link_free = max(self._link_free, self.now) + job.size / self.bytes_per_s
            heapq.heappush(self._events, (self._link_free, job.number, True, job))
        return True

    def _start(self) -> None:
        while self._free and self._queue:
            job = heapq.heappop(self._queue)
            self._free -= 1
            self.requests += job.trips
            heapq.heappush(self._events, (self.now + job.trips * self.latency_s, job.number, False, job))


class _Rank:
    """The planner of one rank. It follows `pipeline.planner.Planner`, with simulated reads and decoders."""

    def __init__(self, recording: Recording, training: Training, network: Network, rank: int, world: int) -> None:
        self._recording, self._training, self.network = recording, training, network
        batches = Batches(recording.num_frames, training.batch_size, world, "drop")
        if not batches.count(0):
            raise ValueError(
                f"dataset must have the {batches.stride} frames that {world} ranks take per step, got {recording.num_frames}"
            )
        cameras, index = recording.cameras, recording.index
        offsets = np.round(np.array(measure.windows(training.mode, recording).get(cameras[0], [0.0])) * recording.fps)
        windows = dict.fromkeys(cameras, offsets.astype(np.int64))
        files = np.arange(recording.num_episodes) // recording.in_video
        frames = training.batch_size * len(cameras) * len(offsets)
        self.depth = batches_in_progress(training.num_threads, frames, TASK_FRAMES)
        table_bytes = EpisodeTable.row_bytes(len(cameras), len(cameras))
        sizes = Sizes(
            lengths=recording.lengths,
            batch_size=training.batch_size,
            episodes=min(training.consumers // world * (training.pool + 1), recording.num_episodes),
            row_bytes=ROW + table_bytes,
            least_row_bytes=ROW + table_bytes,
            files=dict.fromkeys(cameras, int(files[-1]) + 1),
            indices=dict.fromkeys(cameras, index),
            windows=windows,
            fetched=True,
            frame_bytes=training.frame_bytes * len(cameras),
            in_progress=self.depth * frames * training.frame_bytes,
        )
        shares = divide(training.memory_budget, sizes)
        key = training.consumers, training.pool
        ahead = look_ahead(training.batch_size)
        self.planner = BatchPlanner(
            EpisodeTable(recording.lengths, cameras, cameras),
            samples(lambda epoch: recording.order(training.seed, epoch, *key), batches, rank, 0, 0),
            training.batch_size, windows,
            Limits(shares.frames, self.depth, order_horizon(shares, sizes), shares.block, ahead),
        )  # fmt: skip
        self.opening = Opening(
            Storage(
                dict.fromkeys(cameras, files), recording.lengths, ROW * ROW_SPARE[0] // ROW_SPARE[1], table_bytes,
                dict.fromkeys(cameras, index.nbytes), shares.opened, shares.encoded - shares.opened, shares.indices, ahead,
            )
        )  # fmt: skip
        self._block, self._encoded = shares.block, shares.encoded
        self.decoded = self.shown = self.peak = self.evicted = 0
        self._footers: set[int] = set()
        self._reads: dict[tuple[str, int], Job] = {}
        self._blocks: dict[tuple[str, int, int], Job] = {}
        self._batches: list[tuple[float, list[Job], int]] = []  # (time of planning, reads, number of decoded frames)
        self._first: list[Job] = []
        self._decoder_free = self._clock = 0.0
        for camera in cameras:  # a Loader reads these when it is created
            self._clock = network.wait(network.submit((), 2, HEAD + index.index_bytes))
            self.opening.observe((camera, 0), index.nbytes)

    def plan(self, room: float) -> None:
        """Plan the next batch, but not before the time `room`, from which on the look-ahead has room for the batch."""
        network, opening, planner = self.network, self.opening, self.planner
        network.advance(self._clock)
        for read in opening.request(planner.ahead(1 + opening.horizon(len(self._batches)))):
            self._reads[read.key] = self._read(read)
        planner.observe(closed=self._closed())
        for job in self._first:
            self._clock = max(self._clock, network.wait(job))
        self._clock = max(self._clock, room)
        network.advance(self._clock)
        for read in opening.due():
            self._clock = max(self._clock, network.wait(self._reads.pop(read.key)))
            size = self._recording.index.nbytes if read.camera else self._recording.frames * ROW * ROW_SPARE[0] // ROW_SPARE[1]
            opening.observe(read.key, size)
        opened = [self._recording.open(episode, self._block) for episode in opening.ready()]
        planner.observe(opened, self._closed(), self._encoded - sum(opening.items.bytes_by_kind))
        self._step()

    def _step(self) -> None:
        plan, frames = self.planner.plan(), self.planner.frames.values()
        self.opening.advance()
        self.evicted += plan.video.evicted_early
        for name in plan.video.evict:
            del self._blocks[name]
        fetched = []
        for fetch in plan.video.fetch:
            size = fetch.ranges[-1][1] - fetch.ranges[0][0]
            fetched.append(self.network.submit((fetch.batch, 1), 1, size))
            for number in range(len(fetch.ranges)):
                self._blocks[fetch.camera, fetch.episode, fetch.first + number] = fetched[-1]
        self._first = fetched if not plan.samples.number else []
        jobs = {id(job): job for job in map(self._blocks.__getitem__, plan.video.needed)}
        decodes = sum(planned.decodes for planned in plan.frames.values())
        self.decoded += decodes
        self.shown += sum(planned.show.size for planned in plan.frames.values())
        self._batches.append((self._clock, list(jobs.values()), decodes))
        resident = sum(self.opening.items.bytes_by_kind) + self.planner.video.bytes
        resident += sum(cache.cached for cache in frames) * self._training.frame_bytes
        self.peak = max(self.peak, resident)

    def _closed(self) -> list[int]:
        """Return the open episodes that were evicted."""
        first_row = self.planner.table.first_row
        return [number for camera, number in self.opening.items.take_evicted() if not camera and first_row[number] >= 0]

    def ready(self, batch: int) -> float:
        """Return the time at which a planned batch is ready."""
        planned, jobs, decodes = self._batches[batch]
        available = max([planned, *(self.network.wait(job) for job in jobs)])
        rate = self._training.decode_frames_per_s
        self._decoder_free = max(self._decoder_free, available) + (decodes / rate if rate else 0.0)
        return self._decoder_free

    def _read(self, read: Read) -> Job:
        recording = self._recording
        if read.camera:
            return self.network.submit((read.step, 0), 2, HEAD + recording.index.index_bytes)
        trips, size = 1, recording.frames * ROW
        if (file := read.number // recording.in_data) not in self._footers:
            self._footers.add(file)
            trips, size = 3, size + FOOTER * recording.in_data * COLUMNS
        return self.network.submit((read.step, 0), trips, size)

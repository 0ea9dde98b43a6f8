"""Analysis of a loader's times: which stage limits it, and which changes apply.

    thread that iterates   training_s, wait_s = starved_s + graph_s + rest     wall = training_s + wait_s
    planner thread         rows_s, gather_s, plan_s                            at most wall
    decode threads         read_s, pack_s, decode_s, resize_s                  at most wall × num_threads

If the training loop waits for batches, the largest part of `wait_s` shows why. If it is `graph_s` or the rest, the thread that
iterates is the limit. If it is `starved_s`, the frames are late. Then the limit is the longest stage of the planner thread or
of the decode threads, whichever are busier. If both are idle most of the time, `prefetch` is too small.

Everything is computed from measured times and counts. `tools.why` predicts the gains of changes, in a process of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dali_stream.checks.arguments import budget_text
from dali_stream.schedule.budget import divide, frames_budget, reads_budget
from dali_stream.system import process
from dali_stream.system.memory_limit import fits

if TYPE_CHECKING:
    from dali_stream.pipeline.config import Config
    from dali_stream.pipeline.stream import BatchSource

STAGES = {
    "iteration": {"training_s": "training loop", "starved_s": "waiting for frames", "graph_s": "copying frames, DALI graph"},
    "planner": {"rows_s": "reading rows", "gather_s": "gathering rows into batches", "plan_s": "planning"},
    "decode threads": {
        "read_s": "reading video", "pack_s": "packing clips", "decode_s": "decoding", "resize_s": "resizing"
    },
}  # fmt: skip
KEEPS_UP = 0.1  # a loader keeps up if the training loop waits for batches for less than this share of the time
_IDLE = 0.5  # a thread that works for less than this share of the time is not the limit
JUDGED = 200  # number of most recent batches that are judged
_SNAPSHOT_EVERY = 20  # number of batches between snapshots; taking a snapshot takes about 10 microseconds
_WORTH = 0.05  # more memory is worth its cost if it saves more than this share of the decodes or of the fetched bytes
_LONG_GOP = 2.5  # minimum number of decoded frames per delivered frame for which re-encoding with a GOP of 2 is worthwhile
_SHORT_GOP = 1.5  # decoded frames per delivered frame with a GOP of 2 and no cache


class Recent:
    """Snapshots of a loader's counters, taken to judge its last `JUDGED` batches.

    Attributes:
        warm: Whether the batches since `begin` follow a whole epoch, whose decoded frames may still be in memory.
        batches: Number of batches since the snapshot `since`.
    """

    def __init__(self) -> None:
        self.warm, self.batches = False, 0
        self._snapshots: deque[Mapping[str, Any]] = deque(maxlen=JUDGED // _SNAPSHOT_EVERY + 1)

    def begin(self, warm: bool, counters: Callable[[], Mapping[str, Any]]) -> None:
        """Begin an epoch. Batches of the first epoch are never judged together with those of later epochs.

        Args:
            warm: Whether a whole epoch precedes it.
            counters: Function that returns the loader's counters.
        """
        if self._snapshots and warm != self.warm:
            self._snapshots.clear()
            self._snapshots.append(counters())
        self.warm = warm

    def add(self, batches: int, counters: Callable[[], Mapping[str, Any]]) -> None:
        """Add a batch.

        Args:
            batches: Number of batches that the loader has delivered, including this one.
            counters: Function that returns the loader's counters.
        """
        if not self._snapshots or batches % _SNAPSHOT_EVERY == 0:
            self._snapshots.append(counters())
        self.batches = batches - self._snapshots[0]["batches"]

    @property
    def since(self) -> Mapping[str, Any] | None:
        """Counters before the batches to judge, or None before the first batch.

        The first batch is not judged, since its time includes the start.
        """
        return self._snapshots[0] if self._snapshots else None


@dataclass(frozen=True)
class Setup:
    """Settings of a loader that affect its speed.

    Attributes:
        num_threads: Number of decode threads.
        cores: Number of CPU cores that this process may use.
        gpu: Whether batches are made on a CUDA device.
        remote: Whether the dataset is read over a network.
        cached: Whether the dataset has a `cache_dir`.
        decode: Argument of the Loader.
        videos: {camera with video: name of its decoder}, without depth cameras, which no other decoder decodes.
        image_size, image_dtype: Arguments of the Loader.
        normalize, dali_graph: Whether these arguments were passed to the Loader.
        uses_dali: Whether a DALI graph makes the batches.
        warm: Whether the batches follow a whole epoch of the same loader.
        keeps_all: Whether `memory_budget` holds all decoded frames, so that each is decoded once.
        repeats: Whether each epoch shows the frames of the epochs before it. See `Config.repeats`.
        frames_budget: Memory budget that would hold all decoded frames, in bytes. None if the current budget holds them, if
            DALI decodes all cameras, or if this machine has less memory.
        reads_budget: Memory budget that would hold the rows, indices and encoded video in use, in bytes. None if the current
            budget holds them, or if this machine has less memory.
        block_bytes: Size of a block of encoded video in bytes.
    """

    num_threads: int
    cores: int
    gpu: bool = False
    remote: bool = False
    cached: bool = False
    decode: str = "auto"
    videos: Mapping[str, str] = field(default_factory=dict)
    image_size: tuple[int, int] | None = None
    image_dtype: str = "float32"
    normalize: bool = False
    dali_graph: bool = False
    uses_dali: bool = False
    warm: bool = False
    keeps_all: bool = False
    repeats: bool = True
    frames_budget: int | None = None
    reads_budget: int | None = None
    block_bytes: int = 1 << 16


def setup_of(config: Config, source: BatchSource, normalize: bool, warm: bool) -> Setup:
    """Return the settings of a loader.

    Args:
        config: Configuration of the loader.
        source: Batches of the loader.
        normalize: Whether the loader normalizes the batches.
        warm: See `Setup`.
    """
    # While batches are in progress, only the planner may read indices, so the planner's sizes are used.
    cached = config.cached(source.routes)
    sizes = source.sizes or config.sizes(cached)
    parts, enough = divide(config.memory_budget, sizes), frames_budget(sizes)
    frames = enough if sizes.frame_bytes > 0 and config.memory_budget < enough else None
    return Setup(
        num_threads=config.num_threads,
        cores=process.cores(),
        gpu=config.gpu is not None,
        remote=config.source.data_store.remote,
        cached=config.source.cache_dir is not None,
        decode=source.decode,
        videos={key: source.routes[key].decoder for key in config.source.videos if source.routes[key].decoder != "pyav"},
        image_size=config.image_size,
        image_dtype=config.image_dtype,
        normalize=normalize,
        dali_graph=config.augments,
        uses_dali=config.uses_dali(cached),
        warm=warm,
        keeps_all=source.keeps_all,
        repeats=config.repeats,
        frames_budget=frames if fits(frames) else None,
        reads_budget=reads if fits(reads := reads_budget(parts, sizes)) else None,
        block_bytes=parts.block,
    )


@dataclass(frozen=True)
class Bottleneck:
    """Stage that limits a loader.

    Attributes:
        stage: "training" if the loader keeps up. Otherwise "read", "pack", "decode" or "resize" (decode threads), "rows",
            "gather" or "plan" (planner thread), "graph" (copying frames into batches, and DALI), "handover" (from DALI to a
            batch), or "prefetch" if training waits although no stage is busy.
        share: Share of the time of its threads that the stage takes, 0 to 1.
        text: Two or three sentences: the stage, its share, and the changes that apply.
        shares: Measured share of each stage in the time of its threads, {stage: 0 to 1}. "starved" is the share in which the
            thread that iterates waits for frames.
    """

    stage: str
    share: float
    text: str
    shares: dict[str, float]

    def __str__(self) -> str:
        return self.text


def find(times: Mapping[str, float], setup: Setup) -> Bottleneck | None:
    """Return the stage that limits a loader.

    Args:
        times: Result of `Loader.stats()`, or the difference of two results: the attributes of `Counters`, and `fetched_bytes`.
        setup: Settings of the loader.

    Returns:
        Stage and advice, or None if no time has passed.
    """
    wall = times["wait_s"] + times["training_s"]
    if wall <= 0:
        return None
    shares, wait = _shares(times, wall, setup.num_threads), times["wait_s"] / wall
    if wait < KEEPS_UP:
        text = f"Loading keeps up: the training loop waits for batches {_percent(wait)} of the time."
        return Bottleneck("training", 1 - wait, f"{text} A faster loader would not help.", shares)
    starved, graph, handover = shares["starved"], shares["graph"], shares["handover"]
    if starved >= max(graph, handover):
        stage, share, text, changes = _upstream(times, setup, shares, wait)
    elif graph >= handover:
        resizes = " and resizes" if setup.image_size else ""
        decodes = f", which decodes{resizes} the videos," if "dali" in setup.videos.values() else ""
        name = f"The DALI graph{decodes}" if setup.uses_dali else "Copying frames into batches"
        stage, share, changes = "graph", graph, [_graph_change(times, setup)]
        text = f"{name} takes {_percent(graph)} of the time"
    else:
        stage, share, changes = "handover", handover, [_handover_change(setup)]
        text = f"Handing batches over takes {_percent(handover)} of the time"
    text += f", and training waits for batches {_percent(wait)} of the time. What may help: {', or '.join(changes)}"
    text += " (`dali-stream why URI` predicts by how much)."
    if stage in ("read", "pack", "decode", "resize") and setup.keeps_all:
        later = "nothing" if setup.repeats else "only frames that no earlier batch has shown"
        text += f" Later epochs decode {later}, since memory_budget holds all decoded frames."
    return Bottleneck(stage, share, text, shares)


def _shares(times: Mapping[str, float], wall: float, num_threads: int) -> dict[str, float]:
    """Return the share of each stage in the time of its threads. See `Bottleneck.shares`."""
    threads = {"iteration": 1, "planner": 1, "decode threads": num_threads}
    shares = {
        key.removesuffix("_s"): times[key] / wall / threads[thread] for thread, stages in STAGES.items() for key in stages
    }
    return shares | {"handover": (times["wait_s"] - times["starved_s"] - times["graph_s"]) / wall}


def _upstream(
    times: Mapping[str, float], setup: Setup, shares: Mapping[str, float], wait: float
) -> tuple[str, float, str, list[str]]:
    """Return the stage of the planner thread or of the decode threads that delays the frames.

    Args:
        times: See `find`.
        setup: Settings of the loader.
        shares: See `Bottleneck`.
        wait: Share of the time in which training waits for batches.

    Returns:
        Stage, its share, a clause that says both, and the changes that apply.
    """
    pool, planner = ([key.removesuffix("_s") for key in STAGES[threads]] for threads in ("decode threads", "planner"))
    pool_busy, planner_busy = (sum(shares[stage] for stage in stages) for stages in (pool, planner))
    if max(pool_busy, planner_busy) < _IDLE:
        text = f"The decode threads work {_percent(pool_busy)} and the planner {_percent(planner_busy)} of the time"
        return "prefetch", wait, text, ["a larger prefetch, which makes more batches at a time"]
    if pool_busy >= planner_busy:
        stages, names = pool, STAGES["decode threads"]
        threads = f"{setup.num_threads} decode thread{'s' * (setup.num_threads > 1)}"
    else:
        stages, names, threads = planner, STAGES["planner"], "planner thread"
    stage = max(stages, key=lambda name: shares[name])
    text = f"{names[f'{stage}_s'].capitalize()} takes {_percent(shares[stage])} of the time of the {threads}"
    return stage, shares[stage], text, _changes(stage, times, setup)


def _changes(stage: str, times: Mapping[str, float], setup: Setup) -> list[str]:
    """Return the changes for a stage of the planner thread or of the decode threads."""
    if stage in ("decode", "resize"):
        return _decode_changes(times, setup)
    if stage == "read" or (stage == "rows" and setup.remote):
        return [_fetch_change(times, setup)]
    if stage == "pack" and (shorter := _shorter_gop(times, setup)):
        return [shorter]
    rows = f"{_reads_memory(setup)}, which keeps more rows in memory" if setup.reads_budget else "a faster disk"
    return [
        {
            "pack": "fewer cameras, since packing holds Python's interpreter and threads cannot share it",
            "rows": rows,
            "gather": "fewer features or shorter windows (delta_timestamps)",
            "plan": "fewer cameras or shorter windows (delta_timestamps), since one thread plans them all",
        }[stage]
    ]


def _decode_changes(times: Mapping[str, float], setup: Setup) -> list[str]:
    on_cpu = [camera for camera, decoder in setup.videos.items() if decoder == "torchcodec"]
    if setup.gpu and on_cpu and setup.decode == "torchcodec":
        return ['decode="auto", which decodes on the GPU if that is faster']
    changes = (_frames_memory(times, setup), _shorter_gop(times, setup), _more_decoding(setup))
    return [change for change in changes if change]


def _frames_memory(times: Mapping[str, float], setup: Setup) -> str | None:
    """Return the advice to hold all decoded frames in memory. None if that would save only a few decodes."""
    if setup.frames_budget is None:
        return None
    budget = f'memory_budget="{budget_text(setup.frames_budget)}", which holds all decoded frames'
    if setup.warm and setup.repeats:
        return f"{budget}, so that later epochs decode nothing"
    evicted, misses = times["frames_evicted_before_use"], times["frames"] - times["frame_cache_hits"]
    if evicted <= _WORTH * misses:
        return None
    again = min(evicted / misses, 1) if misses else 1.0
    return f"{budget}, since {_percent(again)} of the decodes repeat what was evicted before its next use"


def _fetch_change(times: Mapping[str, float], setup: Setup) -> str:
    if not setup.remote:
        return "a faster disk, such as a local SSD with a copy of the dataset"
    if setup.reads_budget and times["evicted_early"] * setup.block_bytes > _WORTH * times["fetched_bytes"]:
        return f"{_reads_memory(setup)}, since {times['evicted_early']:.0f} blocks of video were evicted before their last use"
    if not setup.cached:
        return "cache_dir on a local disk, which later epochs and runs read instead of the network"
    rate = times["fetched_bytes"] / 1e6 / (times["wait_s"] + times["training_s"])
    return f"a faster connection, or storage that is nearer, since {rate:.3g} MB/s come over the network now"


def _graph_change(times: Mapping[str, float], setup: Setup) -> str:
    on_dali = "dali" in setup.videos.values()
    if on_dali and (shorter := _shorter_gop(times, setup)):
        return shorter
    if on_dali and not setup.gpu:
        return 'decode="torchcodec", since DALI decodes on the CPU here'
    if setup.dali_graph:
        return "fewer or cheaper operators in your dali_graph" + ("" if setup.gpu else ", which run on the CPU here")
    if setup.image_size is None:
        return "image_size, since whole frames go through the graph now"
    if not setup.gpu and setup.image_dtype == "float32":
        return 'image_dtype="uint8", with the conversion to floats in the model: a quarter of the bytes is moved'
    if not on_dali:
        return _more_cores(setup)
    return "a GPU with more decode engines"


def _handover_change(setup: Setup) -> str:
    if setup.normalize:
        return "normalisation inside the model, since normalize= works on the thread that asks for batches"
    return "whole epochs, since after a loop that is left early the next one starts with a cold pipeline"


def _shorter_gop(times: Mapping[str, float], setup: Setup) -> str | None:
    """Return the advice to re-encode the videos with shorter GOPs. None if few frames are decoded per delivered frame."""
    decoded = times["decoded_frames"] / times["frames"] if times["frames"] else 0.0
    if decoded < _LONG_GOP or not setup.videos:
        return None
    codec = "hevc" if setup.gpu else "h264"
    return (
        f"shorter GOPs (`dali-stream prepare URI OUT --codec {codec} --gop 2`), since {decoded:.1f} frames are decoded for "
        f"each one delivered, and about {_SHORT_GOP} with a GOP of 2"
    )


def _more_cores(setup: Setup) -> str:
    if setup.num_threads < setup.cores:
        return f"num_threads={setup.cores}, as many as this process has cores"
    return f"more CPU cores than the {setup.cores} of this process"


def _more_decoding(setup: Setup) -> str:
    """Return the advice to use more cores. The advice also names a GPU, if the CPU decodes videos and all cores are in use."""
    if setup.gpu and setup.videos and "torchcodec" not in setup.videos.values():
        return "a GPU with more decode engines"
    change = _more_cores(setup)
    if not setup.videos or setup.num_threads < setup.cores:
        return change
    if setup.gpu:
        nvdec = "videos that NVDEC decodes faster (`dali-stream prepare URI OUT --for nvdec`); Loader.routes has the speeds"
    else:
        nvdec = "a GPU that decodes the videos"
    return f"{change}, or {nvdec}"


def _reads_memory(setup: Setup) -> str:
    return f'memory_budget="{budget_text(setup.reads_budget or 0)}"'


def _percent(share: float) -> str:
    return f"{max(share, 0) * 100:.0f} %"

"""Analysis of a loader's times: which stage limits it, and which change would help most.

    thread that iterates   training_s, wait_s = starved_s + graph_s + rest     wall = training_s + wait_s
    planner thread         rows_s, gather_s, plan_s                            at most wall
    decode threads         read_s, pack_s, decode_s, resize_s                  at most wall × num_threads

If the training loop waits for batches, the largest part of `wait_s` shows why. If it is `graph_s` or the rest, the thread that
iterates is the limit. If it is `starved_s`, the frames are late. Then the limit is the longest stage of the planner thread or
of the decode threads, whichever are busier. If both are idle most of the time, `prefetch` is too small. `speed.model`
predicts the gain of the change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dali_stream.checks.arguments import budget_text
from dali_stream.schedule.budget import Sizes, divide, frames_budget, reads_budget
from dali_stream.speed.decodes import Decodes, decodes_of
from dali_stream.speed.model import Work, work_of
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
_SIMULATED = 100  # number of batches that are simulated with each memory budget
# Maximum number of cached frames of a camera with which a larger memory budget is simulated, for the log, and for a call of
# `Loader.bottleneck`. Training waits for the log: with this number, for about 1 s, or 2.5 s with a mixture of 50 datasets.
MOST_LOGGED, MOST_SIMULATED = 1 << 15, 1 << 18
# Time to copy a frame as uint8, divided by that as float32. It was 0.21 to 0.32 in `benchmarks/results/why_2cores.json`, less
# than the 0.4 of the bytes read and written, since the division by 255 also takes time.
_AS_BYTES = 0.28
_SAID = 1.05  # smallest gain that the text mentions


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
        videos: {camera with video: name of its decoder}.
        image_size, image_dtype: Arguments of the Loader.
        normalize, dali_graph: Whether these arguments were passed to the Loader.
        uses_dali: Whether a DALI graph makes the batches.
        warm: Whether the batches follow a whole epoch of the same loader.
        keeps_all: Whether `memory_budget` holds all decoded frames, so that each is decoded once.
        repeats: Whether each epoch shows the frames of the epochs before it. See `Config.repeats`.
        frames_budget: Memory budget that would hold all decoded frames, in bytes. None if the current budget holds them, if the
            CPU decodes no frames, or if this machine has less memory.
        reads_budget: Memory budget that would hold the rows, indices and encoded video in use, in bytes. None if the current
            budget holds them, or if this machine has less memory.
        advice: Function that simulates a larger memory budget. It returns the larger budget in bytes, and the decodes with
            the current and the larger budget. It returns None if the larger budget saves too little, exceeds the memory of this
            machine, or holds too many frames to simulate it.
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
    advice: Callable[[], tuple[int, Decodes, Decodes] | None] = lambda: None
    block_bytes: int = 1 << 16


def setup_of(config: Config, source: BatchSource, normalize: bool, warm: bool, most_simulated: int) -> Setup:
    """Return the settings of a loader.

    Args:
        config: Configuration of the loader.
        source: Batches of the loader.
        normalize: Whether the loader normalizes the batches.
        warm: See `Setup`.
        most_simulated: Maximum number of frames of a camera that a simulated larger budget may hold.
    """
    # While batches are in progress, only the planner may read indices, so the planner's sizes are used.
    on_cpu = config.on_cpu(source.routes)
    sizes = source.sizes or config.sizes(on_cpu)
    parts, enough = divide(config.memory_budget, sizes), frames_budget(sizes)
    frames = enough if sizes.frame_bytes > 0 and config.memory_budget < enough else None
    return Setup(
        num_threads=config.num_threads,
        cores=process.cores(),
        gpu=config.gpu is not None,
        remote=config.source.data_store.remote,
        cached=config.source.cache_dir is not None,
        decode=source.decode,
        videos={key: source.routes[key].decoder for key in config.source.videos},
        image_size=config.image_size,
        image_dtype=config.image_dtype,
        normalize=normalize,
        dali_graph=config.augments,
        uses_dali=config.uses_dali(on_cpu),
        warm=warm,
        keeps_all=source.keeps_all,
        repeats=config.repeats,
        frames_budget=frames if fits(frames) else None,
        reads_budget=reads if fits(reads := reads_budget(parts, sizes)) else None,
        advice=lambda: _advice(config, on_cpu, sizes, warm, most_simulated) if frames else None,
        block_bytes=parts.block,
    )


def _advice(
    config: Config, on_cpu: Sequence[str], sizes: Sizes, warm: bool, most_simulated: int
) -> tuple[int, Decodes, Decodes] | None:
    """Return the effect of doubling the memory budget. See `Setup.advice`."""
    larger = replace(config, memory_budget=2 * config.memory_budget)
    if not fits(larger.memory_budget) or divide(larger.memory_budget, sizes).kept > most_simulated:
        return None
    now, then = (decodes_of(each, on_cpu, batches=_SIMULATED, sizes=sizes)[warm] for each in (config, larger))
    return (larger.memory_budget, now, then) if then.decoded <= (1 - _WORTH) * now.decoded else None


@dataclass(frozen=True)
class Bottleneck:
    """Stage that limits a loader.

    Attributes:
        stage: "training" if the loader keeps up. Otherwise "read", "pack", "decode" or "resize" (decode threads), "rows",
            "gather" or "plan" (planner thread), "graph" (copying frames into batches, and DALI), "handover" (from DALI to a
            batch), or "prefetch" if training waits although no stage is busy.
        share: Share of the time of its threads that the stage takes, 0 to 1.
        text: Two or three sentences: the stage, its share, and the change that would help most, with its predicted gain.
        gain: Batches per second after the change in `text`, divided by those now, as `speed.model` predicts. 1 if unknown.
    """

    stage: str
    share: float
    text: str
    gain: float = 1.0

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
    wait = times["wait_s"] / wall
    if wait < KEEPS_UP:
        text = f"Loading keeps up: the training loop waits for batches {_percent(wait)} of the time."
        return Bottleneck("training", 1 - wait, f"{text} A faster loader would not help.")
    work = work_of(times, setup.num_threads, setup.cores, setup.remote, setup.uses_dali)
    starved, graph = times["starved_s"] / wall, times["graph_s"] / wall
    handover = wait - starved - graph
    if starved >= max(graph, handover):
        stage, share, text, change = _upstream(times, setup, wall, work)
    elif graph >= handover:
        resizes = " and resizes" if setup.image_size else ""
        decodes = f", which decodes{resizes} the videos," if "dali" in setup.videos.values() else ""
        name = f"The DALI graph{decodes}" if setup.uses_dali else "Copying frames into batches"
        stage, share, text, change = "graph", graph, f"{name} takes {_percent(graph)} of the time", _graph_change(times, setup)
    else:
        stage, share, change = "handover", handover, _handover_change(setup)
        text = f"Handing batches over takes {_percent(handover)} of the time"
    gain = change.gain(work)
    more = f" (about {gain:.1f} times as many batches per second)" if gain >= _SAID else ""
    text += f", and training waits for batches {_percent(wait)} of the time. What would help most: {change.text}{more}."
    if stage in ("read", "pack", "decode", "resize") and setup.keeps_all:
        later = "nothing" if setup.repeats else "only frames that no earlier batch has shown"
        text += f" Later epochs decode {later}, since memory_budget holds all decoded frames."
    return Bottleneck(stage, share, text, gain)


def _upstream(times: Mapping[str, float], setup: Setup, wall: float, work: Work) -> tuple[str, float, str, _Change]:
    """Return the stage of the planner thread or of the decode threads that delays the frames.

    Args:
        times: See `find`.
        setup: Settings of the loader.
        wall: Time that has passed, in seconds.
        work: Work of a batch.

    Returns:
        Stage, its share, a clause that says both, and the change that would help most.
    """
    pool = {key: times[key] / wall / setup.num_threads for key in STAGES["decode threads"]}
    planner = {key: times[key] / wall for key in STAGES["planner"]}
    busy = {"pool": sum(pool.values()), "planner": sum(planner.values())}
    if max(busy.values()) < _IDLE:
        text = f"The decode threads work {_percent(busy['pool'])} and the planner {_percent(busy['planner'])} of the time"
        wait = times["wait_s"] / wall
        return "prefetch", wait, text, _Change("a larger prefetch, which makes more batches at a time")
    if busy["pool"] >= busy["planner"]:
        shares, names = pool, STAGES["decode threads"]
        threads = f"{setup.num_threads} decode thread{'s' * (setup.num_threads > 1)}"
    else:
        shares, names, threads = planner, STAGES["planner"], "planner thread"
    key = max(shares, key=lambda name: shares[name])
    text = f"{names[key].capitalize()} takes {_percent(shares[key])} of the time of the {threads}"
    return key.removesuffix("_s"), shares[key], text, _change(key, times, setup, work)


class _Change(NamedTuple):
    """Change that would help.

    Attributes:
        text: Description of the change that completes "What would help most: ...".
        then: Function from the work of a batch to the work after the change. None if the effect is unknown.
    """

    text: str
    then: Callable[[Work], Work] | None = None

    def gain(self, work: Work) -> float:
        """Return the predicted batches per second after the change, divided by those before. 1 if unknown."""
        then = self.then(work).seconds if self.then else 0.0
        return work.seconds / then if then else 1.0


def _change(key: str, times: Mapping[str, float], setup: Setup, work: Work) -> _Change:
    """Return the change for a stage of the planner thread or of the decode threads."""
    if key in ("decode_s", "resize_s"):
        return _decode_change(times, setup, work)
    if key == "read_s" or (key == "rows_s" and setup.remote):
        return _fetch_change(times, setup)
    if key == "pack_s" and (shorter := _shorter_gop(times, setup)):
        return shorter
    rows = f"{_reads_memory(setup)}, which keeps more rows in memory" if setup.reads_budget else "a faster disk"
    return _Change(
        {
            "pack_s": "fewer cameras, since packing holds Python's interpreter and threads cannot share it",
            "rows_s": rows,
            "gather_s": "fewer features or shorter windows (delta_timestamps)",
            "plan_s": "fewer cameras or shorter windows (delta_timestamps), since one thread plans them all",
        }[key]
    )


def _decode_change(times: Mapping[str, float], setup: Setup, work: Work) -> _Change:
    on_cpu = [camera for camera, decoder in setup.videos.items() if decoder == "torchcodec"]
    if setup.gpu and on_cpu and setup.decode == "torchcodec":
        return _Change('decode="auto", which decodes on the GPU if that is faster')
    if memory := _frames_memory(times, setup):
        return memory
    shorter, more = _shorter_gop(times, setup), _more_decoding(setup)
    return max(filter(None, (shorter, more)), key=lambda change: change.gain(work))


def _frames_memory(times: Mapping[str, float], setup: Setup) -> _Change | None:
    """Return the advice to use a larger memory_budget, which saves decodes. None if it would save only a few."""
    if setup.frames_budget is not None:
        budget = f'memory_budget="{budget_text(setup.frames_budget)}", which holds all decoded frames'
        evicted, misses = times["frames_evicted_before_use"], times["frames"] - times["frame_cache_hits"]
        if setup.warm and setup.repeats:
            return _Change(f"{budget}, so that later epochs decode nothing", lambda work: work.scaled(decode=0.0, store=0.0))
        if evicted > _WORTH * misses:
            again = min(evicted / misses, 1) if misses else 1.0
            reason = f"since {_percent(again)} of the decodes repeat what was evicted before its next use"
            return _Change(f"{budget}, {reason}", lambda work: work.scaled(decode=1 - again, store=1 - again))
    elif advice := setup.advice():
        larger, now, then = advice
        decodes = f"with which {then.decoded:.2f} frames instead of {now.decoded:.2f} are decoded for each one delivered"
        return _Change(f'memory_budget="{budget_text(larger)}", {decodes}', lambda work: work.decoding(now, then))
    return None


def _fetch_change(times: Mapping[str, float], setup: Setup) -> _Change:
    if not setup.remote:
        return _Change("a faster disk, such as a local SSD with a copy of the dataset")
    if setup.reads_budget and times["evicted_early"] * setup.block_bytes > _WORTH * times["fetched_bytes"]:
        evicted = f"{times['evicted_early']:.0f} blocks of video were evicted before their last use"
        return _Change(f"{_reads_memory(setup)}, since {evicted}")
    if not setup.cached:
        text = "cache_dir on a local disk, which later epochs and runs read instead of the network"
        return _Change(text, lambda work: work.scaled(network=0.0))
    rate = times["fetched_bytes"] / 1e6 / (times["wait_s"] + times["training_s"])
    return _Change(f"a faster connection, or storage that is nearer, since {rate:.3g} MB/s come over the network now")


def _graph_change(times: Mapping[str, float], setup: Setup) -> _Change:
    on_dali = "dali" in setup.videos.values()
    if on_dali and (shorter := _shorter_gop(times, setup)):
        return _Change(shorter.text)
    if on_dali and not setup.gpu:
        return _Change('decode="torchcodec", since DALI decodes on the CPU here')
    if setup.dali_graph:
        return _Change("fewer or cheaper operators in your dali_graph" + ("" if setup.gpu else ", which run on the CPU here"))
    if setup.image_size is None:
        return _Change("image_size, since whole frames go through the graph now")
    if not setup.gpu and setup.image_dtype == "float32":
        text = 'image_dtype="uint8", with the conversion to floats in the model: a quarter of the bytes is moved'
        return _Change(text, lambda work: work.scaled(copy=_AS_BYTES))
    if not on_dali:
        return _more_cores(setup)
    return _Change("a GPU with more decode engines")


def _handover_change(setup: Setup) -> _Change:
    if setup.normalize:
        return _Change("normalisation inside the model, since normalize= works on the thread that asks for batches")
    return _Change("whole epochs, since after a loop that is left early the next one starts with a cold pipeline")


def _shorter_gop(times: Mapping[str, float], setup: Setup) -> _Change | None:
    """Return the advice to re-encode the videos with shorter GOPs. None if few frames are decoded per delivered frame."""
    decoded = times["decoded_frames"] / times["frames"] if times["frames"] else 0.0
    if decoded < _LONG_GOP or not setup.videos:
        return None
    codec = "hevc" if setup.gpu else "h264"
    return _Change(
        f"shorter GOPs (`dali-stream prepare URI OUT --codec {codec} --gop 2`), since {decoded:.1f} frames are decoded for "
        f"each one delivered, and about {_SHORT_GOP} with a GOP of 2",
        lambda work: work.scaled(decode=_SHORT_GOP / decoded),
    )


def _more_cores(setup: Setup) -> _Change:
    if setup.num_threads < setup.cores:
        text = f"num_threads={setup.cores}, as many as this process has cores"
        return _Change(text, lambda work: work.with_threads(setup.cores))
    return _Change(f"more CPU cores than the {setup.cores} of this process")


def _more_decoding(setup: Setup) -> _Change:
    """Return the advice to use more cores. The advice also names a GPU, if the CPU decodes videos and all cores are in use."""
    if setup.gpu and setup.videos and "torchcodec" not in setup.videos.values():
        return _Change("a GPU with more decode engines")
    change = _more_cores(setup)
    if not setup.videos or setup.num_threads < setup.cores:
        return change
    if setup.gpu:
        nvdec = "videos that NVDEC decodes faster (`dali-stream prepare URI OUT --for nvdec`); Loader.routes has the speeds"
    else:
        nvdec = "a GPU that decodes the videos"
    return change._replace(text=f"{change.text}, or {nvdec}")


def _reads_memory(setup: Setup) -> str:
    return f'memory_budget="{budget_text(setup.reads_budget or 0)}"'


def _percent(share: float) -> str:
    return f"{max(share, 0) * 100:.0f} %"

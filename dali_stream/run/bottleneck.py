"""Analysis of a loader's times: which stage limits it, and which changes apply.

    thread that iterates   training_s, wait_s = starved_s + graph_s + rest     wall = training_s + wait_s
    planner thread         rows_s, gather_s, plan_s                            at most wall
    decode threads         read_s, pack_s, decode_s, resize_s                  at most wall × num_threads

If the training loop waits for batches, the largest part of `wait_s` shows why. If it is `graph_s` or the rest, the thread that
iterates is the limit. If it is `starved_s`, the frames are late. Then the limit is the longest stage of the planner thread or
of the decode threads, whichever are busier. If both are idle most of the time, `prefetch` is too small.

Everything is measured, and each stage has a rule or two. `dali-stream bench` measures what a change brings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dali_stream.checks.arguments import budget_text
from dali_stream.pipeline.layout import Layout
from dali_stream.schedule.budget import frames_budget
from dali_stream.system import cpu
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
_LONG_GOP = 2.5  # minimum number of decoded frames per delivered frame for which re-encoding with a GOP of 2 is worthwhile
_REMEDIES = {
    "read": "a faster disk, such as a local SSD with a copy of the dataset",
    "rows": "a faster disk, or a larger memory_budget, which keeps more rows in memory",
    "network": 'faster or nearer storage, or a larger memory_budget if stats()["evicted_early"] grows',
    "network without cache_dir": "cache_dir on a local disk, which later epochs and runs read instead of the network",
    "gather": "fewer features or shorter windows (delta_timestamps)",
    "plan": "fewer cameras or shorter windows (delta_timestamps), since one thread plans them all",
    "prefetch": "a larger prefetch, which makes more batches at a time",
    "graph": 'a smaller image_size, image_dtype="uint8", or fewer operators in dali_graph',
    "handover": "normalization in the model instead of normalize=, or whole epochs, since a new one begins with no batches",
}  # of the stages with one rule; those that decode have `_remedies`


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
    """Settings of a loader that determine which changes apply.

    Attributes:
        num_threads: Number of decode threads.
        cores: Number of CPU cores that this process may use.
        gpu: Whether batches are made on a CUDA device.
        remote: Whether the dataset is read over a network.
        cached: Whether the dataset has a `cache_dir`.
        decoders: Names of the decoders of the videos, without depth cameras, which no other decoder decodes.
        uses_dali: Whether a DALI graph makes the batches.
        keeps_all: Whether `memory_budget` holds all decoded frames that this rank needs, so that each is decoded once.
        frames_budget: Memory budget that would hold these frames, in bytes. None if the current budget holds them, if DALI
            decodes all cameras, or if this machine has less memory.
        sharded: Whether this rank needs the same frames in all epochs, and not all frames.
    """

    num_threads: int
    cores: int
    gpu: bool = False
    remote: bool = False
    cached: bool = False
    decoders: Collection[str] = ()
    uses_dali: bool = False
    keeps_all: bool = False
    frames_budget: int | None = None
    sharded: bool = False

    @property
    def frames(self) -> str:
        """Frames that a `memory_budget` must hold so that each is decoded once, as text."""
        return f"all decoded frames{' of this rank' if self.sharded else ''}"


def setup_of(config: Config, batch_source: BatchSource) -> Setup:
    """Return the settings of a loader.

    Args:
        config: Configuration of the loader.
        batch_source: Batches of the loader.
    """
    # While batches are in progress, only the planner may read indices, so the planner's layout, which has the sizes, is used.
    layout = batch_source.layout or Layout(config, batch_source.routes)
    sizes = layout.sizes
    enough = frames_budget(sizes)
    more = sizes.frame_bytes > 0 and config.memory_budget < enough and fits(enough)
    return Setup(
        num_threads=config.num_threads,
        cores=cpu.cores(),
        gpu=config.gpu is not None,
        remote=config.source.data_store.remote,
        cached=config.source.cache_dir is not None,
        decoders={batch_source.routes[key].decoder for key in config.source.videos} - {"pyav"},
        uses_dali=layout.uses_dali,
        keeps_all=batch_source.keeps_all,
        frames_budget=enough if more else None,
        sharded=sizes.needed is not None,
    )


@dataclass(frozen=True)
class Bottleneck:
    """Stage that limits a loader.

    Attributes:
        stage: "training" if the loader keeps up. Otherwise "read", "pack", "decode" or "resize" (decode threads), "rows",
            "gather" or "plan" (planner thread), "graph" (copying frames into batches, and DALI), "handover" (from DALI to a
            batch), or "prefetch" if training waits although no stage is busy.
        share: Share of the time of its threads that the stage takes, 0 to 1.
        text: Two or three sentences: the stage, its share, and what may help.
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
        times: Result of `Loader.stats()`, or the difference of two results: the attributes of `Counters`.
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
        stage, share, text = _upstream(setup, shares, wait)
    elif graph >= handover:
        decodes = ", which decodes the videos," if "dali" in setup.decoders else ""
        name = f"The DALI graph{decodes}" if setup.uses_dali else "Copying frames into batches"
        stage, share, text = "graph", graph, f"{name} takes {_percent(graph)} of the time"
    else:
        stage, share, text = "handover", handover, f"Handing batches over takes {_percent(handover)} of the time"
    text += f", and training waits for batches {_percent(wait)} of the time. What may help: "
    text += f"{', or '.join(_remedies(stage, times, setup))}."
    if stage in ("read", "pack", "decode", "resize") and setup.keeps_all:
        text += f" Later epochs decode only frames that no earlier one has shown, since memory_budget holds {setup.frames}."
    return Bottleneck(stage, share, text, shares)


def _shares(times: Mapping[str, float], wall: float, num_threads: int) -> dict[str, float]:
    """Return the share of each stage in the time of its threads. See `Bottleneck.shares`."""
    threads = {"iteration": 1, "planner": 1, "decode threads": num_threads}
    shares = {
        key.removesuffix("_s"): times[key] / wall / threads[thread] for thread, stages in STAGES.items() for key in stages
    }
    return shares | {"handover": (times["wait_s"] - times["starved_s"] - times["graph_s"]) / wall}


def _upstream(setup: Setup, shares: Mapping[str, float], wait: float) -> tuple[str, float, str]:
    """Return the stage of the planner thread or of the decode threads that delays the frames.

    Args:
        setup: Settings of the loader.
        shares: See `Bottleneck`.
        wait: Share of the time in which training waits for batches.

    Returns:
        Stage, its share, and a clause that says both.
    """
    pool, planner = ([key.removesuffix("_s") for key in STAGES[threads]] for threads in ("decode threads", "planner"))
    pool_busy, planner_busy = (sum(shares[stage] for stage in stages) for stages in (pool, planner))
    if max(pool_busy, planner_busy) < _IDLE:
        text = f"The decode threads work {_percent(pool_busy)} and the planner {_percent(planner_busy)} of the time"
        return "prefetch", wait, text
    if pool_busy >= planner_busy:
        stages, names = pool, STAGES["decode threads"]
        threads = f"{setup.num_threads} decode thread{'s' * (setup.num_threads > 1)}"
    else:
        stages, names, threads = planner, STAGES["planner"], "planner thread"
    stage = max(stages, key=lambda name: shares[name])
    text = f"{names[f'{stage}_s'].capitalize()} takes {_percent(shares[stage])} of the time of the {threads}"
    return stage, shares[stage], text


def _remedies(stage: str, times: Mapping[str, float], setup: Setup) -> list[str]:
    """Return the changes that may help a stage."""
    decodes_videos = stage == "graph" and "dali" in setup.decoders
    if stage in _REMEDIES and not decodes_videos:
        key = stage
        if stage in ("read", "rows") and setup.remote:
            key = "network" if setup.cached else "network without cache_dir"
        return [_REMEDIES[key]]
    remedies = []
    if setup.frames_budget and stage in ("decode", "resize"):
        remedies.append(f'memory_budget="{budget_text(setup.frames_budget)}", which holds {setup.frames}')
    if setup.decoders and times["decoded_frames"] >= _LONG_GOP * times["frames"]:
        codec = "hevc" if setup.gpu else "h264"
        remedies.append(f"shorter GOPs (`dali-stream prepare URI OUT --codec {codec} --gop 2`)")
    if stage == "pack":
        remedies.append("fewer cameras, since packing holds Python's interpreter and threads cannot share it")
    elif setup.gpu and setup.decoders and "torchcodec" not in setup.decoders:
        remedies.append("a GPU with more decode engines")
    elif decodes_videos and not setup.gpu:
        remedies.append('decode="torchcodec", since DALI decodes on the CPU here')
    elif setup.num_threads < setup.cores:
        remedies.append(f"num_threads={setup.cores}, as many as this process has cores")
    else:
        gpu = ", or a GPU that decodes the videos (see Loader.routes)" if setup.decoders else ""
        remedies.append(f"more CPU cores than the {setup.cores} of this process{gpu}")
    return remedies


def _percent(share: float) -> str:
    return f"{max(share, 0) * 100:.0f} %"

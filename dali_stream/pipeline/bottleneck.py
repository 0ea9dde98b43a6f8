"""Which stage limits a loader, and which change would help most: a pure function of its times and settings.

    thread that iterates   consumer_s | wait_s = starved_s + graph_s + the rest      their sum is the time that passed
    planner thread         rows_s, gather_s, plan_s                                  of that time
    decode threads         read_s, pack_s, decode_s, resize_s                        of that time × threads

Where batches are waited for, the longest part of the wait says which side is slow. If it is the frames that are waited for,
the busier of planner and decode threads is, and of that the stage that takes longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STAGES = {
    "iteration": {"consumer_s": "training loop", "starved_s": "waiting for frames", "graph_s": "copying frames, DALI graph"},
    "planner": {"rows_s": "reading rows", "gather_s": "gathering rows into batches", "plan_s": "planning"},
    "decode threads": {
        "read_s": "reading video", "pack_s": "packing clips", "decode_s": "decoding", "resize_s": "resizing"
    },
}  # fmt: skip
KEEPS_UP = 0.1  # the share of time that a training loop may wait for batches
_IDLE = 0.5  # planner and decode threads that work for less of the time do not limit anything by their work
_LONG_GOP = 2.5  # decoded frames for each delivered one, from which on a GOP of 2, with 1.5, is worth writing videos for


@dataclass(frozen=True)
class Setup:
    """What a loader is set to, as far as a change of it may help.

    Attributes:
        threads: of the decode pool.
        cores: that this process may use.
        gpu: whether batches are made on a CUDA device.
        remote: whether bytes come over a network.
        cached: whether `cache_dir` is given.
        decode: the argument of the Loader.
        videos: the decoder of each camera that is video.
        image_size, image_dtype, normalize, pipeline: of the Loader; the last two: whether given.
    """

    threads: int
    cores: int
    gpu: bool = False
    remote: bool = False
    cached: bool = False
    decode: str = "auto"
    videos: Mapping[str, str] = field(default_factory=dict)
    image_size: tuple[int, int] | None = None
    image_dtype: str = "float32"
    normalize: bool = False
    pipeline: bool = False


@dataclass(frozen=True)
class Bottleneck:
    """What limits a loader.

    Attributes:
        stage: "consumer" where the loader keeps up; "read", "pack", "decode", "resize" (decode threads); "rows", "gather",
            "plan" (planner thread); "graph" (copying frames into batches, and DALI); "handover" (from DALI's outputs to a
            batch); "prefetch" where batches are waited for and no stage is busy.
        share: of the time of the threads that the stage has, 0 to 1.
        text: one to three sentences for people: the stage, its share and the change that would help most.
    """

    stage: str
    share: float
    text: str

    def __str__(self) -> str:
        return self.text


def find(times: Mapping[str, float], setup: Setup) -> Bottleneck | None:
    """What limits a loader with these times.

    Args:
        times: of `Loader.stats()`, or the growth of them: `wait_s`, the attributes of `Counters`, `fetched_bytes`.
        setup: of the loader.

    Returns:
        None where no time has passed.
    """
    wall = times["wait_s"] + times["consumer_s"]
    if wall <= 0:
        return None
    wait = times["wait_s"] / wall
    if wait < KEEPS_UP:
        text = f"Loading keeps up: the training loop waits for batches {_percent(wait)} of the time."
        return Bottleneck("consumer", 1 - wait, f"{text} A faster loader would not help.")
    starved, graph = times["starved_s"] / wall, times["graph_s"] / wall
    handover = wait - starved - graph
    if starved >= max(graph, handover):
        return _upstream(times, setup, wall, wait)
    if graph >= handover:
        resizes = " and resizes" if setup.image_size else ""
        decodes = f", which decodes{resizes} the videos," if "dali" in setup.videos.values() else ""
        on_dali = decodes or setup.gpu or setup.pipeline
        what = f"The DALI graph{decodes}" if on_dali else "Copying frames into batches"
        return _found("graph", graph, f"{what} takes", "time", wait, _graph_change(times, setup))
    return _found("handover", handover, "Handing batches over takes", "time", wait, _handover_change(setup))


def _upstream(times: Mapping[str, float], setup: Setup, wall: float, wait: float) -> Bottleneck:
    """What keeps frames from being there."""
    pool = {key: times[key] / wall / setup.threads for key in STAGES["decode threads"]}
    planner = {key: times[key] / wall for key in STAGES["planner"]}
    busy = {"pool": sum(pool.values()), "planner": sum(planner.values())}
    if max(busy.values()) < _IDLE:
        text = (
            f"Batches are waited for {_percent(wait)} of the time, while the decode threads work {_percent(busy['pool'])} and "
            f"the planner {_percent(busy['planner'])} of it. What would help most: "
            "a larger prefetch, which makes more batches at a time."
        )
        return Bottleneck("prefetch", wait, text)
    if busy["pool"] >= busy["planner"]:
        shares, names, whose = (
            pool,
            STAGES["decode threads"],
            f"time of the {setup.threads} decode thread{'s' * (setup.threads > 1)}",
        )
    else:
        shares, names, whose = planner, STAGES["planner"], "time of the planner thread"
    key = max(shares, key=lambda name: shares[name])
    return _found(
        key.removesuffix("_s"), shares[key], f"{names[key].capitalize()} takes", whose, wait, _change(key, times, setup)
    )


def _found(stage: str, share: float, what: str, whose: str, wait: float, change: str) -> Bottleneck:
    text = f"{what} {_percent(share)} of the {whose}; batches are waited for {_percent(wait)} of the time."
    return Bottleneck(stage, share, f"{text} What would help most: {change}.")


# ---- the change that would help most


def _change(key: str, times: Mapping[str, float], setup: Setup) -> str:
    """For a stage of the planner or of the decode threads."""
    if key == "decode_s":
        return _decode_change(times, setup)
    if key == "read_s" or (key == "rows_s" and setup.remote):
        return _fetch_change(times, setup)
    if key == "pack_s" and (shorter := _shorter_gop(times, setup)):
        return shorter
    return {
        "pack_s": "fewer cameras, since packing holds Python's interpreter and threads cannot share it",
        "resize_s": _more_cores(setup),
        "rows_s": "a larger memory_budget, which keeps more rows in memory, or a faster disk",
        "gather_s": "fewer features or shorter windows (delta_timestamps)",
        "plan_s": "fewer cameras or shorter windows (delta_timestamps), since one thread plans them all",
    }[key]


def _decode_change(times: Mapping[str, float], setup: Setup) -> str:
    on_cpu = [camera for camera, decoder in setup.videos.items() if decoder != "dali"]
    if setup.gpu and on_cpu and setup.decode == "torchcodec":
        return 'decode="auto", which decodes on the GPU what the GPU can decode'
    if setup.gpu and on_cpu:
        return (
            f"videos that the GPU decodes (dali-stream transcode URI OUT --codec hevc), since the CPU decodes {on_cpu[0]} now; "
            "Loader.routes has the reason"
        )
    if times["frames_evicted_before_use"]:
        again = times["decoded_frames"] / times["frames"]
        return (
            f"a larger memory_budget: {again:.2f} frames are decoded for each one delivered, since it has no room for "
            f"{times['frames_evicted_before_use']:.0f} decoded frames until their next use"
        )
    return _shorter_gop(times, setup) or _more_cores(setup)


def _fetch_change(times: Mapping[str, float], setup: Setup) -> str:
    if not setup.remote:
        return "a faster disk, such as a local SSD with a copy of the dataset"
    if times["evicted_early"]:
        return f"a larger memory_budget, since {times['evicted_early']:.0f} blocks of video were evicted before their last use"
    if not setup.cached:
        return "cache_dir on a local disk, which later epochs and runs read instead of the network"
    rate = times["fetched_bytes"] / 1e6 / (times["wait_s"] + times["consumer_s"])
    return f"a faster connection, or storage that is nearer, since {rate:.3g} MB/s come over the network now"


def _graph_change(times: Mapping[str, float], setup: Setup) -> str:
    on_dali = "dali" in setup.videos.values()
    if on_dali and (shorter := _shorter_gop(times, setup)):
        return shorter
    if on_dali and not setup.gpu:
        return 'decode="torchcodec", since DALI decodes on the CPU here'
    if setup.pipeline:
        return "fewer or cheaper operators in your pipeline function" + ("" if setup.gpu else ", which run on the CPU here")
    if setup.image_size is None:
        return "image_size, since whole frames go through the graph now"
    if not setup.gpu and setup.image_dtype == "float32":
        return 'image_dtype="uint8", with the conversion to floats in the model: a quarter of the bytes is moved'
    return 'a GPU with more decode engines, or decode="torchcodec" where CPU cores are idle' if on_dali else _more_cores(setup)


def _handover_change(setup: Setup) -> str:
    if setup.normalize:
        return "normalisation inside the model, since normalize= works on the thread that asks for batches"
    return "whole epochs, since after a loop that is left early the next one starts with a cold pipeline"


def _shorter_gop(times: Mapping[str, float], setup: Setup) -> str | None:
    """Where far more frames are decoded than delivered."""
    decoded = times["decoded_frames"] / times["frames"] if times["frames"] else 0.0
    if decoded < _LONG_GOP or not setup.videos:
        return None
    codec = "hevc" if setup.gpu else "h264"
    return (
        f"shorter GOPs (dali-stream transcode URI OUT --codec {codec} --gop 2), since {decoded:.1f} frames are decoded for "
        "each one delivered, and about 1.5 with a GOP of 2"
    )


def _more_cores(setup: Setup) -> str:
    if setup.threads < setup.cores:
        return f"threads={setup.cores}, as many as this process has cores"
    return f"more CPU cores than the {setup.cores} of this process" + (
        "" if setup.gpu else ", or a GPU that decodes the videos"
    )


def _percent(share: float) -> str:
    return f"{max(share, 0) * 100:.0f} %"

"""Measures DALI's decoder for several requests per clip, threads and prefetch depths, and torchcodec on all cores."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dali_stream.decode import dali
from dali_stream.decode.torchcodec import decode_clip
from dali_stream.mp4.clip import Clip
from dali_stream.tools import environment
from dali_stream.tools.selftest import videos

BATCH = 64  # frames
BATCHES = 24  # prepared in advance and repeated


def measure(folder: str, gpu: int | None, settings: list[tuple[int, int, int]], seconds: float) -> dict[str, Any]:
    """Decodes random frames from packed clips, for some seconds per setting.

    Args:
        folder: of a demo dataset.
        gpu: the CUDA device; None on a CPU.
        settings: (requests per clip, a divisor of 64; threads of the decoder; prefetched batches).
        seconds: per setting, after three batches that are not counted.

    Returns:
        `rows`, per setting: `per_clip`, `threads`, `prefetch`, `frames_per_s`. `gpu_bytes`: in use on the GPU at the end,
        which covers the largest setting, since DALI keeps its memory; None on a CPU.
    """
    rows = []
    for per_clip, threads, prefetch in settings:
        rate = _rate(_pipeline(_batches(folder, per_clip), gpu, threads, prefetch), seconds)
        rows.append({"per_clip": per_clip, "threads": threads, "prefetch": prefetch, "frames_per_s": rate})
    return {"rows": rows, "gpu_bytes": environment.gpu_bytes_used(gpu)}


def measure_torchcodec(folder: str, threads: int, seconds: float) -> dict[str, Any]:
    """Decodes such frames with torchcodec, 16 per clip, as the loader does on a CPU. Returns `frames_per_s`."""
    [video, *_] = videos.read(folder)
    batches, number = _batches(folder, 16), itertools.count()
    with ThreadPoolExecutor(threads) as pool:

        def decode(clip: Clip) -> None:
            decode_clip(clip, video.format)

        def run() -> None:
            # Several batches at once, so that no thread waits for the last clip of one.
            clips = [clip for _ in range(threads) for clip in batches[next(number) % len(batches)]]
            list(pool.map(decode, clips))

        return {"frames_per_s": threads * _rate(run, seconds)}


def _batches(folder: str, per_clip: int) -> list[list[Clip]]:
    [video, *_] = videos.read(folder)
    rng, made = np.random.default_rng(per_clip), []
    for _ in range(BATCHES):
        picks = (rng.choice(len(video.identity), per_clip, replace=False) for _ in range(BATCH // per_clip))
        made.append([video.clip(sorted(pick.tolist())) for pick in picks])
    return made


def _pipeline(made: list[list[Clip]], gpu: int | None, threads: int, prefetch: int) -> Callable[[], Any]:
    """A function that decodes the next batch and returns when it is done."""
    batches = itertools.cycle([[dali.encoded(clip) for clip in batch] for batch in made])
    pipeline = dali.pipeline(lambda: next(batches), len(made[0]), gpu, threads, prefetch)
    pipeline.build()
    if gpu is None:
        return pipeline.run
    import torch

    def run() -> None:
        pipeline.run()
        torch.cuda.synchronize(gpu)

    return run


def _rate(run: Callable[[], Any], seconds: float) -> float:
    """Frames per second of a function that decodes a batch."""
    for _ in range(3):
        run()
    started, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or not count:
        run()
        count += 1
    return BATCH * count / passed

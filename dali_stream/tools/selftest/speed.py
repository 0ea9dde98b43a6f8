"""How fast DALI's decoder is, over requests per clip, threads and prefetch, beside torchcodec on all cores."""

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
BATCHES = 24  # that are made beforehand, and come again and again


def measure(folder: str, gpu: int | None, settings: list[tuple[int, int, int]], seconds: float) -> dict[str, Any]:
    """Decodes random frames out of packed clips, for some seconds per setting.

    Args:
        folder: of a demo dataset.
        gpu: the CUDA device; None on a CPU.
        settings: (requests packed into a clip, a divisor of 64; threads of the decoder; batches that the pipeline is ahead).
        seconds: to measure each for, after three batches that are not counted.

    Returns:
        Per setting in `rows`: `per_clip`, `threads`, `prefetch`, `frames_per_s`. `gpu_bytes`, all that is in use on the GPU in
        the end, of the largest setting at least, since DALI keeps what it has taken; None on a CPU.
    """
    rows = []
    for per_clip, threads, prefetch in settings:
        rate = _rate(_pipeline(_batches(folder, per_clip), gpu, threads, prefetch), seconds)
        rows.append({"per_clip": per_clip, "threads": threads, "prefetch": prefetch, "frames_per_s": rate})
    return {"rows": rows, "gpu_bytes": environment.gpu_bytes_used(gpu)}


def measure_torchcodec(folder: str, threads: int, seconds: float) -> dict[str, Any]:
    """Such frames by torchcodec, 16 a clip, as the loader's route for the CPU has them. Returns `frames_per_s`."""
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
    """A call that decodes the next batch and returns when its frames are there."""
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
    """Frames a second of a call that decodes a batch of them."""
    for _ in range(3):
        run()
    started, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or not count:
        run()
        count += 1
    return BATCH * count / passed

"""Measures the speed of decoders with different settings."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dali_stream.decode import dali, torchcodec_cuda
from dali_stream.decode.torchcodec import decode_clip
from dali_stream.mp4.clip import Clip
from dali_stream.tools import environment
from dali_stream.tools.selftest import load, videos
from dali_stream.tools.selftest.videos import Video

BATCH = 64  # frames per batch
BATCHES = 24  # number of batches, which are prepared in advance and repeated


def speed(
    folder: str, decoder: str, gpu: int | None, settings: list[dict[str, int]], seconds: float, busy: bool = False
) -> list[dict[str, Any]]:
    """Measure how fast a decoder decodes random frames from packed clips.

    Args:
        folder: Folder of a demo dataset.
        decoder: "dali", or another name for torchcodec.
        gpu: Index of the CUDA device. None for the CPU.
        settings: Settings to measure: `threads` of the decoder, requests `per_clip`, a divisor of 64, and for DALI the number
            of batches to `prefetch`. Missing ones have the defaults of `_dali` and `_torchcodec`.
        seconds: Time per setting in seconds, after three warm-up batches.
        busy: Whether another thread keeps the GPU busy with matrix products. Default: False.

    Returns:
        A row per setting, with `decoder`, the setting, and `frames_per_s`. The last row also has `gpu_bytes`, the bytes in use
        on the GPU at the end, or None on a CPU. DALI keeps its memory, so this number covers the largest setting.
    """
    [video, *_] = videos.read(folder)
    rows: list[dict[str, Any]] = []
    with _busy(gpu if busy else None):
        for setting in settings:
            # Nothing refers to the function afterwards, so the pipeline of a setting is freed before the next one is built.
            rate = _rate(
                _dali(video, gpu, **setting, wait=not busy) if decoder == "dali" else _torchcodec(video, gpu, **setting),
                seconds,
            )
            rows.append({"decoder": decoder, **setting, "frames_per_s": rate})
    rows[-1]["gpu_bytes"] = environment.gpu_bytes_used(gpu)
    return rows


@contextlib.contextmanager
def _busy(gpu: int | None) -> Iterator[None]:
    """Keep a GPU busy from another thread. At most two rounds of products are queued at a time."""
    if gpu is None:
        yield
        return
    work, stop, stream = load.work(f"cuda:{gpu}"), threading.Event(), torch.cuda.Stream(gpu)
    torch.cuda.synchronize(gpu)

    def keep_busy() -> None:
        with torch.cuda.stream(stream):
            end = torch.cuda.Event()
            while not stop.is_set():
                work()
                end.synchronize()  # wait for the previous round, so that the queue stays short
                end.record()

    with ThreadPoolExecutor(1, thread_name_prefix="dali_stream selftest: busy") as pool:
        busy = pool.submit(keep_busy)
        try:
            yield
        finally:
            stop.set()
        busy.result()


def _batches(video: Video, per_clip: int, for_nvdec: bool = False) -> list[list[Clip]]:
    rng = np.random.default_rng(per_clip)

    def clip() -> Clip:
        return video.clip(sorted(rng.choice(len(video.identity), per_clip, replace=False).tolist()), for_nvdec)

    return [[clip() for _ in range(BATCH // per_clip)] for _ in range(BATCHES)]


def _dali(
    video: Video, gpu: int | None, threads: int, per_clip: int = 1, prefetch: int = 1, wait: bool = True
) -> Callable[[], int]:
    """Return a function that decodes a batch with DALI, and waits for the GPU if `wait`. It returns the number of frames."""
    batches = itertools.cycle([[dali.encoded(clip) for clip in batch] for batch in _batches(video, per_clip)])
    pipeline = dali.pipeline(lambda: next(batches), BATCH // per_clip, gpu, threads, prefetch)
    pipeline.build()

    def run() -> int:
        pipeline.run()
        if gpu is not None and wait:
            torch.cuda.synchronize(gpu)
        return BATCH

    return run


def _torchcodec(video: Video, gpu: int | None, threads: int, per_clip: int = 16) -> Callable[[], int]:
    """Return a function that decodes batches with torchcodec, by default clips as in the Loader. It returns their frames."""
    batches, pool = itertools.cycle(_batches(video, per_clip, gpu is not None)), ThreadPoolExecutor(threads)

    def decode(clip: Clip) -> int:
        with torchcodec_cuda.own_stream(gpu):
            return len(decode_clip(clip, video.format, torchcodec_cuda.device_name(gpu)))

    def run() -> int:
        # Decode several batches at once, so that threads rarely wait for the last clip of a batch.
        return sum(pool.map(decode, [clip for _ in range(threads) for clip in next(batches)]))

    return run


def _rate(decode: Callable[[], int], seconds: float) -> float:
    """Return the frames per second of a function that decodes frames and returns their number."""
    for _ in range(3):
        decode()
    started, frames = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or not frames:
        frames += decode()
    return frames / passed

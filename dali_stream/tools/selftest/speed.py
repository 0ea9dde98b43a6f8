"""Measures the speed of DALI's decoder with different settings, and of torchcodec on all cores."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dali_stream.decode import dali, torchcodec_cuda
from dali_stream.decode.torchcodec import decode_clip
from dali_stream.mp4.clip import Clip
from dali_stream.tools import environment
from dali_stream.tools.selftest import lockstep, videos

BATCH = 64  # frames per batch
BATCHES = 24  # number of batches, which are prepared in advance and repeated


def measure(folder: str, gpu: int | None, settings: list[tuple[int, int, int]], seconds: float) -> dict[str, Any]:
    """Measure how fast DALI decodes random frames from packed clips.

    Args:
        folder: Folder of a demo dataset.
        gpu: Index of the CUDA device. None for the CPU.
        settings: (requests per clip, threads of the decoder, prefetched batches). The number of requests must divide 64.
        seconds: Time per setting in seconds, after three warm-up batches.

    Returns:
        A dict with `rows`. Each row has `per_clip`, `threads`, `prefetch` and `frames_per_s` of a setting. The last row also
        has `gpu_bytes`, the bytes in use on the GPU at the end, or None on a CPU. DALI keeps its memory, so this number covers
        the largest setting.
    """
    names = ("per_clip", "threads", "prefetch")
    rows: list[dict[str, Any]] = [
        dict(zip(names, setting, strict=True)) | {"frames_per_s": _rate(_dali(folder, gpu, *setting), seconds)}
        for setting in settings
    ]
    rows[-1]["gpu_bytes"] = environment.gpu_bytes_used(gpu)
    return {"rows": rows}


def measure_busy(folder: str, decoder: str, gpu: int | None, threads: list[int], seconds: float) -> dict[str, Any]:
    """Measure how fast NVDEC decodes clips of one random frame while another thread keeps the GPU busy with matrix products.

    Args:
        folder: Folder of a demo dataset.
        decoder: "dali" or "torchcodec-cuda".
        gpu: Index of the CUDA device. None for the CPU, which gets no other work.
        threads: Numbers of decode threads to measure.
        seconds: Time per number of threads, in seconds.

    Returns:
        A dict with `rows`. Each row has `decoder`, `threads` and `frames_per_s`.
    """
    rows = []
    with _busy(gpu):
        for count in threads:
            if decoder == "dali":
                rate = _rate(_dali(folder, gpu, 1, count, 1, wait=False), seconds)
            else:
                rate = measure_torchcodec(folder, count, seconds, gpu, per_clip=1)["frames_per_s"]
            rows.append({"decoder": decoder, "threads": count, "frames_per_s": rate})
    return {"rows": rows}


@contextlib.contextmanager
def _busy(gpu: int | None) -> Iterator[None]:
    """Keep a GPU busy from another thread. At most two rounds of products are queued at a time."""
    if gpu is None:
        yield
        return
    import torch

    work, stop, stream = lockstep.work(f"cuda:{gpu}"), threading.Event(), torch.cuda.Stream(gpu)
    torch.cuda.synchronize(gpu)

    def keep_busy() -> None:
        with torch.cuda.stream(stream):
            end = torch.cuda.Event()
            while not stop.is_set():
                work()
                end.synchronize()  # wait for the previous round, so that the queue stays short
                end = torch.cuda.Event()
                end.record()

    with ThreadPoolExecutor(1, thread_name_prefix="dali_stream selftest: busy") as pool:
        busy = pool.submit(keep_busy)
        try:
            yield
        finally:
            stop.set()
        busy.result()


def measure_torchcodec(folder: str, threads: int, seconds: float, gpu: int | None = None, per_clip: int = 16) -> dict[str, Any]:
    """Measure how fast torchcodec decodes random frames from packed clips.

    Args:
        folder: Folder of a demo dataset.
        threads: Number of decode threads.
        seconds: Time in seconds, after three warm-up rounds.
        gpu: Index of the CUDA device. Default: None, for the CPU.
        per_clip: Number of frames per clip. Default: 16, as in the Loader on a CPU.

    Returns:
        A dict with `frames_per_s`.
    """
    [video, *_] = videos.read(folder)
    batches, number = _batches(folder, per_clip), itertools.count()
    with ThreadPoolExecutor(threads) as pool:

        def decode(clip: Clip) -> None:
            with torchcodec_cuda.own_stream(gpu):
                decode_clip(clip, video.format, torchcodec_cuda.device_name(gpu))

        def run() -> None:
            # Decode several batches at once, so that threads rarely wait for the last clip of a batch.
            clips = [clip for _ in range(threads) for clip in batches[next(number) % len(batches)]]
            list(pool.map(decode, clips))

        return {"frames_per_s": threads * _rate(run, seconds)}


def _batches(folder: str, per_clip: int) -> list[list[Clip]]:
    [video, *_] = videos.read(folder)
    rng = np.random.default_rng(per_clip)

    def clip() -> Clip:
        return video.clip(sorted(rng.choice(len(video.identity), per_clip, replace=False).tolist()))

    return [[clip() for _ in range(BATCH // per_clip)] for _ in range(BATCHES)]


def _dali(folder: str, gpu: int | None, per_clip: int, threads: int, prefetch: int, wait: bool = True) -> Callable[[], Any]:
    """Return a function that decodes the next batch with DALI, and waits for the GPU if `wait`."""
    batches = itertools.cycle([[dali.encoded(clip) for clip in batch] for batch in _batches(folder, per_clip)])
    pipeline = dali.pipeline(lambda: next(batches), BATCH // per_clip, gpu, threads, prefetch)
    pipeline.build()
    if gpu is None or not wait:
        return pipeline.run
    import torch

    def run() -> None:
        pipeline.run()
        torch.cuda.synchronize(gpu)

    return run


def _rate(run: Callable[[], Any], seconds: float) -> float:
    """Return the frames per second of a function that decodes a batch."""
    for _ in range(3):
        run()
    started, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or not count:
        run()
        count += 1
    return BATCH * count / passed

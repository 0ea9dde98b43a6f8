"""The decode floor of the DALI route: all engines of NVDEC at the speed of an engine that decodes a file sequentially.

    floor [frames/s] = engines × frames/s of one engine / decoded frames per delivered frame

The program has not been run on a GPU yet. On a CPU, each thread of DALI's software decoder (VP9) counts as an engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import dali_stream
from dali_stream.cache.indices import IndexCache
from dali_stream.decode import dali
from dali_stream.decode.capability import capability
from dali_stream.mp4.clip import pack

LONGEST = 128  # maximum number of frames of the sequential clip, which takes 354 MB if decoded at 720p
TIMED_S = 2.0


def make(dataset: dali_stream.Dataset, gpu: int | None, threads: int, per_frame: Callable[[], float]) -> Callable[[], float]:
    """Return a function that measures all cameras and returns the floor in frames/s.

    Args:
        dataset: Dataset whose first episodes are decoded.
        gpu: Index of the CUDA device. None for the CPU.
        threads: Number of threads of the loader's decoders.
        per_frame: Function that returns the number of decoded frames per delivered frame.
    """
    engines, runs = [], []
    for camera in dataset.videos:
        table = IndexCache(dataset.source).of(camera, 0, dataset.data_store)
        video = table.format()
        engines.append(threads if gpu is None else capability(gpu, video.codec, video.chroma, video.depth).engines)
        shown = table.displayed_packets[:LONGEST].tolist()
        clip = dali.encoded(pack(dataset.data_store, [table] * len(shown), shown))
        runs.append((len(shown), _decoder(clip, gpu)))

    def floor() -> float:
        # A batch has the same number of frames of each camera, so the rate over all cameras is the harmonic mean.
        return statistics.harmonic_mean([n * _rate(*run) for n, run in zip(engines, runs, strict=True)]) / per_frame()

    return floor


def _decoder(clip: dali.Encoded, gpu: int | None) -> Callable[[], None]:
    """Return a function that decodes the clip and waits for its frames."""
    pipeline = dali.pipeline(lambda: [clip], 1, gpu, 1, prefetch=1)
    pipeline.build()

    def run() -> None:
        pipeline.run()
        if gpu is not None:
            import torch

            torch.cuda.synchronize(gpu)

    run()
    return run


def _rate(pictures: int, run: Callable[[], None]) -> float:
    started, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < TIMED_S or not count:
        run()
        count += 1
    return pictures * count / passed

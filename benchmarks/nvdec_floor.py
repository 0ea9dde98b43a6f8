"""The decode floor of the DALI route: all engines of NVDEC, each at the speed of an engine that decodes a file sequentially.

    floor [frames/s] = engines × frames/s of one engine / frames decoded per frame delivered

Not run on a GPU yet. On a CPU, DALI's software decoder (VP9) takes the place of an engine, with one engine per thread.
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
from dali_stream.mp4.format import describe

LONGEST = 128  # frames of a sequential clip: 354 MB of decoded 720p
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
        table = IndexCache(dataset).of(camera, 0, dataset.data_store)
        video = describe(table.configs[0])
        engines.append(threads if gpu is None else capability(gpu, video.codec, video.chroma, video.depth).engines)
        shown = table.display_order[:LONGEST].tolist()
        clip = dali.encoded(pack(dataset.data_store, [table] * len(shown), shown))
        runs.append((len(shown), _decoder(clip, gpu)))

    def floor() -> float:
        # A frame of each camera in turn, as batches have them.
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

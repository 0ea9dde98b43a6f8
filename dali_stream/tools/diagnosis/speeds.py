"""Measured speed of NVDEC and of the CPU on the video of a camera, in frames per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dali_stream.decode.capability import engines
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import Clip, pack
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.speed.decodes import median_gop
from dali_stream.storage import Store
from dali_stream.system import process

_SECONDS = 2.0  # time limit for measuring a camera, in seconds. It does not interrupt a batch
_REQUESTS, _DECODED = 8, 64  # limits of a clip for the CPU: requested frames, and approximate number of frames to decode
_CLIPS = 16  # minimum number of clips of a batch for DALI


@dataclass(frozen=True)
class Rates:
    """Measured speed of two decoders on requests for single frames, in frames per second.

    Attributes:
        nvdec: Speed of NVDEC, with DALI.
        cpu: Speed of the CPU, with torchcodec in as many threads as this process has cores.
    """

    nvdec: float
    cpu: float

    def __str__(self) -> str:
        return f"NVDEC {self.nvdec:.0f} frames/s, the CPU {self.cpu:.0f}"


class RequestClips(NamedTuple):
    """Single frames from the first GOPs of a file, packed as each of the two routes packs them.

    Attributes:
        singles: One clip per frame, for DALI.
        packed: One clip of all frames, for the CPU.
    """

    singles: list[Clip]
    packed: Clip


def request_clips(store: Store, index: VideoIndex, gpu: int | None) -> RequestClips:
    """Pack one frame from the middle of each of the first GOPs of a file.

    Args:
        store: Store of the file.
        index: Index of the file.
        gpu: CUDA device, or None for DALI's decoder on the CPU.

    Raises:
        UnsafeForNvdec: If DALI would decode one of the clips wrongly on a GPU.
        DecodeError: If the file is damaged.
    """
    lengths = index.gop_lengths
    # A frame in the middle of a GOP costs about half of the GOP.
    count = int(np.clip(_DECODED // ((median_gop([index]) + 1) / 2), 1, _REQUESTS))
    packets = (index.keyframes + (lengths - 1) // 2)[:count].tolist()
    singles = [pack(store, [index], [packet], for_nvdec=gpu is not None) for packet in packets]
    return RequestClips(singles, pack(store, [index] * len(packets), packets))


def measure(clips: RequestClips, video: VideoFormat, gpu: int | None, cameras: int) -> Rates:
    """Measure the speeds of DALI and of torchcodec, each for half of the time.

    Both decode requests for single frames at full size, with as many threads as in a Loader, while the GPU has no other work.

    Args:
        clips: Clips to decode.
        video: Format of the clips.
        gpu: CUDA device, or None for DALI's decoder on the CPU.
        cameras: Number of cameras that NVDEC decodes.

    Raises:
        DecodeError: If a decoder fails.
    """
    num_threads = process.cores()
    return Rates(
        _rate(_with_dali(clips.singles, gpu, num_threads, cameras), _SECONDS / 2),
        _rate(_with_torchcodec(clips.packed, video, num_threads), _SECONDS / 2),
    )


def _with_dali(clips: list[Clip], gpu: int | None, num_threads: int, cameras: int) -> Callable[[], int]:
    """Return a function that decodes a batch with DALI, one frame per clip, and returns the number of frames."""
    from dali_stream.decode import dali

    threads = num_threads if gpu is None else dali.decode_threads(num_threads, engines(gpu), cameras)
    count = max(_CLIPS, 2 * threads)
    batch = [dali.encoded(clips[i % len(clips)]) for i in range(count)]
    pipeline = dali.pipeline(lambda: batch, count, gpu, threads, prefetch=1)

    def run() -> int:
        try:
            pipeline.run()
        except RuntimeError as error:
            raise DecodeError(f"DALI's video decoder failed: {dali.explanation(error)}") from error
        if gpu is not None:
            import torch

            torch.cuda.synchronize(gpu)
        return count

    pipeline.build()
    return run


def _with_torchcodec(clip: Clip, video: VideoFormat, num_threads: int) -> Callable[[], int]:
    """Return a function that decodes the clip `2 * num_threads` times in `num_threads` threads, and returns the frame count."""
    from dali_stream.decode.torchcodec import decode_clip

    def run() -> int:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="dali_stream speed") as pool:
            return sum(len(frames) for frames in pool.map(lambda _: decode_clip(clip, video), range(2 * num_threads)))

    return run


def _rate(decode: Callable[[], int], seconds: float) -> float:
    """Return the frames per second of a function that decodes frames and returns their number.

    The first call is not counted, because it opens decoders and allocates memory.
    """
    started, frames = time.perf_counter(), 0
    decode()
    warm = time.perf_counter()
    while not frames or time.perf_counter() - started < seconds:
        frames += decode()
    return frames / (time.perf_counter() - warm)

"""Measured speed of NVDEC and of the CPU on the video of a camera, in frames per second.

A Loader with `decode="auto"` chooses by this measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from dali_stream.decode.decoder import task_frames
from dali_stream.mp4.clip import Clip, pack
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

_DECODED = 64  # approximate limit of the frames to decode for a packed clip
_BYTES = 64 << 20  # limit of the requested frames of a packed clip, in bytes, since each thread decodes such a clip


@dataclass(frozen=True)
class Rates:
    """Measured speeds of torchcodec on requests for single frames, in frames per second.

    Attributes:
        nvdec: Speed of NVDEC.
        cpu: Speed of the CPU.
    """

    nvdec: float
    cpu: float


def request_clip(store: Store, index: VideoIndex) -> Clip:
    """Pack one frame from the middle of each of the first GOPs of a file into a clip.

    Raises:
        DecodeError: If the file is damaged.
    """
    lengths = index.gop_lengths
    # A frame in the middle of a GOP costs about half of the GOP.
    video = index.format()
    most = min(task_frames((video.height, video.width)), _BYTES // (video.height * video.width * 3))
    count = max(1, min(int(_DECODED // ((float(np.median(lengths)) + 1) / 2)), most))
    packets = (index.keyframes + (lengths - 1) // 2)[:count].tolist()
    return pack(store, [index] * len(packets), packets)


def measure(clip: Clip, video: VideoFormat, gpu: int | None, threads: int, seconds: float) -> Rates:
    """Measure the speeds of NVDEC and of the CPU, each for half of the time.

    Both decode requests for single frames at full size, while the GPU has no other work.

    Args:
        clip: Clip to decode.
        video: Format of the clip.
        gpu: CUDA device whose NVDEC decodes. In tests, None for the CPU.
        threads: Number of decode threads of a Loader.
        seconds: Time limit in seconds. It does not interrupt a clip, and each decoder decodes at least two per thread.

    Raises:
        DecodeError: If a decoder fails.
    """
    on_nvdec, on_cpu = (_with_torchcodec(clip, video, threads, device) for device in (gpu, None))
    return Rates(_rate(on_nvdec, seconds / 2), _rate(on_cpu, seconds / 2))


def _with_torchcodec(clip: Clip, video: VideoFormat, num_threads: int, gpu: int | None) -> Callable[[], int]:
    """Return a function that decodes the clip once in each of `num_threads` threads, and returns the frame count."""
    from dali_stream.decode.resize import resize_on_gpu
    from dali_stream.decode.torchcodec import decode_clip_in_parts, frames_at_once
    from dali_stream.decode.torchcodec_cuda import device_name, own_stream

    size = video.height, video.width
    part = frames_at_once(size, gpu)

    def decode(_: int) -> int:
        decoded = 0
        with own_stream(gpu):
            for _requests, frames, _more in decode_clip_in_parts(clip, video, part, device_name(gpu)):
                decoded += len(frames if gpu is None else resize_on_gpu(frames, size))  # the copy to the CPU's memory counts
        return decoded

    def run() -> int:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="dali_stream speed") as pool:
            return sum(pool.map(decode, range(num_threads)))

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

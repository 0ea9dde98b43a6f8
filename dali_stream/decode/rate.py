"""Measured speed of NVDEC and of the CPU on the video of a camera, in frames per second.

A Loader with `decode="auto"` chooses by this measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dali_stream.decode.capability import engines
from dali_stream.decode.decoder import task_frames
from dali_stream.decode.turns import turns
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import Clip, pack
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store

_DECODED = 64  # approximate limit of the frames to decode for a packed clip
_BYTES = 64 << 20  # limit of the requested frames of a packed clip, in bytes, since each thread decodes such a clip
_FASTER = 1.5  # minimum ratio of DALI's speed to that of the CPU
_CLIPS = 16  # minimum number of clips of a batch for DALI


@dataclass(frozen=True)
class Rates:
    """Measured speed of two decoders on requests for single frames, in frames per second.

    Attributes:
        nvdec: Speed of NVDEC.
        cpu: Speed of the CPU, with torchcodec.
        decoder: Decoder of NVDEC, "dali" or "torchcodec-cuda". Default: "dali".
    """

    nvdec: float
    cpu: float
    decoder: str = "dali"

    @property
    def nvdec_is_faster(self) -> bool:
        """Whether `decode="auto"` takes NVDEC. Frames that DALI decodes are not cached, so DALI must be 1.5 times as fast."""
        return self.nvdec >= self.cpu * (_FASTER if self.decoder == "dali" else 1.0)

    def __str__(self) -> str:
        return f"NVDEC {self.nvdec:.0f} frames/s, the CPU {self.cpu:.0f}"


class RequestClips(NamedTuple):
    """Single frames from the first GOPs of a file, packed as the routes pack them.

    Attributes:
        singles: One clip per frame, for DALI.
        packed: One clip of all frames, for torchcodec.
    """

    singles: list[Clip]
    packed: Clip


def request_clips(store: Store, index: VideoIndex, gpu: int | None, decoder: str = "dali") -> RequestClips:
    """Pack one frame from the middle of each of the first GOPs of a file.

    Args:
        store: Store of the file.
        index: Index of the file.
        gpu: CUDA device, or None for DALI's decoder on the CPU.
        decoder: Decoder of NVDEC, "dali" or "torchcodec-cuda". Default: "dali".

    Raises:
        UnsafeForNvdec: If DALI would decode one of the clips wrongly on a GPU.
        DecodeError: If the file is damaged.
    """
    lengths = index.gop_lengths
    # A frame in the middle of a GOP costs about half of the GOP.
    video = index.format()
    most = min(task_frames((video.height, video.width)), _BYTES // (video.height * video.width * 3))
    count = max(1, min(int(_DECODED // ((float(np.median(lengths)) + 1) / 2)), most))
    packets = (index.keyframes + (lengths - 1) // 2)[:count].tolist()
    singles = [pack(store, [index], [packet], for_nvdec=gpu is not None) for packet in packets if decoder == "dali"]
    return RequestClips(singles, pack(store, [index] * len(packets), packets))


def measure(
    clips: RequestClips, video: VideoFormat, gpu: int | None, cameras: int, threads: int, seconds: float, decoder: str = "dali"
) -> Rates:
    """Measure the speeds of NVDEC and of the CPU, each for half of the time.

    Both decode requests for single frames at full size, while the GPU has no other work.

    Args:
        clips: Clips to decode.
        video: Format of the clips.
        gpu: CUDA device, or None for DALI's decoder on the CPU.
        cameras: Number of cameras that NVDEC decodes.
        threads: Number of decode threads of a Loader.
        seconds: Time limit in seconds. It does not interrupt a batch, and each decoder decodes at least two.
        decoder: Decoder of NVDEC, "dali" or "torchcodec-cuda". Default: "dali".

    Raises:
        DecodeError: If a decoder fails.
    """
    if decoder == "dali":
        nvdec = _with_dali(clips.singles, gpu, threads, cameras)
    else:
        nvdec = _with_torchcodec(clips.packed, video, threads, gpu)
    return Rates(_rate(nvdec, seconds / 2), _rate(_with_torchcodec(clips.packed, video, threads), seconds / 2), decoder)


def _with_dali(clips: list[Clip], gpu: int | None, num_threads: int, cameras: int) -> Callable[[], int]:
    """Return a function that decodes a batch with DALI, one frame per clip, and returns the number of frames."""
    from dali_stream.decode import dali

    threads = num_threads if gpu is None else dali.decode_threads(num_threads, engines(gpu), cameras)
    count = max(_CLIPS, 2 * threads)
    batch = [dali.encoded(clips[i % len(clips)]) for i in range(count)]
    pipeline = dali.pipeline(lambda: batch, count, gpu, threads, prefetch=1)

    def run() -> int:
        with turns(gpu).alone():
            try:
                pipeline.run()
            except RuntimeError as error:
                raise DecodeError(f"DALI's video decoder failed: {dali.explanation(error)}") from error
            if gpu is not None:
                import torch

                torch.cuda.synchronize(gpu)
        return count

    with turns(gpu).alone():
        pipeline.build()
    return run


def _with_torchcodec(clip: Clip, video: VideoFormat, num_threads: int, gpu: int | None = None) -> Callable[[], int]:
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

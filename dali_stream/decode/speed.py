"""Measured speed of NVDEC and of the CPU on the video of a camera, in frames per second.

The speeds are saved in a file in the user's cache folder. Without it, each rank of each run would measure them again, and
`decode="fastest"` could choose another decoder when a run is resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dali_stream import process
from dali_stream.decode.capability import driver_version, engines, gpus
from dali_stream.decode.route import Rates
from dali_stream.decode.turns import turns
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import Clip, pack
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.state_file import write_state
from dali_stream.storage import Store

LIMIT_S = 1.5
"""Time limit for measuring all cameras when a Loader starts, in seconds. It does not interrupt a batch."""
_REQUESTS, _DECODED = 8, 64  # limits of a clip for the CPU: requested frames, and approximate number of frames to decode
_CLIPS = 16  # minimum number of clips of a batch for DALI


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
    count = int(np.clip(_DECODED // ((median_gop(index) + 1) / 2), 1, _REQUESTS))
    packets = (index.keyframes + (lengths - 1) // 2)[:count].tolist()
    singles = [pack(store, [index], [packet], for_nvdec=gpu is not None) for packet in packets]
    return RequestClips(singles, pack(store, [index] * len(packets), packets))


class Speeds:
    """Speeds of the decoders on the cameras of a Loader.

    Args:
        num_threads: Number of decode threads of the Loader.
        cameras: Number of cameras that are stored as video. NVDEC is assumed to decode all of them.
        gpu: CUDA device, or None for DALI's decoder on the CPU.
    """

    def __init__(self, num_threads: int, cameras: int, gpu: int | None) -> None:
        self._num_threads, self._cameras, self._gpu = num_threads, cameras, gpu
        self._left, self._known = LIMIT_S, dict[str, Rates]()

    def of(self, video: VideoFormat, gop: int, clips: Callable[[], RequestClips]) -> Rates:
        """Return the speeds for a kind of video. They are measured unless a Loader on this machine has measured them before.

        Args:
            video: Format of the video.
            gop: Median length of its GOPs.
            clips: Function that returns clips to measure with. It is called only if the speeds are unknown.

        Raises:
            DecodeError: If a decoder fails.
        """
        kind = self._describe(video, gop)
        if kind not in self._known:
            rates = _read(kind)
            if rates is None:
                seconds = self._left / 2  # the other half remains for cameras with other codecs and sizes
                self._left -= seconds
                rates = measure(clips(), video, self._gpu, self._num_threads, self._cameras, seconds)
                _keep(kind, rates)
            self._known[kind] = rates
        return self._known[kind]

    def _describe(self, video: VideoFormat, gop: int) -> str:
        """Return a text with everything that the speeds depend on: machine, libraries, threads, cameras and kind of video."""
        import nvidia.dali
        import torchcodec

        return ", ".join(
            (
                "DALI on the CPU" if self._gpu is None else f"{gpus()[self._gpu].name}, driver {driver_version()}",
                f"{process.processor()}, {self._num_threads} threads, {self._cameras} cameras",
                f"DALI {nvidia.dali.__version__}, torchcodec {torchcodec.__version__}",
                f"{video.codec} {video.pixel_format} {video.height}×{video.width}, GOP {gop}",
            )
        )


def measure(clips: RequestClips, video: VideoFormat, gpu: int | None, num_threads: int, cameras: int, seconds: float) -> Rates:
    """Measure the speeds of DALI and of torchcodec, each for half of the time.

    Both decode requests for single frames at full size, with as many threads as in a Loader, while the GPU has no other work.

    Args:
        clips: Clips to decode.
        video: Format of the clips.
        gpu: CUDA device, or None for DALI's decoder on the CPU.
        num_threads: Number of decode threads of the Loader.
        cameras: Number of cameras that NVDEC decodes.
        seconds: Time limit in seconds. At least one batch of each decoder is measured, even if it takes longer.

    Raises:
        DecodeError: If a decoder fails.
    """
    return Rates(
        _rate(_with_dali(clips.singles, gpu, num_threads, cameras), seconds / 2),
        _rate(_with_torchcodec(clips.packed, video, num_threads), seconds / 2),
    )


def median_gop(index: VideoIndex) -> int:
    """Return the median length of a file's GOPs, in frames."""
    return max(int(np.median(index.gop_lengths)), 1)


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


def _read(kind: str) -> Rates | None:
    """Return the speeds that `_keep` has saved, or None if they are missing."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        return Rates(**json.loads(_file().read_bytes())[kind])
    return None


def _keep(kind: str, rates: Rates) -> None:
    """Save speeds for later Loaders, if the cache folder is writable.

    If two processes write at the same time, the speeds of one may be lost. The next Loader then measures them again.
    """
    with contextlib.suppress(OSError, RuntimeError):
        file, kept = _file(), {}
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept = dict(json.loads(file.read_bytes()))
        write_state(file, kept | {kind: dataclasses.asdict(rates)})


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dali_stream" / "decode_speed.json"

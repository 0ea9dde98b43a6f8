"""Decoding with torchcodec on NVDEC, from a separate clip for each sample. This module has not been run on a GPU yet.

torchcodec takes the time of a frame from the decoded frame itself. Each frame is therefore compared with its request, as on the
CPU (`torchcodec.decode_in_parts`). With the device "cpu", the same code runs without a GPU, but without CUDA streams and
without the limit on sessions.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator

import numpy as np
import torch
import torchcodec

from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.decode.capability import engines
from dali_stream.decode.dali import SESSIONS_PER_ENGINE
from dali_stream.decode.decoder import Pool
from dali_stream.decode.sample_decoder import Int64, Request, SampleDecoder, SampleWork
from dali_stream.decode.torchcodec import decode_in_parts
from dali_stream.errors import DatasetError, DecodeError, StorageError
from dali_stream.lerobot.source import Source
from dali_stream.observe.counters import Counters
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store

_LEAST = (0, 14)  # minimum version of torchcodec
_LEAST_CUDA = 13  # minimum major version of CUDA
_CACHED = 100  # number of NVDEC decoders that torchcodec caches per GPU, the same as in DALI; each session uses one
_of_thread = threading.local()


def unavailable(gpu: int | None) -> str:
    """Return why torchcodec cannot decode on the GPU, and what to install. The text is empty if it can."""
    if gpu is None:
        return "batches are made on the CPU"
    cuda = torch.version.cuda
    release = tuple(map(int, re.findall(r"\d+", torchcodec.__version__)[:2]))
    if release >= _LEAST and not torchcodec.__version__.endswith("+cpu") and cuda and int(cuda.split(".")[0]) >= _LEAST_CUDA:
        return ""
    return (
        f"torchcodec {torchcodec.__version__} and torch {torch.__version__} do not decode on a GPU. Install torch for CUDA 13 "
        "and torchcodec 0.14 or later, which needs driver 580 or later: pip install --upgrade torch 'torchcodec>=0.14'"
    )


class TorchcodecCudaDecoder(SampleDecoder):
    """`Decoder` of a camera's video that decodes on a GPU.

    Each result of its `SampleWork` has the frames of a sample on the device, uint8, shape (T, H, W, 3).

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        counters: Counters of the Loader.
        gpu: CUDA device, or None to decode on the CPU in tests.
        any_size: See `VideoFiles`.
    """

    def __init__(self, source: Source, key: str, counters: Counters, gpu: int | None, any_size: bool = False) -> None:
        super().__init__(source, key, counters, any_size)
        self._gpu, self._device = gpu, device_name(gpu)
        if gpu is not None:
            _sessions(gpu)  # created here, because several decode threads could otherwise create it at the same time

    def start(self, pool: Pool, plan: BatchPlan, frames: Int64, episodes: OpenEpisodes, store: Store) -> SampleWork:
        """See `Decoder.start`."""
        work = SampleWork(len(frames))
        self.start_samples(work, pool, plan, frames, episodes, store)
        return work

    def make(self, store: Store, request: Request, work: SampleWork) -> None:
        """Decode each frame of a window once, and copy it to all steps that show it."""
        unique, steps = np.unique(request.packets, return_inverse=True)
        video, timed, decoded = self.format(request.file, int(unique[0])), self._counters.timed, 0
        try:
            with own_stream(self._gpu), timed("decode_s"):
                frames = torch.empty((len(unique), video.height, video.width, 3), dtype=torch.uint8, device=self._device)
                indices = [request.file] * len(unique)
                for requests, part, more in decode_in_parts(
                    store, indices, unique.tolist(), video, len(unique), timed, self._device
                ):
                    frames[requests] = part
                    decoded += more
                work.results[request.row] = frames[steps.reshape(-1).tolist()]
        except DecodeError as error:
            work.failed[request.row] = self.named(request.episode, request.frames, request.file, error)
        except (DatasetError, StorageError) as error:
            work.failed[request.row] = error.with_traceback(None)
        self._counters.add(clips=1, decoded_frames=decoded)


def device_name(gpu: int | None) -> str:
    """Return torch's name of a GPU, or of the CPU for None."""
    return "cpu" if gpu is None else f"cuda:{gpu}"


@contextlib.contextmanager
def own_stream(gpu: int | None) -> Iterator[None]:
    """Context manager that uses a CUDA stream of this thread and one decoding session, and finally waits for the stream.

    It does nothing if `gpu` is None.
    """
    if gpu is None:
        yield
        return
    streams = _of_thread.__dict__.setdefault("streams", {})
    if gpu not in streams:
        streams[gpu] = torch.cuda.Stream(device_name(gpu))
    with _sessions(gpu), torch.cuda.stream(streams[gpu]):
        yield
        streams[gpu].synchronize()


@functools.cache
def _sessions(gpu: int) -> threading.BoundedSemaphore:
    """Return the semaphore that limits the decoding sessions of a GPU, for all cameras and Loaders of this process."""
    from torchcodec.decoders import set_nvdec_cache_capacity  # imported on use: versions that `unavailable` refuses may lack it

    set_nvdec_cache_capacity(_CACHED)
    return threading.BoundedSemaphore(SESSIONS_PER_ENGINE * engines(gpu))

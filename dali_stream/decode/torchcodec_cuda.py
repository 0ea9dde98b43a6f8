"""Decoding with torchcodec on NVDEC, from clips of several samples.

torchcodec takes the time of a frame from the decoded frame itself. Each frame is therefore compared with its request, as on the
CPU (`torchcodec.decode_in_parts`). With the device "cpu", the same code runs without a GPU, but without CUDA streams and
without the limit on sessions.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torchcodec

from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.decode.capability import engines
from dali_stream.decode.dali import SESSIONS_PER_ENGINE
from dali_stream.decode.decoder import Pool
from dali_stream.decode.refusal import refusal_of_torchcodec
from dali_stream.decode.sample_decoder import Request, SampleDecoder, SampleWork
from dali_stream.decode.torchcodec import decode, decode_in_parts
from dali_stream.errors import DatasetError, DecodeError, StorageError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store

CLIP_FRAMES = 32
"""Number of frames of a clip, since opening a clip takes time.

On an H100, 16 threads decoded 1,717 frames/s of 480×640 from clips of one frame, 9,085 from clips of 16, and 11,684 from clips
of 64 (H.264 with GOP 2, 2026-11-26; report: benchmarks/results/h100/nvdec_decoders.json)."""
_LEAST = (0, 14)  # minimum version of torchcodec
_LEAST_CUDA = 13  # minimum major version of CUDA
_creating = threading.Lock()  # held while streams are created, since decode threads may need the first ones at the same time
_CACHED = 100  # number of NVDEC decoders that torchcodec caches per GPU, the same as in DALI; each session uses one


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

    def start(self, pool: Pool, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> SampleWork:
        """See `Decoder.start`."""
        work = SampleWork(len(plan.samples.episode))
        together: dict[VideoFormat, list[Request]] = {}  # the requests of a task have frames of the same size
        for request in self.requests(work, plan, episodes):
            together.setdefault(self.format(request.file, int(request.packets[0])), []).append(request)
        samples = max(CLIP_FRAMES // plan.shown_in_episode[self.key].shape[1], 1)
        for video, requests in together.items():
            for start in range(0, len(requests), samples):
                work.tasks.append(pool.submit(self._decode, store, requests[start : start + samples], video, work))
        return work

    def check(self, index: VideoIndex, packet: int) -> None:
        """Check whether NVDEC may decode a file.

        Raises:
            RouteChange: If NVDEC must not decode the file.
        """
        if reason := refusal_of_torchcodec(self._gpu, self.format(index, packet), index):
            raise self.change(index, reason)

    def _decode(self, store: Store, requests: Sequence[Request], video: VideoFormat, work: SampleWork) -> None:
        """Decode the frames of some samples. If they cannot be decoded together, decode each sample separately.

        Raises:
            RouteChange: If NVDEC cannot decode a sample, and the CPU can, or if the GPU's memory is not enough.
        """
        try:
            self._decode_together(store, requests, video, work)
            return
        except (DecodeError, DatasetError, StorageError) as error:
            failure = error.with_traceback(None)  # the traceback would keep the frames
        except torch.OutOfMemoryError as error:
            raise self.change(requests[0].file, f"the GPU's memory is not enough for {len(requests)} samples") from error
        if len(requests) > 1:
            for request in requests:
                self._decode(store, [request], video, work)
            return
        [request] = requests
        if isinstance(failure, DecodeError):
            try:  # also if the clip is unsafe for NVDEC
                decode(store, [request.file] * len(request.packets), request.packets.tolist(), video)
            except (DecodeError, DatasetError, StorageError) as error:
                self.fail(work, request, error)
                return
            raise self.change(request.file, failure) from failure
        self.fail(work, request, failure)

    def _decode_together(self, store: Store, requests: Sequence[Request], video: VideoFormat, work: SampleWork) -> None:
        """Decode each frame of each window once, and copy it to all steps that show it."""
        uniques = [np.unique(request.packets, return_inverse=True) for request in requests]
        indices = [request.file for request, (unique, _) in zip(requests, uniques, strict=True) for _ in unique]
        packets = [packet for unique, _ in uniques for packet in unique.tolist()]
        timed, decoded, start = self._counters.timed, 0, 0
        try:
            with own_stream(self._gpu), timed("decode_s"):
                frames = torch.empty((len(packets), video.height, video.width, 3), dtype=torch.uint8, device=self._device)
                for places, part, more in decode_in_parts(store, indices, packets, video, len(packets), timed, self._device):
                    frames[places] = part
                    decoded += more
                for request, (unique, steps) in zip(requests, uniques, strict=True):
                    own = frames[start : start + len(unique)]
                    in_order = len(unique) == len(request.packets) and (np.diff(request.packets) > 0).all()
                    work.results[request.row] = own if in_order else own[steps.reshape(-1).tolist()]
                    start += len(unique)
        finally:
            self._counters.add(clips=1, decoded_frames=decoded)


def device_name(gpu: int | None) -> str:
    """Return torch's name of a GPU, or of the CPU for None."""
    return "cpu" if gpu is None else f"cuda:{gpu}"


@contextlib.contextmanager
def own_stream(gpu: int | None) -> Iterator[None]:
    """Context manager that uses a CUDA stream and a decoding session alone, and finally waits for the stream.

    If all of them are in use, it waits for one. It does nothing if `gpu` is None.
    """
    if gpu is None:
        yield
        return
    with _creating:
        streams = _streams(gpu)
    stream = streams.get()
    try:
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()
    finally:
        streams.put(stream)


def release_decoders(gpu: int) -> None:
    """Free the decoders that torchcodec keeps on a GPU, and the memory of their frames, after a trial."""
    from torchcodec.decoders import set_nvdec_cache_capacity  # see `_streams`

    set_nvdec_cache_capacity(0)
    set_nvdec_cache_capacity(_CACHED)
    with torch.cuda.device(gpu):
        torch.cuda.empty_cache()


@functools.cache
def _streams(gpu: int) -> queue.LifoQueue[torch.cuda.Stream]:
    """Return the streams of a GPU, for all cameras and Loaders of this process: one per decoding session.

    torch keeps freed memory per stream. The queue returns the stream that was used last, so few streams keep memory if few
    threads decode.
    """
    from torchcodec.decoders import set_nvdec_cache_capacity  # imported on use: versions that `unavailable` refuses may lack it

    set_nvdec_cache_capacity(_CACHED)
    streams = queue.LifoQueue[torch.cuda.Stream]()
    for _ in range(SESSIONS_PER_ENGINE * engines(gpu)):
        streams.put(torch.cuda.Stream(device_name(gpu)))
    return streams

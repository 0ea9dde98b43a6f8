"""torchcodec's decoder on NVDEC: whether it can be used, its CUDA streams, and its cache of decoders.

`TorchcodecDecoder` decodes on the CPU or on NVDEC. Both put their frames into the same slots in the CPU's memory, so
frames that NVDEC decoded are also cached for later batches and on disk.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator

import torch

from dali_stream.cache.gpu_slots import on_stream
from dali_stream.decode.capability import SESSIONS_PER_ENGINE, engines
from dali_stream.system.torchcodec_import import NVDEC_REMEDY, explained_import, refusal_on_nvdec

with explained_import():
    import torchcodec

_creating = threading.Lock()  # held while streams are created, since decode threads may need the first ones at the same time
_CACHED = 100  # number of NVDEC decoders that torchcodec caches per GPU, the same as in DALI; each session uses one


def unavailable(gpu: int | None) -> str:
    """Return why torchcodec cannot decode on the GPU, and what to install. The text is empty if it can."""
    if gpu is None:
        return "batches are made on the CPU"
    refused = refusal_on_nvdec(torchcodec.__version__, torch.__version__, torch.version.cuda)
    return f"{refused}. Install them: {NVDEC_REMEDY}" if refused else ""


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
        with on_stream(stream):
            yield
    finally:
        streams.put(stream)


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

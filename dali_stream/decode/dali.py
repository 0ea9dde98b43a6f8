"""The DALI route: frames out of packed clips, on NVDEC where there is a GPU, else VP8, VP9 and MJPEG on the CPU.

The loader has the operator in its pipeline; `decode` runs it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DaliStreamError, DecodeError

try:
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import OperatorConcurrency, Pipeline, StreamPolicy
except ImportError as error:
    raise DaliStreamError(
        f"NVIDIA DALI cannot be imported ({error}); install it with `pip install 'dali-stream[cuda12]'` (driver 525 or later) "
        "or `pip install 'dali-stream[cuda13]'` (driver 580 or later), never both"
    ) from error

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode

    from dali_stream.mp4.clip import Clip

Frames = npt.NDArray[np.uint8]
Encoded = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]  # a clip's bytes, and which frames of it, rising and each once

COLOUR_TOLERANCE = 4.0
"""How far DALI's frames may be from FFmpeg's: mean absolute difference of 8 bit RGB values. DALI upsamples chroma and
converts to RGB in its own way, so the two are never equal; 1.6 was measured with VP9 on a CPU. It does not tell BT.709 from
BT.601, which are 2.6 apart on a demo frame: that is told by what a file says of its colours."""

STREAMS, CONCURRENCY = StreamPolicy.SINGLE, OperatorConcurrency.BACKEND
"""Of every pipeline; read when one is made. With a stream per backend, DALI's default, a decoder's buffers may go to another
operator while they are still copied from (read in DALI 2.4's sources; not run on a GPU). `benchmarks/gpu_settings.py` tries the
alternatives."""


def empty_pipeline(batch_size: int, gpu: int | None, threads: int, prefetch: int) -> Pipeline:
    """A pipeline without operators, with the executor's settings that all pipelines share.

    Args:
        batch_size: samples of a batch at most.
        gpu: the CUDA device; None on a CPU.
        threads: of the decoder and other operators.
        prefetch: batches that it is ahead.
    """
    return Pipeline(
        batch_size=batch_size,
        num_threads=threads,
        device_id=gpu,
        prefetch_queue_depth=prefetch,
        exec_dynamic=True,  # its buffers are handed to torch without a copy
        stream_policy=STREAMS,
        concurrency=CONCURRENCY,
    )


def operator(clips: DataNode, frames: DataNode, gpu: int | None) -> DataNode:
    """The decoder in a pipeline.

    Args:
        clips: MP4s in memory, one a sample.
        frames: per sample, which frames of it, rising and each once: DALI would decode from the beginning again for one
            that is repeated.
        gpu: the CUDA device; None on a CPU.

    Returns:
        (F, H, W, 3) uint8 RGB a sample.
    """
    # pad_mode "none" makes a frame that is not there an error; other modes return padding without a word. affine pins
    # threads to cores, to the same ones in every process of a machine.
    device = "cpu" if gpu is None else "mixed"
    return fn.decoders.video(clips, device=device, frames=frames, pad_mode="none", affine=False)


def encoded(clip: Clip) -> Encoded:
    """A clip as `pipeline` and `decode` take it, if its frames are rising and each once."""
    return np.frombuffer(clip.data, np.uint8), np.array(clip.frames, np.int32)


def pipeline(
    source: Callable[[], Sequence[Encoded]], batch_size: int, gpu: int | None, threads: int, prefetch: int
) -> Pipeline:
    """A pipeline that does nothing but decode.

    Args:
        source: gives a batch of clips each time it is called.
        batch_size: how many those are at most.
        gpu: the CUDA device; None on a CPU.
        threads: of the decoder.
        prefetch: batches that it is ahead.
    """
    made = empty_pipeline(batch_size, gpu, threads, prefetch)
    with made:
        clips, frames = fn.external_source(
            lambda: [list(parts) for parts in zip(*source(), strict=True)],
            num_outputs=2, dtype=[types.UINT8, types.INT32], ndim=[1, 1],
        )  # fmt: skip
        made.set_outputs(operator(clips, frames, gpu))
    return made


def decode(clips: Sequence[Encoded], gpu: int | None, threads: int) -> list[Frames]:
    """Decodes clips in one batch.

    Args:
        clips: the batch.
        gpu: the CUDA device; None on a CPU.
        threads: of the decoder.

    Returns:
        Per clip, (F, H, W, 3) uint8 RGB, in the CPU's memory.

    Raises:
        DecodeError: DALI cannot decode one of them.
    """
    decoder = pipeline(lambda: clips, len(clips), gpu, threads, prefetch=1)
    try:
        decoder.build()
        [decoded] = decoder.run()
        on_cpu = decoded if gpu is None else decoded.as_cpu()
        return [np.array(on_cpu.at(i)) for i in range(len(clips))]
    except RuntimeError as error:
        raise DecodeError(f"DALI's video decoder failed: {explanation(error)}") from error


def explanation(error: RuntimeError) -> str:
    """What an operator of a pipeline says, without the traceback around it."""
    text = str(error).partition("encountered:")[2] or str(error)
    return " ".join(text.partition("C++ context")[0].split())[:300]

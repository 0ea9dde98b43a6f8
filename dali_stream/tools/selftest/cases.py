"""Tests the decoders of a GPU on videos that the Loader refuses to decode with NVDEC through DALI.

The results show whether these refusals are necessary, and how torchcodec's NVDEC decoder handles the same clips.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dali_stream.decode import dali, torchcodec_cuda
from dali_stream.decode.capability import capability
from dali_stream.decode.route import TORCHCODEC_CUDA, refusal_of_file
from dali_stream.demo import stamp
from dali_stream.demo.encode import CODECS, Codec, encode_video
from dali_stream.errors import DecodeError
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore
from dali_stream.tools import environment
from dali_stream.tools.selftest import identity, videos
from dali_stream.tools.selftest.identity import Request
from dali_stream.tools.selftest.videos import Video

_FRAMES, _CLIPS = 52, 12
_TIMED = 50  # number of timed clips of one frame; their time shows whether each clip creates a new NVDEC decoder
DECODERS = ("dali", TORCHCODEC_CUDA)


class Case(NamedTuple):
    """Encoder, size (height, width), and GOP length in frames of a video."""

    codec: Codec
    size: tuple[int, int]
    gop: int


def _x264(params: str) -> Codec:
    return Codec("libx264", None, "veryfast", {"x264-params": f"keyint={{gop}}:{params}"})


def _x265(block: int) -> Codec:
    params = f"open-gop=0:scenecut=0:keyint={{gop}}:min-keyint={{gop}}:bframes=0:min-cu-size={block}:log-level=none"
    return Codec("libx265", None, "ultrafast", {"x265-params": params})


CASES = {
    "h264 without IDR frames": Case(_x264("open-gop=1:bframes=1:b-adapt=0"), (240, 320), 13),
    "h264, interlaced": Case(_x264("tff=1"), (240, 320), 12),
    "hevc of 360 lines in 368": Case(_x265(16), (360, 640), 4),
    "hevc of 360 lines in 384": Case(_x265(32), (360, 640), 4),
    "hevc of 720 lines in 736": Case(_x265(32), (720, 640), 4),
    "av1 of odd size": Case(Codec("libaom-av1", 30, None, {"cpu-used": 8, "lag-in-frames": 0}), (241, 321), 2),
    "vp9 of odd size": Case(CODECS["vp9"], (241, 321), 12),
}


def measure(case: str, decoder: str, gpu: int | None) -> dict[str, Any]:
    """Write the video of a case, and decode frames of it.

    Args:
        case: Name in `CASES`.
        decoder: Name in `DECODERS`.
        gpu: Index of the CUDA device. None for the CPU, where "torchcodec-cuda" is torchcodec's decoder for the CPU.

    Returns:
        A dict with

        - `refused`: Reason why the Loader does not use the decoder for this video. Empty if it does.
        - `shapes`: See `identity.measure`.
        - `clip_ms`: Median time of a clip of one frame in milliseconds, without the first clip. None if the decoder fails.
        - `gpu_growth`: Growth of the GPU memory in use over these clips, in bytes. None on a CPU, or if the decoder fails.
    """
    with tempfile.TemporaryDirectory(prefix="dali_stream-case-") as folder:
        try:
            video = _write(CASES[case], Path(folder))
            refused = _refusal(video, decoder, gpu)
        except RuntimeError as error:
            video, refused = None, f"the video cannot be written: {str(error)[:200]}"
        if video is None or (decoder == TORCHCODEC_CUDA and refused):
            return {"refused": refused, "shapes": {}, "clip_ms": None, "gpu_growth": None}
        decode = functools.partial(_DECODE[decoder], gpu)
        shapes = {shape: identity.measure_shape([([video], _CLIPS)], shape, decode) for shape in videos.SHAPES}
        clip_ms, growth = _time_clips(video, decode, gpu)
    return {"refused": refused, "shapes": shapes, "clip_ms": clip_ms, "gpu_growth": growth}


def _refusal(video: Video, decoder: str, gpu: int | None) -> str:
    if decoder == "dali":
        return refusal_of_file(gpu, video.format, video.table, video.store)
    if gpu is None:
        return ""
    form = video.format
    return torchcodec_cuda.unavailable(gpu) or capability(gpu, form.codec, form.chroma, form.depth).refusal(
        form.height, form.width
    )


def _decode_with_torchcodec(gpu: int | None, requests: Sequence[Request]) -> list[dali.Frames]:
    with torchcodec_cuda.own_stream(gpu):
        return [video.frames(shown, torchcodec_cuda.device_name(gpu)) for video, shown in requests]


_DECODE = {"dali": identity.decode_with_dali, TORCHCODEC_CUDA: _decode_with_torchcodec}


def _time_clips(
    video: Video, decode: Callable[[Sequence[Request]], list[dali.Frames]], gpu: int | None
) -> tuple[float | None, int | None]:
    """Return the median time of a clip of one frame in milliseconds, and the growth of the GPU memory in use in bytes."""
    frames, times = np.random.default_rng(0).integers(len(video.identity), size=_TIMED).tolist(), []
    try:
        decode([(video, [0])])
        before = environment.gpu_bytes_used(gpu)
        for frame in frames:
            started = time.perf_counter()
            decode([(video, [frame])])
            times.append(time.perf_counter() - started)
    except DecodeError:
        return None, None
    after = environment.gpu_bytes_used(gpu)
    return 1000 * statistics.median(times), None if before is None or after is None else after - before


def _write(case: Case, folder: Path) -> Video:
    """Write a video whose frames contain their identity. Raises RuntimeError if FFmpeg cannot encode it."""
    encode_video(_draw(case.size), folder / "video.mp4", codec=case.codec, gop=case.gop, fps=20)
    store = LocalStore(str(folder))
    table = read_index(store, "video.mp4")
    return Video(store, table, describe(table.configs[0]), np.array([(0, frame, 0) for frame in range(_FRAMES)]))


def _draw(size: tuple[int, int]) -> dali.Frames:
    """Draw a pattern that moves by two pixels per frame."""
    height, width = size
    row, column = np.mgrid[:height, : width + 2 * _FRAMES]
    waves = [np.sin(row / period) * np.cos(column / (period + 6)) for period in (11, 17, 23)]
    pattern = (128 + 60 * np.stack(waves, axis=-1)).astype(np.uint8)
    images = np.stack([pattern[:, 2 * i : 2 * i + width] for i in range(_FRAMES)])
    for frame, image in enumerate(images):
        stamp(image, 0, frame, 0)
    return images

"""Tests whether a decoder delivers the requested frames of a video, with the same colours as FFmpeg.

`identity` tests DALI's decoder. `case` tests the decoders of a GPU on videos that the Loader refuses to decode with
NVDEC through DALI. Its results show whether these refusals are necessary, and how torchcodec's NVDEC decoder handles the same
clips.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dali_stream.decode import dali, torchcodec_cuda
from dali_stream.decode.refusal import capability_refusal, refusal_of_file, refusal_of_torchcodec
from dali_stream.decode.route import TORCHCODEC_CUDA
from dali_stream.demo import stamp
from dali_stream.demo.encode import CODECS, Codec, encode_video
from dali_stream.errors import DecodeError
from dali_stream.storage import LocalStore
from dali_stream.tools import environment
from dali_stream.tools.selftest import videos
from dali_stream.tools.selftest.videos import SHAPES, Video

FrameRequest = tuple[Video, list[int]]  # video, and numbers of its frames in display order
Decode = Callable[[Sequence[FrameRequest]], list[dali.Frames]]  # function that returns the frames of each request
# Number of clips in the batch that mixes all videos, and in the batch of each folder if `identity` gets several folders. Two
# threads decode a batch, so each decoder is reused for many clips.
_CLIPS, _FEW = 24, 6
_CASE_FRAMES, _CASE_CLIPS = 52, 12  # numbers of frames of the video of a case, and of clips in a batch
_TIMED = 50  # number of timed clips of one frame; their time shows whether each clip creates a new NVDEC decoder


def _x264(params: str) -> Codec:
    return Codec("libx264", None, "veryfast", {"x264-params": f"keyint={{gop}}:{params}"})


def _x265(block: int) -> Codec:
    params = f"open-gop=0:scenecut=0:keyint={{gop}}:min-keyint={{gop}}:bframes=0:min-cu-size={block}:log-level=none"
    return Codec("libx265", None, "ultrafast", {"x265-params": params})


Case = tuple[Codec, tuple[int, int], int]  # encoder, size (height, width), and GOP length in frames of a video
CASES: dict[str, Case] = {
    "h264 without IDR frames": (_x264("open-gop=1:bframes=1:b-adapt=0"), (240, 320), 13),
    "h264, interlaced": (_x264("tff=1"), (240, 320), 12),
    "hevc of 360 lines in 368": (_x265(16), (360, 640), 4),
    "hevc of 360 lines in 384": (_x265(32), (360, 640), 4),
    "hevc of 720 lines in 736": (_x265(32), (720, 640), 4),
    "av1 of odd size": (Codec("libaom-av1", 30, None, {"cpu-used": 8, "lag-in-frames": 0}), (241, 321), 2),
    "vp9 of odd size": (CODECS["vp9"], (241, 321), 12),
}


def identity(folders: list[str], gpu: int | None) -> list[dict[str, Any]]:
    """Decode frames of the videos of these folders: one folder after the other, and then all of them mixed.

    DALI keeps its decoders until the process ends, so the test detects state of earlier videos that affects later ones.

    Args:
        folders: Folders of demo datasets of one codec. Frame sizes and GOPs may differ.
        gpu: Index of the CUDA device. None for the CPU.

    Returns:
        The row of `measure_shape` for each shape, with `refused`, the reason why the Loader would decode one of these videos
        with torchcodec. It is empty if the Loader would not.
    """
    groups = [videos.read(folder) for folder in folders]
    mixed = [video for group in groups for video in group]
    refused = next(filter(None, (refusal_of_file(gpu, video.format, video.table, video.store) for video in mixed)), "")
    batches = [(mixed, _CLIPS)] if len(groups) == 1 else [*((group, _FEW) for group in groups), (mixed, _CLIPS)]
    decode = functools.partial(_decode_with_dali, gpu)
    return [{"refused": refused, **measure_shape(shape, batches, decode)} for shape in SHAPES]


def measure_shape(shape: str, batches: list[tuple[list[Video], int]], decode: Decode) -> dict[str, Any]:
    """Decode batches of requests of a shape.

    Args:
        shape: Name in `SHAPES`.
        batches: (videos, number of requests) of each batch. Each video gets about the same number of requests.
        decode: Function that returns the frames of each request.

    Returns:
        A row with `shape`, `frames`, `wrong`, `mean_error` and `failed`. These are the name of the shape, the number of
        requested frames, the number of frames that are not the requested ones, the mean absolute difference of 8-bit RGB values
        to FFmpeg's frames, and the decoder's error, if any.
    """
    rng = np.random.default_rng([*SHAPES[shape], len(batches)])
    count, wrong, errors, failed = 0, 0, [], ""
    for group, clips in batches:
        chosen = [group[number % len(group)] for number in rng.permutation(clips).tolist()]
        requests = [(video, videos.request(shape, len(video.identity), rng)) for video in chosen]
        requested = sum(len(shown) for _, shown in requests)
        count += requested
        try:
            decoded = decode(requests)
        except DecodeError as error:
            wrong, failed = wrong + requested, failed or str(error)
            continue
        for (video, shown), frames in zip(requests, decoded, strict=True):
            expected = video.frames(shown)
            if frames.shape != expected.shape:
                wrong += len(shown)
                continue
            errors.append(np.abs(frames.astype(np.int16) - expected).mean())
            wrong += videos.count_wrong(frames, video.identity[shown])
    mean_error = float(np.mean(errors)) if errors and not failed else None
    return {"shape": shape, "frames": count, "wrong": wrong, "mean_error": mean_error, "failed": failed}


def case(name: str, decoder: str, gpu: int | None) -> list[dict[str, Any]]:
    """Write the video of a case, and decode frames of it.

    Args:
        name: Name in `CASES`.
        decoder: Name in `DECODERS`.
        gpu: Index of the CUDA device. None for the CPU, where "torchcodec-cuda" is torchcodec's decoder for the CPU.

    Returns:
        The row of `measure_shape` for each shape, with `refused`, the reason why the Loader does not use the decoder for this
        video (empty if it does), and the entries of `_time_clips`. If nothing is decoded, the only row has only `refused`.
    """
    with tempfile.TemporaryDirectory(prefix="dali_stream-case-") as folder:
        try:
            video = _write(CASES[name], Path(folder))
        except RuntimeError as error:
            return [{"refused": f"the video cannot be written: {str(error)[:200]}"}]
        if decoder == TORCHCODEC_CUDA and (impossible := _impossible(video, gpu)):
            return [{"refused": impossible}]
        judge = refusal_of_file if decoder == "dali" else refusal_of_torchcodec
        refused = judge(gpu, video.format, video.table, video.store)
        decode = functools.partial(DECODERS[decoder], gpu)
        rows = [{"refused": refused, **measure_shape(shape, [([video], _CASE_CLIPS)], decode)} for shape in SHAPES]
        times = _time_clips(video, decode, gpu)
        return [row | times for row in rows]


def _impossible(video: Video, gpu: int | None) -> str:
    """Return why torchcodec cannot decode a video on NVDEC at all. The text is empty if it can, or without a GPU."""
    return "" if gpu is None else torchcodec_cuda.unavailable(gpu) or capability_refusal(gpu, video.format)


def _decode_with_dali(gpu: int | None, requests: Sequence[FrameRequest]) -> list[dali.Frames]:
    """Decode the frames of each request with DALI, in one batch."""
    return dali.decode([dali.encoded(video.clip(shown)) for video, shown in requests], gpu, min(2, len(requests)))


def _decode_with_torchcodec(gpu: int | None, requests: Sequence[FrameRequest]) -> list[dali.Frames]:
    with torchcodec_cuda.own_stream(gpu):
        return [video.frames(shown, torchcodec_cuda.device_name(gpu)) for video, shown in requests]


DECODERS = {"dali": _decode_with_dali, TORCHCODEC_CUDA: _decode_with_torchcodec}


def _time_clips(video: Video, decode: Decode, gpu: int | None) -> dict[str, Any]:
    """Return measurements of clips of one frame, or an empty dict if the decoder fails.

    - `clip_ms`: Median time of a clip in milliseconds, without the first clip.
    - `gpu_growth`: Growth of the GPU memory in use over these clips, in bytes. None on a CPU.
    """
    frames, times = np.random.default_rng(0).integers(len(video.identity), size=_TIMED).tolist(), []
    try:
        decode([(video, [0])])
        before = environment.gpu_bytes_used(gpu)
        for frame in frames:
            started = time.perf_counter()
            decode([(video, [frame])])
            times.append(time.perf_counter() - started)
    except DecodeError:
        return {}
    after = environment.gpu_bytes_used(gpu)
    growth = None if before is None or after is None else after - before
    return {"clip_ms": 1000 * statistics.median(times), "gpu_growth": growth}


def _write(encoded: Case, folder: Path) -> Video:
    """Write a video whose frames contain their identity. Raises RuntimeError if FFmpeg cannot encode it."""
    codec, size, gop = encoded
    encode_video(_draw(*size), folder / "video.mp4", codec=codec, gop=gop, fps=20)
    return Video(LocalStore(str(folder)), "video.mp4", [(0, frame, 0) for frame in range(_CASE_FRAMES)])


def _draw(height: int, width: int) -> dali.Frames:
    """Draw a pattern that moves by two pixels per frame."""
    row, column = np.mgrid[:height, : width + 2 * _CASE_FRAMES]
    waves = [np.sin(row / period) * np.cos(column / (period + 6)) for period in (11, 17, 23)]
    pattern = (128 + 60 * np.stack(waves, axis=-1)).astype(np.uint8)
    images = np.stack([pattern[:, 2 * i : 2 * i + width] for i in range(_CASE_FRAMES)])
    for frame, image in enumerate(images):
        stamp(image, 0, frame, 0)
    return images

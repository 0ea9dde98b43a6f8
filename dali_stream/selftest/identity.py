"""Whether DALI's decoder delivers the pictures that are asked for, in the colours that FFmpeg gives them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dali_stream.demo import read_identity
from dali_stream.errors import DecodeError
from dali_stream.selftest import videos
from dali_stream.selftest.videos import SHAPES, Video
from dali_stream.video import dali
from dali_stream.video.clip import Clip
from dali_stream.video.decode import decode_clip
from dali_stream.video.route import refusal_of_file

_CLIPS = 24  # of one batch, decoded by two threads: every decoder is used for many of them


def measure(folders: list[str], gpu: int | None) -> dict[str, Any]:
    """Asks for pictures of all videos of these folders, mixed, in a batch per shape of request.

    Args:
        folders: of demo datasets of one codec; pictures may differ in size, and GOPs in length.
        gpu: the CUDA device; None on a CPU.

    Returns:
        `refused`, why the loader would leave such a video to torchcodec, empty if it would not; and of each of `shapes`:
        `pictures` asked for; `wrong`, those that are of another frame; `mean_error`, the mean absolute difference of 8 bit
        RGB values to FFmpeg's pictures; `failed`, what DALI said if it delivered nothing.
    """
    found = [video for folder in folders for video in videos.read(folder)]
    refused = next(filter(None, (refusal_of_file(gpu, video.format, video.table, video.store) for video in found)), "")
    return {"refused": refused, "shapes": {shape: _measure(found, shape, gpu) for shape in SHAPES}}


def _measure(found: list[Video], shape: str, gpu: int | None) -> dict[str, Any]:
    rng = np.random.default_rng([SHAPES.index(shape), len(found)])
    asked: list[tuple[Video, list[int], Clip]] = []
    for number in rng.permutation(_CLIPS).tolist():
        video = found[number % len(found)]
        shown = videos.request(shape, len(video.identity), rng)
        asked.append((video, shown, video.clip(shown)))
    count = sum(len(shown) for _, shown, _ in asked)
    try:
        decoded = dali.decode([dali.encoded(clip) for _, _, clip in asked], gpu, 2)
    except DecodeError as error:
        return {"pictures": count, "wrong": count, "mean_error": None, "failed": str(error)}
    wrong, errors = 0, []
    for (video, shown, clip), pictures in zip(asked, decoded, strict=True):
        expected = decode_clip(clip, video.format)
        if pictures.shape != expected.shape:
            wrong += len(shown)
            continue
        errors.append(np.abs(pictures.astype(np.int16) - expected).mean())
        wrong += sum(not _is(picture, video, k) for picture, k in zip(pictures, shown, strict=True))
    return {"pictures": count, "wrong": wrong, "mean_error": float(np.mean(errors)) if errors else None, "failed": ""}


def _is(picture: dali.Frames, video: Video, shown: int) -> bool:
    try:
        return read_identity(picture) == tuple(video.identity[shown].tolist())
    except ValueError:  # not readable
        return False

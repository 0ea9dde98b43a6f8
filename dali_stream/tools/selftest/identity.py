"""Tests whether DALI's decoder delivers the requested frames, with the same colours as FFmpeg."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dali_stream.decode import dali
from dali_stream.decode.route import refusal_of_file
from dali_stream.demo import read_identity
from dali_stream.errors import DecodeError
from dali_stream.tools.selftest import videos
from dali_stream.tools.selftest.videos import SHAPES, Video

Request = tuple[Video, list[int]]  # video, and numbers of its frames in display order
# Number of clips in the batch that mixes all videos, and in the batch of each folder if `measure` gets several folders. Two
# threads decode a batch, so each decoder is reused for many clips.
_CLIPS, _FEW = 24, 6


def measure(folders: list[str], gpu: int | None) -> dict[str, Any]:
    """Decode frames of the videos of these folders: one folder after the other, and then all of them mixed.

    DALI keeps its decoders until the process ends, so the test detects state of earlier videos that affects later ones.

    Args:
        folders: Folders of demo datasets of one codec. Frame sizes and GOPs may differ.
        gpu: Index of the CUDA device. None for the CPU.

    Returns:
        A dict with

        - `refused`: Reason why the Loader would decode one of these videos with torchcodec. Empty if it would not.
        - `shapes`: {shape of request: `frames`, `wrong`, `mean_error`, `failed`}. These are the number of requested frames, the
          number of frames that are not the requested ones, the mean absolute difference of 8-bit RGB values to FFmpeg's
          frames, and DALI's error, if any.
    """
    groups = [videos.read(folder) for folder in folders]
    mixed = [video for group in groups for video in group]
    refused = next(filter(None, (refusal_of_file(gpu, video.format, video.table, video.store) for video in mixed)), "")
    batches = [(mixed, _CLIPS)] if len(groups) == 1 else [*((group, _FEW) for group in groups), (mixed, _CLIPS)]
    decode = functools.partial(decode_with_dali, gpu)
    return {"refused": refused, "shapes": {shape: measure_shape(batches, shape, decode) for shape in SHAPES}}


def decode_with_dali(gpu: int | None, requests: Sequence[Request]) -> list[dali.Frames]:
    """Decode the frames of each request with DALI, in one batch."""
    return dali.decode([dali.encoded(video.clip(shown)) for video, shown in requests], gpu, min(2, len(requests)))


def measure_shape(
    batches: list[tuple[list[Video], int]], shape: str, decode: Callable[[Sequence[Request]], list[dali.Frames]]
) -> dict[str, Any]:
    """Return the results of a shape of request as in `measure`.

    Args:
        batches: (videos, number of requests) of each batch. Each video gets about the same number of requests.
        shape: Name in `SHAPES`.
        decode: Function that returns the frames of each request.
    """
    rng = np.random.default_rng([SHAPES.index(shape), len(batches)])
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
            wrong += sum(not _is(frame, video, k) for frame, k in zip(frames, shown, strict=True))
    mean_error = float(np.mean(errors)) if errors and not failed else None
    return {"frames": count, "wrong": wrong, "mean_error": mean_error, "failed": failed}


def _is(frame: dali.Frames, video: Video, shown: int) -> bool:
    """Return whether a decoded frame contains the identity of the requested frame of a video."""
    try:
        return read_identity(frame) == tuple(video.identity[shown].tolist())
    except ValueError:  # the identity cannot be read
        return False

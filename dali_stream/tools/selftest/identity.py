"""Tests whether DALI's decoder delivers the requested frames, in FFmpeg's colours."""

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

Request = tuple[Video, list[int]]  # frames of a video, in display order
_CLIPS, _FEW = 24, 6  # of one batch, decoded by two threads, so each decoder gets many of them


def measure(folders: list[str], gpu: int | None) -> dict[str, Any]:
    """Request frames of the videos of these folders: one folder after the other, then all of them mixed.

    DALI keeps its decoders until the process ends, so state left by one folder's videos affects the next.

    Args:
        folders: Demo datasets of one codec. Frames may differ in size, and GOPs in length.
        gpu: CUDA device. None for the CPU.

    Returns:
        `refused`: why the loader would decode one of these videos with torchcodec, empty if it would not. For each of
        `shapes`: `frames`, the number of requested frames; `wrong`, the number of frames delivered in place of others;
        `mean_error`, the mean absolute difference of 8 bit RGB values to FFmpeg's frames; `failed`, DALI's error if it
        delivered nothing.
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
    """Return the row of a shape of request, for batches of (videos, requests of each in turn) and a decoder."""
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
    """Whether a frame contains the identity of a frame of a video."""
    try:
        return read_identity(frame) == tuple(video.identity[shown].tolist())
    except ValueError:  # not readable
        return False

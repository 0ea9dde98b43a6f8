"""Whether DALI's decoder delivers the frames that are asked for, in the colours that FFmpeg gives them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dali_stream.decode import dali
from dali_stream.decode.route import refusal_of_file
from dali_stream.decode.torchcodec import decode_clip
from dali_stream.demo import read_identity
from dali_stream.errors import DecodeError
from dali_stream.mp4.clip import Clip
from dali_stream.tools.selftest import videos
from dali_stream.tools.selftest.videos import SHAPES, Video

_CLIPS, _FEW = 24, 6  # of one batch, decoded by two threads: every decoder is used for many of them


def measure(folders: list[str], gpu: int | None) -> dict[str, Any]:
    """Asks for frames of the videos of these folders: of one folder after the other, then of all of them mixed.

    DALI keeps decoders for as long as the process lives, so what a folder's videos leave behind is there for the next one's.

    Args:
        folders: of demo datasets of one codec; frames may differ in size, and GOPs in length.
        gpu: the CUDA device; None on a CPU.

    Returns:
        `refused`, why the loader would leave one of these videos to torchcodec, empty if it would not; and of each of `shapes`:
        `frames` asked for; `wrong`, those that are of another frame; `mean_error`, the mean absolute difference of 8 bit
        RGB values to FFmpeg's frames; `failed`, what DALI said if it delivered nothing.
    """
    groups = [videos.read(folder) for folder in folders]
    found = [video for group in groups for video in group]
    refused = next(filter(None, (refusal_of_file(gpu, video.format, video.table, video.store) for video in found)), "")
    batches = [(found, _CLIPS)] if len(groups) == 1 else [*((group, _FEW) for group in groups), (found, _CLIPS)]
    return {"refused": refused, "shapes": {shape: _measure(batches, shape, gpu) for shape in SHAPES}}


def _measure(batches: list[tuple[list[Video], int]], shape: str, gpu: int | None) -> dict[str, Any]:
    """Of batches, each of so many clips of some videos in turn."""
    rng = np.random.default_rng([SHAPES.index(shape), len(batches)])
    count, wrong, errors, failed = 0, 0, [], ""
    for found, clips in batches:
        asked = [_ask(found[number % len(found)], shape, rng) for number in rng.permutation(clips).tolist()]
        asked_for = sum(len(shown) for _, shown, _ in asked)
        count += asked_for
        try:
            decoded = dali.decode([dali.encoded(clip) for _, _, clip in asked], gpu, 2)
        except DecodeError as error:
            wrong, failed = wrong + asked_for, failed or str(error)
            continue
        for (video, shown, clip), frames in zip(asked, decoded, strict=True):
            expected = decode_clip(clip, video.format)
            if frames.shape != expected.shape:
                wrong += len(shown)
                continue
            errors.append(np.abs(frames.astype(np.int16) - expected).mean())
            wrong += sum(not _is(picture, video, k) for picture, k in zip(frames, shown, strict=True))
    mean_error = float(np.mean(errors)) if errors and not failed else None
    return {"pictures": count, "wrong": wrong, "mean_error": mean_error, "failed": failed}


def _ask(video: Video, shape: str, rng: np.random.Generator) -> tuple[Video, list[int], Clip]:
    shown = videos.request(shape, len(video.identity), rng)
    return video, shown, video.clip(shown)


def _is(picture: dali.Frames, video: Video, shown: int) -> bool:
    try:
        return read_identity(picture) == tuple(video.identity[shown].tolist())
    except ValueError:  # not readable
        return False

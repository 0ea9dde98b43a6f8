"""Batches: which frames they hold, and whether they are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dali_stream
from dali_stream.demo import read_identities
from support.datasets import CAMERAS

Batch = dict[str, Any]


def as_lerobot(values: np.ndarray) -> np.ndarray:
    """The dtype that LeRobot delivers: Python numbers that went through `torch.tensor`."""
    kinds: dict[str, Any] = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}
    return values.astype(kinds[values.dtype.kind])


def as_bytes(images: torch.Tensor) -> np.ndarray:
    """Frames (..., C, H, W), uint8 or float in [0, 1], as uint8 (N, H, W, C)."""
    if images.is_floating_point():
        images = (images * 255).round().to(torch.uint8)
    return images.movedim(-3, -1).flatten(0, -4).numpy()


def check_identities(batch: Batch, camera: str, offsets: Sequence[int] | None, lengths: dict[int, int]) -> None:
    """Holds the frames of a batch against the frames that its rows and the window ask for."""
    expected = []
    for episode, frame in zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True):
        for offset in (0,) if offsets is None else offsets:
            expected.append((episode, min(max(frame + offset, 0), lengths[episode] - 1), CAMERAS[camera]))
    np.testing.assert_array_equal(read_identities(as_bytes(batch[camera])), expected)


def samples(batches: Iterable[Batch]) -> list[int]:
    """The `index` of every sample, in the order of delivery."""
    return [index for batch in batches for index in batch["index"].tolist()]


def equal(first: Batch, second: Batch) -> bool:
    """Whether two batches are the same in keys, dtypes and every value."""
    if list(first) != list(second):
        return False
    return all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def assert_same_stream(first: Path | str, second: Path | str) -> int:
    """Check that all batches of an epoch in recorded order are the same, bit for bit. Return the number of samples."""
    count = 0
    for left, right in _side_by_side(first, second):
        assert equal(left, right)
        count += len(left["index"])
    return count


def assert_same_but_for_frames(first: Path | str, second: Path | str) -> int:
    """Check that all batches are the same, except for frames, whose stamps are the same. Return the number of samples."""
    count = 0
    for left, right in _side_by_side(first, second):
        expected = list(zip(left["episode_index"].tolist(), left["frame_index"].tolist(), strict=True))
        for camera in CAMERAS.keys() & left.keys():
            found = read_identities(as_bytes(right[camera])).tolist()
            assert found == [[episode, frame, CAMERAS[camera]] for episode, frame in expected]
        assert left.keys() == right.keys()
        rest = left.keys() - CAMERAS.keys()
        assert equal({key: left[key] for key in rest}, {key: right[key] for key in rest})
        count += len(left["index"])
    return count


def _side_by_side(first: Path | str, second: Path | str) -> Iterator[tuple[Batch, Batch]]:
    options: dict[str, Any] = {
        "batch_size": 16, "shuffle": False, "image_dtype": "uint8", "last_batch": "partial",
        "device": "cpu", "decode": "torchcodec", "num_threads": 2,
    }  # fmt: skip
    with dali_stream.Loader(str(first), **options) as a, dali_stream.Loader(str(second), **options) as b:
        yield from zip(a, b, strict=True)

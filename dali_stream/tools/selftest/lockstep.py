"""Compares the Loader with DALI and with torchcodec, frame by frame, while frames are held and the GPU is busy.

Checking a frame as soon as it arrives does not detect that its memory is overwritten later. So half of the batches are held
for several steps; the others are dropped after a copy is queued behind other work of the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F

from dali_stream.dataset import Dataset
from dali_stream.loader import Loader

_STEPS = (-3, 0, 20)  # of each camera's window
_HELD = 6  # batches
_MATRIX, _PRODUCTS = 8192, 8  # of bfloat16: about 12 ms of an H200 per batch (computed)
_MEAN, _BLOCK = 3.0, 40.0  # of 255: tolerated mean absolute differences to torchcodec, of a frame and of 16 × 16 pixels


def measure(
    folder: str, device: str, seconds: float, image_size: tuple[int, int] | None, decode: str = "dali"
) -> dict[str, Any]:
    """Compares all frames of both loaders for some seconds, and at least until batches were held.

    Args:
        folder: of a demo dataset.
        device: such as "cuda:0"; "cpu" runs without other work.
        seconds: to run.
        image_size: (height, width) for both loaders; None for the recorded size.
        decode: Argument of the loader that is tested.

    Returns:
        `frames`, the compared ones; `wrong`, those that differ by more than a decoder's rounding; `worst_mean` and
        `worst_block`, mean absolute differences of 255, of a frame and of 16 × 16 pixels; `routes` {camera: decoder} and
        `route_changes` of the loader with DALI; `wait_s` in its `next()`, and `seconds` in all.
    """
    found = _Differences(device)
    busy, held = work(device), deque[tuple[Any, Any]]()
    started = time.perf_counter()
    with (
        _loader(folder, device, decode, image_size) as ours,
        _loader(folder, "cpu", "torchcodec", image_size) as theirs,
    ):
        cameras, number = ours.dataset.cameras, 0
        while number <= _HELD or time.perf_counter() - started < seconds:
            expected = iter(theirs)
            for batch in ours:
                if len(held) == _HELD:
                    found.add(*held.popleft())  # before new work is queued: this waits for the GPU
                busy()
                frames = [batch[camera].clone() if number % 2 else batch[camera] for camera in cameras]
                del batch
                reference = next(expected)
                held.append((frames, [reference[camera] for camera in cameras]))
                number += 1
                if number > _HELD and time.perf_counter() - started >= seconds:
                    break
        for pair in held:
            found.add(*pair)
        stats, routes = ours.stats(), {camera: route.decoder for camera, route in ours.routes.items()}
    return {
        "routes": routes,
        "route_changes": stats["route_changes"],
        "frames": found.frames,
        "wrong": found.wrong,
        "worst_mean": found.mean,
        "worst_block": found.block,
        "wait_s": stats["wait_s"],
        "seconds": time.perf_counter() - started,
    }


def measure_two(folder: str, device: str, seconds: float) -> dict[str, Any]:
    """Compare as `measure` in two threads of this process, as for training and validation: two pipelines share one GPU.

    Returns:
        The sums, or the largest values, of both.
    """
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: measure(folder, device, seconds, None), range(2)))
    most = {key: max(row[key] for row in both) for key in ("worst_mean", "worst_block", "wait_s", "seconds")}
    return {"routes": both[0]["routes"], **most} | {
        key: sum(row[key] for row in both) for key in ("frames", "wrong", "route_changes")
    }


def _loader(folder: str, device: str, decode: str, image_size: tuple[int, int] | None) -> Loader:
    dataset = Dataset(folder)
    return Loader(
        dataset, batch_size=16, device=device, decode=decode, image_size=image_size, rank=0, world_size=1,
        delta_timestamps={camera: [step / dataset.fps for step in _STEPS] for camera in dataset.cameras},
    )  # fmt: skip


def work(device: str) -> Callable[[], None]:
    """A function that queues work on a GPU without waiting for it; on a CPU, it does nothing."""
    if device == "cpu":
        return lambda: None
    matrix = torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16)

    def queue() -> None:
        product = matrix
        for _ in range(_PRODUCTS):
            product = (product @ matrix).clamp_(-1, 1)

    return queue


class _Differences:
    """Attributes: `frames` compared, `wrong` ones, and the largest `mean` and `block` differences."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.frames = self.wrong = 0
        self.mean = self.block = 0.0

    def add(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        """Compares frames in [0, 1], (B, T, C, H, W) per camera."""
        for a, b in zip(found, expected, strict=True):
            difference = (a.flatten(0, 1) - b.flatten(0, 1).to(self._device)).abs().mean(1, keepdim=True) * 255
            mean, block = difference.mean((1, 2, 3)), F.avg_pool2d(difference, 16).amax((1, 2, 3))
            self.frames += len(mean)
            self.wrong += int((~((mean <= _MEAN) & (block <= _BLOCK))).sum())  # NaN is wrong, too
            self.mean, self.block = max(self.mean, float(mean.max())), max(self.block, float(block.max()))

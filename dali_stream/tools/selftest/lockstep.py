"""Compares the Loader with DALI and with torchcodec, frame by frame, while frames are held and the GPU is busy.

Checking a frame as soon as it arrives does not detect that its memory is overwritten later. Therefore half of the batches are
held for several steps. The others are dropped after a copy is queued, which waits for other work of the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
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
    """Compare all frames of both loaders for some seconds, and at least until batches were held.

    Args:
        folder: Demo dataset.
        device: Device such as "cuda:0". "cpu" runs without other work.
        seconds: Time to run, in seconds.
        image_size: (height, width) for both loaders. None for the recorded size.
        decode: Argument of the loader that is tested.

    Returns:
        `frames`, the number of compared frames; `wrong`, the number that differs by more than a decoder's rounding;
        `worst_mean` and `worst_block`, mean absolute differences of 255, of a frame and of 16 × 16 pixels; `routes`
        {camera: decoder} and `route_changes` of the loader with DALI; `wait_s` in its `next()`, and total `seconds`.
    """
    busy, held, differences = work(device), deque[tuple[Any, Any]](), list[torch.Tensor]()
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
                    differences += _differences(*held.popleft(), device)  # before new work is queued: this waits for the GPU
                busy()
                frames = [batch[camera].clone() if number % 2 else batch[camera] for camera in cameras]
                del batch
                reference = next(expected)
                held.append((frames, [reference[camera] for camera in cameras]))
                number += 1
                if number > _HELD and time.perf_counter() - started >= seconds:
                    break
        for pair in held:
            differences += _differences(*pair, device)
        stats, routes = ours.stats(), {camera: route.decoder for camera, route in ours.routes.items()}
    mean, block = torch.cat(differences).T
    return {
        "routes": routes,
        "route_changes": stats["route_changes"],
        "frames": len(mean),
        "wrong": int((~((mean <= _MEAN) & (block <= _BLOCK))).sum()),  # NaN is wrong, too
        "worst_mean": float(mean.max()),
        "worst_block": float(block.max()),
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
    """Return a function that queues work on a GPU without waiting for it. On a CPU, it does nothing."""
    if device == "cpu":
        return lambda: None
    matrix = torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16)

    def queue() -> None:
        product = matrix
        for _ in range(_PRODUCTS):
            product = (product @ matrix).clamp_(-1, 1)

    return queue


def _differences(frames: list[torch.Tensor], expected: list[torch.Tensor], device: str) -> Iterator[torch.Tensor]:
    """Mean absolute differences of each frame, and of its worst 16 × 16 pixels, (n, 2) per camera.

    Args:
        frames, expected: Frames in [0, 1], (B, T, C, H, W) per camera.
        device: Device to compare on.
    """
    for a, b in zip(frames, expected, strict=True):
        difference = (a.flatten(0, 1) - b.flatten(0, 1).to(device)).abs().mean(1, keepdim=True) * 255
        yield torch.stack([difference.mean((1, 2, 3)), F.avg_pool2d(difference, 16).amax((1, 2, 3))], 1).cpu()

"""Compares a Loader that uses DALI with one that uses torchcodec, frame by frame, while frames are held and the GPU is busy.

A check of a frame on arrival does not detect that its memory is overwritten later. Therefore half of the batches are held for
several steps. The other half is dropped as soon as a copy is queued, which has to wait for other work of the GPU.
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

_STEPS = (-3, 0, 20)  # window of each camera, in frames
_HELD = 6  # number of held batches
_MATRIX, _PRODUCTS = 8192, 8  # size and number of bfloat16 products per batch: about 12 ms on an H200 (computed)
_MEAN, _BLOCK = 3.0, 40.0  # tolerated mean absolute differences in 8-bit values: of a frame, and of 16 × 16 pixels


def measure(
    folder: str, device: str, seconds: float, image_size: tuple[int, int] | None, decode: str = "dali"
) -> dict[str, Any]:
    """Compare all frames of two Loaders for some time, and at least until some held batches were compared.

    Args:
        folder: Folder of a demo dataset.
        device: Device such as "cuda:0". With "cpu", no other work runs at the same time.
        seconds: Time to run, in seconds.
        image_size: (height, width) for both Loaders. None for the recorded size.
        decode: Argument of the tested Loader. Default: "dali".

    Returns:
        A dict with

        - `frames`, `wrong`: Number of compared frames, and of frames that differ by more than the rounding of a decoder.
        - `worst_mean`, `worst_block`: Largest mean absolute difference of a frame, and of 16 × 16 pixels, in 8-bit values.
        - `routes`, `route_changes`, `wait_s`: {camera: decoder}, number of route changes, and seconds in `next()` of the tested
          Loader.
        - `seconds`: Total time in seconds.
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
                    # The comparison waits for the GPU, so it must run before new work is queued.
                    differences += _differences(*held.popleft(), device)
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
    """Run `measure` in two threads at the same time. Two pipelines then share one GPU, as in training with validation.

    Returns:
        A dict as in `measure`. Counts are the sums of both threads, and differences and times are the maxima.
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
    """Return a function that queues work on a GPU without waiting for it. For a CPU, the function does nothing."""
    if device == "cpu":
        return lambda: None
    matrix = torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16)

    def queue() -> None:
        product = matrix
        for _ in range(_PRODUCTS):
            product = (product @ matrix).clamp_(-1, 1)

    return queue


def _differences(frames: list[torch.Tensor], expected: list[torch.Tensor], device: str) -> Iterator[torch.Tensor]:
    """Yield the mean absolute differences of each frame and of its worst 16 × 16 pixels, one camera after the other.

    Args:
        frames, expected: Frames of each camera in [0, 1], shape (B, T, C, H, W).
        device: Device on which frames are compared.

    Yields:
        Differences of 8-bit values, on the CPU, shape (B * T, 2).
    """
    for a, b in zip(frames, expected, strict=True):
        difference = (a.flatten(0, 1) - b.flatten(0, 1).to(device)).abs().mean(1, keepdim=True) * 255
        yield torch.stack([difference.mean((1, 2, 3)), F.avg_pool2d(difference, 16).amax((1, 2, 3))], 1).cpu()

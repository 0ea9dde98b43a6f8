"""Tests the Loader: against one that uses torchcodec, while frames are held and the GPU is busy, and over several epochs.

A check of a frame on arrival does not detect that its memory is overwritten later. In `lockstep`, half of the batches are
therefore held for several steps. The other half is dropped as soon as a copy is queued, which has to wait for other work of the
GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from dali_stream.dataset import Dataset
from dali_stream.loader import Loader
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import endless
from dali_stream.tools.selftest import videos

_STEPS = (-3, 0, 20)  # window in frames, which is clamped at both ends of an episode
_HELD = 6  # number of held batches
_MATRIX, _PRODUCTS = 8192, 8  # size and number of bfloat16 products per batch: about 12 ms on an H200 (computed)
_BUDGET = "64MiB"  # holds few decoded frames, so that most frames are decoded for each batch
_MEAN, _BLOCK = 3.0, 40.0  # tolerated mean absolute differences in 8-bit values: of a frame, and of 16 × 16 pixels


def lockstep(
    folder: str,
    device: str,
    seconds: float,
    image_size: tuple[int, int] | None = None,
    decode: str = "dali",
    num_threads: int | None = None,
    gpu_cache: str | None = None,
) -> dict[str, Any]:
    """Compare all frames of two Loaders for some time, and at least until some held batches were compared.

    Args:
        folder: Folder of a demo dataset.
        device: Device such as "cuda:0". With "cpu", no other work runs at the same time.
        seconds: Time to run, in seconds.
        image_size: (height, width) for both Loaders. Default: None, for the recorded size.
        decode, num_threads, gpu_cache: Arguments of the tested Loader. Default: "dali", and the defaults of a Loader.

    Returns:
        A dict with the entries of `_outcome` for the tested Loader, and

        - `frames`, `wrong`: Number of compared frames, and of frames that differ by more than the rounding of a decoder.
        - `worst_mean`, `worst_block`: Largest mean absolute difference of a frame, and of 16 × 16 pixels, in 8-bit values.
    """
    busy, held, compared = work(device), deque[tuple[Any, Any]](), list[torch.Tensor]()
    dataset, number, started = Dataset(folder), 0, time.perf_counter()
    options: dict[str, Any] = {"image_size": image_size, "memory_budget": _BUDGET, "num_threads": num_threads}
    with (
        _loader(dataset, dataset.cameras, device, decode, gpu_cache=gpu_cache, **options) as ours,
        _loader(Dataset(folder), dataset.cameras, "cpu", "torchcodec", image_size=image_size) as theirs,
    ):
        batches, expected = endless(ours), endless(theirs)
        while number <= _HELD or time.perf_counter() - started < seconds:
            batch = next(batches)
            if len(held) == _HELD:
                # The comparison waits for the GPU, so it must run before new work is queued.
                compared += differences(*held.popleft(), device)
            busy()
            frames = [batch[camera].clone() if number % 2 else batch[camera] for camera in dataset.cameras]
            del batch
            reference = next(expected)
            held.append((frames, [reference[camera] for camera in dataset.cameras]))
            number += 1
        for pair in held:
            compared += differences(*pair, device)
        found = torch.cat(compared)
        return {
            **_outcome(ours, started),
            "frames": len(found),
            "wrong": count_wrong(found),
            "worst_mean": float(found[:, 0].max()),
            "worst_block": float(found[:, 1].max()),
        }


def two_loaders(folder: str, device: str, seconds: float) -> list[dict[str, Any]]:
    """Run `lockstep` in two threads at the same time. Two pipelines then share one GPU, as in training with validation."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: lockstep(folder, device, seconds), range(2)))


def soak(folder: str, device: str, decode: str, seconds: float) -> dict[str, Any]:
    """Stream two or more whole epochs of a demo dataset, with windows for the first camera.

    Args:
        folder: Folder of a demo dataset.
        device, decode: See `Loader`.
        seconds: Minimum time to run, in seconds.

    Returns:
        A dict with the entries of `_outcome`, and

        - `epochs`, `frames`, `wrong`: Number of epochs, of delivered frames, and of frames that do not belong to their row.
        - `memory`, `gpu_memory`: Bytes in use by this process and on the GPU after the "first" and the "last" epoch.
          `gpu_memory` is None on a CPU.
        - `frames_per_s`: Delivered frames per second.
    """
    dataset, started = Dataset(folder), time.perf_counter()
    windows = dict.fromkeys(dataset.cameras, (0,)) | {dataset.cameras[0]: _STEPS}
    frames = wrong = 0
    memory, gpu_memory = list[int | None](), list[int | None]()
    with _loader(dataset, dataset.cameras[:1], device, decode, image_dtype="uint8", last_batch="partial") as running:
        while len(memory) < 2 or time.perf_counter() - started < seconds:
            for batch in running:
                for number, (camera, steps) in enumerate(windows.items()):
                    expected = _identities(batch, number, steps, dataset.lengths)
                    images = batch[camera].movedim(-3, -1).flatten(0, -4).cpu().numpy()
                    frames, wrong = frames + len(expected), wrong + videos.count_wrong(images, expected)
            memory.append(environment.memory_bytes("VmRSS"))
            gpu_memory.append(environment.gpu_bytes_used(batch["index"].device.index))
        return {
            **_outcome(running, started),
            "epochs": len(memory),
            "frames": frames,
            "wrong": wrong,
            "frames_per_s": frames / (time.perf_counter() - started),
            "memory": {"first": memory[0], "last": memory[-1]},
            "gpu_memory": None if gpu_memory[0] is None else {"first": gpu_memory[0], "last": gpu_memory[-1]},
        }


def _identities(batch: dict[str, Any], number: int, steps: tuple[int, ...], lengths: Any) -> npt.NDArray[np.int64]:
    """Return the expected (episode, frame, camera) of each frame of a camera in a batch, shape (n, 3)."""
    episode, frame = batch["episode_index"].cpu().numpy()[:, None], batch["frame_index"].cpu().numpy()[:, None]
    shown = np.clip(frame + np.array(steps), 0, lengths[episode] - 1)
    return np.stack(np.broadcast_arrays(episode, shown, number), -1).reshape(-1, 3)


def _loader(dataset: Dataset, windowed: Sequence[str], device: str, decode: str, **options: Any) -> Loader:
    """Return a Loader with windows of `_STEPS` for some cameras. See `Loader` for the other arguments."""
    return Loader(
        dataset, batch_size=16, device=device, decode=decode, rank=0, world_size=1, in_process=True,
        delta_timestamps={camera: [step / dataset.fps for step in _STEPS] for camera in windowed}, **options,
    )  # fmt: skip


def _outcome(loader: Loader, started: float) -> dict[str, Any]:
    """Return entries for a report.

    - `routes`, `route_changes`: {camera: decoder} now, and the number of route changes.
    - `wait_s`, `seconds`: Seconds in the Loader's `next()`, and seconds since `started`, a value of `time.perf_counter`.
    """
    routes = {camera: route.decoder for camera, route in loader.routes.items()}
    head = {key: loader.stats()[key] for key in ("route_changes", "wait_s")}
    return {"routes": routes, **head, "seconds": time.perf_counter() - started}


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


def differences(frames: list[torch.Tensor], expected: list[torch.Tensor], device: str) -> Iterator[torch.Tensor]:
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


def count_wrong(compared: torch.Tensor) -> int:
    """Return the number of frames that differ by more than the rounding of a decoder.

    Args:
        compared: Results of `differences`, shape (n, 2).
    """
    mean, block = compared.T
    return int((~((mean <= _MEAN) & (block <= _BLOCK))).sum())  # NaN is wrong, too

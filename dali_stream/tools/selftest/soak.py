"""Tests the Loader over several epochs: every frame must be the right one, and memory must not grow."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.demo import read_identities
from dali_stream.loader import Loader
from dali_stream.tools import environment

_STEPS = (-3, 0, 20)  # window in frames, which is clamped at both ends of an episode
_FPS = 20


def measure(folder: str, device: str, decode: str, seconds: float) -> dict[str, Any]:
    """Stream two or more whole epochs of a demo dataset, with windows for the first camera.

    Args:
        folder: Folder of a demo dataset.
        device, decode: See `Loader`.
        seconds: Minimum time to run, in seconds.

    Returns:
        A dict with

        - `epochs`, `frames`, `wrong`: Number of epochs, of delivered frames, and of frames that do not belong to their row.
        - `memory`, `gpu_memory`: Bytes in use by this process and on the GPU after the "first" and the "last" epoch.
          `gpu_memory` is None on a CPU.
        - `routes`, `route_changes`: {camera: decoder} at the end, and the number of route changes.
        - `frames_per_s`, `wait_s`, `seconds`: Rate, seconds in the Loader's `next()`, and total seconds.
    """
    dataset = Dataset(folder)
    windowed = dataset.cameras[0]
    frames = wrong = epochs = 0
    memory, gpu_memory, started = [], [], time.perf_counter()
    with Loader(
        dataset, batch_size=16, device=device, decode=decode, image_dtype="uint8", last_batch="partial", rank=0, world_size=1,
        delta_timestamps={windowed: [step / _FPS for step in _STEPS]},
    ) as loader:  # fmt: skip
        while epochs < 2 or time.perf_counter() - started < seconds:
            for batch in loader:
                for number, camera in enumerate(dataset.cameras):
                    count, errors = _check(batch, camera, number, _STEPS if camera == windowed else (0,), dataset.lengths)
                    frames, wrong = frames + count, wrong + errors
            epochs += 1
            memory.append(environment.memory_bytes("VmRSS"))
            gpu_memory.append(environment.gpu_bytes_used(batch["index"].device.index))
        stats, routes = loader.stats(), {camera: route.decoder for camera, route in loader.routes.items()}
    return {
        "routes": routes,
        "route_changes": stats["route_changes"],
        "epochs": epochs,
        "frames": frames,
        "wrong": wrong,
        "frames_per_s": frames / (time.perf_counter() - started),
        "wait_s": stats["wait_s"],
        "seconds": time.perf_counter() - started,
        "memory": {"first": memory[0], "last": memory[-1]},
        "gpu_memory": None if gpu_memory[0] is None else {"first": gpu_memory[0], "last": gpu_memory[-1]},
    }


def _check(batch: dict[str, Any], camera: str, number: int, steps: tuple[int, ...], lengths: Any) -> tuple[int, int]:
    """Return the number of frames of a camera in a batch, and the number of wrong ones."""
    episode, frame = batch["episode_index"].cpu().numpy(), batch["frame_index"].cpu().numpy()
    shown = np.clip(frame[:, None] + np.array(steps), 0, lengths[episode][:, None] - 1)
    expected = np.stack(np.broadcast_arrays(episode[:, None], shown, number), -1).reshape(-1, 3)
    frames = batch[camera].movedim(-3, -1).flatten(0, -4).cpu().numpy()
    try:
        return len(expected), int((read_identities(frames) != expected).any(1).sum())
    except ValueError:  # the identity of a frame cannot be read, so all frames of the batch count as wrong
        return len(expected), len(expected)

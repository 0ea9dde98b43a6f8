"""Common part of all peer programs, which take batches in their own process and time them.

A peer program is started as `python PROGRAM SPEC.json`. After all imports, it opens the dataset and takes the numbers of
batches in `spec["takes"]`, one after the other and as fast as possible. It then writes the delivered data, and the seconds of
each take.

This module needs only numpy and torch, because it also runs in the environments of other loaders.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Batch = dict[str, Any]
Spec = dict[str, Any]
ROWS = ("index", "episode_index", "frame_index")


def serve(batches: Callable[[Spec], Iterator[Batch]], packages: Sequence[str], imports: Sequence[str] = ()) -> None:
    """Take and time batches, write the results, and end this process.

    Args:
        batches: Function that opens the dataset of a spec (see `peers.spec`) and yields an endless stream of batches.
        packages: Packages whose versions the report contains.
        imports: Modules that a loader imports with its first batch. They are imported beforehand, so that they are not timed.
    """
    for name in imports:
        with contextlib.suppress(ImportError):  # the loader works without it
            importlib.import_module(name)
    spec = json.loads(Path(sys.argv[1]).read_text())
    delivered, stream, seconds = Delivered(spec), None, list[float]()
    for count in spec["takes"]:
        started = time.perf_counter()
        stream = stream or batches(spec)  # opening the dataset belongs to the first take
        last = delivered.take(stream, count)
        seconds.append(time.perf_counter() - started)
        delivered.keep_frames(last)
        del last
    delivered.write()
    found = {"python": platform.python_version(), **versions("torch", *packages)}
    Path(spec["answer"]).write_text(json.dumps({"versions": found, "seconds": seconds}))
    os._exit(0)  # without waiting for threads and workers of the loader, which `run_peer` kills


def as_float(batch: Batch, spec: Spec) -> Batch:
    """Return a batch whose frames are float32 in [0, 1]. Frames that are uint8 by the spec are converted on the device."""
    if spec["uint8"]:
        for camera in spec["cameras"]:
            batch[camera] = batch[camera].to(spec["device"]).div(255)
    return batch


def transforms(spec: Spec) -> Callable[[Any], Any] | None:
    """Return torchvision's Resize to the size in the spec, or None for the recorded size."""
    if not spec["image_size"]:
        return None
    from torchvision.transforms import v2

    resize: Callable[[Any], Any] = v2.Resize(spec["image_size"], antialias=True)
    return resize


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of packages. "unknown" if a package is on the path without being installed."""
    by_package = dict.fromkeys(packages, "unknown")
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_package[name] = importlib.metadata.version(name)
    return by_package


class Delivered:
    """Record of the delivered data: the numbers of all rows, and the frames of a few samples."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._rows: dict[str, list[np.ndarray]] = {key: [] for key in ROWS}
        self._pictures: dict[str, list[torch.Tensor]] = {key: [] for key in spec["cameras"]}
        self._checked: list[np.ndarray] = []
        self._samples = 0

    def take(self, stream: Iterator[Batch], count: int) -> Batch:
        """Take `count` batches, and drop each of them before the next. Return the last batch."""
        for left in reversed(range(count)):
            batch = next(stream, None)
            if batch is None:
                raise RuntimeError(f"the stream ended after {self._samples} samples")
            batch = {key: value.to(self._spec["device"]) if hasattr(value, "to") else value for key, value in batch.items()}
            for key in ROWS:
                self._rows[key].append(np.array(batch[key].cpu()).reshape(-1))
            self._samples += len(batch["index"])
            if left:
                del batch
        if self._spec["device"].startswith("cuda"):
            torch.cuda.synchronize()
        return batch

    def keep_frames(self, batch: Batch) -> None:
        """Copy the frames of some samples of the last batch. Only a few, because the next batches are already in progress."""
        few = self._spec["check"]
        self._checked.append(self._samples - len(batch["index"]) + np.arange(len(batch["index"][:few])))
        for key, kept in self._pictures.items():
            kept.append(batch[key][:few].clone())

    def write(self) -> None:
        """Write the delivered data to the file in the spec.

        The file contains `index`, `episode_index` and `frame_index` of all samples, each of shape (N,); the positions `checked`
        of some samples, shape (n,); and for the nth camera the frames `pictures_n` of these samples, uint8, shape (n, steps, C,
        H, W).
        """
        arrays: dict[str, Any] = {key: np.concatenate(parts) for key, parts in self._rows.items()}
        for n, kept in enumerate(self._pictures.values()):
            frames = torch.cat(kept).mul(255).round().to(torch.uint8).cpu()
            arrays[f"pictures_{n}"] = frames.reshape(len(frames), -1, *frames.shape[-3:]).numpy()
        np.savez(self._spec["results"], checked=np.concatenate(self._checked), **arrays)

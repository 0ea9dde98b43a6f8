"""What all peer programs have in common: batches on request, timed where they are made.

A peer program is started as `python PROGRAM SPEC.json` and talks in lines of JSON. It says {"ready": versions} once all is
imported. To each {"go": n} it takes n batches as fast as they come and answers {"seconds": s}; the first one also opens the
dataset. To {"end": true} it writes what it delivered and answers {"written": samples}.

Needs numpy and torch alone, since it runs in the environments of other loaders too.
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
    """Answers until stdin ends.

    Args:
        batches: opens the dataset of a spec (see `peers.spec`), and yields batches without end.
        packages: whose versions belong into the report.
        imports: modules that a loader would import with its first batch, whose time is not to be that of an import.
    """
    # A group of its own can be stopped and continued as one, workers included. Where the benchmark is killed, the kernel
    # ends a group that it leaves stopped.
    os.setpgrp()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints does not get between the answers

    def say(**answer: Any) -> None:
        answers.write(f"\n{json.dumps(answer)}\n")  # on a line of its own, whatever was printed before
        answers.flush()

    for name in imports:
        with contextlib.suppress(ImportError):  # a loader that can do without it does
            importlib.import_module(name)
    spec = json.loads(Path(sys.argv[1]).read_text())
    delivered = Delivered(spec)
    stream = None
    say(ready={"python": platform.python_version(), **versions("torch", *packages)}, group=os.getpid())
    for line in sys.stdin:
        asked = json.loads(line)
        if "go" in asked:
            started = time.perf_counter()
            stream = stream or batches(spec)
            last = delivered.take(stream, asked["go"])
            seconds = time.perf_counter() - started
            delivered.keep_frames(last)
            del last
            say(seconds=seconds)
        else:
            say(written=delivered.write())


def versions(*packages: str) -> dict[str, str]:
    """Versions of packages; "unknown" where one is not installed but lies on the path."""
    found = dict.fromkeys(packages, "unknown")
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Delivered:
    """What the consumer was given: the rows' numbers of all samples, and the frames of a few."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._rows: dict[str, list[np.ndarray]] = {key: [] for key in ROWS}
        self._pictures: dict[str, list[torch.Tensor]] = {key: [] for key in spec["cameras"]}
        self._checked: list[np.ndarray] = []
        self._samples = 0

    def take(self, stream: Iterator[Batch], count: int) -> Batch:
        """Takes batches and drops each before the next; returns the last one."""
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
        """Copies the frames of some samples of the batch that came last; no more, since the next batches are being made."""
        few = self._spec["check"]
        self._checked.append(self._samples - len(batch["index"]) + np.arange(len(batch["index"][:few])))
        for key, kept in self._pictures.items():
            kept.append(batch[key][:few].clone())

    def write(self) -> int:
        """Writes it to where the spec says: rows (N,), and of the `checked` ones frames (n, steps, C, H, W) per camera."""
        arrays: dict[str, Any] = {key: np.concatenate(found) for key, found in self._rows.items()}
        for n, kept in enumerate(self._pictures.values()):
            found = torch.cat(kept).mul(255).round().to(torch.uint8).cpu()
            arrays[f"pictures_{n}"] = found.reshape(len(found), -1, *found.shape[-3:]).numpy()
        np.savez(self._spec["results"], checked=np.concatenate(self._checked), **arrays)
        return self._samples

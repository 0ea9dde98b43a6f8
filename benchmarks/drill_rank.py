"""Training program of drill.py, of which torchrun starts a process per rank. It ends at the step that drill.py asks for.

The model is linear, on frames that are pooled to 4×4 and on the state. Every rank gathers the features of the whole global
batch, sorts them by their position in the order, and makes the same step in float64. Therefore, losses are equal bit for bit on
any number of ranks. Gradients that are summed over ranks would round differently.

Rank 0 logs each step with the samples of all ranks. A rank fails if the pixels of a frame name another frame than its row.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

import dali_stream
from dali_stream.demo import read_identities

STATE, ACTION = "observation.state", "action"


def train(settings: dict[str, Any]) -> None:
    """Train until the file `stop` exists, or for `steps` steps."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    folder, disk = Path(settings["folder"]), Path(os.environ["DRILL_DISK"])
    checkpoint = folder / "checkpoint/checkpoint.pt"
    caches = {"cache_dir": disk / "cache", "cache_bytes": settings["cache_bytes"]} if settings["storage_options"] else {}
    dataset = dali_stream.Dataset(settings["uri"], storage_options=settings["storage_options"], **caches)
    options = {"frame_cache": disk / "frames", "frame_cache_bytes": settings["frame_cache_bytes"]} if caches else {}
    loader = dali_stream.Loader(
        dataset, batch_size=settings["global_batch"] // ranks, consumers=4, last_batch="partial", image_dtype="uint8",
        device="cpu", num_threads=1, memory_budget=settings["memory_budget"], **options,
    )  # fmt: skip
    size = 48 * len(dataset.cameras) + sum(dataset.features[STATE].shape) + 1
    weights = torch.zeros(size, sum(dataset.features[ACTION].shape), dtype=torch.float64, requires_grad=True)
    optimizer, step = torch.optim.SGD([weights], lr=0.02, momentum=0.9), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step, weights.data = saved["step"], saved["weights"]
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loaders"][rank % len(saved["loaders"])])
    log = open(os.environ["DRILL_LOG"], "a", buffering=1) if rank == 0 else None  # noqa: SIM115
    write_line(log, {"resumed": step, "ranks": ranks})
    is_last = False
    while not is_last:
        epoch = loader.epoch
        for batch in loader:
            step += 1
            is_last = step == settings["steps"] or (folder / "stop").exists()
            found: list[Any] = [None] * ranks
            distributed.all_gather_object(found, (*rows(batch, dataset.cameras), loader.state_dict(), is_last))
            is_last = found[0][3]
            samples, features = (by_position([each[part] for each in found]) for part in (0, 1))
            inputs, targets = torch.from_numpy(np.stack(features)).split([size, weights.shape[1]], dim=1)
            loss = (inputs @ weights - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            write_line(log, {"step": step, "epoch": epoch, "samples": samples, "loss": loss.item().hex()})
            if rank == 0 and (is_last or step % settings["save_every"] == 0):
                loaders = [each[2] for each in found]
                parts = {"step": step, "weights": weights.detach(), "optimizer": optimizer.state_dict(), "loaders": loaders}
                write_line(log, save(checkpoint, parts) | {"at": step})
            if is_last:
                break
    loader.close()


def rows(batch: dict[str, Any], cameras: list[str]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return the samples of a batch as (episode, frame), and their features with the action at the end, float64, shape (B, D).

    Raises:
        RuntimeError: If a frame is not that of its row.
    """
    expected = np.stack([batch["episode_index"], batch["frame_index"]], axis=1)
    parts = []
    for number, camera in enumerate(sorted(cameras, reverse=True)):  # top, which the demo numbers 0, and side
        frames = batch[camera]
        identities = read_identities(frames.permute(0, 2, 3, 1).numpy())
        if not np.array_equal(identities, np.insert(expected, 2, number, axis=1)):
            raise RuntimeError(f"WRONG FRAME of {camera}: expected {expected.tolist()}, got {identities.tolist()}")
        parts.append(torch.nn.functional.adaptive_avg_pool2d(frames.double(), 4).flatten(1) / 255)  # sums of integers are exact
    one = torch.ones(len(expected), 1, dtype=torch.float64)
    parts += [batch[STATE].double(), one, batch[ACTION].double()]
    return [tuple(each) for each in expected.tolist()], torch.cat(parts, dim=1).numpy()


def by_position(found: list[Any]) -> list[Any]:
    """Return the samples of all ranks in the order of their positions, of which rank r of W has each W-th, from r on."""
    return [each[place] for place in range(len(found[0])) for each in found if place < len(each)]


def save(file: Path, parts: dict[str, Any]) -> dict[str, Any]:
    """Replace a checkpoint. If the disk is full, keep the previous one."""
    torch.save(parts, stream := BytesIO())
    partial = file.with_suffix(".partial")
    try:
        partial.write_bytes(stream.getvalue())
        partial.replace(file)
    except OSError as error:
        partial.unlink()
        return {"not_saved": str(error)}
    return {"saved": True}


def write_line(log: Any, entry: dict[str, Any]) -> None:
    """Write an entry to the log of rank 0."""
    if log:
        log.write(json.dumps(entry | {"time": time.monotonic()}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=180))
    train(json.loads(os.environ["DRILL_SETTINGS"]))
    distributed.destroy_process_group()

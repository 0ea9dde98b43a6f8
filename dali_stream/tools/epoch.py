"""One epoch of a demo dataset through the Loader, timed and checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.demo import read_identities
from dali_stream.errors import DecodeError
from dali_stream.loader import Loader
from dali_stream.tools import environment, sheet


def stream(
    dataset: Dataset, batch_size: int, device: str, decode: str, progress: Callable[[int, int], None]
) -> tuple[dict[str, Any], list[sheet.Sample]]:
    """Stream one epoch of a demo dataset.

    Args:
        dataset: Demo dataset.
        batch_size, device, decode: See `Loader`.
        progress: Function that is called after each batch with (samples delivered, number of samples).

    Returns:
        The report as a dict for JSON, and the samples of the first batch.

    Raises:
        DecodeError: If a frame of the first batch is damaged, or is not the frame of its row.
    """
    environment.forget_peak()
    first: list[sheet.Sample] = []
    indices: list[int] = []
    waits, ends, gpu_bytes = [], [], None
    with Loader(
        dataset, batch_size=batch_size, image_dtype="uint8", device=device, decode=decode, last_batch="partial", rank=0,
        world_size=1, in_process=True,
    ) as loader:  # fmt: skip
        batches, started = iter(loader), time.perf_counter()
        for _ in range(len(loader)):
            requested = time.perf_counter()
            batch = next(batches)
            ends.append(time.perf_counter())
            waits.append(ends[-1] - requested)
            indices += batch["index"].tolist()
            gpu_bytes = max(gpu_bytes or 0, environment.gpu_bytes_used(batch["index"].device.index) or 0) or None
            first = first or sheet.samples(batch, dataset.cameras, {})
            progress(len(indices), dataset.num_frames)
        bottleneck, device_used = loader.bottleneck(), str(batch["index"].device)
        # The rates exclude the first batch. Its time includes the startup, and is reported separately.
        timed = len(indices) - len(first) or len(indices)
        seconds = ends[-1] - (ends[0] if len(ends) > 1 else started)
        report = {
            "root": dataset.uri,
            "episodes": dataset.num_episodes,
            "frames": len(indices),
            "unique_frames": len(set(indices)),
            "exactly_once": sorted(indices) == list(range(dataset.num_frames)),
            "frames_checked": _check_frames(dataset, first),
            "samples_per_s": timed / seconds,
            "frames_per_s": timed * len(dataset.cameras) / seconds,
            "epoch_s": ends[-1] - started,
            "first_batch_s": loader.stats()["first_batch_s"],
            "wait_ms": {f"p{p}": float(np.percentile(waits[1:] or waits, p)) * 1000 for p in (50, 95, 99)},
            "batches": len(waits),
            "batch_size": batch_size,
            "bottleneck": dataclasses.asdict(bottleneck) if bottleneck else None,  # None: an epoch of one batch
            "routes": {key: dataclasses.asdict(route) for key, route in loader.routes.items()},
            "device": device_used,
            "peak_rss_bytes": environment.peak_rss(),
            "peak_gpu_bytes": gpu_bytes,
            **environment.ran_on(device_used),
            "indices": indices,
        }
    return report, first


def _check_frames(dataset: Dataset, shown: list[sheet.Sample]) -> int:
    """Compare the identity drawn into each frame with the frame's row. Return the number of frames."""
    for number, camera in enumerate(dataset.cameras):
        try:
            identities = read_identities(np.concatenate([sample.strips[number].data for sample in shown])).tolist()
        except ValueError as error:
            raise DecodeError(
                f"{camera}: a frame of the first batch is damaged: {error}. Try --decode torchcodec, and please report it"
            ) from error
        for sample, (episode, frame, _) in zip(shown, identities, strict=True):
            if (episode, frame) != (sample.episode, sample.frame):
                raise DecodeError(
                    f"{camera}: episode {sample.episode}, frame {sample.frame} was requested, and frame {frame} of episode "
                    f"{episode} was delivered. Try --decode torchcodec, and please report it"
                )
    return len(shown) * len(dataset.cameras)

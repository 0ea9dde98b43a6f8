"""Output that the example pipelines share."""

from __future__ import annotations

import time

import dali_stream


def show(loader: dali_stream.Loader, batches: int) -> None:
    """Stream some batches of one epoch, and print the routes, the keys and shapes of the first batch, and the rate."""
    with loader:
        for camera, route in loader.routes.items():
            print(f"{camera} by {route.decoder}: {route.reason}")
        started, samples = time.perf_counter(), 0
        for number, batch in enumerate(loader, start=1):
            samples += len(batch["index"])
            if number == 1:
                for key, value in batch.items():
                    is_tensor = hasattr(value, "shape")
                    print(f"{key}: {tuple(value.shape)} {value.dtype}" if is_tensor else f"{key}: {value[0]!r}, ...")
            if number == batches:
                break
        print(f"{samples / (time.perf_counter() - started):.0f} samples/s, the first batch included")

"""This package's Loader. With the same seed, its order equals the recorded one, which the check of the rows verifies."""

from __future__ import annotations

from collections.abc import Iterator

from serve import Batch, Spec, serve

import dali_stream


def batches(spec: Spec) -> Iterator[Batch]:
    chosen = {key: spec[key] for key in ("batch_size", "delta_timestamps", "seed", "device")} | {"num_threads": spec["threads"]}
    size = tuple(spec["image_size"]) if spec["image_size"] else None
    with dali_stream.Loader(spec["root"], image_size=size, **chosen) as loader:
        while True:
            yield from loader


if __name__ == "__main__":
    serve(batches, ["dali-stream", "torchcodec"], ["nvidia.dali.fn", "nvidia.dali.plugin.pytorch", "torchcodec.decoders"])

"""Compare Loaders that decode on NVDEC with Loaders that decode on the CPU, in turns.

    python benchmarks/nvdec_loaders.py NAME=ROOT [NAME=ROOT ...] [--decode torchcodec-cuda torchcodec auto] [--image-size HxW]
                                       [--threads 7 8 14 16] [--batch-size 8 64] [--memory-budget 16GiB 64MiB]
                                       [--gpu-cache 4GiB] [--rounds 2] [--out FILE]

Each turn opens a Loader and measures two epochs of it, and then the first epoch of a second Loader, which finds the libraries
loaded and NVDEC's decoders open. In a first epoch, each frame is decoded once. In a second one, frames are copied from memory
if memory_budget holds all of them; with 64 MiB, most frames are decoded for each batch. For each epoch, the report has the
frames per second and the number of cores in use, both from the first batch on, and the growth of counters and times in
`stats()` over the whole epoch. See `Loader.stats`: the times of decode threads are added up over the threads. `--device cpu`
serves only to test this program, and leaves out NVDEC.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
from argument_types import count
from program import Rows, on_gpu

import dali_stream
from dali_stream.checks.frame_size import frame_size
from dali_stream.system import cpu
from dali_stream.tools import environment

STATS = (
    *("clips", "decoded_frames", "read_s", "pack_s", "decode_s", "resize_s", "plan_s", "rows_s", "gather_s", "graph_s"),
    *("starved_s", "decode_cpu_s", "plan_cpu_s", "copy_cpu_s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("data", nargs="+", metavar="NAME=ROOT")
    parser.add_argument("--decode", nargs="+", default=["torchcodec-cuda", "torchcodec", "auto"])
    parser.add_argument("--image-size", type=frame_size, metavar="HxW", help="default: the recorded size")
    parser.add_argument("--threads", type=count, nargs="+", default=[cpu.cores()], help="decode threads")
    parser.add_argument("--batch-size", type=count, nargs="+", default=[64])
    parser.add_argument("--memory-budget", nargs="+", default=["16GiB", "64MiB"])
    parser.add_argument("--gpu-cache", metavar="SIZE", help="memory of the GPU for decoded frames; default: none")
    parser.add_argument("--rounds", type=count, default=2)
    arguments = on_gpu(parser)
    rows, datasets = Rows(arguments), [each.partition("=")[::2] for each in arguments.data]
    decoders = arguments.decode if arguments.gpu is not None else ["torchcodec"]
    for _, budget, batch_size, threads, (name, root), decode in itertools.product(
        range(arguments.rounds), arguments.memory_budget, arguments.batch_size, arguments.threads, datasets, decoders
    ):
        options = {"decode": decode, "num_threads": threads, "batch_size": batch_size, "memory_budget": budget}
        row: dict[str, Any] = {"data": name, **options}
        try:
            same = {"device": arguments.device, "image_size": arguments.image_size, "gpu_cache": arguments.gpu_cache}
            row |= measure(root, options | same)
        except (ValueError, dali_stream.DaliStreamError) as error:
            row["error"] = str(error)
        rows.add(row)


def measure(root: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the measurements of two epochs and of the first epoch of a second Loader, and the routes."""
    started = time.perf_counter()
    with opened(root, options) as loader:
        row: dict[str, Any] = {"open_s": round(time.perf_counter() - started, 2)}
        row |= {"first": epoch(loader, options["device"]), "second": epoch(loader, options["device"])}
        row["routes"] = {route.decoder: route.reason for route in loader.routes.values()}
        row["route_changes"] = loader.stats()["route_changes"]
    with opened(root, options) as loader:
        return row | {"first of a second Loader": epoch(loader, options["device"])}


def opened(root: str, options: dict[str, Any]) -> dali_stream.Loader:
    return dali_stream.Loader(root, rank=0, world_size=1, image_dtype="uint8", **options)


def epoch(loader: dali_stream.Loader, device: str) -> dict[str, float]:
    """Measure an epoch."""
    before, batches, frames = loader.stats(), iter(loader), 0
    next(batches)
    began, used = time.perf_counter(), environment.cpu_s()
    for batch in batches:
        frames += len(batch["index"]) * len(loader.dataset.cameras)
    if device != "cpu":
        torch.cuda.synchronize(device)
    seconds, after = time.perf_counter() - began, loader.stats()
    rates = {"frames_per_s": round(frames / seconds), "cores": round((environment.cpu_s() - used) / seconds, 2)}
    return rates | {key: round(after[key] - before[key], 3) for key in STATS}


if __name__ == "__main__":
    main()

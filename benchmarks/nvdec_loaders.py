"""Compare Loaders that decode on NVDEC with Loaders that decode on the CPU, in turns.

    python benchmarks/nvdec_loaders.py NAME=ROOT [NAME=ROOT ...] [--image-size HxW] [--threads 4 16] [--rounds 2] [--out FILE]

Each turn opens a Loader and times two epochs of it, from the first batch on. In the first epoch, each frame is decoded once. In
the second one, frames are copied from memory if memory_budget holds all of them. A turn with "decodes all" has a memory_budget
of 64 MiB, so most frames are decoded for each batch. The report also has the number of cores in use, and the time to open the
Loader. `--device cpu` serves only to test this program, and leaves out NVDEC.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from argument_types import count
from program import Rows, on_gpu

import dali_stream
from dali_stream.checks.frame_size import frame_size
from dali_stream.system import cpu

LITTLE = "64MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("data", nargs="+", metavar="NAME=ROOT")
    parser.add_argument("--decode", nargs="+", default=["torchcodec-cuda", "torchcodec", "auto"])
    parser.add_argument("--image-size", type=frame_size, metavar="HxW", help="default: the recorded size")
    parser.add_argument("--threads", type=count, nargs="+", default=[cpu.cores()], help="decode threads")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--memory-budget", default="16GiB")
    parser.add_argument("--rounds", type=count, default=2)
    arguments = on_gpu(parser)
    rows = Rows(arguments)
    datasets = [each.partition("=")[::2] for each in arguments.data]
    decoders = arguments.decode if arguments.gpu is not None else ["torchcodec"]
    budgets = arguments.memory_budget, LITTLE
    for _, (name, root), threads, budget, decode in itertools.product(
        range(arguments.rounds), datasets, arguments.threads, budgets, decoders
    ):
        row = {"data": name, "decode": decode, "threads": threads, "decodes all": budget == LITTLE}
        try:
            row |= measure(Path(root), decode, threads, budget, arguments)
        except (ValueError, dali_stream.DaliStreamError) as error:
            row["error"] = str(error)
        rows.add(row)


def measure(root: Path, decode: str, threads: int, budget: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the frames per second of two epochs, the cores in use, and the routes."""
    started, device = time.perf_counter(), arguments.device
    dataset = dali_stream.Dataset(root)
    with dali_stream.Loader(
        dataset, batch_size=arguments.batch_size, device=device, decode=decode, num_threads=threads, rank=0, world_size=1,
        image_size=arguments.image_size, image_dtype="uint8", memory_budget=budget,
    ) as loader:  # fmt: skip
        row: dict[str, Any] = {"open_s": round(time.perf_counter() - started, 2)}
        for epoch in ("first", "second"):
            decoded, batches = loader.stats()["decoded_frames"], iter(loader)
            next(batches)
            begun, cpu, frames = time.perf_counter(), time.process_time(), 0
            for batch in batches:
                frames += len(batch["index"]) * len(dataset.cameras)
            if device != "cpu":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begun
            row[epoch] = {
                "frames_per_s": round(frames / seconds),
                "cores": round((time.process_time() - cpu) / seconds, 2),
                "decoded": loader.stats()["decoded_frames"] - decoded,
            }
        routes = {route.decoder: route.reason for route in loader.routes.values()}
        return row | {"routes": routes, "route_changes": loader.stats()["route_changes"]}


if __name__ == "__main__":
    main()

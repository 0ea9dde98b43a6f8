"""Measure speed and correctness of the DALI route with each setting of DALI's executor, on an idle and on a busy GPU.

    python benchmarks/gpu_settings.py ROOT [--device cuda] [--threads 4 8 16] [--seconds 3] [--out FILE]

A setting consists of the CUDA streams (one for all operators, one per backend, or one per operator) and the concurrency
(whether independent operators, such as the decoders of two cameras, run at the same time). For each setting, and for
torchcodec, the report contains the frames/s of the Loader on an idle GPU, and on a GPU that multiplies matrices. For DALI, it
also contains the number of frames that differ from those of torchcodec. This comparison holds some batches for several steps,
which shows whether their memory is overwritten. See `dali_stream/tools/selftest/load.py`. `--device cpu` serves only to
test this program.

The program has not been run on a GPU yet. The Loader uses one stream until this program shows that more streams are faster, and
that all frames are correct.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from argument_types import count, not_negative
from nvidia.dali.pipeline import OperatorConcurrency, StreamPolicy
from program import Rows, on_gpu

import dali_stream
from dali_stream.decode import dali
from dali_stream.decode.route import TORCHCODEC_CUDA
from dali_stream.decode.torchcodec_cuda import unavailable
from dali_stream.system import cpu
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import endless, take
from dali_stream.tools.selftest import load

SETTINGS = [  # safest first, since a crash ends the program, and the report then contains only the settings before it
    (StreamPolicy.SINGLE, OperatorConcurrency.BACKEND),
    (StreamPolicy.SINGLE, OperatorConcurrency.FULL),
    (StreamPolicy.PER_BACKEND, OperatorConcurrency.BACKEND),
    (StreamPolicy.PER_BACKEND, OperatorConcurrency.FULL),
    (StreamPolicy.PER_OPERATOR, OperatorConcurrency.FULL),
]

_BUDGET = "16MiB"  # holds few decoded frames; if it held all of them, torchcodec would decode only in the first epoch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", type=Path, help="a local LeRobot v3 dataset with video that DALI decodes here")
    parser.add_argument(
        "--threads", type=count, nargs="+", default=[cpu.cores()], help="decode threads; each value is measured"
    )
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--seconds", type=not_negative, default=3.0, help="duration of each measurement")
    arguments = on_gpu(parser)
    rows = Rows(arguments)
    routes = [("dali", *setting) for setting in SETTINGS] + [("torchcodec", *SETTINGS[0])]
    if arguments.gpu is not None and not unavailable(arguments.gpu):
        routes.insert(1, (TORCHCODEC_CUDA, *SETTINGS[0]))
    for decode, dali.STREAMS, dali.CONCURRENCY in routes:
        head = {"decode": decode, "streams": dali.STREAMS.name, "concurrency": dali.CONCURRENCY.name}
        for threads in arguments.threads:
            rows.add({**head, "threads": threads, **rates(arguments, decode, threads)}, "frames_per_s")
        if decode == "dali":
            rows.add(head | load.lockstep(str(arguments.root), arguments.device, arguments.seconds), "lockstep")
    return 1 if any(row["wrong"] for row in rows.report["lockstep"]) else 0


def rates(arguments: argparse.Namespace, decode: str, threads: int) -> dict[str, Any]:
    """Return the frames/s on an idle and on a busy device, and the GPU memory in use, in bytes.

    On a CPU, only the frames/s on the idle device are measured.
    """
    dataset, device = dali_stream.Dataset(arguments.root), arguments.device
    with dali_stream.Loader(
        dataset, batch_size=arguments.batch_size, device=device, decode=decode, num_threads=threads, rank=0, world_size=1,
        memory_budget=_BUDGET,
    ) as loader:  # fmt: skip
        batches = endless(loader)
        frames_per_s: dict[str, Any] = {"idle": None, "busy": None}
        for name, work in (("idle", None), ("busy", None if device == "cpu" else load.work(device))):
            if name == "busy" and work is None:
                break
            take(batches, 5)
            started, number = time.perf_counter(), 0
            while not number or time.perf_counter() - started < arguments.seconds:
                take(batches, 1)
                number += 1
                if work is not None:
                    work()
            if device != "cpu":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
            frames_per_s[name] = round(number * arguments.batch_size * len(dataset.cameras) / seconds)
    return {**frames_per_s, "gpu_bytes": environment.gpu_bytes_used(arguments.gpu)}


if __name__ == "__main__":
    sys.exit(main())

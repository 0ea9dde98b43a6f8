"""Compare the speed of the Loader with floors, which are programs that do only a part of its work, such as decoding.

    python benchmarks/decode_floor.py URI [--mode single|sarm] [--decode torchcodec|dali] [--device cuda] [--batch-size 64]
                                      [--batches 30] [--image-size 224 224] [--rounds 5] [--json]

The floor "files" consists of one thread per core. The threads decode every frame of the files once, in file order, and resize
it. See files_floor.py. It is compared with the first epoch of the Loader, which delivers float32 frames of the same size. If
`memory_budget` holds all frames, later epochs decode nothing. They are compared with the floor "gather", which only copies
frames and converts them to float32. See gather_floor.py. With `--decode dali`, the only floor is that of DALI's decoder. See
nvdec_floor.py.

With `--mode sarm`, a sample is a window of 8 frames of each camera, 1 s apart. The Loader and the floors run in turns. Each
round uses a new Loader, which is timed after its first batch. On a virtual machine, the host may provide memory only when it is
first written. Before each Loader, as much memory as its cache takes is therefore written and freed. `first_touch_ms_per_mb` is
the time that this takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import files_floor
import gather_floor
import numpy as np
import nvdec_floor
import program
from argument_types import count
from host_memory import cached_bytes, provide

import dali_stream
from dali_stream.checks.frame_size import frame_size
from dali_stream.system import process
from dali_stream.system.process import cores
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import endless, take, windows

LATER = 4  # number of epochs after the first that are timed, since one may take only a tenth of a second
AHEAD = 20  # number of batches, which is more than the Loader prepares in advance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", help="a local LeRobot v3 dataset")
    parser.add_argument("--mode", choices=("single", "sarm"), default="single", help="single frames, or windows of 8")
    parser.add_argument("--decode", choices=("torchcodec", "dali"), default="torchcodec", help="dali: NVDEC on a GPU")
    parser.add_argument("--device", default="cpu", help="device of the loader: cpu, cuda or cuda:N")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--batches", type=count, default=30, help="batches per turn of dali, and a tenth of those of gather")
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--rounds", type=count, default=5, help="rounds; the report has the median of their ratios")
    parser.add_argument("--threads", type=count, default=cores(), help="threads of the floors, and of the loader")
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [
        f"{name}: floor {part['floor_frames_per_s']:.0f} frames/s, loader {part['loader_frames_per_s']:.0f}, "
        f"ratio {part['ratio']:.3f}"
        for name in ("dali", "files", "gather")
        if (part := result.get(name))
    ]
    if "files" in result:
        lines += [
            "decoded frames per delivered frame: {:.2f} and {:.2f}".format(*result["decoded_per_frame"]),
            f"wait for a batch: median {result['wait_p50_ms']:.1f} ms, p99 {result['wait_p99_ms']:.1f} ms",
            f"memory that is touched for the first time: {result['first_touch_ms_per_mb']:.2f} ms per MB",
        ]
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the Loader and its floors in turns."""
    dataset = dali_stream.Dataset(arguments.uri)
    if not dataset.videos:
        raise ValueError(f"dataset must have a camera with video, got {dataset.uri} without one")
    measured = measure_dali if arguments.decode == "dali" else measure_cpu
    deltas = windows(arguments.mode, dataset)
    per_batch = arguments.batch_size * sum(len(deltas.get(camera, [0])) for camera in dataset.videos)
    figures = measured(dataset, deltas, per_batch, arguments)
    return {**figures, "frames_per_batch": per_batch, "peak_rss_bytes": environment.peak_rss(), "dataset": dataset.uri}


def measure_cpu(
    dataset: dali_stream.Dataset, deltas: dict[str, list[float]], per_batch: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Time the Loader and the floors of the CPU in turns. `per_batch` is the number of frames of a batch."""
    size, work = arguments.image_size, files_floor.parts(dataset, arguments.threads)
    # 2 GB of frames are enough, since they exceed the cache of any processor.
    cached = min(dataset.num_frames * len(dataset.videos), int(2e9 / np.prod([*size, 3])))
    files, gather, first, later = list[float](), list[float](), list[float](), list[float]()
    touching, decoded, waits = list[float](), list[tuple[float, float]](), list[float]()
    for _ in range(arguments.rounds):
        files.append(files_floor.torchcodec_rate(work, size))
        gather.append(gather_floor.gather_rate(cached, size, per_batch, 10 * arguments.batches, arguments.threads))
        touching.append(provide(cached_bytes(dataset, size)))
        with new_loader(dataset, arguments, deltas, image_size=size) as loader:
            stats = [loader.stats()]
            first.append(per_batch / mean_wait(loader, waits))
            stats.append(loader.stats())
            later.append(per_batch / statistics.mean(mean_wait(loader, []) for _ in range(LATER)))
            stats.append(loader.stats())
            decoded.append((decoded_per_frame(*stats[:2]), decoded_per_frame(*stats[1:])))
            routes = {key: dataclasses.asdict(route) for key, route in loader.routes.items()}
    return {
        "files": rates(first, files),
        "gather": rates(later, gather),
        "decoded_per_frame": [statistics.median(values) for values in zip(*decoded, strict=True)],
        "wait_p50_ms": float(np.percentile(waits or [0], 50) * 1e3),
        "wait_p99_ms": float(np.percentile(waits or [0], 99) * 1e3),
        "first_touch_ms_per_mb": statistics.median(touching),
        "routes": routes,
    }


def rates(loader: list[float], floor: list[float]) -> dict[str, Any]:
    """Return the median rates of the Loader and of a floor, and the median of their ratios.

    Each ratio compares two turns in succession, since the load by other programs changes over time.
    """
    return {
        "ratio": statistics.median(loader_rate / floor_rate for loader_rate, floor_rate in zip(loader, floor, strict=True)),
        "floor_frames_per_s": statistics.median(floor),
        "loader_frames_per_s": statistics.median(loader),
        "floor_rounds": floor,
        "loader_rounds": loader,
    }


def new_loader(
    dataset: dali_stream.Dataset, arguments: argparse.Namespace, deltas: dict[str, list[float]], **options: Any
) -> dali_stream.Loader:
    return dali_stream.Loader(
        dataset, batch_size=arguments.batch_size, delta_timestamps=deltas, num_threads=arguments.threads,
        decode=arguments.decode, device=arguments.device, **options,
    )  # fmt: skip


def mean_wait(loader: dali_stream.Loader, waits: list[float]) -> float:
    """Return the mean time per batch of an epoch after its first batch, in seconds.

    The times of these batches, except for the first 20, are appended to `waits`.
    """
    batches = iter(loader)
    next(batches)
    times = [time.perf_counter(), *(time.perf_counter() for _ in batches)]
    waits += np.diff(times)[20:].tolist()
    return (times[-1] - times[0]) / max(len(times) - 1, 1)


def measure_dali(
    dataset: dali_stream.Dataset, deltas: dict[str, list[float]], per_batch: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Time the Loader and the floor of DALI's decoder in turns. `per_batch` is the number of frames of a batch."""
    batches = min(arguments.batches, dataset.num_frames // arguments.batch_size)
    with new_loader(dataset, arguments, deltas, image_dtype="uint8") as loader:
        gpu, per_frame = process.gpu(arguments.device), lambda: decoded_per_frame(began, loader.stats())
        floor_rate = nvdec_floor.make(dataset, gpu, arguments.threads, per_frame)
        stream = endless(loader)
        take(stream, AHEAD)
        settle(loader)
        began = loader.stats()
        floor, loader_rates = [], []
        for _ in range(arguments.rounds):
            take(stream, AHEAD)
            settle(loader)
            floor.append(floor_rate())
            take(stream, AHEAD)  # batches that were prepared in advance do not belong to this turn
            started = time.perf_counter()
            take(stream, batches)
            loader_rates.append(batches * per_batch / (time.perf_counter() - started))
        settle(loader)
        routes = {key: dataclasses.asdict(route) for key, route in loader.routes.items()}
        return {"dali": rates(loader_rates, floor), "decoded_per_frame": per_frame(), "routes": routes}


def decoded_per_frame(before: dict[str, Any], now: dict[str, Any]) -> float:
    """Return the number of decoded frames per delivered frame between two statistics of a Loader.

    At both times, the Loader must have prepared all batches that it prepares in advance. Otherwise, decoded frames that are not
    delivered yet distort the result.
    """
    return float((now["decoded_frames"] - before["decoded_frames"]) / (now["frames"] - before["frames"]))


def settle(loader: dali_stream.Loader) -> None:
    """Wait until the Loader has prepared all batches that it prepares in advance, so that it uses no core afterwards."""
    before = -1
    while (now := loader.stats()["decoded_frames"]) != before:
        before = now
        time.sleep(0.5)  # longer than a decode task


if __name__ == "__main__":
    sys.exit(main())

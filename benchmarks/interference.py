"""Measure how much longer a training step takes beside a Loader, and compare a Loader in this process with its own process.

    python benchmarks/interference.py [--cases 100:64 16:80] [--threads 16] [--decode-ms 2.3] [--seconds 4] [--rounds 3]
                                      [--episodes 12] [--uri ../shared/data/g1] [--report FILE]

A step consists of many small torch calls, which take the given time in ms. Each step gets one batch with the given number of
uint8 frames of 224×224. It does not read the frames. The training thread has the first core, and all others have the rest. The
decoder sleeps instead of decoding, as in overhead.py. In each round, these sides take turns:

batch in memory  the same batch again and again
in process       Loader(in_process=True)
own process      Loader(in_process=False)
DataLoader       torch's DataLoader with 4 workers, which collates batches of the same size from samples in memory

Each value is the median of the rounds. `ratio` and `step_ratio` are divided by the value of the batch in memory.

ratio       median time of a step and of waiting for its batch
step_ratio  median time of a step
blocked     share of the time of the steps in which the training thread did not run
cpu_ms      CPU time of the training process per batch, without the steps, in ms

Then the Loaders decode the dataset `--uri`, or the demo dataset without one, as fast as they can. With windows, a sample has 8
frames, 1 s apart. The first batch is timed from the call of the constructor. torch is imported then in this process, but not
yet in the other one. The memory of the own process is its resident memory before the first batch and after it, with frames that
are so small that they do not count.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import program
import psutil
import torch
from argument_types import count, new_file, positive
from host_memory import cached_bytes, provide
from overhead import SIZE, SleepingDataset
from torch.utils.data import DataLoader, default_collate

import dali_stream
from dali_stream.demo import write_demo
from dali_stream.system.cpu import cores
from dali_stream.tools.bench.measure import endless, take, windows

RECORDING = Path(__file__).parents[2] / "shared/data/g1"
MEMORY, WORKERS = "batch in memory", "DataLoader"
LOADERS = {"in process": True, "own process": False}  # {side: argument in_process}
MODES = ("single", "sarm")  # frames of a sample when the Loaders decode
LATER = 3  # epochs after the first one that are timed


def case(text: str) -> tuple[float, int]:
    """Parse the duration of a step in ms, and the number of frames per step."""
    step_ms, _, frames = text.partition(":")
    return positive(step_ms), count(frames)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=case, nargs="*", default=[(100.0, 64), (16.0, 80)], metavar="MS:FRAMES")
    parser.add_argument("--threads", type=count, default=16, help="decode threads beside the steps")
    parser.add_argument("--decode-ms", type=positive, default=2.3, help="time that decoding a frame takes beside the steps")
    parser.add_argument("--memory-budget", default="64MiB", help="of the Loaders beside the steps")
    parser.add_argument("--seconds", type=positive, default=4, help="duration of each measurement of steps")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--episodes", type=count, default=12, help="episodes of about 100 frames in the demo dataset")
    parser.add_argument("--uri", default=str(RECORDING) if RECORDING.exists() else None, help="local dataset to decode")
    parser.add_argument("--report", type=new_file, dest="out", help="file for the report as JSON")
    parser.set_defaults(device="cpu")
    rows = program.Rows(arguments := parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        demo = write_demo(Path(folder) / "demo", episodes=arguments.episodes, size=SIZE)
        decoded = dali_stream.Dataset(arguments.uri or demo)
        rows.add(memory_of_the_process(decoded), "memory")
        for mode in MODES:
            rows.add(compare_rates(decoded, mode, arguments.rounds), "rates")
        torch.set_num_threads(1)  # the training thread has one core
        dataset = SleepingDataset(demo, arguments.decode_ms / 1e3, dali_stream.Dataset(demo).cameras[:1])
        for step_ms, frames in arguments.cases:
            for row in compare_steps(dataset, step_ms, frames, arguments):
                rows.add(row)
    print(as_text(rows.report))
    return 0


def as_text(report: dict[str, Any]) -> str:
    """Return the report as tables."""
    lines = ["side              step  frames/s   ratio  step_ratio  blocked   cpu_ms"]
    lines += [
        f"{row['side']:15} {row['step_ms']:6.1f} {row['frames_per_s']:9.0f} {row['ratio']:7.3f} {row['step_ratio']:11.3f} "
        f"{row['blocked']:8.4f} {row['cpu_ms']:8.3f}"
        for row in report["rows"]
    ]
    for row in report["rates"]:
        for name, by_side in row["medians"].items():
            sides = ", ".join(f"{side} {value:.6g}" for side, value in by_side.items())
            lines.append(f"{row['mode']} {name}: {sides}; own process / in process {row['ratios'][name]:.3f}")
    [memory] = report["memory"]
    return "\n".join([*lines, "memory of the own process, MB: {imported:.0f} and {with_a_batch:.0f}".format(**memory)])


def compare_steps(
    dataset: dali_stream.Dataset, step_ms: float, frames: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row per side for a step of `step_ms` with a batch of `frames` frames."""
    camera, all_cores = dataset.cameras[0], os.sched_getaffinity(0)
    first, *rest = sorted(all_cores)
    options = {
        "batch_size": frames, "image_size": SIZE, "image_dtype": "uint8", "device": "cpu",
        "num_threads": arguments.threads, "memory_budget": arguments.memory_budget,
    }  # fmt: skip
    with dali_stream.Loader(dataset, **options, in_process=True) as loader:
        kept = {key: value.clone() if torch.is_tensor(value) else value for key, value in next(iter(loader)).items()}

    def batches_of(side: str, stack: ExitStack) -> Iterator[Any]:
        if side == MEMORY:
            return itertools.repeat(kept)
        if side == WORKERS:
            samples = [{key: values[number] for key, values in kept.items()} for number in range(len(kept[camera]))]
            indices: Any = itertools.cycle(range(len(samples)))
            return iter(DataLoader(samples, len(samples), sampler=indices, num_workers=4, collate_fn=default_collate))  # type: ignore[arg-type]
        loader = stack.enter_context(dali_stream.Loader(dataset, **options, in_process=LOADERS[side]))
        return endless(loader)

    found: dict[str, list[dict[str, float]]] = {MEMORY: [], **{side: [] for side in LOADERS}, WORKERS: []}
    step = None
    for _ in range(arguments.rounds):
        for side, rounds in found.items():
            with ExitStack() as stack:
                os.sched_setaffinity(0, rest or [first])  # of this thread, and of all that it starts
                batches = batches_of(side, stack)
                take(batches, dataset.num_frames // frames)
                if bool(psutil.Process().children()) == (side in (MEMORY, "in process")):
                    raise RuntimeError(f"{side}: another process makes the batches")
                os.sched_setaffinity(0, [first])
                step = step or step_of(step_ms / 1e3)
                rounds.append(measured(batches, step, arguments.seconds))
                del batches  # ends the workers
    os.sched_setaffinity(0, all_cores)
    rows = []
    for side, rounds in found.items():
        row: dict[str, Any] = {"case": f"{step_ms:g} ms, {frames} frames", "side": side}
        row |= program.medians(rounds)
        for name, key in (("ratio", "total_ms"), ("step_ratio", "step_ms")):
            row[name] = statistics.median(each[key] / base[key] for each, base in zip(rounds, found[MEMORY], strict=True))
        rows.append({**row, "frames_per_s": frames * 1e3 / row["total_ms"], "rounds": rounds})
    return rows


def step_of(seconds: float) -> Callable[[], None]:
    """Return a step of small torch calls that uses this much time of a core."""
    values, weight = torch.rand(16, 16), torch.rand(16, 16)

    def calls(number: int) -> None:
        for _ in range(number):
            torch.mm(values, weight)

    times = []
    for _ in range(20):
        began = time.thread_time()
        calls(1000)
        times.append((time.thread_time() - began) / 1000)
    number = round(seconds / statistics.median(times))
    return lambda: calls(number)


def measured(batches: Iterator[Any], step: Callable[[], None], seconds: float) -> dict[str, float]:
    """Measure steps with their batches."""
    totals, steps, ran = [], [], []
    until, process = time.perf_counter() + seconds, time.process_time()
    while (began := time.perf_counter()) < until:
        _batch = next(batches)
        received, used = time.perf_counter(), time.thread_time()
        step()
        ended = time.perf_counter()
        ran.append(time.thread_time() - used)
        totals.append(ended - began)
        steps.append(ended - received)
    return {
        "step_ms": statistics.median(steps) * 1e3,
        "total_ms": statistics.median(totals) * 1e3,
        "blocked": 1 - sum(ran) / sum(steps),
        "cpu_ms": (time.process_time() - process - sum(ran)) / len(steps) * 1e3,
    }


def compare_rates(dataset: dali_stream.Dataset, mode: Any, rounds: int) -> dict[str, Any]:
    """Return the rates of both Loaders in frames/s, and the time until their first batch."""
    names = ("first batch, s", "first epoch, frames/s", "later epochs, frames/s")
    found: dict[str, dict[str, list[float]]] = {name: {side: [] for side in LOADERS} for name in names}
    options = {
        "batch_size": 64 if mode == "single" else 8, "delta_timestamps": windows(mode, dataset), "image_size": SIZE,
        "device": "cpu", "num_threads": cores(),
    }  # fmt: skip
    for number in range(rounds):
        for side in list(LOADERS)[:: 1 if number % 2 == 0 else -1]:
            provide(cached_bytes(dataset, SIZE))
            began = time.perf_counter()
            with dali_stream.Loader(dataset, **options, in_process=LOADERS[side]) as loader:
                made_s = time.perf_counter() - began
                rates = [program.epoch_rate(loader) for _ in range(1 + LATER)]
            for name, value in zip(
                names, (made_s + loader.stats()["first_batch_s"], rates[0], statistics.median(rates[1:])), strict=True
            ):
                found[name][side].append(value)
    ratios = {
        name: statistics.median(own / here for here, own in zip(*by_side.values(), strict=True))
        for name, by_side in found.items()
    }
    medians = {name: {side: statistics.median(values) for side, values in by_side.items()} for name, by_side in found.items()}
    return {"mode": mode, "dataset": dataset.uri, "medians": medians, "ratios": ratios, "rounds": found}


def memory_of_the_process(dataset: dali_stream.Dataset) -> dict[str, float]:
    """Return the resident memory of a Loader's process in MB, without and with a batch of small frames."""
    before = set(psutil.Process().children())
    with dali_stream.Loader(dataset, batch_size=8, image_size=(32, 32), device="cpu", in_process=False) as loader:
        [process] = set(psutil.Process().children()) - before
        imported, used = 0, -1.0
        while process.cpu_times().user != used:  # it imports torch and torchcodec, and then waits
            imported, used = process.memory_info().rss, process.cpu_times().user
            time.sleep(2)
        batches = iter(loader)
        next(batches)
        return {"imported": imported / 1e6, "with_a_batch": process.memory_info().rss / 1e6}


if __name__ == "__main__":
    sys.exit(main())

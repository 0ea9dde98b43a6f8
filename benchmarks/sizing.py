"""Measure the rates of docs/sizing.md, and check how well a measurement predicts other numbers of cores and ranks.

    python benchmarks/sizing.py rates g1 --folder FOLDER --report FILE
    python benchmarks/sizing.py check g1 --episodes 3 --report FILE

`rates` writes copies of the first episode in each codec, size and GOP into a folder with `dali-stream prepare`, unless they are
there. It measures each copy with `dali-stream bench`, in turns. The rates are medians of CPU seconds of the threads, so they
hardly depend on what else the machine does.

`check` measures the work of a batch with one rank on all cores, and predicts the batches per second of each rank for other
numbers of cores and ranks. Then it measures these, several times: `ranks` processes that run on the same `cores` cores. The
report has the share of predictions whose range contains the measured rate. The rates say something about an idle machine only
if `others`, the share of the cores that other processes used, is small. The CPU seconds of a batch can be compared anyway.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from argument_types import count, new_file

from dali_stream import Dataset, Loader
from dali_stream.errors import counted
from dali_stream.system.process import cores
from dali_stream.tools import Node, environment, prepare
from dali_stream.tools.bench import run
from dali_stream.tools.decodes import decodes_of
from dali_stream.tools.measuring import ROUNDS, Clock, Measurement, cpu_seconds
from dali_stream.tools.sizing import MODEL_ERROR, prediction_range

CODECS, GOPS, SIZES = ("h264", "hevc", "av1", "vp9"), (2, 30), ((480, 640), (224, 224))
BATCH_SIZE = 16
LOADER: dict[str, Any] = {"batch_size": BATCH_SIZE, "image_size": (224, 224), "image_dtype": "uint8", "device": "cpu"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rates_parser = commands.add_parser("rates", help="Rates of codecs, sizes and GOPs.")
    rates_parser.add_argument("--folder", type=Path, required=True, help="Folder for the copies, which are kept.")
    rates_parser.add_argument("--rounds", type=count, default=5)
    check_parser = commands.add_parser("check", help="Predictions for other numbers of cores and ranks.")
    check_parser.add_argument("--episodes", type=count, default=3, help="Number of episodes.")
    check_parser.add_argument("--repeat", type=count, default=5, help="Measurements of each case.")
    for each in (rates_parser, check_parser):
        each.add_argument("dataset", help="A local dataset.")
        each.add_argument("--report", type=new_file, help="JSON file to write.")
    worker_parser = commands.add_parser("worker")
    worker_parser.add_argument("dataset")
    worker_parser.add_argument("--episodes", type=count)
    arguments = parser.parse_args()
    if arguments.command == "worker":
        worker(arguments.dataset, arguments.episodes)
        return 0
    if arguments.command == "rates":
        report = rates(arguments.dataset, arguments.folder, arguments.rounds)
    else:
        report = check(arguments.dataset, arguments.episodes, arguments.repeat)
    report |= environment.ran_on("cpu")
    if arguments.report:
        environment.write_report(arguments.report, report)
    return 0


def rates(source: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the CPU milliseconds of each encoding: medians, and the smallest and the largest."""
    copies = {}
    for size, codec, gop in itertools.product(SIZES, CODECS, GOPS):
        copy = folder / f"{codec}-{size[0]}x{size[1]}-gop{gop}"
        if not (copy / "meta" / "info.json").exists():
            prepare(source, copy, size=size, codec=codec, gop=gop, episodes=[0], jobs=1)
        copies[size, codec, gop] = copy
    measured: dict[tuple[Any, ...], list[dict[str, float]]] = {key: [] for key in copies}
    for number in range(rounds):
        for key, copy in list(copies.items())[:: -1 if number % 2 else 1]:
            with contextlib.closing(Dataset(copy)) as dataset:
                report = run(dataset, "single", 10, 2, LOADER, "cpu", {"source": None}, lambda *_: None)
            assert report is not None
            measured[key].append(report["cpu_ms"])
    found = []
    for (size, codec, gop), rows in measured.items():
        decoding = sorted(row["decoded_frame"] for row in rows)
        found.append(
            {
                "codec": codec,
                "recorded": size,
                "gop": gop,
                "decode_ms": statistics.median(decoding),
                "decode_ms_range": [decoding[0], decoding[-1]],
                "copy_ms": statistics.median(row["delivered_frame"] for row in rows),
                "plan_ms": statistics.median(row["sample"] for row in rows),
            }
        )
        print(f"{codec} {size[0]}x{size[1]} GOP {gop}: {found[-1]}", flush=True)
    return {"dataset": source, "loader": LOADER, "rounds": rounds, "rates": found}


def check(path: str, episodes: int, repeat: int) -> dict[str, Any]:
    """Return the predicted and the measured batches per second of a rank, and CPU seconds per batch, of each case."""
    cases: list[dict[str, Any]] = []
    with contextlib.closing(Dataset(path, episodes=list(range(episodes)))) as dataset:
        clock, measurement = Clock(LOADER), Measurement("", dataset, Node(1, cores(), 1.0, 0.0))
        for _ in range(ROUNDS):
            clock.measure(measurement)
        print(f"measured with {cores()} cores and 1 rank; others used {clock.busy or 0:.0%} of the cores", flush=True)
        for number_of_cores, ranks in itertools.product(sorted({1, cores()}), (1, 2)):
            with Loader(dataset, rank=0, world_size=ranks, **LOADER) as loader:
                decodes = decodes_of(loader._config, loader._config.cached(loader.routes))
            node = Node(ranks, number_of_cores, 1.0, 0.0)
            rate = [first.batches_per_s for first, _ in measurement.speeds(decodes, node=node)]
            rounds = zip(measurement.works(decodes), measurement.rounds, strict=True)
            work = [works[0].cpu / first.delay for works, (first, _) in rounds]
            cases.append(
                {
                    "cores": number_of_cores,
                    "ranks": ranks,
                    "predicted_batches_per_s": statistics.median(rate),
                    "range": prediction_range(rate, MODEL_ERROR),
                    "predicted_cpu_s": statistics.median(work),
                    "predicted_cpu_s_range": prediction_range(work, MODEL_ERROR),
                    "measured": [],
                }
            )
        for _ in range(repeat):
            for case in cases:
                case["measured"].append(measured(path, episodes, case["cores"], case["ranks"]))
    for case in cases:
        for name, key, range_key in (
            ("batches/s", "batches_per_s", "range"),
            ("CPU s a batch", "cpu_s", "predicted_cpu_s_range"),
        ):
            values, (low, high) = [each[key] for each in case["measured"]], case[range_key]
            inside, middle = sum(low <= value <= high for value in values), statistics.median(values)
            predicted = case["predicted_batches_per_s" if key == "batches_per_s" else "predicted_cpu_s"]
            case[f"{key}_inside"], case[f"{key}_error"] = inside, predicted / middle - 1
            where = f"{counted(case['cores'], 'core')}, {counted(case['ranks'], 'rank')}"
            print(
                f"{where}: predicted {predicted:.4g} ({low:.4g} to {high:.4g}) {name}, "
                f"measured {middle:.4g}, error {predicted / middle - 1:+.0%}, {inside} of {len(values)} inside",
                flush=True,
            )
    return {"dataset": path, "episodes": episodes, "loader": LOADER, "others": clock.busy, "cases": cases}


def measured(path: str, episodes: int, number_of_cores: int, ranks: int) -> dict[str, float]:
    """Return the mean batches per second and CPU seconds per batch of the ranks, and the share of other processes."""
    command = [sys.executable, __file__, "worker", path, "--episodes", str(episodes)]
    programs = []
    for rank in range(ranks):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "CORES": str(number_of_cores)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        programs.append(subprocess.Popen(command, env=os.environ | variables, **pipes))
    for program in programs:
        program.stdout.readline()  # it is ready
    began, started = cpu_seconds(), time.perf_counter()
    for program in programs:
        program.stdin.write("begin\n")
        program.stdin.flush()
    results = [json.loads(program.stdout.readline()) for program in programs]
    ended, seconds = cpu_seconds(), time.perf_counter() - started
    for program in programs:
        program.communicate()
    own = sum(result["process_cpu_s"] for result in results)
    others = 0.0 if not began or not ended else max(ended[0] - began[0] - own, 0) / seconds / cores()
    means = {key: statistics.fmean(result[key] for result in results) for key in ("batches_per_s", "cpu_s")}
    return means | {"others": others}


def worker(path: str, episodes: int) -> None:
    """Stream the first epoch as one rank on `CORES` cores, when the parent says so."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["CORES"])])
    with contextlib.closing(Dataset(path, episodes=list(range(episodes)))) as dataset, Loader(dataset, **LOADER) as loader:
        print("ready", flush=True)
        sys.stdin.readline()
        began, before = time.process_time(), loader.stats()
        seen: dict[str, Any] = {}
        for _ in loader:
            seen = seen or loader.stats()  # after the first batch, whose time includes the startup
        now = loader.stats()
        # Frames of later batches were decoded before the first one was delivered, so only a share of the batches is timed.
        timed = (now["decoded_frames"] - seen["decoded_frames"]) / (now["decoded_frames"] - before["decoded_frames"])
        seconds = sum(now[key] - seen[key] for key in ("wait_s", "training_s"))
        cpu = sum(now[key] - before[key] for key in ("decode_cpu_s", "plan_cpu_s", "copy_cpu_s"))
        result = {
            "batches_per_s": timed * now["batches"] / seconds,
            "cpu_s": cpu / now["batches"],
            "process_cpu_s": time.process_time() - began,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())

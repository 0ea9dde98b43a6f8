"""Measure how well `dali-stream why` predicts. Each remedy that is possible on this machine is applied and measured.

    python benchmarks/why.py g1=path/to/g1 franka=path/to/franka demo=.demo/dataset --report FILE

For each dataset and setting of the Loader, predictions and measurements alternate. Both are medians over the repetitions. The
error of a prediction is relative to the measured batches per second. The report also contains the spread of the measurements,
(largest - smallest) / median. The summary counts the predictions of remedies that help. First epochs that are shorter than half
a second consist mostly of the startup, which is not predicted, so they are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from argument_types import count, new_file
from host_memory import cached_bytes, provide

from dali_stream import Dataset, Loader
from dali_stream.tools import environment, prepare, why

LEAST = 1.1  # measured gain above which a remedy counts
LATER = 3  # number of epochs after the first that are measured at a time
STARTUP_S = 0.5  # duration of a first epoch below which it is not counted
LEAST_S = 1.5  # minimum duration of a measurement; short epochs are repeated, first ones by new Loaders
SETTINGS: dict[str, dict[str, Any]] = {  # arguments of the Loader, in addition to those in `cases`
    "default": {},
    "one thread": {"num_threads": 1},
    "little memory": {"memory_budget": "QUARTER"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", metavar="NAME=PATH", help="Local datasets.")
    parser.add_argument("--repeat", type=count, default=3, help="Predictions and measurements of each setting.")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--report", type=new_file, help="JSON file to write.")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"least_gain": LEAST, "repeat": arguments.repeat, "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        for named in arguments.datasets:
            name, _, path = named.partition("=")
            for setting in arguments.settings:
                report["cases"] += cases(name, path, setting, arguments.repeat, Path(folder))
    report |= summary(report["cases"]) | environment.ran_on("cpu")
    if arguments.report:
        environment.write_report(arguments.report, report)
    print({key: report[key] for key in ("counted", "median_error", "worst_error")})
    return 0


def cases(name: str, path: str, setting: str, repeat: int, folder: Path) -> list[dict[str, Any]]:
    """Return the predictions and measurements of one dataset and setting, of the first epoch and of later ones."""
    options: dict[str, Any] = {"image_size": (224, 224), "batch_size": 64, "device": "cpu"} | SETTINGS[setting]
    if options.get("memory_budget") == "QUARTER":  # a quarter of the memory of all decoded frames
        with contextlib.closing(Dataset(path)) as dataset:
            options["memory_budget"] = dataset.num_frames * len(dataset.cameras) * 224 * 224 * 3 // 4
            options["batch_size"] = min(64, dataset.num_frames // 32)
    predictions: dict[tuple[str, str], list[float]] = {}
    measured: dict[tuple[str, str], list[float]] = {}
    durations: dict[str, float] = {}  # seconds of a first epoch with each remedy
    for _ in range(repeat):
        report = why(path, loader=options, progress=lambda _: provide_for(path))  # before each of its measurements
        applied: list[tuple[str, str, dict[str, Any]]] = [("none", path, {})]
        for remedy in report.remedies:
            if remedy.prepare:
                applied.append((remedy.name, prepared(path, folder, name, remedy.prepare), {}))
            elif remedy.loader:
                applied.append((remedy.name, path, remedy.loader))
        speeds = {"none": report} | {remedy.name: remedy for remedy in report.remedies}
        for remedy_name, dataset_path, changed in applied:
            *rates, durations[remedy_name] = rate(dataset_path, options | changed)
            for epoch, measured_rate in zip(("first", "later"), rates, strict=True):
                key = remedy_name, epoch
                predictions.setdefault(key, []).append(getattr(speeds[remedy_name], epoch).batches_per_s)
                measured.setdefault(key, []).append(measured_rate)
    found = []
    for (remedy_name, epoch), rates in measured.items():
        rate_now = statistics.median(measured["none", epoch])
        predicted, middle = statistics.median(predictions[remedy_name, epoch]), statistics.median(rates)
        found.append(
            {
                "dataset": name,
                "setting": setting,
                "remedy": remedy_name,
                "epoch": epoch,
                "predicted_batches_per_s": predicted,
                "measured_batches_per_s": middle,
                "measured_gain": middle / rate_now,
                "error": predicted / middle - 1,
                "spread": (max(rates) - min(rates)) / middle,
                "counted": remedy_name != "none"
                and middle / rate_now > LEAST
                and (epoch == "later" or durations[remedy_name] > STARTUP_S),
            }
        )
        print(
            f"{name}, {setting}, {remedy_name}, {epoch}: predicted {predicted:.4g}, measured {middle:.4g} batches/s, error "
            f"{predicted / middle - 1:+.0%}, spread {found[-1]['spread']:.0%}, gain {middle / rate_now:.2f}",
            flush=True,
        )
    return found


def rate(path: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return the measured batches per second of the first epoch, those of later epochs, and the seconds of the first epoch.

    The time begins when the first batch is delivered, so it excludes the startup. In an epoch that decodes, frames of later
    batches have been decoded by then. The number of batches is therefore multiplied by the share of frames that are decoded
    in the measured time. If most frames were decoded before the first batch was delivered, as with long GOPs, all batches are
    counted, and the time includes the startup.
    """
    first, later, loaders = np.zeros(2), np.zeros(2), 0  # batches and seconds
    while first[1] < LEAST_S:
        provide_for(path)
        with Loader(path, **options) as loader:
            first, loaders = first + measured(loader, 1), loaders + 1
            while later[1] < LEAST_S:
                later = later + measured(loader, LATER)
    return float(first[0] / first[1]), float(later[0] / later[1]), float(first[1] / loaders)


def measured(loader: Loader, epochs: int) -> tuple[float, float]:
    """Return the number of batches of some epochs, and their seconds. See `rate` for what is counted."""
    before, seen = loader.stats(), dict[str, Any]()
    for _ in range(epochs):
        for _ in loader:
            seen = seen or loader.stats()
    now = loader.stats()
    decoded, decoded_then = (now["decoded_frames"] - each["decoded_frames"] for each in (before, seen))
    if decoded_then < decoded / 2:
        seen, decoded_then = before, decoded
    seconds = sum(now[key] - seen[key] for key in ("wait_s", "training_s"))
    if decoded:
        return decoded_then / decoded * (now["batches"] - before["batches"]), seconds
    return now["batches"] - seen["batches"], seconds


def provide_for(path: str) -> None:
    """Provide the memory that a Loader takes for the frames of a dataset, see `host_memory.provide`."""
    with contextlib.closing(Dataset(path)) as dataset:
        provide(cached_bytes(dataset, (224, 224)))


def prepared(path: str, folder: Path, name: str, options: dict[str, Any]) -> str:
    """Rewrite a dataset with some options, unless this was done before. Return the path of the result."""
    out = folder / f"{name} {sorted(options.items())}"
    prepare(path, out, **options)
    return str(out)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the largest error of the predictions for remedies that help."""
    errors = [abs(case["error"]) for case in found if case["counted"]]
    return {
        "counted": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
    }


if __name__ == "__main__":
    sys.exit(main())
